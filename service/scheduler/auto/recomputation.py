"""Chooses the stages that recompute: they drop their activations and run their forward again for the backward.

A stage that recomputes keeps less from its forward on and takes longer; during its backward all activations are
there again. Selectively, it keeps the results of its products besides, and takes less time; by block, it keeps the
inputs of its blocks, and has the activations of one at a time. With few open stages every choice is searched. With
many: none, all, and the best by constructive plans, which starts from the stages shortest of memory and improves by
single changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from service.scheduler.problem.problem import Problem
from service.scheduler.problem.spec import (
    PipelineSpec,
    SpecError,
    StageSpec,
    change_costs,
    rematerialised_bytes,
)
from worker.contract.planned import RecomputeMethod

_MAX_EXHAUSTIVE_STAGES = 4  # stages up to which all choices are searched
_MAX_ESTIMATES = 200  # choices that are estimated at most
_MAX_ESTIMATED_TASKS = 300_000  # tasks of all estimated plans together, where each plan is a named one

StageChoice = frozenset[str]
StageMethods = frozenset[tuple[str, RecomputeMethod]]


@dataclass(frozen=True)
class Recomputation:
    """The stages that recompute by choice, and the methods of those of them that do not wholly."""

    stages: StageChoice = frozenset()
    methods: StageMethods = frozenset()

    def decide(self, spec: PipelineSpec) -> PipelineSpec:
        """The spec in which these stages recompute, and those that must."""
        return with_recomputation(spec, self.stages, self.methods)

    def neighbours(self, name: str, methods: Iterable[RecomputeMethod]) -> list[Recomputation]:
        """The choices that differ in one stage, which may recompute by `methods` in place of wholly."""
        others = frozenset((stage, method) for stage, method in self.methods if stage != name)
        choices = [Recomputation(self.stages - {name}, others), Recomputation(self.stages | {name}, others)]
        choices += [Recomputation(self.stages | {name}, others | {(name, method)}) for method in methods]
        return [choice for choice in choices if choice != self]


def may_recompute(spec: PipelineSpec) -> list[str]:
    """The stages whose choice is open and can matter: on meshes whose limit some plan could reach."""
    activations, everything = _max_bytes_in_flight(spec)
    limited = {
        mesh.name
        for mesh in spec.meshes
        if _limit_is_below(mesh.activation_limit_bytes, activations[mesh.name])
        or _limit_is_below(mesh.memory_bytes, everything[mesh.name])
    }
    return [
        stage.name
        for stage in spec.stages
        if stage.recompute is not None and not stage.recompute.required and stage.mesh in limited
    ]


def _limit_is_below(limit: int | None, most: int) -> bool:
    return limit is not None and limit < most


def _max_bytes_in_flight(spec: PipelineSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Upper bounds by mesh, with all microbatches in flight: (bytes of activations, all bytes)."""
    activations = dict.fromkeys((mesh.name for mesh in spec.meshes), 0)
    everything = dict(activations)
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    for stage in spec.stages:
        held = spec.microbatches * stage.activation_bytes + stage.rematerialised_bytes
        activations[stage.mesh] += held
        everything[stage.mesh] += held + stage.static_bytes
    for edge in spec.edges:
        for mesh in {mesh_of[edge.source], mesh_of[edge.target]}:
            held = edge.held_bytes or 0
            carried = (edge.forward_bytes or held) + (edge.backward_bytes or held)
            everything[mesh] += spec.microbatches * carried
    return activations, everything


def tightest_memory_first(names: Sequence[str], problem: Problem) -> list[str]:
    """The stages in the order in which recomputing is likely to pay.

    Ranked by the microbatches that fit into the memory of their mesh, over those that a full pipeline has in flight
    there: one for each stage from there to the end of the path.
    """
    whole = np.zeros(problem.meshes)
    np.add.at(whole, problem.mesh_of_stage, problem.activation)
    room = np.where(problem.activation_capacity < 0, np.inf, problem.activation_capacity)
    in_flight = (room / np.maximum(whole, 1))[problem.mesh_of_stage] / problem.depth
    rank = {stage.name: float(ratio) for stage, ratio in zip(problem.spec.stages, in_flight, strict=True)}
    return sorted(names, key=rank.__getitem__)


