"""Plans a schedule by name: its compute orders, a computed order of transfers, and a check of the limits.

The dispatcher serves the most urgent transfer that is ready; where transfers share ports or lanes, waiting for a
better one may pay. Tabu search moves transfers only, then the exact solver rearranges them. The result is never
longer than the order by urgency.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import failed
from service.scheduler.problem.memory import (
    in_flight_violation,
    keeps_memory_limits,
    keeps_receive_limits,
    over_memory,
    peak_activation,
)
from service.scheduler.problem.problem import Problem, build_problem
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.problem.timeline import Timeline, earliest_times, lane_edges, simulate
from service.scheduler.schedules.csv import fused_of_orders
from service.scheduler.schedules.registry import find_schedule, fitting_names
from service.scheduler.search import exact
from service.scheduler.search.bounds import drop_refuted_bounds, lower_bounds
from service.scheduler.search.search import SearchResult, reaches_bound
from service.scheduler.search.tabu import tabu_search

_TRANSFER_ORDER_SHARE = 0.1  # of the budget, for the order of the transfers of a named schedule
_MAX_TABU_TASK_ITERATIONS = 25_000_000  # tasks times iterations of one tabu search
_MAX_ITERATIONS = 30_000  # of one tabu search
_SEEDS = (1, 2, 3)
_MAX_SOLVER_TIME = 0.5  # deterministic time of the exact solver
_LARGEST_MODEL = 3_000  # size of the largest model that the exact solver rearranges


def plan_named(spec: PipelineSpec, budget_s: float, expired: Callable[[], bool] | None) -> SearchResult:
    """The timeline of the schedule that `spec` names, its transfers ordered well; raises SpecError where it does not fit."""
    greedy = named_timeline(spec, spec.schedule)
    timeline, notes = greedy, []
    try:
        timeline = improve_transfers(
            greedy, effort=min(budget_s * _TRANSFER_ORDER_SHARE, 1.0), stop=expired or (lambda: False)
        )
    except Exception as error:
        notes.append(failed("the search for an order of transfers", error))
    bounds, dropped = drop_refuted_bounds(lower_bounds(timeline.problem), timeline.makespan)
    bound = max(bounds.values(), default=0.0)
    return SearchResult(
        timeline=timeline,
        chosen=spec.schedule,
        lower_bound_s=bound,
        proven_optimal=reaches_bound(timeline.makespan, bound),
        truncated=False,
        notes=(*notes, *dropped),
        alternatives=((spec.schedule, greedy),),
    )


def prefer_shorter_named(
    found: SearchResult, spec: PipelineSpec, budget_s: float, expired: Callable[[], bool] | None
) -> SearchResult:
    """The result of `auto`, or a shorter plan of `spec` by a fixed schedule: with its transfers ordered well, or with
    backwards split that the search keeps whole. The bound of `found` must hold for fixed schedules too."""
    if found.proven_optimal or found.truncated:
        return found
    named: list[tuple[str, Timeline]] = []
    notes: list[str] = []
    built = build_problem(spec)
    for name in fitting_names(spec)[:-1]:
        try:
            named.append((name, named_timeline(spec, name, built)))
        except SpecError:
            continue
        except Exception as error:
            notes.append(failed(f"schedule {name}", error))
    named.sort(key=lambda plan: plan[1].makespan)
    for name, greedy in named[:1]:
        timeline = greedy
        if makespan_bound_of_orders(greedy) < found.timeline.makespan:
            timeline = improve_transfers(
                greedy, effort=min(budget_s * _TRANSFER_ORDER_SHARE, 1.0), stop=expired or (lambda: False)
            )
        if timeline.makespan < found.timeline.makespan * (1 - TOLERANCE):
            found = replace(
                found,
                timeline=timeline,
                chosen=name,
                proven_optimal=reaches_bound(timeline.makespan, found.lower_bound_s),
                alternatives=((found.chosen, found.timeline), *found.alternatives),
            )
    return replace(found, notes=(*found.notes, *notes))


def named_timeline(spec: PipelineSpec, name: str, built: Problem | None = None) -> Timeline:
    """The timeline of a named schedule on a spec; raises SpecError where it does not fit the placement or limits. `built` is
    a problem of that spec, or of one that differs in split_backward alone: it need not be built again."""
    schedule = find_schedule(spec, name)
    if name == "csv":
        fused, inference = fused_of_orders(spec)
        problem = build_problem(spec, inference=inference).with_fused(fused)
    else:
        split = schedule.splits if spec.split_backward is None else spec.split_backward
        inference = name == "inference"
        if built is None:
            problem = build_problem(spec, split=split, inference=inference)
        else:
            problem = built.in_form(spec, split=split, inference=inference)
    lanes = schedule.lanes(problem)
    check_order_limits(problem, lanes, name)
    timeline = simulate(problem, lanes)
    _check_memory(timeline, name)
    return timeline


def _check_memory(timeline: Timeline, name: str) -> None:
    for mesh, peak, limit in over_memory(timeline):
        raise SpecError(
            f"schedule {name!r} holds {peak} bytes on mesh {mesh!r}, over its memory_bytes {limit}: "
            f"raise memory_bytes to {peak}, or use schedule 'auto'"
        )


def check_order_limits(problem: Problem, lanes: list[np.ndarray], name: str) -> None:
    """Raise SpecError where the compute orders of a schedule break a memory limit or max_in_flight."""
    for mesh, lane in enumerate(lanes):
        spec = problem.spec.meshes[mesh]
        limit, room = spec.activation_limit_bytes, int(problem.activation_capacity[mesh])
        peak, _ = peak_activation(problem, lane)
        if limit is not None and limit < peak:
            raise SpecError(
                f"schedule {name!r} holds {peak} bytes of activations on mesh {spec.name!r}, over "
                f"its activation_limit_bytes {limit}: raise the limit to {peak}, or use schedule 'auto'"
            )
        if (
            0 <= room < peak
        ):  # by the order alone: an action that takes no time by the plan takes some when it runs
            raise SpecError(
                f"schedule {name!r} holds {peak} bytes of activations on mesh {spec.name!r}, over the {room} that its "
                f"memory_bytes {spec.memory_bytes} leave: raise it by {peak - room}, or use schedule 'auto'"
            )
        broken = in_flight_violation(problem, lane)
        if broken is not None:
            raise SpecError(f"schedule {name!r}: {broken}: raise max_in_flight, or use schedule 'auto'")


def improve_transfers(timeline: Timeline, *, effort: float, stop: Callable[[], bool]) -> Timeline:
    """A timeline with the same compute orders that is no longer; `effort` scales the work, 1 is about a second."""
    problem = timeline.problem
    if not problem.contended or effort <= 0:
        return timeline
    goal_s = makespan_bound_of_orders(timeline) * (1 + TOLERANCE)
    best = timeline
    iterations = int(effort * min(_MAX_ITERATIONS, _MAX_TABU_TASK_ITERATIONS / len(timeline.sequence)))
    for seed in _SEEDS:
        if best.makespan <= goal_s or stop():
            break
        found = tabu_search(
            problem, best, goal_s=goal_s, iterations=iterations, seed=seed, stop=stop, keep_compute=True
        )
        best = _shorter(best, found)
    if best.makespan > goal_s and not stop() and exact.exact_model_size(problem) <= _LARGEST_MODEL:
        compute = np.arange(problem.tasks) < problem.compute_tasks
        found, _ = exact.rearrange(
            problem, best, compute, lower_bound_s=0.0, deterministic_limit=effort * _MAX_SOLVER_TIME
        )
        if found is not None:
            best = _shorter(best, found)
    return best


def makespan_bound_of_orders(timeline: Timeline) -> float:
    """No order of transfers is shorter than the compute orders with transfers that occupy nothing."""
    problem = timeline.problem
    times = earliest_times(problem, problem.dependency_edges, lane_edges(timeline.lanes))
    return float((times.start + problem.duration.reshape(-1))[times.topological].max())


def _shorter(best: Timeline, found: Timeline) -> Timeline:
    shorter = found.makespan < best.makespan * (1 - TOLERANCE)
    return found if shorter and keeps_receive_limits(found) and keeps_memory_limits(found) else best
