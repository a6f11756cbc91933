"""REST bodies for plans: of a job that trains, of one that does not, and saved ones; times in seconds.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.spec.job import LimitedArguments
from service.spec.principals import DEFAULT_PROJECT

ACTION_LIMIT = 200_000
"""Largest microbatches x (stages + edges) that the control plane plans: what fits into its time and memory for one plan."""


class PlanSpec(BaseModel):
    """A PipelineSpec (DESIGN section 4). Its details are checked by the scheduler, not here.

    Where microbatches have unequal lengths, `length_buckets` gives costs for every stage and edge of each length, and
    `bucket_of` the bucket of each microbatch.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    microbatches: Annotated[int, Field(ge=1)]
    meshes: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    stages: Annotated[list[LimitedArguments], Field(min_length=1, fail_fast=True)]
    edges: Annotated[list[LimitedArguments], Field(fail_fast=True)] = []

    @property
    def actions(self) -> int:
        return self.microbatches * (len(self.stages) + len(self.edges))


class MeshUpdateView(BaseModel):
    """The planned seconds of one mesh's REDUCE and STEP."""

    mesh: str
    reduce_s: float
    step_s: float


class CalibratedCostView(BaseModel):
    """Seconds of one microbatch's action of a stage, or of a transfer; REDUCE and STEP are those of a mesh in one step.

    `spread_s` is the median absolute deviation of steps, `late_s` from when all that it needs is there to its start.
    """

    mesh: str
    action: str
    seconds: float
    spread_s: float
    late_s: float
    stage: str | None
    edge: int | None
    target: str | None = Field(description="The mesh that receives a transfer")


class CalibrationView(BaseModel):
    """The plan with the costs that `steps` profiled steps gave: medians over these steps.

    `makespan_s` is that of the plan's programs with these costs, `measured_makespan_s` that of the steps themselves,
    `spread_s` their median absolute deviation, `update_s` what REDUCE and STEP took behind it.
    """

    steps: int
    makespan_s: float
    measured_makespan_s: float
    spread_s: float
    update_s: float
    costs: list[CalibratedCostView]


class SavedPlanRef(BaseModel):
    """A plan that its owner has saved under a name."""

    id: str
    owner: str
    name: str


class JobPlanView(BaseModel):
    """`step_s` is the planned step: the plan's makespan, and `update_s`, the longest REDUCE and STEP behind it.
    These are null, and `update` empty, in plans of an older Slotline."""

    begins: list[str]
    spec: dict[str, Any]
    plan: dict[str, Any]
    step_s: float | None = None
    update_s: float | None = None
    update: list[MeshUpdateView] = []
    planning_notes: list[str] = Field(
        default=[],
        description="What is unusual about the plan: made without a search, a stage without parameters",
    )
    nodes: dict[str, list[str]] = Field(
        default={},
        description="The nodes of each mesh of the attempt that was planned for; empty without one",
    )
    calibrated: CalibrationView | None = Field(
        default=None, description="The plan with measured costs; null until a step of it was profiled"
    )
    named: SavedPlanRef | None = Field(
        default=None, description="The saved plan that this is; null where it was made for its job alone"
    )
    step_planner: dict[str, Any] | None = Field(
        default=None,
        exclude_if=lambda planner: planner is None,
        description="The costs of each length, by which single steps are planned; left out where all microbatches have one",
    )


class ReplanView(BaseModel):
    """A shorter plan of the same stages on the same meshes for a running job: `planned_s` is its makespan at measured
    costs, `running_s` that of the programs that run (both on average where costs vary), `spread_s` the deviation of the
    measured steps. `found` is null where there is none that is clearly shorter, and `why` says so."""

    found: JobPlanView | None = None
    running_s: float | None = None
    planned_s: float | None = None
    spread_s: float | None = None
    why: str | None = None


class StepPlansView(BaseModel):
    """The plans of single steps of a running job, in the order of the request; null where the job's own plan is as
    short."""

    plans: list[JobPlanView | None]


class RangeView(BaseModel):
    """The value to expect, and bounds between which it is in nine of ten runs."""

    low: float
    middle: float
    high: float


class ForecastView(BaseModel):
    """The step and memory to expect, after what `runs` attempts on such accelerators made of their plans: those of this
    model, where there are enough, or of any."""

    runs: int
    of: Literal["this model", "these accelerators"]
    step_s: RangeView
    peak_bytes: RangeView | None = Field(description="Most memory of a worker; null where none was measured")


class JobPlanPreview(JobPlanView):
    """The plan of a job that does not train. `notes` say what was assumed where it was not measured."""

    measured_by: Literal["gang", "one worker"]
    notes: list[str]
    forecast: ForecastView | None = Field(
        default=None, description="Null where too few jobs have trained on such accelerators"
    )


class ProfilingView(BaseModel):
    """A job's costs are being measured; the same request, sent again, answers with the plan."""

    state: Literal["PROFILING"]
    message: str


class SavedPlanSummary(BaseModel):
    """A saved plan without its slots and programs; `begins` are the modules that begin its stages."""

    id: str
    owner: str = Field(description="Who keeps it; empty where nobody was asked for a name")
    project: str = Field(default=DEFAULT_PROJECT, description="That of the job that it was made for")
    name: str
    created_at: datetime
    used_at: datetime = Field(description="When it was made, or a job was last submitted with it")
    expires_at: datetime | None = Field(
        description="It goes then, unless a job is submitted with it; null: never"
    )
    size_bytes: int
    job_name: str
    begins: list[str]
    meshes: int
    workers: list[int] = Field(description="Of each mesh")
    microbatches: int
    precision: str
    device: str | None
    schedule: str
    recomputed: list[str] = Field(description="Stages that compute their forward again")
    step_s: float


class SavedPlanList(BaseModel):
    items: list[SavedPlanSummary]
    next_page_token: str | None


class SavedPlanView(SavedPlanSummary):
    """A saved plan, and the job (a JobSpec) that it was made for."""

    job: dict[str, object]
    plan: JobPlanPreview
