"""The transformer whose steps are timed, on any device; sizes are chosen by width and depth."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Width, layers, heads and the longest sequence of a model."""

    width: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int = VOCABULARY


#: About 26M parameters; GPT-2's 124M; about 1B.
SMALL = Size(512, 8, 8, 256)
GPT2 = Size(768, 12, 12, 1024, 50304)
BILLION = Size(1792, 24, 14, 1024, 50304)
TINY = Size(32, 2, 2, 16, 64)


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.before_attention, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(seen)
        return x + self.narrow(F.gelu(self.wide(self.before_feed(x))))


class Transformer(nn.Module):
    """A decoder over random tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token loss of (batch, length + 1) tokens."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch_of(size: Size, tokens: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random tokens, (tokens / length, length + 1)."""
    length = min(size.sequence, tokens)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size.vocabulary, (max(tokens // length, 1), length + 1), generator=generator).to(device)
