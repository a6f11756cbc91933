"""The search behind `auto`: seed schedules and rules, tabu search, large neighbourhoods, and the exact solver.

Small problems are solved at once; larger ones need a good plan first; of the largest only windows are solved. A
step that fails leaves what was found before and a note. Never longer than any seed.
Deterministic: budgets count runs and the solver's deterministic time. A deadline comes in as a callable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import SchedulerDefect, defect
from service.scheduler.problem.memory import (
    keeps_activation_limits,
    keeps_memory_limits,
    keeps_receive_limits,
    peak_activation,
    peak_buffer_bytes,
)
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import OrderError, Timeline, retime, simulate
from service.scheduler.search import exact, priority_rules, steady_state
from service.scheduler.search.bounds import drop_refuted_bounds, lower_bounds
from service.scheduler.search.delays import alap_transfers, delay_forwards
from service.scheduler.search.large_neighbourhoods import large_neighbourhood_search
from service.scheduler.search.microbatch_orders import candidate_orders
from service.scheduler.search.origin import FIRST_RUN_SEED
from service.scheduler.search.priority_rules import (
    COMPARED_RULES,
    LARGE_PROBLEM_TASKS,
    RETIMING_GAIN,
    ConstructivePlanner,
)
from service.scheduler.search.tabu import tabu_search
from worker.contract.planned import RecomputeMethod

SEARCHED = "searched"
# Calibrated on two 2.x GHz cores: work done in one second.
_TASK_RUNS_PER_SECOND = 5_000_000  # tasks dispatched by rules, with a fixed cost for each run
_RUN_OVERHEAD_TASKS = 100
_TABU_TASKS_PER_SECOND = 50_000_000  # tasks times iterations of one thread
_SOLVER_TIME_PER_SECOND = 0.15  # CP-SAT's deterministic time on a whole problem,
_WINDOW_SOLVER_TIME_PER_SECOND = 0.12  # and on parts, where more of it goes into building models
_MAX_DELAYED_PLANS = 4  # plans of rules that are too full, with forwards that wait for memory
_RULES_FOR_EACH_ORDER = 6  # how many of the best rules run with each other order of microbatches,
_LIMITED_RULES_FOR_EACH_ORDER = 2  # and within memory that buffers share
_CONSTRUCTIVE_ORDER_CHANGES = 100  # of the orders of a constructive plan
_RULES_FROM_SHORT_STEP = 4  # how many rules that a short step says are good
_UNCOUNTED_SHARE = 0.1  # of the budget: what constructive plans may take beside it
_MODEL_S_PER_LITERAL = (
    4e-4  # what each literal of the solver's model takes before the search for a solution begins
)
_REFERENCE_MODEL_SIZE = (
    4_000  # literals; of larger models a unit of the solver's time takes longer, in proportion
)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best timeline, the name of the schedule it came from, and what is proven about it.

    `notes` say what went wrong on the way; `others` are what may stand in, best first; `searched` is the problem that
    was searched, whose backwards may be split elsewhere than those of a named schedule that was best. `spent_s` is how
    much of the budget was used.
    """

    timeline: Timeline
    chosen: str
    lower_bound_s: float
    proven_optimal: bool
    truncated: bool
    recomputed: tuple[str, ...] = ()
    recompute_methods: tuple[tuple[str, RecomputeMethod], ...] = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[tuple[str, Timeline], ...] = ()
    searched_problem: Problem | None = None
    spent_s: float = 0.0


def _affordable_runs(problem: Problem, budget_s: float) -> int:
    """The number of runs of a rule in `budget_s` seconds."""
    return int(budget_s * _TASK_RUNS_PER_SECOND / (_RUN_OVERHEAD_TASKS + int(problem.exists.sum())))


def reaches_bound(makespan: float, bound: float) -> bool:
    """True where a makespan equals a lower bound, within the tolerance of times."""
    return makespan <= bound * (1 + TOLERANCE)


