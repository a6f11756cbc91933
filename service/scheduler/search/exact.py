"""The exact solver: OR-Tools CP-SAT on the whole problem, from a good plan to a better one or a proof.

Deterministic: one worker, a fixed seed, and limits in the solver's own deterministic time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from ortools.sat.python import cp_model

from service.scheduler.model.problem import Problem
from service.scheduler.model.timeline import Timeline
from service.scheduler.search.exact_model import ExactModel
from service.scheduler.search.origin import SOLVER_SEED
from service.scheduler.search.window_model import WindowModel
from service.scheduler.search.windows import Window

NAME = "exact solver"
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
    strong: bool = False,
    expired: Callable[[], bool] | None = None,
) -> Exact:
    """Search for a timeline shorter than `hint`; `strong` propagates more at each node of the search."""
    scale, lengths = integer_durations(problem)
    model = ExactModel(problem, hint, lengths, scale, lower_bound_s)
    solver = _new_solver(deterministic_limit)
    solver.parameters.use_strong_propagation_in_disjunctive = strong
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
    model = ExactModel(problem, hint, lengths, scale, lower_bound_s)
    model.keep_order(hint, fixed)
    model.end_before(math.floor(hint.makespan * scale * (1 - _LEAST_GAIN)))
    solver = _new_solver(deterministic_limit)
    # where nothing shorter exists, presolve may creep to that by one unit of time at a time
    solver.parameters.cp_model_presolve = False
    status = solver.solve(model.model)
    found = model.read(solver, scale) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, solver.response_proto.deterministic_time


def rearrange_window(
    window: Window, fixed: np.ndarray, lengths: np.ndarray, scale: float, *, deterministic_limit: float
) -> tuple[Timeline | None, float]:
    """(a shorter timeline or None, deterministic time spent): only the window's tasks that are not `fixed` change order.

    The timeline that comes back was replayed from its orders. Its memory is for the caller to check: only the
    window's was seen.
    """
    model = WindowModel(window, fixed, lengths, scale, _LEAST_GAIN)
    solver = _new_solver(deterministic_limit)
    solver.parameters.cp_model_presolve = False  # see `rearrange`
    status = solver.solve(model.model)
    found = model.read(solver) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else None
    return found, solver.response_proto.deterministic_time


def _new_solver(deterministic_limit: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
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
        if Fraction(total) * denominator >= _LARGEST_HORIZON * max(divisor, 1):
            return None
    return denominator / (divisor or 1)
