"""Plans the `auto` schedule: recomputation and whole backwards as choices around the search, then less memory.

Stages that recompute and stages that run whole backwards each make a problem of their own. The choices are
compared by constructive plans, and searched where the budget makes that worthwhile. The result is never worse
than a fitting named schedule. Pure: no clock, the budget is counted in work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from service.scheduler.auto.backward_split import (
    backward_relaxation,
    busiest_meshes_first,
    faster_whole_stages,
    problem_with_whole_backwards,
)
from service.scheduler.auto.bounds import makespan_lower_bound_s, with_valid_bound
from service.scheduler.auto.estimator import MakespanEstimator, constructive_cost_s
from service.scheduler.auto.fixed_schedule import named_timeline, prefer_shorter_named
from service.scheduler.auto.recomputation import (
    StageChoice,
    candidate_choices,
    fuse_costly_splits,
    may_recompute,
    must_recompute,
    recompute_relaxation,
    tightest_memory_first,
    with_recomputation,
)
from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import failed
from service.scheduler.problem.memory import keeps_memory_limits, peak_activation, peak_receive_buffers
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.spec import PipelineSpec, SpecError, check_spec
from service.scheduler.problem.timeline import Timeline, needed_receive_buffers
from service.scheduler.schedules.registry import fitting_names
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.memory_saving import TransferSlack, save_memory
from service.scheduler.search.search import SEARCHED, SearchResult, reaches_bound, search

# What a proven plan may spend of the budget on each try to hold fewer microbatches.
_MEMORY_SEARCH_SHARE = 0.05
# and on judging choices by constructive plans.
_ESTIMATE_SHARE = 0.25
# With fewer seconds none and all stages are the only choices of whole backwards.
_WHOLE_BACKWARDS_MIN_BUDGET_S = 0.3
# What a search needs to find more than constructive plans, and what of these may be made beside the budget where it has
# been spent.
_MIN_SEARCH_S = 0.5
_OVERRUN_SHARE = 0.1
_OVERRUN_S = 0.5

# What programs, their proof and the slots of a plan take for each task, and how much of it the budget does not count.
_COMPILE_S_PER_TASK = 3.5e-5
_UNCOUNTED_COMPILE_S = 1.0

Expired = Callable[[], bool] | None


def plan_auto(spec: PipelineSpec, budget_s: float, expired: Expired) -> SearchResult:
    """The best plan found over all that `auto` may choose; raises SpecError where nothing fits the limits."""
    names, always = may_recompute(spec), must_recompute(spec)
    problem = problem_with_whole_backwards(spec)
    budget_s = max(0.0, budget_s - max(0.0, _COMPILE_S_PER_TASK * problem.tasks - _UNCOUNTED_COMPILE_S))

    def plan(choice: StageChoice, seconds: float) -> SearchResult:
        decided = with_recomputation(spec, choice)
        check_spec(decided)
        found = with_valid_bound(_best_backward_split(decided, seconds, expired), decided)
        return replace(found, recomputed=tuple(sorted(always.union(choice))))

    if not names:
        found = prefer_shorter_named(
            plan(frozenset(), budget_s), with_recomputation(spec, ()), budget_s, expired
        )
        return _with_less_memory(found, budget_s, expired)
    names = tightest_memory_first(names, problem)
    judge = MakespanEstimator(_ESTIMATE_SHARE * budget_s)
    estimates: dict[StageChoice, float] = {}

    def judged(choice: StageChoice) -> float:
        decided = with_recomputation(spec, choice)
        if _is_ruled_out(decided):
            return math.inf
        whole = frozenset(faster_whole_stages(decided))
        forms = {"split": frozenset[str](), **({"whole": whole} if whole else {})}
        thorough = len(choice) in (0, len(names))
        estimates[choice] = min(
            judge.makespan(
                fuse_costly_splits(problem_with_whole_backwards(decided, some)), form, thorough=thorough
            )
            for form, some in forms.items()
        )
        return estimates[choice]

    choices = candidate_choices(names, judged, lambda: judge.exhausted, doubt=judge.doubt(problem))
    every = len(choices) == 2 ** len(names)
    # what the spec itself rules out needs no search, and is no plan
    choices = [choice for choice in choices if not _is_ruled_out(with_recomputation(spec, choice))] or choices
    budget_s = max(0.0, budget_s - judge.spent_s)
    best = _best_of(
        plan,
        choices,
        budget_s=budget_s,
        estimate=estimates.get(choices[0], math.inf),
        bound=makespan_lower_bound_s(spec),
        bound_of=lambda choice: lower_bound(backward_relaxation(with_recomputation(spec, choice))),
        every=every,
    )
    best = prefer_shorter_named(best, with_recomputation(spec, best.recomputed), budget_s, expired)
    return _with_less_memory(best, budget_s, expired)


def constructive_makespan(spec: PipelineSpec) -> float:
    """The shortest makespan of the standard rules, backwards all split or all whole; infinite where none fits."""
    if may_recompute(spec):
        spec = recompute_relaxation(spec)
    decided = with_recomputation(spec, ())
    names = frozenset(faster_whole_stages(decided))
    choices = dict.fromkeys([frozenset[str](), names])
    return min(_quick_makespan(decided, choice) for choice in choices)


def _quick_makespan(spec: PipelineSpec, whole: StageChoice) -> float:
    found = search(fuse_costly_splits(problem_with_whole_backwards(spec, whole)), [], budget_s=0.0)
    return math.inf if found is None else found.timeline.makespan


def _best_backward_split(spec: PipelineSpec, budget_s: float, expired: Expired) -> SearchResult:
    """The best plan over choices of stages whose backwards run whole; never worse than none or all of them."""
    names = faster_whole_stages(spec)
    if not names:
        return _search_with_whole_backwards(spec, frozenset(), budget_s, expired)

    def plan(choice: StageChoice, seconds: float) -> SearchResult:
        return _search_with_whole_backwards(spec, choice, seconds, expired)

    choices = [frozenset(), frozenset(names)]
    judged_s, estimate = 0.0, math.inf
    if budget_s >= _WHOLE_BACKWARDS_MIN_BUDGET_S:
        judge = MakespanEstimator(_ESTIMATE_SHARE * budget_s)
        estimates: dict[StageChoice, float] = {}

        def judged(choice: StageChoice) -> float:
            form = "whole" if 2 * len(choice) > len(names) else "split"
            thorough = len(choice) in (0, len(names))
            decided = fuse_costly_splits(problem_with_whole_backwards(spec, choice))
            estimates[choice] = judge.makespan(decided, form, thorough=thorough)
            return estimates[choice]

        problem = problem_with_whole_backwards(spec)
        names = busiest_meshes_first(names, problem)
        choices = candidate_choices(names, judged, lambda: judge.exhausted, doubt=judge.doubt(problem))
        judged_s, estimate = min(budget_s, judge.spent_s), estimates[choices[0]]
    best = _best_of(
        plan,
        choices,
        budget_s=budget_s - judged_s,
        estimate=estimate,
        bound=lower_bound(backward_relaxation(spec)),
        bound_of=lambda choice: lower_bound(fuse_costly_splits(problem_with_whole_backwards(spec, choice))),
        every=False,  # microbatches of one stage may differ in form, too
    )
    return replace(best, spent_s=best.spent_s + judged_s)


def _is_ruled_out(spec: PipelineSpec) -> bool:
    try:
        check_spec(spec)
    except SpecError:
        return True
    return False


def _best_of(
    plan: Callable[[StageChoice, float], SearchResult],
    choices: Sequence[StageChoice],
    *,
    budget_s: float,
    estimate: float,
    bound: float,
    bound_of: Callable[[StageChoice], float],
    every: bool,
) -> SearchResult:
    """The shortest plan of the choices, best first; ends when one attains `bound`.

    Each has a share of what is left of the budget, the first most. A choice is left out where its own bound says that
    it is no shorter, and has no share where that is likely: the first was judged to take `estimate` seconds. Where too
    little is left for another search, the rest have their constructive plans, as many as are cheap. `every` says that
    there are no other choices: then the least of their own bounds holds too, unless one was not searched, or no order
    was found for it: that is no proof that there is none.
    """
    least = [bound_of(choice) for choice in choices]
    weights = np.arange(1, len(choices) + 1) ** -1.5
    weights[1:][np.array(least[1:]) >= estimate] = 0.0
    best: SearchResult | None = None
    refused: SpecError | None = None
    bounds: list[float] = []
    truncated = False
    left_s, spent_s, beside_s = budget_s, 0.0, max(_OVERRUN_SHARE * budget_s, _OVERRUN_S)
    for index, choice in enumerate(choices):
        if best is not None and reaches_bound(best.timeline.makespan, bound):
            every = False
            break
        if best is not None and least[index] >= best.timeline.makespan * (1 - TOLERANCE):
            bounds.append(least[index])
            continue
        share = max(
            left_s * weights[index] / max(weights[index:].sum(), TOLERANCE), min(left_s, _MIN_SEARCH_S)
        )
        begins_s = 0.0 if best is None else constructive_cost_s(best.timeline.problem)
        if best is not None and share < max(_MIN_SEARCH_S / 2, begins_s):
            if beside_s < begins_s:
                every = False
                break
            share = 0.0
        try:
            found = plan(choice, float(share))
        except SpecError as error:
            refused, every = refused or error, False
            continue
        spent_s += found.spent_s
        left_s = max(0.0, budget_s - spent_s)
        beside_s -= found.spent_s if share == 0 else 0.0
        truncated = truncated or found.truncated
        bounds.append(found.lower_bound_s)
        if best is None or found.timeline.makespan < best.timeline.makespan * (1 - TOLERANCE):
            best = found
    if best is None:
        assert refused is not None
        raise refused
    if every:
        bound = max(bound, min(bounds))
    bound = min(bound, best.timeline.makespan)
    return replace(
        best,
        lower_bound_s=bound,
        proven_optimal=reaches_bound(best.timeline.makespan, bound),
        truncated=truncated,
        spent_s=spent_s,
    )


def _search_with_whole_backwards(
    spec: PipelineSpec, whole: StageChoice, budget_s: float, expired: Expired
) -> SearchResult:
    """The best plan in which the backwards of the stages `whole` are whole, or the best named one."""
    wanted = problem_with_whole_backwards(spec, whole)
    problem = fuse_costly_splits(wanted)
    split, priced = wanted.splits, bool(faster_whole_stages(spec))
    seeds: list[tuple[str, Timeline]] = []
    notes: list[str] = []
    for name in fitting_names(spec)[:-1]:
        for form in (spec, spec.model_copy(update={"split_backward": split})):
            try:
                timeline = named_timeline(form, name)
                if _is_plan_of(timeline, problem, priced):
                    seeds.append((name, timeline))
            except SpecError:
                continue
            except Exception as error:
                notes.append(failed(f"schedule {name}", error))
            if spec.split_backward is not None:
                break  # both forms are the same
    seeds.sort(key=lambda seed: seed[1].makespan)
    try:
        found = search(problem, seeds, budget_s=budget_s, expired=expired)
    except Exception as error:
        if not seeds:
            raise
        name, timeline = seeds[0]
        found = SearchResult(
            timeline=timeline,
            chosen=name,
            lower_bound_s=0.0,
            proven_optimal=False,
            truncated=False,
            notes=(failed("the search", error),),
            spent_s=budget_s,
        )
    if found is None:
        raise SpecError(_no_plan_message(problem))
    others = ((found.chosen, found.timeline), *seeds)
    return replace(found, notes=(*notes, *found.notes), alternatives=others, searched_problem=problem)


def _is_plan_of(timeline: Timeline, problem: Problem, priced: bool) -> bool:
    """Whether the bounds of a problem hold for a timeline whose backwards may be split elsewhere.

    Not where B and its parts differ in length (`priced`), nor where it splits what must stay whole.
    """
    fused = timeline.problem.fused
    if priced:
        return np.array_equal(fused, problem.fused)
    return problem is timeline.problem or not (problem.fused & ~fused).any()


def _with_less_memory(found: SearchResult, budget_s: float, expired: Expired) -> SearchResult:
    """The same makespan in less memory, where that is to be had."""
    try:
        return _reduce_memory(found, budget_s, expired)
    except Exception as error:
        return replace(found, notes=(*found.notes, failed("saving memory", error)))


def _reduce_memory(found: SearchResult, budget_s: float, expired: Expired) -> SearchResult:
    problem = found.searched_problem
    assert problem is not None
    saved, truncated = save_memory(found.timeline), found.truncated
    if found.proven_optimal and not truncated:
        saved, truncated = _search_tighter_limits(saved, problem, budget_s * _MEMORY_SEARCH_SHARE, expired)
    chosen = found.chosen if saved is found.timeline else SEARCHED
    return replace(found, timeline=saved, chosen=chosen, truncated=truncated)


def _search_tighter_limits(
    best: Timeline, searched: Problem, budget_s: float, expired: Expired
) -> tuple[Timeline, bool]:
    """An equally long timeline under tighter limits, and whether the deadline cut the search for it short.

    Bisects how many microbatches a mesh holds, each time with a search of `budget_s` where the bounds leave
    room. Other limits than these are kept.
    """
    problem = best.problem
    peaks = [peak_activation(problem, lane)[0] for lane in best.lanes]
    whole = [int(problem.activation[problem.mesh_of_stage == p].sum()) for p in range(problem.meshes)]
    again = problem.workspace.tolist()
    slack = TransferSlack(best)
    least, most = 0, max((-(-peak // one) for peak, one in zip(peaks, whole, strict=True) if one), default=0)
    while budget_s > 0 and most - least > 1:
        count = (least + most) // 2
        limits = [min(p, count * one + more) for p, one, more in zip(peaks, whole, again, strict=True)]
        meshes = [
            mesh.model_copy(update={"activation_limit_bytes": limit})
            for mesh, limit in zip(searched.spec.meshes, limits, strict=True)
        ]
        tighter = replace(searched, spec=searched.spec.model_copy(update={"meshes": meshes}))
        found = None
        if reaches_bound(lower_bound(tighter), best.makespan):
            found = search(tighter, [], budget_s=budget_s, expired=expired)
        if found is not None and found.truncated:
            return best, True
        if found is None or not reaches_bound(found.timeline.makespan, best.makespan):
            least = count
            continue
        most = count
        # under the limits of the spec again; its backwards may be split where those of `best` are not
        saved = replace(found.timeline, problem=replace(found.timeline.problem, spec=problem.spec))
        if (
            slack.kept_by(saved)
            and sum(peak_receive_buffers(saved)) <= sum(peak_receive_buffers(best))
            and keeps_memory_limits(saved)
        ):
            best = saved
    return best, False


def _no_plan_message(problem: Problem) -> str:
    """The limits under which no order was found, and limits that are certainly enough."""
    changes = []
    found = None
    unlimited = [mesh.model_copy(update={"receive_buffer_limit": None}) for mesh in problem.spec.meshes]
    free = replace(problem, spec=problem.spec.model_copy(update={"meshes": unlimited}))
    if (problem.receive_limit >= 0).any():
        found = search(free, [], budget_s=0.0)
    for index, mesh in enumerate(problem.spec.meshes):
        # one microbatch at a time holds every stage's activation once
        enough = int(problem.activation[problem.mesh_of_stage == index].sum() + problem.workspace[index])
        limit = mesh.activation_limit_bytes
        if found is None and limit is not None and limit < enough:
            changes.append(f"raise activation_limit_bytes of mesh {mesh.name!r} from {limit} to {enough}")
        limit = mesh.receive_buffer_limit
        if found is not None and limit is not None:
            needed = needed_receive_buffers(problem, found.timeline.lanes[index])
            if limit < needed:
                changes.append(f"raise receive_buffer_limit of mesh {mesh.name!r} from {limit} to {needed}")
    return f"no order was found within the limits: {', '.join(changes) or 'raise the memory limits'}"
