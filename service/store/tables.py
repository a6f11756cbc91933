"""All tables as SQLAlchemy classes; times are UTC, durations are seconds, sizes are bytes.

`slots` is also read by Grafana with plain SQL: its column names are an interface. Lease and task times are the
database's own Unix seconds. Queries of many rows leave long columns out: WITHOUT_SPEC, WITHOUT_LOG,
WITHOUT_PLAN_BODY. `plans.body` is JSON as text, passed on without parsing. Jobs refer to saved plans by id, so that a
deleted plan, which has lost its name, stays for the jobs that were submitted with it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, defer, mapped_column

from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.principals import DEFAULT_PROJECT
from service.spec.states import AttemptState, JobState
from worker.contract.logs import TraceParent


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time on every database; SQLite forgets the zone and gets it back here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime, dict[str, Any]: JSON}  # noqa: RUF012


class JobRow(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_created", "created_at", "id"),
        Index("ix_jobs_state_queue", "state", "queue"),
        Index("ix_jobs_owner_created", "owner", "created_at"),
        Index("ix_jobs_state_created", "state", "created_at", "id"),
        Index("ix_jobs_queue_created", "queue", "created_at", "id"),
        Index("ix_jobs_name_created", "name", "created_at", "id"),
        Index("ix_jobs_project_created", "project", "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    queue: Mapped[str] = mapped_column(String(100))
    priority: Mapped[int]
    accelerators: Mapped[int]
    """Of its whole gang with its spares; of an elastic job the most."""
    fewest_accelerators: Mapped[int | None]
    """With which an elastic job, or one with spares, trains at least; None for others."""
    last_accelerators: Mapped[int | None]
    """Of its last attempt."""
    accelerator_type: Mapped[str | None] = mapped_column(String(100))
    """The type that it asks for; None: any."""
    patient_until: Mapped[datetime | None]
    """Until when an elastic job waits for as many accelerators as its last attempt had."""
    # 0: with heterogeneous meshes or spares; the specification has the number of each
    workers_per_mesh: Mapped[int] = mapped_column(default=1, server_default="1")
    device: Mapped[str] = mapped_column(String(10))
    """The device of the specification; the first attempt replaces `auto` by its own, which later attempts use too."""
    spec: Mapped[dict[str, Any]]
    """Long: queries of more than one job leave it out, see WITHOUT_SPEC."""
    steps_wanted: Mapped[int] = mapped_column(default=0, server_default="0")
    state: Mapped[str] = mapped_column(String(20), default=JobState.QUEUED)
    reason: Mapped[str | None] = mapped_column(String(100))
    message: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    queued_at: Mapped[datetime]
    not_before: Mapped[datetime | None]
    cancel_requested_at: Mapped[datetime | None]
    check_state: Mapped[str | None] = mapped_column(String(20))
    """A CheckState; None before the check of the job, and after a retry."""
    owner: Mapped[str] = mapped_column(String(200), default="", server_default="")
    """Name of the principal that submitted it; empty on servers without authentication."""
    project: Mapped[str] = mapped_column(String(100), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT)
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    """Stored form of the owner's key: see jobs.scoped_idempotency_key."""
    request_digest: Mapped[str | None] = mapped_column(String(64))
    current_attempt: Mapped[str | None] = mapped_column(String(60))
    attempts_made: Mapped[int] = mapped_column(default=0)
    attempts_forgiven: Mapped[int] = mapped_column(default=0)
    """Attempts up to this number no longer count against `retry`: the user asked to try again."""
    infrastructure_forgiven: Mapped[int] = mapped_column(default=0, server_default="0")
    """Attempts up to this number no longer count against `retry.infrastructure`: a checkpoint came after them."""
    last_event: Mapped[int] = mapped_column(default=0)
    step: Mapped[int | None]
    loss: Mapped[float | None]
    metrics: Mapped[dict[str, Any] | None]
    step_s: Mapped[float | None]
    checkpoint_step: Mapped[int | None]
    checkpoint_uri: Mapped[str | None] = mapped_column(Text)
    labels: Mapped[dict[str, Any] | None]
    """The labels of the specification, for lists to show; filters use JobLabel."""
    notifications: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """The webhooks of the specification, which are notified of the job's states."""
    max_duration_s: Mapped[float | None]
    held_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """Seconds for which ended attempts held accelerators, since the user's last retry."""
    trained_s: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """Seconds of its steps that count: those that an attempt repeats count once, as it took them."""
    best_checkpoint: Mapped[dict[str, Any] | None]
    """Step, uri, metric and value of the best checkpoint by `evaluation.metric`."""
    traceparent: Mapped[str | None] = mapped_column(String(55))
    """W3C trace context of the request that submitted it."""
    cluster: Mapped[str | None] = mapped_column(String(100))
    """Cluster of all its attempts, set by the first; see `began_on`."""
    saved_plan_id: Mapped[str | None] = mapped_column("given_plan", String(40), index=True)
    """Id of the saved plan that it was submitted with."""
    stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Bytes of its checkpoints, as last reported by its driver or by a removal."""
    step_flops: Mapped[float | None] = mapped_column(Double)
    """FLOPs of the model in a step and, below, peak FLOP/s of its accelerators, as its driver reports them."""
    peak_flops_per_s: Mapped[float | None] = mapped_column(Double)
    files_removed_at: Mapped[datetime | None]
    """Time at which retention deleted all its files."""

    @property
    def trace_id(self) -> str | None:
        """The trace id of all logs of the job; None for a job without trace context."""
        context = TraceParent.read(self.traceparent)
        return None if context is None else context.trace_id

    @property
    def began_on(self) -> str | None:
        """The cluster of its attempts and checkpoints; None before the first attempt."""
        return cluster_of_attempts(self.cluster, self.attempts_made)

    @property
    def is_elastic(self) -> bool:
        """True where its number of meshes may change."""
        return self.fewest_accelerators is not None and self.workers_per_mesh > 0

    @property
    def job_state(self) -> JobState:
        return JobState(self.state)


def cluster_of_attempts(cluster: str | None, attempts: int) -> str | None:
    """The cluster of a job's attempts by its columns; None before the first attempt."""
    if cluster is None and attempts:
        return DEFAULT_CLUSTER  # a job from before clusters had names
    return cluster


