"""REST bodies between drivers and the control plane: assignment, reports, measured costs.

Unknown fields are ignored: a driver may be newer than the control plane. Text is made printable, as every database
takes it; numbers that JSON does not have are refused or left out. Times are Unix seconds.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from service.schemas.jobs import CheckpointView, Integer
from service.spec.job import METRIC_PATTERN, Arguments, Count
from service.spec.values import storable_text
from worker.contract.versions import PROTOCOL


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


FiniteOrNone = Annotated[float | None, AfterValidator(_finite_or_none)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
SequenceNumber = Annotated[int, Field(ge=1, lt=2**63)]
UnixTime = Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]
Printable = AfterValidator(storable_text)
# thousands of slots name the same few meshes, lanes and stages
CachedPrintable = AfterValidator(lru_cache(10_000)(storable_text))
Label = Annotated[str, Field(max_length=100), CachedPrintable]
SpanId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


_RESERVED_KINDS = {
    "state",
    "waiting",
    "ending",
    "silent",
    "removed",
    "end",
    "line",
    "message",
    "open",
    "error",
}
"""Kinds of the control plane's own events, of what its streams say of themselves, and of browsers' EventSource."""
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.:-]")


def driver_event_kind(kind: str) -> str:
    """`kind` as a name that is a driver's own: it ends no stream, and says nothing of a state.

    What no name holds is replaced: a stream leaves line ends out, so that `e nd` in two lines would be `end`.
    """
    name = _NOT_IN_NAME.sub("_", kind) or "event"
    return f"driver.{name}" if name.lower() in _RESERVED_KINDS else name


Metrics = Annotated[dict[Annotated[str, Field(pattern=METRIC_PATTERN)], FiniteOrNone], Field(max_length=32)]
"""Metrics that a loss returned beside itself, by name: as worker/actor/loss.py lets them pass."""


class ResumeSourceView(BaseModel):
    """A checkpoint of another training; `job` and `step` where it is a job's."""

    uri: str
    job: str | None = None
    step: int | None = None


class TokenExchange(BaseModel):
    """A token that the driver made, and that nobody else has seen."""

    token: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{32,90}$")]


class AttemptInput(BaseModel):
    """`job` is the job's JobSpec as it was stored."""

    attempt_id: str
    job_id: str
    number: int
    job: dict[str, Any]
    device: str
    resume: CheckpointView | None
    resume_from: ResumeSourceView | None = Field(
        default=None, description="The checkpoint that the job begins from while it has none of its own"
    )
    protocol: int = Field(
        default=PROTOCOL, description="What this control plane speaks: worker/contract/versions.py"
    )
    plan_timeout_s: float | None = Field(
        default=None, description="Seconds that the driver waits for the answer to a request for a plan"
    )
    recorded: dict[str, int] = Field(
        default={},
        description="The last step of which there is a record (`steps`), and an evaluation (`evaluations`); -1 for none",
    )
    secrets: dict[str, str] = Field(
        default={}, description="Environment variables that nothing but this answer holds"
    )
    checked: bool = Field(
        default=False, description="The job was checked before: the driver does not check it again"
    )
    left_out_nodes: list[str] = Field(
        default=[], description="Ray's ids of the nodes that take no work: drained, excluded or quarantined"
    )


