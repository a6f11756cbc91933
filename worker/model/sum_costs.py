"""What sums between the workers of a mesh take, as measured there. Pure values, light: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Speed = tuple[float, float]
"""Seconds to begin, and bytes of the whole tensor a second."""


@dataclass(frozen=True)
class SumCosts:
    """Of an all-reduce; and of a reduce-scatter and an all-gather, each of which moves half as much, where they were
    measured."""

    reduce: Speed
    scatter: Speed | None = None
    gather: Speed | None = None

    def seconds(self, way: str, count: int, size_bytes: int) -> float:
        """So many sums of so many bytes in all, one way (the name of a field); as all-reduces where it was not measured."""
        latency_s, bandwidth = getattr(self, way) or self.reduce
        return count * latency_s + size_bytes / bandwidth


@dataclass(frozen=True)
class MeshSums:
    """Of one mesh: `data` between workers that have other samples, `tensor` between those that share matrices; None where
    there are no two."""

    data: SumCosts | None = None
    tensor: SumCosts | None = None


def slowest(found: Sequence[SumCosts | None]) -> SumCosts | None:
    """The latest to begin and the slowest of each way."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    ways = ([one.reduce for one in known], [one.scatter for one in known], [one.gather for one in known])
    return SumCosts(
        *(None if None in way else (max(a for a, _ in way), min(b for _, b in way)) for way in ways)
    )