WITHOUT_SPEC = defer(JobRow.spec, raiseload=True)
"""Option of queries that load thousands of jobs; access to the specification of such a job raises."""


class AttemptRow(Base):
    __tablename__ = "attempts"
    __table_args__ = (
        UniqueConstraint("job_id", "number"),
        Index("ix_attempts_state", "state"),
        Index("ix_attempts_cluster_device_created", "cluster", "device", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(60), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(String(20), default=AttemptState.STARTING)
    reason: Mapped[str | None] = mapped_column(String(100))
    message: Mapped[str | None] = mapped_column(Text)
    token: Mapped[str] = mapped_column(String(100))
    """In plain text: the orchestrator hands it out again when a start has to be repeated."""
    device: Mapped[str] = mapped_column(String(10))
    accelerators: Mapped[int]
    accelerator_type: Mapped[str | None] = mapped_column(String(100))
    """Of all its accelerators; None: of nodes that tell none."""
    created_at: Mapped[datetime]
    submitted_at: Mapped[datetime | None]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime | None]
    last_sequence: Mapped[int] = mapped_column(BigInteger, default=0)
    metrics_endpoint: Mapped[str | None] = mapped_column(String(300))
    peak_memory_bytes: Mapped[dict[str, Any] | None]
    """Peak memory of a worker of each mesh in a step, by mesh."""
    log: Mapped[str | None] = mapped_column(Text)
    """The driver's log, stored after the attempt's end; a long log begins at `log_first_line`."""
    log_first_line: Mapped[int] = mapped_column(default=1)
    stopped_because: Mapped[str | None] = mapped_column(Text)
    """Reason for which Slotline had Ray stop the driver, if it did."""
    end_asked_at: Mapped[datetime | None]
    """Time of the request to the driver to save a checkpoint and end, for the reason `end_asked_for`."""
    end_asked_for: Mapped[str | None] = mapped_column(String(100))
    failed_step: Mapped[int | None]
    """The last step that its job had reported when it failed."""
    first_step: Mapped[int | None]
    """The first step that it reported: it went on from the step before."""
    cluster: Mapped[str] = mapped_column(String(100), default=DEFAULT_CLUSTER, server_default=DEFAULT_CLUSTER)
    """Name of the Ray cluster that it began on, whatever the settings say now."""
    planned_step_s: Mapped[float | None] = mapped_column(Double)
    """Of the plan with which it began, before anything was measured; and the most memory that it needs of a worker."""
    planned_peak_bytes: Mapped[int | None] = mapped_column(BigInteger)
    model_key: Mapped[str | None] = mapped_column(String(64))
    """Equal for attempts of one owner's model and code."""
    driver_of: Mapped[str | None] = mapped_column(String(60))
    """The earlier attempt whose driver went on with this one; None: it has a driver of its own."""

    @property
    def driver_id(self) -> str:
        """The id under which Ray has its driver, and the name under which that driver holds accelerators."""
        return self.driver_of or self.id

    @property
    def attempt_state(self) -> AttemptState:
        return AttemptState(self.state)


WITHOUT_LOG = defer(AttemptRow.log, raiseload=True)
"""Option of queries that need no logs, which are long."""


class JobLabelRow(Base):
    """A label of a job, for filters."""

    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_name_value", "name", "value", "job_id"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    value: Mapped[str] = mapped_column(String(63))


class EventRow(Base):
    __tablename__ = "events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    at: Mapped[datetime]
    attempt: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(100))
    message: Mapped[str] = mapped_column(Text)
    principal: Mapped[str | None] = mapped_column(String(200))
    """The principal who asked for it, if anybody did."""


