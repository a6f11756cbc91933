"""Searches a step of few microbatches and extends its steady state: good rules, and an order that repeats.

A step fills, repeats and drains. The short problem has about three microbatches for each stage of the longest
path: which rule is good shows there at a fraction of the cost, and a repetition in its plan is inserted as often
as needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import OrderError, Timeline, retime
from service.scheduler.search import priority_rules

_MICROBATCHES_PER_STAGE = 3  # microbatches for each stage of the longest path
_MIN_MICROBATCHES_PER_STAGE = 1.5  # where three microbatches a stage make a long step, too
_MAX_SHORT_TASKS = 30_000
_MIN_LENGTH_RATIO = 2  # microbatches of the long step over those of the short one
_LONGEST_PERIOD = 16  # microbatches
_MAX_REPETITIONS_TRIED = 4  # repetitions that are tried


def shorten_problem(problem: Problem) -> Problem | None:
    """The problem with fewer microbatches; None where there are not many, or where they differ: then nothing repeats."""
    if not problem.interchangeable:
        return None
    depth = int(problem.depth.max())
    fitting = _MAX_SHORT_TASKS // problem.kinds
    microbatches = max(
        min(_MICROBATCHES_PER_STAGE * depth, fitting), math.ceil(_MIN_MICROBATCHES_PER_STAGE * depth)
    )
    if problem.microbatches < _MIN_LENGTH_RATIO * microbatches:
        return None
    spec = problem.spec.model_copy(update={"microbatches": microbatches})
    return replace(
        problem,
        spec=spec,
        fused=problem.fused[:, :microbatches],
        bucket_of_microbatch=problem.bucket_of_microbatch[:microbatches],
    )


def rank_rules(problem: Problem, short: Problem, count: int) -> Iterator[priority_rules.Rule]:
    """The best `count` of the standard rules for a problem, by what they need for the short one and its rhythm."""
    runner = priority_rules.RuleRunner(short)
    estimates = [
        estimate_makespan_s(runner, rule, problem.microbatches)
        for rule in priority_rules.standard_rules(short)
    ]
    best = np.argsort(estimates, kind="stable")[:count]
    wanted = list(priority_rules.standard_rules(problem))
    return (wanted[i] for i in best.tolist() if np.isfinite(estimates[i]))


def estimate_makespan_s(
    runner: priority_rules.RuleRunner, rule: priority_rules.Rule, microbatches: int
) -> float:
    """Estimated makespan of a rule with `microbatches`, in seconds; infinity where it gets stuck."""
    timeline = runner.timeline(rule)
    if timeline is None:
        return np.inf
    return timeline.makespan + (microbatches - runner.problem.microbatches) * _microbatch_period_s(timeline)


def _microbatch_period_s(timeline: Timeline) -> float:
    """Seconds from one microbatch to the next in the middle of a step, at the slowest kind."""
    problem = timeline.problem
    end = timeline.end.reshape(problem.kinds, problem.microbatches)[: problem.compute_kinds]
    first, last = problem.microbatches // 3, 2 * problem.microbatches // 3
    there = problem.exists[: problem.compute_kinds, first] & problem.exists[: problem.compute_kinds, last]
    return float((end[there, last] - end[there, first]).max()) / (last - first)


def lengthen_rule(rule: priority_rules.Rule, short: Problem, problem: Problem) -> priority_rules.Rule:
    """A rule found on the short problem; caps that were none there are none here."""
    return replace(rule, cap=np.where(rule.cap >= short.microbatches, problem.microbatches, rule.cap))


def extended_timelines(timeline: Timeline, problem: Problem) -> Iterator[Timeline]:
    """Timelines of the long problem in which a repetition inside a short timeline comes again and again."""
    for first, last, period in islice(_repetitions(timeline), _MAX_REPETITIONS_TRIED):
        try:
            yield retime(problem, _repeat(timeline, problem, first, last, period))
        except OrderError:
            continue


def _repetitions(timeline: Timeline) -> Iterable[tuple[int, int, int]]:
    """(first, last, d): between these two places of the sequence each kind begins d microbatches; fastest first.

    The tasks behind `last` are then the tasks behind `first`, d microbatches later, with equal memory.
    """
    problem = timeline.problem
    kinds = timeline.sequence // problem.microbatches
    there = problem.exists[:, 0]
    # the busiest lane sets the pace: its first kind says where a repetition may begin
    reference = int(timeline.lanes[_busiest_mesh(problem)][0]) // problem.microbatches
    places = np.flatnonzero(kinds == reference)
    counts = np.zeros((len(places), problem.kinds), dtype=np.int64)
    rows = np.searchsorted(places, np.arange(len(kinds)), side="left")
    np.add.at(counts, (rows[rows < len(places)], kinds[rows < len(places)]), 1)
    counts = np.cumsum(counts, axis=0)
    start = timeline.start[timeline.sequence]
    found = []
    for period in range(1, min(_LONGEST_PERIOD, len(places) - 1) + 1):
        same = ((counts[period:] - counts[:-period])[:, there] == period).all(axis=1)
        for i in np.flatnonzero(same).tolist():
            first, last = int(places[i]), int(places[i + period])
            found.append(((float(start[last]) - float(start[first])) / period, i, first, last, period))
    return [(first, last, period) for _, _, first, last, period in sorted(found)]


def _busiest_mesh(problem: Problem) -> int:
    work = np.zeros(problem.meshes)
    np.add.at(work, np.repeat(problem.mesh_of_stage, 3), problem.duration[: problem.compute_kinds, 0])
    return int(work.argmax())


def _repeat(timeline: Timeline, problem: Problem, first: int, last: int, period: int) -> np.ndarray:
    """The sequence with [first, last) repeated until there are enough microbatches; surplus ones are left out."""
    short = timeline.problem.microbatches
    kinds, numbers = np.divmod(timeline.sequence, short)
    times = -(-(problem.microbatches - short) // period)
    inside = slice(first, last)
    every_kind = [kinds[:last], *[kinds[inside]] * times, kinds[last:]]
    every_number = [
        numbers[:last],
        *(numbers[inside] + period * (i + 1) for i in range(times)),
        numbers[last:] + period * times,
    ]
    kind, number = np.concatenate(every_kind), np.concatenate(every_number)
    keep = number < problem.microbatches
    return kind[keep] * problem.microbatches + number[keep]
