"""From a spec to a proven plan: picks the schedule, simulates, compiles, verifies."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.least import honest, least_makespan, splits
from service.scheduler.model.defects import SchedulerDefect, defect
from service.scheduler.model.dispatcher import needed_receive_buffers
from service.scheduler.model.memory import (
    in_flight_violation,
    keeps_memory,
    over_memory,
    peak_activation,
    peak_receive_buffers,
)
from service.scheduler.model.problem import Problem, build_problem
from service.scheduler.model.spec import PipelineSpec, SpecError, check_spec
from service.scheduler.model.timeline import Timeline, simulate
from service.scheduler.plan import Plan, make_plan_from
from service.scheduler.programs.compile import compile_programs
from service.scheduler.programs.replay import Replay
from service.scheduler.programs.verify import check_slots, verify
from service.scheduler.recomputation import (
    Choice,
    candidates,
    cheapest,
    keep_whole,
    may_recompute,
    must_recompute,
    with_choice,
)
from service.scheduler.schedules import AUTO, find_schedule, fitting_names
from service.scheduler.schedules.csv_orders import fused_of_orders
from service.scheduler.search.auto import SEARCHED, Found, attains, search
from service.scheduler.search.bounds import lower_bound, lower_bounds, settle
from service.scheduler.search.memory_saving import save_memory
from service.scheduler.search.robustness import Slack
from service.scheduler.search.tabu import tabu_search
from service.scheduler.search.transfer_order import improve_transfers
from worker.program import Instruction

# What a proven plan may spend of the budget on each try to hold fewer microbatches.
_LESS_MEMORY_SHARE = 0.05
# The share of the budget that a named schedule may spend on the order of its transfers.
_TRANSFERS_SHARE = 0.1


def make_plan(
    spec: PipelineSpec, *, budget_s: float = 10.0, expired: Callable[[], bool] | None = None
) -> Plan:
    """The plan of a spec; raises SpecError when there is none.

    `budget_s` is how long `auto` may search, counted in work, so that the same spec gives the same
    plan; 0 gives the best constructive plan. `expired` is a wall-clock deadline: once it returns
    True the search ends and the plan says `truncated`.
    """
    with _collector_paused():
        found = _find(spec, budget_s, expired)
        found, programs, played = _verified(spec, found)
        return make_plan_from(
            found.timeline,
            chosen=found.chosen,
            lower_bound_s=min(found.lower_bound_s, found.timeline.makespan),
            # of a timeline that the programs do not keep (contention none), nothing is proven
            proven_optimal=found.proven_optimal
            and attains(played.serialised_makespan_s, found.timeline.makespan),
            recomputed=found.recomputed,
            programs_makespan_s=played.serialised_makespan_s,
            truncated=found.truncated,
            notes=found.notes,
            programs=programs,
        )


def _verified(spec: PipelineSpec, found: Found) -> tuple[Found, dict[str, list[Instruction]], Replay]:
    """The found timeline with its proven programs; where the proof fails, the best of the others that pass."""
    while True:
        try:
            programs = compile_programs(found.timeline)
            played = verify(with_choice(spec, found.recomputed), programs)
            check_slots(found.timeline, played)
            return found, programs, played
        except Exception as error:
            if not found.others:
                raise
            note = defect(
                f"a plan did not pass: {type(error).__name__}: {error}; another one was taken", error
            )
            (chosen, timeline), *others = found.others
            found = replace(
                found,
                timeline=timeline,
                chosen=chosen,
                proven_optimal=attains(timeline.makespan, found.lower_bound_s),
                notes=(*found.notes, note),
                others=tuple(others),
            )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan is up to a million small objects without cycles: walking them again and again doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile_kernels() -> None:
    """Compile what planning runs, or load it from the disk, before anybody waits for a plan."""
    spec = PipelineSpec.model_validate(
        {
            "microbatches": 3,
            "meshes": [
                {"name": "m0", "activation_limit_bytes": 2, "receive_buffer_limit": 2},
                {"name": "m1"},
            ],
            "stages": [
                {
                    "name": f"s{i}",
                    "mesh": f"m{i}",
                    "forward_s": 1.0,
                    "backward_input_s": 1.5,
                    "activation_bytes": 1,
                }
                for i in range(2)
            ],
            "edges": [{"source": "s0", "target": "s1", "forward_s": 0.7, "backward_s": 0.9}],
            "network": {"contention": "half-duplex"},
        }
    )
    make_plan(spec, budget_s=0.05)
    timeline = find_timeline(spec.model_copy(update={"schedule": "1f1b"}), budget_s=0.0)
    tabu_search(timeline.problem, timeline, goal_s=0.0, iterations=5, seed=1, stop=lambda: False)


def find_timeline(spec: PipelineSpec, *, budget_s: float) -> Timeline:
    """The timeline of the plan of a spec, without programs."""
    return _find(spec, budget_s, None).timeline


def _find(spec: PipelineSpec, budget_s: float, expired: Callable[[], bool] | None) -> Found:
    check_spec(spec)
    names = may_recompute(spec)
    if spec.schedule != AUTO:
        choice = cheapest(names, lambda some: named_timeline(with_choice(spec, some), spec.schedule).makespan)
        found = _named(with_choice(spec, choice), budget_s, expired)
    elif names:
        found = _auto_with_choice(spec, names, budget_s, expired)
    else:
        decided = with_choice(spec, ())
        found = honest(_auto(decided, budget_s, expired), decided)
        choice = frozenset()
    chosen = must_recompute(spec).union(found.recomputed if spec.schedule == AUTO else choice)
    return replace(found, recomputed=tuple(sorted(chosen)))


def _auto_with_choice(
    spec: PipelineSpec, names: list[str], budget_s: float, expired: Callable[[], bool] | None
) -> Found:
    """The best plan over choices of stages that recompute; never worse than with none or with all of them."""
    failed: list[SpecError] = []

    def plan(choice: Choice, seconds: float) -> Found | None:
        decided = with_choice(spec, choice)
        try:
            check_spec(decided)
            return replace(_auto(decided, seconds, expired), recomputed=tuple(sorted(choice)))
        except SpecError as error:
            failed.append(error)
            return None

    def judge(choice: Choice) -> float:
        found = plan(choice, 0.0)
        return math.inf if found is None else found.timeline.makespan

    choices = candidates(names, judge)
    failed.clear()
    bound = least_makespan(spec)
    best: Found | None = None
    bounds = []
    truncated = False
    for choice in choices:
        if best is not None and attains(best.timeline.makespan, bound):
            break
        found = plan(choice, budget_s / len(choices))
        if found is None:
            continue
        truncated = truncated or found.truncated
        bounds.append(honest(found, with_choice(spec, choice)).lower_bound_s)
        if best is None or found.timeline.makespan < best.timeline.makespan * (1 - TOLERANCE):
            best = found
    if best is None:
        raise failed[0]
    if len(bounds) + len(failed) == 2 ** len(names):
        bound = max(bound, min(bounds))
    bound = min(bound, best.timeline.makespan)
    return replace(
        best,
        lower_bound_s=bound,
        proven_optimal=attains(best.timeline.makespan, bound),
        truncated=truncated,
    )


def _named(spec: PipelineSpec, budget_s: float, expired: Callable[[], bool] | None) -> Found:
    greedy = named_timeline(spec, spec.schedule)
    timeline, notes = greedy, []
    try:
        timeline = improve_transfers(
            greedy, effort=min(budget_s * _TRANSFERS_SHARE, 1.0), stop=expired or (lambda: False)
        )
    except Exception as error:
        notes.append(_failed("the search for an order of transfers", error))
    bounds, dropped = settle(lower_bounds(timeline.problem), timeline.makespan)
    bound = max(bounds.values(), default=0.0)
    return Found(
        timeline=timeline,
        chosen=spec.schedule,
        lower_bound_s=bound,
        proven_optimal=attains(timeline.makespan, bound),
        truncated=False,
        notes=(*notes, *dropped),
        others=((spec.schedule, greedy),),
    )


def _auto(spec: PipelineSpec, budget_s: float, expired: Callable[[], bool] | None) -> Found:
    split = splits(spec)
    problem = build_problem(spec, split=split, inference=False)
    whole = keep_whole(problem)
    seeds: list[tuple[str, Timeline]] = []
    notes: list[str] = []
    for name in fitting_names(spec)[:-1]:
        for form in (spec, spec.model_copy(update={"split_backward": split})):
            try:
                seeds.append((name, named_timeline(form, name)))
            except SpecError:
                continue
            except Exception as error:
                notes.append(_failed(f"schedule {name}", error))
            if spec.split_backward is not None:
                break  # both forms are the same
    if whole is not problem:  # what splits there is no plan of the problem that is searched
        problem = whole
        seeds = [seed for seed in seeds if not (whole.fused & ~seed[1].problem.fused).any()]
    seeds.sort(key=lambda seed: seed[1].makespan)
    try:
        found = search(problem, seeds, budget_s=budget_s, expired=expired)
    except Exception as error:
        if not seeds:
            raise
        name, timeline = seeds[0]
        found = Found(
            timeline=timeline,
            chosen=name,
            lower_bound_s=0.0,
            proven_optimal=False,
            truncated=False,
            notes=(_failed("the search", error),),
        )
    if found is None:
        raise SpecError(_no_plan_message(problem))
    found = replace(found, notes=(*notes, *found.notes), others=((found.chosen, found.timeline), *seeds))
    try:
        return _with_less_memory(found, spec, split, budget_s, expired)
    except Exception as error:
        return replace(found, notes=(*found.notes, _failed("saving memory", error)))


def _failed(what: str, error: Exception) -> str:
    if isinstance(error, SchedulerDefect):
        raise error
    return defect(f"{what} failed with {type(error).__name__}: {error}", error)


def _with_less_memory(
    found: Found, spec: PipelineSpec, split: bool, budget_s: float, expired: Callable[[], bool] | None
) -> Found:
    saved, truncated = save_memory(found.timeline), found.truncated
    if found.proven_optimal and not truncated:
        saved, truncated = _search_with_less(saved, spec, split, budget_s * _LESS_MEMORY_SHARE, expired)
    chosen = found.chosen if saved is found.timeline else SEARCHED
    return replace(found, timeline=saved, chosen=chosen, truncated=truncated)


def _search_with_less(
    best: Timeline, spec: PipelineSpec, split: bool, budget_s: float, expired: Callable[[], bool] | None
) -> tuple[Timeline, bool]:
    """An equally long timeline under tighter limits, and whether the deadline cut the search for it short.

    Bisects how many microbatches a mesh holds, each time with a search of `budget_s` where the bounds leave
    room. Other limits than these are kept.
    """
    problem = best.problem
    peaks = [peak_activation(problem, lane)[0] for lane in best.lanes]
    whole = [int(problem.activation[problem.mesh_of_stage == p].sum()) for p in range(problem.meshes)]
    again = problem.workspace.tolist()
    slack = Slack(best)
    least, most = 0, max((-(-peak // one) for peak, one in zip(peaks, whole, strict=True) if one), default=0)
    while budget_s > 0 and most - least > 1:
        count = (least + most) // 2
        limits = [min(p, count * one + more) for p, one, more in zip(peaks, whole, again, strict=True)]
        meshes = [
            mesh.model_copy(update={"activation_limit_bytes": limit})
            for mesh, limit in zip(spec.meshes, limits, strict=True)
        ]
        tighter = keep_whole(
            build_problem(spec.model_copy(update={"meshes": meshes}), split=split, inference=False)
        )
        found = None
        if attains(lower_bound(tighter), best.makespan):
            found = search(tighter, [], budget_s=budget_s, expired=expired)
        if found is not None and found.truncated:
            return best, True
        if found is None or not attains(found.timeline.makespan, best.makespan):
            least = count
            continue
        most = count
        # under the limits of the spec again; its backwards may be split where those of `best` are not
        saved = replace(found.timeline, problem=replace(found.timeline.problem, spec=problem.spec))
        if (
            slack.kept_by(saved)
            and sum(peak_receive_buffers(saved)) <= sum(peak_receive_buffers(best))
            and keeps_memory(saved)
        ):
            best = saved
    return best, False


def _no_plan_message(problem: Problem) -> str:
    """The limits under which no order was found, and limits that are certainly enough."""
    changes = []
    found = None
    unlimited = [mesh.model_copy(update={"receive_buffer_limit": None}) for mesh in problem.spec.meshes]
    free = replace(problem, spec=problem.spec.model_copy(update={"meshes": unlimited}))
    if (problem.receive_limit >= 0).any():
        found = search(free, [], budget_s=0.0)
    for index, mesh in enumerate(problem.spec.meshes):
        # one microbatch at a time holds every stage's activation once
        enough = int(problem.activation[problem.mesh_of_stage == index].sum() + problem.workspace[index])
        limit = mesh.activation_limit_bytes
        if found is None and limit is not None and limit < enough:
            changes.append(f"raise activation_limit_bytes of mesh {mesh.name!r} from {limit} to {enough}")
        limit = mesh.receive_buffer_limit
        if found is not None and limit is not None:
            needed = needed_receive_buffers(problem, found.timeline.lanes[index])
            if limit < needed:
                changes.append(f"raise receive_buffer_limit of mesh {mesh.name!r} from {limit} to {needed}")
    return f"no order was found within the limits: {', '.join(changes) or 'raise the memory limits'}"


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
    check_limits(problem, lanes, name)
    timeline = simulate(problem, lanes)
    _check_memory(timeline, name)
    return timeline


def _check_memory(timeline: Timeline, name: str) -> None:
    for mesh, peak, limit in over_memory(timeline):
        raise SpecError(
            f"schedule {name!r} holds {peak} bytes on mesh {mesh!r}, over its memory_bytes {limit}: "
            f"raise memory_bytes to {peak}, or use schedule 'auto'"
        )


def check_limits(problem: Problem, lanes: list[np.ndarray], name: str) -> None:
    """Raise SpecError where the compute orders of a schedule break a memory limit or max_in_flight."""
    for mesh, lane in enumerate(lanes):
        limit = problem.spec.meshes[mesh].activation_limit_bytes
        peak, _ = peak_activation(problem, lane)
        if limit is not None and limit < peak:
            raise SpecError(
                f"schedule {name!r} holds {peak} bytes of activations on mesh {problem.spec.meshes[mesh].name!r}, over "
                f"its activation_limit_bytes {limit}: raise the limit to {peak}, or use schedule 'auto'"
            )
        broken = in_flight_violation(problem, lane)
        if broken is not None:
            raise SpecError(f"schedule {name!r}: {broken}: raise max_in_flight, or use schedule 'auto'")
