"""Work of planning processes beside plain planning: explain a stored step, shorten a running plan, fit a saved one.

Single steps of a running plan are planned here, too.

Only inside these functions is the scheduler imported: the module itself is imported by the control plane. They
return JSON text; ValueError is a refusal that the user sees.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.scheduler.why.changes import JobLayers
    from service.scheduler.why.explain import PlannedStep
    from service.store.measurements import SlotRecord


EXPLAIN_LIMIT_S = 20.0
"""Time for trying changes; changes that were not tried by then are named."""


@dataclass(frozen=True)
class StoredStep:
    """The stored data of a job and one of its steps.

    `job` is its JobSpec's JSON, `plan` the text of its plan, `slots` the measured ones (none: nothing was measured
    under this plan), `step_s` the step's length, `costs` all measured costs of such jobs, where the store still has them,
    `calibrated_by` the slots of the steps that give the costs of the running plan. `has_unequal_lengths`: the job's plan
    takes microbatches for the longest.
    """

    job: Mapping[str, Any]
    plan: str
    slots: Sequence[SlotRecord]
    step_s: float | None
    costs: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()
    calibrated_by: Sequence[Sequence[SlotRecord]] = ()
    has_unequal_lengths: bool = False


def explain_step(expired: Callable[[], bool], stored: StoredStep) -> str:
    """JSON of the Explanation; raises ValueError where the plan was made by a Slotline of another version."""
    from service.scheduler.why.explain import explain

    until = time.monotonic() + EXPLAIN_LIMIT_S
    plan, stage_starts = _read_planned_step(json.loads(stored.plan))
    explanation = explain(
        plan,
        stored.slots,
        step_s=stored.step_s,
        calibrated_by=stored.calibrated_by,
        layers=_known_layers(stored, stage_starts),
        expired=lambda: expired() or time.monotonic() > until,
    )
    notes = [*stored.notes, *explanation.notes]
    if explanation.measured is not None and stored.has_unequal_lengths and not plan.spec.length_buckets:
        notes.append(
            "the step ran by the job's plan, which takes all microbatches for the longest (data.lengths): its microbatches "
            "were as long or shorter, so what it takes less than planned is theirs, and changes are tried for steps of such "
            "lengths"
        )
    explanation = replace(explanation, notes=tuple(notes))
    return json.dumps(asdict(explanation), allow_nan=False)


def _read_planned_step(body: Mapping[str, Any]) -> tuple[PlannedStep, Sequence[str]]:
    from pydantic import ValidationError

    from service.scheduler.problem.spec import PipelineSpec
    from service.scheduler.programs.plan import Slot
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
    planned = PlannedStep(
        spec=spec,
        slots=slots,
        programs=plan["programs"],
        makespan_s=plan["makespan_s"],
        lower_bound_s=plan["lower_bound_s"],
        update_s=body.get("update_s") or 0.0,
        recomputed=[stage["name"] for stage in plan.get("stages", ()) if stage["recomputed"]],
        nodes=body.get("nodes") or {},
    )
    return planned, body.get("begins") or ()


def _known_layers(stored: StoredStep, stage_starts: Sequence[str]) -> JobLayers:
    """Profiles of the job's layers by number of microbatches; none where costs are missing or of another version."""
    from service.scheduler.job.plan_job import JobCosts, job_optimizer_state, measured_profile
    from service.scheduler.why.changes import JobLayers
    from worker.contract.job import Job, microbatch_counts

    job = Job.from_json(stored.job)
    training = {**stored.job["training"], "microbatches": "auto"}
    try:
        counts = microbatch_counts(Job.from_json({**stored.job, "training": training}))
    except ValueError:
        counts = ()
    if stored.costs is None:
        return JobLayers({}, counts)
    try:
        costs = JobCosts.from_json(stored.costs, job)
    except ValueError:  # measured by a Slotline of another version
        return JobLayers({}, counts)
    profiles = {}
    for count in costs.profiles:
        with contextlib.suppress(ValueError):  # this number was not measured on each mesh
            profiles[count] = measured_profile(job, costs, count)
    recompute = job.pipeline.recompute
    return JobLayers(
        profiles=profiles,
        counts=counts,
        stage_starts=stage_starts,
        optimizer=job_optimizer_state(job, costs),
        recompute=recompute if isinstance(recompute, str) else list(recompute),
        action_s=costs.action_s,
    )


