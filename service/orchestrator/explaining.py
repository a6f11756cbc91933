"""Why a job's step takes as long as it does: reads what is stored of the job, asks service/scheduler/why.

`explain_step` runs in the planning pool; only it imports the scheduler.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.scheduler.why.cuts import Layers
    from service.scheduler.why.explain import PlannedStep
    from service.store.timelines import SlotRecord

LIMIT_S = 20.0
"""So long changes are tried; those that are left are named."""


@dataclass(frozen=True)
class StoredStep:
    """What is stored of a job and one of its steps.

    `job` is its JobSpec's JSON, `plan` the text of its plan, `slots` the measured ones (none: nothing was measured
    under this plan), `step_s` the step's length, `costs` all that was measured of such jobs, where it is still kept.
    """

    job: Mapping[str, Any]
    plan: str
    slots: Sequence[SlotRecord]
    step_s: float | None
    costs: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()


def explain_step(expired: Callable[[], bool], stored: StoredStep) -> str:
    """The Explanation as JSON; raises ValueError where the plan was made by a Slotline of another time."""
    from service.scheduler.why.explain import explain

    until = time.monotonic() + LIMIT_S
    plan, begins = _planned(json.loads(stored.plan))
    found = explain(
        plan,
        stored.slots,
        step_s=stored.step_s,
        layers=_layers(stored, begins),
        expired=lambda: expired() or time.monotonic() > until,
    )
    found = replace(found, notes=(*stored.notes, *found.notes))
    return json.dumps(asdict(found), allow_nan=False)


def _planned(body: Mapping[str, Any]) -> tuple[PlannedStep, Sequence[str]]:
    from pydantic import ValidationError

    from service.scheduler.model.spec import PipelineSpec
    from service.scheduler.plan import Slot
    from service.scheduler.why.explain import PlannedStep

    plan = body["plan"]
    try:
        spec = PipelineSpec.model_validate(body["spec"])
        slots = [Slot(**slot) for slot in plan["slots"]]
    except (ValidationError, TypeError):
        raise ValueError(
            "the job was planned by a Slotline of another version, whose plan can be shown, but not explained: "
            "`slotline retry` plans it anew"
        ) from None
    found = PlannedStep(
        spec=spec,
        slots=slots,
        programs=plan["programs"],
        makespan_s=plan["makespan_s"],
        lower_bound_s=plan["lower_bound_s"],
        update_s=body.get("update_s") or 0.0,
        recomputed=[stage["name"] for stage in plan.get("stages", ()) if stage["recomputed"]],
    )
    return found, body.get("begins") or ()


def _layers(stored: StoredStep, begins: Sequence[str]) -> Layers:
    """What is known of the job's layers; as much as fits together."""
    from service.scheduler.job import JobCosts, kept_by_optimizer, measured_profile
    from service.scheduler.why.cuts import Layers
    from worker.choices import microbatch_counts
    from worker.job import Job

    job = Job.from_json(stored.job)
    training = {**stored.job["training"], "microbatches": "auto"}
    try:
        counts = microbatch_counts(Job.from_json({**stored.job, "training": training}))
    except ValueError:
        counts = ()
    if stored.costs is None:
        return Layers({}, counts)
    try:
        costs = JobCosts.from_json(stored.costs, job)
    except ValueError:  # measured by a Slotline of another time
        return Layers({}, counts)
    profiles = {}
    for count in costs.profiles:
        with contextlib.suppress(ValueError):  # not of each mesh
            profiles[count] = measured_profile(job, costs, count)
    recompute = job.pipeline.recompute
    return Layers(
        profiles=profiles,
        counts=counts,
        begins=begins,
        optimizer=kept_by_optimizer(job, costs),
        recompute=recompute if isinstance(recompute, str) else list(recompute),
        action_s=costs.action_s,
    )
