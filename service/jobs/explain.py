"""Explains a job's steps from its stored plan and measured slots: waits, gaps, memory of meshes, the calibrated plan.

Turns rows of the store into the values of the scheduler's analyses; decides nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError
from service.jobs.service import RunWork, Service, with_fields
from service.orchestrator.planning.work import StoredStep
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.calibration import Calibration, calibrate, choose_calibration_steps
from service.scheduler.why.gaps import find_gaps
from service.schemas.activity import SlotView
from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.job import spec_with_meshes
from service.store.attempts import attempts_of, find_attempt
from service.store.database import Database
from service.store.measurements import (
    SlotRecord,
    find_all_costs,
    find_step,
    find_timeline,
    has_unequal_lengths,
    profiled_attempt_steps,
    scoped_costs_digest,
)
from service.store.plans import find_job_plan
from service.store.tables import JobPlanRow
from worker.contract.costs import costs_digest
from worker.contract.planned import planned_peak_bytes, recompute_method
from worker.contract.program import COMPUTE_OPS, TRANSFER_OPS


async def explain_step(service: Service, job_id: str, step: int | None, run: RunWork) -> str:
    """JSON of a WhyView: of a profiled step, by default the last, or of the plan alone where none was profiled.

    404 for a job without a plan, and for a step that was not profiled. `run` awaits the analysis.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        measured = await find_timeline(session, job_id, step)
        calibrated_by = [] if plan is None else await calibration_slots(session, plan)
        record = None if measured is None else await find_step(session, job_id, measured[0].step)
        planned = None if plan is None else await find_attempt(session, f"{job_id}-{plan.attempt}")
        spec = spec_with_meshes(job.spec, job.accelerators if planned is None else planned.accelerators)
        costs = await find_all_costs(
            session,
            scoped_costs_digest(costs_digest(spec), job.owner, job.began_on or DEFAULT_CLUSTER),
            None if planned is None else planned.accelerator_type,
        )
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan: nothing of it can be explained")
    if step is not None and measured is None:
        raise ProblemError(
            404, f"step {step} of job {job_id} was not profiled: its page lists those that were"
        )
    notes = []
    if measured is not None and measured[0].attempt != plan.attempt:
        notes.append(
            f"step {measured[0].step} was measured by attempt {measured[0].attempt}, under another plan than that of "
            f"attempt {plan.attempt}: the plan alone is explained"
        )
        measured = None
    elif measured is not None and plan.since_step is not None and measured[0].step < plan.since_step:
        notes.append(
            f"step {measured[0].step} was measured before step {plan.since_step}, at which the job swapped its plan: the "
            "plan alone is explained"
        )
        measured = None
    stored = StoredStep(
        job=spec,
        plan=plan.body,
        slots=[] if measured is None else measured[1],
        step_s=None if measured is None or record is None else record.step_s,
        costs=costs,
        notes=tuple(notes),
        calibrated_by=calibrated_by,
        has_unequal_lengths=has_unequal_lengths(spec),
    )
    explanation = await run(service.planner.explain(stored))
    explained_step = None if measured is None else measured[0].step
    return await with_fields(
        explanation, first={"job_id": job_id, "attempt": plan.attempt, "step": explained_step}
    )


_CALIBRATION_SLOTS = 50_000  # of all steps of a calibration
_METHODS = {"whole": "", "selective": " but for products", "by_block": " by block"}
_KEPT_CALIBRATIONS = 256  # of the jobs that were asked for last
_calibrations: WeakKeyDictionary[Database, dict[str, tuple[tuple[Any, ...], Calibration | None]]] = (
    WeakKeyDictionary()
)
"""By job, those asked for last at the end: the plan and the steps, and what they gave."""


async def read_calibration(database: Database, job_id: str) -> Calibration | None:
    """The job's plan with the costs of its last profiled steps; None where there is no plan, or no such step.

    Computed anew when another step was profiled: the slots of a few steps take a tenth of a second.
    """
    async with database.read() as session:
        query = select(JobPlanRow.attempt, JobPlanRow.created_at, JobPlanRow.since_step).where(
            JobPlanRow.job_id == job_id
        )
        planned = (await session.execute(query)).first()
        key = (
            ()
            if planned is None
            else (*planned, *await _warm_steps(session, job_id, planned.attempt, planned.since_step))
        )
        kept = _calibrations.setdefault(database, {})
        if job_id in kept and kept[job_id][0] == key:
            kept[job_id] = kept.pop(job_id)
            return kept[job_id][1]
        plan = await find_job_plan(session, job_id)
        slots = [] if plan is None else await calibration_slots(session, plan)
    found = None if plan is None or not slots else await asyncio.to_thread(_calibrated, plan.body, slots)
    kept.pop(job_id, None)
    kept[job_id] = key, found
    while len(kept) > _KEPT_CALIBRATIONS:
        del kept[next(iter(kept))]
    return found


async def read_calibrations(
    database: Database, job_ids: Iterable[str], *, limit_s: float
) -> dict[str, Calibration | None]:
    """The calibrations of several jobs, by job. One is computed in any case; once `limit_s` are over the others are as
    they were last, and these come first next time."""
    kept = _calibrations.setdefault(database, {})
    place = {job_id: place for place, job_id in enumerate(kept)}
    deadline = time.monotonic() + limit_s
    found: dict[str, Calibration | None] = {}
    for job_id in sorted(job_ids, key=lambda job_id: place.get(job_id, -1)):
        if not found or time.monotonic() < deadline:
            found[job_id] = await read_calibration(database, job_id)
        elif job_id in kept:
            found[job_id] = kept[job_id][1]
    return found


