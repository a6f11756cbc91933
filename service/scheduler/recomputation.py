"""Which stages drop their activations and compute their forward again: a choice beside the schedule.

A stage that recomputes keeps less from its forward on and takes longer; while its backward runs all is there again.
What that is worth depends on the plan. Few such stages: every choice is searched. Many: none, all, and what single
changes improve from there, judged by constructive plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

from service.scheduler.model.problem import Problem
from service.scheduler.model.spec import PipelineSpec, SpecError, StageSpec, rematerialised_bytes

_EXHAUSTIVE = 4  # stages up to which all choices are searched
_CHANGES = 200  # constructive plans that a search over single changes may cost,
_JUDGED_TASKS = 300_000  # and tasks of all of them together

Choice = frozenset[str]


def may_recompute(spec: PipelineSpec) -> list[str]:
    """The stages for which the choice is open and can matter: those on meshes whose limit some plan could reach."""
    activations, everything = _most_bytes(spec)
    limited = {
        mesh.name
        for mesh in spec.meshes
        if _below(mesh.activation_limit_bytes, activations[mesh.name])
        or _below(mesh.memory_bytes, everything[mesh.name])
    }
    return [
        stage.name
        for stage in spec.stages
        if stage.recompute is not None and not stage.recompute.required and stage.mesh in limited
    ]


def _below(limit: int | None, most: int) -> bool:
    return limit is not None and limit < most


def _most_bytes(spec: PipelineSpec) -> tuple[dict[str, int], dict[str, int]]:
    """What each mesh holds at the very most with all microbatches in flight: activations, and everything."""
    activations = dict.fromkeys((mesh.name for mesh in spec.meshes), 0)
    everything = dict(activations)
    mesh_of = {stage.name: stage.mesh for stage in spec.stages}
    for stage in spec.stages:
        held = spec.microbatches * stage.activation_bytes + stage.rematerialised_bytes
        activations[stage.mesh] += held
        everything[stage.mesh] += held + stage.static_bytes
    for edge in spec.edges:
        for mesh in {mesh_of[edge.source], mesh_of[edge.target]}:
            carried = (edge.forward_bytes or 0) + (edge.backward_bytes or 0)
            everything[mesh] += spec.microbatches * carried
    return activations, everything


def must_recompute(spec: PipelineSpec) -> frozenset[str]:
    """The stages that recompute under every choice."""
    return frozenset(
        stage.name for stage in spec.stages if stage.recompute is not None and stage.recompute.required
    )


def with_choice(spec: PipelineSpec, recomputed: Iterable[str]) -> PipelineSpec:
    """The spec in which these stages recompute, and those that must, and no other: costs and memory as they are then."""
    chosen = must_recompute(spec).union(recomputed)
    return spec.model_copy(
        update={"stages": [_decided(stage, stage.name in chosen) for stage in spec.stages]}
    )


def relaxed(spec: PipelineSpec) -> PipelineSpec:
    """A spec that no choice can beat: every stage keeps the least and none takes longer."""
    decided = []
    for stage in spec.stages:
        kept = stage.activation_bytes
        if stage.recompute is not None:
            kept = min(kept, stage.recompute.activation_bytes)
        decided.append(
            stage.model_copy(
                update={
                    "activation_bytes": kept,
                    "weight_stash_bytes": min(stage.weight_stash_bytes, kept),
                    "rematerialised_bytes": 0,
                    "recompute": None,
                }
            )
        )
    return spec.model_copy(update={"stages": decided})


def _decided(stage: StageSpec, recomputes: bool) -> StageSpec:
    if stage.recompute is None or not recomputes:
        return stage.model_copy(update={"recompute": None})
    return stage.model_copy(
        update={
            "activation_bytes": stage.recompute.activation_bytes,
            "rematerialised_bytes": rematerialised_bytes(stage),
            "backward_input_s": stage.backward_input_s + stage.recompute.extra_s,
            "backward_s": None if stage.backward_s is None else stage.backward_s + stage.recompute.extra_s,
            "recompute": None,
        }
    )


def keep_whole(problem: Problem) -> Problem:
    """The same problem with one B for every stage whose I would leave more for W than the stage keeps from F on.

    Splitting it would undo what recomputing saves; and a search that makes room for forwards alone could not tell.
    """
    whole = problem.whole_stash > problem.activation
    return problem.with_fused(problem.fused | whole[:, None]) if whole.any() else problem


def candidates(names: list[str], judge: Callable[[Choice], float], changes: int = _CHANGES) -> list[Choice]:
    """Choices worth a search, best first by `judge` (seconds, infinite where no plan fits).

    All of them where they are few; else none, all, and the end of a walk by single changes from the better of both.
    `changes` is how many choices may be judged.
    """
    if 2 ** len(names) <= changes and len(names) <= _EXHAUSTIVE:
        choices = [frozenset(some) for count in range(len(names) + 1) for some in combinations(names, count)]
        return sorted(choices, key=judge)
    seen = {choice: judge(choice) for choice in (frozenset(), frozenset(names))}
    best = min(seen, key=seen.__getitem__)
    improved = True
    while improved and len(seen) < changes:
        improved = False
        for other in _neighbours(best, names):
            if other in seen or len(seen) >= changes:
                continue
            seen[other] = judge(other)
            if seen[other] < seen[best]:
                best, improved = other, True
                break
    return list(dict.fromkeys([best, frozenset(), frozenset(names)]))


def judged_choices(problem: Problem) -> int:
    """How many choices may be judged by constructive plans of this size: a few seconds' work at most."""
    return min(_CHANGES, max(2, _JUDGED_TASKS // problem.tasks))


def cheapest(names: list[str], makespan: Callable[[Choice], float]) -> Choice:
    """None where that fits (nothing is faster than keeping all), else the best of `candidates`.

    `makespan` raises SpecError for a choice that does not fit.
    """

    def judge(choice: Choice) -> float:
        try:
            return makespan(choice)
        except SpecError:
            return math.inf

    nothing: Choice = frozenset()
    if not names or math.isfinite(judge(nothing)):
        return nothing
    return min(candidates(names, judge), key=judge)


def _neighbours(choice: Choice, names: list[str]) -> Iterator[Choice]:
    for name in names:
        yield choice ^ {name}
