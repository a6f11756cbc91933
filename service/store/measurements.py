"""Measured values: steps, evaluations, timelines with their slots, and layer profiles and costs for planning.

The latest report of a step or evaluation wins: an attempt that resumes from a checkpoint repeats them, at lower
steps than the attempt before it. The last timelines of each job are stored; slots are inserted as plain driver tuples,
as there are thousands a step.
Profiles are keyed by owner, model, code and cluster: a driver runs user code, so its measurements must not reach
another job or owner. Only link costs are shared, by all users of the same nodes of one cluster. The newest profiles of
each kind are stored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.principals import ANONYMOUS
from service.store.database import upsert
from service.store.tables import AttemptRow, EvaluationRow, JobRow, ProfileRow, SlotRow, StepRow, TimelineRow
from worker.contract.costs import LINK_CACHE_S

StepCursor = tuple[int, int]
"""Number of the attempt, number of the step."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step as the driver saw it; `started_at` is Unix time in seconds."""

    step: int
    loss: float | None
    step_s: float | None
    makespan_s: float | None
    bubble_ratio: float | None
    exposed_transfer_s: float | None
    overlap_ratio: float | None
    grad_norm: float | None
    started_at: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)
    learning_rate: float | None = None


async def record_steps(session: AsyncSession, attempt: AttemptRow, steps: Iterable[StepRecord]) -> None:
    rows = [{"job_id": attempt.job_id, "attempt": attempt.number, **vars(step)} for step in steps]
    await upsert(session, StepRow, rows)


async def seconds_of_steps(session: AsyncSession, job_id: str, first: int, last: int) -> float:
    """The seconds that the steps `first` to `last` took, as they are recorded."""
    query = select(func.sum(StepRow.step_s)).where(
        StepRow.job_id == job_id, StepRow.step >= first, StepRow.step <= last
    )
    return await session.scalar(query) or 0.0


async def steps_of(
    session: AsyncSession, job_id: str, *, after: int = -1, behind: StepCursor = (0, -1), limit: int = 1000
) -> Sequence[StepRow]:
    """Steps numbered above `after` and behind the cursor `behind`, ordered by attempt, then step.

    An attempt that resumed from a checkpoint comes last, though an earlier attempt reached higher steps.
    """
    query = (
        select(StepRow)
        .where(StepRow.job_id == job_id, StepRow.step > after, tuple_(StepRow.attempt, StepRow.step) > behind)
        .order_by(StepRow.attempt, StepRow.step)
        .limit(limit)
    )
    return (await session.execute(query)).scalars().all()


async def last_recorded(session: AsyncSession, job_id: str) -> dict[str, int]:
    """The last step of which a record is stored, and of which an evaluation; -1 where there is none."""
    return {
        kind: -1
        if (last := await session.scalar(select(func.max(table.step)).where(table.job_id == job_id))) is None
        else last
        for kind, table in (("steps", StepRow), ("evaluations", EvaluationRow))
    }


async def losses_at(session: AsyncSession, job_id: str, steps: Sequence[int]) -> dict[int, float]:
    """The training losses of the steps that have a loss, by step."""
    query = select(StepRow.step, StepRow.loss).where(
        StepRow.job_id == job_id, StepRow.step.in_(steps), StepRow.loss.is_not(None)
    )
    return {step: loss for step, loss in (await session.execute(query)).all()}


async def find_step(session: AsyncSession, job_id: str, step: int) -> StepRow | None:
    return await session.get(StepRow, (job_id, step))


