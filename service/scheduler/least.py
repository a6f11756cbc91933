"""What no plan of a spec can beat, whichever stages recompute; and proofs taken back where a search assumed more."""

from __future__ import annotations

from dataclasses import replace

from service.scheduler.model.problem import build_problem
from service.scheduler.model.spec import PipelineSpec
from service.scheduler.recomputation import keep_whole, relaxed
from service.scheduler.search.auto import Found, attains
from service.scheduler.search.bounds import lower_bound


def splits(spec: PipelineSpec) -> bool:
    """Whether `auto` may split backwards: splitting can only help in this model, W right after I is never later."""
    if spec.split_backward is not None:
        return spec.split_backward
    return any(stage.backward_weight_s > 0 for stage in spec.stages)


def least_makespan(spec: PipelineSpec) -> float:
    """A lower bound for every choice of stages that recompute."""
    return lower_bound(build_problem(relaxed(spec), split=splits(spec), inference=False))


def honest(found: Found, decided: PipelineSpec) -> Found:
    """A bound that does not rest on what the search alone assumes of stages that recompute: that the room for their
    backwards is always free (several stages of one mesh need it at different times), and that they do not split."""
    problem = build_problem(decided, split=splits(decided), inference=False)
    if problem.exact_room and keep_whole(problem) is problem:
        return found
    bound = min(least_makespan(decided), found.timeline.makespan)
    return replace(found, lower_bound_s=bound, proven_optimal=attains(found.timeline.makespan, bound))
