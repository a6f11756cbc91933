"""The joint choice of a job: stages, microbatches, placement and cut for the shortest planned step.

A formula cannot see a schedule: cuts that look best to it, an even and a balanced one, are planned by
constructive schedules, their borders moved one by one; the full search goes to the winners. On small models
every cut is judged and every one that its lower bound does not rule out is searched, so that nothing is missed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, takewhile
from typing import Literal

import numpy as np

from service.scheduler.backwards import shorter_whole
from service.scheduler.cores import SharedCores, least_step, processor_seconds, slowed
from service.scheduler.cut.layers import layer_ranges
from service.scheduler.cut.recompute import Recompute
from service.scheduler.cut.starts import balanced, equal_layers, moved
from service.scheduler.cut.unlike import profile_of_mesh
from service.scheduler.job_across import SumsAcross
from service.scheduler.judged import judged_makespan
from service.scheduler.kernels import TOLERANCE
from service.scheduler.least import least_makespan
from service.scheduler.model.spec import MeshSpec, NetworkSpec, PipelineSpec, SpecError
from service.scheduler.partition import PartitionResult, partition
from service.scheduler.plan import Plan
from service.scheduler.planner import make_plan
from service.scheduler.schedules import AUTO
from worker.model.profile import LayerProfile, OptimizerState, check_stage_count
from worker.model.update_costs import MeshUpdate, UpdateCosts, mesh_update

_EVERY_CUT = 30  # cuts of one shape, for each second of the budget, up to which all are judged
_MOVES_PER_SECOND = (
    5_000_000  # tasks judged by constructive schedules in a second of the budget, with all rules
)
_JUDGED_SHARE = 0.3  # of the budget
_SHARED_ROUNDS = (0.2, 0.3, 0.5)  # of a plan's budget, until costs and makespan agree
_NEARLY = 1.001  # how well they must
_ALONE_WEIGHT = 0.1  # of the makespan with cores for all, where the cores decide: cuts would be all alike
_WINDOW = 4  # microbatches a mesh by which cuts of more than twice as many are judged
_PROMISING = 4  # shapes whose borders are moved, where all cuts are too many
_WINNERS = 3  # searched with the rest of the budget, where the model is large


@dataclass(frozen=True)
class JobPlan:
    """What was chosen: the layers that begin the stages, the planning problem, its plan, and of each mesh what
    REDUCE and STEP take behind the makespan.

    `score_s` is what it was chosen by; `slowdown` says how many times as long as alone actions take in it, where
    workers share cores.
    """

    partition: PartitionResult
    plan: Plan
    update: tuple[MeshUpdate, ...]
    score_s: float
    slowdown: float = 1.0
    update_s: float | None = None  # behind the makespan, where sums of gradients do not all come behind it

    @property
    def step_s(self) -> float:
        """The planned length of a step: the makespan, and the longest REDUCE and STEP behind it."""
        return self.plan.makespan_s + (longest(self.update) if self.update_s is None else self.update_s)


@dataclass(frozen=True)
class _Shape:
    """Everything but the cut."""

    microbatches: int
    placement: tuple[int, ...]


@dataclass(frozen=True)
class _Candidate:
    shape: _Shape
    begins: tuple[int, ...]
    step_s: float  # by constructive schedules


def choose(
    profiles: Mapping[int, LayerProfile],
    *,
    stages: Sequence[int],
    meshes: Sequence[MeshSpec],
    cut: Literal["auto"] | Sequence[str] = "auto",
    network: NetworkSpec,
    schedule: str = AUTO,
    overlap: bool = True,
    budget_s: float = 10.0,
    expired: Callable[[], bool] | None = None,
    optimizer: OptimizerState | None = None,
    shared: Sequence[SharedCores] = (),
    recompute: Recompute = "none",
    update: UpdateCosts | None = None,
    across: SumsAcross | None = None,
    action_s: float = 0.0,
) -> JobPlan:
    """The shortest planned step over microbatches, numbers of stages, placements and cuts.

    A step is the makespan and the longest REDUCE and STEP behind it, which `update` tells, and `across` of what meshes sum
    together (nothing where None).
    `profiles` holds the layers' costs at each number of microbatches that may be chosen (of one global batch);
    `stages` the numbers of stages that may be. Names in `cut` fix it; `optimizer` says what its state adds to static
    bytes, `shared` which workers share processor cores, `recompute` and `action_s` are those of `partition`. Raises
    CutError for more stages than layers, SpecError where nothing fits.
    """
    for profile in profiles.values():
        check_stage_count([layer.name for layer in profile.layers], min(stages))
    choice = _Choice(
        profiles,
        meshes,
        network,
        schedule,
        overlap,
        budget_s,
        expired,
        optimizer,
        update,
        across,
        shared,
        recompute,
        action_s,
    )
    shapes = [
        _Shape(microbatches, placement)
        for microbatches in profiles
        for count in stages
        for placement in placements(count, len(meshes), schedule)
    ]
    if not shapes:
        raise SpecError(
            f"stages {list(stages)} cannot fill {len(meshes)} meshes: ask for at least one stage a mesh"
        )
    if cut != "auto":
        return choice.best_plan(choice.given(shapes, cut))
    choice.judge_cuts(shapes)
    return choice.best_plan(choice.judged())


def placements(stages: int, meshes: int, schedule: str) -> list[tuple[int, ...]]:
    """The mesh of every stage, in each way that the schedule can run: in order, in rounds, as a V."""
    if stages < meshes or meshes < 1:
        return []
    looped = tuple(stage % meshes for stage in range(stages))
    folded = tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    if stages == meshes:
        return [looped]
    if stages == 2 * meshes and schedule == AUTO:
        return [folded, looped]
    return [folded if schedule == "zb-v" and stages == 2 * meshes else looped]


class _Choice:
    def __init__(
        self,
        profiles: Mapping[int, LayerProfile],
        meshes: Sequence[MeshSpec],
        network: NetworkSpec,
        schedule: str,
        overlap: bool,
        budget_s: float,
        expired: Callable[[], bool] | None,
        optimizer: OptimizerState | None,
        update: UpdateCosts | None,
        across: SumsAcross | None,
        shared: Sequence[SharedCores],
        recompute: Recompute,
        action_s: float,
    ) -> None:
        self._profiles, self._meshes, self._network = profiles, list(meshes), network
        self._schedule, self._overlap = schedule, overlap
        self._budget_s, self._expired = budget_s, expired
        self._every_cut = int(_EVERY_CUT * budget_s)
        self._optimizer, self._costs, self._across = optimizer, update or UpdateCosts(), across
        self._shared, self._recompute, self._action_s = shared, recompute, action_s
        self._seen: dict[tuple[_Shape, tuple[int, ...]], float] = {}
        self._failed: SpecError | None = None

    def given(self, shapes: Sequence[_Shape], cut: Sequence[str]) -> list[_Candidate]:
        """A cut by hand for every shape, all to be searched, the one that is judged best first; raises CutError or
        SpecError where it does not fit."""
        found = []
        for shape in shapes:
            names = [layer.name for layer in self._profiles[shape.microbatches].layers]
            begins = tuple(names.index(name) for name in self._partition(shape, cut).begins)
            step_s = self._judge(shape, begins) if len(shapes) > 1 else 0.0
            found.append(_Candidate(shape, begins, step_s))
        return sorted(found, key=lambda candidate: candidate.step_s)

    def judge_cuts(self, shapes: Sequence[_Shape]) -> None:
        """Judge cuts of every shape: all of them where they are few, else what borders moved one by one reach from
        the best start. Of many shapes only those whose starts look best deserve moves."""
        large, first = [], {}
        for shape in shapes:
            layers, stages = len(self._profiles[shape.microbatches].layers), len(shape.placement)
            if stages > layers:
                continue
            if math.comb(layers - 1, stages - 1) * len(shapes) > self._every_cut:
                large.append(shape)
                continue
            self._judge(shape, self._by_formula(shape))  # where time ends, a good one is among those judged
            cuts = combinations(range(1, layers), stages - 1)
            for borders in takewhile(lambda _: not (self._late() and self.judged()), cuts):
                self._judge(shape, (0, *borders))
        for shape in large:
            if not first or not self._late():
                first[shape] = self._judge(shape, self._by_formula(shape))
        starts = {
            shape: min(self._starts(shape), key=lambda begins: self._judge(shape, begins))
            for shape in sorted(first, key=first.__getitem__)[: 2 * _PROMISING]
        }
        promising = sorted(starts, key=lambda shape: self._judge(shape, starts[shape]))[:_PROMISING]
        for shape in promising:
            self._move_borders(shape, starts[shape], 1.0 / len(promising))

    def _move_borders(self, shape: _Shape, best: tuple[int, ...], share: float) -> None:
        layers, stages = len(self._profiles[shape.microbatches].layers), len(shape.placement)
        judged = min(shape.microbatches, 2 * _WINDOW * len(self._meshes))
        tasks = judged * (3 * stages + 2 * len(self._profiles[shape.microbatches].edges))
        moves = max(10, int(share * self._budget_s * _JUDGED_SHARE * _MOVES_PER_SECOND / (40 * tasks)))
        while moves > 0 and not self._late():
            for other in moved(best, layers):
                moves -= (shape, other) not in self._seen
                if self._judge(shape, other) < self._judge(shape, best) * (1 - TOLERANCE):
                    best = other
                    break
                if moves <= 0:
                    break
            else:
                return

    def judged(self) -> list[_Candidate]:
        """What was judged, best first."""
        found = [_Candidate(shape, begins, step_s) for (shape, begins), step_s in self._seen.items()]
        return sorted((c for c in found if math.isfinite(c.step_s)), key=lambda c: (c.step_s, c.begins))

    def best_plan(self, candidates: Sequence[_Candidate]) -> JobPlan:
        """Search the candidates that can still win, best first; few of them where the model is large."""
        if not candidates:
            raise self._failed or SpecError(
                "no cut of this model fits the meshes: raise their memory, or use more"
            )
        tried = candidates if len(self._seen) <= self._every_cut else candidates[:_WINNERS]
        # the first deserve most; where all are tried, the last ones have little left to show
        shares = np.arange(1, len(tried) + 1) ** -1.5
        shares *= self._budget_s * (1 - _JUDGED_SHARE) / shares.sum()
        best: JobPlan | None = None
        for candidate, share in zip(tried, shares.tolist(), strict=True):
            result = self._cut(candidate.shape, candidate.begins)
            update = self._update(candidate.shape, candidate.begins)
            if best is not None and (
                self._late() or self._least(result.spec, update) >= best.score_s * (1 - TOLERANCE)
            ):
                continue
            try:
                planned = self._plan(result, update, share)
            except SpecError as error:
                self._failed = error
                continue
            if best is None or planned.score_s < best.score_s * (1 - TOLERANCE):
                best = planned
        if best is None:
            raise self._failed or SpecError("no cut of this model could be planned: raise memory_bytes")
        return best

    def _plan(self, cut: PartitionResult, update: tuple[MeshUpdate, ...], budget_s: float) -> JobPlan:
        """The plan of a cut; where workers share cores, with costs as they are when all of them compute."""
        if not self._shared:
            plan = make_plan(cut.spec, budget_s=budget_s, expired=self._expired)
            return JobPlan(cut, plan, update, score_s=plan.makespan_s + longest(update))
        found = self._plan_shared(cut, update, budget_s / 2)
        if found.slowdown > 1.0 and cut.spec.split_backward is None and shorter_whole(cut.spec):
            # where the cores decide, what takes less of them is shorter, however well it fills the pipeline
            whole = replace(cut, spec=cut.spec.model_copy(update={"split_backward": False}))
            with contextlib.suppress(SpecError):
                found = min(
                    found, self._plan_shared(whole, update, budget_s / 2), key=lambda one: one.score_s
                )
        return found

    def _plan_shared(self, cut: PartitionResult, update: tuple[MeshUpdate, ...], budget_s: float) -> JobPlan:
        factor, score_s = 1.0, 0.0
        for share in _SHARED_ROUNDS:
            spec = slowed(cut.spec, factor)
            plan = make_plan(spec, budget_s=share * budget_s, expired=self._expired)
            processor_s = {mesh.name: mesh.compute_s / factor for mesh in plan.meshes}
            score_s = score_s or self._score(plan.makespan_s, processor_s, update)
            short = least_step(processor_s, self._shared) / plan.makespan_s
            if short <= _NEARLY:
                break
            factor *= short  # transfers are not slowed, so that once is not always enough
        return JobPlan(replace(cut, spec=spec), plan, update, score_s=score_s, slowdown=factor)

    def _least(self, spec: PipelineSpec, update: tuple[MeshUpdate, ...]) -> float:
        return self._score(least_makespan(spec), processor_seconds(spec), update)

    def _score(
        self, alone_s: float, processor_s: Mapping[str, float], update: tuple[MeshUpdate, ...]
    ) -> float:
        """What candidates are compared by: the step; where cores are shared, also how far from idle they are."""
        if not self._shared:
            return alone_s + longest(update)
        shared_s = max(alone_s, least_step(processor_s, self._shared))
        return shared_s + _ALONE_WEIGHT * alone_s + longest(update)

    def _by_formula(self, shape: _Shape) -> tuple[int, ...]:
        """The cut by formula; the balanced one where the formula finds none that fits."""
        profile = self._profiles[shape.microbatches]
        names = [layer.name for layer in profile.layers]
        try:
            return tuple(names.index(name) for name in self._partition(shape, "auto").begins)
        except SpecError as error:
            self._failed = error
            return balanced(profile, len(shape.placement))

    def _starts(self, shape: _Shape) -> list[tuple[int, ...]]:
        profile = self._profiles[shape.microbatches]
        layers, stages = len(profile.layers), len(shape.placement)
        return [self._by_formula(shape), equal_layers(layers, stages), balanced(profile, stages)]

    def _judge(self, shape: _Shape, begins: tuple[int, ...]) -> float:
        key = (shape, begins)
        if key not in self._seen:
            try:
                spec = self._cut(shape, begins).spec
                update = self._update(shape, begins)
                self._seen[key] = self._score(
                    judged_makespan(spec, _WINDOW * len(spec.meshes)), processor_seconds(spec), update
                )
            except SpecError as error:
                self._failed = error
                self._seen[key] = math.inf
        return self._seen[key]

    def _cut(self, shape: _Shape, begins: Sequence[int]) -> PartitionResult:
        names = [layer.name for layer in self._profiles[shape.microbatches].layers]
        return self._partition(shape, [names[begin] for begin in begins])

    def _partition(self, shape: _Shape, cut: Literal["auto"] | Sequence[str]) -> PartitionResult:
        return partition(
            self._profiles[shape.microbatches],
            stages=len(shape.placement),
            meshes=self._meshes,
            cut=cut,
            microbatches=shape.microbatches,
            network=self._network,
            schedule=self._schedule,
            overlap=self._overlap,
            placement=shape.placement,
            optimizer=self._optimizer,
            recompute=self._recompute,
            action_s=self._action_s,
        )

    def _update(self, shape: _Shape, begins: Sequence[int]) -> tuple[MeshUpdate, ...]:
        profile = self._profiles[shape.microbatches]
        layers_of: list[list[int]] = [[] for _ in self._meshes]
        ranges = layer_ranges(begins, len(profile.layers))
        for mesh, (first, end) in zip(shape.placement, ranges, strict=True):
            layers_of[mesh].extend(range(first, end))
        found = tuple(
            mesh_update(mesh.name, layers, profile_of_mesh(profile, index), self._costs)
            for index, (mesh, layers) in enumerate(zip(self._meshes, layers_of, strict=True))
        )
        return found if self._across is None else self._across.added(found, profile, layers_of)

    def _late(self) -> bool:
        return self._expired is not None and self._expired()


def longest(update: Sequence[MeshUpdate]) -> float:
    """Seconds of the longest REDUCE and STEP of a mesh: what a step takes behind its makespan."""
    return max((one.whole_s for one in update), default=0.0)
