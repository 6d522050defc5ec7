"""PyTorch Lightning with sdcwatch: torchrun --nproc-per-node=3 examples/lightning_trainer.py (CPU, no download)."""

from __future__ import annotations

import gc
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from sdcwatch.integrations import lightning
from torch.nn import functional


class Regression(pl.LightningModule):
    """A small model with dropout, as a user of Lightning writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train() -> None:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randn(96, 4))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=3, strategy="ddp", max_steps=8, accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=2)], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    lightning.watch(trainer, replay_every=2, checkpoint_dir="checkpoints")  # sdcwatch
    trainer.fit(Regression(), loader)


def main() -> None:
    train()
    gc.collect()  # a Trainer is a cycle: torch may hang where its DDP outlives the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
