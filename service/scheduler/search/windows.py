"""A stretch of a timeline to plan anew: constants before it, tails behind it.

Whatever begins before the window stays as it is; what begins behind it keeps its orders and moves as a whole. So
a search needs to know only the window's own tasks: when each may begin at the earliest, and how long the
longest path behind its end is. Every path that makes a timeline as long as it is passes through every window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from service.scheduler import kernels
from service.scheduler.model.memory import activation_changes, holding_waits, posting_waits
from service.scheduler.model.problem import Problem
from service.scheduler.model.timeline import Edges, Timeline, compress_edges, resource_edges, retime


@dataclass(frozen=True, eq=False)
class Paths:
    """A timeline with the longest paths behind its tasks, from which windows are cut."""

    timeline: Timeline

    @cached_property
    def tails(self) -> np.ndarray:
        """float[tasks]: the longest path from the start of each task to the end of everything, in seconds."""
        problem, order = self.timeline.problem, self.timeline.sequence
        edges = zip(problem.dependency_edges, resource_edges(problem, order), self._postings, strict=True)
        successors = compress_edges(problem.tasks, *(np.concatenate(side) for side in edges))
        return kernels.tails(*successors, problem.duration.reshape(-1), order, len(order))

    @cached_property
    def _postings(self) -> Edges:
        """(compute tasks, receives that are posted after them) and (sends, actions that wait for their buffers), where
        that is what keeps a limit."""
        if limits_buffers(self.timeline.problem):
            waits = posting_waits(self.timeline), holding_waits(self.timeline)
            return np.concatenate([w[0] for w in waits]), np.concatenate([w[1] for w in waits])
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

    def window(self, first: int, last: int) -> Window:
        """The tasks at the places [first, last) of the timeline's sequence."""
        timeline = self.timeline
        problem, rank = timeline.problem, timeline.rank
        release, tail = np.zeros(problem.tasks), np.zeros(problem.tasks)
        causes, effects = problem.dependency_edges
        inside_cause = (rank[causes] >= first) & (rank[causes] < last)
        inside_effect = (rank[effects] >= first) & (rank[effects] < last)
        entering = inside_effect & ~inside_cause
        np.maximum.at(release, effects[entering], timeline.end[causes[entering]])
        leaving = inside_cause & ~inside_effect
        np.maximum.at(tail, causes[leaving], self.tails[effects[leaving]])
        posts, posted = self._postings
        posting = (rank[posts] >= first) & (rank[posts] < last) & (rank[posted] >= last)
        np.maximum.at(tail, posts[posting], self.tails[posted[posting]])
        before, tasks, behind = np.split(timeline.sequence, [first, last])
        free_at = _of_resources(problem, before, timeline.end)
        left = _of_resources(problem, behind, self.tails)
        # whatever the order: all of them come after what occupied their resources, and before what will
        occupied = problem.resources[tasks // problem.microbatches]
        return Window(
            timeline=timeline,
            first=first,
            last=last,
            release=np.maximum(release[tasks], free_at[occupied].max(axis=1)),
            tail=np.maximum(tail[tasks], left[occupied].max(axis=1)),
            dependencies=(causes[inside_cause & inside_effect], effects[inside_cause & inside_effect]),
        )


def _of_resources(problem: Problem, tasks: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The largest value of the tasks on each resource; one more, for tasks that occupy none, is 0."""
    most = np.zeros(problem.resource_count + 1)
    occupied = problem.resources[tasks // problem.microbatches]
    for side in range(2):
        np.maximum.at(most, occupied[:, side], values[tasks])
    most[-1] = 0.0
    return most


@dataclass(frozen=True, eq=False)
class Window:
    """The tasks at the places [first, last) of a timeline's sequence, and what the rest of it means for each.

    `release` is when what came before lets a task begin, `tail` the longest path from its end through what comes
    behind the window; seconds. `dependencies` are those between tasks inside.
    """

    timeline: Timeline
    first: int
    last: int
    release: np.ndarray
    tail: np.ndarray
    dependencies: Edges

    @property
    def tasks(self) -> np.ndarray:
        """By start, causes first."""
        return self.timeline.sequence[self.first : self.last]

    @cached_property
    def started(self) -> np.ndarray:
        """int[kinds]: how many microbatches of each kind begin before the window."""
        return self._count(self.timeline.sequence[: self.first])

    @cached_property
    def started_after(self) -> np.ndarray:
        """int[kinds]: how many microbatches of each kind begin before the end of the window."""
        return self._count(self.timeline.sequence[: self.last])

    def _count(self, tasks: np.ndarray) -> np.ndarray:
        problem = self.timeline.problem
        return np.bincount(tasks // problem.microbatches, minlength=problem.kinds)

    @cached_property
    def held(self) -> np.ndarray:
        """int[meshes]: bytes of activations and stashes that each mesh holds when its first action here begins."""
        problem = self.timeline.problem
        rank = self.timeline.rank
        held = np.zeros(problem.meshes, dtype=np.int64)
        for mesh, lane in enumerate(self.timeline.lanes):
            held[mesh] = activation_changes(problem, lane[rank[lane] < self.first]).sum()
        return held

    @property
    def makespan(self) -> float:
        """The longest path through the window, in seconds: the makespan of the timeline."""
        return float((self.timeline.end[self.tasks] + self.tail).max(initial=0.0))

    def replay(self, order: np.ndarray, start: np.ndarray) -> Timeline:
        """The whole timeline with the window's tasks in this order, played again; raises OrderError where it has a cycle.

        Where bytes or buffers are limited, a transfer waits for the actions that end before its `start` (seconds,
        one for each task of `order`): its receive is posted after them. Where bytes are, an action that begins later
        than it could waits for what its mesh sends.
        """
        timeline = self.timeline
        problem = timeline.problem
        sequence = np.concatenate((timeline.sequence[: self.first], order, timeline.sequence[self.last :]))
        if not limits_buffers(problem):
            return retime(problem, sequence)
        times = timeline.start.copy()
        times[order] = start
        planned = Timeline(problem, times, sequence)
        return retime(problem, sequence, posting_waits(planned), holding_waits(planned))


def limits_buffers(problem: Problem) -> bool:
    """Whether what is received or sent has a limit of its own, or one together with activations."""
    return bool((problem.receive_limit >= 0).any() or (problem.memory_limit >= 0).any())
