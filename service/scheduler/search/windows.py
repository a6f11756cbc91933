"""Windows of a timeline to plan anew, as data and as a CP-SAT model of the window's size.

Whatever begins before the window stays; what begins behind it keeps its orders and moves as a whole. So a search
needs only the window's tasks: when each may begin at the earliest (release), and the longest path behind its end
(tail). Every path that makes a timeline as long as it is passes through every window.
In the model every kind runs its microbatches in order, those of one length bucket where they differ, as in the model
of the whole problem (exact.py); what is held is counted in bytes over time, buffers too where `memory_bytes` limits a
mesh: as many intervals as tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from service.scheduler import kernels
from service.scheduler.kernels import BACKWARD, FORWARD, WEIGHT
from service.scheduler.problem.memory import activation_changes, posting_waits, send_buffer_waits
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import (
    Edges,
    OrderError,
    Timeline,
    compress_edges,
    resource_edges,
    retime,
)

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    _TimeExpr = cp_model.LinearExprT


def cp_model_module() -> ModuleType:
    """OR-Tools' CP-SAT, imported when a model is first built: with its pandas that takes longer than most plans."""
    from ortools.sat.python import cp_model

    return cp_model


@dataclass(frozen=True, eq=False)
class WindowCutter:
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
        if has_buffer_limits(self.timeline.problem):
            waits = posting_waits(self.timeline), send_buffer_waits(self.timeline)
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
        free_at = _largest_per_resource(problem, before, timeline.end)
        left = _largest_per_resource(problem, behind, self.tails)
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


def _largest_per_resource(problem: Problem, tasks: np.ndarray, values: np.ndarray) -> np.ndarray:
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
        """The tasks of the window by start, causes first."""
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
        if not has_buffer_limits(problem):
            return retime(problem, sequence)
        times = timeline.start.copy()
        times[order] = start
        planned = Timeline(problem, times, sequence)
        return retime(problem, sequence, posting_waits(planned), send_buffer_waits(planned))


def has_buffer_limits(problem: Problem) -> bool:
    """True where received or sent tensors have a limit of their own, or one together with activations."""
    return bool((problem.receive_limit >= 0).any() or (problem.memory_limit >= 0).any())


