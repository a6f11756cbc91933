"""From loaded data and models to a plan: costs of the layers, cost of transfers, the control plane's answer.

Measuring is the workers' (worker/model/measure.py, worker/transport/links.py), planning the control plane's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from worker.driver.control_plane import ControlPlane, Refused
from worker.driver.gang import Gang
from worker.driver.limits import Limits
from worker.driver.report import Reporter
from worker.failure import AttemptFailure, OutOfMemoryFailure
from worker.model.memory_plan import corrected_factor, planned_peak_bytes, static_bytes_by_mesh
from worker.model.profile import LayerProfile, mean_profile, slowest_profile
from worker.node import own_node_address
from worker.reasons import Reason
from worker.transport import Topology
from worker.transport.network import choose_probes, network_of
from worker.transport.rendezvous import host_store

PROBE_LIMIT_S = 10.0


@dataclass(frozen=True)
class PlannedJob:
    """What the control plane answered: JSON of a PipelineSpec and a Plan, and the layers that begin stages."""

    begins: tuple[str, ...]
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]

    @property
    def stage_names(self) -> list[str]:
        return [stage["name"] for stage in self.spec["stages"]]

    @property
    def mesh_of_stage(self) -> list[str]:
        return [stage["mesh"] for stage in self.spec["stages"]]


class Planner:
    """One attempt's way to a plan. `stages` is how many the job asks for; `interrupted` is that of `Gang.call`."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        reporter: Reporter,
        gang: Gang,
        device: str,
        limits: Limits,
        stages: int,
        interrupted: Callable[[], None],
    ):
        self._stages = stages
        self._profiles: dict[str, LayerProfile] = {}
        self._planned: PlannedJob | None = None
        self._control = control
        self._reporter = reporter
        self._gang = gang
        self._device = device
        self._limits = limits
        self._interrupted = interrupted

    def plan(self, workers_per_mesh: int) -> PlannedJob:
        """Profile the layers, or take the cached profile, and have the control plane plan.

        Raises AttemptFailure PLAN_INFEASIBLE when there is no plan, START_TIMEOUT when a worker is too slow.
        """
        keys = self._call(
            [worker.prepare.remote(workers_per_mesh) for worker in self._gang.workers],
            "building the model and the data",
            self._limits.prepare_s,
        )
        profile = self._profile_of(keys).to_json()
        planned = self._ask(profile, self._measure_network(profile), self._measure_memory())
        self._planned = planned
        self._reporter.event(
            "planned",
            f"{planned.plan['chosen']}: makespan {planned.plan['makespan_s']:.4g} s, "
            f"bubble {planned.plan['bubble_ratio']:.1%}, stages begin at {', '.join(planned.begins)}",
        )
        return planned

    def correct(self, failure: OutOfMemoryFailure) -> None:
        """Store what an attempt that ran out of memory has learned, so that the next one plans with it."""
        if self._planned is None:
            return
        planned = planned_peak_bytes(self._planned.spec, self._planned.plan)
        factor = corrected_factor(
            max(profile.activation_factor for profile in self._profiles.values()),
            planned_bytes=planned.get(failure.mesh, 0),
            static_bytes=static_bytes_by_mesh(self._planned.spec).get(failure.mesh, 0),
            seen_bytes=failure.seen_bytes,
        )
        for key, profile in self._profiles.items():
            self._control.store_profile(key, replace(profile, activation_factor=factor).to_json())
        self._reporter.event(
            "memory_corrected", f"the next plan takes {factor:.3g} times the activations that were profiled"
        )

    def _profile_of(self, keys: Sequence[str]) -> LayerProfile:
        """The costs of the layers, of the slowest kind of accelerator; `keys`, one a worker, tell kinds apart.

        A kind that has no stored profile is measured: on CPU by all its workers at once, which share
        cores as in training.
        """
        workers_of: dict[str, list[int]] = {}
        for index, key in enumerate(keys):
            workers_of.setdefault(key, []).append(index)
        for key in workers_of:
            if (stored := self._control.cached_profile(key)) is not None:
                self._profiles[key] = LayerProfile.from_json(stored)
        missing = {
            key: indices if self._device == "cpu" else indices[:1]
            for key, indices in workers_of.items()
            if key not in self._profiles
        }
        measuring = [index for indices in missing.values() for index in indices]
        measured = self._call(
            [self._gang.workers[index].profile.remote() for index in measuring],
            "profiling the layers",
            self._limits.prepare_s,
        )
        found = dict(zip(measuring, measured, strict=True))
        for key, indices in missing.items():
            profile = mean_profile([LayerProfile.from_json(found[index]) for index in indices])
            self._profiles[key] = profile
            self._control.store_profile(key, profile.to_json())
            self._reporter.event(
                "profiled",
                f"{len(profile.layers)} layers measured on {self._gang.addresses[indices[0]].node}",
            )
        return slowest_profile(list(self._profiles.values()))

    def _measure_network(self, profile: Mapping[str, Any]) -> dict[str, Any]:
        """JSON of a NetworkSpec: what transfers between the meshes cost and share, on a rendezvous of its own."""
        meshes = [mesh.name for mesh in self._gang.meshes]
        node_of = {address.mesh: address.node for address in self._gang.addresses if address.worker == 0}
        ways = {
            "loops": self._stages > len(meshes),
            "skips": any(edge["target"] > edge["source"] + 1 for edge in profile["edges"]),
        }
        probes = choose_probes(meshes, node_of, **ways)
        if not probes:
            return network_of([], meshes, node_of, **ways)
        store = host_store("0.0.0.0")
        measured = self._call(
            [
                mesh.workers[0].measure_links.remote(
                    probes=probes,
                    topology=Topology(meshes=tuple(meshes)),
                    store=(own_node_address(), store.port),
                    host=node_of[mesh.name],
                    connect_s=self._limits.connect_s,
                )
                for mesh in self._gang.meshes
            ],
            f"measuring the links ({len(probes)} of them)",
            2 * self._limits.connect_s + PROBE_LIMIT_S * len(probes),
        )
        network = network_of([one for found in measured for one in found], meshes, node_of, **ways)
        self._reporter.event(
            "links_measured",
            f"{network['contention']}; the slowest moves {network['bandwidth_bytes_per_s']:.3g} bytes a second "
            f"after {network['latency_s']:.2g} s",
        )
        return network

    def _measure_memory(self) -> dict[str, Any]:
        """What each mesh may hold (of its workers the least) and what the optimizer will keep, for the request."""
        gang = self._gang
        limits = self._call(
            [
                worker.memory_limit.remote(gang.sharing(address))
                for worker, address in zip(gang.workers, gang.addresses, strict=True)
            ],
            "looking at the memory",
            self._limits.prepare_s,
        )
        (optimizer,) = self._call(
            [gang.workers[0].optimizer_state.remote()], "trying the optimizer", self._limits.prepare_s
        )
        of_mesh: dict[str, list[int]] = {}
        for address, limit in zip(gang.addresses, limits, strict=True):
            if limit is not None:
                of_mesh.setdefault(address.mesh, []).append(limit)
        return {
            "memory": [{"mesh": mesh, "memory_bytes": min(found)} for mesh, found in of_mesh.items()],
            "optimizer": asdict(optimizer),
        }

    def _ask(
        self, profile: Mapping[str, Any], network: Mapping[str, Any], memory: Mapping[str, Any]
    ) -> PlannedJob:
        request = {
            "profile": profile,
            "network": network,
            **memory,
            "workers": [
                {"mesh": a.mesh, "worker": a.worker, "node": a.node, "device": a.device}
                for a in self._gang.addresses
            ],
        }
        try:
            answer = self._control.plan(request)
        except Refused as refused:
            if refused.final:
                raise
            raise AttemptFailure(Reason.PLAN_INFEASIBLE, refused.detail) from None
        return PlannedJob(tuple(answer["begins"]), answer["spec"], answer["plan"])

    def _call(self, refs: Sequence[Any], what: str, limit_s: float) -> list[Any]:
        return self._gang.call(
            refs,
            what=what,
            limit_s=limit_s,
            timeout_reason=Reason.START_TIMEOUT,
            interrupted=self._interrupted,
        )


