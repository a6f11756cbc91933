"""A window of a timeline as a CP-SAT model: its size is that of the window, whatever lies before and behind.

Every kind runs its microbatches in order, as in the model of the whole problem (exact_model.py). What is held is
counted in bytes over time, buffers too where `memory_bytes` limit a mesh: as many intervals as tensors.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from service.scheduler.model.problem import BACKWARD, FORWARD, WEIGHT
from service.scheduler.model.timeline import OrderError, Timeline
from service.scheduler.search.windows import Window

_Time = cp_model.LinearExprT


class WindowModel:
    """The model of a window: shorter than it is, with `fixed` tasks of it in their order on every resource.

    Times are integers, from the window's own beginning, seconds times `scale`; `lengths` are those of the kinds.
    """

    def __init__(
        self, window: Window, fixed: np.ndarray, lengths: np.ndarray, scale: float, least_gain: float
    ) -> None:
        self.window, self.problem = window, window.timeline.problem
        self.model = cp_model.CpModel()
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
        """Of what was over before the window began, 0."""
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
        """One task at a time on each; of those that are fixed, each after the one before."""
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
        """Dependencies inside, and each kind in the order of its microbatches."""
        microbatches = self.problem.microbatches
        causes, effects = self.window.dependencies
        for cause, effect in zip(causes.tolist(), effects.tolist(), strict=True):
            self.model.add(self.start[effect] >= self._end(cause))
        occupies = (self.problem.resources >= 0).any(axis=1)
        for task, start in self.start.items():
            if task % microbatches and task - 1 in self.start and occupies[task // microbatches]:
                self.model.add(start >= self._end(task - 1))

    def _add_leads(self) -> None:
        """Forward m of a source after the backward m − max_in_flight."""
        problem, cap = self.problem, self.problem.spec.max_in_flight
        if cap is None:
            return
        for stage in range(problem.stages):
            if problem.sources[stage]:
                continue
            for m in range(cap, problem.microbatches):
                forward, done = problem.task(stage, FORWARD, m), self._last(stage, m - cap)
                if forward in self.start and done in self.start:
                    self.model.add(self.start[forward] >= self._end(done))

    def _last(self, stage: int, m: int) -> int:
        return self.problem.task(stage, BACKWARD if self.problem.fused[stage, m] else WEIGHT, m)

    def _add_memory(self, mesh: int) -> None:
        """What the mesh holds at any time fits: activations into their room, with buffers into memory_bytes."""
        problem = self.problem
        held = self._activations(mesh)
        room, limit = int(problem.activation_room[mesh]), int(problem.memory_limit[mesh])
        if room >= 0:
            self._fit(held, room)
        if limit >= 0:
            self._fit(held + self._buffers(mesh, problem.size), limit - int(problem.static_bytes[mesh]))
        if problem.receive_limit[mesh] >= 0:
            counted = np.where(problem.receiver_of_kind == mesh, 1, 0)
            self._fit(self._buffers(mesh, counted), int(problem.receive_limit[mesh]))

    def _fit(self, held: list[tuple[_Time, _Time, int]], room: int) -> None:
        if not held or sum(size for _, _, size in held) <= room:
            return
        intervals = [
            self.model.new_interval_var(begin, self.model.new_int_var(0, self._latest, ""), end, "")
            for begin, end, _ in held
        ]
        self.model.add_cumulative(intervals, [size for _, _, size in held], room)

    def _activations(self, mesh: int) -> list[tuple[_Time, _Time, int]]:
        """(from, to, bytes) of what forwards keep for their backwards, and of what a recomputed forward brings back."""
        problem = self.problem
        spans = []
        for stage in np.flatnonzero(problem.mesh_of_stage == mesh).tolist():
            activation, stash = int(problem.activation[stage]), int(problem.whole_stash[stage])
            again = int(problem.rematerialised[stage])
            for m in self._held_microbatches(stage):
                forward, backward = problem.task(stage, FORWARD, m), problem.task(stage, BACKWARD, m)
                spans.append((self._begins(forward), self._ends(backward), activation))
                spans.append((self._begins(backward), self._ends(backward), again))
                if not problem.fused[stage, m]:
                    spans.append((self._ends(backward), self._ends(problem.task(stage, WEIGHT, m)), stash))
        return self._inside(spans)

    def _held_microbatches(self, stage: int) -> range:
        """The microbatches that a stage may hold at some time of the window."""
        started = self.window.started
        last = BACKWARD if self.problem.fused[stage].all() else WEIGHT
        # the last backward that began before may still run
        first = max(int(started[self.problem.kind(stage, last)]) - 1, 0)
        return range(first, int(self.window.started_after[self.problem.kind(stage, FORWARD)]))

    def _buffers(self, mesh: int, sizes: np.ndarray) -> list[tuple[_Time, _Time, int]]:
        """(from, to, size) of what is received, until its last direct user ends, and sent, from its first maker."""
        problem, microbatches = self.problem, self.problem.microbatches
        spans = []
        started, after = self.window.started, self.window.started_after
        for kind in range(problem.compute_kinds, problem.kinds):
            size = int(sizes[kind])
            receives, sends = problem.receiver_of_kind[kind] == mesh, problem.sender_of_kind[kind] == mesh
            if not size or not (receives or sends):
                continue
            users, makers = problem.dependents[kind], problem.dependencies[kind]
            least = min(int(started[k]) for k in (kind, *users, *makers))
            most = max(int(after[k]) for k in (kind, *users, *makers))
            for m in range(max(least - 1, 0), most):
                task = kind * microbatches + m
                if not problem.exists[kind, m]:
                    continue
                if receives:
                    ends = [self._ends(user * microbatches + m) for user in users]
                    spans.append((self._begins(task), self._extreme(ends, latest=True), size))
                if sends:
                    ends = [self._ends(maker * microbatches + m) for maker in makers]
                    spans.append((self._extreme(ends, latest=False), self._ends(task), size))
        return self._inside(spans)

    def _begins(self, task: int) -> _Time:
        """When a task begins; of one before the window 0 or when it did, of one behind it the very end."""
        if task in self.start:
            return self.start[task]
        if self.window.timeline.rank[task] < self.window.first:
            return self._units(float(self.window.timeline.start[task]))
        return self._latest

    def _ends(self, task: int) -> _Time:
        if task in self.start:
            return self._end(task)
        if self.window.timeline.rank[task] < self.window.first:
            return self._units(float(self.window.timeline.end[task]))
        return self._latest

    def _extreme(self, times: list[_Time], *, latest: bool) -> _Time:
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

    def _inside(self, spans: list[tuple[_Time, _Time, int]]) -> list[tuple[_Time, _Time, int]]:
        """Those that take something for some time."""
        return [
            (begin, end, size)
            for begin, end, size in spans
            if size and not (isinstance(begin, int) and isinstance(end, int) and begin >= end)
        ]
