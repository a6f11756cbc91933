"""MakespanEstimator: estimates candidate problems' makespans by constructive plans, within a budget of work.

Choices (which stages recompute, which run whole backwards) make problems that differ in costs and memory, not
in shape: rules that do well on the first problems are enough for the later ones. A long step is estimated by a
shortened one: filling and draining lose as much in both, and the lower bounds tell what the middle takes.
"""

from __future__ import annotations

import math
from collections import defaultdict

from service.scheduler.problem.problem import Problem
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.priority_rules import (
    COMPARED_RULES,
    LARGE_PROBLEM_TASKS,
    ConstructivePlanner,
    RuleVariant,
    rule_run_s,
    rule_variants,
    standard_rules,
)
from service.scheduler.search.steady_state import shorten_problem

_MIN_BUDGET_S = 0.5  # of work that may always be done
_THOROUGH_SHARE = 0.5  # of the work, for the first choices, with many rules
_THOROUGH_PROBLEMS = 4  # problems of these
_RUNS_WITHIN_MEMORY = 2.5  # how often a rule is run within memory, on average
_LATER_RULES = 3  # rules for each later choice
_LONG_STEP_ERROR = 0.03  # of the makespan of a long step


class MakespanEstimator:
    """Estimates makespans of problems of one shape; `exhausted` once `budget_s` (of work, not of time) is spent."""

    def __init__(self, budget_s: float) -> None:
        self._allowed_s = max(budget_s, _MIN_BUDGET_S)
        self._score: defaultdict[str, dict[RuleVariant, float]] = defaultdict(dict)
        self.spent_s = 0.0

    @property
    def exhausted(self) -> bool:
        return self.spent_s >= self._allowed_s

    @staticmethod
    def doubt(problem: Problem) -> float:
        """How far from each other two estimates must be to say anything, as a share of them."""
        return _LONG_STEP_ERROR if problem.tasks > LARGE_PROBLEM_TASKS else 0.0

    def makespan(self, problem: Problem, form: str, *, thorough: bool = False) -> float:
        """About how many seconds the problem takes; infinite where no rule fits its limits.

        Problems of one `form` have good rules in common. With `thorough` many are tried, and the good ones
        remembered.
        """
        judged = problem
        if problem.tasks > LARGE_PROBLEM_TASKS:
            judged = shorten_problem(problem) or problem
        runs = ConstructivePlanner(judged)
        score = self._score[form]
        if thorough or not score:
            share_s = self._allowed_s * _THOROUGH_SHARE / _THOROUGH_PROBLEMS
            every = list(rule_variants(judged))
            count = max(
                _LATER_RULES,
                int(share_s / (rule_run_s(judged) * (_RUNS_WITHIN_MEMORY if runs.limited else 1))),
            )
            wanted = every[:: max(1, math.ceil(len(every) / count))]
        else:
            wanted = sorted(score, key=score.__getitem__)[:_LATER_RULES]
        rules = list(standard_rules(judged))
        found: dict[RuleVariant, float] = {}
        for one in wanted:
            timeline = runs.follow(rules[one.number], late=one.late)
            if timeline is not None:
                found[one] = timeline.makespan
        self.spent_s += runs.spent_s
        best = min(found.values(), default=math.inf)
        for one, makespan in found.items():
            score[one] = min(score.get(one, math.inf), makespan / best if best else 1.0)
        if judged is not problem and math.isfinite(best):
            best += lower_bound(problem) - lower_bound(judged)
        return best


def constructive_cost_s(problem: Problem) -> float:
    """What the constructive plans that a search begins with cost, in seconds of a budget."""
    limited, tried = bool((problem.memory_limit >= 0).any()), len(list(rule_variants(problem)))
    if problem.tasks > LARGE_PROBLEM_TASKS:
        rules = len(list(standard_rules(problem)))
        tried = rules if shorten_problem(problem) is None else COMPARED_RULES
    return tried * (_RUNS_WITHIN_MEMORY if limited else 1) * rule_run_s(problem)
