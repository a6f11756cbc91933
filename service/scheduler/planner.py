"""Makes a proven plan from a spec: picks the schedule, simulates it, compiles and verifies its programs.

`make_plan` is the scheduler's entry point, `replan` the one for a plan that runs at other costs than planned; where a
plan's proof fails, the next best timeline is taken and the plan's notes say so. `compile_kernels` compiles the numba
kernels before anybody waits for a plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from service.scheduler.auto.auto import plan_auto, plan_from_running
from service.scheduler.auto.backward_split import problem_with_whole_backwards
from service.scheduler.auto.fixed_schedule import named_timeline, plan_named
from service.scheduler.auto.recomputation import (
    cheapest_recomputation,
    may_recompute,
    must_recompute,
    other_methods,
    with_recomputation,
    with_recompute_methods,
)
from service.scheduler.kernels import TOLERANCE
from service.scheduler.problem.defects import defect, failed
from service.scheduler.problem.memory import keeps_memory_limits, keeps_receive_limits
from service.scheduler.problem.spec import EdgeSpec, PipelineSpec, SpecError, change_costs
from service.scheduler.problem.spec_checks import check_spec
from service.scheduler.problem.timeline import Timeline, retime
from service.scheduler.programs.check_programs import check_programs, check_slots
from service.scheduler.programs.codegen import compile_programs
from service.scheduler.programs.decode import read_programs
from service.scheduler.programs.plan import Plan, PlanOrigin, PlanProof, build_plan
from service.scheduler.programs.replay import Replay, replay
from service.scheduler.schedules.registry import AUTO
from service.scheduler.search.delays import alap_transfers
from service.scheduler.search.origin import SEEDS, versions
from service.scheduler.search.search import SEARCHED, SearchResult, reaches_bound
from service.scheduler.search.tabu import tabu_search
from service.scheduler.search.windows import cp_model_module
from worker.contract.planned import recompute_method
from worker.contract.program import Instruction


def make_plan(
    spec: PipelineSpec,
    *,
    budget_s: float = 10.0,
    expired: Callable[[], bool] | None = None,
    enough_bytes: Sequence[int] | None = None,
) -> Plan:
    """The plan of a spec; raises SpecError when there is none.

    `budget_s` is how long `auto` may search, counted in work, so that the same spec gives the same
    plan; 0 gives the best constructive plan. `expired` is a wall-clock deadline: once it returns
    True the search ends and the plan says `truncated`. An equally long plan of less memory is looked for,
    by `auto`, unless each mesh holds no more than its `enough_bytes`.
    """
    with _gc_paused():
        return _proven_plan(spec, _find_timeline(spec, budget_s, expired, enough_bytes), budget_s)


# of the shortest makespan: plans that take longer at usual costs are not tried by their means
_FARTHEST_ALTERNATIVE = 0.05
_SLACK_SHARE = 0.3  # of the budget, for orders with slack
_SLACKS = (0.15, 0.3)  # of a forward


@dataclass(frozen=True)
class ShorterPlan:
    """A plan to run in place of the running one: its makespan and that of the programs that run, at the costs of now; where
    these vary, the means."""

    plan: Plan
    planned_s: float
    running_s: float


@dataclass(frozen=True)
class MeanMakespans:
    """The mean makespan of the running programs where costs vary, and what gives that of a plan (None: too long a plan)."""

    running_s: float
    mean_makespan: Callable[[Plan], float | None]


def replan(
    spec: PipelineSpec,
    running: Mapping[str, Sequence[Instruction]],
    *,
    recomputed: Iterable[str] = (),
    budget_s: float,
    expired: Callable[[], bool] | None = None,
    means: MeanMakespans | None = None,
) -> ShorterPlan | None:
    """A shorter plan of the same stages on the same meshes; None where none was found.

    `spec` has the costs as they are now, `running` are the programs that run by mesh, without buckets of gradients,
    `recomputed` the stages that recompute in them. The search starts from the running order; other orders, split or
    whole backwards and other stages that recompute are open to it where the schedule is `auto`, the order of transfers
    where it has a name. Where costs vary, the plan with the least mean makespan (`means`) is taken. Budget and deadline
    as of `make_plan`. Raises PlanError where the programs are not of this spec, SpecError where nothing fits into memory.
    """
    with _gc_paused():
        problem, meshes = read_programs(with_recomputation(spec, recomputed), running)
        now = replay(problem, meshes)
        slack_s = _SLACK_SHARE * budget_s if means is not None and spec.schedule == AUTO else 0.0
        if spec.schedule == AUTO:
            search_s = budget_s - slack_s
            found = plan_from_running(spec, now.timeline, frozenset(recomputed), search_s, expired)
        else:
            found = _find_timeline(spec, budget_s, expired)
        running_s = now.serialised_makespan_s
        if means is not None:
            others = [*found.alternatives, *_orders_with_slack(spec, found.recomputed, slack_s, expired)]
            found = replace(found, alternatives=tuple(others))
            return _shortest_on_average(spec, found, means, budget_s, expired)
        if found.timeline.makespan >= running_s * (1 - TOLERANCE):
            return None
        plan = _proven_plan(spec, found, budget_s)
        shorter = plan.programs_makespan_s < running_s * (1 - TOLERANCE)
        return ShorterPlan(plan, plan.makespan_s, running_s) if shorter else None


def _shortest_on_average(
    spec: PipelineSpec,
    found: SearchResult,
    means: MeanMakespans,
    budget_s: float,
    expired: Callable[[], bool] | None,
) -> ShorterPlan | None:
    """The plan with the least mean makespan among the one that was found and its alternatives; None where it is no shorter
    than that of the running programs.

    The found one is the shortest at usual costs, and of those it takes the least memory; one that fills more of the memory
    with microbatches in flight may wait less where costs vary.
    """
    shorter: ShorterPlan | None = None
    near = found.timeline.makespan * (1 + _FARTHEST_ALTERNATIVE)
    candidates = {id(found.timeline): (found.chosen, found.timeline)}
    candidates |= {id(timeline): (name, timeline) for name, timeline in found.alternatives}
    least_s = means.running_s * (1 - TOLERANCE)
    for chosen, timeline in candidates.values():
        if timeline.makespan > near:
            continue
        if timeline is not found.timeline and expired is not None and expired():
            break
        proven = found.proven_optimal and timeline.makespan <= found.timeline.makespan * (1 + TOLERANCE)
        alone = replace(found, chosen=chosen, timeline=timeline, proven_optimal=proven, alternatives=())
        try:
            plan = _proven_plan(spec, alone, budget_s)
        except Exception as error:
            defect(f"a plan did not pass: {type(error).__name__}: {error}; others were tried", error)
            continue
        mean_s = means.mean_makespan(plan)
        if mean_s is not None and mean_s < least_s:
            shorter, least_s = ShorterPlan(plan, mean_s, means.running_s), mean_s * (1 - TOLERANCE)
    return shorter


def _orders_with_slack(
    spec: PipelineSpec, recomputed: Sequence[str], budget_s: float, expired: Callable[[], bool] | None
) -> Iterator[tuple[str, Timeline]]:
    """Plan as if each tensor arrived later by a part of an action; yields the orders at the costs of `spec`, of plans in
    which the stages `recomputed` recompute.

    They wait for no tensor that is late by that much: where costs vary they may be shorter on average.
    """
    if budget_s <= 0:
        return
    forward_s = sum(stage.forward_s for stage in spec.stages) / len(spec.stages)
    for slack in _SLACKS:
        try:
            found = plan_auto(_with_later_tensors(spec, slack * forward_s), budget_s / len(_SLACKS), expired)
            if tuple(found.recomputed) != tuple(recomputed):
                continue
            problem = problem_with_whole_backwards(with_recomputation(spec, recomputed))
            problem = problem.with_fused(found.timeline.problem.fused)
            timeline = retime(problem, found.timeline.sequence)
        except SpecError:
            continue
        except Exception as error:
            failed("planning with slack", error)
            continue
        if keeps_memory_limits(timeline) and keeps_receive_limits(timeline):
            yield SEARCHED, timeline


def _with_later_tensors(spec: PipelineSpec, seconds: float) -> PipelineSpec:
    def later(edge: EdgeSpec) -> EdgeSpec:
        longer = {
            name: value + seconds
            for name in ("forward_s", "backward_s")
            if (value := getattr(edge, name)) is not None and value > 0
        }
        return edge.model_copy(update=longer)

    network = spec.network.model_copy(update={"latency_s": spec.network.latency_s + seconds})
    return change_costs(spec.model_copy(update={"network": network}), edge=later)


def _proven_plan(spec: PipelineSpec, found: SearchResult, budget_s: float) -> Plan:
    found, programs, played = _first_verified(spec, found)
    proof = PlanProof(
        lower_bound_s=min(found.lower_bound_s, found.timeline.makespan),
        # of a timeline that the programs do not keep (contention none), nothing is proven
        proven_optimal=found.proven_optimal
        and reaches_bound(played.serialised_makespan_s, found.timeline.makespan),
        programs_makespan_s=played.serialised_makespan_s,
        truncated=found.truncated,
    )
    return build_plan(
        found.timeline,
        programs,
        proof,
        chosen=found.chosen,
        recomputed={
            stage.name: recompute_method(dict(stage.recompute))
            for stage in with_recompute_methods(spec, found.recompute_methods).stages
            if stage.name in found.recomputed and stage.recompute is not None
        },
        made_with=PlanOrigin(budget_s=budget_s, seeds=SEEDS, versions=versions()),
        notes=found.notes,
    )


def _first_verified(
    spec: PipelineSpec, found: SearchResult
) -> tuple[SearchResult, dict[str, list[Instruction]], Replay]:
    """The found timeline with its proven programs; where the proof fails, the best of the others that pass."""
    while True:
        try:
            programs = compile_programs(found.timeline)
            decided = with_recomputation(spec, found.recomputed, found.recompute_methods)
            played = check_programs(decided, programs)
            check_slots(found.timeline, played)
            return found, programs, played
        except Exception as error:
            if not found.alternatives:
                raise
            note = defect(
                f"a plan did not pass: {type(error).__name__}: {error}; another one was taken", error
            )
            (chosen, timeline), *others = found.alternatives
            found = replace(
                found,
                timeline=timeline,
                chosen=chosen,
                proven_optimal=reaches_bound(timeline.makespan, found.lower_bound_s),
                notes=(*found.notes, note),
                alternatives=tuple(others),
            )


@contextmanager
def _gc_paused() -> Iterator[None]:
    """A plan is up to a million small objects without cycles: walking them again and again doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def compile_kernels() -> None:
    """Compile what planning runs, or load it from the disk, and import the solver, before anybody waits for a plan."""
    cp_model_module()
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
    alap_transfers(timeline, np.ones(timeline.problem.meshes, dtype=bool))  # where bytes are limited


def find_timeline(spec: PipelineSpec, *, budget_s: float) -> Timeline:
    """The timeline of the plan of a spec, without programs."""
    return _find_timeline(spec, budget_s, None).timeline


def _find_timeline(
    spec: PipelineSpec,
    budget_s: float,
    expired: Callable[[], bool] | None,
    enough_bytes: Sequence[int] | None = None,
) -> SearchResult:
    check_spec(spec)
    if spec.schedule == AUTO:
        return plan_auto(spec, budget_s, expired, enough_bytes)
    names = may_recompute(spec)
    choice = cheapest_recomputation(
        names,
        other_methods(spec),
        lambda some: named_timeline(some.decide(spec), spec.schedule).makespan,
        tasks=problem_with_whole_backwards(spec).tasks,
    )
    found = plan_named(choice.decide(spec), budget_s, expired)
    return replace(
        found,
        recomputed=tuple(sorted(must_recompute(spec).union(choice.stages))),
        recompute_methods=tuple(sorted(choice.methods)),
    )
