"""Priority rules: list scheduling within memory limits, and a random search over the rules themselves.

A rule treats every microbatch the same, but for the order in which they begin, so a good one found on a pipeline of
any length is a pattern. The dispatcher counts activations; what send and receive buffers take beside them shows only
afterwards, so a rule runs again with tighter activation limits. Deterministic: one seeded generator, budgets counted
in runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import OPS
from service.scheduler.problem.memory import peak_memory
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Dispatcher, Timeline, make_timeline
from service.scheduler.search.delays import alap_transfers
from service.scheduler.search.microbatch_orders import candidate_orders, change_order
from service.scheduler.search.origin import RULES_SEED

_POOL_SIZE = 20
_CHANGED_RULES = 4  # rules whose orders of microbatches change, one after the other
_ORDER_CHANGES = 0.5  # of the changes of a rule, where microbatches differ


@dataclass(frozen=True, eq=False)
class Rule:
    """Ready tasks go by `path` · longest path behind + `offset` of their kind − `slope` · microbatch.

    `cap` bounds the microbatches between F and backward at each stage; a lane waits up to
    `patience` of an action's length for a more urgent one. Offsets and slope count mean action lengths. Microbatches
    begin in `order` (ascending where None), and the slope counts its places.
    """

    path: float
    offset: np.ndarray
    slope: float
    cap: np.ndarray
    patience: float
    order: np.ndarray | None = None


class RuleRunner:
    """Runs rules on one problem; counts the runs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._dispatcher = Dispatcher(problem)
        self._duration = problem.duration.reshape(-1)
        self._expected = int(problem.exists.sum())
        length = problem.duration.max(axis=1)
        self.unit = float(length[: problem.compute_kinds].mean()) or 1.0
        self._path = kind_tails(problem, length)
        self._microbatch = np.arange(problem.microbatches)
        self.runs = 0

    def makespan(self, rule: Rule) -> float:
        """Seconds, or infinity where the rule got stuck."""
        start, begun = self._run(rule)
        if len(begun) < self._expected:
            return np.inf
        return float((start + self._duration)[begun].max())

    def timeline(self, rule: Rule, activation_limit: np.ndarray | None = None) -> Timeline | None:
        """The timeline, or None where the rule got stuck."""
        start, begun = self._run(rule, activation_limit)
        return make_timeline(self.problem, start, begun) if len(begun) == self._expected else None

    def _run(self, rule: Rule, activation_limit: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        self.runs += 1
        weight = rule.path * self._path
        weight[: self.problem.compute_kinds] += rule.offset * self.unit
        place = self._microbatch if rule.order is None else np.argsort(rule.order)
        priority = (weight[:, None] - (rule.slope * self.unit) * place).reshape(-1)
        return self._dispatcher.run(
            priority,
            in_flight_cap=rule.cap,
            patience=rule.patience,
            activation_limit=activation_limit,
            order=rule.order,
        )


def kind_tails(problem: Problem, length: np.ndarray) -> np.ndarray:
    """For each kind the longest path from its start to the end of what depends on it, one microbatch alone."""
    order = np.argsort(problem.kind_rank)
    return kernels.tails(*problem.dependent_rows, length.astype(float), order, len(order))


def standard_rules(problem: Problem) -> Iterator[Rule]:
    """The constructive rules, a fixed few: backward first or forward first, W last or urgent, several caps."""
    stages, depth = problem.stages, problem.depth.astype(np.int64)
    caps = [
        np.full(stages, problem.microbatches, dtype=np.int64),
        2 * depth - 1,
        depth,
        depth + (depth.max() - depth + 1) // 2,
        np.full(stages, depth.max(), dtype=np.int64),
        np.ones(stages, dtype=np.int64),
    ]
    for cap in caps:
        for offsets in ((1.0, 2.0, 0.0), (2.0, 1.0, 0.0), (0.0, 2.0, 1.0)):
            for patience in (0.0, 0.5):
                offset = 1000.0 * np.tile(offsets, stages)
                yield Rule(0.0, offset, 1.0, np.maximum(cap, 1), patience)
    yield Rule(1.0, np.zeros(problem.compute_kinds), 1.0, caps[0], 0.0)
    yield Rule(1.0, np.zeros(problem.compute_kinds), 1.0, caps[1], 0.5)


def search_rules(
    runner: RuleRunner,
    *,
    runs: int,
    goal_s: float,
    stop: Callable[[], bool],
) -> tuple[float, list[Rule]] | None:
    """The best makespan after `runs` runs and the rules, best first; ends early at `goal_s` or when `stop` says so."""
    generator = np.random.default_rng(RULES_SEED)
    orders = candidate_orders(runner.problem)
    pool: list[tuple[float, int, Rule]] = []
    number = 0
    for number in range(1, runs + 1):
        if number % 32 == 0 and stop():
            break
        explore = number <= runs * 2 // 5 or not pool
        if explore:
            at, rule = -1, _random_rule(runner.problem, generator)
            if len(orders) > 1:
                rule = replace(rule, order=orders[int(generator.integers(len(orders)))])
        else:
            at = int(min(generator.integers(len(pool)), generator.integers(len(pool))))
            rule = _mutate(pool[at][2], runner.problem, generator)
        makespan = runner.makespan(rule)
        if not np.isfinite(makespan):
            continue
        if explore:
            pool.append((makespan, number, rule))
        elif makespan <= pool[at][0]:
            pool[at] = (makespan, number, rule)
        pool.sort(key=lambda item: item[:2])
        del pool[_POOL_SIZE:]
        if pool[0][0] <= goal_s:
            break
    return (pool[0][0], [rule for _, _, rule in pool]) if pool else None


def improve_orders(
    runner: RuleRunner, rules: Sequence[Rule], orders: Sequence[np.ndarray], *, changes: int, goal_s: float
) -> list[Rule]:
    """The best few of the rules with each of the orders of microbatches, after random `changes` of their orders.

    Best first, each change kept where the makespan is no longer; ends early at `goal_s`.
    """
    generator = np.random.default_rng(RULES_SEED)
    every, makespans = [], []
    for order, rule in itertools.product(orders, rules):
        every.append(replace(rule, order=order))
        makespans.append(runner.makespan(every[-1]))
        if makespans[-1] <= goal_s:
            return every[-1:]
    best = np.argsort(makespans, kind="stable")[:_CHANGED_RULES].tolist()
    pool = [(makespans[i], number, every[i]) for number, i in enumerate(best) if np.isfinite(makespans[i])]
    for turn in range(changes if pool else 0):
        least, number, rule = pool[turn % len(pool)]
        assert rule.order is not None
        changed = replace(rule, order=change_order(rule.order, generator))
        makespan = runner.makespan(changed)
        if makespan <= least:
            pool[turn % len(pool)] = makespan, number, changed
        if makespan <= goal_s:
            break
    return [rule for _, _, rule in sorted(pool, key=lambda item: item[:2])]


def _random_rule(problem: Problem, generator: np.random.Generator) -> Rule:
    stages, microbatches = problem.stages, problem.microbatches
    widest = microbatches if generator.random() < 0.3 else min(2 * int(problem.depth.max()), microbatches)
    first, last = generator.integers(1, widest + 1, 2)
    reach = (problem.depth.max() - problem.depth) / max(int(problem.depth.max()) - 1, 1)
    return Rule(
        path=float(generator.choice([0.0, 1.0, -1.0])),
        offset=np.tile(
            generator.permutation(OPS) * float(generator.choice([0.5, 1.0, 2.0, 5.0, 100.0])), stages
        ),
        slope=float(generator.choice([0.0, 0.1, 0.5, 1.0, 2.0, 3.0])),
        cap=np.maximum(1, np.rint(first + (last - first) * reach)).astype(np.int64),
        patience=float(generator.choice([0.0, 0.3, 0.5, 1.0])),
    )


def _mutate(rule: Rule, problem: Problem, generator: np.random.Generator) -> Rule:
    stages = problem.stages
    if not problem.interchangeable and generator.random() < _ORDER_CHANGES:
        assert rule.order is not None
        return replace(rule, order=change_order(rule.order, generator))
    for _ in range(int(generator.integers(1, 4))):
        draw = generator.random()
        if draw < 0.4:
            offset = rule.offset.copy()
            offset[generator.integers(problem.compute_kinds)] += generator.normal() * float(
                generator.choice([0.3, 1.0, 3.0])
            )
            rule = replace(rule, offset=offset)
        elif draw < 0.5:
            offset = rule.offset.copy()
            offset[generator.integers(OPS) :: OPS] += generator.normal()
            rule = replace(rule, offset=offset)
        elif draw < 0.8:
            cap = rule.cap.copy()
            at = generator.integers(stages)
            cap[at] = max(1, cap[at] + generator.choice([-1, 1]))
            rule = replace(rule, cap=cap)
        elif draw < 0.9:
            rule = replace(rule, patience=float(generator.choice([0.0, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5])))
        else:
            rule = replace(rule, slope=max(0.0, rule.slope + 0.3 * generator.normal()))
    return rule


LARGE_PROBLEM_TASKS = 30_000
"""Tasks; above, a run of a rule is no longer cheap."""
COMPARED_RULES = 8
"""Standard rules that are run on a large problem: the best ones on a short step."""
_TRIES_PER_RULE = (
    6  # how often a rule is run again with less room for activations, of a large problem half as often
)
RETIMING_GAIN = 1.01
"""Factor by which a timeline may gain when it is timed again."""
_RULE_S_PER_TASK = 6e-7  # of a constructive plan
_MEMORY_RULE_S_PER_TASK = 1.2e-6  # with ALAP transfers and counted memory
_RUN_OVERHEAD_S = 4e-4  # of a constructive plan, besides its tasks


@dataclass(frozen=True)
class RuleVariant:
    """A standard rule by its number, with ALAP transfers first (`late`), or without."""

    number: int
    late: bool


def rule_variants(problem: Problem) -> Iterator[RuleVariant]:
    """All variants of the standard rules of a problem."""
    limited = bool((problem.memory_limit >= 0).any())
    for number, _ in enumerate(standard_rules(problem)):
        yield RuleVariant(number, True)
        if limited:
            yield RuleVariant(number, False)


def rule_run_s(problem: Problem) -> float:
    """Seconds of a budget that one run of a rule costs."""
    each_s = _MEMORY_RULE_S_PER_TASK if (problem.memory_limit >= 0).any() else _RULE_S_PER_TASK
    return _RUN_OVERHEAD_S + each_s * int(problem.exists.sum())


class ConstructivePlanner:
    """Follows rules on one problem, within its memory, and counts the cost of the runs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limited = bool((problem.memory_limit >= 0).any())
        self.large = problem.tasks > LARGE_PROBLEM_TASKS
        self.runner = RuleRunner(problem)
        self.over_memory_timelines: list[Timeline] = []
        """Timelines of a problem that is not large, whose buffers do not fit."""
        self._tries = 1 if not self.limited else _TRIES_PER_RULE // 2 if self.large else _TRIES_PER_RULE

    @property
    def spent_s(self) -> float:
        """Seconds of a budget that the runs cost so far."""
        return self.runner.runs * rule_run_s(self.problem)

    def follow(self, rule: Rule, *, late: bool = True, worth_s: float = np.inf) -> Timeline | None:
        """The timeline of a rule; where its buffers do not fit beside its activations, with fewer activations.

        With `late` transfers first go later, where that makes room. A timeline that is longer than `worth_s` before
        memory is looked at comes as it is.
        """
        limit = self.problem.activation_limit
        for _ in range(self._tries):
            timeline = self.runner.timeline(rule, limit)
            if timeline is None or not self.limited or timeline.makespan > RETIMING_GAIN * worth_s:
                return timeline
            over = self.over_memory(timeline)
            if (over <= 0).all():
                return timeline
            if late and limit is self.problem.activation_limit and not self.large:
                self.over_memory_timelines.append(timeline)
            if late:
                timeline = alap_transfers(timeline, over > 0)
                over = self.over_memory(timeline)
                if (over <= 0).all():
                    return timeline
            limit = np.where(over > 0, np.maximum(limit - over, 0), limit)
        return None

    def over_memory(self, timeline: Timeline) -> np.ndarray:
        """int[meshes]: bytes above the limit, negative where there is room."""
        limit = self.problem.memory_limit
        return np.where(limit < 0, -1, peak_memory(timeline) - limit)
