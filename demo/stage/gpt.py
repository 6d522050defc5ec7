"""A byte-level GPT and its text: small enough for a laptop's CPU, real enough that its loss falls.

The text is the Python standard library's own sources: nothing is downloaded. A batch is decided by (seed, step, rank)
alone: a run that goes back to step 10 sees the same bytes again, which is what lets two runs end bit-identical.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256
_TEXT_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model and of a rank's batch."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 8


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a norm before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm_feed = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_feed(x))


class ByteGPT(nn.Module):
    """Next-byte prediction: (batch, context) byte values in, (batch, context, 256) logits out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions(places))))


def standard_library_text() -> torch.Tensor:
    """The first 2 MiB of the standard library's top-level sources, in name order, as a uint8 tensor."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _TEXT_BYTES:
            break
    return torch.frombuffer(text[:_TEXT_BYTES], dtype=torch.uint8)


def batch_of(text: torch.Tensor, shape: Shape, *, seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch of one rank at one step: inputs and targets, int64, (batch, context)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
    starts = torch.randint(0, len(text) - shape.context - 1, (shape.batch,), generator=generator)
    rows = torch.stack([text[s : s + shape.context + 1] for s in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over all parameters: sorted names, each followed by its bytes."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(name.encode())
        hasher.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
