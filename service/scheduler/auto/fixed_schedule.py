"""Plans a schedule by name: its compute orders, a computed order of transfers, and a check of the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import failed
from service.scheduler.problem.memory import in_flight_violation, over_memory, peak_activation
from service.scheduler.problem.problem import Problem, build_problem
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.problem.timeline import Timeline, simulate
from service.scheduler.schedules.csv import fused_of_orders
from service.scheduler.schedules.registry import find_schedule, fitting_names
from service.scheduler.search.bounds import drop_refuted_bounds, lower_bounds
from service.scheduler.search.search import SearchResult, reaches_bound
from service.scheduler.search.transfer_order import improve_transfers, makespan_bound_of_orders

# The share of the budget that a named schedule may spend on the order of its transfers.
_TRANSFER_ORDER_SHARE = 0.1


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
    """What `auto` found, or a named plan of `spec` that is shorter: with its transfers ordered well, or with backwards
    split that the search keeps whole. What is found must have a bound that holds for these too."""
    if found.proven_optimal or found.truncated:
        return found
    named: list[tuple[str, Timeline]] = []
    notes: list[str] = []
    for name in fitting_names(spec)[:-1]:
        try:
            named.append((name, named_timeline(spec, name)))
        except SpecError:
            continue
        except Exception as error:
            notes.append(failed(f"schedule {name}", error))
    named.sort(key=lambda one: one[1].makespan)
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


def named_timeline(spec: PipelineSpec, name: str) -> Timeline:
    """The timeline of a named schedule on a spec; raises SpecError where it does not fit the placement or limits."""
    schedule = find_schedule(spec, name)
    if name == "csv":
        fused, inference = fused_of_orders(spec)
        problem = build_problem(spec, inference=inference).with_fused(fused)
    else:
        split = schedule.splits if spec.split_backward is None else spec.split_backward
        problem = build_problem(spec, split=split, inference=name == "inference")
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
        given = problem.spec.meshes[mesh]
        limit, room = given.activation_limit_bytes, int(problem.activation_capacity[mesh])
        peak, _ = peak_activation(problem, lane)
        if limit is not None and limit < peak:
            raise SpecError(
                f"schedule {name!r} holds {peak} bytes of activations on mesh {given.name!r}, over "
                f"its activation_limit_bytes {limit}: raise the limit to {peak}, or use schedule 'auto'"
            )
        if (
            0 <= room < peak
        ):  # by the order alone: an action that takes no time by the plan takes some when it runs
            raise SpecError(
                f"schedule {name!r} holds {peak} bytes of activations on mesh {given.name!r}, over the {room} that its "
                f"memory_bytes {given.memory_bytes} leave: raise it by {peak - room}, or use schedule 'auto'"
            )
        broken = in_flight_violation(problem, lane)
        if broken is not None:
            raise SpecError(f"schedule {name!r}: {broken}: raise max_in_flight, or use schedule 'auto'")