class StepRow(Base):
    __tablename__ = "steps"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    loss: Mapped[float | None]
    step_s: Mapped[float | None]
    makespan_s: Mapped[float | None]
    bubble_ratio: Mapped[float | None]
    exposed_transfer_s: Mapped[float | None]
    overlap_ratio: Mapped[float | None]
    grad_norm: Mapped[float | None]
    learning_rate: Mapped[float | None]
    started_at: Mapped[float | None]
    metrics: Mapped[dict[str, Any] | None]
    """Metrics that the loss function returned, by name."""


class EvaluationRow(Base):
    """Loss and metrics on the job's evaluation data after a step, or before the first (step 0)."""

    __tablename__ = "evaluations"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    loss: Mapped[float | None]
    metrics: Mapped[dict[str, Any] | None]
    samples: Mapped[int]
    evaluation_s: Mapped[float | None]
    started_at: Mapped[float | None]


class JobPlanRow(Base):
    __tablename__ = "plans"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    attempt: Mapped[int]
    created_at: Mapped[datetime]
    body: Mapped[str] = mapped_column(Text)
    """JSON {"begins", "spec", "plan"} as text: long, so it is passed on without parsing."""
    since_step: Mapped[int | None]
    """The first step that ran by it, where it was swapped in while the attempt ran."""


class TimelineRow(Base):
    __tablename__ = "timelines"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    started_at: Mapped[float]
    uncertainty_s: Mapped[float | None]


class PostMortemRow(Base):
    """Plan and slots of the last profiled step of a failed attempt, which later attempts would replace."""

    __tablename__ = "post_mortems"

    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    at: Mapped[datetime]
    plan: Mapped[str | None] = mapped_column(Text)
    """JSON as in `plans`; null where the attempt ended before it had one."""
    step: Mapped[int | None]
    slots: Mapped[str | None] = mapped_column(Text)
    """JSON: a list of objects."""