def planned_seconds(plan: Mapping[str, Any], stage_names: Sequence[str]) -> dict[str, list[float]]:
    """Planned seconds of every instruction of every mesh's program (0 for REDUCE and STEP).

    Slots name their stage, instructions count it: `stage_names` are in that order.
    """
    slots = _slots_of_instructions(plan, stage_names)
    return {
        mesh: [0.0 if s is None else s["end_s"] - s["start_s"] for s in found]
        for mesh, found in slots.items()
    }


def planned_starts(plan: Mapping[str, Any], stage_names: Sequence[str]) -> dict[str, list[float | None]]:
    """When every instruction of every mesh's program starts by the plan (None for REDUCE and STEP)."""
    slots = _slots_of_instructions(plan, stage_names)
    return {mesh: [None if s is None else s["start_s"] for s in found] for mesh, found in slots.items()}


def _slots_of_instructions(
    plan: Mapping[str, Any], stage_names: Sequence[str]
) -> dict[str, list[Mapping[str, Any] | None]]:
    number = {name: i for i, name in enumerate(stage_names)}
    planned = {
        (s["mesh"], s["action"], number[s["stage"]], s["microbatch"], s.get("edge")): s for s in plan["slots"]
    }
    return {
        mesh: [planned.get((mesh, i["op"], i["stage"], i["microbatch"], i["edge"])) for i in instructions]
        for mesh, instructions in plan["programs"].items()
    }
