"""Orders in which microbatches of different lengths begin: a few candidates for the priority rules, and changes of them.

An order is a permutation: its place n holds the microbatch that every stage begins as its n-th. Which order is good
depends on memory and on where time is lost, so none is preferred: rules run with each, and the search goes on from
the best. Not needed where all microbatches are interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import Timeline

_MOST_JOHNSON_CUTS = 4  # places at which the sequence of actions is cut in two


def candidate_orders(problem: Problem) -> list[np.ndarray]:
    """int[microbatches] each: the given order first, then others that differ in costs; the given one alone where all
    microbatches are interchangeable."""
    given = np.arange(problem.microbatches, dtype=np.int64)
    if problem.interchangeable:
        return [given]
    found: dict[bytes, np.ndarray] = {}
    for order in (given, *_by_length(problem), *_by_johnson(problem)):
        found.setdefault(problem.bucket_of_microbatch[order].tobytes(), order)
    return list(found.values())


def _by_length(problem: Problem) -> Iterator[np.ndarray]:
    """Orders by the seconds of all actions and transfers of each microbatch."""
    ascending = np.argsort(problem.duration.sum(axis=0), kind="stable")
    descending = ascending[::-1]
    yield descending
    yield ascending
    # a step fills and drains with short ones at its ends, and has the long ones in the middle, or the other way round
    yield np.concatenate((ascending[::2], ascending[1::2][::-1]))
    yield np.concatenate((descending[::2], descending[1::2][::-1]))
    # memory that a long one takes, a short one beside it leaves
    half = (len(ascending) + 1) // 2
    for first, second in ((descending, ascending), (ascending, descending)):
        zigzag = np.empty_like(ascending)
        zigzag[::2], zigzag[1::2] = first[:half], second[: len(ascending) - half]
        yield zigzag
    # as many short ones as the pipeline has stages fill it, then the longest first
    depth = min(int(problem.depth.max()) - 1, len(ascending) - 1)
    if depth > 0:
        yield np.concatenate((ascending[:depth], descending[: len(ascending) - depth]))


def _by_johnson(problem: Problem) -> Iterator[np.ndarray]:
    """Johnson's orders (1954) of the work before and behind some place in the sequence of a microbatch's actions.

    Campbell, Dudek and Smith (1970) for flow shops: for two machines Johnson's order is the best one.
    """
    compute = np.argsort(problem.kind_rank)
    compute = compute[compute < problem.compute_kinds]
    length = problem.duration[compute]
    length = length[length.any(axis=1)]
    if len(length) < 2:
        return
    cuts = np.linspace(1, len(length) - 1, min(_MOST_JOHNSON_CUTS, len(length) - 1))
    for cut in np.unique(np.rint(cuts).astype(np.int64)).tolist():
        yield johnson_order(length[:cut].sum(axis=0), length[len(length) - cut :].sum(axis=0))


def johnson_order(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Johnson's order of jobs on two machines, from the seconds of each job on both."""
    jobs = np.arange(len(first), dtype=np.int64)
    rising = first < second
    ahead, behind = jobs[rising], jobs[~rising]
    return np.concatenate(
        (
            ahead[np.argsort(first[ahead], kind="stable")],
            behind[np.argsort(-second[behind], kind="stable")],
        )
    )


def begun_order(timeline: Timeline) -> np.ndarray:
    """The order in which the first stage of a timeline begins its microbatches."""
    problem = timeline.problem
    first = problem.kind(problem.stage_order[0], 0)
    return np.argsort(timeline.rank[first * problem.microbatches : (first + 1) * problem.microbatches])


def change_order(order: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The order with two microbatches exchanged, or one moved to another place."""
    place, other = generator.choice(len(order), 2, replace=False).tolist()
    changed = order.tolist()
    if generator.random() < 0.5:
        changed.insert(other, changed.pop(place))
    else:
        changed[place], changed[other] = changed[other], changed[place]
    return np.array(changed, dtype=np.int64)