class SlotRow(Base):
    __tablename__ = "slots"
    __table_args__ = (Index("ix_slots_job_step", "job_id", "step"),)

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    mesh: Mapped[str] = mapped_column(String(100))
    lane: Mapped[str] = mapped_column(String(120))
    action: Mapped[str] = mapped_column(String(20))
    stage: Mapped[str | None] = mapped_column(String(100))
    peer_stage: Mapped[str | None] = mapped_column(String(100))
    peer_mesh: Mapped[str | None] = mapped_column(String(100))
    edge: Mapped[int | None]
    microbatch: Mapped[int | None]
    start_s: Mapped[float]
    end_s: Mapped[float]


class ProfileRow(Base):
    __tablename__ = "profiles"

    key: Mapped[str] = mapped_column(String(300), primary_key=True)
    created_at: Mapped[datetime]
    body: Mapped[dict[str, Any]]


class PackageRow(Base):
    __tablename__ = "packages"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    content: Mapped[bytes] = mapped_column(LargeBinary)
    """Empty where an object at `address` has it."""
    address: Mapped[str | None] = mapped_column(Text)


class PackageOwnerRow(Base):
    """An uploader of a package; each of them may use it."""

    __tablename__ = "package_owners"

    digest: Mapped[str] = mapped_column(ForeignKey("packages.digest", ondelete="CASCADE"), primary_key=True)
    owner: Mapped[str] = mapped_column(String(200), primary_key=True)


class ApiTokenRow(Base):
    __tablename__ = "tokens"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    role: Mapped[str] = mapped_column(String(20), server_default="operator")
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class ProjectMemberRow(Base):
    """A Membership."""

    __tablename__ = "project_members"

    project: Mapped[str] = mapped_column(String(100), primary_key=True)
    principal: Mapped[str] = mapped_column(String(200), primary_key=True)
    role: Mapped[str] = mapped_column(String(20))
    set_at: Mapped[datetime]


