"""A job's plan, and the planned and measured slots of a step side by side, also as a Chrome trace for Perfetto."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict

from service.jobs.explain import read_calibration
from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError
from service.jobs.service import Service, with_fields
from service.scheduler.views.chrome import chrome_trace
from service.scheduler.views.svg import timeline_svg
from service.schemas.activity import SlotView, TimelineSide, TimelineView
from service.store.measurements import SlotRecord, find_step, find_timeline, profiled_steps
from service.store.plans import find_job_plan
from service.store.tables import JobPlanRow, JobRow, StepRow, TimelineRow

_UPDATE_ACTIONS = ("REDUCE", "STEP")


async def read_plan(service: Service, job_id: str) -> str:
    """JSON of the JobPlanView of the job's current plan; 404 where it has none."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        plan = await find_job_plan(session, job_id)
    if plan is None:
        raise ProblemError(404, f"job {job_id} has no plan{why_no_plan(job)}")
    if (calibration := await read_calibration(service.database, job_id)) is None:
        return plan.body
    return await with_fields(plan.body, last={"calibrated": asdict(calibration)})


def why_no_plan(job: JobRow) -> str:
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
    plan: JobPlanRow | None,
    measured: tuple[TimelineRow, list[SlotRecord]] | None,
    record: StepRow | None,
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


def makespan_s(slots: Sequence[SlotView], record: StepRow | None) -> float:
    """The makespan that the driver reported, else from the first start to the last end before REDUCE and STEP."""
    if record is not None and record.makespan_s is not None:
        return record.makespan_s
    timed = [slot for slot in slots if slot.action not in _UPDATE_ACTIONS]
    return max((s.end_s for s in timed), default=0.0) - min((s.start_s for s in timed), default=0.0)


def timeline_picture(view: TimelineView) -> str:
    """Both sides of a timeline below each other as SVG; 422 where it has too many slots. Runs in a thread."""
    shown = {"planned": view.planned, "measured": view.measured}
    sides = {
        f"{name}: makespan {1e3 * side.makespan_s:.4g} ms": side.slots
        for name, side in shown.items()
        if side is not None
    }
    step = "" if view.step is None else f", step {view.step}"
    try:
        return timeline_svg(f"{view.job_id}{step}", sides)
    except ValueError as error:
        raise ProblemError(422, f"{error}: use format=chrome") from None


def timeline_trace(view: TimelineView) -> str:
    """Both sides of a timeline as a Chrome trace; runs in a thread, as the view itself."""
    sides = {"planned": view.planned, "measured": view.measured}
    trace = chrome_trace(
        {name: [slot.model_dump() for slot in side.slots] for name, side in sides.items() if side is not None}
    )
    step = {
        "job": view.job_id,
        "step": view.step,
        "started_at": view.started_at,
        "uncertainty_s": view.uncertainty_s,
    }
    return json.dumps(trace | {"otherData": step})