def must_recompute(spec: PipelineSpec) -> frozenset[str]:
    """The stages that recompute under every choice."""
    return frozenset(
        stage.name for stage in spec.stages if stage.recompute is not None and stage.recompute.required
    )


def other_methods(spec: PipelineSpec) -> dict[str, list[RecomputeMethod]]:
    """The methods by which stages may recompute in place of wholly, of those that have any."""
    return {
        stage.name: [method for method in stage.recompute_options if method != "whole"]
        for stage in spec.stages
        if len(stage.recompute_options) > 1
    }


def with_recomputation(
    spec: PipelineSpec, recomputed: Iterable[str], methods: Iterable[tuple[str, RecomputeMethod]] = ()
) -> PipelineSpec:
    """The spec in which `recomputed` and the required stages recompute, those in `methods` so, with the costs and memory
    of that choice."""
    chosen = must_recompute(spec).union(recomputed)
    stages = with_recompute_methods(spec, methods).stages
    return spec.model_copy(
        update={"stages": [_decide_stage(stage, stage.name in chosen) for stage in stages]}
    )


def with_recompute_methods(
    spec: PipelineSpec, methods: Iterable[tuple[str, RecomputeMethod]]
) -> PipelineSpec:
    """The spec in which stages may recompute by the method in `methods` alone, and all others wholly alone."""
    chosen = dict(methods)

    def decided(stage: StageSpec) -> StageSpec:
        if len(stage.recompute_options) < 2:
            return stage
        options = stage.recompute_options
        return stage.with_recompute_options([options.get(chosen.get(stage.name, "whole"), options["whole"])])

    return spec.model_copy(update={"stages": [decided(stage) for stage in spec.stages]})


def recompute_relaxation(spec: PipelineSpec) -> PipelineSpec:
    """A spec that no choice can beat: every stage keeps the least and none takes longer."""

    def relaxed(stage: StageSpec) -> StageSpec:
        options = stage.recompute_options.values()
        kept = min([stage.activation_bytes, *(option.activation_bytes for option in options)])
        return stage.with_recompute_options([]).model_copy(
            update={
                "activation_bytes": kept,
                "weight_stash_bytes": min(stage.weight_stash_bytes, kept),
                "rematerialised_bytes": 0,
            }
        )

    return change_costs(spec, stage=relaxed)


def _decide_stage(stage: StageSpec, recomputes: bool) -> StageSpec:
    if stage.recompute is None or not recomputes:
        return stage.model_copy(update={"recompute": None})
    again, stash = rematerialised_bytes(stage, stage.recompute), stage.weight_stash_bytes
    if stage.recompute.by_block:  # a B without I and W has less there at a time than W needs together
        stash = min(stash, stage.recompute.activation_bytes + again)
    return stage.model_copy(
        update={
            "activation_bytes": stage.recompute.activation_bytes,
            "rematerialised_bytes": again,
            "weight_stash_bytes": stash,
            "backward_input_s": stage.backward_input_s + stage.recompute.extra_s,
            "backward_s": None if stage.backward_s is None else stage.backward_s + stage.recompute.extra_s,
            "recompute": None,
        }
    )


def fuse_costly_splits(problem: Problem) -> Problem:
    """The same problem with one B for every stage whose I would leave more for W than the stage keeps from F on.

    Splitting it would undo what recomputing saves; and a search that makes room for forwards alone could not tell.
    Where its mesh has no limit there is no room to make.
    """
    limited = problem.activation_capacity[problem.mesh_of_stage] >= 0
    whole = problem.stages_that_stash_more & limited
    return problem.with_fused(problem.fused | whole[:, None]) if whole.any() else problem


