"""A byte-level GPT that predicts the next byte of a text; `build` is its factory.

Plain torch; knows nothing of pipelines.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """Bytes and their places as vectors."""

    def __init__(self, vocab: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(places))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.contract(functional.gelu(self.expand(self.norm2(x)))))


class GPT(nn.Module):
    """tokens [batch, length] int64 -> logits [batch, vocab, length], as cross_entropy takes them."""

    def __init__(
        self, *, layers: int, width: int, heads: int, vocab: int, length: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocab, length, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self._initialise(tied)
        if tied:
            self.head.weight = self.embed.token.weight

    def _initialise(self, tied: bool) -> None:
        """Unit variance through every block at any width and depth, small logits at the start."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.attention.project, block.contract):
                with torch.no_grad():
                    last.weight *= (2 * len(self.blocks)) ** -0.5
        for table in (self.embed.token, self.embed.position):
            nn.init.normal_(table.weight, std=self.head.in_features**-0.5 if tied else 1.0)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


def build(
    layers: int = 8,
    width: int = 256,
    heads: int = 4,
    *,
    vocab: int = 256,
    length: int = 128,
    tied: bool = False,
    dropout: float = 0.0,
) -> GPT:
    """A GPT of `layers` blocks; `tied` shares the token embedding with the head."""
    if width % heads:
        raise ValueError(f"width {width} is not divisible by heads {heads}: change one of them")
    return GPT(
        layers=layers, width=width, heads=heads, vocab=vocab, length=length, tied=tied, dropout=dropout
    )
