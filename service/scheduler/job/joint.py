"""Searches stages, microbatches, placement and cut together for the shortest planned step.

A formula cannot see a schedule: the cut by formula, an even and a balanced one are estimated by constructive
schedules, their borders moved one by one, and the winners are searched in full. On small models every cut is
estimated, and every cut that its lower bound does not rule out is searched, so that none is missed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from typing import Literal

import numpy as np

from service.scheduler.auto.auto import constructive_makespan, makespan_lower_bound_s
from service.scheduler.auto.backward_split import faster_whole_stages
from service.scheduler.auto.fixed_schedule import named_timeline
from service.scheduler.auto.recomputation import (
    may_recompute,
    other_methods,
    with_recomputation,
    with_recompute_methods,
)
from service.scheduler.job.cores import SharedCores, core_bound_step_s, processor_seconds, with_slower_actions
from service.scheduler.job.cut import (
    PipelineSetup,
    balanced_cut,
    equal_layers_cut,
    layer_ranges,
    neighbour_cuts,
)
from service.scheduler.job.heterogeneous import profile_of_mesh
from service.scheduler.job.network import CrossMeshAllReduce
from service.scheduler.job.partition import PartitionResult, partition
from service.scheduler.job.step_plans import StepPlanner
from service.scheduler.kernels import TOLERANCE
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.programs.plan import Plan
from service.scheduler.schedules.registry import AUTO
from worker.contract.costs import MeshUpdate, UpdateCosts, mesh_update
from worker.contract.planned import RecomputeMethod, recompute_method
from worker.contract.profile import LayerProfile, check_stage_count

_EXHAUSTIVE_CUTS_PER_SECOND = 30  # cuts up to which all are estimated, for each second of the budget
_ESTIMATED_TASKS_PER_SECOND = (
    5_000_000  # tasks in constructive schedules with all rules, in a second of the budget
)
_ESTIMATE_SHARE = 0.3  # of the budget
_SHARED_CORES_BUDGET_SHARES = (0.2, 0.3, 0.5)  # of a plan's budget, until slowdown and makespan agree
_SLOWDOWN_TOLERANCE = 1.001  # of this agreement
_UNSHARED_WEIGHT = (
    0.1  # of the makespan with a core for each worker: where cores decide, all cuts would score the same
)
_WINDOW_PER_MESH = 4  # microbatches a mesh by which cuts of more than twice as many are estimated
_MAX_MOVED_SHAPES = 4  # shapes whose borders are moved, where all cuts are too many
_MAX_SEARCHED_CUTS = 3  # searched with the rest of the budget, where the model is large


@dataclass(frozen=True)
class JointSearchRequest:
    """The measured costs of a job, and the search space that it leaves open.

    `profiles` holds the layers' costs by the numbers of microbatches that may be chosen (of one global batch), `stages`
    the numbers of stages; names in `cut` fix the cut. `update` prices REDUCE and STEP, `across` the all-reduces that
    span meshes, `shared` are the nodes whose workers share processor cores.
    """

    profiles: Mapping[int, LayerProfile]
    setup: PipelineSetup
    stages: Sequence[int]
    cut: Literal["auto"] | Sequence[str] = "auto"
    update: UpdateCosts = field(default_factory=UpdateCosts)
    across: CrossMeshAllReduce | None = None
    shared: Sequence[SharedCores] = ()


@dataclass(frozen=True)
class JobPlan:
    """The chosen cut, its plan, and by mesh the REDUCE and STEP behind the makespan.

    Candidates are compared by `score_s`; actions take `slowdown` times as long as alone, where workers share cores.
    """

    partition: PartitionResult
    plan: Plan
    update: tuple[MeshUpdate, ...]
    score_s: float
    slowdown: float = 1.0
    update_s: float | None = None  # behind the makespan, where some gradients are summed before it ends
    notes: tuple[str, ...] = ()  # what is unusual about the cut, for people
    step_planner: StepPlanner | None = None  # where microbatches have unequal lengths

    @property
    def step_s(self) -> float:
        """The planned length of a step: the makespan, and the longest REDUCE and STEP behind it."""
        return self.plan.makespan_s + (
            longest_update_s(self.update) if self.update_s is None else self.update_s
        )


@dataclass(frozen=True)
class _PipelineShape:
    """Everything but the cut."""

    microbatches: int
    placement: tuple[int, ...]


@dataclass(frozen=True)
class _CutCandidate:
    shape: _PipelineShape
    stage_starts: tuple[int, ...]
    step_s: float  # by constructive schedules


def plan_jointly(
    request: JointSearchRequest, *, budget_s: float = 10.0, expired: Callable[[], bool] | None = None
) -> JobPlan:
    """The shortest planned step over microbatches, numbers of stages, placements and cuts.

    A step is the makespan and the longest REDUCE and STEP behind it. Raises CutError for more stages than layers,
    SpecError where nothing fits.
    """
    for profile in request.profiles.values():
        check_stage_count([layer.name for layer in profile.layers], min(request.stages), profile.joined)
    search = _JointSearch(request, budget_s, expired)
    setup = request.setup
    shapes = [
        _PipelineShape(microbatches, placement)
        for microbatches in request.profiles
        for count in request.stages
        for placement in placements(count, len(setup.meshes), setup.schedule)
    ]
    if not shapes:
        raise SpecError(
            f"stages {list(request.stages)} cannot fill {len(setup.meshes)} meshes: ask for at least one stage a mesh"
        )
    if request.cut != "auto":
        return search.best_plan(search.fixed_cut_candidates(shapes, request.cut))
    search.estimate_cuts(shapes)
    return search.best_plan(search.estimated_candidates())


def placements(stages: int, meshes: int, schedule: str) -> list[tuple[int, ...]]:
    """The meshes of all stages, for every placement that the schedule can run: in order, in rounds, as a V."""
    if stages < meshes or meshes < 1:
        return []
    looped = tuple(stage % meshes for stage in range(stages))
    folded = tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    if stages == meshes:
        return [looped]
    if stages == 2 * meshes and schedule == AUTO:
        return [folded, looped]
    return [folded if schedule == "zb-v" and stages == 2 * meshes else looped]


class _JointSearch:
    def __init__(
        self, request: JointSearchRequest, budget_s: float, expired: Callable[[], bool] | None
    ) -> None:
        self._request, self._setup = request, request.setup
        self._budget_s, self._expired = budget_s, expired
        self._max_estimated_cuts = int(_EXHAUSTIVE_CUTS_PER_SECOND * budget_s)
        self._estimates: dict[tuple[_PipelineShape, tuple[int, ...]], float] = {}
        self._last_error: SpecError | None = None

    def fixed_cut_candidates(
        self, shapes: Sequence[_PipelineShape], cut: Sequence[str]
    ) -> list[_CutCandidate]:
        """The cut by hand for every shape, the best estimate first; raises CutError or SpecError where it does not fit."""
        candidates = []
        for shape in shapes:
            names = [layer.name for layer in self._request.profiles[shape.microbatches].layers]
            stage_starts = tuple(names.index(name) for name in self._partition(shape, cut).stage_starts)
            step_s = self._estimate(shape, stage_starts) if len(shapes) > 1 else 0.0
            candidates.append(_CutCandidate(shape, stage_starts, step_s))
        return sorted(candidates, key=lambda candidate: candidate.step_s)

    def estimate_cuts(self, shapes: Sequence[_PipelineShape]) -> None:
        """Estimate cuts of every shape: all of them where they are few, else the cuts that borders moved one by one
        reach from the best start, for the shapes with the best starts."""
        large, first = [], {}
        for shape in shapes:
            layers, stages = len(self._request.profiles[shape.microbatches].layers), len(shape.placement)
            if stages > layers:
                continue
            if math.comb(layers - 1, stages - 1) * len(shapes) > self._max_estimated_cuts:
                large.append(shape)
                continue
            # first, so that a good cut has been estimated where the deadline ends the loop
            self._estimate(shape, self._by_formula(shape))
            cuts = combinations(range(1, layers), stages - 1)
            for borders in takewhile(
                lambda _: not (self._deadline_passed() and self.estimated_candidates()), cuts
            ):
                self._estimate(shape, (0, *borders))
        for shape in large:
            if not first or not self._deadline_passed():
                first[shape] = self._estimate(shape, self._by_formula(shape))
        starts = {
            shape: min(self._starts(shape), key=lambda stage_starts: self._estimate(shape, stage_starts))
            for shape in sorted(first, key=first.__getitem__)[: 2 * _MAX_MOVED_SHAPES]
        }
        promising = sorted(starts, key=lambda shape: self._estimate(shape, starts[shape]))[:_MAX_MOVED_SHAPES]
        for shape in promising:
            self._move_borders(shape, starts[shape], 1.0 / len(promising))

    def _move_borders(self, shape: _PipelineShape, best: tuple[int, ...], share: float) -> None:
        layers, stages = len(self._request.profiles[shape.microbatches].layers), len(shape.placement)
        microbatches = min(shape.microbatches, 2 * _WINDOW_PER_MESH * len(self._setup.meshes))
        tasks = microbatches * (3 * stages + 2 * len(self._request.profiles[shape.microbatches].edges))
        moves = max(
            10, int(share * self._budget_s * _ESTIMATE_SHARE * _ESTIMATED_TASKS_PER_SECOND / (40 * tasks))
        )
        while moves > 0 and not self._deadline_passed():
            for other in neighbour_cuts(best, layers):
                moves -= (shape, other) not in self._estimates
                if self._estimate(shape, other) < self._estimate(shape, best) * (1 - TOLERANCE):
                    best = other
                    break
                if moves <= 0:
                    break
            else:
                return

    def estimated_candidates(self) -> list[_CutCandidate]:
        """The estimated cuts that fit, best first."""
        candidates = [
            _CutCandidate(shape, stage_starts, step_s)
            for (shape, stage_starts), step_s in self._estimates.items()
        ]
        return sorted(
            (c for c in candidates if math.isfinite(c.step_s)), key=lambda c: (c.step_s, c.stage_starts)
        )

    def best_plan(self, candidates: Sequence[_CutCandidate]) -> JobPlan:
        """Search the candidates that can still win, best first; few of them where the model is large."""
        if not candidates:
            raise self._last_error or SpecError(
                "no cut of this model fits the meshes: raise their memory, or use more"
            )
        tried = (
            candidates
            if len(self._estimates) <= self._max_estimated_cuts
            else candidates[:_MAX_SEARCHED_CUTS]
        )
        # the best estimates get most of the budget: where all cuts are tried, the last ones rarely win
        shares = np.arange(1, len(tried) + 1) ** -1.5
        shares *= self._budget_s * (1 - _ESTIMATE_SHARE) / shares.sum()
        best: JobPlan | None = None
        for candidate, share in zip(tried, shares.tolist(), strict=True):
            result = self._cut(candidate.shape, candidate.stage_starts)
            update = self._update(candidate.shape, candidate.stage_starts)
            if best is not None and (
                self._deadline_passed()
                or self._lower_bound_score(result.spec, update) >= best.score_s * (1 - TOLERANCE)
            ):
                continue
            try:
                planned = self._plan(result, update, share)
            except SpecError as error:
                self._last_error = error
                continue
            if best is None or planned.score_s < best.score_s * (1 - TOLERANCE):
                best = planned
        if best is None:
            raise self._last_error or SpecError("no cut of this model could be planned: raise memory_bytes")
        return best

    def _plan(self, cut: PartitionResult, update: tuple[MeshUpdate, ...], budget_s: float) -> JobPlan:
        """The plan of a cut; where workers share cores, with the costs while all of them compute."""
        if not self._request.shared:
            plan = make_plan(cut.spec, budget_s=budget_s, expired=self._expired)
            cut = replace(cut, spec=_as_planned(cut.spec, plan))
            return JobPlan(cut, plan, update, score_s=plan.makespan_s + longest_update_s(update))
        planned = self._plan_shared(cut, update, budget_s / 2)
        if planned.slowdown > 1.0 and cut.spec.split_backward is None and faster_whole_stages(cut.spec):
            # where the cores decide, fewer processor seconds are shorter, however well the pipeline is filled
            whole = replace(cut, spec=cut.spec.model_copy(update={"split_backward": False}))
            with contextlib.suppress(SpecError):
                planned = min(
                    planned, self._plan_shared(whole, update, budget_s / 2), key=lambda plan: plan.score_s
                )
        return planned

    def _plan_shared(self, cut: PartitionResult, update: tuple[MeshUpdate, ...], budget_s: float) -> JobPlan:
        factor, score_s = 1.0, 0.0
        for share in _SHARED_CORES_BUDGET_SHARES:
            spec = with_slower_actions(cut.spec, factor)
            plan = make_plan(spec, budget_s=share * budget_s, expired=self._expired)
            processor_s = {mesh.name: mesh.compute_s / factor for mesh in plan.meshes}
            score_s = score_s or self._score(plan.makespan_s, processor_s, update)
            short = core_bound_step_s(processor_s, self._request.shared) / plan.makespan_s
            if short <= _SLOWDOWN_TOLERANCE:
                break
            factor *= short  # transfers are not slowed, so that once is not always enough
        cut = replace(cut, spec=_as_planned(spec, plan))
        return JobPlan(cut, plan, update, score_s=score_s, slowdown=factor)

    def _lower_bound_score(self, spec: PipelineSpec, update: tuple[MeshUpdate, ...]) -> float:
        return self._score(makespan_lower_bound_s(spec), processor_seconds(spec), update)

    def _score(
        self, alone_s: float, processor_s: Mapping[str, float], update: tuple[MeshUpdate, ...]
    ) -> float:
        """Seconds by which candidates are compared: the step; where cores are shared, also a part of the makespan without
        sharing."""
        if not self._request.shared:
            return alone_s + longest_update_s(update)
        shared_s = max(alone_s, core_bound_step_s(processor_s, self._request.shared))
        return shared_s + _UNSHARED_WEIGHT * alone_s + longest_update_s(update)

    def _by_formula(self, shape: _PipelineShape) -> tuple[int, ...]:
        """The cut by formula; the balanced one where the formula finds none that fits."""
        profile = self._request.profiles[shape.microbatches]
        names = [layer.name for layer in profile.layers]
        try:
            return tuple(names.index(name) for name in self._partition(shape, "auto").stage_starts)
        except SpecError as error:
            self._last_error = error
            return balanced_cut(profile, len(shape.placement))

    def _starts(self, shape: _PipelineShape) -> list[tuple[int, ...]]:
        profile = self._request.profiles[shape.microbatches]
        layers, stages = len(profile.layers), len(shape.placement)
        return [self._by_formula(shape), equal_layers_cut(layers, stages), balanced_cut(profile, stages)]

    def _estimate(self, shape: _PipelineShape, stage_starts: tuple[int, ...]) -> float:
        key = (shape, stage_starts)
        if key not in self._estimates:
            try:
                spec = self._cut(shape, stage_starts).spec
                update = self._update(shape, stage_starts)
                self._estimates[key] = self._score(
                    estimated_makespan(spec, _WINDOW_PER_MESH * len(spec.meshes)),
                    processor_seconds(spec),
                    update,
                )
            except SpecError as error:
                self._last_error = error
                self._estimates[key] = math.inf
        return self._estimates[key]

    def _cut(self, shape: _PipelineShape, stage_starts: Sequence[int]) -> PartitionResult:
        names = [layer.name for layer in self._request.profiles[shape.microbatches].layers]
        return self._partition(shape, [names[start] for start in stage_starts])

    def _partition(self, shape: _PipelineShape, cut: Literal["auto"] | Sequence[str]) -> PartitionResult:
        return partition(
            self._request.profiles[shape.microbatches],
            self._setup,
            stages=len(shape.placement),
            microbatches=shape.microbatches,
            cut=cut,
            placement=shape.placement,
        )

    def _update(self, shape: _PipelineShape, stage_starts: Sequence[int]) -> tuple[MeshUpdate, ...]:
        profile = self._request.profiles[shape.microbatches]
        layers_of: list[list[int]] = [[] for _ in self._setup.meshes]
        ranges = layer_ranges(stage_starts, len(profile.layers))
        for mesh, (first, end) in zip(shape.placement, ranges, strict=True):
            layers_of[mesh].extend(range(first, end))
        updates = tuple(
            mesh_update(mesh.name, layers, profile_of_mesh(profile, index), self._request.update)
            for index, (mesh, layers) in enumerate(zip(self._setup.meshes, layers_of, strict=True))
        )
        across = self._request.across
        return updates if across is None else across.with_all_reduces(updates, profile, layers_of)

    def _deadline_passed(self) -> bool:
        return self._expired is not None and self._expired()


def _as_planned(spec: PipelineSpec, plan: Plan) -> PipelineSpec:
    """The spec whose stages may recompute in the one way that the plan has chosen."""
    return with_recompute_methods(
        spec, ((stage.name, recompute_method(dict(stage))) for stage in plan.stages)
    )


def longest_update_s(update: Sequence[MeshUpdate]) -> float:
    """Seconds of the longest REDUCE and STEP of a mesh, which come behind the makespan of a step."""
    return max((mesh.total_s for mesh in update), default=0.0)


def estimated_makespan(spec: PipelineSpec, window: int) -> float:
    """Estimated makespan in seconds by constructive schedules; infinite where nothing fits.

    More than twice `window` microbatches are extrapolated from `window` and half of it: the steady state repeats, and
    takes as long each time.
    """
    if spec.microbatches <= 2 * window:
        return _constructive_estimate(spec)
    long_s, short_s = (
        _constructive_estimate(spec.model_copy(update={"microbatches": count}))
        for count in (window, window // 2)
    )
    if not math.isfinite(long_s) or not math.isfinite(short_s):
        return math.inf
    return long_s + (spec.microbatches - window) * (long_s - short_s) / (window - window // 2)


def _constructive_estimate(spec: PipelineSpec) -> float:
    names = may_recompute(spec)
    if spec.schedule != AUTO:
        try:
            return named_timeline(with_recomputation(spec, ()), spec.schedule).makespan
        except SpecError:
            if not names:
                raise
            return _estimate_recomputed(spec, names)
    return constructive_makespan(spec)


def _estimate_recomputed(spec: PipelineSpec, names: Sequence[str]) -> float:
    """The makespan of a named schedule in which the stages `names` recompute, by the shortest method that fits into
    memory. SpecError where none does."""
    methods = other_methods(spec)
    present = {"whole", *(method for several in methods.values() for method in several)}
    *first, last = (method for method in ("selective", "whole", "by_block") if method in present)

    def makespan(method: RecomputeMethod) -> float:
        chosen = [(name, method) for name, several in methods.items() if method in several]
        return named_timeline(with_recomputation(spec, names, chosen), spec.schedule).makespan

    for method in first:
        with contextlib.suppress(SpecError):
            return makespan(method)
    return makespan(last)
