"""What the control plane answers to a request for a plan, as drivers read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.model.form import ModelForm
from worker.model.update_costs import MeshUpdate
from worker.resharding_plan import ReshardingPlan


@dataclass(frozen=True)
class PlannedJob:
    """What the control plane answered: JSON of a PipelineSpec and a Plan, the layers that begin stages, and
    of each mesh what REDUCE and STEP take behind the makespan.

    `slowdown` is how many times as long as alone actions take by it, where workers share processor cores;
    `reshardings` are the transfers that do not go in pairs of workers, by edge and whether they are of gradients.
    """

    begins: tuple[str, ...]
    spec: Mapping[str, Any]
    plan: Mapping[str, Any]
    update: tuple[MeshUpdate, ...] = ()
    slowdown: float = 1.0
    reshardings: Mapping[tuple[int, bool], ReshardingPlan] = field(default_factory=dict)
    update_s: float | None = None
    named: str | None = None
    """The plan that the job was submitted with; `forms` of the model that it was made for, by how many
    workers a microbatch is dealt among."""
    forms: Mapping[int, ModelForm] = field(default_factory=dict)

    @property
    def as_named(self) -> str:
        """What to tell of where it comes from."""
        return "" if self.named is None else f" as the plan {self.named!r} has it"

    @property
    def microbatches(self) -> int:
        return self.spec["microbatches"]

    @property
    def step_s(self) -> float:
        """The planned length of a step: the makespan, and the longest REDUCE and STEP behind it."""
        longest = max((one.whole_s for one in self.update), default=0.0)
        return self.plan["makespan_s"] + (longest if self.update_s is None else self.update_s)

    @property
    def stage_names(self) -> list[str]:
        return [stage["name"] for stage in self.spec["stages"]]

    @property
    def recomputed(self) -> list[int]:
        """The stages that keep their inputs only."""
        return [index for index, stage in enumerate(self.plan.get("stages", ())) if stage["recomputed"]]

    def stages_of(self, mesh: str) -> list[int]:
        """The stages that a mesh runs."""
        return [index for index, other in enumerate(self.mesh_of_stage) if other == mesh]

    @property
    def mesh_of_stage(self) -> list[str]:
        return [stage["mesh"] for stage in self.spec["stages"]]


def planned_job(answer: Mapping[str, Any]) -> PlannedJob:
    """The control plane's answer to a request for a plan, read."""
    return PlannedJob(
        begins=tuple(answer["begins"]),
        spec=answer["spec"],
        plan=answer["plan"],
        update=tuple(MeshUpdate(**one) for one in answer.get("update") or ()),
        slowdown=answer.get("slowdown", 1.0),
        update_s=answer.get("update_s"),
        reshardings=reshardings_of(answer),
        named=(answer.get("named") or {}).get("name"),
        forms={
            int(workers): ModelForm.from_json(form)
            for workers, form in (answer.get("made_for") or {}).get("forms", {}).items()
        },
    )


def reshardings_of(answer: Mapping[str, Any]) -> dict[tuple[int, bool], ReshardingPlan]:
    """The reshardings in an answer, by edge and whether they are of gradients."""
    return {
        (one["edge"], one["backward"]): ReshardingPlan.from_json(one["plan"])
        for one in answer.get("reshardings") or ()
    }