class WindowModel:
    """The model of a window: shorter than it is, with `fixed` tasks of it in their order on every resource.

    Times are integers, from the window's own beginning, seconds times `scale`; `lengths` are those of the kinds.
    """

    def __init__(
        self, window: Window, fixed: np.ndarray, lengths: np.ndarray, scale: float, least_gain: float
    ) -> None:
        self.window, self.problem = window, window.timeline.problem
        self.model = cp_model_module().CpModel()
        self._begin_s = float(window.timeline.start[window.tasks].min(initial=0.0))
        self._latest = math.floor((window.makespan * (1 - least_gain) - self._begin_s) * scale + 1e-6)
        self._scale = scale
        self._lengths = lengths.reshape(-1)
        self._fixed = np.zeros(self.problem.tasks, dtype=bool)
        self._fixed[window.tasks[fixed]] = True
        self.start: dict[int, cp_model.IntVar] = {}
        self._add_tasks()
        self._add_orders()
        if not self.problem.inference:
            self._add_leads()
            for mesh in range(self.problem.meshes):
                self._add_memory(mesh)
        makespan = self.model.new_int_var(0, max(self._latest, 0), "makespan")
        for task, tail in zip(window.tasks.tolist(), window.tail.tolist(), strict=True):
            self.model.add(makespan >= self._end(task) + self._length(tail))
        self.model.minimize(makespan)

    @property
    def variables(self) -> int:
        return len(self.model.proto.variables)

    def read(self, solver: cp_model.CpSolver) -> Timeline | None:
        """The whole timeline with the solver's orders in the window, every time computed again; None where they fail."""
        tasks, start = self.window.tasks, {task: solver.value(at) for task, at in self.start.items()}
        begin = np.array([start[task] for task in tasks.tolist()])
        rank = self.problem.kind_rank[tasks // self.problem.microbatches]
        order = np.lexsort((tasks, rank, self._lengths[tasks] > 0, begin))
        try:
            return self.window.replay(tasks[order], self._begin_s + begin[order] / self._scale)
        except OrderError:
            return None

    def _units(self, seconds: float) -> int:
        """Seconds; 0 for everything that ended before the window began."""
        return max(0, math.floor((seconds - self._begin_s) * self._scale + 1e-6))

    def _length(self, seconds: float) -> int:
        return math.floor(seconds * self._scale + 1e-6)

    def _end(self, task: int) -> cp_model.LinearExpr:
        return self.start[task] + int(self._lengths[task])

    def _add_tasks(self) -> None:
        window, on_resource = self.window, {}
        begins = window.timeline.start
        for task, release, tail in zip(
            window.tasks.tolist(), window.release.tolist(), window.tail.tolist(), strict=True
        ):
            length = int(self._lengths[task])
            latest = self._latest - length - self._length(tail)
            # rounded down, a release may pass what is left by a unit: then there is nothing shorter
            earliest = min(self._units(release), max(latest, 0))
            start = self.model.new_int_var(earliest, max(latest, earliest), "")
            self.start[task] = start
            self.model.add_hint(start, self._units(float(begins[task])))
            interval = self.model.new_fixed_size_interval_var(start, length, "")
            for resource in self.problem.resources[task // self.problem.microbatches].tolist():
                if resource >= 0 and not self._fixed[task]:
                    on_resource.setdefault(resource, []).append(interval)
                elif resource >= 0:
                    on_resource.setdefault(resource, [])
        self._add_resources(on_resource)

    def _add_resources(self, free: dict[int, list[cp_model.IntervalVar]]) -> None:
        """One task at a time on each resource; its fixed tasks keep their order."""
        tasks = self.window.tasks
        occupied = self.problem.resources[tasks // self.problem.microbatches]
        for resource, intervals in free.items():
            here = tasks[(occupied == resource).any(axis=1)]
            kept = here[self._fixed[here]].tolist()
            for before, after in pairwise(kept):
                self.model.add(self.start[after] >= self._end(before))
            if intervals:
                intervals += [
                    self.model.new_fixed_size_interval_var(self.start[task], int(self._lengths[task]), "")
                    for task in kept
                ]
                self.model.add_no_overlap(intervals)

    def _add_orders(self) -> None:
        """Dependencies inside, and each kind in the order of its microbatches that are interchangeable."""
        microbatches = self.problem.microbatches
        causes, effects = self.window.dependencies
        for cause, effect in zip(causes.tolist(), effects.tolist(), strict=True):
            self.model.add(self.start[effect] >= self._end(cause))
        occupies = (self.problem.resources >= 0).any(axis=1)
        for task, start in self.start.items():
            kind, m = divmod(task, microbatches)
            previous = kind * microbatches + int(self.problem.previous_in_bucket[m])
            if self.problem.previous_in_bucket[m] >= 0 and previous in self.start and occupies[kind]:
                self.model.add(start >= self._end(previous))

    def _add_leads(self) -> None:
        """Forward m of a source after the backward m − max_in_flight; in any order no more than that in between."""
        problem, cap = self.problem, self.problem.spec.max_in_flight
        if cap is None:
            return
        for stage in range(problem.stages):
            if problem.sources[stage]:
                continue
            if not problem.interchangeable:
                forwards = [problem.task(stage, FORWARD, m) for m in range(problem.microbatches)]
                spans = [
                    (self._begins(forward), self._ends(self._last(stage, m)), 1)
                    for m, forward in enumerate(forwards)
                ]
                self._fit(self._inside(spans), cap)
                continue
            for m in range(cap, problem.microbatches):
                forward, done = problem.task(stage, FORWARD, m), self._last(stage, m - cap)
                if forward in self.start and done in self.start:
                    self.model.add(self.start[forward] >= self._end(done))

    def _last(self, stage: int, m: int) -> int:
        return self.problem.task(stage, BACKWARD if self.problem.fused[stage, m] else WEIGHT, m)

    def _add_memory(self, mesh: int) -> None:
        """Constrains the bytes of the mesh at any time: activations within their limit, with buffers within memory_bytes."""
        problem = self.problem
        held = self._activations(mesh)
        room, limit = int(problem.activation_capacity[mesh]), int(problem.memory_limit[mesh])
        if room >= 0:
            self._fit(held, room)
        if limit >= 0:
            self._fit(
                held + self._buffers(mesh, problem.size_by_microbatch),
                limit - int(problem.static_bytes[mesh]),
            )
        if problem.receive_limit[mesh] >= 0:
            counted = np.where(problem.receiver_of_kind == mesh, 1, 0)
            counted = np.repeat(counted[:, None], problem.microbatches, axis=1)
            self._fit(self._buffers(mesh, counted), int(problem.receive_limit[mesh]))

    def _fit(self, held: list[tuple[_TimeExpr, _TimeExpr, int]], room: int) -> None:
        if not held or sum(size for _, _, size in held) <= room:
            return
        intervals = [
            self.model.new_interval_var(begin, self.model.new_int_var(0, self._latest, ""), end, "")
            for begin, end, _ in held
        ]
        self.model.add_cumulative(intervals, [size for _, _, size in held], room)

    def _activations(self, mesh: int) -> list[tuple[_TimeExpr, _TimeExpr, int]]:
        """(from, to, bytes) of what forwards keep for their backwards, and of what a recomputed forward brings back."""
        problem = self.problem
        spans = []
        for stage in np.flatnonzero(problem.mesh_of_stage == mesh).tolist():
            for m in self._held_microbatches(stage):
                activation = int(problem.activation_by_microbatch[stage, m])
                stash = int(problem.whole_stash_by_microbatch[stage, m])
                again = int(problem.rematerialised_by_microbatch[stage, m])
                forward, backward = problem.task(stage, FORWARD, m), problem.task(stage, BACKWARD, m)
                spans.append((self._begins(forward), self._ends(backward), activation))
                spans.append((self._begins(backward), self._ends(backward), again))
                if not problem.fused[stage, m]:
                    spans.append((self._ends(backward), self._ends(problem.task(stage, WEIGHT, m)), stash))
        return self._inside(spans)

    def _held_microbatches(self, stage: int) -> range:
        """The microbatches that a stage may hold at some time of the window."""
        if not self.problem.interchangeable:  # in whatever order they come
            return range(self.problem.microbatches)
        started = self.window.started
        last = BACKWARD if self.problem.fused[stage].all() else WEIGHT
        # the last backward that began before may still run
        first = max(int(started[self.problem.kind(stage, last)]) - 1, 0)
        return range(first, int(self.window.started_after[self.problem.kind(stage, FORWARD)]))

    def _buffers(self, mesh: int, sizes: np.ndarray) -> list[tuple[_TimeExpr, _TimeExpr, int]]:
        """(from, to, size) of what is received, until its last direct user ends, and sent, from its first maker."""
        problem, microbatches = self.problem, self.problem.microbatches
        spans = []
        started, after = self.window.started, self.window.started_after
        for kind in range(problem.compute_kinds, problem.kinds):
            receives, sends = problem.receiver_of_kind[kind] == mesh, problem.sender_of_kind[kind] == mesh
            if not sizes[kind].any() or not (receives or sends):
                continue
            users, makers = problem.dependents[kind], problem.dependencies[kind]
            least = min(int(started[k]) for k in (kind, *users, *makers))
            most = max(int(after[k]) for k in (kind, *users, *makers))
            for m in range(max(least - 1, 0), most) if problem.interchangeable else range(microbatches):
                task, size = kind * microbatches + m, int(sizes[kind, m])
                if not problem.exists[kind, m]:
                    continue
                if receives:
                    ends = [self._ends(user * microbatches + m) for user in users]
                    spans.append((self._begins(task), self._extreme(ends, latest=True), size))
                if sends:
                    ends = [self._ends(maker * microbatches + m) for maker in makers]
                    spans.append((self._extreme(ends, latest=False), self._ends(task), size))
        return self._inside(spans)

    def _begins(self, task: int) -> _TimeExpr:
        """The start of a task: 0 or its known start before the window, the very end behind it."""
        if task in self.start:
            return self.start[task]
        if self.window.timeline.rank[task] < self.window.first:
            return self._units(float(self.window.timeline.start[task]))
        return self._latest

    def _ends(self, task: int) -> _TimeExpr:
        if task in self.start:
            return self._end(task)
        if self.window.timeline.rank[task] < self.window.first:
            return self._units(float(self.window.timeline.end[task]))
        return self._latest

    def _extreme(self, times: list[_TimeExpr], *, latest: bool) -> _TimeExpr:
        """The latest or the earliest of several times."""
        if len(times) == 1:
            return times[0]
        numbers = [time for time in times if isinstance(time, int)]
        if len(numbers) == len(times):
            return max(numbers) if latest else min(numbers)
        result = self.model.new_int_var(0, max(self._latest, *numbers, 0), "")
        if latest:
            self.model.add_max_equality(result, times)
        else:
            self.model.add_min_equality(result, times)
        return result

    def _inside(
        self, spans: list[tuple[_TimeExpr, _TimeExpr, int]]
    ) -> list[tuple[_TimeExpr, _TimeExpr, int]]:
        """The intervals with a positive demand and length."""
        return [
            (begin, end, size)
            for begin, end, size in spans
            if size and not (isinstance(begin, int) and isinstance(end, int) and begin >= end)
        ]