@dataclass(frozen=True)
class RunningJob:
    """A job that trains: its JobSpec's JSON, the text of the plan that runs, the costs that it was planned with, and the
    slots of its last profiled steps."""

    job: Mapping[str, Any]
    plan: str
    costs: Mapping[str, Any]
    steps: Sequence[Sequence[SlotRecord]] = ()


def shorter_plan(expired: Callable[[], bool], running: RunningJob, budget_s: float) -> str:
    """JSON of a ReplanView: a plan of the same stages, meshes and recomputation, clearly shorter at measured costs."""
    from service.scheduler.job.plan_job import JobCosts, replan_job
    from service.scheduler.why.calibration import calibrate_steps, is_clearly_shorter, measured_graphs
    from service.scheduler.why.measured import measured_spec, with_decided_recomputation
    from service.scheduler.why.varied_costs import VariedCosts
    from worker.contract.job import Job

    body = json.loads(running.plan)
    plan, _ = _read_planned_step(body)
    measured = measured_graphs(plan.spec, plan.programs, plan.slots, running.steps)
    found = calibrate_steps(measured)
    if found is None:
        return json.dumps({"why": "no profiled step is of the plan that runs"})
    calibration, usual = found
    spec = with_decided_recomputation(measured_spec(plan.spec, usual), plan.recomputed)
    varied = VariedCosts.of([graph for graph, _ in measured], usual)
    job = Job.from_json(running.job)
    shorter = replan_job(
        job,
        JobCosts.from_json(running.costs, job),
        body,
        spec,
        budget_s=budget_s,
        expired=expired,
        means=varied.mean_makespans(spec, usual, plan.recomputed),
    )
    if shorter is None:
        return json.dumps({"why": "no shorter order was found"})
    times = {
        "running_s": shorter.running_s,
        "planned_s": shorter.planned_s,
        "spread_s": calibration.spread_s,
    }
    if not is_clearly_shorter(shorter.planned_s, shorter.running_s, spread_s=calibration.spread_s):
        return json.dumps({"why": "the shorter order that was found is too near to the running one"} | times)
    return json.dumps({"found": shorter.answer} | times, allow_nan=False)


def step_plans(expired: Callable[[], bool], running: RunningJob, steps: Sequence[Sequence[int]]) -> str:
    """JSON of a StepPlansView: the plans of single steps of a running job, by the lengths of their microbatches."""
    from service.scheduler.job.plan_job import JobCosts, plan_steps
    from worker.contract.job import Job

    job = Job.from_json(running.job)
    costs = JobCosts.from_json(running.costs, job)
    plans = plan_steps(job, costs, json.loads(running.plan), steps, expired=expired)
    return json.dumps({"plans": plans}, allow_nan=False)


@dataclass(frozen=True)
class SavedPlanInput:
    """The saved plan that a job was submitted with: `named` is JSON of a SavedPlanRef, `body` the text that `plan_job`
    made, `made_for` JSON of its PlanKey."""

    named: Mapping[str, Any]
    body: str
    made_for: str


def plan_from_saved(
    expired: Callable[[], bool], job: Mapping[str, Any], costs: Mapping[str, Any], saved: SavedPlanInput
) -> str:
    """Fit a saved plan to a job with these costs. Raises ValueError where it does not."""
    from service.scheduler.job.saved_plan import PlanKey, saved_plan_answer
    from worker.contract.job import Job

    made_for = PlanKey.from_json(json.loads(saved.made_for))
    answer = saved_plan_answer(saved.named["name"], saved.body, made_for, Job.from_json(job), costs)
    return json.dumps({**answer, "named": dict(saved.named)}, allow_nan=False)


def plan_key_json(
    expired: Callable[[], bool], job: Mapping[str, Any], costs: Mapping[str, Any], body: str
) -> str:
    """JSON of the PlanKey of the plan `body` of a job with these costs."""
    from service.scheduler.job.saved_plan import PlanKey

    microbatches = json.loads(body)["spec"]["microbatches"]
    return json.dumps(PlanKey.of(job, costs, microbatches).to_json())
