"""What no plan of a spec can beat, whichever stages recompute; and proofs taken back where a search assumed more."""

from __future__ import annotations

from dataclasses import replace

from service.scheduler.backwards import either_way, problem_with_whole
from service.scheduler.model.spec import PipelineSpec
from service.scheduler.recomputation import keep_whole, relaxed
from service.scheduler.search.auto import Found, attains
from service.scheduler.search.bounds import lower_bound


def least_makespan(spec: PipelineSpec) -> float:
    """A lower bound for every choice of stages that recompute, and of backwards that run whole."""
    return lower_bound(either_way(relaxed(spec)))


def honest(found: Found, decided: PipelineSpec) -> Found:
    """A bound that does not rest on what the search alone assumes of stages that recompute: that the room for their
    backwards is always free (several stages of one mesh need it at different times), and that they do not split."""
    problem = problem_with_whole(decided)
    if problem.exact_room and keep_whole(problem) is problem:
        return found
    bound = min(least_makespan(decided), found.timeline.makespan)
    return replace(found, lower_bound_s=bound, proven_optimal=attains(found.timeline.makespan, bound))
