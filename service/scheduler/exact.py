"""The exact solver: OR-Tools CP-SAT on the whole problem, from a good plan to a better one or a proof.

Deterministic: one worker, a fixed seed, and limits in the solver's own deterministic time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from service.scheduler.problem import BACKWARD, FORWARD, WEIGHT, Problem
from service.scheduler.timeline import OrderError, Timeline, order_by_start, retime

_LARGEST_HORIZON = 2**40
_LEAST_GAIN = 1e-7  # relative: less is not worth a rearrangement
_ROUNDED_HORIZON = 2**46  # rounding down then costs far less than the tolerance of times


@dataclass(frozen=True)
class Exact:
    """What the solver found: a timeline (or None) and a lower bound on every makespan, in seconds."""

    timeline: Timeline | None
    lower_bound_s: float
    finished: bool


def solve(
    problem: Problem,
    hint: Timeline,
    *,
    lower_bound_s: float,
    deterministic_limit: float,
    expired: Callable[[], bool] | None = None,
) -> Exact:
    """Search for a timeline shorter than `hint`. Microbatches are alike, so every kind runs them in order."""
    scale, lengths = integer_durations(problem)
    model = _Model(problem, hint, lengths, scale, lower_bound_s)
    solver = _new_solver(deterministic_limit)
    status = _run(solver, model.model, expired)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, lower_bound_s, status == cp_model.INFEASIBLE)
    bound = max(lower_bound_s, solver.best_objective_bound / scale)
    return Exact(model.read(solver, scale), bound, status == cp_model.OPTIMAL)


def rearrange(
    problem: Problem, hint: Timeline, fixed: np.ndarray, *, lower_bound_s: float, deterministic_limit: float
) -> tuple[Timeline | None, float]:
    """(a shorter timeline or None, deterministic time spent): `fixed` tasks keep their order on each resource."""
    scale, lengths = integer_durations(problem)
    model = _Model(problem, hint, lengths, scale, lower_bound_s)
    model.keep_order(hint, fixed)
    model.end_before(math.floor(hint.makespan * scale * (1 - _LEAST_GAIN)))
    solver = _new_solver(deterministic_limit)
    # where nothing shorter exists, presolve may creep to that by one unit of time at a time
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model.model)
    found = model.read(solver, scale) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, solver.response_proto.deterministic_time


def _new_solver(deterministic_limit: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    # one worker with little presolve is reproducible, and proves these models faster than a portfolio
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.linearization_level = 0
    solver.parameters.max_deterministic_time = deterministic_limit
    return solver


def model_size(problem: Problem) -> int:
    """About how many literals the solver's model has."""
    size = int(problem.exists.sum())
    for mesh in range(problem.meshes):
        if problem.activation_limit[mesh] >= 0 and not problem.inference:
            here = int((problem.mesh_of_stage == mesh).sum())
            size += here * problem.microbatches**2 * (1 + 3 * (here - 1) + 1)
    return size


def _run(solver: cp_model.CpSolver, model: cp_model.CpModel, expired: Callable[[], bool] | None) -> int:
    if expired is None:
        return solver.solve(model)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            if expired():
                solver.stop_search()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return solver.solve(model)
    finally:
        done.set()
        watcher.join()


