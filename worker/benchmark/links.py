"""Measures latency, bandwidth and contention of transfers between meshes, and derives the NetworkSpec of a plan.

Probes run one after the other on the job's own transport, so that nothing else moves meanwhile. Their ends are workers:
of all that exchange tensors between the same nodes one pair, or triple, is measured.
Must not know stages or schedules. The JSON form of a result is stored by the control plane: keep its keys.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from worker.transport.base import Topology, Transport, finish

# Of two transfers at once, the fraction of the shorter one for which one had to wait: 0 where they run beside each
# other, 1 where they run one after the other. From here on a plan assumes contention.
CONTENTION_THRESHOLD = 0.5
# The limit of measured pairs, and of measured triples, of workers; the others are taken to be as slow as the slowest.
MAX_PROBES = 64
_REFERENCE_BYTES = 4 << 20

ConcurrencyKind = Literal["both ways", "two sends", "two receives"]


@dataclass(frozen=True)
class Probe:
    """A measurement at `hub`: of its link with one peer in both directions, or of its transfers with two peers at once."""

    hub: str
    peers: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """The direction from `source` to `target`: a transfer of n bytes takes latency_s + n / bandwidth_bytes_per_s."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class ConcurrentTransfers:
    """Seconds that two transfers of one size took, each alone and both at once.

    "both ways" is measured on one pair of meshes; "two sends" and "two receives" on one mesh and two peers.
    """

    kind: ConcurrencyKind
    alone_s: tuple[float, float]
    together_s: float

    @property
    def delay_ratio(self) -> float:
        """The fraction of the shorter transfer that the other one delayed: about 0 to about 1."""
        return (self.together_s - max(self.alone_s)) / max(min(self.alone_s), 1e-9)


@dataclass(frozen=True)
class ProbeResult:
    """The result of one probe."""

    links: tuple[Link, ...]
    together: tuple[ConcurrentTransfers, ...]

    def to_json(self, role_of: Mapping[str, int]) -> dict[str, Any]:
        """Plain values, with a number in place of each mesh's name."""
        return {
            "links": [
                [role_of[link.source], role_of[link.target], link.latency_s, link.bandwidth_bytes_per_s]
                for link in self.links
            ],
            "together": [[pair.kind, *pair.alone_s, pair.together_s] for pair in self.together],
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], names: Sequence[str]) -> ProbeResult:
        """The same with `names` for the numbers. KeyError, TypeError, ValueError, IndexError for anything else."""
        return cls(
            tuple(
                Link(names[source], names[target], float(latency_s), float(bandwidth))
                for source, target, latency_s, bandwidth in body["links"]
            ),
            tuple(
                ConcurrentTransfers(kind, (float(first), float(second)), float(both))
                for kind, first, second, both in body["together"]
            ),
        )


def contention_model(measurements: Sequence[ConcurrentTransfers]) -> str:
    """The contention model (DESIGN section 4) of these measurements: link, full-duplex or half-duplex.

    The strictest that any of them shows; link without measurements.
    """
    sharing = {pair.kind for pair in measurements if pair.delay_ratio >= CONTENTION_THRESHOLD}
    if "both ways" in sharing:
        return "half-duplex"
    return "full-duplex" if sharing else "link"


def slowest_link(links: Sequence[Link]) -> Link | None:
    """The link that a transfer of some megabytes notices most; None without links."""
    return max(
        links, key=lambda link: link.latency_s + _REFERENCE_BYTES / link.bandwidth_bytes_per_s, default=None
    )


def pairs_in_use(meshes: Sequence[str], *, loops: bool, skips: bool) -> list[tuple[str, str]]:
    """The pairs of meshes, earlier one first, between which stages may exchange tensors.

    Neighbours; last and first where stages go round (`loops`); all pairs where the model has `skips`.
    """
    pairs = list(itertools.pairwise(meshes))
    if loops and len(meshes) > 2:
        pairs.append((meshes[0], meshes[-1]))
    if skips:
        pairs += [pair for pair in itertools.combinations(meshes, 2) if pair not in set(pairs)]
    return pairs


def endpoint(mesh: str, worker: int) -> str:
    """The name of a worker as one end of a probe."""
    return f"{mesh}/{worker}"


WorkerPair = tuple[str, str]
"""The endpoints of two workers, that of the earlier mesh first."""