def search(
    problem: Problem,
    seeds: list[tuple[str, Timeline]],
    *,
    budget_s: float,
    expired: Callable[[], bool] | None = None,
) -> SearchResult | None:
    """The shortest timeline found, never longer than any seed; None when nothing fits the limits."""
    search = _Search(problem, seeds, expired)
    search.guarded(search.try_standard_rules)
    search.guarded(search.delay_forwards)
    spent_s = search.spent_s
    budget_s -= max(0.0, spent_s - _UNCOUNTED_SHARE * budget_s)
    # small problems are solved at once; larger ones need a good plan first; of the largest nothing is solved
    steps: tuple[tuple[Callable[[float], None], float], ...] = (
        (search.exact_search, 0.1),
        (search.rule_search, 0.03),
        (search.steady_state_search, 0.07),
        (search.tabu_search, 0.1),
        (search.large_neighbourhood_search, 0.1),
        (search.tabu_search, 0.07),
        (search.large_neighbourhood_search, 0.06),
        (search.exact_search, 0.54),
    )
    if search.large:
        steps = (
            (search.rule_search, 0.1),
            (search.large_neighbourhood_search, 0.4),
            (search.tabu_search, 0.4),
        )
    for step, share in steps:
        if budget_s > 0 and not search.done:
            search.guarded(step, share * budget_s)
            spent_s += share * budget_s
    if search.best is None:
        return None
    return SearchResult(
        timeline=search.best,
        chosen=search.chosen,
        lower_bound_s=search.bound,
        proven_optimal=reaches_bound(search.best.makespan, search.bound),
        truncated=search.truncated,
        notes=tuple(search.notes),
        spent_s=spent_s,
    )


