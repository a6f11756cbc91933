"""Lower bounds that hold for every choice of recomputing stages and whole backwards.

Also withdraws a proof of optimality where the search assumed more than the choices allow.
"""

from __future__ import annotations

from dataclasses import replace

from service.scheduler.auto.backward_split import backward_relaxation, problem_with_whole_backwards
from service.scheduler.auto.recomputation import fuse_costly_splits, recompute_relaxation
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.search import SearchResult, reaches_bound


def makespan_lower_bound_s(spec: PipelineSpec) -> float:
    """A lower bound for every choice of stages that recompute, and of backwards that run whole."""
    return lower_bound(backward_relaxation(recompute_relaxation(spec)))


def with_valid_bound(found: SearchResult, decided: PipelineSpec) -> SearchResult:
    """A bound that does not rest on what the search alone assumes of stages that recompute: that the room for their
    backwards is always free (several stages of one mesh need it at different times), and that they do not split."""
    problem = problem_with_whole_backwards(decided)
    if problem.activation_limit_is_exact and fuse_costly_splits(problem) is problem:
        return found
    bound = min(makespan_lower_bound_s(decided), found.timeline.makespan)
    return replace(found, lower_bound_s=bound, proven_optimal=reaches_bound(found.timeline.makespan, bound))
