"""Data of unequal lengths, and a job whose microbatches are padded to buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

LONGEST = 37


def text_length(index: int, longest: int = LONGEST) -> int:
    """Log-normal, σ 0.8, from 1 to `longest`."""
    draw = np.random.default_rng([3, index]).lognormal(2.0, 0.8)
    return int(np.clip(round(draw), 1, longest))


class Texts:
    """Texts of unequal lengths; of each the next byte is the target."""

    def __init__(self, samples: int = 45, longest: int = LONGEST):
        self._samples, self._longest = samples, longest

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(10, 60, (text_length(index, self._longest) + 1,), generator=draw)
        return tokens[:-1], tokens[1:]


class TextsWithLengths(Texts):
    """Texts that tell their lengths; `wrong` is one that lies."""

    def __init__(self, wrong: int | None = None, **arguments: Any):
        super().__init__(**arguments)
        self.lengths = [text_length(index, self._longest) + (index == wrong) for index in range(len(self))]


class TextStream:
    """The texts one after the other, in another order each epoch, which is told."""

    def __init__(self, samples: int = 45, longest: int = LONGEST):
        self._texts, self._epoch, self._at = Texts(samples, longest), 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng([7, self._epoch]).permutation(len(self._texts))
        while self._at < len(order):
            self._at += 1
            yield self._texts[int(order[self._at - 1])]
        self._at = 0


class StatefulTextStream(TextStream):
    """Goes to a place by itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


def streamed_texts(samples: int = 45, longest: int = LONGEST) -> Iterator[Any]:
    """The texts as a generator, which can be run once only."""
    yield from TextStream(samples, longest)


def unequal_job(
    *, stages: int = 2, workers: int = 1, buckets: Any = (7, 11, 19, LONGEST), **changes: Any
) -> Any:
    """A job of a small GPT whose samples are texts."""
    return {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 3, "width": 12, "heads": 3, "vocab": 60, "length": LONGEST, "tied": True},
        },
        "data": {"factory": "tests.worker.unequal_texts:Texts", "lengths": {"buckets": buckets}},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.3, "momentum": 0.9}},
        "training": {
            "steps": 8,
            "global_batch": 30,
            "microbatches": 5,
            "seed": 5,
            "clip_grad_norm": 1.0,
            "loss_reduction": "tokens",
        },
        "pipeline": {"stages": stages, "schedule": "1f1b"},
        "resources": {"meshes": stages, "workers_per_mesh": workers},
        **changes,
    }
