"""The joint choice of a job: stages, microbatches, placement and cut for the shortest planned step.

A formula cannot see a schedule: cuts that look best to it, an even and a balanced one, are planned by
constructive schedules, their borders moved one by one; the full search goes to the winners. On small models
every cut is judged and every one that its lower bound does not rule out is searched, so that nothing is missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import numpy as np

from service.scheduler.automatic import constructive_makespan
from service.scheduler.cores import SharedCores, least_step, processor_seconds, slowed
from service.scheduler.cut.recompute import Recompute
from service.scheduler.kernels import TOLERANCE
from service.scheduler.least import least_makespan
from service.scheduler.model.spec import MeshSpec, NetworkSpec, PipelineSpec, SpecError
from service.scheduler.named import named_timeline
from service.scheduler.partition import PartitionResult, partition
from service.scheduler.plan import Plan
from service.scheduler.planner import make_plan
from service.scheduler.recomputation import may_recompute, with_choice
from service.scheduler.schedules import AUTO
from worker.model.profile import LayerProfile, OptimizerState, check_stage_count

_EVERY_CUT = 30  # cuts of one shape, for each second of the budget, up to which all are judged
_MOVES_PER_SECOND = (
    5_000_000  # tasks judged by constructive schedules in a second of the budget, with all rules
)
_JUDGED_SHARE = 0.3  # of the budget
_SHARED_ROUNDS = (0.2, 0.3, 0.5)  # of a plan's budget, until costs and makespan agree
_NEARLY = 1.001  # how well they must
_ALONE_WEIGHT = 0.1  # of the makespan with cores for all, where the cores decide: cuts would be all alike
_WINNERS = 3  # searched with the rest of the budget, where the model is large


@dataclass(frozen=True)
class JobPlan:
    """What was chosen: the layers that begin the stages, the planning problem, and its plan.

    `score_s` is what it was chosen by; `slowdown` says how many times as long as alone actions take in it, where
    workers share cores.
    """

    partition: PartitionResult
    plan: Plan
    score_s: float
    slowdown: float = 1.0


@dataclass(frozen=True)
class _Shape:
    """Everything but the cut."""

    microbatches: int
    placement: tuple[int, ...]


@dataclass(frozen=True)
class _Candidate:
    shape: _Shape
    begins: tuple[int, ...]
    makespan_s: float  # by constructive schedules


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
) -> JobPlan:
    """The shortest planned step over microbatches, numbers of stages, placements and cuts.

    `profiles` holds the layers' costs at each number of microbatches that may be chosen (of one global batch);
    `stages` the numbers of stages that may be. Names in `cut` fix it; `optimizer` says what its state adds to static
    bytes, `shared` which workers share processor cores, `recompute` is that of `partition`. Raises CutError for
    more stages than layers, SpecError where nothing fits.
    """
    for profile in profiles.values():
        check_stage_count([layer.name for layer in profile.layers], min(stages))
    choice = _Choice(
        profiles, meshes, network, schedule, overlap, budget_s, expired, optimizer, shared, recompute
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
        return choice.best_plan([choice.given(shape, cut) for shape in shapes])
    for shape in shapes:
        choice.judge_cuts(shape, 1.0 / len(shapes))
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
        shared: Sequence[SharedCores],
        recompute: Recompute,
    ) -> None:
        self._profiles, self._meshes, self._network = profiles, list(meshes), network
        self._schedule, self._overlap = schedule, overlap
        self._budget_s, self._expired = budget_s, expired
        self._every_cut = int(_EVERY_CUT * budget_s)
        self._optimizer, self._shared, self._recompute = optimizer, shared, recompute
        self._seen: dict[tuple[_Shape, tuple[int, ...]], float] = {}
        self._failed: SpecError | None = None

    def given(self, shape: _Shape, cut: Sequence[str]) -> _Candidate:
        """A cut by hand, to be searched unjudged; raises CutError or SpecError where it does not fit."""
        result = self._partition(shape, cut)
        names = [layer.name for layer in self._profiles[shape.microbatches].layers]
        return _Candidate(shape, tuple(names.index(name) for name in result.begins), 0.0)

    def judge_cuts(self, shape: _Shape, share: float) -> None:
        """Judge cuts of one shape: all of them, or what borders moved one by one reach from the best starts."""
        layers, stages = len(self._profiles[shape.microbatches].layers), len(shape.placement)
        if stages > layers:
            return
        if math.comb(layers - 1, stages - 1) <= share * self._every_cut:
            for borders in combinations(range(1, layers), stages - 1):
                self._judge(shape, (0, *borders))
            return
        tasks = shape.microbatches * (3 * stages + 2 * len(self._profiles[shape.microbatches].edges))
        moves = max(10, int(share * self._budget_s * _JUDGED_SHARE * _MOVES_PER_SECOND / (40 * tasks)))
        starts = sorted(self._starts(shape), key=lambda begins: self._judge(shape, begins))
        best = starts[0]
        while moves > 0 and not self._late():
            for other in _moved(best, layers):
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
        found = [_Candidate(shape, begins, makespan) for (shape, begins), makespan in self._seen.items()]
        return sorted(
            (c for c in found if math.isfinite(c.makespan_s)), key=lambda c: (c.makespan_s, c.begins)
        )

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
            if best is not None and (
                self._late() or self._least(result.spec) >= best.score_s * (1 - TOLERANCE)
            ):
                continue
            try:
                planned = self._plan(result, share)
            except SpecError as error:
                self._failed = error
                continue
            if best is None or planned.score_s < best.score_s * (1 - TOLERANCE):
                best = planned
        if best is None:
            raise self._failed or SpecError("no cut of this model could be planned: raise memory_bytes")
        return best

    def _plan(self, cut: PartitionResult, budget_s: float) -> JobPlan:
        """The plan of a cut; where workers share cores, with costs as they are when all of them compute."""
        if not self._shared:
            plan = make_plan(cut.spec, budget_s=budget_s, expired=self._expired)
            return JobPlan(cut, plan, score_s=plan.makespan_s)
        factor, score_s = 1.0, 0.0
        for share in _SHARED_ROUNDS:
            spec = slowed(cut.spec, factor)
            plan = make_plan(spec, budget_s=share * budget_s, expired=self._expired)
            processor_s = {mesh.name: mesh.compute_s / factor for mesh in plan.meshes}
            score_s = score_s or self._score(plan.makespan_s, processor_s)
            short = least_step(processor_s, self._shared) / plan.makespan_s
            if short <= _NEARLY:
                break
            factor *= short  # transfers are not slowed, so that once is not always enough
        return JobPlan(replace(cut, spec=spec), plan, score_s=score_s, slowdown=factor)

    def _least(self, spec: PipelineSpec) -> float:
        return self._score(least_makespan(spec), processor_seconds(spec))

    def _score(self, alone_s: float, processor_s: Mapping[str, float]) -> float:
        """What candidates are compared by: the makespan; where cores are shared, also how far from idle they are."""
        if not self._shared:
            return alone_s
        return max(alone_s, least_step(processor_s, self._shared)) + _ALONE_WEIGHT * alone_s

    def _starts(self, shape: _Shape) -> Iterator[tuple[int, ...]]:
        profile = self._profiles[shape.microbatches]
        layers, stages = len(profile.layers), len(shape.placement)
        names = [layer.name for layer in profile.layers]
        try:
            yield tuple(names.index(name) for name in self._partition(shape, "auto").begins)
        except SpecError as error:
            self._failed = error
        yield equal_layers(layers, stages)
        yield balanced(profile, stages)

    def _judge(self, shape: _Shape, begins: tuple[int, ...]) -> float:
        key = (shape, begins)
        if key not in self._seen:
            try:
                spec = self._cut(shape, begins).spec
                alone_s = _constructive_makespan(spec)
                self._seen[key] = self._score(alone_s, processor_seconds(spec))
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
        )

    def _late(self) -> bool:
        return self._expired is not None and self._expired()


def equal_layers(layers: int, stages: int) -> tuple[int, ...]:
    """The cut into stages of as many layers each, the larger ones first."""
    size, larger = divmod(layers, stages)
    sizes = [size + (stage < larger) for stage in range(stages)]
    return tuple(int(begin) for begin in np.cumsum([0, *sizes[:-1]]))


def balanced(profile: LayerProfile, stages: int) -> tuple[int, ...]:
    """The cut whose busiest stage computes least, transfers aside (dynamic programming over prefixes)."""
    work = np.array([layer.compute_s for layer in profile.layers])
    total = np.concatenate(([0.0], np.cumsum(work)))
    layers = len(work)
    load = np.where(np.arange(layers + 1)[:, None] < np.arange(layers + 1), total - total[:, None], np.inf)
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(stages):
        costs = np.maximum(best[:, None], load)
        choices.append(costs.argmin(axis=0))
        best = costs.min(axis=0)
    begins, end = [], layers
    for choice in reversed(choices):
        end = int(choice[end])
        begins.append(end)
    return tuple(begins[::-1])


def _moved(begins: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """The cuts with one border moved by one layer, or by two."""
    for step in (1, -1, 2, -2):
        for border in range(1, len(begins)):
            other = (*begins[:border], begins[border] + step, *begins[border + 1 :])
            if all(a < b for a, b in zip(other, (*other[1:], layers), strict=True)):
                yield other


def _constructive_makespan(spec: PipelineSpec) -> float:
    names = may_recompute(spec)
    if spec.schedule != AUTO:
        try:
            return named_timeline(with_choice(spec, ()), spec.schedule).makespan
        except SpecError:
            if not names:
                raise
            return named_timeline(with_choice(spec, names), spec.schedule).makespan
    return constructive_makespan(spec)
