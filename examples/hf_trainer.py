"""transformers' Trainer with sdcwatch: torchrun --nproc-per-node=3 examples/hf_trainer.py (CPU, no download)."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from sdcwatch.integrations import hf
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def train() -> None:
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    tokens = torch.randint(64, (96, 16), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir="checkpoints", max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, ddp_backend="gloo", report_to=[], logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False, save_steps=2, save_total_limit=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    hf.watch(trainer, replay_every=2, checkpoint_dir=arguments.output_dir)  # sdcwatch
    trainer.train()


def main() -> None:
    train()
    gc.collect()  # a Trainer is a cycle: torch may hang where its DDP outlives the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
