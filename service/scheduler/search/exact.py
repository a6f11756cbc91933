"""The exact solver: OR-Tools CP-SAT on a whole problem or a window, for a shorter plan or a proof.

Model: starts of tasks, exclusive resources, memory, receive buffers. Microbatches are interchangeable, so every
kind runs them in order (exchange argument): no optimum is lost. Those of different length buckets are not: there a
kind runs in order those of one bucket, what is held is counted over time, and `keep_microbatch_order` restricts a
model to the order of its hint, for a shorter plan and no proof. Durations become integers, rounded down where no
scale is exact, which keeps the solver's bound a bound.
Deterministic: one worker, a fixed seed, and limits in the solver's own deterministic time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from service.scheduler.kernels import BACKWARD, FORWARD, WEIGHT
from service.scheduler.problem.memory import limited_posting_waits, posting_waits, send_buffer_waits
from service.scheduler.problem.problem import Problem
from service.scheduler.problem.timeline import OrderError, Timeline, order_by_start, retime
from service.scheduler.search.origin import SOLVER_SEED
from service.scheduler.search.windows import Window, WindowModel, cp_model_module

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    _Span = tuple[cp_model.LinearExprT, cp_model.LinearExprT, int]


def exact_model_size(problem: Problem) -> int:
    """About how many variables and literals the model has."""
    size = int(problem.exists.sum())
    if problem.inference:
        return size
    for mesh in range(problem.meshes):
        if problem.memory_limit[mesh] >= 0:  # what is held, and for how long
            at_mesh = (problem.sender_of_kind == mesh) | (problem.receiver_of_kind == mesh)
            size += 2 * int(problem.exists[at_mesh].sum())
        limit = int(problem.activation_limit[mesh])
        here = np.flatnonzero(problem.mesh_of_stage == mesh)
        if limit < 0:
            continue
        if not problem.interchangeable:
            size += 3 * len(here) * problem.microbatches
        elif len(here) == 1:
            size += problem.microbatches * min(
                problem.microbatches, limit // max(int(problem.activation[here[0]]), 1)
            )
        else:
            size += 3 * len(here) ** 2 * problem.microbatches**2 // 2
    return size


class ExactModel:
    """The model of a problem within the makespan of `hint`; times are integers, seconds times `scale`."""

    def __init__(
        self, problem: Problem, hint: Timeline, lengths: np.ndarray, scale: float, lower_bound_s: float
    ) -> None:
        self.problem, self.lengths = problem, lengths
        self.model = cp_model_module().CpModel()
        self.start: dict[int, cp_model.IntVar] = {}
        self._limits_buffers = bool((problem.receive_limit >= 0).any())
        self._limits_bytes = bool((problem.memory_limit >= 0).any()) and not problem.inference
        differ = not problem.interchangeable and not problem.inference
        self._counts_activations = differ and bool((problem.activation_capacity >= 0).any())
        self._models_transfers = problem.contended or self._limits_buffers or self._limits_bytes
        self.horizon = math.floor(hint.makespan * scale * (1 + 1e-12) + 1e-6)
        self._hint = np.floor(hint.start * scale + 1e-6).astype(np.int64)
        self._literals: dict[tuple[int, int], cp_model.IntVar] = {}
        self._add_tasks()
        self._add_precedences()
        if not problem.inference:
            self._add_memory()
        if self._limits_buffers:
            self._add_receive_buffers()
        if self._limits_bytes:
            for mesh in np.flatnonzero(problem.memory_limit >= 0).tolist():
                self._add_bytes(mesh)
        self._chain_literals()
        self._add_makespan(math.ceil(lower_bound_s * scale * (1 - 1e-12) - 1e-6))

    def within(self, deterministic_limit: float) -> float:
        """The deterministic time for which a solver of this model takes about as long as of one without limits of what is
        held over time, whose constraints the solver hardly counts, for `deterministic_limit`."""
        if self._limits_bytes:
            return deterministic_limit / _UNCOUNTED_WORK_OF_BYTES
        return deterministic_limit / (_UNCOUNTED_WORK_OF_ACTIVATIONS if self._counts_activations else 1.0)

    def _kinds(self) -> range:
        return range(self.problem.kinds if self._models_transfers else self.problem.compute_kinds)

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
                previous = kind * microbatches + int(problem.previous_in_bucket[m])
                if problem.previous_in_bucket[m] >= 0 and previous in self.start:
                    self.model.add(self.start[task] >= self._task_end(previous))
                for need in problem.dependencies[kind]:
                    self._add_precedence(task, need, m, 0)

    def _add_precedence(self, task: int, need: int, m: int, delay: int) -> None:
        before = need * self.problem.microbatches + m
        if not self.problem.exists[need, m]:
            return
        delay += int(self.lengths[need, m])
        if before in self.start:
            self.model.add(self.start[task] >= self.start[before] + delay)
            return
        for earlier in self.problem.dependencies[need]:  # an unmodelled transfer: its cause plus its length
            self._add_precedence(task, earlier, m, delay)

    def _task_end(self, task: int) -> cp_model.LinearExpr:
        return self.start[task] + int(self.lengths.reshape(-1)[task])

    def _last_op(self, stage: int, m: int) -> int:
        return BACKWARD if self.problem.fused[stage, m] else WEIGHT

    def _ending_task(self, stage: int, op: int, m: int) -> int:
        """The task with which `op` has ended: of a backward that is not split, the backward itself."""
        return self.problem.task(stage, min(op, self._last_op(stage, m)), m)

    def _add_memory(self) -> None:
        problem = self.problem
        cap = problem.spec.max_in_flight
        for stage in range(problem.stages):
            if cap is not None and not problem.sources[stage]:
                self._limit_in_flight(stage, WEIGHT, cap)
        if not problem.interchangeable:
            for mesh in np.flatnonzero(problem.activation_capacity >= 0).tolist():
                self._fit(self._activation_spans(mesh), int(problem.activation_capacity[mesh]))
            return
        for mesh in range(problem.meshes):
            limit = int(problem.activation_limit[mesh])
            here = np.flatnonzero(problem.mesh_of_stage == mesh).tolist()
            if limit < 0 or sum(int(problem.activation[s]) for s in here) * problem.microbatches <= limit:
                continue
            for stage in here:
                activation, stash = int(problem.activation[stage]), int(problem.stash[stage])
                if activation:
                    self._limit_in_flight(stage, BACKWARD, limit // activation)
                if stash:
                    self._limit_in_flight(stage, WEIGHT, 1 + (limit - activation) // stash)
            if len(here) == 1 and problem.fused[here[0]].all():
                continue  # the distance says it all
            for m in range(problem.microbatches):
                if len(here) == 1 and not problem.fused[here[0]].any():
                    self._limit_single_stage(here[0], m, limit)
                    continue
                for stage in here:
                    self._limit_shared_mesh(stage, m, here, limit)

    def _limit_in_flight(self, stage: int, ended: int, distance: int) -> None:
        """Forward m starts after action m − distance (of kind `ended`, or the whole backward) has ended.

        Microbatches that are not interchangeable come in any order: at no time more than `distance` are between the two.
        """
        if not self.problem.interchangeable:
            spans = [
                (
                    self.start[self.problem.task(stage, FORWARD, m)],
                    self._task_end(self._ending_task(stage, ended, m)),
                    1,
                )
                for m in range(self.problem.microbatches)
            ]
            self._fit(spans, distance)
            return
        for m in range(distance, self.problem.microbatches):
            forward = self.start[self.problem.task(stage, FORWARD, m)]
            self.model.add(forward >= self._task_end(self._ending_task(stage, ended, m - distance)))

    def _limit_single_stage(self, stage: int, m: int, limit: int) -> None:
        """One stage on the mesh: with `inputs` I ended before forward m, enough W must have ended, too."""
        problem = self.problem
        activation, stash = int(problem.activation[stage]), int(problem.stash[stage])
        forward = problem.task(stage, FORWARD, m)
        for inputs in range(m + 1):
            needed = activation * (m + 1) - limit - (activation - stash) * inputs
            if needed <= 0:
                return
            weights = -(-needed // stash) if stash else inputs + 1
            if weights > inputs:  # not even all of them would be enough (`_limit_shared_mesh` says so, too)
                continue
            weight = self._task_end(problem.task(stage, WEIGHT, weights - 1))
            room = self.model.add(self.start[forward] >= weight)
            if inputs < m:  # or I number `inputs` has ended as well
                room.only_enforce_if(~self._precedes(problem.task(stage, BACKWARD, inputs), forward))

    def _limit_shared_mesh(self, stage: int, m: int, here: list[int], limit: int) -> None:
        """Limits the bytes on the mesh when forward (stage, m) starts, by the tasks before it on the lane."""
        problem = self.problem
        forward = problem.task(stage, FORWARD, m)
        needed = int(problem.activation[stage]) * (m + 1) - limit  # to be given back before
        terms = []
        for other in here:
            activation, stash = int(problem.activation[other]), int(problem.stash[other])
            for n in range(m if other == stage else problem.microbatches):
                if problem.fused[other, n]:
                    gives = [(BACKWARD, activation)]
                else:
                    gives = [(BACKWARD, activation - stash), (WEIGHT, stash)]
                if other != stage:
                    gives.append((FORWARD, -activation))
                for op, given in gives:
                    before = self._precedes(problem.task(other, op, n), forward) if given else False
                    if before is True:
                        needed -= given
                    elif before is not False:
                        terms.append((before, given))
        if needed > sum(min(given, 0) for _, given in terms):
            self.model.add(sum(literal * given for literal, given in terms) >= needed)

    def _precedes(self, first: int, second: int) -> cp_model.IntVar | bool:
        """True where `first` runs before `second` on their mesh, or a literal of this order where it is open."""
        (kind, m), (other, n) = (divmod(task, self.problem.microbatches) for task in (first, second))
        if m <= n and self.problem.precedes[kind, other]:
            return True
        if n <= m and self.problem.precedes[other, kind]:
            return False
        if (second, first) in self._literals:
            return ~self._literals[second, first]
        if (first, second) not in self._literals:
            literal = self._literals[first, second] = self.model.new_bool_var("")
            self.model.add(self.start[second] >= self._task_end(first)).only_enforce_if(literal)
            self.model.add(self.start[first] >= self._task_end(second)).only_enforce_if(~literal)
        return self._literals[first, second]

    def _chain_literals(self) -> None:
        """Order is transitive over microbatches: a task before another is before the next of its kind, too."""
        microbatches = self.problem.microbatches
        for (first, second), literal in self._literals.items():
            if (first + 1) % microbatches and (first + 1, second) in self._literals:
                self.model.add_implication(self._literals[first + 1, second], literal)
            if (second + 1) % microbatches and (first, second + 1) in self._literals:
                self.model.add_implication(literal, self._literals[first, second + 1])

    def _add_receive_buffers(self) -> None:
        """A received tensor takes a buffer from the start of its transfer to the end of its last direct user."""
        problem, microbatches = self.problem, self.problem.microbatches
        for mesh in np.flatnonzero(problem.receive_limit >= 0).tolist():
            buffers = []
            for kind in range(problem.compute_kinds, problem.kinds):
                if problem.receiver_of_kind[kind] != mesh:
                    continue
                for m in np.flatnonzero(problem.exists[kind]).tolist():
                    size = self.model.new_int_var(0, self.horizon, "")
                    freed = self.model.new_int_var(0, self.horizon, "")
                    for user in problem.dependents[kind]:
                        if problem.exists[user, m]:
                            self.model.add(freed >= self._task_end(user * microbatches + m))
                    start = self.start[kind * microbatches + m]
                    buffers.append(self.model.new_interval_var(start, size, freed, ""))
            limit = int(problem.receive_limit[mesh])
            self.model.add_cumulative(buffers, [1] * len(buffers), limit)

    def _add_bytes(self, mesh: int) -> None:
        """Everything that a mesh holds at any time fits into memory_bytes: activations, stashes, tensors on their way."""
        problem, microbatches = self.problem, self.problem.microbatches
        spans = self._activation_spans(mesh)
        for kind in range(problem.compute_kinds, problem.kinds):
            for m in range(microbatches):
                size = int(problem.size_by_microbatch[kind, m])
                task = kind * microbatches + m
                if problem.receiver_of_kind[kind] == mesh:
                    used = [self._task_end(user * microbatches + m) for user in problem.dependents[kind]]
                    spans.append((self.start[task], self._extreme(used, latest=True), size))
                if problem.sender_of_kind[kind] == mesh:
                    made = [self._task_end(maker * microbatches + m) for maker in problem.dependencies[kind]]
                    spans.append((self._extreme(made, latest=False), self._task_end(task), size))
        self._fit(spans, int(problem.memory_limit[mesh] - problem.static_bytes[mesh]))

    def _activation_spans(self, mesh: int) -> list[_Span]:
        """(from, to, bytes) of activations, of what comes back for a backward, and of stashes."""
        problem, spans = self.problem, []
        activation, again = problem.activation_by_microbatch, problem.rematerialised_by_microbatch
        for stage in np.flatnonzero(problem.mesh_of_stage == mesh).tolist():
            for m in range(problem.microbatches):
                forward, backward = (self.start[problem.task(stage, op, m)] for op in (FORWARD, BACKWARD))
                end = self._task_end(problem.task(stage, BACKWARD, m))
                spans += [(forward, end, int(activation[stage, m])), (backward, end, int(again[stage, m]))]
                if not problem.fused[stage, m]:
                    last = self._task_end(problem.task(stage, WEIGHT, m))
                    spans.append((end, last, int(problem.whole_stash_by_microbatch[stage, m])))
        return spans

    def _fit(self, spans: list[_Span], room: int) -> None:
        """At no time the spans hold more than `room` together."""
        spans = [span for span in spans if span[2]]
        intervals = [
            self.model.new_interval_var(begin, self.model.new_int_var(0, self.horizon, ""), end, "")
            for begin, end, _ in spans
        ]
        self.model.add_cumulative(intervals, [size for _, _, size in spans], room)

    def _extreme(self, times: list[cp_model.LinearExpr], *, latest: bool) -> cp_model.LinearExprT:
        if len(times) == 1:
            return times[0]
        result = self.model.new_int_var(0, self.horizon, "")
        if latest:
            self.model.add_max_equality(result, times)
        else:
            self.model.add_min_equality(result, times)
        return result

    def _add_makespan(self, lower: int) -> None:
        makespan = self.model.new_int_var(min(lower, self.horizon), self.horizon, "makespan")
        for end in self._last_ends():
            self.model.add(makespan >= end)
        self.model.minimize(makespan)

    def _last_ends(self) -> list[cp_model.LinearExpr]:
        last = np.setdiff1d(np.arange(self.problem.microbatches), self.problem.previous_in_bucket).tolist()
        op = FORWARD if self.problem.inference else WEIGHT
        stages = range(self.problem.stages)
        return [self._task_end(self._ending_task(stage, op, m)) for stage in stages for m in last]

    def keep_microbatch_order(self, hint: Timeline) -> None:
        """Every kind runs its microbatches in the order in which the hint does."""
        kinds = hint.sequence // self.problem.microbatches
        for kind in self._kinds():
            for before, after in pairwise(hint.sequence[kinds == kind].tolist()):
                self.model.add(self.start[after] >= self._task_end(before))

    def keep_order(self, hint: Timeline, fixed: np.ndarray) -> None:
        """Tasks marked `fixed` stay in the hint's order on every resource."""
        problem = self.problem
        kinds = hint.sequence // problem.microbatches
        for resource in problem.exclusive_resources:
            here = hint.sequence[problem.kinds_on(resource)[kinds] & fixed[hint.sequence]].tolist()
            for before, after in pairwise(here):
                if (
                    not problem.interchangeable
                    or before // problem.microbatches != after // problem.microbatches
                ):
                    self.model.add(self.start[after] >= self._task_end(before))

    def end_before(self, latest: int) -> None:
        """Everything ends by `latest`, or there is no solution."""
        for end in self._last_ends():
            self.model.add(end <= latest)

    def read(self, solver: cp_model.CpSolver, scale: float) -> Timeline | None:
        """The solver's orders, timed again in seconds."""
        start = np.zeros(self.problem.tasks)
        for task, variable in self.start.items():
            start[task] = solver.value(variable) / scale
        if not self._models_transfers:
            self._place_transfers(start)
        sequence = order_by_start(self.problem, start)
        found = Timeline(self.problem, start, sequence)
        waits = [limited_posting_waits(found)] if self._limits_buffers else []
        if self._limits_bytes:
            waits = [posting_waits(found), send_buffer_waits(found)]
        try:
            return retime(self.problem, sequence, *waits)
        except OrderError:
            return None

    def _place_transfers(self, start: np.ndarray) -> None:
        """Uncontended transfers start when their causes end."""
        problem, microbatches = self.problem, self.problem.microbatches
        duration = problem.duration.reshape(-1)
        for kind in np.argsort(problem.kind_rank).tolist():
            if kind < problem.compute_kinds:
                continue
            for m in np.flatnonzero(problem.exists[kind]).tolist():
                needs = [
                    need * microbatches + m for need in problem.dependencies[kind] if problem.exists[need, m]
                ]
                start[kind * microbatches + m] = max((start[n] + duration[n] for n in needs), default=0.0)


