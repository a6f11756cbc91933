"""Data sets of numbers, for jobs that name them by their import path."""

from __future__ import annotations

import random
from typing import Any

import torch


class Numbered:
    """Sample i is i; `drawn` draws once when it is made."""

    def __init__(self, length: int):
        self.length = length
        self.drawn = random.random()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.tensor(index)


class Noisy(Numbered):
    """Sample i is a number drawn for it, and i."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1), torch.tensor(index)


class Named(Numbered):
    """Inputs by name, one more of them in sample `odd`."""

    def __init__(self, length: int, odd: int = -1):
        super().__init__(length)
        self.odd = odd

    def __getitem__(self, index: int) -> Any:
        more = {"c": torch.zeros(1)} if index == self.odd else {}
        return {"b": torch.ones(1), "a": torch.tensor([float(index)]), **more}, torch.tensor(index)


class Broken(Numbered):
    """Its second sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


class Endless:
    """A stream: no length."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), torch.tensor(0)


class Unreadable:
    """A length, and nothing to read."""

    def __len__(self) -> int:
        return 4
