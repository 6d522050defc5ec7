"""An Accelerate loop with sdcwatch: torchrun --nproc-per-node=3 examples/accelerate_loop.py (CPU)."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sdcwatch.integrations import accelerate
from torch.nn import functional


def loss_fn(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return functional.mse_loss(model(inputs), targets)


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(96, 16), torch.randn(96, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    monitor = accelerate.watch(accelerator, model, optimizer, loss_fn, replay_every=2)  # sdcwatch
    for step, batch in enumerate(loader, 1):
        with monitor.step(step) as s, accelerator.accumulate(model):  # sdcwatch
            accelerator.backward(s.loss(batch))  # sdcwatch: s.loss(batch) for loss_fn(model, batch)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    train(accelerator)
    accelerator.free_memory()  # it holds the model too: torch may hang where DDP outlives its group
    accelerator.end_training()


if __name__ == "__main__":
    main()