def candidate_choices(
    names: Sequence[str],
    estimate: Callable[[StageChoice], float],
    exhausted: Callable[[], bool] = lambda: False,
    *,
    relative_error: float = 0.0,
) -> list[StageChoice]:
    """Choices worth a search, best first by `estimate` (seconds, infinite where no plan fits).

    All of them where they are few; else the best estimated one, none, and all. Prefixes of `names`, which come in the
    order in which choosing them is likely to pay, are estimated first, then single changes of the best, until none is
    better, the largest number of estimates is reached, or the work for them is `exhausted`. Another choice has to be
    better by more than the `relative_error` of an estimate.
    """
    if len(names) <= _MAX_EXHAUSTIVE_STAGES:
        choices = [
            frozenset(stages) for count in range(len(names) + 1) for stages in combinations(names, count)
        ]
        return sorted(choices, key=estimate)
    seen: dict[StageChoice, float] = {}

    def better(choice: StageChoice, than: StageChoice) -> bool:
        if choice not in seen and not exhausted() and len(seen) < _MAX_ESTIMATES:
            seen[choice] = estimate(choice)
        return seen.get(choice, math.inf) < seen[than] * (1 - relative_error)

    nothing: StageChoice = frozenset()
    seen[nothing] = estimate(nothing)
    count = len(names) if better(frozenset(names), nothing) else 0
    step = 2 ** (len(names) - 1).bit_length() // 2
    while step:
        for other in (count + step, count - step):
            if 0 < other < len(names) and better(frozenset(names[:other]), frozenset(names[:count])):
                count = other
                break
        step //= 2
    best = frozenset(names[:count])
    near = sorted(range(len(names)), key=lambda i: abs(i + 0.5 - count))
    improved = True
    while improved:
        improved = False
        for i in near:
            other = best ^ {names[i]}
            if better(other, best):
                best, improved = other, True
    return list(dict.fromkeys([best, nothing, frozenset(names)]))


def candidate_recomputations(
    names: Sequence[str],
    methods: Mapping[str, Sequence[RecomputeMethod]],
    estimate: Callable[[Recomputation], float],
    exhausted: Callable[[], bool] = lambda: False,
    *,
    relative_error: float = 0.0,
) -> list[Recomputation]:
    """Choices worth a search, best first by `estimate`; stages may recompute by their `methods`, too.

    Those of `candidate_choices` in which every stage recomputes wholly, and, for each other method, those in which all
    that can do so recompute by it; and the best of them with single stages changed, until none is better.
    """
    methods = {name: methods[name] for name in names if name in methods}
    seen: dict[Recomputation, float] = {}

    def estimated(choice: Recomputation) -> float:
        if choice not in seen:
            seen[choice] = estimate(choice)
        return seen[choice]

    found = []
    for method in dict.fromkeys(["whole", *(method for several in methods.values() for method in several)]):
        by_method = frozenset((name, method) for name, several in methods.items() if method in several)

        def choice_of(some: StageChoice, by_method: StageMethods = by_method) -> Recomputation:
            return Recomputation(some, frozenset(pair for pair in by_method if pair[0] in some))

        stages = candidate_choices(
            names,
            lambda some, choice_of=choice_of: estimated(choice_of(some)),
            exhausted,
            relative_error=relative_error,
        )
        found += [choice_of(some) for some in stages]
    if not methods:
        return found
    best, improved = min(found, key=estimated), True
    while improved:
        improved = False
        for other in (near for name in names for near in best.neighbours(name, methods.get(name, ()))):
            if exhausted() or len(seen) >= 2 * _MAX_ESTIMATES:
                break
            if estimated(other) < seen[best] * (1 - relative_error):
                best, improved = other, True
                break
    return sorted({best: None, **dict.fromkeys(found)}, key=estimated)


def cheapest_recomputation(
    names: Sequence[str],
    methods: Mapping[str, Sequence[RecomputeMethod]],
    makespan: Callable[[Recomputation], float],
    tasks: int,
) -> Recomputation:
    """No stage where that fits (nothing is faster than keeping all), else the best of `candidate_recomputations`.

    `makespan` raises SpecError for a choice that does not fit; each of its plans has `tasks` tasks.
    """
    estimated_tasks = 0

    def estimate(choice: Recomputation) -> float:
        nonlocal estimated_tasks
        estimated_tasks += tasks
        try:
            return makespan(choice)
        except SpecError:
            return math.inf

    nothing = Recomputation()
    if not names or math.isfinite(estimate(nothing)):
        return nothing
    return candidate_recomputations(
        names, methods, estimate, lambda: estimated_tasks >= _MAX_ESTIMATED_TASKS
    )[0]