class _Search:
    def __init__(
        self, problem: Problem, seeds: list[tuple[str, Timeline]], expired: Callable[[], bool] | None
    ) -> None:
        self.problem = problem
        self.notes: list[str] = []
        self._bounds = lower_bounds(problem)
        self.best: Timeline | None = None
        self._incumbent: Timeline | None = None  # the best with the backwards split as in `problem`
        self.chosen = SEARCHED
        self.truncated = False
        self._next_seed = FIRST_RUN_SEED
        self._expired = expired
        self._constructive = ConstructivePlanner(problem)
        self._limited, self.large = self._constructive.limited, self._constructive.large
        self._short = steady_state.shorten_problem(problem)
        for name, timeline in seeds:
            self._offer(timeline, name)

    @property
    def bound(self) -> float:
        return max(self._bounds.values(), default=0.0)

    def guarded(self, step: Callable[..., None], *arguments: float) -> None:
        """Run a step; whatever goes wrong there, what was found before stays."""
        try:
            step(*arguments)
        except SchedulerDefect:
            raise
        except Exception as error:
            self.notes.append(defect(f"{step.__name__} failed with {type(error).__name__}: {error}", error))

    @property
    def done(self) -> bool:
        return (self.best is not None and reaches_bound(self.best.makespan, self.bound)) or self._stop()

    def _stop(self) -> bool:
        if not self.truncated and self._expired is not None and self._expired():
            self.truncated = True
        return self.truncated

    def _offer(self, timeline: Timeline, name: str) -> None:
        if np.array_equal(timeline.problem.fused, self.problem.fused) and (
            self._incumbent is None or timeline.makespan < self._incumbent.makespan * (1 - TOLERANCE)
        ):
            self._incumbent = timeline
        if self.best is None or timeline.makespan < self.best.makespan * (1 - TOLERANCE):
            self.best, self.chosen = timeline, name
            self._drop_refuted_bounds()

    def _drop_refuted_bounds(self) -> None:
        if self.best is not None and self.bound > self.best.makespan:
            self._bounds, notes = drop_refuted_bounds(self._bounds, self.best.makespan)
            self.notes += notes

    def _offer_starts(self, timeline: Timeline | None) -> None:
        """Take the orders of a timeline of the planning model and time them again, with every limit."""
        if timeline is None or (
            self.best is not None and timeline.makespan > RETIMING_GAIN * self.best.makespan
        ):
            return
        if timeline.problem.spec is not self.problem.spec:  # found under tighter limits
            timeline = replace(timeline, problem=replace(timeline.problem, spec=self.problem.spec))
        limited = bool((self.problem.receive_limit >= 0).any())
        again = timeline
        try:
            if not limited:
                again = retime(self.problem, timeline.sequence)
            elif not keeps_receive_limits(timeline):
                again = simulate(self.problem, timeline.lanes)
        except OrderError:
            return
        # actions without length may have changed places, and transfers that waited for memory may have lost it
        for candidate in self._retimed_candidates(again, timeline):
            if (
                keeps_activation_limits(self.problem, candidate.lanes)
                and keeps_memory_limits(candidate)
                and keeps_receive_limits(candidate)
            ):
                self._offer(candidate, SEARCHED)
                return

    def _retimed_candidates(self, again: Timeline, timeline: Timeline) -> Iterator[Timeline]:
        yield again
        if self._limited:
            yield timeline
            late = alap_transfers(again, self._constructive.over_memory(again) > 0)
            yield late
            if not self.large:
                worth_s = np.inf if self.best is None else self.best.makespan
                for earlier in (timeline, late):
                    if (delayed := delay_forwards(earlier, worth_s=worth_s)) is not None:
                        yield delayed

    @property
    def spent_s(self) -> float:
        """Seconds of the budget that the constructive plans cost."""
        return self._constructive.spent_s

    def try_standard_rules(self) -> None:
        """The standard rules, each once; for a long step the best ones on a short step. Where microbatches differ, the
        best of them with other orders of the microbatches, too."""
        chosen = priority_rules.standard_rules(self.problem)
        if self._short is not None and self.large:
            chosen = steady_state.rank_rules(self.problem, self._short, COMPARED_RULES)
        ranked: list[tuple[float, int, priority_rules.Rule]] = []
        for number, rule in enumerate(chosen):
            if self.best is not None and self.done:
                return
            ranked.append((self._try_rule(rule), number, rule))
        if not self.problem.interchangeable and not (self.best is not None and self.done):
            ranked.sort(key=lambda item: item[:2])
            self._try_orders([rule for _, _, rule in ranked[:_RULES_FOR_EACH_ORDER]])

    def _try_orders(self, rules: list[priority_rules.Rule]) -> None:
        """Other orders of microbatches that differ, with the best rules; then changes of the best of these orders."""
        orders = candidate_orders(self.problem)
        if self._limited:  # which rules fit is seen only here
            for order, rule in itertools.product(orders[1:], rules[:_LIMITED_RULES_FOR_EACH_ORDER]):
                self._try_rule(replace(rule, order=order))
        changes = 0 if self.large else _CONSTRUCTIVE_ORDER_CHANGES
        goal_s = self.bound * (1 + TOLERANCE)
        runner = self._constructive.runner
        for rule in priority_rules.improve_orders(runner, rules, orders, changes=changes, goal_s=goal_s):
            if self.best is not None and self.done:
                return
            self._try_rule(rule)

    def _try_rule(self, rule: priority_rules.Rule) -> float:
        """Offers the timelines of a rule; the least makespan of them, infinite where it got stuck."""
        timelines = [self._follow(rule)]
        self._offer_starts(timelines[0])
        if self._limited and not self.large:
            timelines.append(self._follow(rule, late=False))
            self._offer_starts(timelines[1])
        return min((timeline.makespan for timeline in timelines if timeline is not None), default=np.inf)

    def delay_forwards(self) -> None:
        """Offers the shortest plans of rules whose buffers do not fit, with delayed forwards."""
        if self.best is not None and self.done:
            return
        for timeline in sorted(self._constructive.over_memory_timelines, key=lambda plan: plan.makespan)[
            :_MAX_DELAYED_PLANS
        ]:
            self._offer_starts(timeline)

    def _follow(self, rule: priority_rules.Rule, *, late: bool = True) -> Timeline | None:
        # of a large problem the same rule within memory is not worth a run where it is long without
        worth_s = self.best.makespan if self.large and self.best is not None else np.inf
        return self._constructive.follow(rule, late=late, worth_s=worth_s)

    def _reserve_incumbent_buffers(self) -> Problem:
        """The problem with the bytes of the incumbent's buffers left free; the incumbent itself fits."""
        assert self._incumbent is not None
        problem = self.problem
        if not self._limited:
            return problem
        room = problem.memory_limit - problem.static_bytes - peak_buffer_bytes(self._incumbent)
        held = [peak_activation(problem, lane)[0] for lane in self._incumbent.lanes]
        room = np.minimum(np.maximum(room, held), problem.activation_capacity)
        limit = np.where(problem.memory_limit < 0, problem.activation_capacity, room)
        meshes = [
            mesh.model_copy(
                update={"activation_limit_bytes": None if most < 0 else int(most), "memory_bytes": None}
            )
            for mesh, most in zip(problem.spec.meshes, limit.tolist(), strict=True)
        ]
        return replace(problem, spec=problem.spec.model_copy(update={"meshes": meshes}))

    def rule_search(self, budget_s: float) -> None:
        """Random rules and changes of the best; where a step is long as many as fit on a short one, too."""
        if self._short is None or not self.large:
            goal_s = self.bound * (1 + TOLERANCE)
            found = priority_rules.search_rules(
                self._constructive.runner,
                runs=_affordable_runs(self.problem, budget_s),
                goal_s=goal_s,
                stop=self._stop,
            )
            if found is not None:
                self._offer_starts(self._follow(found[1][0]))
        if self._short is None or self.done:
            return
        runner = priority_rules.RuleRunner(self._short)
        tuned = priority_rules.search_rules(
            runner, runs=_affordable_runs(self._short, budget_s), goal_s=0.0, stop=self._stop
        )
        for rule in tuned[1][: 1 if self.large else _RULES_FROM_SHORT_STEP] if tuned is not None else ():
            self._offer_starts(self._follow(steady_state.lengthen_rule(rule, self._short, self.problem)))

    def steady_state_search(self, budget_s: float) -> None:
        """A short step, searched with all of this; what repeats in its plan repeats more often in a long one."""
        if self._short is None or self._short.tasks > LARGE_PROBLEM_TASKS:
            return
        found = search(self._short, [], budget_s=budget_s, expired=self._expired)
        if found is None or not np.array_equal(found.timeline.problem.fused, self._short.fused):
            return
        for timeline in steady_state.extended_timelines(found.timeline, self.problem):
            self._offer_starts(timeline)

    def exact_search(self, budget_s: float) -> None:
        """The exact solver on the whole problem, in two ways at once; both answers count, so nothing depends on speed."""
        if self._incumbent is None:
            return
        if not self._affords_model(budget_s):
            self.tabu_search(0.7 * budget_s)
            self.large_neighbourhood_search(0.3 * budget_s)
            return

        incumbent, bound = self._incumbent, self.bound  # both runs from these, whichever ends first

        # with limited bytes one run counts buffers, and proves; the other leaves free what the incumbent's take, and
        # keeps the order of microbatches that differ
        problems = (self.problem, self._reserve_incumbent_buffers())

        def run(strong: bool) -> exact.ExactResult:
            problem = problems[strong]
            pace = min(1.0, _REFERENCE_MODEL_SIZE / exact.exact_model_size(problem))
            return exact.solve(
                problem,
                incumbent,
                lower_bound_s=bound,
                deterministic_limit=budget_s * _SOLVER_TIME_PER_SECOND * pace,
                strong=strong,
                keep_order=strong and not problem.interchangeable,
                expired=self._expired,
            )

        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(run, (False, True)))
        for number, (problem, answer) in enumerate(zip(problems, answers, strict=True)):
            self._offer_starts(answer.timeline)
            if problem is self.problem and (
                number == 0 or problem.interchangeable
            ):  # else it solved a tighter one
                self._bounds[exact.EXACT_BOUND_NAME] = max(
                    self._bounds.get(exact.EXACT_BOUND_NAME, 0.0), answer.lower_bound_s
                )
        self._drop_refuted_bounds()
        if not all(answer.finished for answer in answers):
            self._stop()

    def tabu_search(self, budget_s: float) -> None:
        """Tabu search from the best plan, twice at once."""
        if self._incumbent is None:
            return

        incumbent, goal_s = (
            self._incumbent,
            self.bound * (1 + TOLERANCE),
        )  # both runs from these, whichever ends first

        problem = self._reserve_incumbent_buffers()

        def run(seed: int) -> Timeline:
            return tabu_search(
                problem,
                incumbent,
                goal_s=goal_s,
                iterations=int(budget_s * _TABU_TASKS_PER_SECOND / int(self.problem.exists.sum())),
                seed=seed,
                stop=self._stop,
            )

        with ThreadPoolExecutor(2) as threads:
            for better in threads.map(run, self._new_seeds()):
                self._offer_starts(better)

    def large_neighbourhood_search(self, budget_s: float) -> None:
        """The exact solver on parts of the best plan, two random choices of parts at once."""
        if self._incumbent is None:
            return

        incumbent, bound = self._incumbent, self.bound

        # with limited bytes one run counts buffers, the other leaves free what the incumbent's take, and is faster
        problems = (self.problem, self._reserve_incumbent_buffers())

        def run(seed: int) -> Timeline:
            problem = problems[seed % 2]
            return large_neighbourhood_search(
                problem,
                replace(incumbent, problem=replace(incumbent.problem, spec=problem.spec)),
                lower_bound_s=bound,
                deterministic_limit=budget_s * _WINDOW_SOLVER_TIME_PER_SECOND,
                seed=seed,
                stop=self._stop,
            )

        with ThreadPoolExecutor(2) as threads:
            for better in threads.map(run, self._new_seeds()):
                self._offer_starts(better)

    def _new_seeds(self) -> tuple[int, int]:
        """For two runs at once: others than before, or a run that found nothing would only be repeated."""
        first = self._next_seed
        self._next_seed += 2
        return first, first + 1

    def _affords_model(self, budget_s: float) -> bool:
        return _MODEL_S_PER_LITERAL * exact.exact_model_size(self.problem) <= budget_s