def _worker_pairs(
    nodes_of: Mapping[str, Sequence[str]], *, loops: bool, skips: bool
) -> dict[tuple[str, str], dict[WorkerPair, WorkerPair]]:
    """The nodes of each pair of workers between which tensors go, by pair of meshes in use: of worker w of both meshes, or
    of any two where the meshes differ in size."""
    found = {}
    for first, second in pairs_in_use(list(nodes_of), loops=loops, skips=skips):
        here, there = nodes_of[first], nodes_of[second]
        numbers = (
            [(worker, worker) for worker in range(len(here))]
            if len(here) == len(there)
            else itertools.product(range(len(here)), range(len(there)))
        )
        found[first, second] = {
            (endpoint(first, a), endpoint(second, b)): (here[a], there[b]) for a, b in numbers
        }
    return found


def choose_probes(nodes_of: Mapping[str, Sequence[str]], *, loops: bool, skips: bool) -> list[Probe]:
    """The probes of a gang, between endpoints: of pairs of workers on the same two nodes, and of triples on the same three,
    only the first. `nodes_of` has the node of each worker of each mesh.

    A triple is measured where both transfers cross between nodes, or neither does: a card and the memory of a node are
    no one resource.
    """
    pairs: dict[frozenset[str], Probe] = {}
    for workers in _worker_pairs(nodes_of, loops=loops, skips=skips).values():
        for (first, second), nodes in workers.items():
            pairs.setdefault(frozenset(nodes), Probe(first, (second,)))
    triples: dict[tuple[str, ...], Probe] = {}
    meshes = list(nodes_of)
    for three in zip(meshes, meshes[1:], meshes[2:], strict=False):
        for worker, (before, hub, after) in enumerate(zip(*(nodes_of[mesh] for mesh in three), strict=False)):
            if (before == hub) == (hub == after):
                first, middle, last = (endpoint(mesh, worker) for mesh in three)
                triples.setdefault((hub, *sorted((before, after))), Probe(middle, (first, last)))
    return [*list(pairs.values())[:MAX_PROBES], *list(triples.values())[:MAX_PROBES]]


_STRICTNESS = ("link", "full-duplex", "half-duplex")


def _contention_of_nodes(
    probes: Sequence[Probe], measured: Sequence[ProbeResult], node_of: Mapping[str, str]
) -> dict[frozenset[str], str]:
    """The contention model of every measured pair of nodes (one node: inside it), from what was measured of it.

    Pairs whose transfers at one node delay each other use one card there, and have the strictest of their models.
    """
    seen: dict[frozenset[str], list[ConcurrentTransfers]] = {}
    joined: list[set[frozenset[str]]] = []
    for probe, result in zip(probes, measured, strict=True):
        pairs = [frozenset((node_of[probe.hub], node_of[peer])) for peer in probe.peers]
        for pair in pairs:
            seen.setdefault(pair, []).extend(result.together)
        if contention_model(result.together) != "link":
            together = [group for group in joined if group & {*pairs}]
            joined = [group for group in joined if group not in together] + [{*pairs}.union(*together)]
    models = {pair: contention_model(transfers) for pair, transfers in seen.items()}
    for group in joined:
        models |= dict.fromkeys(group, _strictest(models[pair] for pair in group))
    return models


def _strictest(models: Iterable[str]) -> str:
    return max(models, key=_STRICTNESS.index, default="link")


