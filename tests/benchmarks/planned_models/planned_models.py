"""Models of the benchmark `planned`, as a user's own code: the folder travels with the job."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class DecoderBlock(nn.Module):
    """Self-attention, attention to what the encoder made, and a feed-forward part; each added to the stream."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.own = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.own(h, h, h, need_weights=False)[0]
        x = x + self.cross(self.norms[1](x), memory, memory, need_weights=False)[0]
        return x + self.feed(self.norms[2](x))


class EncoderDecoder(nn.Module):
    """Windows [batch, length] of bytes -> logits [batch, vocabulary, length]; each decoder block reads the encoder."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.decoder = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens)
        x = memory
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x).transpose(1, 2)


def encoder_decoder(
    layers: int = 4, width: int = 128, heads: int = 4, vocabulary: int = 256
) -> EncoderDecoder:
    """An encoder and a decoder of so many layers each."""
    return EncoderDecoder(layers, width, heads, vocabulary)


def wide_mlp(layers: int = 12, width: int = 512) -> nn.Sequential:
    """Linear layers with activations between them: [batch, width] -> [batch, width]."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


class Vectors(Dataset[tuple[Tensor, Tensor]]):
    """Random vectors and their halves."""

    def __init__(self, width: int = 512, size: int = 4096):
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(size, width, generator=generator)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = self._values[index]
        return value, functional.relu(value) / 2
