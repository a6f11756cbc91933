"""Judging choices before one is searched: constructive plans, for so much work and no more.

Choices (which stages recompute, which run whole backwards) make problems that differ in costs and in memory, not in
shape. What a rule is good for shows on the first of them; the others need few rules. A long step is judged by a short
one: filling and draining lose as much in both, and the bounds say what the middle takes.
"""

from __future__ import annotations

import math
from collections import defaultdict

from service.scheduler.model.problem import Problem
from service.scheduler.search.bounds import lower_bound
from service.scheduler.search.constructive import (
    COMPARED,
    LARGE,
    Constructive,
    Variant,
    run_seconds,
    variants,
)
from service.scheduler.search.rules import standard_rules
from service.scheduler.search.short import shorten

_LEAST_S = 0.5  # of work that may always be done
_THOROUGH_SHARE = 0.5  # of the work, for the first choices, with many rules
_THOROUGH = 4  # problems of these
_TRIES = 2.5  # how often a rule is run within memory, on average
_FEW = 3  # rules for each later choice
_DOUBT = 0.03  # of the makespan of a long step


class Judge:
    """Estimates makespans of problems of one shape; `exhausted` once `budget_s` (of work, not of time) is spent."""

    def __init__(self, budget_s: float) -> None:
        self._allowed_s = max(budget_s, _LEAST_S)
        self._score: defaultdict[str, dict[Variant, float]] = defaultdict(dict)
        self.spent_s = 0.0

    @property
    def exhausted(self) -> bool:
        return self.spent_s >= self._allowed_s

    @staticmethod
    def doubt(problem: Problem) -> float:
        """How far from each other two estimates must be to say anything, as a share of them."""
        return _DOUBT if problem.tasks > LARGE else 0.0

    def makespan(self, problem: Problem, form: str, *, thorough: bool = False) -> float:
        """About how many seconds the problem takes; infinite where no rule fits its limits.

        Problems of one `form` have good rules in common. With `thorough` many are tried, and the good ones
        remembered.
        """
        judged = problem
        if problem.tasks > LARGE:
            judged = shorten(problem) or problem
        runs = Constructive(judged)
        score = self._score[form]
        if thorough or not score:
            share_s = self._allowed_s * _THOROUGH_SHARE / _THOROUGH
            every = list(variants(judged))
            count = max(_FEW, int(share_s / (run_seconds(judged) * (_TRIES if runs.limited else 1))))
            wanted = every[:: max(1, math.ceil(len(every) / count))]
        else:
            wanted = sorted(score, key=score.__getitem__)[:_FEW]
        rules = list(standard_rules(judged))
        found: dict[Variant, float] = {}
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


def constructive_s(problem: Problem) -> float:
    """What the constructive plans that a search begins with cost, in seconds of a budget."""
    limited, tried = bool((problem.memory_limit >= 0).any()), len(list(variants(problem)))
    if problem.tasks > LARGE:
        rules = len(list(standard_rules(problem)))
        tried = rules if shorten(problem) is None else COMPARED
    return tried * (_TRIES if limited else 1) * run_seconds(problem)