def network_spec(
    probes: Sequence[Probe],
    measured: Sequence[ProbeResult],
    nodes_of: Mapping[str, Sequence[str]],
    *,
    loops: bool,
    skips: bool,
) -> dict[str, Any]:
    """JSON of a NetworkSpec: contention, the slowest link for all, and a link for each directed pair of meshes in use.

    The link of two meshes is the slowest, and the strictest, of those between the nodes of their workers: of those that
    cross, unless their first workers are on one node. What was not measured costs as much as the slowest. The network's
    own contention is the strictest between nodes, or inside one where no transfer crosses. `nodes` has the links between
    nodes.
    """
    node_of = {
        endpoint(mesh, worker): node for mesh, nodes in nodes_of.items() for worker, node in enumerate(nodes)
    }
    links = [link for result in measured for link in result.links]
    of_nodes: dict[tuple[str, str, bool], Link] = {}
    for probe, result in zip(probes, measured, strict=True):
        for link in result.links:
            route = node_of[link.source], node_of[link.target]
            of_nodes[*route, link.source == probe.hub] = link
            if route[0] != route[1]:
                of_nodes[*route, link.source != probe.hub] = link
    models = _contention_of_nodes(probes, measured, node_of)
    default = slowest_link(links)
    contention = _strictest(
        [model for nodes, model in models.items() if len(nodes) > 1] or list(models.values())
    )
    mesh_links = []
    for (first, second), workers in _worker_pairs(nodes_of, loops=loops, skips=skips).items():
        crosses = nodes_of[first][0] != nodes_of[second][0]
        routes = list(dict.fromkeys(ends for ends in workers.values() if (ends[0] != ends[1]) == crosses))
        own = _strictest(models[pair] for pair in map(frozenset, routes) if pair in models)
        for source, target, back in ((first, second, False), (second, first, True)):
            directed = [(b, a, False) if back else (a, b, True) for a, b in routes]
            link = slowest_link([of_nodes[route] for route in directed if route in of_nodes])
            if link is not None:
                mesh_links.append(
                    {
                        "source": source,
                        "target": target,
                        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                        "latency_s": link.latency_s,
                        **({"contention": own} if own != contention else {}),
                    }
                )
    return {
        "contention": contention,
        "bandwidth_bytes_per_s": default.bandwidth_bytes_per_s if default else None,
        "latency_s": default.latency_s if default else 0.0,
        "links": mesh_links,
        "nodes": [
            {"source": source, "target": target, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
            for (source, target, forward), link in of_nodes.items()
            if source != target and forward
        ],
    }


SMALL_BYTES = 4
LARGE_BYTES = {"cpu": 4 << 20, "cuda": 32 << 20}  # long against the time to start a transfer
SMALL_ROUNDS = 20
LARGE_ROUNDS = 5
WARM_UP_ROUNDS = 2
EVERYBODY = "everybody"
_TAG_GO, _TAG_BULK, _TAG_DONE = range(3)

# A transfer of a round, seen from the hub: to a peer, or from it.
Flow = tuple[str, str]
SEND_TO, RECEIVE_FROM = "to", "from"


def probe_lanes(probes: Sequence[Probe]) -> tuple[tuple[str, str], ...]:
    """The directed pairs of endpoints that `measure_links` uses; the transport connects these."""
    pairs = {tuple(sorted((probe.hub, peer))): None for probe in probes for peer in probe.peers}
    return tuple(way for a, b in pairs for way in ((a, b), (b, a)))


def probe_groups(topology: Topology) -> dict[str, tuple[int, ...]]:
    """The group that `measure_links` waits with between two probes; the transport connects it."""
    return {EVERYBODY: tuple(topology.rank(mesh, 0) for mesh in topology.meshes)}


def measure_links(transport: Transport, probes: Sequence[Probe], device: str = "cpu") -> list[ProbeResult]:
    """The results of the probes whose hub this endpoint is: the `mesh` of the transport.

    All endpoints call this at the same time with the same probes, which run one after the other,
    so that nothing else moves while one is measured.
    """
    results = []
    for probe in probes:
        _barrier(transport, device)
        if transport.mesh == probe.hub:
            results.append(_run_as_hub(transport, probe, device))
        elif transport.mesh in probe.peers:
            _run_as_peer(transport, probe, device)
    _barrier(transport, device)
    return results


def _probe_flows(probe: Probe) -> list[tuple[Flow, ...]]:
    """The flows that a probe runs at once, in order; of each three the third is the first two together."""
    if len(probe.peers) == 1:
        to, back = (SEND_TO, probe.peers[0]), (RECEIVE_FROM, probe.peers[0])
        return [(to,), (back,), (to, back)]
    sends, receives = ([(way, peer) for peer in probe.peers] for way in (SEND_TO, RECEIVE_FROM))
    return [*((one,) for one in sends), tuple(sends), *((one,) for one in receives), tuple(receives)]


def _probe_rounds(probe: Probe, device: str) -> list[tuple[int, tuple[Flow, ...], int]]:
    """(tag, flows, bytes) of every round, the same list on hub and peers; kinds of rounds take turns, so that
    a busy moment of the machine meets them all."""
    flows = _probe_flows(probe)
    small = [((), SMALL_BYTES), *((one, SMALL_BYTES) for one in flows)] * (WARM_UP_ROUNDS + SMALL_ROUNDS)
    large = [(one, LARGE_BYTES[device]) for one in flows] * (WARM_UP_ROUNDS + LARGE_ROUNDS)
    return [(3 * number, *one) for number, one in enumerate([*small, *large])]


def _run_as_hub(transport: Transport, probe: Probe, device: str) -> ProbeResult:
    """Run the rounds of a probe and time them: from the word to begin until all peers said that they are done."""
    end = _LinkEndpoint(transport, device)
    times: dict[tuple[tuple[Flow, ...], int], list[float]] = {}
    for tag, flows, size in _probe_rounds(probe, device):
        started = time.monotonic()
        for way, peer in flows:
            if way == RECEIVE_FROM:
                end.receive(peer, tag + _TAG_BULK, size)
        for peer in probe.peers:
            end.send(peer, tag + _TAG_GO, SMALL_BYTES)
        for way, peer in flows:
            if way == SEND_TO:
                end.send(peer, tag + _TAG_BULK, size)
        for peer in probe.peers:
            end.receive(peer, tag + _TAG_DONE, SMALL_BYTES)
        end.finish()
        times.setdefault((flows, size), []).append(time.monotonic() - started)
    return _probe_result(
        probe, {key: taken[WARM_UP_ROUNDS:] for key, taken in times.items()}, LARGE_BYTES[device]
    )


def _run_as_peer(transport: Transport, probe: Probe, device: str) -> None:
    end, here = _LinkEndpoint(transport, device), transport.mesh
    for tag, flows, size in _probe_rounds(probe, device):
        end.receive(probe.hub, tag + _TAG_GO, SMALL_BYTES)
        end.finish()
        if (SEND_TO, here) in flows:
            end.receive(probe.hub, tag + _TAG_BULK, size)
        if (RECEIVE_FROM, here) in flows:
            end.send(probe.hub, tag + _TAG_BULK, size)
        end.finish()
        end.send(probe.hub, tag + _TAG_DONE, SMALL_BYTES)
        end.finish()


def _probe_result(
    probe: Probe, times: dict[tuple[tuple[Flow, ...], int], list[float]], large: int
) -> ProbeResult:
    """Links by medians, as a step will meet them; sharing by the quickest rounds, which nothing else delayed."""

    def moving_s(flows: tuple[Flow, ...], of_rounds: Callable[[list[float]], float]) -> float:
        whole_s, starting_s = of_rounds(times[flows, large]), of_rounds(times[flows, SMALL_BYTES])
        return max(whole_s - starting_s, whole_s / 10)  # on a busy machine starting may seem to take longer

    kinds = _probe_flows(probe)
    if len(probe.peers) == 1:
        latency_s = statistics.median(times[(), SMALL_BYTES]) / 2
        directions = ((probe.hub, probe.peers[0]), (probe.peers[0], probe.hub))
        links = tuple(
            Link(*direction, latency_s, (large - SMALL_BYTES) / moving_s(flows, statistics.median))
            for direction, flows in zip(directions, kinds[:2], strict=True)
        )
        names = ("both ways",)
    else:
        links, names = (), ("two sends", "two receives")
    quickest = [moving_s(flows, min) for flows in kinds]
    return ProbeResult(
        links,
        tuple(
            ConcurrentTransfers(name, (quickest[3 * i], quickest[3 * i + 1]), quickest[3 * i + 2])
            for i, name in enumerate(names)
        ),
    )


class _LinkEndpoint:
    """This mesh's end of the transfers of a probe; on CUDA each direction of each pair has its own stream, as
    it has when the job runs."""

    def __init__(self, transport: Transport, device: str):
        self._transport, self._device = transport, device
        self._buffers: dict[tuple[str, str, int], torch.Tensor] = {}
        self._streams: dict[tuple[str, str], Any] = {}
        self._started: list[Callable[[], None] | None] = []

    def send(self, peer: str, tag: int, size: int) -> None:
        buffer = self._buffer(SEND_TO, peer, size)
        with self._lane(SEND_TO, peer):
            self._started.append(self._transport.send(peer, tag, buffer))

    def receive(self, peer: str, tag: int, size: int) -> None:
        buffer = self._buffer(RECEIVE_FROM, peer, size)
        with self._lane(RECEIVE_FROM, peer):
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


def _barrier(transport: Transport, device: str) -> None:
    transport.all_reduce(EVERYBODY, torch.zeros(1, device=device))
    if device == "cuda":
        torch.cuda.current_stream().synchronize()
