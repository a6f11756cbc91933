"""Streams of numbers and of tokens, for jobs that name them by their import path."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

TOKENS = 256


def tokens_of(number: int, length: int = 8, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of tokens and what follows each: a function of its number."""
    row = np.random.default_rng([number, epoch]).integers(0, TOKENS, length + 1)
    row = torch.from_numpy(row)
    return row[:-1], row[1:]


class Tokens(IterableDataset):
    """`length` rows of tokens, with no more than an iterator. Knows what a DataLoader's process is to read."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, every):
            yield tokens_of(number)


def generated(length: int, size: int = 8) -> Iterator[Any]:
    """A generator: it can be run once only."""
    for number in range(length):
        yield tokens_of(number, size)


class Shuffled(Tokens):
    """Another order each epoch, which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in np.random.default_rng(self.epoch).permutation(self.length):
            yield tokens_of(int(number))


class Counting(Tokens):
    """Another order each time that it is iterated, of which nobody is told."""

    def __init__(self, length: int):
        super().__init__(length)
        self.times = 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.times).permutation(self.length)
        self.times += 1
        for number in order:
            yield tokens_of(int(number))


class Stateful(Tokens):
    """Goes to a place by itself; `read` counts the samples that all objects gave."""

    read = 0

    def __init__(self, length: int, wrong: int = 0):
        super().__init__(length)
        self._at, self._wrong = 0, wrong

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at, "drawn": np.arange(2).tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"] + self._wrong

    def __iter__(self) -> Iterator[Any]:
        while self._at < self.length:
            self._at += 1
            Stateful.read += 1
            yield tokens_of(self._at - 1)
        self._at = 0


class BeginsWhereItWasSent(Tokens):
    """Goes to a place by itself, and begins every further epoch there."""

    def __init__(self, length: int):
        super().__init__(length)
        self._begin = self._now = 0

    def state_dict(self) -> dict[str, Any]:
        return {"now": self._now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin = self._now = state["now"]

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._begin, self.length):
            self._now = number + 1
            yield tokens_of(number)


class ShuffledWhereItWasSent(BeginsWhereItWasSent):
    """The same, in another order each epoch, which it is told."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self.epoch).permutation(self.length)
        for number in range(self._begin, self.length):
            self._now = number + 1
            yield tokens_of(int(order[number]))


class CountingStateful(Tokens):
    """Goes to a place by itself, in another order each epoch, which it counts."""

    def __init__(self, length: int):
        super().__init__(length)
        self._epoch = self._at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._at = state["epoch"], state["at"]

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(self._epoch).permutation(self.length)
        while self._at < self.length:
            self._at += 1
            yield tokens_of(int(order[self._at - 1]))
        self._epoch, self._at = self._epoch + 1, 0


class StatefulIterator:
    """As Stateful, but its iterators have the state."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Any:
        return _At(self.length)


class _At:
    def __init__(self, length: int):
        self.length, self.at = length, 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        Stateful.read += 1
        return tokens_of(self.at - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Masked(Tokens):
    """Tokens of which some are masked at random, by all of the process's generators."""

    def __iter__(self) -> Iterator[Any]:
        for tokens, following in super().__iter__():
            masked = torch.rand(tokens.shape) < 0.3
            masked[random.randrange(8)] = True
            masked[np.random.randint(8)] = True
            yield torch.where(masked, 0, tokens), following


class FromEntropy(Tokens):
    """Tokens in an order that no seed gives."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng().permutation(self.length)
        for number in order:
            yield tokens_of(int(number))


class Hostile(Tokens):
    """Does something wrong at sample `at`."""

    def __init__(self, length: int, at: int, what: str):
        super().__init__(length)
        self.at, self.what = at, what

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield hostile(number, self.at, self.what)


class HostileByIndex:
    """The same, of a data set with indices."""

    def __init__(self, length: int, at: int, what: str):
        self.length, self.at, self.what = length, at, what

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return hostile(index, self.at, self.what)


class MaskedByIndex(HostileByIndex):
    """Tokens of which some are masked at random."""

    def __init__(self, length: int):
        super().__init__(length, -1, "nothing")

    def __getitem__(self, index: int) -> Any:
        tokens, following = super().__getitem__(index)
        return torch.where(torch.rand(tokens.shape) < 0.3, 0, tokens), following


def hostile(number: int, at: int, what: str) -> Any:
    if number != at or what == "nothing":
        return tokens_of(number)
    if what == "raises":
        raise OSError("the disk is gone")
    if what == "longer":
        return tokens_of(number, 9)
    if what == "floats":
        return tuple(one.float() for one in tokens_of(number))
    if what == "hangs":
        time.sleep(600)
    os._exit(3)


def loader(length: int) -> DataLoader:
    return DataLoader(Tokens(length), batch_size=2)


class Pairs:
    """Rows by index, as a data set on disk returns them: lists, with a field that no model takes."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        tokens, following = tokens_of(index)
        return {"row": tokens.tolist(), "next": following.tolist(), "text": f"row {index}"}


def masking(samples: Any, share: float) -> Any:
    """A collator that draws, and returns a pair."""
    inputs = torch.stack([sample[0] for sample in samples])
    return torch.where(torch.rand(inputs.shape) < share, 0, inputs), torch.stack([s[1] for s in samples])


class LastRow:
    """A collator that looks at its whole batch: all inputs but the last are the last."""

    def __call__(self, samples: Any) -> Any:
        inputs = torch.stack([samples[-1][0] for _ in samples])
        return {"tokens": inputs, "labels": torch.stack([sample[1] for sample in samples])}


def one_number(samples: Any) -> Any:
    return torch.zeros(()), torch.zeros(len(samples))
