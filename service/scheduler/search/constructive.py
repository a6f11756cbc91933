"""Constructive plans within memory: the dispatcher counts activations; what buffers take beside them shows afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from service.scheduler.model.memory import peak_memory
from service.scheduler.model.problem import Problem
from service.scheduler.model.timeline import Timeline
from service.scheduler.search import rules
from service.scheduler.search.late import late_transfers

LARGE = 30_000
"""Tasks; above, a run of a rule is no longer cheap."""
COMPARED = 8
"""How many standard rules are run on a large problem: those that are the best on a short step."""
_TRIES = 6  # how often a rule is run again with less room for activations, of a large problem half as often
SLACK = 1.01
"""How much a timeline may gain by being timed again."""
_RULE_SECONDS = 6e-7  # what a constructive plan takes for each task,
_MEMORY_SECONDS = 1.2e-6  # with transfers that go late, and memory that is counted,
_EMPTY_SECONDS = 4e-4  # and beside its tasks


@dataclass(frozen=True)
class Variant:
    """A standard rule by its number, with transfers that first go as late as nothing minds, or without."""

    number: int
    late: bool


def variants(problem: Problem) -> Iterator[Variant]:
    """All ways to follow the standard rules of a problem."""
    limited = bool((problem.memory_limit >= 0).any())
    for number, _ in enumerate(rules.standard_rules(problem)):
        yield Variant(number, True)
        if limited:
            yield Variant(number, False)


def run_seconds(problem: Problem) -> float:
    """What one run of a rule costs, in seconds of a budget."""
    each_s = _MEMORY_SECONDS if (problem.memory_limit >= 0).any() else _RULE_SECONDS
    return _EMPTY_SECONDS + each_s * int(problem.exists.sum())


class Constructive:
    """Follows rules on one problem, within its memory; counts what that costs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.limited = bool((problem.memory_limit >= 0).any())
        self.large = problem.tasks > LARGE
        self.runner = rules.RuleRunner(problem)
        self.too_full: list[Timeline] = []
        """What rules made of a problem that is not large, and what buffers take does not fit."""
        self._tries = 1 if not self.limited else _TRIES // 2 if self.large else _TRIES

    @property
    def spent_s(self) -> float:
        """What the runs cost so far, in seconds of a budget."""
        return self.runner.runs * run_seconds(self.problem)

    def follow(self, rule: rules.Rule, *, late: bool = True, worth_s: float = np.inf) -> Timeline | None:
        """The timeline of a rule; where its buffers do not fit beside its activations, with fewer of these.

        With `late` transfers first go later, where that makes room. A timeline that is longer than `worth_s` before
        memory is looked at comes as it is.
        """
        limit = self.problem.activation_limit
        for _ in range(self._tries):
            timeline = self.runner.timeline(rule, limit)
            if timeline is None or not self.limited or timeline.makespan > SLACK * worth_s:
                return timeline
            over = self.over_memory(timeline)
            if (over <= 0).all():
                return timeline
            if late and limit is self.problem.activation_limit and not self.large:
                self.too_full.append(timeline)
            if late:
                timeline = late_transfers(timeline, over > 0)
                over = self.over_memory(timeline)
                if (over <= 0).all():
                    return timeline
            limit = np.where(over > 0, np.maximum(limit - over, 0), limit)
        return None

    def over_memory(self, timeline: Timeline) -> np.ndarray:
        """int[meshes]: bytes above the limit, negative where there is room."""
        limit = self.problem.memory_limit
        return np.where(limit < 0, -1, peak_memory(timeline) - limit)
