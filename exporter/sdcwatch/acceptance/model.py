"""The model that acceptance trains: layers with attention over random tokens, of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_VOCABULARY = 512
_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Shape:
    """Width (a multiple of 64, or less than it), layers, and tokens a rank and step."""

    width: int
    layers: int
    tokens: int


class Model(nn.Module):
    """Token embedding, transformer layers without dropout, a head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        heads = max(shape.width // 64, 1)
        self.embed = nn.Embedding(_VOCABULARY, shape.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(shape.width, heads, 4 * shape.width, dropout=0.0, batch_first=True)
            for _ in range(shape.layers)
        )
        self.head = nn.Linear(shape.width, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) tokens to (batch, length, vocabulary) logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Loss of predicting each token's successor."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens_of(shape: Shape, step: int, rank: int, device: torch.device) -> torch.Tensor:
    """This rank's tokens of one step, the same in every run."""
    length = min(_LENGTH, shape.tokens)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(_VOCABULARY, (max(shape.tokens // length, 1), length + 1), generator=generator).to(device)
