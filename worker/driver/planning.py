"""Planner: profiles layers, memory, links and optimizer of a gang, and asks the control plane for a plan.

Profiles are cached at the control plane by key; only a kind of worker without a cached profile is measured. One
worker traces the model, the others take its graph.
Measuring itself is done by the workers (worker/benchmark/), planning by the control plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from worker.contract.costs import (
    UpdateCosts,
    layer_outgrows_memory,
    mesh_profiles_json,
    min_memory_bytes,
    profiles_json,
)
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Job, may_interleave, microbatch_counts
from worker.contract.planned import (
    PlannedJob,
    corrected_activation_factor,
    parse_planned_job,
    planned_peak_bytes,
    static_bytes_by_mesh,
)
from worker.contract.profile import LayerProfile, mean_profile, slowest_profile
from worker.contract.reasons import Reason
from worker.driver.benchmarks import GangBenchmarks, GangCollectiveCosts, measure_collective_costs
from worker.driver.control_plane_client import ControlPlane, Refused
from worker.driver.gang import Gang, PerWorker, Phase
from worker.driver.limits import Limits
from worker.driver.reporter import Reporter


class Planner:
    """Measures the costs of one attempt's job on its gang, and has the control plane plan with them."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        reporter: Reporter,
        gang: Gang,
        device: str,
        limits: Limits,
        job: Job,
    ):
        self._job = job
        self._profiles: dict[str, LayerProfile] = {}
        self.profiles: list[LayerProfile | None] = []  # of each worker, once it is planned
        self._planned: PlannedJob | None = None
        self._traced_for: int | None = None  # the number of microbatches whose graph all workers have
        self._control = control
        self._reporter = reporter
        self._gang = gang
        self._device = device
        self._limits = limits

    def plan(self) -> PlannedJob:
        """Profile the layers, or take the cached profiles, and have the control plane plan.

        Raises AttemptFailure PLAN_INFEASIBLE when there is no plan, START_TIMEOUT when a worker is too slow.
        """
        keys = self._call(
            "prepare", PerWorker(self._by_worker(self._job.mesh_sizes)), what="building the data and the loss"
        )
        memory = self._measure_memory()
        profiles = self._profiles_of(keys, least_bytes=min_memory_bytes(memory))
        benchmarks = GangBenchmarks(
            control=self._control,
            reporter=self._reporter,
            gang=self._gang,
            device=self._device,
            limits=self._limits,
        )
        network = benchmarks.network(
            loops=may_interleave(self._job),
            skips=any(edge.target > edge.source + 1 for edge in next(iter(profiles.values())).edges),
        )
        collectives = measure_collective_costs(
            self._job, self._gang, reporter=self._reporter, limits=self._limits
        )
        profiles = {
            count: self._with_collectives(profile, collectives) for count, profile in profiles.items()
        }
        profiles_by_key = {
            key: self._with_collectives(profile, collectives) for key, profile in self._profiles.items()
        }
        measured = {
            "update": self._measure_update(collectives).to_json(),
            "action_s": benchmarks.action_s(),
        }
        kinds = [
            (size, tensor)
            for size, tensor in zip(self._job.mesh_sizes, self._job.tensors, strict=True)
            for _ in range(size)
        ]
        measured |= mesh_profiles_json(profiles_by_key, keys, kinds, profiles)
        planned = self._ask(profiles, network, {**memory, **measured})
        self._planned = planned
        self.profiles = [self._profiles.get(own[planned.microbatches]) for own in keys]
        self._trace_once(planned.microbatches)
        self._check_model_signature(planned)
        self._check_batch_sharding(planned)
        self._reporter.event(
            "planned",
            f"{planned.plan['chosen']}{planned.provenance}: {planned.microbatches} microbatches, "
            f"{len(planned.stage_starts)} stages, "
            f"makespan {planned.plan['makespan_s']:.4g} s, step {planned.step_s:.4g} s, "
            f"bubble {planned.plan['bubble_ratio']:.1%}, stages begin at {', '.join(planned.stage_starts)}"
            + (
                f"; actions take {planned.slowdown:.2f} times as long as alone: workers share processor cores"
                if planned.slowdown > 1
                else ""
            ),
        )
        return planned

    def _with_collectives(
        self, profile: LayerProfile, collectives: GangCollectiveCosts | None
    ) -> LayerProfile:
        """`profile` with the seconds of the collectives of tensor parallelism and of synchronised batch norms."""
        if collectives is None:
            return profile
        if collectives.tensor is not None:
            profile = profile.with_tensor_parallel_sums(collectives.tensor)
        if self._job.training.sync_batch_norm and collectives.data is not None:
            profile = profile.with_sync_batch_norm_sums(collectives.data)
        return profile

    def _trace_once(self, microbatches: int) -> None:
        """Worker 0 builds and traces the model, the others take its graph: only one ever holds all parameters."""
        if self._traced_for == microbatches:
            return
        first, *others = self._gang.workers
        notes = self._call_first("trace", microbatches, what="building and tracing the model")
        for note in notes or ():
            self._reporter.event("traced", note)
        own, *sizes = self._by_worker(self._job.dp_sizes)
        graphs = {
            size: first.graph.remote(*() if size == own else (size,)) for size in dict.fromkeys([own, *sizes])
        }
        self._call(
            "take_graph",
            PerWorker(graphs[size] for size in sizes),
            microbatches,
            workers=others,
            what="handing on the graph of the model",
        )
        self._traced_for = microbatches

    def _check_model_signature(self, planned: PlannedJob) -> None:
        """Refuse a saved plan that was made for another model than was traced here: its measurements may be older than the
        model's code."""
        sizes, tensors = self._job.dp_sizes, self._job.tensors
        wanted = planned.model_signatures.get(sizes[0])
        if wanted is None:
            return
        whole = (sizes[0], 1) in zip(sizes, tensors, strict=True)  # layers were measured with all parameters
        signature = self._call_first(
            "model_signature", whole, what="comparing the model with that of its plan"
        )
        if (different := signature.difference(wanted)) is not None:
            raise AttemptFailure(
                Reason.PLAN_INFEASIBLE,
                f"the plan {planned.saved_plan!r} cannot be used: it was made for another model: {different}; make it anew "
                "(slotline plan job.yaml --name ...), or submit the job without one",
            )

    def _check_batch_sharding(self, planned: PlannedJob) -> None:
        """Check that parts of a batch-sharded tensor mean the same in heterogeneous meshes."""
        if not self._job.heterogeneous:
            return
        workers_of_stage = [self._job.dp_sizes[int(mesh[1:])] for mesh in planned.mesh_of_stage]
        self._call_first(
            "check_batch_sharding",
            planned.stage_starts,
            workers_of_stage,
            what="comparing what meshes of unlike sizes mean by their parts of a tensor",
        )

    def _by_worker(self, by_mesh: Sequence[int]) -> list[int]:
        """The value of its mesh for each worker of the gang."""
        pairs = zip(by_mesh, self._job.mesh_sizes, strict=True)
        return [value for value, size in pairs for _ in range(size)]

    def correct(self, failure: OutOfMemoryFailure) -> None:
        """Store a larger activation factor after an attempt that ran out of memory, so that the next one plans with it."""
        if self._planned is None:
            return
        planned = planned_peak_bytes(self._planned.spec, self._planned.plan)
        factor = corrected_activation_factor(
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

    def _profiles_of(
        self, keys: Sequence[Mapping[int, str]], *, least_bytes: int | None = None
    ) -> dict[int, LayerProfile]:
        """The costs of the layers by number of microbatches, of the slowest kind of accelerator; workers of one kind have
        the same `keys`, by number of microbatches.

        Small microbatches first: where a layer of larger ones would not fit in `least_bytes`, or runs out of memory,
        these are left out.
        """
        profiles: dict[int, LayerProfile] = {}
        for count in sorted(keys[0], reverse=True):
            if profiles and layer_outgrows_memory(profiles, count, least_bytes):
                self._leave_out(count, "a layer's activations would not fit")
                break
            try:
                profiles[count] = self._profile_of([own[count] for own in keys], count)
            except AttemptFailure as failure:
                if not profiles or failure.reason is not Reason.OUT_OF_MEMORY:
                    raise
                self._leave_out(count, failure.message)
                break
        return dict(sorted(profiles.items()))

    def _leave_out(self, count: int, why: str) -> None:
        self._reporter.event("left_out", f"{count} microbatches, and fewer, are not planned: {why}")

    def _profile_of(self, keys: Sequence[str], count: int) -> LayerProfile:
        """The profile for `count` microbatches. A kind that has no stored one is measured: on CPU by all its
        workers at once, which share cores as in training.
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
        if missing:
            self._trace_once(count)
        measured = self._call(
            "profile",
            count,
            workers=[self._gang.workers[index] for index in measuring],
            what=f"profiling the layers for {count} microbatches",
            extra_s=self._job.training.compiling_s,
        )
        profile_of_worker = dict(zip(measuring, measured, strict=True))
        for key, indices in missing.items():
            profile = mean_profile([LayerProfile.from_json(profile_of_worker[index]) for index in indices])
            self._profiles[key] = profile
            self._control.store_profile(key, profile.to_json())
            self._reporter.event(
                "profiled",
                f"{len(profile.layers)} layers measured on {self._gang.addresses[indices[0]].node}, "
                f"the batch in {count} microbatches"
                + (f"; {len(profile.compiled)} of them compiled" if self._job.training.compile else ""),
            )
        return slowest_profile([self._profiles[key] for key in workers_of])

    def _measure_memory(self) -> dict[str, Any]:
        """The memory limit of each mesh (the least of its workers) and the optimizer's state, for the request."""
        gang = self._gang
        limits = self._call(
            "memory_limit",
            PerWorker(gang.workers_sharing_memory(address) for address in gang.addresses),
            what="looking at the memory",
        )
        optimizer = self._call_first("optimizer_state", what="trying the optimizer")
        limits_of_mesh: dict[str, list[int]] = {}
        for address, limit in zip(gang.addresses, limits, strict=True):
            if limit is not None:
                limits_of_mesh.setdefault(address.mesh, []).append(limit)
        return {
            "memory": [{"mesh": mesh, "memory_bytes": min(known)} for mesh, known in limits_of_mesh.items()],
            "optimizer": asdict(optimizer),
        }

    def _measure_cores(self) -> dict[str, float]:
        """The processor cores that the workers of each node have together; on CPU, where they share them."""
        if self._device != "cpu":
            return {}
        shares = self._call("processor_share", what="looking at the processor")
        cores: dict[str, float] = {}
        for address, share in zip(self._gang.addresses, shares, strict=True):
            cores[address.node] = cores.get(address.node, 0.0) + share
        return cores

    def _measure_update(self, collectives: GangCollectiveCosts | None) -> UpdateCosts:
        """The costs of REDUCE and STEP: on one worker, and of the collectives in the slowest mesh."""
        costs = self._call_first("update_costs", what="trying the optimizer")
        return costs if collectives is None else collectives.added_to(costs, self._job, self._gang)

    def _ask(
        self, profiles: Mapping[int, LayerProfile], network: Mapping[str, Any], costs: Mapping[str, Any]
    ) -> PlannedJob:
        cores = self._measure_cores()
        request = {
            **profiles_json(profiles),
            "tried": list(microbatch_counts(self._job)),
            "network": network,
            **costs,
            "workers": [
                {
                    "mesh": address.mesh,
                    "worker": address.worker,
                    "node": address.node,
                    "device": address.device,
                    "cores": cores.get(address.node),
                }
                for address in self._gang.addresses
            ],
        }
        try:
            answer = self._control.plan(request)
        except Refused as refused:
            if refused.final:
                raise
            raise AttemptFailure(Reason.PLAN_INFEASIBLE, refused.detail) from None
        return parse_planned_job(answer)

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

    def _call_first(self, method: str, *arguments: Any, what: str) -> Any:
        """The answer of worker 0 of the gang, which traced the model."""
        return self._call(method, *arguments, what=what, workers=self._gang.workers[:1])[0]
