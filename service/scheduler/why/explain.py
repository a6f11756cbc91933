"""Explains a step: a job's plan and the measured slots of one step in, verdict, causes and changes out.

Where nothing was measured, the plan itself is explained: the waits of its lanes, and the changes that would shorten it.
Totals leave out REDUCE and STEP, which come behind the makespan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.why.calibration import Calibration, behind_makespan_s, calibrate
from service.scheduler.why.causes import find_causes, significant_causes
from service.scheduler.why.changes import JobLayers, TriedChanges, best_change_of_kinds, find_changes
from service.scheduler.why.gaps import TimedSlot, find_gaps
from service.scheduler.why.measured import (
    CauseKind,
    Change,
    ChangeKind,
    Explanation,
    LinkTotals,
    MeshTotals,
    SlowdownCause,
    TimelineTotals,
    duration_text,
)
from service.scheduler.why.step_graph import Link, PlanMismatchError, make_step_graph
from worker.contract.program import COMPUTE_OPS, TRANSFER_OPS


def timeline_totals(spec: PipelineSpec, slots: Sequence[TimedSlot]) -> TimelineTotals:
    """The sums of one timeline; REDUCE and STEP, which come behind the makespan, are left out."""
    timed = [slot for slot in slots if slot.action in COMPUTE_OPS + TRANSFER_OPS]
    if not timed:
        return TimelineTotals(0.0, (), ())
    start_s, end_s = min(slot.start_s for slot in timed), max(slot.end_s for slot in timed)
    computed: dict[str, float] = defaultdict(float)
    carried: dict[Link, float] = defaultdict(float)
    exposed: dict[Link, float] = defaultdict(float)
    counted: Counter[Link] = Counter()
    for slot in timed:
        if slot.action in COMPUTE_OPS:
            computed[slot.mesh] += slot.end_s - slot.start_s
        elif slot.action.startswith("RECV"):  # both halves of a transfer have the same times
            link = (slot.lane.partition(":")[2], slot.mesh)
            carried[link] += slot.end_s - slot.start_s
            counted[link] += 1
    idle: dict[str, dict[str, float]] = {mesh.name: {} for mesh in spec.meshes}
    for gap in find_gaps(spec, timed, start_s=start_s, end_s=end_s):
        reasons = idle[gap.mesh]
        reasons[gap.reason.value] = reasons.get(gap.reason.value, 0.0) + gap.end_s - gap.start_s
        if gap.link is not None:
            exposed[gap.link] += gap.end_s - gap.start_s
    return TimelineTotals(
        makespan_s=end_s - start_s,
        meshes=tuple(MeshTotals(mesh.name, computed[mesh.name], idle[mesh.name]) for mesh in spec.meshes),
        links=tuple(
            LinkTotals(*link, counted[link], carried[link], exposed[link]) for link in sorted(counted)
        ),
    )


_NEAR_RATIO = 1.1  # times its plan, or its bound, within which a step is as it should be
_SLOWER_UPDATE_RATIO = 1.15
_CAUSE_OF_CHANGE = {
    ChangeKind.MEMORY: CauseKind.MEMORY,
    ChangeKind.CUT: CauseKind.CUT,
    ChangeKind.LAYER: CauseKind.CUT,
}


@dataclass(frozen=True)
class PlannedStep:
    """A job's plan as far as it explains a step: the problem, its slots and programs, and its promises.

    `update_s` is what REDUCE and STEP take behind the makespan; `recomputed` the stages that recompute by choice;
    `nodes` are those of each mesh, where they are known.
    """

    spec: PipelineSpec
    slots: Sequence[TimedSlot]
    programs: Mapping[str, Sequence[Mapping[str, Any]]]
    makespan_s: float
    lower_bound_s: float
    update_s: float = 0.0
    recomputed: Sequence[str] = ()
    nodes: Mapping[str, Collection[str]] = field(default_factory=dict)


def explain(
    plan: PlannedStep,
    measured: Sequence[TimedSlot],
    *,
    step_s: float | None = None,
    calibrated_by: Sequence[Sequence[TimedSlot]] = (),
    layers: JobLayers | None = None,
    expired: Callable[[], bool] = lambda: False,
) -> Explanation:
    """Why a step of this plan takes as long as it does, and what would shorten it.

    `measured` are the slots of one step (none: the plan alone is explained), `step_s` how long the driver saw that
    step take. Changes are planned with the costs that the steps `calibrated_by` give (none: this step). Changes that were
    not tried when `expired` says so are named.
    """
    planned = timeline_totals(plan.spec, plan.slots)
    notes = []
    step = usual = make_step_graph(plan.spec, plan.programs, plan.slots, plan.slots)
    ran, calibration = None, None
    if measured:
        try:
            step = usual = make_step_graph(plan.spec, plan.programs, plan.slots, measured)
            ran = timeline_totals(plan.spec, measured)
        except PlanMismatchError as error:
            notes.append(f"the measured step is of another plan than the job's, or not whole: {error}")
    steps = calibrated_by or [measured]
    if ran is not None and (found := calibrate(plan.spec, plan.programs, plan.slots, steps)) is not None:
        calibration, usual = found
    behind = _StepParts.of(measured, step_s) if ran is not None else None
    whole_s = plan.makespan_s + plan.update_s if behind is None else behind.step_s
    if plan.spec.length_buckets:
        tried = TriedChanges((), ())
        notes.append(
            "changes were not tried: the step ran by a plan for its own lengths, and others have others"
        )
    else:
        tried = find_changes(
            usual,
            plan.spec,
            layers or JobLayers({}),
            recomputed=plan.recomputed,
            step_s=whole_s,
            expired=expired,
        )
    causes = (
        []
        if behind is None
        else [
            *find_causes(step, plan.spec, step_s=whole_s, nodes=plan.nodes),
            *_causes_outside_timeline(plan, behind),
        ]
    )
    causes += _structural_causes(tried.changes, causes, whole_s)
    causes = significant_causes(causes, step_s=whole_s)
    if layers is None or plan.spec.microbatches not in layers.profiles:
        notes.append("the costs of the layers are kept no more: other cuts were not tried")
    healthy = not causes and _is_near_plan_and_bound(plan, planned, ran)
    return Explanation(
        verdict=_verdict_text(plan, ran, calibration, causes, tried.changes),
        healthy=healthy,
        step_s=whole_s,
        planned_step_s=plan.makespan_s + plan.update_s,
        lower_bound_s=plan.lower_bound_s,
        planned=planned,
        measured=ran,
        calibrated=calibration,
        causes=tuple(causes),
        changes=tried.changes,
        left_out=tried.left_out,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _StepParts:
    """A measured step in three parts: its timeline, REDUCE and STEP behind it, and the rest until the next."""

    step_s: float
    update_s: float
    rest_s: float

    @classmethod
    def of(cls, slots: Sequence[TimedSlot], step_s: float | None) -> _StepParts:
        start_s = min(slot.start_s for slot in slots)
        end_s = max(slot.end_s for slot in slots)
        whole_s = max(end_s - start_s, step_s or 0.0)
        return cls(whole_s, behind_makespan_s(slots), whole_s - (end_s - start_s))


def _causes_outside_timeline(plan: PlannedStep, behind: _StepParts) -> list[SlowdownCause]:
    """Causes that the timeline does not show."""
    found = [
        SlowdownCause(
            CauseKind.BETWEEN,
            "driver",
            behind.rest_s,
            f"for {duration_text(behind.rest_s)} of a step no lane of any worker runs: the driver's calls and reports, "
            "reading of samples that are not there yet, a checkpoint",
        )
    ]
    if plan.update_s > 0 and behind.update_s > _SLOWER_UPDATE_RATIO * plan.update_s:
        found.append(
            SlowdownCause(
                CauseKind.UPDATE,
                "all meshes",
                behind.update_s - plan.update_s,
                f"REDUCE and STEP take {duration_text(behind.update_s)} behind the makespan, {duration_text(plan.update_s)} "
                "were planned",
            )
        )
    return found


def _structural_causes(
    changes: Sequence[Change], causes: Sequence[SlowdownCause], step_s: float
) -> list[SlowdownCause]:
    """Limits and cuts that cost a clear part of the step. Where a mesh or a stage is slow, another cut would only
    work around that: the cut itself is not to blame."""
    slow = any(
        cause.cost_s > 0 and cause.kind in (CauseKind.MESH, CauseKind.STAGE, CauseKind.COMPUTE)
        for cause in causes
    )
    found: dict[CauseKind, SlowdownCause] = {}
    for change in best_change_of_kinds(changes, _CAUSE_OF_CHANGE, step_s=step_s):
        kind = _CAUSE_OF_CHANGE[change.kind]
        if kind is CauseKind.CUT and slow:
            continue
        words = "memory limits keep meshes waiting" if kind is CauseKind.MEMORY else "the stages are uneven"
        subject = change.subject if kind is CauseKind.MEMORY else "cut"
        found.setdefault(
            kind, SlowdownCause(kind, subject, change.alone_s, f"{words}; with {change.message}")
        )
    return list(found.values())


def _is_near_plan_and_bound(plan: PlannedStep, planned: TimelineTotals, ran: TimelineTotals | None) -> bool:
    near_plan = ran is None or ran.makespan_s <= _NEAR_RATIO * planned.makespan_s
    return near_plan and plan.makespan_s <= _NEAR_RATIO * plan.lower_bound_s


def _verdict_text(
    plan: PlannedStep,
    ran: TimelineTotals | None,
    calibration: Calibration | None,
    causes: Sequence[SlowdownCause],
    changes: Sequence[Change],
) -> str:
    parts = []
    bound = (
        f"the plan is {100 * (plan.makespan_s / plan.lower_bound_s - 1):.1f} % above its lower bound"
        if plan.lower_bound_s > 0
        else "the plan has no lower bound"
    )
    if ran is None:
        parts.append(f"no step of this plan was measured yet; {bound}")
    else:
        more = 100 * (ran.makespan_s / plan.makespan_s - 1) if plan.makespan_s > 0 else 0.0
        near = (
            "near its plan"
            if abs(more) <= 100 * (_NEAR_RATIO - 1)
            else f"{'over' if more > 0 else 'below'} its plan"
        )
        calibrated = (
            ""
            if calibration is None
            else f"; calibrated by {calibration.steps} measured {'step' if calibration.steps == 1 else 'steps'} "
            f"it is {duration_text(calibration.makespan_s)}"
        )
        parts.append(
            f"the timeline is {near} ({duration_text(ran.makespan_s)}, {more:+.1f} % beside the plan's "
            f"{duration_text(plan.makespan_s)}{calibrated}), and {bound}"
        )
    if causes:
        parts.append(f"what costs most: {causes[0].message} ({duration_text(causes[0].cost_s)} of the step)")
    else:
        parts.append("nothing is to blame")
    if changes:
        best = changes[0]
        parts.append(f"what would bring most: {best.message} ({duration_text(best.gain_s)} less a step)")
    return ". ".join(part[:1].upper() + part[1:] for part in parts) + "."
