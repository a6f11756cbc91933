"""Serves JSON that the job page needs beside the API: profiled steps, gaps, memory of meshes, the chosen plan.

Turns stored plans, slots and peaks into the values of the scheduler's gap analysis; decides nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError
from sqlalchemy import select

from service.api.dependencies import CurrentService
from service.api.errors import ProblemError
from service.api.routers.jobs import JobId, existing_job
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.gaps import find_gaps
from service.schemas.jobs import Integer, SlotView
from service.store.attempts import attempts_of
from service.store.measurements import SlotRecord, find_timeline, profiled_attempt_steps
from service.store.plans import find_job_plan
from service.store.tables import JobPlan
from worker.contract.planned import planned_peak_bytes
from worker.contract.program import COMPUTE_OPS, TRANSFER_OPS

router = APIRouter(include_in_schema=False)


@router.get("/jobs/{job_id}/profiled-steps")
async def steps(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """The attempt whose plan is stored (null: none), and of each stored timeline the step and the attempt; latest last."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await session.scalar(select(JobPlan.attempt).where(JobPlan.job_id == job_id))
        places = await profiled_attempt_steps(session, job_id)
    return {
        "planned": plan,
        "steps": [step for _, step in places],
        "attempts": [attempt for attempt, _ in places],
    }


@router.get("/jobs/{job_id}/gaps")
async def gaps(job_id: JobId, service: CurrentService, step: Integer | None = None) -> dict[str, Any]:
    """The gaps of the planned and of the measured compute lanes of one step (the last profiled one if null)."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        timeline = await find_timeline(session, job_id, step)
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan yet: it gets one when its first attempt starts")
    return await asyncio.to_thread(_explained_gaps, plan.body, [] if timeline is None else timeline[1])


@router.get("/jobs/{job_id}/memory")
async def memory(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """Of each mesh of the job's plan: its limit, the planned and the measured peak, and the stages that recompute."""
    async with service.database.read() as session:
        await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        attempts = await attempts_of(session, job_id)
    if plan is None:
        return {"meshes": []}
    peaks = next((one.peak_memory_bytes for one in attempts if one.number == plan.attempt), None)
    return {"meshes": await asyncio.to_thread(_memory, plan.body, peaks or {})}


@router.get("/jobs/{job_id}/choice")
async def choice(job_id: JobId, service: CurrentService) -> dict[str, Any]:
    """What the job's plan chose and promises beside its slots; null and empty where there is no plan yet."""
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


def _memory(plan_text: str, peaks: Mapping[str, int]) -> list[dict[str, Any]]:
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


def _explained_gaps(plan_text: str, records: list[SlotRecord]) -> dict[str, Any]:
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