def integer_durations(problem: Problem) -> tuple[float, np.ndarray]:
    """(scale, int[kinds, microbatches]): durations times scale, rounded down where no scale is exact.

    Rounding down keeps the solver's bound a bound.
    """
    duration = problem.duration
    values = [Fraction(value).limit_denominator(10**6) for value in np.unique(duration).tolist()]
    denominator = math.lcm(*(value.denominator for value in values))
    numerators = [value.numerator * (denominator // value.denominator) for value in values]
    divisor = math.gcd(*numerators) or 1
    scale = denominator / divisor
    exact = all(
        float(value) == given for value, given in zip(values, np.unique(duration).tolist(), strict=True)
    )
    if exact and duration.sum() * scale < _LARGEST_HORIZON:
        return scale, np.rint(duration * scale).astype(np.int64)
    scale = 2.0 ** math.floor(math.log2(_ROUNDED_HORIZON / duration.sum()))
    return scale, np.floor(duration * scale).astype(np.int64)


class _Model:
    def __init__(
        self, problem: Problem, hint: Timeline, lengths: np.ndarray, scale: float, lower_bound_s: float
    ) -> None:
        self.problem, self.lengths = problem, lengths
        self.model = cp_model.CpModel()
        self.start: dict[int, cp_model.IntVar] = {}
        self.transfers_modelled = problem.contended
        self.horizon = math.floor(hint.makespan * scale * (1 + 1e-12) + 1e-6)
        self._hint = np.floor(hint.start * scale + 1e-6).astype(np.int64)
        self._add_tasks()
        self._add_precedences()
        self._add_memory()
        self._add_makespan(math.ceil(lower_bound_s * scale * (1 - 1e-12) - 1e-6))

    def _kinds(self) -> range:
        return range(self.problem.kinds if self.transfers_modelled else 3 * self.problem.stages)

    def _add_tasks(self) -> None:
        problem, microbatches = self.problem, self.problem.microbatches
        on_resource: dict[int, list[cp_model.IntervalVar]] = {}
        for kind in self._kinds():
            for m in np.flatnonzero(problem.exists[kind]).tolist():
                task, length = kind * microbatches + m, int(self.lengths[kind, m])
                start = self.model.new_int_var(0, self.horizon - length, f"t{task}")
                self.start[task] = start
                self.model.add_hint(start, int(self._hint[task]))
                interval = self.model.new_fixed_size_interval_var(start, length, f"i{task}")
                for resource in problem.resources[kind].tolist():
                    if resource >= 0:
                        on_resource.setdefault(resource, []).append(interval)
        for intervals in on_resource.values():
            self.model.add_no_overlap(intervals)

    def _add_precedences(self) -> None:
        problem, microbatches = self.problem, self.problem.microbatches
        for kind in self._kinds():
            for m in np.flatnonzero(problem.exists[kind]).tolist():
                task = kind * microbatches + m
                if m and task - 1 in self.start:
                    self.model.add(self.start[task] >= self.start[task - 1] + int(self.lengths[kind, m - 1]))
                for need in problem.dependencies[kind]:
                    self._after(task, need, m, 0)

    def _after(self, task: int, need: int, m: int, delay: int) -> None:
        before = need * self.problem.microbatches + m
        if not self.problem.exists[need, m]:
            return
        delay += int(self.lengths[need, m])
        if before in self.start:
            self.model.add(self.start[task] >= self.start[before] + delay)
            return
        for earlier in self.problem.dependencies[need]:  # an unmodelled transfer: its cause plus its length
            self._after(task, earlier, m, delay)

    def _end(self, stage: int, op: int, m: int) -> cp_model.LinearExpr:
        task = self.problem.task(stage, op, m)
        return self.start[task] + int(self.lengths[3 * stage + op, m])

    def _last_op(self, stage: int, m: int) -> int:
        return BACKWARD if self.problem.fused[stage, m] else WEIGHT

    def _add_memory(self) -> None:
        problem = self.problem
        if problem.inference:
            return
        cap = problem.spec.max_in_flight
        for stage in range(problem.stages):
            if cap is not None and not problem.sources[stage]:
                self._space(stage, FORWARD, WEIGHT, cap)
        for mesh in range(problem.meshes):
            limit = int(problem.activation_limit[mesh])
            here = np.flatnonzero(problem.mesh_of_stage == mesh).tolist()
            if limit < 0 or sum(int(problem.activation[s]) for s in here) * problem.microbatches <= limit:
                continue
            for stage in here:
                activation, stash = int(problem.activation[stage]), int(problem.stash[stage])
                if activation:
                    self._space(stage, FORWARD, BACKWARD, limit // activation)
                if stash:
                    self._space(stage, FORWARD, WEIGHT, 1 + (limit - activation) // stash)
            for stage in here:
                for m in range(problem.microbatches):
                    self._add_room(stage, m, here, limit)

    def _add_room(self, stage: int, m: int, here: list[int], limit: int) -> None:
        """What is held on the mesh when forward (stage, m) starts, counted by what comes before it on the lane."""
        problem = self.problem
        forward = self.start[problem.task(stage, FORWARD, m)]
        most = int(problem.activation[stage])
        needed = most * (m + 1) - limit  # to be given back before
        terms = []
        for other in here:
            activation, stash = int(problem.activation[other]), int(problem.stash[other])
            for n in range(problem.microbatches):
                whole = bool(problem.fused[other, n])
                if other == stage and n >= m:
                    break
                gives = [(BACKWARD, activation if whole else activation - stash)]
                gives += [] if whole else [(WEIGHT, stash)]
                for op, given in gives:
                    if given:
                        terms.append((self._before(other, op, n, forward), given))
                if other != stage and activation:
                    taken = self._before(other, FORWARD, n, forward)
                    later = self.start[problem.task(other, FORWARD, n)]
                    self.model.add(later >= self._end(stage, FORWARD, m)).only_enforce_if(~taken)
                    terms.append((taken, -activation))
        if needed > 0 or any(weight < 0 for _, weight in terms):
            self.model.add(sum(literal * weight for literal, weight in terms) >= needed)

    def _before(self, stage: int, op: int, m: int, forward: cp_model.IntVar) -> cp_model.IntVar:
        literal = self.model.new_bool_var("")
        self.model.add(forward >= self._end(stage, op, m)).only_enforce_if(literal)
        return literal

    def _space(self, stage: int, op: int, ended: int, distance: int) -> None:
        """Action m starts after action m − distance (of kind `ended`, or the whole backward) has ended."""
        for m in range(distance, self.problem.microbatches):
            last = min(ended, self._last_op(stage, m - distance))
            self.model.add(
                self.start[self.problem.task(stage, op, m)] >= self._end(stage, last, m - distance)
            )

    def _add_makespan(self, lower: int) -> None:
        problem, last = self.problem, self.problem.microbatches - 1
        makespan = self.model.new_int_var(min(lower, self.horizon), self.horizon, "makespan")
        for stage in range(problem.stages):
            op = FORWARD if problem.inference else self._last_op(stage, last)
            self.model.add(makespan >= self._end(stage, op, last))
        self.model.minimize(makespan)

    def keep_order(self, hint: Timeline, fixed: np.ndarray) -> None:
        """Tasks marked `fixed` stay in the hint's order on every resource."""
        problem = self.problem
        kinds = hint.sequence // problem.microbatches
        lengths = self.lengths.reshape(-1)
        for resource in np.unique(problem.resources[problem.resources >= 0]).tolist():
            here = hint.sequence[
                (problem.resources == resource).any(axis=1)[kinds] & fixed[hint.sequence]
            ].tolist()
            for before, after in pairwise(here):
                if before // problem.microbatches != after // problem.microbatches:
                    self.model.add(self.start[after] >= self.start[before] + int(lengths[before]))

    def end_before(self, latest: int) -> None:
        """Everything ends by `latest`, or there is no solution."""
        last = self.problem.microbatches - 1
        for stage in range(self.problem.stages):
            op = FORWARD if self.problem.inference else self._last_op(stage, last)
            self.model.add(self._end(stage, op, last) <= latest)

    def read(self, solver: cp_model.CpSolver, scale: float) -> Timeline | None:
        """The solver's orders, timed again in seconds."""
        start = np.zeros(self.problem.tasks)
        for task, variable in self.start.items():
            start[task] = solver.value(variable) / scale
        if not self.transfers_modelled:
            self.place_transfers(start)
        try:
            return retime(self.problem, order_by_start(self.problem, start))
        except OrderError:
            return None

    def place_transfers(self, start: np.ndarray) -> None:
        """Uncontended transfers start when their causes end."""
        problem, microbatches = self.problem, self.problem.microbatches
        duration = problem.duration.reshape(-1)
        for kind in np.argsort(problem.kind_rank).tolist():
            if kind < 3 * problem.stages:
                continue
            for m in np.flatnonzero(problem.exists[kind]).tolist():
                needs = [
                    need * microbatches + m for need in problem.dependencies[kind] if problem.exists[need, m]
                ]
                start[kind * microbatches + m] = max((start[n] + duration[n] for n in needs), default=0.0)
