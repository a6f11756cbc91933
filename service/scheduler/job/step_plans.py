"""StepPlanner: plans single steps of a job by the buckets of their microbatches, where samples have unequal lengths.

Every step may run by the job's own plan, for which all microbatches are as large as the largest: its memory bounds that of
any step. A step's plan has the costs and bytes of its own buckets, and an order of microbatches; it is proved as any plan
is. It keeps cut, placement and what recomputes, so that running workers can swap it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from service.scheduler.auto.recomputation import with_recomputation
from service.scheduler.job.cores import SharedCores, core_bound_step_s
from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.partition import PartitionResult, partition
from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import peak_memory
from service.scheduler.problem.spec import (
    EdgeCosts,
    EdgeSpec,
    LengthBucket,
    PipelineSpec,
    SpecError,
    StageCosts,
    edge_costs,
)
from service.scheduler.programs.decode import read_programs
from service.scheduler.programs.plan import Plan, StagePlan
from service.scheduler.programs.replay import replay
from worker.contract.buckets import with_buckets
from worker.contract.job import Bucket
from worker.contract.planned import recompute_method
from worker.contract.profile import LayerProfile
from worker.contract.program import Program, program_from_json

LEAST_GAIN = 0.01
"""Of the makespan of a step by the job's plan, below which its own plan is not worth a swap."""


@dataclass(frozen=True)
class StepPlanner:
    """`spec.length_buckets` ascend to the largest, whose costs the stages and edges have; `programs` are the job's own, by
    mesh, and `stages` say what recomputes in them."""

    spec: PipelineSpec
    programs: Mapping[str, Sequence[Mapping[str, Any]]]
    stages: tuple[StagePlan, ...]

    @classmethod
    def of(
        cls,
        cut: PartitionResult,
        plan: Plan,
        profiles: Mapping[Bucket, LayerProfile],
        setup: PipelineSetup,
    ) -> StepPlanner:
        """Take a job's plan of this cut for its largest microbatches, and the `profiles` of smaller ones by bucket."""
        most = cut.spec
        meshes = [mesh.name for mesh in most.meshes]
        recomputed = [stage.name for stage in plan.stages if stage.recomputed]
        methods = [(stage.name, recompute_method(dict(stage))) for stage in plan.stages if stage.recomputed]

        def decided(spec: PipelineSpec) -> PipelineSpec:
            spec = with_recomputation(spec, recomputed, methods)
            return spec.model_copy(update={"edges": _edges_in_seconds(spec, most)})

        spec, buckets = decided(most), []
        for _, profile in sorted(profiles.items()):
            smaller = partition(
                profile,
                setup,
                stages=len(most.stages),
                microbatches=most.microbatches,
                cut=cut.stage_starts,
                placement=[meshes.index(stage.mesh) for stage in most.stages],
            )
            buckets.append(_bucket(decided(smaller.spec), spec))
        buckets.append(_bucket(spec, spec))
        largest = [len(buckets) - 1] * spec.microbatches
        return cls(
            spec.model_copy(update={"length_buckets": buckets, "bucket_of": largest}),
            {
                mesh: [item.to_json() for item in with_buckets(plan.program(mesh), ()).program]
                for mesh in plan.programs
            },
            tuple(plan.stages),
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object; `from_json` is its inverse."""
        return {
            "spec": self.spec.model_dump(mode="json"),
            "programs": dict(self.programs),
            "stages": [stage.model_dump(mode="json") for stage in self.stages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepPlanner:
        """Inverse of `to_json`."""
        return cls(
            PipelineSpec.model_validate(data["spec"]),
            data["programs"],
            tuple(StagePlan(**stage) for stage in data["stages"]),
        )

    def spec_of(self, bucket_of: Sequence[int]) -> PipelineSpec:
        """The pipeline of a step whose microbatches are in these buckets, by number. Raises SpecError for another number of
        microbatches, and for a bucket that the job's plan does not know."""
        if len(bucket_of) != self.spec.microbatches:
            raise SpecError(f"{len(bucket_of)} buckets are given for {self.spec.microbatches} microbatches")
        if (most := max(bucket_of)) >= (known := len(self.spec.length_buckets)):
            raise SpecError(f"a microbatch is in bucket {most}, and the job's plan knows 0 to {known - 1}")
        return self.spec.model_copy(update={"bucket_of": list(bucket_of)})

    def makespan_by_job_plan(self, spec: PipelineSpec) -> float:
        """Seconds of a step of `spec_of` that runs by the job's own plan."""
        return replay(*read_programs(spec, self._job_programs)).serialised_makespan_s

    @cached_property
    def _job_programs(self) -> dict[str, Program]:
        return {mesh: program_from_json(program) for mesh, program in self.programs.items()}

    @cached_property
    def job_plan_bytes(self) -> tuple[int, ...]:
        """The most bytes that each mesh holds by the job's own plan, where all microbatches are the largest."""
        played = replay(*read_programs(self.spec, self._job_programs))
        return tuple(peak_memory(played.timeline).tolist())

    def plan(
        self,
        bucket_of: Sequence[int],
        *,
        shared: Sequence[SharedCores] = (),
        expired: Callable[[], bool] | None = None,
    ) -> tuple[PipelineSpec, Plan] | None:
        """A plan of a step with microbatches in these buckets, and its spec; None where the job's own is as short, where the
        cores that workers share decide, and where only a search finds one within memory."""
        spec = self.spec_of(bucket_of)
        try:
            plan = make_plan(spec, budget_s=0.0, expired=expired, enough_bytes=self.job_plan_bytes)
        except SpecError:
            return None
        processor_s = core_bound_step_s({mesh.name: mesh.compute_s for mesh in plan.meshes}, shared)
        if max(plan.programs_makespan_s, processor_s) > (1 - LEAST_GAIN) * self.makespan_by_job_plan(spec):
            return None
        return spec, plan.model_copy(update={"stages": list(self.stages)})


def _edges_in_seconds(spec: PipelineSpec, most: PipelineSpec) -> list[EdgeSpec]:
    """The edges with the seconds of their bytes, each held in a buffer as large as the largest microbatch needs."""
    seconds = edge_costs(spec)
    edges = []
    for index, (edge, longest) in enumerate(zip(spec.edges, most.edges, strict=True)):
        forward_s, backward_s = seconds(index)
        sizes = (longest.forward_bytes, longest.backward_bytes, longest.held_bytes)
        held = max((size for size in sizes if size is not None), default=None)
        edges.append(
            edge.model_copy(
                update={
                    "forward_s": forward_s,
                    "backward_s": backward_s,
                    "forward_bytes": None,
                    "backward_bytes": None,
                    "held_bytes": held,
                }
            )
        )
    return edges


def _bucket(spec: PipelineSpec, most: PipelineSpec) -> LengthBucket:
    """The costs of `spec`, none above those of `most`: measured times vary."""

    def costs(model: type, one: Any, limit: Any) -> Any:
        values = {name: (getattr(one, name), getattr(limit, name)) for name in model.model_fields}
        return model(**{name: None if b is None else min(a, b) for name, (a, b) in values.items()})

    return LengthBucket(
        stages=[costs(StageCosts, one, limit) for one, limit in zip(spec.stages, most.stages, strict=True)],
        edges=[costs(EdgeCosts, one, limit) for one, limit in zip(spec.edges, most.edges, strict=True)],
    )
