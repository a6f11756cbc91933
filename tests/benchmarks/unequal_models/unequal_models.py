"""Data sets of unequal lengths, the same documents packed into rows, and a GPT that keeps the documents of a row apart."""

from __future__ import annotations

import bisect
import re
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.examples.gpt import Block, build

LONGEST = 256
_SAMPLES, _MEDIAN, _SIGMA = 2048, 40.0, 0.8
_IGNORED = -100


class Texts:
    """Random tokens of these lengths, cut at the longest; of each the next one is the target."""

    def __init__(self, lengths: list[int]):
        self.lengths = [min(length, LONGEST) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 256, (self.lengths[index] + 1,), generator=draw)
        return tokens[:-1], tokens[1:]


def log_normal() -> Texts:
    """Log-normal lengths, σ 0.8."""
    draws = np.random.default_rng(1).lognormal(np.log(_MEDIAN), _SIGMA, _SAMPLES)
    return Texts([max(1, round(draw)) for draw in draws])


def documentation() -> Texts:
    """The paragraphs of Python's own documentation, as it ships with Python: their words and punctuation marks."""
    paragraphs = [part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name])]
    return Texts([size for part in paragraphs if (size := len(re.findall(r"\w+|[^\w\s]", part)))])


class PackedTexts:
    """The documents of `texts` in rows of the longest length by best fit decreasing, which leaves least room of all common
    ways. A row is ((tokens, number of the document, place in it), target); where nothing is the document is 0."""

    def __init__(self, texts: Texts):
        self._texts = texts
        self.rows: list[list[int]] = []
        """The documents of each row, by index."""
        room: list[tuple[int, int]] = []  # of open rows, and their numbers
        for index in sorted(range(len(texts)), key=lambda index: -texts.lengths[index]):
            length = texts.lengths[index]
            place = bisect.bisect_left(room, (length, 0))
            if place == len(room):
                left, row = LONGEST, len(self.rows)
                self.rows.append([])
            else:
                left, row = room.pop(place)
            self.rows[row].append(index)
            bisect.insort(room, (left - length, row))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        samples = [self._texts[document] for document in self.rows[index]]
        sizes = [len(tokens) for tokens, _ in samples]
        numbers = torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes))
        parts = (
            (torch.cat([tokens for tokens, _ in samples]), 0),
            (numbers, 0),
            (torch.cat([torch.arange(size) for size in sizes]), 0),
            (torch.cat([target for _, target in samples]), _IGNORED),
        )
        tokens, document, place, target = (
            functional.pad(part, (0, LONGEST - sum(sizes)), value=value) for part, value in parts
        )
        return (tokens, document, place), target


def packed_log_normal() -> PackedTexts:
    """`log_normal` in rows."""
    return PackedTexts(log_normal())


def packed_documentation() -> PackedTexts:
    """`documentation` in rows."""
    return PackedTexts(documentation())


class PackedBlock(nn.Module):
    """A Block whose attention stays within documents."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        block, attention = self.block, self.block.attention
        batch, length, width = x.shape
        before = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = (document[:, :, None] == document[:, None, :]) & before
        qkv = attention.qkv(block.norm1(x)).view(batch, length, 3, attention.heads, width // attention.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        x = x + attention.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + block.contract(functional.gelu(block.expand(block.norm2(x))))


class PackedEmbedding(nn.Module):
    """Tokens and their places in their documents as vectors."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding):
        super().__init__()
        self.token, self.position = token, position

    def forward(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.token(tokens) + self.position(place)


class PackedGPT(nn.Module):
    """The GPT of the same arguments, with its parameters, on rows of PackedTexts."""

    def __init__(self, **arguments: Any):
        super().__init__()
        gpt = build(**arguments)
        self.embed = PackedEmbedding(gpt.embed.token, gpt.embed.position)
        self.blocks = nn.ModuleList(PackedBlock(block) for block in gpt.blocks)
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, tokens: Tensor, document: Tensor, place: Tensor) -> Tensor:
        x = self.embed(tokens, place)
        for block in self.blocks:
            x = block(x, document)
        return self.head(self.norm(x)).transpose(1, 2)