EXACT_BOUND_NAME = "exact solver"
_MAX_EXACT_HORIZON = 2**40
_MIN_GAIN = 1e-7  # relative: less is not worth a rearrangement
_UNCOUNTED_WORK_OF_BYTES = 40.0
"""Seconds of a solver that watches bytes over those of another one with as much deterministic time: 215 to 325 beside 5 to
13 a unit, on named schedules of a U-Net within memory."""
_UNCOUNTED_WORK_OF_ACTIVATIONS = 5.0
"""The same of one that counts activations over time: 3 to 6 on four meshes, 16 microbatches and four buckets."""
_ROUNDED_HORIZON = 2**46  # rounding down then costs far less than the tolerance of times


@dataclass(frozen=True)
class ExactResult:
    """The result of the solver: a timeline (or None) and a lower bound on every makespan, in seconds."""

    timeline: Timeline | None
    lower_bound_s: float
    finished: bool


def solve(
    problem: Problem,
    hint: Timeline,
    *,
    lower_bound_s: float,
    deterministic_limit: float,
    strong: bool = False,
    keep_order: bool = False,
    expired: Callable[[], bool] | None = None,
) -> ExactResult:
    """Search for a timeline shorter than `hint`; `strong` propagates more at each node of the search.

    With `keep_order` microbatches come in the order of the hint, and the bound is none for other orders.
    """
    scale, lengths = integer_durations(problem)
    model = ExactModel(problem, hint, lengths, scale, lower_bound_s)
    if keep_order:
        model.keep_microbatch_order(hint)
    solver = _new_solver(model.within(deterministic_limit))
    solver.parameters.use_strong_propagation_in_disjunctive = strong
    status = _solve_until_expired(solver, model.model, expired)
    if not _is_solved(status):
        return ExactResult(None, lower_bound_s, status == cp_model_module().INFEASIBLE)
    bound = max(lower_bound_s, solver.best_objective_bound / scale)
    return ExactResult(model.read(solver, scale), bound, status == cp_model_module().OPTIMAL)


