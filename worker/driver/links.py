"""What the meshes of a gang measure together: links, which the control plane remembers of the same nodes, and what the
engine itself takes for an action.

Which links to look at and what a plan assumes from them is worker/transport/network.py's.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.driver.control_plane import ControlPlane
from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.report import Reporter
from worker.node import own_node_address
from worker.reasons import Reason
from worker.transport import Topology
from worker.transport.network import Measured, Probe, choose_probes, network_of
from worker.transport.rendezvous import serve_rendezvous

log = logging.getLogger(__name__)

PROBE_LIMIT_S = 10.0
ACTION_LIMIT_S = 60.0
KEPT_S = 6 * 3600.0  # what a cloud's network gives one hour it may not give the next day
_FORMAT = 1


class MeshCosts:
    """What the meshes of one attempt's gang measure together. `interrupted` is that of `Gang.call`."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        reporter: Reporter,
        gang: Gang,
        device: str,
        limits: Limits,
        interrupted: Callable[[], None],
    ):
        self._control = control
        self._reporter = reporter
        self._gang = gang
        self._device = device
        self._limits = limits
        self._interrupted = interrupted
        firsts = [address for address in gang.addresses if address.worker == 0]
        self._meshes = [mesh.name for mesh in gang.meshes]
        self._node_of = {address.mesh: address.node for address in firsts}
        self._id_of = {address.mesh: address.node_id for address in firsts}

    def network(self, *, loops: bool, skips: bool) -> dict[str, Any]:
        """JSON of a NetworkSpec: what transfers between the meshes cost and share.

        Nodes that were measured within the last KEPT_S, by any attempt, are not measured again.
        """
        ways = {"loops": loops, "skips": skips}
        probes = choose_probes(self._meshes, self._node_of, **ways)
        found = {probe: known for probe in probes if (known := self._known(probe)) is not None}
        missing = [probe for probe in probes if probe not in found]
        for probe, measured in self._measure(missing).items():
            found[probe] = measured
            self._control.store_profile(self._key(probe), kept(probe, measured, at=time.time()))
        network = network_of([found[probe] for probe in probes], self._meshes, self._node_of, **ways)
        if probes:
            self._reporter.event(
                "links_measured" if missing else "links_known",
                f"{network['contention']}; the slowest moves {network['bandwidth_bytes_per_s']:.3g} bytes a second "
                f"after {network['latency_s']:.2g} s"
                + (f"; {len(missing)} of {len(probes)} measurements are new" if found and missing else ""),
            )
        return network

    def action_s(self) -> float:
        """Processor seconds of the engine itself for an action, on CPU; the mean over the meshes."""
        if self._device != "cpu":
            return 0.0
        found = self._together(
            "measure_action", "measuring what an action takes of the engine", ACTION_LIMIT_S
        )
        return sum(found) / len(found)

    def _known(self, probe: Probe) -> Measured | None:
        body = self._control.cached_profile(self._key(probe))
        return None if body is None else recalled(probe, body, now=time.time())

    def _key(self, probe: Probe) -> str:
        """The nodes by their identity (addresses come back on other nodes) and in the order of their roles."""
        nodes = [self._id_of[mesh] for mesh in (probe.hub, *probe.peers)]
        return f"links of {self._device} {hashlib.sha256(' '.join(nodes).encode()).hexdigest()}"

    def _measure(self, probes: Sequence[Probe]) -> dict[Probe, Measured]:
        """On a rendezvous of its own, one probe after the other."""
        if not probes:
            return {}
        of_mesh = self._together(
            "measure_links",
            f"measuring the links ({len(probes)} of them)",
            PROBE_LIMIT_S * len(probes),
            probes=probes,
        )
        answers = {mesh: iter(found) for mesh, found in zip(self._meshes, of_mesh, strict=True)}
        return {probe: next(answers[probe.hub]) for probe in probes}

    def _together(self, method: str, what: str, limit_s: float, **more: Any) -> list[Any]:
        """What worker 0 of every mesh answers to a call that all of them get at once, on a rendezvous of its own."""
        _store, place = serve_rendezvous(own_node_address(), list(self._node_of.values()))
        return self._gang.call(
            [
                getattr(mesh.workers[0], method).remote(
                    topology=Topology(meshes=tuple(self._meshes)),
                    store=place,
                    host=self._node_of[mesh.name],
                    connect_s=self._limits.connect_s,
                    **more,
                )
                for mesh in self._gang.meshes
            ],
            what=what,
            limit_s=2 * self._limits.connect_s + limit_s,
            timeout_reason=Reason.START_TIMEOUT,
            interrupted=self._interrupted,
        )


def kept(probe: Probe, measured: Measured, *, at: float) -> dict[str, Any]:
    """JSON of what a probe found, by the roles of its meshes: other jobs have other meshes on the same nodes."""
    role_of = {mesh: role for role, mesh in enumerate((probe.hub, *probe.peers))}
    return {"format": _FORMAT, "measured_at": at, **measured.to_json(role_of)}


def recalled(probe: Probe, body: Mapping[str, Any], *, now: float) -> Measured | None:
    """What was kept, for the meshes of this probe; None where it is too old, or is nothing that `kept` wrote."""
    try:
        age_s = now - body["measured_at"]
        if body["format"] != _FORMAT or not 0 <= age_s <= KEPT_S:
            return None
        measured = Measured.from_json(body, (probe.hub, *probe.peers))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        log.warning("the kept costs of the links of %s are of no use and measured again: %r", probe, error)
        return None
    numbers = [n for link in measured.links for n in (link.latency_s, link.bandwidth_bytes_per_s)]
    if not all(math.isfinite(n) and n > 0 for n in numbers):
        log.warning("the kept costs of the links of %s are of no use and measured again: %s", probe, numbers)
        return None
    return measured
