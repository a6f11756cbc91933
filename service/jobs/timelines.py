"""A job's plan, and the planned and measured slots of a step side by side, also as a Chrome trace for Perfetto."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError
from service.jobs.service import Service
from service.scheduler.views.chrome import NANOSECOND_US, TransferArrows
from service.schemas.jobs import SlotView, TimelineSide, TimelineView
from service.store.measurements import SlotRecord, find_step, find_timeline, profiled_steps
from service.store.plans import find_job_plan
from service.store.tables import Job, JobPlan, Step, Timeline

_UPDATE_ACTIONS = ("REDUCE", "STEP")
_MICROSECONDS = 1e6


async def stored_plan(service: Service, job_id: str) -> JobPlan:
    """The job's current plan; 404 where it has none."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan{why_no_plan(job)}")
    return plan


def why_no_plan(job: Job) -> str:
    """The end of a message that says that `job` has no plan."""
    if job.job_state.final:
        return ": it ended before it was planned, or they were removed since; its events say so"
    return " yet: it is planned after its layers are profiled"


async def read_timeline(service: Service, job_id: str, step: int | None) -> TimelineView:
    """Planned and measured slots of a profiled step, by default the last; 404 where there are neither."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
        profiled = await profiled_steps(session, job_id)
        measured = await find_timeline(session, job_id, step)
        record = await find_step(session, job_id, measured[0].step) if measured else None
    if step is not None and measured is None:
        raise ProblemError(
            404, f"step {step} of job {job_id} was not profiled: {profiled_steps_hint(profiled)}"
        )
    if plan is None and measured is None:
        raise ProblemError(404, f"job {job_id} has neither a plan nor a profiled step{why_no_plan(job)}")
    return await asyncio.to_thread(_timeline_view, job_id, plan, measured, record, profiled)


def profiled_steps_hint(profiled: Sequence[int]) -> str:
    """The end of a message that says that a step was not profiled: the steps that were, 20 at most."""
    if not profiled:
        return "no step was yet"
    return f"choose one of {', '.join(map(str, profiled[:20]))}{', ...' if len(profiled) > 20 else ''}"


def _timeline_view(
    job_id: str,
    plan: JobPlan | None,
    measured: tuple[Timeline, list[SlotRecord]] | None,
    record: Step | None,
    profiled: Sequence[int],
) -> TimelineView:
    """Runs in a thread, as thousands of slots take tens of milliseconds."""
    view = TimelineView(
        job_id=job_id,
        step=measured[0].step if measured else None,
        started_at=measured[0].started_at if measured else None,
        uncertainty_s=measured[0].uncertainty_s if measured else None,
        planned=None if plan is None else _planned_side(plan.body),
        measured=None,
        profiled_steps=list(profiled),
    )
    if measured:
        slots = [SlotView(**slot._asdict()) for slot in measured[1]]
        view.measured = TimelineSide(makespan_s=makespan_s(slots, record), slots=slots)
    return view


def _planned_side(body: str) -> TimelineSide:
    plan = json.loads(body)["plan"]
    return TimelineSide(makespan_s=plan["makespan_s"], slots=plan["slots"])


def makespan_s(slots: Sequence[SlotView], record: Step | None) -> float:
    """As the driver reported it, else from the first start to the last end before REDUCE and STEP."""
    if record is not None and record.makespan_s is not None:
        return record.makespan_s
    timed = [slot for slot in slots if slot.action not in _UPDATE_ACTIONS]
    return max((s.end_s for s in timed), default=0.0) - min((s.start_s for s in timed), default=0.0)


def chrome_trace(view: TimelineView) -> dict[str, Any]:
    """One process a side and mesh, one thread a lane, an arrow for each transfer; times in microseconds from the
    step's start."""
    events: list[dict[str, Any]] = []
    arrows = TransferArrows()
    number = 0
    for side, timeline in (("planned", view.planned), ("measured", view.measured)):
        slots = [] if timeline is None else timeline.slots
        for mesh in dict.fromkeys(slot.mesh for slot in slots):
            number += 1
            of_mesh = [slot for slot in slots if slot.mesh == mesh]
            events += _mesh_events(number, f"{side} {mesh}", of_mesh, side, arrows)
    events += arrows.events()
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "job": view.job_id,
            "step": view.step,
            "started_at": view.started_at,
            "uncertainty_s": view.uncertainty_s,
        },
    }


def _mesh_events(
    number: int, name: str, slots: list[SlotView], side: str, arrows: TransferArrows
) -> list[dict[str, Any]]:
    lanes = {
        lane: i for i, lane in enumerate(sorted({s.lane for s in slots}, key=lambda x: (x != "compute", x)))
    }
    events = [
        _name_event("process_name", number, 0, name),
        _sort_event("process_sort_index", number, 0, number),
    ]
    for lane, thread in lanes.items():
        events.append(_name_event("thread_name", number, thread, lane))
        events.append(_sort_event("thread_sort_index", number, thread, thread))
    for slot in slots:
        label = "" if slot.microbatch is None else f" {slot.microbatch}"
        start, length = slot.start_s * _MICROSECONDS, (slot.end_s - slot.start_s) * _MICROSECONDS
        if slot.peer_mesh is not None:
            length = max(length, NANOSECOND_US)
        arrows.add(
            side,
            slot.mesh,
            slot.action,
            slot.peer_mesh,
            slot.edge,
            slot.microbatch,
            process=number,
            thread=lanes[slot.lane],
            start=start,
            end=start + length,
        )
        events.append(
            {
                "name": f"{slot.action}{label}",
                "cat": slot.action,
                "ph": "X",
                "pid": number,
                "tid": lanes[slot.lane],
                "ts": start,
                "dur": length,
                "args": slot.model_dump(
                    include={"stage", "peer_stage", "peer_mesh", "edge", "microbatch"}, exclude_none=True
                ),
            }
        )
    return events


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sort_event(kind: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": index}}