class SecretRow(Base):
    __tablename__ = "secrets"

    owner: Mapped[str] = mapped_column(String(200), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    sealed: Mapped[str] = mapped_column(Text)
    """Encrypted with SLOTLINE_SECRETS_KEY: see service/store/secrets.py."""
    set_at: Mapped[datetime]


class AuditEntryRow(Base):
    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    at: Mapped[datetime]
    principal: Mapped[str] = mapped_column(String(200))
    action: Mapped[str] = mapped_column(String(100))
    subject: Mapped[str] = mapped_column(String(200))
    detail: Mapped[str] = mapped_column(Text, default="")


class QueueQuotaRow(Base):
    __tablename__ = "queue_quotas"

    queue: Mapped[str] = mapped_column(String(100), primary_key=True)
    quota: Mapped[int | None]
    """Accelerators; null: no quota, whatever the configuration says."""
    set_at: Mapped[datetime]


class ProjectQuotaRow(Base):
    """The quota of a project in a queue."""

    __tablename__ = "project_quotas"

    project: Mapped[str] = mapped_column(String(100), primary_key=True)
    queue: Mapped[str] = mapped_column(String(100), primary_key=True)
    quota: Mapped[int]
    set_at: Mapped[datetime]


class NodeStateRow(Base):
    """The state of a node that an operator, Slotline or Ray has set: a NodeMark each."""

    __tablename__ = "node_states"

    cluster: Mapped[str] = mapped_column(String(100), primary_key=True)
    name: Mapped[str] = mapped_column(String(253), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(100), primary_key=True, default="")
    """The one Ray node that is meant; empty: every Ray node of that name, also later ones."""
    state: Mapped[str] = mapped_column(String(20))
    reason: Mapped[str] = mapped_column(Text, default="")
    set_by: Mapped[str] = mapped_column(String(200))
    set_at: Mapped[datetime]
    until: Mapped[datetime | None]


class PlacedMeshRow(Base):
    """The workers of a mesh of an attempt on one node."""

    __tablename__ = "placements"
    __table_args__ = (Index("ix_placements_cluster_node", "cluster", "node"),)

    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    mesh: Mapped[str] = mapped_column(String(100), primary_key=True)
    node_id: Mapped[str] = mapped_column(String(100), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    cluster: Mapped[str] = mapped_column(String(100))
    node: Mapped[str] = mapped_column(String(253))
    workers: Mapped[int]
    failed: Mapped[bool] = mapped_column(default=False)
    """The attempt was lost by a failure that names this node."""


class HeartbeatRow(Base):
    __tablename__ = "pulses"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    at: Mapped[datetime]


class LeaseRow(Base):
    """The holder of a role that one process has at a time: see leases.py. Times are the database's Unix seconds."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(100), primary_key=True)
    holder: Mapped[str] = mapped_column(String(200))
    token: Mapped[int] = mapped_column(BigInteger)
    """Grows with each holder; writes with an older token are refused."""
    taken_at: Mapped[float]
    expires_at: Mapped[float]


class TaskRow(Base):
    """A one-shot task, its holder and its outcome, for all processes: see leases.py. Times are as of LeaseRow."""

    __tablename__ = "short_runs"

    key: Mapped[str] = mapped_column(String(100), primary_key=True)
    holder: Mapped[str] = mapped_column(String(200))
    beat_at: Mapped[float]
    ended: Mapped[bool]
    answer: Mapped[str | None] = mapped_column(Text)
    failure: Mapped[str | None] = mapped_column(Text)


class SavedPlanRow(Base):
    """A plan that a user stored under a name. Jobs refer to its id, so a deleted plan stays for jobs submitted with it."""

    __tablename__ = "named_plans"
    __table_args__ = (UniqueConstraint("owner", "name"),)

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    owner: Mapped[str] = mapped_column(String(200))
    project: Mapped[str] = mapped_column(String(100), default=DEFAULT_PROJECT, server_default=DEFAULT_PROJECT)
    """That of the job that it was made for."""
    name: Mapped[str | None] = mapped_column(String(100))
    """Null: deleted, and still needed by jobs."""
    created_at: Mapped[datetime]
    used_at: Mapped[datetime]
    """Time at which it was stored, or a job was last submitted with it."""
    request_digest: Mapped[str] = mapped_column(String(64))
    """Digest of the job and the search budget of the request."""
    measured_by: Mapped[str] = mapped_column(String(20))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    summary: Mapped[dict[str, Any]]
    """Summary for lists."""
    made_for: Mapped[str] = mapped_column(Text)
    """JSON of the signature that the plan is valid for."""
    body: Mapped[str] = mapped_column(Text)
    """JSON as in `plans`, with the additions of the preview."""


WITHOUT_PLAN_BODY = (defer(SavedPlanRow.body, raiseload=True), defer(SavedPlanRow.made_for, raiseload=True))
"""Options of queries for lists, as plans are long."""


class StorageUseRow(Base):
    """A lease to read or to delete saved files of a job; the two exclude each other over all replicas."""

    __tablename__ = "storage_uses"

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(20))
    folders: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    """Null: any folder of the job."""
    until: Mapped[datetime]


class DeliveryState(StrEnum):
    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    GIVEN_UP = "GIVEN_UP"


class DeliveryRow(Base):
    __tablename__ = "deliveries"
    __table_args__ = (
        Index("ix_deliveries_due", "state", "next_at"),
        Index("ix_deliveries_job", "job_id", "event"),
    )

    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    event: Mapped[int]
    """Number of the job's event that it reports."""
    job_state: Mapped[str] = mapped_column(String(20))
    url: Mapped[str] = mapped_column(Text)
    host: Mapped[str] = mapped_column(String(300))
    secret: Mapped[str | None] = mapped_column(String(128))
    """Name of the owner's secret that signs it; null: the operator's webhook secret."""
    body: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(20), default=DeliveryState.PENDING)
    tries: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime]
    next_at: Mapped[datetime]
    """Time at which it is due; while it is being sent, the expiry of the claim, after which another process retries."""
    last_at: Mapped[datetime | None]
    status: Mapped[int | None]
    """HTTP status of the receiver's last answer."""
    error: Mapped[str | None] = mapped_column(Text)