async def last_steps(session: AsyncSession, job_id: str, attempt: int, *, limit: int) -> list[StepRow]:
    """The last steps of this attempt that no later attempt repeated, in order."""
    query = select(StepRow).where(StepRow.job_id == job_id, StepRow.attempt == attempt)
    rows = await session.execute(query.order_by(StepRow.step.desc()).limit(limit))
    return list(rows.scalars())[::-1]


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of the evaluation after `step` (0: before the first); `started_at` is Unix time in seconds."""

    step: int
    loss: float | None
    samples: int
    evaluation_s: float | None
    started_at: float | None
    metrics: dict[str, float | None] = field(default_factory=dict)


async def record_evaluations(
    session: AsyncSession, attempt: AttemptRow, evaluations: Iterable[EvaluationRecord]
) -> None:
    latest = {evaluation.step: evaluation for evaluation in evaluations}
    rows = [
        {"job_id": attempt.job_id, "attempt": attempt.number, **vars(evaluation)}
        for evaluation in latest.values()
    ]
    await upsert(session, EvaluationRow, rows)


async def evaluations_of(
    session: AsyncSession, job_id: str, *, behind: StepCursor = (0, -1), limit: int = 1000
) -> Sequence[EvaluationRow]:
    """Evaluations behind the cursor `behind`, ordered by attempt, then step."""
    query = (
        select(EvaluationRow)
        .where(EvaluationRow.job_id == job_id, tuple_(EvaluationRow.attempt, EvaluationRow.step) > behind)
        .order_by(EvaluationRow.attempt, EvaluationRow.step)
        .limit(limit)
    )
    return (await session.execute(query)).scalars().all()


_LINKS_PREFIX = "links of "
_LINKS_KEY = re.compile(r"links of (cpu|cuda) [0-9a-f]{64}")
_PROFILES_PER_MODEL, _LINK_PROFILES_LIMIT, _LINK_PROFILES_READ = 64, 10_000, 2_000


def scoped_profile_key(
    spec: Mapping[str, Any], key: str, *, owner: str = ANONYMOUS, cluster: str = DEFAULT_CLUSTER
) -> str:
    """The stored form of a profile key that a driver uses, for its job (`spec`: JSON of a JobSpec), owner and cluster."""
    if _LINKS_KEY.fullmatch(key):
        return _cluster_links_prefix(cluster) + key.removeprefix(_LINKS_PREFIX)
    return f"{_model_prefix(spec, owner, cluster)}{key}"


def scoped_costs_digest(digest: str, owner: str, cluster: str = DEFAULT_CLUSTER) -> str:
    """The stored form of a digest of costs: measurements are not shared between owners or clusters."""
    owned = f"{digest} of {hashlib.sha256(owner.encode()).hexdigest()}" if owner else digest
    return owned if cluster == DEFAULT_CLUSTER else f"{owned} on {cluster}"


def _cluster_links_prefix(cluster: str) -> str:
    return _LINKS_PREFIX if cluster == DEFAULT_CLUSTER else f"links in cluster {cluster} of "


def _model_prefix(spec: Mapping[str, Any], owner: str, cluster: str) -> str:
    return f"model {model_key(spec, owner, cluster)} "


def has_unequal_lengths(spec: Mapping[str, Any]) -> bool:
    """True for a job (JobSpec JSON) whose plan takes microbatches for the longest, and whose steps have shorter ones."""
    lengths = (spec.get("data") or {}).get("lengths")
    return lengths is not None and (lengths["buckets"] == "auto" or len(lengths["buckets"]) > 1)


def model_key(spec: Mapping[str, Any], owner: str, cluster: str) -> str:
    """A digest that is equal for jobs (JSON of JobSpecs) of one model and code of an owner on a cluster; with data.lengths
    of the same data too, whose lengths make the steps."""
    parts = [spec.get("model"), spec.get("code"), *(spec[name] for name in ("env",) if spec.get(name))]
    parts += [spec["data"]] if has_unequal_lengths(spec) else []
    parts += [{"owner": owner}] if owner else []
    parts += [] if cluster == DEFAULT_CLUSTER else [{"cluster": cluster}]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


async def record_driver_profile(
    session: AsyncSession,
    spec: Mapping[str, Any],
    key: str,
    body: dict[str, Any],
    *,
    at: datetime,
    owner: str = ANONYMOUS,
    cluster: str = DEFAULT_CLUSTER,
) -> None:
    """Store a profile that the driver of a job measured; the oldest of its kind is deleted beyond the limit."""
    scoped_key = scoped_profile_key(spec, key, owner=owner, cluster=cluster)
    await record_profile(session, scoped_key, body, at=at)
    prefix, limit = _model_prefix(spec, owner, cluster), _PROFILES_PER_MODEL
    if _LINKS_KEY.fullmatch(key):
        prefix, limit = _cluster_links_prefix(cluster), _LINK_PROFILES_LIMIT
    same = ProfileRow.key.startswith(prefix, autoescape=True)
    newest = (
        select(ProfileRow.key).where(same).order_by(ProfileRow.created_at.desc(), ProfileRow.key).limit(limit)
    )
    await session.execute(delete(ProfileRow).where(same, ProfileRow.key.not_in(newest)))


async def record_profile(session: AsyncSession, key: str, body: dict[str, Any], *, at: datetime) -> None:
    await upsert(session, ProfileRow, [{"key": key, "created_at": at, "body": body}])


async def find_profile(session: AsyncSession, key: str) -> dict[str, Any] | None:
    profile = await session.get(ProfileRow, key)
    return None if profile is None else profile.body


async def measured_links(
    session: AsyncSession, nodes: Collection[str], device: str, *, cluster: str, now: datetime
) -> dict[tuple[str, str], float]:
    """Seconds per byte from node to node (Ray's ids) of these, as the drivers of any job measured them of late."""
    query = (
        select(ProfileRow.body)
        .where(
            ProfileRow.key.startswith(f"{_cluster_links_prefix(cluster)}{device} ", autoescape=True),
            ProfileRow.created_at > now - timedelta(seconds=LINK_CACHE_S),
        )
        .order_by(ProfileRow.created_at.desc(), ProfileRow.key)
        .limit(_LINK_PROFILES_READ)
    )
    known, links = frozenset(nodes), dict[tuple[str, str], float]()
    for body in (await session.execute(query)).scalars():
        with contextlib.suppress(LookupError, TypeError, ValueError, ZeroDivisionError):  # a driver wrote it
            names = body["nodes"]
            for source, target, _, bytes_per_s in body["links"]:
                ends = names[source], names[target]
                if known.issuperset(ends) and 0 < (cost := 1 / float(bytes_per_s)) < math.inf:
                    links.setdefault(ends, cost)
    return links


MEASURED_BY_GANG, MEASURED_BY_ONE_WORKER = "gang", "one worker"
"""Origin of costs: the workers of an attempt, or one worker alone."""


async def record_costs(
    session: AsyncSession,
    digest: str,
    costs: dict[str, Any],
    *,
    measured_by: str,
    accelerator_type: str | None,
    at: datetime,
) -> None:
    """Store the costs measured for jobs with this digest (JSON of a driver's PlanRequest) on accelerators of one type.

    Profiles of other numbers of microbatches that were measured before on this type stay, also per mesh of heterogeneous
    meshes; those of another type go.
    """
    profiles = _profiles_by_microbatches(costs)
    if costs.get("profile") is not None and costs.get("microbatches") is not None:
        profiles[costs["microbatches"]] = {name: costs[name] for name in ("microbatches", "profile")}
    key = _costs_key(digest, measured_by)
    before = await find_profile(session, key)
    if before is None or before.get(_TYPE_OF_COSTS) != accelerator_type:
        before = {"profiles": [], "tried": []}
    profiles = _profiles_by_microbatches(before) | profiles
    body = {name: value for name, value in costs.items() if name not in ("profile", "microbatches")} | {
        "profiles": list(profiles.values()),
        "tried": sorted({*before["tried"], *profiles, *(costs.get("tried") or ())}),
        _TYPE_OF_COSTS: accelerator_type,
    }
    if of_meshes := _profiles_by_mesh(before) | _profiles_by_mesh(costs):
        body["mesh_profiles"] = list(of_meshes.values())
    await record_profile(session, key, body, at=at)


def _profiles_by_microbatches(costs: Mapping[str, Any]) -> dict[int, Any]:
    return {profile["microbatches"]: profile for profile in costs.get("profiles") or ()}


def _profiles_by_mesh(costs: Mapping[str, Any]) -> dict[tuple[int, int, int], Any]:
    """The profiles of meshes by numbers of microbatches, of workers, and of tensor-parallel ranks."""
    profiles = costs.get("mesh_profiles") or ()
    return {
        (profile["microbatches"], profile["workers"], profile.get("tensor", 1)): profile
        for profile in profiles
    }


async def find_costs(
    session: AsyncSession, digest: str, counts: Sequence[int]
) -> tuple[dict[str, Any], str] | None:
    """Costs measured for all the `counts` of microbatches, and their origin; a gang's are preferred. None: not measured."""
    for measured_by in (MEASURED_BY_GANG, MEASURED_BY_ONE_WORKER):
        stored = await find_profile(session, _costs_key(digest, measured_by))
        if stored is not None and set(counts) <= set(stored["tried"]):
            costs = _without_type(stored)
            profiles = [profile for profile in costs["profiles"] if profile["microbatches"] in counts]
            if profiles:
                return {**costs, "profiles": profiles}, measured_by
    return None


async def find_all_costs(
    session: AsyncSession, digest: str, accelerator_type: str | None
) -> dict[str, Any] | None:
    """Costs of jobs with this digest on accelerators of the type, for all measured numbers of microbatches; a gang's are
    preferred."""
    for measured_by in (MEASURED_BY_GANG, MEASURED_BY_ONE_WORKER):
        costs = await find_profile(session, _costs_key(digest, measured_by))
        if costs is not None and costs.get(_TYPE_OF_COSTS, accelerator_type) == accelerator_type:
            return _without_type(costs)
    return None


_TYPE_OF_COSTS = "accelerator_type"
"""Beside the fields of a PlanRequest; costs that an older release stored have it not."""


def _without_type(costs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in costs.items() if name != _TYPE_OF_COSTS}


def _costs_key(digest: str, measured_by: str) -> str:
    return f"costs of {digest} by {measured_by}"


async def record_planned(
    session: AsyncSession, attempt_id: str, *, step_s: float | None, peak_bytes: int | None, model: str
) -> None:
    """Store what is planned of an attempt of a `model_key` before anything of it was measured."""
    planned = {"planned_step_s": step_s, "planned_peak_bytes": peak_bytes, "model_key": model}
    await session.execute(update(AttemptRow).where(AttemptRow.id == attempt_id).values(planned))


class PastRun(NamedTuple):
    """Measured over planned values of an attempt, and its `model_key`; `peak` is None where memory was not measured.
    `shorter`: its steps were shorter than planned, by the lengths of their microbatches."""

    model: str
    step: float
    peak: float | None
    shorter: bool


_PAST_RUNS, _PAST_STEPS, _FEWEST_PAST_STEPS = 60, 20, 5


async def past_runs(
    session: AsyncSession, *, cluster: str, device: str, accelerator_type: str | None
) -> list[PastRun]:
    """The newest attempts on such accelerators that trained by a plan, with the median of their last steps."""
    query = (
        select(AttemptRow, JobRow.spec)
        .join(JobRow, JobRow.id == AttemptRow.job_id)
        .options(defer(AttemptRow.log))
        .where(
            AttemptRow.cluster == cluster,
            AttemptRow.device == device,
            AttemptRow.accelerator_type == accelerator_type,
            AttemptRow.planned_step_s > 0,
        )
        .order_by(AttemptRow.created_at.desc(), AttemptRow.id)
        .limit(_PAST_RUNS)
    )
    runs = []
    for attempt, spec in (await session.execute(query)).all():
        last_steps = (
            select(StepRow.step_s)
            .where(StepRow.job_id == attempt.job_id, StepRow.attempt == attempt.number, StepRow.step_s > 0)
            .order_by(StepRow.step.desc())
            .limit(_PAST_STEPS)
        )
        steps = (await session.execute(last_steps)).scalars().all()
        if len(steps) < _FEWEST_PAST_STEPS or attempt.planned_step_s is None:
            continue
        peak, planned = max((attempt.peak_memory_bytes or {}).values(), default=0), attempt.planned_peak_bytes
        runs.append(
            PastRun(
                attempt.model_key or "",
                statistics.median(steps) / attempt.planned_step_s,
                peak / planned if peak and planned else None,
                has_unequal_lengths(spec),
            )
        )
    return runs


_LATEST_TIMELINE_FIRST = (TimelineRow.attempt.desc(), TimelineRow.step.desc())
"""An attempt that resumes from a checkpoint has lower steps than the failed attempt before it."""


class SlotRecord(NamedTuple):
    """One measured slot; times in seconds from the start of its step. A tuple: there are thousands a step."""

    mesh: str
    lane: str
    action: str
    stage: str | None
    peer_stage: str | None
    peer_mesh: str | None
    edge: int | None
    microbatch: int | None
    start_s: float
    end_s: float


async def record_timeline(
    session: AsyncSession,
    attempt: AttemptRow,
    *,
    step: int,
    started_at: float,
    uncertainty_s: float | None,
    slots: Iterable[SlotRecord],
    keep: int,
) -> None:
    """Store the measured slots of one step; only the last `keep` timelines of the job stay."""
    job_id = attempt.job_id
    await _delete_timelines(session, job_id, [step])
    session.add(
        TimelineRow(
            job_id=job_id,
            step=step,
            attempt=attempt.number,
            started_at=started_at,
            uncertainty_s=uncertainty_s,
        )
    )
    await session.flush()
    await _insert_slots(session, [(job_id, step, *slot) for slot in slots])
    query = (
        select(TimelineRow.step)
        .where(TimelineRow.job_id == job_id)
        .order_by(*_LATEST_TIMELINE_FIRST)
        .offset(keep)
    )
    if old := (await session.execute(query)).scalars().all():
        await _delete_timelines(session, job_id, old)


async def profiled_steps(session: AsyncSession, job_id: str) -> Sequence[int]:
    """Numbers of the steps whose slots are stored, ordered by attempt, then step."""
    return [step for _, step in await profiled_attempt_steps(session, job_id)]


async def profiled_attempt_steps(session: AsyncSession, job_id: str) -> Sequence[tuple[int, int]]:
    """(attempt, step) of the steps whose slots are stored, ordered by attempt, then step."""
    query = select(TimelineRow.attempt, TimelineRow.step).where(TimelineRow.job_id == job_id)
    rows = await session.execute(query.order_by(TimelineRow.attempt, TimelineRow.step))
    return [(attempt, step) for attempt, step in rows]


async def find_timeline(
    session: AsyncSession, job_id: str, step: int | None
) -> tuple[TimelineRow, list[SlotRecord]] | None:
    """The measured timeline of `step` (None: the latest of the latest attempt), with its slots as reported."""
    query = select(TimelineRow).where(TimelineRow.job_id == job_id).order_by(*_LATEST_TIMELINE_FIRST).limit(1)
    if step is not None:
        query = query.where(TimelineRow.step == step)
    timeline = (await session.execute(query)).scalar_one_or_none()
    if timeline is None:
        return None
    columns = [getattr(SlotRow, name) for name in SlotRecord._fields]
    slots = (
        select(*columns).where(SlotRow.job_id == job_id, SlotRow.step == timeline.step).order_by(SlotRow.id)
    )
    return timeline, [SlotRecord._make(row) for row in await session.execute(slots)]


async def _delete_timelines(session: AsyncSession, job_id: str, steps: Sequence[int]) -> None:
    for table in (SlotRow, TimelineRow):
        await session.execute(delete(table).where(table.job_id == job_id, table.step.in_(steps)))


async def _insert_slots(session: AsyncSession, rows: list[tuple[Any, ...]]) -> None:
    """Insert `rows` through the driver: SQLAlchemy would process each parameter of thousands of rows."""
    if not rows:
        return
    columns = ("job_id", "step", *SlotRecord._fields)
    mark = "?" if session.get_bind().dialect.name == "sqlite" else "%s"
    statement = f"INSERT INTO slots ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
    await (await session.connection()).exec_driver_sql(statement, rows)
