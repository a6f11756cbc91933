"""Measures the costs of a job on the gang of one attempt: layers, memory, links, collectives, engine, optimizer.

Profiles of layers are cached at the control plane by key, of links by node id, for six hours or until transfers of
training take another time: only what is not cached is measured. One worker traces the model, the others take its graph.
Benchmarks that several workers share run on a rendezvous store of their own. Measuring itself is worker/benchmark/, as
are the probes of links, and the request for a plan that is made from all of this (plan_request.py).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, astuple, replace
from typing import Any

from worker.benchmark.links import Probe, ProbeResult, choose_probes, endpoint, network_spec
from worker.benchmark.plan_request import MeshKind
from worker.benchmark.slowdowns import MeshPace
from worker.contract.costs import LINK_CACHE_S, EngineCosts, UpdateCosts, mean_engine_costs
from worker.contract.job import Bucket, Job
from worker.contract.profile import (
    LayerProfile,
    MeshCollectiveCosts,
    OptimizerState,
    mean_profile,
    slowest_collective_cost,
    slowest_profile,
)
from worker.driver.control_plane_client import ControlPlaneClient
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.limits import Limits
from worker.driver.reporter import LaunchPhases, Reporter
from worker.machine.node import own_node_address
from worker.transport.base import Topology
from worker.transport.rendezvous import serve_rendezvous

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 10.0
ENGINE_LIMIT_S = 60.0
PROCESSOR_CACHE_S = 600.0  # what others leave of a processor changes within minutes
_LINK_CACHE_FORMAT = 1
_SHARES_CACHE_FORMAT = 1
_UPDATE_CACHE_FORMAT = 1
_ENGINE_CACHE_FORMAT = 3


class GangMeasurements:
    """The Measurements (worker/benchmark/plan_request.py) of the gang of one attempt.

    `profiles` are those of the layers by cache key, also of kinds of workers that only have them cached; `keys` those
    of each worker by number of microbatches, once `prepare` was called.
    """

    def __init__(
        self,
        job: Job,
        gang: Gang,
        *,
        control: ControlPlaneClient,
        reporter: Reporter,
        device: str,
        limits: Limits,
        launch: LaunchPhases | None = None,
    ):
        self._launch = launch
        self._control = control
        self._reporter = reporter
        self._gang = gang
        self._device = device
        self._limits = limits
        self._job = job
        self.profiles: dict[str, LayerProfile] = {}
        self.keys: list[Mapping[int, str]] = []
        self._probes: Sequence[Probe] = ()
        self._traced_for: int | None = None  # the number of microbatches whose graph all workers have

    def prepare(self) -> None:
        """Have every worker check its GPU, build the data and the loss, and answer its cache keys."""
        if self._device == "cuda":
            self._check_accelerators()
        what = "building the data and the loss"
        self._call("prepare", what=what)
        self.keys = self._call("profile_keys", what=what)

    def _check_accelerators(self) -> None:
        notes = self._call("check_accelerator", what="checking the accelerators")
        for address, of_worker in zip(self._gang.addresses, notes, strict=True):
            for note in of_worker or ():
                self._reporter.event(
                    "accelerator_fault", f"mesh {address.mesh}, worker {address.worker}: {note}"
                )

    def trace(self, microbatches: int) -> None:
        """Worker 0 builds and traces the model, the others take its graph: only one ever holds all parameters."""
        if self._traced_for == microbatches:
            return
        with nullcontext() if self._launch is None else self._launch.within("trace"):
            self._trace(microbatches)
        self._traced_for = microbatches

    def _trace(self, microbatches: int) -> None:
        first, *others = self._gang.workers
        known = self._known_graph(microbatches)
        notes = self.call_first("trace", microbatches, *known, what="building and tracing the model")
        for note in notes or ():
            self._reporter.event("traced", note)
        self._reporter.event(
            "traced",
            f"the model on {self._gang.addresses[0].node}, the batch in {microbatches} microbatches"
            + ("; its graph is that of the attempt before" if known else ""),
        )
        own, *sizes = self._by_worker(self._job.dp_sizes)
        graphs = {
            size: first.call.remote("graph", *() if size == own else (size,))
            for size in dict.fromkeys([own, *sizes])
        }
        self._call(
            "take_graph",
            PerWorker(graphs[size] for size in sizes),
            microbatches,
            workers=others,
            what="handing on the graph of the model",
        )

    def _known_graph(self, microbatches: int) -> list[Any]:
        """The graph that a worker of the attempt before this one still has; none where meshes have graphs of their own."""
        if not (workers := self._gang.taken_over) or len({*self._job.dp_sizes}) > 1:
            return []
        known = self._call(
            "knows_graph", microbatches, workers=workers, what="asking for the graph of the model"
        )
        knowing = [worker for worker, knows in zip(workers, known, strict=True) if knows]
        return [worker.call.remote("give_graph") for worker in knowing[:1]]

    def memory_bytes(self) -> dict[str, int]:
        gang = self._gang
        limits = self._call(
            "memory_limit",
            PerWorker(gang.workers_sharing_memory(address) for address in gang.addresses),
            what="looking at the memory",
        )
        limits_of_mesh: dict[str, list[int]] = {}
        for address, limit in zip(gang.addresses, limits, strict=True):
            if limit is not None:
                limits_of_mesh.setdefault(address.mesh, []).append(limit)
        return {mesh: min(known) for mesh, known in limits_of_mesh.items()}

    def optimizer_state(self) -> OptimizerState:
        return self.call_first("optimizer_state", what="trying the optimizer")

    def profile(self, microbatches: int, bucket: Bucket | None = None) -> LayerProfile:
        keys = [own[microbatches] for own in self.keys]
        if bucket is not None:
            keys = [_key_of_bucket(key, bucket) for key in keys]
        return self._profile(keys, microbatches, bucket)

    def smaller_buckets(self) -> Sequence[Bucket]:
        return self.call_first("smaller_buckets", what="asking for the shapes of its microbatches")

    def tells_lengths(self) -> bool:
        return self.call_first("tells_lengths", what="asking for the lengths of its samples")

    def _profile(
        self, key_of_worker: Sequence[str], microbatches: int, bucket: Bucket | None = None
    ) -> LayerProfile:
        """The profile of the slowest kind of worker; those of one kind have the same key. A kind that has no stored one
        is measured: on CPU by all its workers at once, which share cores as in training.
        """
        workers_of: dict[str, list[int]] = {}
        for index, key in enumerate(key_of_worker):
            workers_of.setdefault(key, []).append(index)
        for key in workers_of:
            if (stored := self._control.cached_profile(key)) is not None:
                self.profiles[key] = LayerProfile.from_json(stored)
        missing = {
            key: indices if self._device == "cpu" else indices[:1]
            for key, indices in workers_of.items()
            if key not in self.profiles
        }
        measuring = [index for indices in missing.values() for index in indices]
        if missing:
            self.trace(microbatches)
        measured = self._call(
            "profile",
            microbatches,
            *(() if bucket is None else (bucket,)),
            workers=[self._gang.workers[index] for index in measuring],
            what=f"profiling the layers for {microbatches} microbatches",
            extra_s=self._job.training.compiling_s,
        )
        profile_of_worker = dict(zip(measuring, measured, strict=True))
        for key, indices in missing.items():
            profile = mean_profile([LayerProfile.from_json(profile_of_worker[index]) for index in indices])
            self.profiles[key] = profile
            self._control.store_profile(key, profile.to_json())
            self._reporter.event(
                "profiled",
                f"{len(profile.layers)} layers measured on {self._gang.addresses[indices[0]].node}, "
                f"the batch in {microbatches} microbatches"
                + (f" of {bucket}" if bucket is not None else "")
                + (f"; {len(profile.compiled)} of them compiled" if self._job.training.compile else ""),
            )
        return slowest_profile([self.profiles[key] for key in workers_of])

    def leave_out(self, microbatches: int, why: str) -> None:
        self._reporter.event("left_out", f"{microbatches} microbatches, and fewer, are not planned: {why}")

    def mesh_profiles(self, kind: MeshKind, counts: Sequence[int]) -> dict[int, LayerProfile]:
        """The profiles of the slowest accelerator in the meshes of this kind, by number of microbatches."""
        kinds = self._by_worker(list(zip(self._job.mesh_sizes, self._job.tensors, strict=True)))
        keys = [key for key, own_kind in zip(self.keys, kinds, strict=True) if own_kind == kind]
        return {
            count: slowest_profile([self.profiles[key] for key in dict.fromkeys(key[count] for key in keys)])
            for count in counts
        }

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        """JSON of a NetworkSpec: latency, bandwidth and contention of transfers between the meshes.

        Nodes that were measured within the last LINK_CACHE_S, by any attempt, are not measured again.
        """
        probes = choose_probes(self._nodes_of, loops=loops, skips=skips)
        self._probes = probes
        results = {probe: known for probe in probes if (known := self._cached(probe)) is not None}
        missing = [probe for probe in probes if probe not in results]
        for probe, measured in self._measure(missing).items():
            results[probe] = measured
            nodes = self._nodes_of_probe(probe)
            self._control.store_profile(
                self._key(probe), link_cache_entry(probe, measured, nodes, at=time.time())
            )
        measured = [results[probe] for probe in probes]
        network = network_spec(probes, measured, self._nodes_of, loops=loops, skips=skips)
        if probes:
            others = sorted({link["contention"] for link in network["links"] if "contention" in link})
            self._reporter.event(
                "links_measured" if missing else "links_known",
                network["contention"]
                + (f", elsewhere {' or '.join(others)}" if others else "")
                + f"; the slowest moves {network['bandwidth_bytes_per_s']:.3g} bytes a second "
                f"after {network['latency_s']:.2g} s"
                + (f"; {len(missing)} of {len(probes)} measurements are new" if missing else ""),
            )
        return network

    def link_is_stale(self, source: str, target: str, measured_s: float, planned_s: float) -> None:
        """Have the next attempt, of any job, measure the links between the nodes of two meshes again, and report why.

        Nothing where both are on one node: there it is the processors that are shared, and no link.
        """
        nodes_of = self._nodes_of
        crossing = [
            nodes for nodes in itertools.product(nodes_of[source], nodes_of[target]) if len({*nodes}) > 1
        ]
        if not crossing:
            return
        pairs = set(map(frozenset, crossing))
        node_of = {end: self._gang.addresses[index].node for end, index in self._index_of.items()}
        keys = [
            self._key(probe)
            for probe in self._probes
            if any(frozenset((node_of[probe.hub], node_of[peer])) in pairs for peer in probe.peers)
        ]
        self._reporter.event(
            "links_stale",
            f"transfers from {source} to {target} take {measured_s:.3g} s where {planned_s:.3g} were planned: the next "
            f"attempt measures the links between {_names(nodes_of[source])} and {_names(nodes_of[target])} again",
        )
        threading.Thread(target=self._forget, args=(keys,), name="slotline-links", daemon=True).start()

    def report_pace(self, pace: MeshPace, slow: bool) -> None:
        """Report that a mesh has become slow, or is as quick as in its first steps again."""
        times = f"{pace.seconds:.3g} s a step for actions that took {pace.first_s:.3g} s in its first steps"
        nodes = _names(self._nodes_of[pace.mesh])
        if not slow:
            self._reporter.event(
                "mesh_recovered", f"mesh {pace.mesh} on {nodes} is as quick as before: {times}"
            )
            return
        self._reporter.event(
            "mesh_slow",
            f"mesh {pace.mesh} on {nodes} computes {pace.factor:.2f} times as long as it did: {times}. Look at what else "
            "runs there, and at clocks and temperature of its accelerators; `slotline node drain` moves jobs off a node",
        )

    def _forget(self, keys: Sequence[str]) -> None:
        """Let what is cached be too old, in a thread of its own: training goes on while the control plane is away."""
        try:
            for key in keys:
                self._control.store_profile(key, {"format": _LINK_CACHE_FORMAT, "measured_at": 0.0})
        except Exception as error:
            log.warning("links that changed are not measured again before their costs are too old: %s", error)

    def collectives(self, network: Mapping[str, Any]) -> MeshCollectiveCosts:
        return measure_collective_costs(self._job, self._gang, reporter=self._reporter, limits=self._limits)

    def update_costs(self) -> UpdateCosts:
        """Measured on worker 0, and kept for its node and the job's optimizer for PROCESSOR_CACHE_S."""
        job, training = self._job, self._job.training
        of = (job.optimizer, job.code, training.clip_grad_norm, training.precision, training.loss_scaling)
        digest = hashlib.sha256(repr(of).encode()).hexdigest()
        key = self._key_of(f"update {digest}", [self._gang.addresses[0].node_id])
        kept = self._fresh(key, _UPDATE_CACHE_FORMAT, PROCESSOR_CACHE_S)
        if (costs := _update_costs_of(kept)) is not None:
            return costs
        costs = self.call_first("update_costs", what="trying the optimizer")
        self._keep(key, _UPDATE_CACHE_FORMAT, {"costs": costs.to_json()})
        return costs

    def workers(self) -> list[dict[str, Any]]:
        cores = self._processor_cores()
        return [
            {
                "mesh": address.mesh,
                "worker": address.worker,
                "node": address.node,
                "device": address.device,
                "cores": cores.get(address.node),
            }
            for address in self._gang.addresses
        ]

    def engine_costs(self) -> EngineCosts:
        """The costs of the engine itself: mean seconds over meshes, most bytes of any. Kept for these nodes, on CPU, where
        all that runs there shares the processors, for PROCESSOR_CACHE_S."""
        key, limit_s = self._engine_key(), PROCESSOR_CACHE_S if self._device == "cpu" else math.inf
        if (costs := _engine_costs_of(self._fresh(key, _ENGINE_CACHE_FORMAT, limit_s))) is not None:
            return costs
        leaders = {mesh: endpoint(mesh, 0) for mesh in self._nodes_of}
        measured = self._call_at_once(
            "measure_engine",
            list(leaders.values()),
            meshes=list(leaders),
            what="measuring what an action takes of the engine",
            limit_s=ENGINE_LIMIT_S,
        )
        costs = mean_engine_costs(measured)
        if self._device != "cpu":
            # GPUs are shared with workers who connect at the same time, as far as these have the number 0
            sharing = self._sharing if self._job.resources.workers_per_mesh == 1 else 1
            costs = replace(costs, connection_bytes=costs.connection_bytes // sharing)
            self._reporter.event(
                "connections_measured",
                f"connections to other meshes hold up to {costs.connection_bytes:,} bytes of an accelerator",
            )
        self._keep(key, _ENGINE_CACHE_FORMAT, asdict(costs))
        return costs

    def _fresh(self, key: str, cache_format: int, limit_s: float) -> Mapping[str, Any]:
        """The entry of `_keep`; empty where there is none of this format, or it is older than `limit_s`."""
        body = self._control.cached_profile(key)
        if body is None or body.get("format") != cache_format:
            return {}
        at_s = body.get("measured_at")
        return body if isinstance(at_s, float) and 0 <= time.time() - at_s <= limit_s else {}

    def _keep(self, key: str, cache_format: int, measured: Mapping[str, Any]) -> None:
        self._control.store_profile(key, {"format": cache_format, "measured_at": time.time(), **measured})

    @property
    def _nodes_of(self) -> dict[str, list[str]]:
        """The node of each worker of each mesh."""
        nodes: dict[str, list[str]] = {}
        for address in self._gang.addresses:
            nodes.setdefault(address.mesh, []).append(address.node)
        return nodes

    @property
    def _index_of(self) -> dict[str, int]:
        """The place in the gang of each worker, by the name that it has in probes."""
        return {endpoint(a.mesh, a.worker): index for index, a in enumerate(self._gang.addresses)}

    def _cached(self, probe: Probe) -> ProbeResult | None:
        body = self._control.cached_profile(self._key(probe))
        return None if body is None else links_from_cache(probe, body, now=time.time())

    @property
    def _sharing(self) -> int:
        """The most workers of one GPU, or on CPU of one node."""
        return max(map(self._gang.workers_sharing_memory, self._gang.addresses))

    def _engine_key(self) -> str:
        """The nodes of the workers that run an action, whose processors enqueue it, and the number of meshes."""
        nodes = sorted({address.node_id for address in self._gang.addresses if address.worker == 0})
        return self._key_of(f"engine in {self._job.meshes} meshes of {self._sharing} a device", nodes)

    def _key(self, probe: Probe) -> str:
        """The nodes by their identity (addresses come back on other nodes) and in the order of their roles."""
        return self._key_of("links", self._nodes_of_probe(probe))

    def _nodes_of_probe(self, probe: Probe) -> list[str]:
        index_of, addresses = self._index_of, self._gang.addresses
        return [addresses[index_of[end]].node_id for end in (probe.hub, *probe.peers)]

    def _key_of(self, what: str, nodes: Iterable[str]) -> str:
        """The cache key of measurements on these nodes, by their identity, in this order."""
        return f"{what} of {self._device} {hashlib.sha256(' '.join(nodes).encode()).hexdigest()}"

    def _measure(self, probes: Sequence[Probe]) -> dict[Probe, ProbeResult]:
        """On a rendezvous of its own, one probe after the other."""
        if not probes:
            return {}
        used = {end for probe in probes for end in (probe.hub, *probe.peers)}
        ends = [end for end in self._index_of if end in used]
        answers = self._call_at_once(
            "measure_links",
            ends,
            what=f"measuring the links ({len(probes)} of them)",
            limit_s=PROBE_LIMIT_S * len(probes),
            probes=probes,
        )
        by_hub = {end: iter(results) for end, results in zip(ends, answers, strict=True)}
        return {probe: next(by_hub[probe.hub]) for probe in probes}

    def _processor_cores(self) -> dict[str, float]:
        """The processor cores that the workers of each node have together; on CPU, where they share them."""
        if self._device != "cpu":
            return {}
        key = self._key_of("processor shares", (address.node_id for address in self._gang.addresses))
        kept = self._fresh(key, _SHARES_CACHE_FORMAT, PROCESSOR_CACHE_S)
        shares = _shares_of(kept, len(self._gang.addresses))
        if shares is None:
            shares = self._call("processor_share", what="looking at the processor")
            self._keep(key, _SHARES_CACHE_FORMAT, {"shares": shares})
        cores: dict[str, float] = {}
        for address, share in zip(self._gang.addresses, shares, strict=True):
            cores[address.node] = cores.get(address.node, 0.0) + share
        return cores

    def _call_at_once(
        self,
        method: str,
        ends: Sequence[str],
        *,
        meshes: Sequence[str] | None = None,
        what: str,
        limit_s: float,
        **arguments: Any,
    ) -> list[Any]:
        """The answers of these endpoints to a call that all of them get at once, on a rendezvous of its own, in which they
        are `meshes` of one worker (None: of their own names)."""
        indices = [self._index_of[end] for end in ends]
        nodes = [self._gang.addresses[index].node for index in indices]
        _store, place = serve_rendezvous(own_node_address(), nodes)
        return self._gang.call(
            method,
            workers=[self._gang.workers[index] for index in indices],
            phase=Phase.BENCHMARK,
            what=what,
            extra_s=limit_s,
            topology=Topology(meshes=tuple(meshes or ends)),
            store=place,
            host=PerWorker(nodes),
            connect_s=self._limits.connect_s,
            **arguments,
        )

    def _by_worker(self, by_mesh: Sequence[Any]) -> list[Any]:
        """The value of its mesh for each worker of the gang."""
        pairs = zip(by_mesh, self._job.mesh_sizes, strict=True)
        return [value for value, size in pairs for _ in range(size)]

    def _call(
        self,
        method: str,
        *arguments: Any,
        what: str,
        extra_s: float = 0.0,
        workers: Sequence[Any] | None = None,
    ) -> list[Any]:
        return self._gang.call(
            method, *arguments, phase=Phase.PREPARE, what=what, extra_s=extra_s, workers=workers
        )

    def call_first(self, method: str, *arguments: Any, what: str) -> Any:
        """The answer of worker 0 of the gang, which traced the model."""
        return self._call(method, *arguments, what=what, workers=self._gang.workers[:1])[0]


def _key_of_bucket(key: str, bucket: Bucket) -> str:
    """The cache key of the profile of microbatches of this shape, where `key` is that of the largest."""
    return hashlib.sha256(f"{key} bucket {bucket}".encode()).hexdigest()


def _update_costs_of(kept: Mapping[str, Any]) -> UpdateCosts | None:
    """The kept costs of REDUCE and STEP; None where these are none that are of use."""
    with suppress(TypeError, ValueError, LookupError, AttributeError):
        costs = UpdateCosts.from_json(kept["costs"])
        seconds = [s for cost in (costs.reduce, costs.step) for s in astuple(cost)]
        return costs if all(math.isfinite(s) and s >= 0 for s in seconds) else None
    return None


def _shares_of(kept: Mapping[str, Any], workers: int) -> list[float] | None:
    """The kept shares of a processor core; None where these are not those of so many workers."""
    shares = kept.get("shares")
    if not isinstance(shares, list) or len(shares) != workers:
        return None
    return shares if all(isinstance(share, float) and 0 < share < 2 for share in shares) else None


def _engine_costs_of(kept: Mapping[str, Any]) -> EngineCosts | None:
    """The kept costs of the engine; None where these are none that are of use."""
    seconds, held = kept.get("action_s"), kept.get("connection_bytes")
    usable = isinstance(seconds, float) and 0 <= seconds < ENGINE_LIMIT_S and type(held) is int and held >= 0
    return EngineCosts(seconds, held) if usable else None


def _names(nodes: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(nodes))


def link_cache_entry(
    probe: Probe, measured: ProbeResult, nodes: Sequence[str], *, at: float
) -> dict[str, Any]:
    """JSON of a probe's result, by the roles of its meshes: other jobs have other meshes on the same nodes. `nodes` are
    Ray's ids of the nodes in these roles, for placements."""
    role_of = {mesh: role for role, mesh in enumerate((probe.hub, *probe.peers))}
    return {
        "format": _LINK_CACHE_FORMAT,
        "measured_at": at,
        "nodes": list(nodes),
        **measured.to_json(role_of),
    }


def links_from_cache(probe: Probe, body: Mapping[str, Any], *, now: float) -> ProbeResult | None:
    """The cached result, for the meshes of this probe; None where it is too old or not an entry of `link_cache_entry`."""
    try:
        age_s = now - body["measured_at"]
        if body["format"] != _LINK_CACHE_FORMAT or not 0 <= age_s <= LINK_CACHE_S:
            return None
        measured = ProbeResult.from_json(body, (probe.hub, *probe.peers))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        log.warning("the cached costs of the links of %s are of no use and measured again: %r", probe, error)
        return None
    numbers = [n for link in measured.links for n in (link.latency_s, link.bandwidth_bytes_per_s)]
    if not all(math.isfinite(n) and n > 0 for n in numbers):
        log.warning(
            "the cached costs of the links of %s are of no use and measured again: %s", probe, numbers
        )
        return None
    return measured


COLLECTIVE_LIMIT_S = 60.0


def measure_collective_costs(
    job: Job, gang: Gang, *, reporter: Reporter, limits: Limits
) -> MeshCollectiveCosts:
    """The costs of collectives in the slowest mesh; none where each mesh has one worker. Raises AttemptFailure as
    `Gang.wait`."""
    if job.resources.workers_per_mesh == 1:
        return MeshCollectiveCosts()
    nodes = [address.node for address in gang.addresses]
    stores = {
        mesh.name: serve_rendezvous(own_node_address(), nodes)
        for mesh in gang.meshes
        if len(mesh.workers) > 1
    }
    members = [
        (worker, address)
        for worker, address in zip(gang.workers, gang.addresses, strict=True)
        if address.mesh in stores
    ]
    measured = gang.call(
        "measure_collectives",
        workers=[worker for worker, _ in members],
        phase=Phase.BENCHMARK,
        what=f"summing over the workers in each of {len(stores)} meshes",
        extra_s=COLLECTIVE_LIMIT_S,
        store=PerWorker(stores[address.mesh][1] for _, address in members),
        host=PerWorker(address.node for _, address in members),
        connect_s=limits.connect_s,
    )
    sharing = max(map(gang.workers_sharing_memory, gang.addresses))
    slowest = MeshCollectiveCosts(
        data=slowest_collective_cost([costs.data for costs in measured]),
        tensor=slowest_collective_cost([costs.tensor for costs in measured]),
        connection_bytes=max(costs.connection_bytes for costs in measured) // sharing,
    )
    for what, costs in (
        ("summing gradients over the workers of a mesh", slowest.data),
        ("summing over the workers of a tensor-parallel group", slowest.tensor),
    ):
        if costs is not None:
            latency_s, bandwidth = costs.reduce
            reporter.event("sums_measured", f"{what}: {bandwidth:.3g} bytes a second after {latency_s:.2g} s")
    return slowest
