"""Runs the benchmarks that several workers share: links between meshes, engine overhead, collectives in a mesh.

Each runs on a rendezvous store of its own. Link costs are cached at the control plane by node id and are measured
again after six hours. The probes, and what a plan assumes from them, are worker/benchmark/links.py.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.actor.device import own_node_address
from worker.benchmark.links import Probe, ProbeResult, choose_probes, network_spec
from worker.contract.costs import UpdateCosts
from worker.contract.job import Job
from worker.contract.profile import CollectiveCost, slowest_collective_cost
from worker.driver.control_plane_client import ControlPlane
from worker.driver.gang import Gang, PerWorker, Phase
from worker.driver.limits import Limits
from worker.driver.reporter import Reporter
from worker.transport.base import Topology
from worker.transport.rendezvous import serve_rendezvous

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 10.0
ACTION_LIMIT_S = 60.0
LINK_CACHE_S = 6 * 3600.0  # what a cloud's network gives one hour it may not give the next day
_LINK_CACHE_FORMAT = 1


class GangBenchmarks:
    """The measurements that the meshes of one attempt's gang make together."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        reporter: Reporter,
        gang: Gang,
        device: str,
        limits: Limits,
    ):
        self._control = control
        self._reporter = reporter
        self._gang = gang
        self._device = device
        self._limits = limits
        firsts = [address for address in gang.addresses if address.worker == 0]
        self._meshes = [mesh.name for mesh in gang.meshes]
        self._node_of = {address.mesh: address.node for address in firsts}
        self._id_of = {address.mesh: address.node_id for address in firsts}

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        """JSON of a NetworkSpec: latency, bandwidth and contention of transfers between the meshes.

        Nodes that were measured within the last LINK_CACHE_S, by any attempt, are not measured again.
        """
        probes = choose_probes(self._meshes, self._node_of, loops=loops, skips=skips)
        results = {probe: known for probe in probes if (known := self._cached(probe)) is not None}
        missing = [probe for probe in probes if probe not in results]
        for probe, measured in self._measure(missing).items():
            results[probe] = measured
            self._control.store_profile(self._key(probe), link_cache_entry(probe, measured, at=time.time()))
        network = network_spec(
            [results[probe] for probe in probes], self._meshes, self._node_of, loops=loops, skips=skips
        )
        if probes:
            self._reporter.event(
                "links_measured" if missing else "links_known",
                f"{network['contention']}; the slowest moves {network['bandwidth_bytes_per_s']:.3g} bytes a second "
                f"after {network['latency_s']:.2g} s"
                + (f"; {len(missing)} of {len(probes)} measurements are new" if missing else ""),
            )
        return network

    def action_s(self) -> float:
        """Processor seconds of the engine itself for an action, on CPU; the mean over the meshes."""
        if self._device != "cpu":
            return 0.0
        seconds = self._call_mesh_leaders(
            "measure_action", "measuring what an action takes of the engine", ACTION_LIMIT_S
        )
        return sum(seconds) / len(seconds)

    def _cached(self, probe: Probe) -> ProbeResult | None:
        body = self._control.cached_profile(self._key(probe))
        return None if body is None else links_from_cache(probe, body, now=time.time())

    def _key(self, probe: Probe) -> str:
        """The nodes by their identity (addresses come back on other nodes) and in the order of their roles."""
        nodes = [self._id_of[mesh] for mesh in (probe.hub, *probe.peers)]
        return f"links of {self._device} {hashlib.sha256(' '.join(nodes).encode()).hexdigest()}"

    def _measure(self, probes: Sequence[Probe]) -> dict[Probe, ProbeResult]:
        """On a rendezvous of its own, one probe after the other."""
        if not probes:
            return {}
        answers = self._call_mesh_leaders(
            "measure_links",
            f"measuring the links ({len(probes)} of them)",
            PROBE_LIMIT_S * len(probes),
            probes=probes,
        )
        by_hub = {mesh: iter(results) for mesh, results in zip(self._meshes, answers, strict=True)}
        return {probe: next(by_hub[probe.hub]) for probe in probes}

    def _call_mesh_leaders(self, method: str, what: str, limit_s: float, **arguments: Any) -> list[Any]:
        """The answers of worker 0 of every mesh to a call that all of them get at once, on a rendezvous of its own."""
        _store, place = serve_rendezvous(own_node_address(), list(self._node_of.values()))
        return self._gang.call(
            method,
            workers=[mesh.workers[0] for mesh in self._gang.meshes],
            phase=Phase.BENCHMARK,
            what=what,
            extra_s=limit_s,
            topology=Topology(meshes=tuple(self._meshes)),
            store=place,
            host=PerWorker(self._node_of[mesh] for mesh in self._meshes),
            connect_s=self._limits.connect_s,
            **arguments,
        )


def link_cache_entry(probe: Probe, measured: ProbeResult, *, at: float) -> dict[str, Any]:
    """JSON of a probe's result, by the roles of its meshes: other jobs have other meshes on the same nodes."""
    role_of = {mesh: role for role, mesh in enumerate((probe.hub, *probe.peers))}
    return {"format": _LINK_CACHE_FORMAT, "measured_at": at, **measured.to_json(role_of)}


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


@dataclass(frozen=True)
class GangCollectiveCosts:
    """Costs of collectives in the slowest mesh: in its data-parallel groups (`data`) and its tensor-parallel ones
    (`tensor`); the meshes `single_replica_meshes` have no data parallelism."""

    data: CollectiveCost | None
    tensor: CollectiveCost | None
    single_replica_meshes: tuple[str, ...]

    def added_to(self, costs: UpdateCosts, job: Job, gang: Gang) -> UpdateCosts:
        """`costs` of REDUCE and STEP with the collectives of the data- and tensor-parallel groups."""
        tp_sizes = {mesh.name: size for mesh in gang.meshes if (size := job.tp_size(mesh.name)) > 1}
        if tp_sizes and self.tensor is not None:
            costs = costs.with_tensor_parallel(tp_sizes, self.tensor.reduce)
        if self.data is None:
            return costs
        if sharded := job.sharded:
            dp_sizes = {
                mesh.name: len(mesh.workers) // job.tp_size(mesh.name)
                for mesh in gang.meshes
                if mesh.name in sharded
            }
            costs = costs.with_zero1(dp_sizes, self.data.scatter, self.data.gather)
        return costs.with_all_reduce(*self.data.reduce, self.single_replica_meshes)


def measure_collective_costs(
    job: Job, gang: Gang, *, reporter: Reporter, limits: Limits
) -> GangCollectiveCosts | None:
    """None where each mesh has one worker. Raises AttemptFailure as `Gang.wait`."""
    if job.resources.workers_per_mesh == 1:
        return None
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
    slowest = GangCollectiveCosts(
        data=slowest_collective_cost([costs.data for costs in measured]),
        tensor=slowest_collective_cost([costs.tensor for costs in measured]),
        single_replica_meshes=tuple(
            mesh.name for mesh in gang.meshes if len(mesh.workers) == job.tp_size(mesh.name)
        ),
    )
    for what, costs in (
        ("summing gradients over the workers of a mesh", slowest.data),
        ("summing over workers that share matrices", slowest.tensor),
    ):
        if costs is not None:
            latency_s, bandwidth = costs.reduce
            reporter.event("sums_measured", f"{what}: {bandwidth:.3g} bytes a second after {latency_s:.2g} s")
    return slowest