class _FromDriver(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class ReportedStep(_FromDriver):
    step: Integer
    loss: FiniteOrNone = None
    metrics: Metrics = {}
    step_s: FiniteOrNone = None
    makespan_s: FiniteOrNone = None
    bubble_ratio: FiniteOrNone = None
    exposed_transfer_s: FiniteOrNone = None
    overlap_ratio: FiniteOrNone = None
    grad_norm: FiniteOrNone = None
    learning_rate: FiniteOrNone = None
    started_at: FiniteOrNone = None
    peak_memory_bytes: dict[Label, Annotated[int, Field(ge=0, lt=2**63)]] = {}


class ReportedSlot(_FromDriver):
    mesh: Label
    lane: Annotated[str, Field(max_length=120), CachedPrintable]
    action: Annotated[str, Field(max_length=20), CachedPrintable]
    stage: Label | None = None
    peer_stage: Label | None = None
    peer_mesh: Label | None = None
    edge: Integer | None = None
    microbatch: Integer | None = None
    start_s: Finite
    end_s: Finite


class ReportedTimeline(_FromDriver):
    step: Integer
    started_at: UnixTime
    uncertainty_s: FiniteOrNone = None
    slots: Annotated[list[ReportedSlot], Field(max_length=200_000)]


class ReportedEvent(_FromDriver):
    at: UnixTime
    kind: Annotated[str, Field(max_length=100), AfterValidator(driver_event_kind)]
    message: str


class ReportedCheckpoint(_FromDriver):
    step: Integer
    uri: Annotated[str, Printable]
    stored_bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class ReportedEvaluation(_FromDriver):
    step: Annotated[int, Field(ge=0, lt=2**31)]
    loss: FiniteOrNone = None
    metrics: Metrics = {}
    samples: Annotated[int, Field(ge=0, lt=2**31)] = 0
    evaluation_s: FiniteOrNone = None
    started_at: FiniteOrNone = None


class ReportedBest(ReportedCheckpoint):
    metric: Annotated[str, Field(pattern=METRIC_PATTERN)]
    value: Finite


class ReportedSpan(_FromDriver):
    """Something that the attempt did; below the attempt's own span where it names no parent."""

    name: Label
    span_id: SpanId
    parent_id: SpanId | None = None
    started_at: UnixTime
    ended_at: UnixTime
    attributes: Annotated[dict[Label, bool | int | float | str | None], Field(max_length=64)] = {}


class ReportedFlops(_FromDriver):
    step: Annotated[float, Field(ge=0, lt=1e30)] | None = None
    peak_per_s: Annotated[float, Field(gt=0, lt=1e30)] | None = None


class DrainingNode(_FromDriver):
    node: Label
    until: UnixTime | None = None


class RunningPlan(_FromDriver):
    """A plan that was swapped in between two steps: its first step, and what the answer to /replan had of it."""

    since_step: Integer
    plan: Arguments


class ReplanRequest(_FromDriver):
    """`since_step` is the first step of the plan that runs, null where the attempt began with it; `seconds_left` those of
    the steps that are left."""

    since_step: Integer | None = None
    seconds_left: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class StepPlansRequest(_FromDriver):
    """The buckets of the microbatches of single steps, each of which is to be planned: their numbers from 0, ascending as
    the profiles of a PlanRequest do, the largest last."""

    buckets: Annotated[
        list[Annotated[list[Annotated[int, Field(ge=0, lt=1024)]], Field(max_length=10_000)]],
        Field(min_length=1, max_length=64),
    ]


class ReportIn(_FromDriver):
    sequence: SequenceNumber
    state: Literal["RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"] | None = None
    reason: Label | None = None
    message: str | None = None
    steps: Annotated[list[ReportedStep], Field(max_length=100_000)] = []
    timelines: Annotated[list[ReportedTimeline], Field(max_length=100)] = []
    events: Annotated[list[ReportedEvent], Field(max_length=10_000)] = []
    metrics_endpoint: Annotated[str, Field(max_length=300), Printable] | None = None
    checkpoint: ReportedCheckpoint | None = None
    evaluations: Annotated[list[ReportedEvaluation], Field(max_length=10_000)] = []
    model_flops: ReportedFlops | None = None
    best_checkpoint: ReportedBest | None = None
    spans: Annotated[list[ReportedSpan], Field(max_length=10_000)] = []
    failed_nodes: Annotated[
        list[Label], Field(max_length=1024, description="Ray ids of the nodes that the failure is due to")
    ] = []
    draining: Annotated[
        list[DrainingNode] | None, Field(max_length=10_000, description="All nodes that Ray drains now")
    ] = None
    running_plan: RunningPlan | None = None
    takes_next: bool = Field(
        default=False, description="With a final state: the driver could run the job's next attempt, too"
    )


class NextAttempt(BaseModel):
    """An attempt that the driver of the one before is to run; `token` is nobody else's."""

    attempt_id: str
    token: str
    traceparent: str | None = Field(default=None, description="The attempt's span")


class ReportAnswer(BaseModel):
    command: Literal["continue", "stop", "cancel"]
    wanted_checkpoints: list[int] = Field(
        default=[], description="Steps whose checkpoints stay, as other jobs wait to begin from them"
    )
    next: NextAttempt | None = Field(
        default=None, description="The job's next attempt, for a driver that said it could run it"
    )


Bandwidth = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MeasuredLink(_FromDriver):
    source: Label
    target: Label
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Latency | None = None
    contention: Literal["link", "full-duplex", "half-duplex"] | None = None


class MeasuredNodeLink(_FromDriver):
    source: Label
    target: Label
    bandwidth_bytes_per_s: Bandwidth


class Network(_FromDriver):
    """A NetworkSpec as it was measured, and the links between `nodes` from which it was made. Drivers that measure no
    contention send none of it: `link` is planned."""

    contention: Literal["none", "link", "full-duplex", "half-duplex"] = "link"
    bandwidth_bytes_per_s: Bandwidth | None = None
    latency_s: Latency = 0.0
    links: Annotated[list[MeasuredLink], Field(max_length=100_000)] = []
    nodes: Annotated[list[MeasuredNodeLink], Field(max_length=100_000)] = []

    @model_validator(mode="after")
    def _one_model_or_none(self) -> Self:
        if self.contention == "none" and any(link.contention for link in self.links):
            raise ValueError("a link has contention, the network has none")
        return self


class PlacedWorker(_FromDriver):
    """`cores` are the processor cores that the workers of its node have together, where they compute on them."""

    mesh: Label
    worker: Integer
    node: str | None = None
    device: str | None = None
    cores: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class MeshMemory(_FromDriver):
    """The memory that each worker of a mesh may use."""

    mesh: Label
    memory_bytes: Annotated[int, Field(ge=0, lt=2**63)]


class OptimizerMemory(_FromDriver):
    """An OptimizerState of worker/contract/profile.py as it was measured."""

    bytes_per_parameter_byte: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 0.0
    bytes_per_tensor: Annotated[int, Field(ge=0, lt=2**63)] = 0


Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class LinearSeconds(_FromDriver):
    fixed_s: Seconds = 0.0
    per_tensor_s: Seconds = 0.0
    per_byte_s: Seconds = 0.0


class UpdateSeconds(_FromDriver):
    """UpdateCosts of worker/contract/costs.py as they were measured."""

    reduce: LinearSeconds = LinearSeconds()
    step: LinearSeconds = LinearSeconds()
    norm: LinearSeconds | None = None
    alone: Annotated[list[str], Field(max_length=1024)] = []
    scatter: LinearSeconds | None = None
    gather: LinearSeconds | None = None
    sums: LinearSeconds | None = None
    agree: LinearSeconds | None = None
    tensor: Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=1024)] = {}
    shared: Annotated[dict[str, Annotated[int, Field(ge=1, le=1024)]], Field(max_length=1024)] = {}


