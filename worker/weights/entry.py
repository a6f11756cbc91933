"""One name of a model's state_dict. Knows no files and no models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Entry:
    """One name of the model's state_dict, and the name under which a job keeps its tensor."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def rows_of(entries: Iterable[Entry]) -> list[list[Any]]:
    """For a checkpoint; `from_rows` is its inverse."""
    return [[one.name, one.tensor, list(one.shape), one.dtype] for one in entries]


def from_rows(rows: Sequence[Sequence[Any]]) -> tuple[Entry, ...]:
    """Inverse of `rows_of`."""
    return tuple(Entry(name, tensor, tuple(shape), dtype) for name, tensor, shape, dtype in rows)
