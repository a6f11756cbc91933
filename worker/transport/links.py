"""Measures what transfers between meshes cost, alone and two at once, on the job's own transport.

Uses any transport of this package; knows nothing of stages and schedules. What follows from the numbers
is network.py's.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.transport.base import Topology, Transport, finish
from worker.transport.network import Link, Measured, Probe, Together

SMALL_BYTES = 4
LARGE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}  # long against what starting a transfer takes
SMALL_ROUNDS = 20
LARGE_ROUNDS = 5
WARM_UP_ROUNDS = 2
EVERYBODY = "everybody"
_GO, _BULK, _DONE = range(3)

# A transfer of a round, seen from the hub: to a peer, or from it.
Flow = tuple[str, str]
TO, FROM = "to", "from"


def lanes_of(probes: Sequence[Probe]) -> tuple[tuple[str, str], ...]:
    """The directed pairs of meshes that `measure_links` uses; the transport connects these."""
    pairs = {tuple(sorted((probe.hub, peer))): None for probe in probes for peer in probe.peers}
    return tuple(way for a, b in pairs for way in ((a, b), (b, a)))


def groups_of(topology: Topology) -> dict[str, tuple[int, ...]]:
    """The group that `measure_links` waits with between two probes; the transport connects it."""
    return {EVERYBODY: tuple(topology.rank(mesh, 0) for mesh in topology.meshes)}


def measure_links(transport: Transport, probes: Sequence[Probe], device: str = "cpu") -> list[Measured]:
    """What the probes found whose hub this mesh is.

    Worker 0 of every mesh calls this at the same time with the same probes, which run one after the other,
    so that nothing else moves while one is measured.
    """
    found = []
    for probe in probes:
        _wait_for_everybody(transport, device)
        if transport.mesh == probe.hub:
            found.append(_lead(transport, probe, device))
        elif transport.mesh in probe.peers:
            _follow(transport, probe, device)
    _wait_for_everybody(transport, device)
    return found


def _flows_of(probe: Probe) -> list[tuple[Flow, ...]]:
    """What a probe runs at once, in order: for a pair and for two peers the third of each three is both."""
    if len(probe.peers) == 1:
        to, back = (TO, probe.peers[0]), (FROM, probe.peers[0])
        return [(to,), (back,), (to, back)]
    sends, receives = ([(way, peer) for peer in probe.peers] for way in (TO, FROM))
    return [*((one,) for one in sends), tuple(sends), *((one,) for one in receives), tuple(receives)]


def _rounds(probe: Probe, device: str) -> list[tuple[int, tuple[Flow, ...], int]]:
    """(tag, flows, bytes) of every round, the same list on hub and peers; kinds of rounds take turns, so that
    a busy moment of the machine meets them all."""
    flows = _flows_of(probe)
    small = [((), SMALL_BYTES), *((one, SMALL_BYTES) for one in flows)] * (WARM_UP_ROUNDS + SMALL_ROUNDS)
    large = [(one, LARGE_BYTES[device]) for one in flows] * (WARM_UP_ROUNDS + LARGE_ROUNDS)
    return [(3 * number, *one) for number, one in enumerate([*small, *large])]


def _lead(transport: Transport, probe: Probe, device: str) -> Measured:
    """Run the rounds of a probe and time them: from the word to begin until all peers said that they are done."""
    end = _End(transport, device)
    times: dict[tuple[tuple[Flow, ...], int], list[float]] = {}
    for tag, flows, size in _rounds(probe, device):
        started = time.monotonic()
        for way, peer in flows:
            if way == FROM:
                end.receive(peer, tag + _BULK, size)
        for peer in probe.peers:
            end.send(peer, tag + _GO, SMALL_BYTES)
        for way, peer in flows:
            if way == TO:
                end.send(peer, tag + _BULK, size)
        for peer in probe.peers:
            end.receive(peer, tag + _DONE, SMALL_BYTES)
        end.finish()
        times.setdefault((flows, size), []).append(time.monotonic() - started)
    return _evaluate(
        probe, {key: taken[WARM_UP_ROUNDS:] for key, taken in times.items()}, LARGE_BYTES[device]
    )


def _follow(transport: Transport, probe: Probe, device: str) -> None:
    end, here = _End(transport, device), transport.mesh
    for tag, flows, size in _rounds(probe, device):
        end.receive(probe.hub, tag + _GO, SMALL_BYTES)
        end.finish()
        if (TO, here) in flows:
            end.receive(probe.hub, tag + _BULK, size)
        if (FROM, here) in flows:
            end.send(probe.hub, tag + _BULK, size)
        end.finish()
        end.send(probe.hub, tag + _DONE, SMALL_BYTES)
        end.finish()


def _evaluate(probe: Probe, times: dict[tuple[tuple[Flow, ...], int], list[float]], large: int) -> Measured:
    """Links by medians, as a step will meet them; sharing by the quickest rounds, which nothing else delayed."""

    def moving_s(flows: tuple[Flow, ...], of_rounds: Callable[[list[float]], float]) -> float:
        whole_s, starting_s = of_rounds(times[flows, large]), of_rounds(times[flows, SMALL_BYTES])
        return max(whole_s - starting_s, whole_s / 10)  # on a busy machine starting may seem to take longer

    kinds = _flows_of(probe)
    if len(probe.peers) == 1:
        latency_s = statistics.median(times[(), SMALL_BYTES]) / 2
        ways = ((probe.hub, probe.peers[0]), (probe.peers[0], probe.hub))
        links = tuple(
            Link(*way, latency_s, (large - SMALL_BYTES) / moving_s(flows, statistics.median))
            for way, flows in zip(ways, kinds[:2], strict=True)
        )
        names = ("both ways",)
    else:
        links, names = (), ("two sends", "two receives")
    quickest = [moving_s(flows, min) for flows in kinds]
    return Measured(
        links,
        tuple(
            Together(name, (quickest[3 * i], quickest[3 * i + 1]), quickest[3 * i + 2])
            for i, name in enumerate(names)
        ),
    )


class _End:
    """This mesh's end of the transfers of a probe; on CUDA each direction of each pair has its own stream, as
    it has when the job runs."""

    def __init__(self, transport: Transport, device: str):
        self._transport, self._device = transport, device
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        self._streams: dict[tuple[str, str], Any] = {}
        self._started: list[Callable[[], None] | None] = []

    def send(self, peer: str, tag: int, size: int) -> None:
        buffer = self._buffer(TO, peer, size)
        with self._lane(TO, peer):
            self._started.append(self._transport.send(peer, tag, buffer))

    def receive(self, peer: str, tag: int, size: int) -> None:
        buffer = self._buffer(FROM, peer, size)
        with self._lane(FROM, peer):
            self._started.append(self._transport.receive(peer, tag, buffer))

    def finish(self) -> None:
        """Block until everything that was started has ended."""
        started, self._started = self._started, []
        for transfer in started:
            finish(transfer)
        for stream in self._streams.values():
            stream.synchronize()

    def _buffer(self, way: str, peer: str, size: int) -> torch.Tensor:
        key = (way, peer, size)
        if key not in self._buffers:
            self._buffers[key] = torch.zeros(size, dtype=torch.uint8, device=self._device)
            if self._device == "cuda":
                torch.cuda.synchronize()
        return self._buffers[key]

    def _lane(self, way: str, peer: str) -> Any:
        if self._device != "cuda":
            return contextlib.nullcontext()
        if (way, peer) not in self._streams:
            self._streams[way, peer] = torch.cuda.Stream()
        return torch.cuda.stream(self._streams[way, peer])


def _wait_for_everybody(transport: Transport, device: str) -> None:
    transport.all_reduce(EVERYBODY, torch.zeros(1, device=device))
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