class MicrobatchProfile(_FromDriver):
    """The layers' costs with the batch in this number of microbatches."""

    microbatches: Count
    profile: Arguments


class LengthProfile(MicrobatchProfile):
    """The layers' costs for microbatches of one shape, smaller than the largest."""

    length: Count
    rows: Count


class MeshProfile(MicrobatchProfile):
    """The layers' costs measured by a mesh of `workers` with tensor-parallel groups of `tensor`, where meshes are
    heterogeneous."""

    workers: Count
    tensor: Count = 1


class PlanRequest(_FromDriver):
    """Measured costs of a job. One profile stands in `profile`, several in `profiles`; `tried` are numbers of
    microbatches, also of ones that were left out.

    Drivers that measure no memory send no `memory`: their plans have no limit of the whole. `action_s` is what the
    engine itself takes of a processor for each action.
    """

    profile: Arguments | None = None
    microbatches: Count | None = None
    profiles: Annotated[list[MicrobatchProfile], Field(max_length=100)] = []
    mesh_profiles: Annotated[list[MeshProfile], Field(max_length=10_000)] = []
    length_profiles: Annotated[list[LengthProfile], Field(max_length=64)] = []
    tried: Annotated[list[Count], Field(max_length=100)] = []
    network: Network = Network()
    memory: Annotated[list[MeshMemory], Field(max_length=100_000)] = []
    optimizer: OptimizerMemory = OptimizerMemory()
    update: UpdateSeconds = UpdateSeconds()
    action_s: Seconds = 0.0
    workers: Annotated[list[PlacedWorker], Field(max_length=100_000)] = []

    @model_validator(mode="after")
    def _something_was_measured(self) -> Self:
        if self.profile is None and not self.profiles:
            raise ValueError("no profile of the layers is given: send `profile`, or `profiles`")
        return self


class OfferedNode(_FromDriver):
    """A Node of service/scheduler/node_placement.py: `free` and `total` are workers that the node has room for."""

    name: Label
    free: Annotated[int, Field(ge=0, lt=2**31)]
    total: Annotated[int, Field(ge=0, lt=2**31)]
    accelerator_type: Label | None = None
    nvlink_domain: Label | None = None
    rack: Label | None = None
    zone: Label | None = None


class PlacedMesh(_FromDriver):
    workers: Annotated[int, Field(ge=1, le=1024)]
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.workers % self.tensor:
            raise ValueError(f"{self.workers} workers are no whole tensor-parallel groups of {self.tensor}")
        return self


class PlacementRequest(_FromDriver):
    """The nodes of the cluster as the driver's Ray sees them, and the job's meshes."""

    nodes: Annotated[list[OfferedNode], Field(max_length=10_000)]
    meshes: Annotated[list[PlacedMesh], Field(min_length=1, max_length=1024)]

    @field_validator("nodes")
    @classmethod
    def _names_differ(cls, nodes: list[OfferedNode]) -> list[OfferedNode]:
        if len({node.name for node in nodes}) < len(nodes):
            raise ValueError("two nodes have one name")
        return nodes


class PlacementAnswer(BaseModel):
    """`workers` has the node of each worker of each mesh; null where the meshes do not fit now, for the reason `refused`.
    `final` where they would not fit on idle nodes either."""

    workers: list[list[str]] | None = None
    refused: str | None = None
    final: bool = False
