"""What a transfer costs between neighbouring meshes: latency and bandwidth by ping-pong.

Uses any transport of this package; knows nothing of stages and schedules.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from worker.transport.base import Transport, finish

SMALL_BYTES = 4
LARGE_BYTES = 4 << 20
SMALL_ROUNDS = 20
LARGE_ROUNDS = 5
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Link:
    """One way from `source` to `target`: a transfer of n bytes takes latency_s + n / bandwidth_bytes_per_s."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float


def neighbour_lanes(meshes: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The directed pairs of meshes that `measure_links` uses; the transport connects these."""
    pairs = list(itertools.pairwise(meshes))
    return tuple(pairs + [(b, a) for a, b in pairs])


def measure_links(transport: Transport, device: str = "cpu") -> Link | None:
    """Answer the mesh before, then measure the link to the mesh after; None on the last mesh.

    Every worker calls this at the same time. Half of the median round trip counts as one way.
    """
    meshes, here = transport.topology.meshes, transport.topology.meshes.index(transport.mesh)
    if here > 0:
        _ping_pong(transport, meshes[here - 1], device, answers=True)
    if here == len(meshes) - 1:
        return None
    small_s, large_s = _ping_pong(transport, meshes[here + 1], device, answers=False)
    moving_s = max(large_s - small_s, 1e-9)
    return Link(transport.mesh, meshes[here + 1], small_s, (LARGE_BYTES - SMALL_BYTES) / moving_s)


def slowest(links: list[Link]) -> Link | None:
    """The link that a plan with one bandwidth and one latency for all has to assume; None without links."""
    if not links:
        return None
    return max(links, key=lambda link: link.latency_s + LARGE_BYTES / link.bandwidth_bytes_per_s)


def _ping_pong(transport: Transport, peer: str, device: str, *, answers: bool) -> tuple[float, float]:
    """Median one-way seconds of a small and of a large message."""
    small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device=device)
    return (
        _one_way(transport, peer, small, SMALL_ROUNDS, answers),
        _one_way(transport, peer, large, LARGE_ROUNDS, answers),
    )


def _one_way(transport: Transport, peer: str, buffer: torch.Tensor, rounds: int, answers: bool) -> float:
    times = []
    for tag in range(WARM_UP_ROUNDS + rounds):
        started = time.monotonic()
        if answers:
            finish(transport.receive(peer, tag, buffer))
            finish(transport.send(peer, tag, buffer))
        else:
            finish(transport.send(peer, tag, buffer))
            finish(transport.receive(peer, tag, buffer))
        if buffer.is_cuda:  # there both calls only enqueue
            torch.cuda.current_stream().synchronize()
        times.append((time.monotonic() - started) / 2)
    return statistics.median(times[WARM_UP_ROUNDS:])