def rearrange(
    problem: Problem, hint: Timeline, fixed: np.ndarray, *, lower_bound_s: float, deterministic_limit: float
) -> tuple[Timeline | None, float]:
    """(a shorter timeline or None, deterministic time spent): `fixed` tasks keep their order on each resource."""
    scale, lengths = integer_durations(problem)
    model = ExactModel(problem, hint, lengths, scale, lower_bound_s)
    model.keep_order(hint, fixed)
    model.end_before(math.floor(hint.makespan * scale * (1 - _MIN_GAIN)))
    solver = _new_solver(model.within(deterministic_limit))
    # where nothing shorter exists, presolve may creep to that by one unit of time at a time
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model.model)
    found = model.read(solver, scale) if _is_solved(status) else None
    return found, solver.response_proto.deterministic_time


def rearrange_window(
    window: Window, fixed: np.ndarray, lengths: np.ndarray, scale: float, *, deterministic_limit: float
) -> tuple[Timeline | None, float]:
    """(a shorter timeline or None, deterministic time spent): only the window's tasks that are not `fixed` change order.

    The timeline that comes back was replayed from its orders. Its memory is for the caller to check: only the
    window's was seen.
    """
    model = WindowModel(window, fixed, lengths, scale, _MIN_GAIN)
    solver = _new_solver(deterministic_limit)
    solver.parameters.cp_model_presolve = False  # see `rearrange`
    status = solver.solve(model.model)
    found = model.read(solver) if _is_solved(status) else None
    return found, solver.response_proto.deterministic_time