async def _warm_steps(
    session: AsyncSession, job_id: str, attempt: int, since_step: int | None
) -> Sequence[int]:
    """The profiled steps of the attempt that calibrate its plan; behind `since_step` of one that was swapped in."""
    steps = [step for number, step in await profiled_attempt_steps(session, job_id) if number == attempt]
    return choose_calibration_steps(steps, since_step=since_step)


async def calibration_slots(session: AsyncSession, plan: JobPlanRow) -> list[list[SlotRecord]]:
    """The slots of the last warm steps of the plan's attempt, of fewer steps where a step has very many."""
    found: list[list[SlotRecord]] = []
    for step in reversed(await _warm_steps(session, plan.job_id, plan.attempt, plan.since_step)):
        if found and sum(map(len, found)) + len(found[0]) > _CALIBRATION_SLOTS:
            break
        if (timeline := await find_timeline(session, plan.job_id, step)) is not None:
            found.append(timeline[1])
    return found[::-1]


def _calibrated(plan_text: str, steps: Sequence[Sequence[SlotRecord]]) -> Calibration | None:
    body = json.loads(plan_text)
    try:
        spec = PipelineSpec.model_validate(body["spec"])
        planned = [SlotView.model_validate(slot) for slot in body["plan"]["slots"]]
    except ValidationError:  # planned by an older Slotline
        return None
    found = calibrate(spec, body["plan"]["programs"], planned, steps)
    return None if found is None else found[0]


async def read_profiled_steps(service: Service, job_id: str) -> dict[str, Any]:
    """The attempt whose plan is stored (None: none), and step and attempt of each stored timeline, latest last."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        planned = await session.scalar(select(JobPlanRow.attempt).where(JobPlanRow.job_id == job_id))
        places = await profiled_attempt_steps(session, job_id)
    return {
        "planned": planned,
        "steps": [step for _, step in places],
        "attempts": [attempt for attempt, _ in places],
    }


async def read_gaps(service: Service, job_id: str, step: int | None) -> dict[str, Any]:
    """Gaps of the planned and of the measured compute lanes of a step, by default the last that was profiled."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        timeline = await find_timeline(session, job_id, step)
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan yet: it gets one when its first attempt starts")
    return await asyncio.to_thread(explained_gaps, plan.body, [] if timeline is None else timeline[1])


async def read_memory(service: Service, job_id: str) -> list[dict[str, Any]]:
    """The meshes of the plan, each with limit, planned and measured peak in bytes, and the stages that recompute."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        attempts = await attempts_of(session, job_id)
    if plan is None:
        return []
    peaks = next((attempt.peak_memory_bytes for attempt in attempts if attempt.number == plan.attempt), None)
    return await asyncio.to_thread(_mesh_memory, plan.body, peaks or {})


async def read_choice(service: Service, job_id: str) -> dict[str, Any]:
    """Microbatches, stages, step time and updates of the plan, and its makespan calibrated by profiled steps; None and empty
    where there is no plan yet."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
    if plan is None:
        return {"microbatches": None, "stages": None, "step_s": None, "update": [], "calibrated": None}
    found = await read_calibration(service.database, job_id)
    calibrated = None if found is None else {"steps": found.steps, "makespan_s": found.makespan_s}
    return {**await asyncio.to_thread(_choice, plan.body), "calibrated": calibrated}


def _choice(plan_text: str) -> dict[str, Any]:
    body = json.loads(plan_text)
    return {
        "microbatches": body["spec"].get("microbatches"),
        "stages": len(body["spec"].get("stages", ())),
        "step_s": body.get("step_s"),
        "update": body.get("update", []),
    }


def _mesh_memory(plan_text: str, peaks: Mapping[str, int]) -> list[dict[str, Any]]:
    body = json.loads(plan_text)
    planned = planned_peak_bytes(body["spec"], body["plan"])
    mesh_of = {stage["name"]: stage["mesh"] for stage in body["spec"]["stages"]}
    again = {
        stage["name"]: stage["name"] + _METHODS[recompute_method(stage)]
        for stage in body["plan"].get("stages", ())
        if stage["recomputed"]
    }
    return [
        {
            "mesh": mesh["name"],
            "limit_bytes": mesh.get("memory_bytes"),
            "planned_bytes": planned.get(mesh["name"]),
            "measured_bytes": peaks.get(mesh["name"]),
            "recomputed": [text for stage, text in again.items() if mesh_of[stage] == mesh["name"]],
        }
        for mesh in body["spec"]["meshes"]
    ]


def explained_gaps(plan_text: str, records: list[SlotRecord]) -> dict[str, Any]:
    """Names of the meshes, and gaps of the planned and of the measured slots; no gaps for a plan of an older Slotline."""
    measured = [SlotView(**record._asdict()) for record in records]
    body = json.loads(plan_text)
    planned = [SlotView.model_validate(slot) for slot in body["plan"]["slots"]]
    try:
        spec = PipelineSpec.model_validate(body["spec"])
    except ValidationError:  # planned by an older Slotline: the timeline can be drawn, not explained
        return {"meshes": list(dict.fromkeys(s.mesh for s in planned)), "planned": [], "measured": []}
    return {
        "meshes": [mesh.name for mesh in spec.meshes],
        "planned": _gaps(spec, planned),
        "measured": _gaps(spec, measured),
    }


def _gaps(spec: PipelineSpec, slots: list[SlotView]) -> list[dict[str, Any]]:
    """Gaps between the first start and the last end; REDUCE and STEP come after the makespan."""
    timed = [slot for slot in slots if slot.action in COMPUTE_OPS + TRANSFER_OPS]
    if not timed:
        return []
    start_s, end_s = min(slot.start_s for slot in timed), max(slot.end_s for slot in timed)
    return [asdict(gap) for gap in find_gaps(spec, timed, start_s=start_s, end_s=end_s)]
