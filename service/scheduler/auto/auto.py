"""Plans the `auto` schedule: recomputation and whole backwards as choices around the search, then less memory.

Stages that recompute and stages that run whole backwards each make a problem of their own. The choices are
compared by constructive plans, and searched where the budget makes that worthwhile. The result is never worse
than a fitting named schedule. Pure: no clock, the budget is counted in work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from service.scheduler.auto.backward_split import (
    backward_relaxation,
    busiest_meshes_first,
    faster_whole_stages,
    problem_with_whole_backwards,
)
from service.scheduler.auto.fixed_schedule import named_timeline, prefer_shorter_named
from service.scheduler.auto.recomputation import (
    Recomputation,
    StageChoice,
    candidate_choices,
    candidate_recomputations,
    fuse_costly_splits,
    may_recompute,
    must_recompute,
    other_methods,
    recompute_relaxation,
    tightest_memory_first,
    with_recomputation,
)
from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import failed
from service.scheduler.problem.memory import (
    keeps_memory_limits,
    keeps_receive_limits,
    peak_activation,
    peak_receive_buffers,
)
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.problem.spec_checks import check_spec
from service.scheduler.problem.timeline import Timeline, needed_receive_buffers, retime
from service.scheduler.schedules.registry import fitting_names
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.memory_saving import TransferSlack, save_memory
from service.scheduler.search.priority_rules import (
    COMPARED_RULES,
    LARGE_PROBLEM_TASKS,
    ConstructivePlanner,
    RuleVariant,
    rule_run_s,
    rule_variants,
    standard_rules,
)
from service.scheduler.search.search import SEARCHED, SearchResult, reaches_bound, search
from service.scheduler.search.steady_state import shorten_problem

_MEMORY_SEARCH_SHARE = 0.05  # of the budget, for each search under a tighter memory limit
_ESTIMATE_SHARE = 0.25  # of the budget, for estimates of choices by constructive plans
_WHOLE_BACKWARDS_MIN_BUDGET_S = 0.3  # with less, none and all stages are the only choices of whole backwards
_RUNNING_SHARE = 0.5  # of the budget of planning anew, for orders that begin with the running ones
_MIN_SEARCH_S = 0.5  # that a search needs to find more than constructive plans
# constructive plans that may be made beyond a spent budget: share of it, and at least these seconds
_OVERRUN_SHARE = 0.1
_OVERRUN_S = 0.5
_COMPILE_S_PER_TASK = 3.5e-5  # for programs, their proof and the slots of a plan
_UNCOUNTED_COMPILE_S = 1.0  # part of it that the budget does not count

_MIN_ESTIMATOR_S = 0.5  # of work that an estimator may always do
_THOROUGH_SHARE = 0.5  # of an estimator's work, for the first choices, with many rules
_THOROUGH_PROBLEMS = 4  # problems that share this part of the work
_RUNS_WITHIN_MEMORY = 2.5  # mean number of runs of a rule until it keeps the memory limits
_LATER_RULES = 3  # rules for each later choice
_LONG_STEP_ERROR = 0.03  # relative error of the makespan estimated for a long step

Expired = Callable[[], bool] | None
Choice = TypeVar("Choice", StageChoice, Recomputation)


def plan_auto(
    spec: PipelineSpec, budget_s: float, expired: Expired, enough_bytes: Sequence[int] | None = None
) -> SearchResult:
    """The best plan found over all that `auto` may choose; raises SpecError where nothing fits the limits. An equally long
    one of less memory is looked for, unless each mesh holds no more than its `enough_bytes`."""
    names, always = may_recompute(spec), must_recompute(spec)
    problem = problem_with_whole_backwards(spec)
    budget_s = max(0.0, budget_s - max(0.0, _COMPILE_S_PER_TASK * problem.tasks - _UNCOUNTED_COMPILE_S))

    def plan(choice: Recomputation, seconds: float) -> SearchResult:
        decided = choice.decide(spec)
        check_spec(decided)
        found = with_valid_bound(_best_backward_split(decided, seconds, expired), decided)
        return replace(
            found,
            recomputed=tuple(sorted(always.union(choice.stages))),
            recompute_methods=tuple(sorted(choice.methods)),
        )

    if not names:
        found = prefer_shorter_named(
            plan(Recomputation(), budget_s), with_recomputation(spec, ()), budget_s, expired
        )
        return _with_less_memory(found, budget_s, expired, enough_bytes)
    names = tightest_memory_first(names, problem)
    estimator = MakespanEstimator(_ESTIMATE_SHARE * budget_s)
    estimates: dict[Recomputation, float] = {}

    def estimate(choice: Recomputation) -> float:
        decided = choice.decide(spec)
        if _is_ruled_out(decided):
            return math.inf
        whole = frozenset(faster_whole_stages(decided))
        forms = {"split": frozenset[str](), **({"whole": whole} if whole else {})}
        thorough = len(choice.stages) in (0, len(names))
        estimates[choice] = min(
            estimator.makespan(
                fuse_costly_splits(problem_with_whole_backwards(decided, stages)), form, thorough=thorough
            )
            for form, stages in forms.items()
        )
        return estimates[choice]

    methods = other_methods(spec)
    choices = candidate_recomputations(
        names,
        methods,
        estimate,
        lambda: estimator.exhausted,
        relative_error=estimator.relative_error(problem),
    )
    every = len(choices) == 2 ** len(names) and methods.keys().isdisjoint(names)
    # check_spec alone rules a choice out: it needs no search
    choices = [choice for choice in choices if not _is_ruled_out(choice.decide(spec))] or choices
    budget_s = max(0.0, budget_s - estimator.spent_s)
    best = _best_of(
        plan,
        choices,
        budget_s=budget_s,
        estimate_s=estimates.get(choices[0], math.inf),
        bound=makespan_lower_bound_s(spec),
        bound_of=lambda choice: lower_bound(backward_relaxation(choice.decide(spec))),
        every=every,
    )
    decided = with_recomputation(spec, best.recomputed, best.recompute_methods)
    best = prefer_shorter_named(best, decided, budget_s, expired)
    return _with_less_memory(best, budget_s, expired, enough_bytes)


def plan_from_running(
    spec: PipelineSpec, running: Timeline, recomputed: StageChoice, budget_s: float, expired: Expired
) -> SearchResult:
    """The best plan found from the `running` orders, whose stages `recomputed` recompute, and without them.

    Half of the budget looks for shorter orders with the backwards and recomputation that run, half is `plan_auto`'s.
    """
    # programs wait for longer than they must where costs have changed
    retimed = retime(running.problem, running.sequence)
    fitting = [
        timeline
        for timeline in (retimed, running)
        if keeps_memory_limits(timeline) and keeps_receive_limits(timeline)
    ]
    improved = search(
        fuse_costly_splits(running.problem),
        [(SEARCHED, timeline) for timeline in fitting[:1]],
        budget_s=_RUNNING_SHARE * budget_s,
        expired=expired,
    )
    try:
        anew = plan_auto(spec, (1 - _RUNNING_SHARE) * budget_s, expired)
    except SpecError:
        if improved is None:
            raise
        anew = None
    if improved is None or (
        anew is not None and anew.timeline.makespan <= improved.timeline.makespan * (1 + TOLERANCE)
    ):
        assert anew is not None
        return anew
    # what bounds these orders does not bound other choices of recomputation and of whole backwards
    bound = min(makespan_lower_bound_s(spec), improved.timeline.makespan)
    always = must_recompute(spec)
    return replace(
        improved,
        lower_bound_s=bound,
        proven_optimal=reaches_bound(improved.timeline.makespan, bound),
        recomputed=tuple(sorted(always | recomputed)),
        alternatives=() if anew is None else ((anew.chosen, anew.timeline),),
    )


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
    estimating_s, best_estimate_s = 0.0, math.inf
    if budget_s >= _WHOLE_BACKWARDS_MIN_BUDGET_S:
        estimator = MakespanEstimator(_ESTIMATE_SHARE * budget_s)
        estimates: dict[StageChoice, float] = {}

        def estimate(choice: StageChoice) -> float:
            form = "whole" if 2 * len(choice) > len(names) else "split"
            thorough = len(choice) in (0, len(names))
            decided = fuse_costly_splits(problem_with_whole_backwards(spec, choice))
            estimates[choice] = estimator.makespan(decided, form, thorough=thorough)
            return estimates[choice]

        problem = problem_with_whole_backwards(spec)
        names = busiest_meshes_first(names, problem)
        choices = candidate_choices(
            names, estimate, lambda: estimator.exhausted, relative_error=estimator.relative_error(problem)
        )
        estimating_s, best_estimate_s = min(budget_s, estimator.spent_s), estimates[choices[0]]
    best = _best_of(
        plan,
        choices,
        budget_s=budget_s - estimating_s,
        estimate_s=best_estimate_s,
        bound=lower_bound(backward_relaxation(spec)),
        bound_of=lambda choice: lower_bound(fuse_costly_splits(problem_with_whole_backwards(spec, choice))),
        every=False,  # microbatches of one stage may differ in form, too
    )
    return replace(best, spent_s=best.spent_s + estimating_s)


def _is_ruled_out(spec: PipelineSpec) -> bool:
    try:
        check_spec(spec)
    except SpecError:
        return True
    return False


def _best_of(
    plan: Callable[[Choice, float], SearchResult],
    choices: Sequence[Choice],
    *,
    budget_s: float,
    estimate_s: float,
    bound: float,
    bound_of: Callable[[Choice], float],
    every: bool,
) -> SearchResult:
    """The shortest plan of the choices, best first; ends when one attains `bound`.

    Each has a share of what is left of the budget, the first most. A choice is left out where its own bound says that
    it is no shorter, and has no share where that is likely: the first is estimated to take `estimate_s`. Where too
    little is left for another search, the rest have their constructive plans, as many as are cheap. `every` says that
    there are no other choices: then the least of their own bounds holds too, unless one was not searched, or no order
    was found for it, which does not prove that there is none.
    """
    least = [bound_of(choice) for choice in choices]
    weights = np.arange(1, len(choices) + 1) ** -1.5
    weights[1:][np.array(least[1:]) >= estimate_s] = 0.0
    best: SearchResult | None = None
    first_error: SpecError | None = None
    bounds: list[float] = []
    truncated = False
    left_s, spent_s, overrun_s = budget_s, 0.0, max(_OVERRUN_SHARE * budget_s, _OVERRUN_S)
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
        constructive_s = 0.0 if best is None else constructive_cost_s(best.timeline.problem)
        if best is not None and share < max(_MIN_SEARCH_S / 2, constructive_s):
            if overrun_s < constructive_s:
                every = False
                break
            share = 0.0
        try:
            found = plan(choice, float(share))
        except SpecError as error:
            first_error, every = first_error or error, False
            continue
        spent_s += found.spent_s
        left_s = max(0.0, budget_s - spent_s)
        overrun_s -= found.spent_s if share == 0 else 0.0
        truncated = truncated or found.truncated
        bounds.append(found.lower_bound_s)
        if best is None or found.timeline.makespan < best.timeline.makespan * (1 - TOLERANCE):
            best = found
    if best is None:
        assert first_error is not None
        raise first_error
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
                timeline = named_timeline(form, name, wanted)
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
    """True where the bounds of a problem hold for a timeline whose backwards may be split elsewhere.

    Not where B and its parts differ in length (`priced`), nor where it splits what must stay whole.
    """
    fused = timeline.problem.fused
    if priced:
        return np.array_equal(fused, problem.fused)
    return problem is timeline.problem or not (problem.fused & ~fused).any()


def _with_less_memory(
    found: SearchResult, budget_s: float, expired: Expired, enough_bytes: Sequence[int] | None
) -> SearchResult:
    """The same makespan in less memory, where an order of less memory is found and each mesh holds more than enough."""
    try:
        return _reduce_memory(found, budget_s, expired, enough_bytes)
    except Exception as error:
        return replace(found, notes=(*found.notes, failed("saving memory", error)))


def _reduce_memory(
    found: SearchResult, budget_s: float, expired: Expired, enough_bytes: Sequence[int] | None
) -> SearchResult:
    problem = found.searched_problem
    assert problem is not None
    saved, truncated = save_memory(found.timeline, enough_bytes), found.truncated
    if found.proven_optimal and not truncated and enough_bytes is None:
        saved, truncated = _search_tighter_limits(saved, problem, budget_s * _MEMORY_SEARCH_SHARE, expired)
    chosen = found.chosen if saved is found.timeline else SEARCHED
    return replace(found, timeline=saved, chosen=chosen, truncated=truncated)


def _search_tighter_limits(
    best: Timeline, searched: Problem, budget_s: float, expired: Expired
) -> tuple[Timeline, bool]:
    """(an equally long timeline under tighter limits, True where the deadline cut the search for it short).

    Bisects how many microbatches a mesh holds, each time with a search of `budget_s` where the bounds leave
    room. All other limits stay.
    """
    problem = best.problem
    peaks = [peak_activation(problem, lane)[0] for lane in best.lanes]
    microbatch = problem.most_activation_of_mesh.tolist()
    slack = TransferSlack(best)
    least, most = (
        0,
        max((-(-peak // size) for peak, size in zip(peaks, microbatch, strict=True) if size), default=0),
    )
    while budget_s > 0 and most - least > 1:
        count = (least + most) // 2
        limits = [
            min(peak, count * size + workspace)
            for peak, size, workspace in zip(peaks, microbatch, problem.workspace.tolist(), strict=True)
        ]
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
        enough = int(problem.most_activation_of_mesh[index] + problem.workspace[index])
        limit = mesh.activation_limit_bytes
        if found is None and limit is not None and limit < enough:
            changes.append(f"raise activation_limit_bytes of mesh {mesh.name!r} from {limit} to {enough}")
        limit = mesh.receive_buffer_limit
        if found is not None and limit is not None:
            needed = needed_receive_buffers(problem, found.timeline.lanes[index])
            if limit < needed:
                changes.append(f"raise receive_buffer_limit of mesh {mesh.name!r} from {limit} to {needed}")
    return f"no order was found within the limits: {', '.join(changes) or 'raise the memory limits'}"


class MakespanEstimator:
    """Estimates makespans of problems of one shape; `exhausted` once `budget_s` (of work, not of time) is spent.

    Choices (which stages recompute, which run whole backwards) make problems that differ in costs and memory, not
    in shape: rules that do well on the first problems are enough for the later ones. A long step is estimated by a
    shortened one: filling and draining lose as much in both, and the lower bounds say what the middle takes.
    """

    def __init__(self, budget_s: float) -> None:
        self._allowed_s = max(budget_s, _MIN_ESTIMATOR_S)
        self._score: defaultdict[str, dict[RuleVariant, float]] = defaultdict(dict)
        self.spent_s = 0.0

    @property
    def exhausted(self) -> bool:
        return self.spent_s >= self._allowed_s

    @staticmethod
    def relative_error(problem: Problem) -> float:
        """Relative error of an estimate: two that are nearer to each other say nothing."""
        return _LONG_STEP_ERROR if problem.tasks > LARGE_PROBLEM_TASKS else 0.0

    def makespan(self, problem: Problem, form: str, *, thorough: bool = False) -> float:
        """Estimated makespan in seconds; infinite where no rule fits the problem's limits.

        Problems of one `form` have good rules in common. With `thorough` many are tried, and the good ones
        remembered.
        """
        shortened = problem
        if problem.tasks > LARGE_PROBLEM_TASKS:
            shortened = shorten_problem(problem) or problem
        runs = ConstructivePlanner(shortened)
        score = self._score[form]
        if thorough or not score:
            share_s = self._allowed_s * _THOROUGH_SHARE / _THOROUGH_PROBLEMS
            every = list(rule_variants(shortened))
            count = max(
                _LATER_RULES,
                int(share_s / (rule_run_s(shortened) * (_RUNS_WITHIN_MEMORY if runs.limited else 1))),
            )
            wanted = every[:: max(1, math.ceil(len(every) / count))]
        else:
            wanted = sorted(score, key=score.__getitem__)[:_LATER_RULES]
        rules = list(standard_rules(shortened))
        makespans: dict[RuleVariant, float] = {}
        for variant in wanted:
            timeline = runs.follow(rules[variant.number], late=variant.late)
            if timeline is not None:
                makespans[variant] = timeline.makespan
        self.spent_s += runs.spent_s
        best = min(makespans.values(), default=math.inf)
        for variant, makespan in makespans.items():
            score[variant] = min(score.get(variant, math.inf), makespan / best if best else 1.0)
        if shortened is not problem and math.isfinite(best):
            best += lower_bound(problem) - lower_bound(shortened)
        return best


def constructive_cost_s(problem: Problem) -> float:
    """Seconds of a budget that the constructive plans cost with which a search begins."""
    limited, tried = bool((problem.memory_limit >= 0).any()), len(list(rule_variants(problem)))
    if problem.tasks > LARGE_PROBLEM_TASKS:
        rules = len(list(standard_rules(problem)))
        tried = rules if shorten_problem(problem) is None else COMPARED_RULES
    return tried * (_RUNS_WITHIN_MEMORY if limited else 1) * rule_run_s(problem)


def makespan_lower_bound_s(spec: PipelineSpec) -> float:
    """A lower bound for every choice of stages that recompute, and of backwards that run whole."""
    return lower_bound(backward_relaxation(recompute_relaxation(spec)))


def with_valid_bound(found: SearchResult, decided: PipelineSpec) -> SearchResult:
    """Withdraws a bound, and a proof of optimality, that rests on assumptions of the search about stages that recompute.

    It assumes that the memory for their backwards is always reserved, though several stages of one mesh need it at
    different times, and that they do not split. For microbatches of unequal lengths the exact solver reserves nothing.
    """
    problem = problem_with_whole_backwards(decided)
    exact = problem.activation_limit_is_exact or not problem.interchangeable
    if exact and fuse_costly_splits(problem) is problem:
        return found
    bound = min(makespan_lower_bound_s(decided), found.timeline.makespan)
    return replace(found, lower_bound_s=bound, proven_optimal=reaches_bound(found.timeline.makespan, bound))
