"""Explanations of a job's step from its stored plan and measured slots: what it waits for, gaps of lanes, memory of meshes.

Turns rows of the store into the values of the scheduler's analyses; decides nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select

from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError
from service.jobs.service import RunWork, Service, with_fields
from service.orchestrator.planning.work import StoredStep
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.gaps import find_gaps
from service.schemas.jobs import SlotView
from service.settings.clusters import DEFAULT_CLUSTER
from service.store.attempts import attempts_of
from service.store.measurements import (
    SlotRecord,
    find_all_costs,
    find_step,
    find_timeline,
    profiled_attempt_steps,
    scoped_costs_digest,
)
from service.store.plans import find_job_plan
from service.store.tables import JobPlan
from worker.contract.costs import costs_digest
from worker.contract.planned import planned_peak_bytes
from worker.contract.program import COMPUTE_OPS, TRANSFER_OPS


async def explain_step(service: Service, job_id: str, step: int | None, run: RunWork) -> str:
    """JSON of a WhyView: of a profiled step, by default the last, or of the plan alone where none was profiled.

    404 for a job without a plan, and for a step that was not profiled. `run` awaits the analysis.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = None if measured is None else await find_step(session, job_id, measured[0].step)
        costs = await find_all_costs(
            session, scoped_costs_digest(costs_digest(job.spec), job.owner, job.began_on or DEFAULT_CLUSTER)
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
    stored = StoredStep(
        job=job.spec,
        plan=plan.body,
        slots=[] if measured is None else measured[1],
        step_s=None if measured is None or record is None else record.step_s,
        costs=costs,
        notes=tuple(notes),
    )
    explanation = await run(service.planner.explain(stored))
    explained_step = None if measured is None else measured[0].step
    return await with_fields(
        explanation, first={"job_id": job_id, "attempt": plan.attempt, "step": explained_step}
    )


async def read_profiled_steps(service: Service, job_id: str) -> dict[str, Any]:
    """The attempt whose plan is stored (None: none), and step and attempt of each stored timeline, latest last."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        planned = await session.scalar(select(JobPlan.attempt).where(JobPlan.job_id == job_id))
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
    """Microbatches, stages, step time and updates of the plan; None and empty where there is no plan yet."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
    if plan is None:
        return {"microbatches": None, "stages": None, "step_s": None, "update": []}
    return await asyncio.to_thread(_choice, plan.body)


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
    again = [stage["name"] for stage in body["plan"].get("stages", ()) if stage["recomputed"]]
    return [
        {
            "mesh": mesh["name"],
            "limit_bytes": mesh.get("memory_bytes"),
            "planned_bytes": planned.get(mesh["name"]),
            "measured_bytes": peaks.get(mesh["name"]),
            "recomputed": [stage for stage in again if mesh_of[stage] == mesh["name"]],
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
