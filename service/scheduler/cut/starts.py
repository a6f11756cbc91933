"""Cuts to begin a search from, and their neighbours. Knows layers; no schedule and no transfers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from worker.model.profile import LayerProfile


def equal_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The cut into stages of as many layers each, the larger ones first."""
    size, larger = divmod(layers, stages)
    sizes = [size + (stage < larger) for stage in range(stages)]
    return tuple(int(begin) for begin in np.cumsum([0, *sizes[:-1]]))


def balanced(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """The cut whose busiest stage computes least, transfers aside (dynamic programming over prefixes)."""
    work = np.array([layer.compute_s for layer in profile.layers])
    total = np.concatenate(([0.0], np.cumsum(work)))
    layers = len(work)
    load = np.where(np.arange(layers + 1)[:, None] < np.arange(layers + 1), total - total[:, None], np.inf)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(stages):
        costs = np.maximum(best[:, None], load)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    begins, end = [], layers
    for choice in reversed(choices):
        end = int(choice[end])
        begins.append(end)
    return tuple(begins[::-1])


def moved(begins: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """The cuts with one border moved by one layer, or by two."""
    for step in (1, -1, 2, -2):
        for border in range(1, len(begins)):
            other = (*begins[:border], begins[border] + step, *begins[border + 1 :])
            if all(a < b for a, b in zip(other, (*other[1:], layers), strict=True)):
                yield other