def _is_solved(status: int) -> bool:
    cp_model = cp_model_module()
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _new_solver(deterministic_limit: float) -> cp_model.CpSolver:
    solver = cp_model_module().CpSolver()
    # one worker with little presolve is reproducible, and proves these models faster than a portfolio
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SOLVER_SEED
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.linearization_level = 0
    # most of the time would go there, and the literals of the model say what it finds
    solver.parameters.use_precedences_in_disjunctive_constraint = False
    solver.parameters.max_deterministic_time = deterministic_limit
    return solver


def _solve_until_expired(
    solver: cp_model.CpSolver, model: cp_model.CpModel, expired: Callable[[], bool] | None
) -> int:
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
    total = float(duration.sum())
    scale = _exact_scale(np.unique(duration).tolist(), total)
    if scale is not None:
        return scale, np.rint(duration * scale).astype(np.int64)
    scale = 2.0 ** min(math.floor(math.log2(_ROUNDED_HORIZON) - math.log2(total)), 1000)
    return scale, np.floor(duration * scale).astype(np.int64)


def _exact_scale(durations: list[float], total: float) -> float | None:
    """The least scale that makes integers of all durations; None where there is none of a useful size.

    Measured durations have nothing in common: their least common denominator soon passes every float.
    """
    denominator, divisor = 1, 0
    for given in durations:
        value = Fraction(given).limit_denominator(10**6)
        if float(value) != given:
            return None
        grown = math.lcm(denominator, value.denominator)
        divisor = math.gcd(divisor * (grown // denominator), value.numerator * (grown // value.denominator))
        denominator = grown
        # what is left can only make the scale larger
        if Fraction(total) * denominator >= _MAX_EXACT_HORIZON * max(divisor, 1):
            return None
    return denominator / (divisor or 1)
