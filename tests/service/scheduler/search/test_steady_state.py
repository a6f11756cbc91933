"""Long steps through short ones: rules found there, and repetitions put in again; transfers that go late."""

from __future__ import annotations

import numpy as np
import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.memory import (
    keeps_activation_limits,
    keeps_memory_limits,
    peak_receive_buffers,
)
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.search import priority_rules, steady_state
from service.scheduler.search.delays import alap_transfers
from service.scheduler.search.search import search
from tests.service.scheduler.specs import chain, measured


def half_duplex(microbatches):
    return chain(
        8,
        microbatches,
        schedule="auto",
        split_backward=True,
        forward=10.0,
        backward=20.0,
        transfer=12.0,
        contention="half-duplex",
    )


def test_only_steps_of_many_microbatches_have_a_short_one():
    problem = build_problem(load_spec(half_duplex(64)), split=True)
    assert steady_state.shorten_problem(problem).microbatches == 24
    assert steady_state.shorten_problem(build_problem(load_spec(half_duplex(40)), split=True)) is None


@pytest.mark.parametrize("microbatches", [48, 61, 200])
@pytest.mark.parametrize("limit", [None, 14])
def test_a_repetition_put_in_again_is_a_plan_of_the_long_step_within_the_same_memory(microbatches, limit):
    data = half_duplex(microbatches)
    for mesh in data["meshes"] if limit else ():
        mesh["activation_limit_bytes"] = limit
    problem = build_problem(load_spec(data), split=True)
    few = steady_state.shorten_problem(problem)
    runner = priority_rules.RuleRunner(few)
    extended = 0
    for rule in priority_rules.standard_rules(few):
        timeline = runner.timeline(rule)
        for found in steady_state.extended_timelines(timeline, problem) if timeline is not None else ():
            extended += 1
            assert np.array_equal(np.sort(found.sequence), np.flatnonzero(problem.exists.reshape(-1)))
            assert keeps_activation_limits(problem, found.lanes)
            # as long as the rule's own way through the long step, or nearly: it goes on as it began
            whole = priority_rules.RuleRunner(problem).timeline(
                steady_state.lengthen_rule(rule, few, problem)
            )
            assert found.makespan <= 1.1 * whole.makespan
    assert extended


@pytest.mark.slow
def test_what_a_short_step_finds_shortens_a_long_one():
    problem = build_problem(load_spec(half_duplex(64)), split=True)
    rulewise = search(problem, [], budget_s=0).timeline.makespan
    found = search(problem, [], budget_s=1.0).timeline.makespan
    assert found < rulewise


@pytest.mark.slow
def test_a_long_step_is_planned_by_the_rules_that_are_best_on_a_short_one():
    data = measured(32, 256, 288)
    problem = build_problem(load_spec(data), split=True)
    few = steady_state.shorten_problem(problem)
    assert few.tasks < problem.tasks / 2
    runner = priority_rules.RuleRunner(problem)
    every = [runner.timeline(rule) for rule in priority_rules.standard_rules(problem)]
    best = min(timeline.makespan for timeline in every if timeline is not None)
    chosen = [runner.timeline(rule) for rule in steady_state.rank_rules(problem, few, 8)]
    assert min(timeline.makespan for timeline in chosen) <= 1.005 * best


def test_transfers_that_go_late_wait_in_fewer_receive_buffers_and_take_no_longer():
    data = measured(8, 128, 136)
    problem = build_problem(load_spec(data), split=True)
    timeline = search(problem, [], budget_s=0).timeline
    late = alap_transfers(timeline, np.ones(8, dtype=bool))
    assert late.makespan <= timeline.makespan * (1 + 1e-9)
    assert sum(peak_receive_buffers(late)) < 0.8 * sum(peak_receive_buffers(timeline))
    compute = timeline.sequence[timeline.sequence < problem.compute_tasks]
    assert (late.start[compute] <= timeline.start[compute] * (1 + 1e-9) + 1e-12).all()


@pytest.mark.slow
def test_where_memory_is_short_transfers_wait_and_microbatches_do_not():
    """With transfers that go as early as they can fewer activations fit, and the plan was 21 % above its bound."""
    spec = load_spec(measured(8, 128, 136, memory=4.8))
    plan = make_plan(spec, budget_s=0)
    assert plan.makespan_s <= 1.12 * plan.lower_bound_s
    problem = build_problem(spec, split=True)
    found = search(problem, [], budget_s=0).timeline
    assert keeps_memory_limits(found)
