"""A plan that is run with longer transfers than planned: saving memory must not have spent its slack."""

import pytest

from service.scheduler.planner import find_timeline, make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.decode import read_programs
from service.scheduler.programs.replay import replay
from service.scheduler.search.memory_saving import stretched_makespan
from tests.service.scheduler.specs import chain


def run_with(plan, data):
    """The makespan of a plan's programs on other costs."""
    spec = load_spec(data)
    programs = {mesh.name: plan.program(mesh.name) for mesh in spec.meshes}
    return replay(*read_programs(spec, programs)).timeline.makespan


@pytest.mark.slow
def test_a_plan_run_with_four_times_the_transfers_keeps_the_slack_that_memory_saving_could_spend():
    planned = chain(8, 32, transfer=0.25, schedule="auto", contention="link")
    plan = make_plan(load_spec(planned))
    assert plan.makespan_s == pytest.approx(104.75) and plan.proven_optimal
    # with all the memory saved that its makespan allows it would take 129
    assert run_with(plan, chain(8, 32, transfer=1.0, schedule="auto", contention="link")) <= 110 * (1 + 1e-9)


@pytest.mark.parametrize("longer", [1.0, 2.0, 3.5])
@pytest.mark.parametrize("contention", ["link", "full-duplex", "half-duplex"])
def test_the_stretched_makespan_is_what_the_programs_reach_with_longer_transfers(longer, contention):
    data = chain(4, 6, transfer=0.5, schedule="eager-1f1b", contention=contention, skips=((0, 2),))
    plan = make_plan(load_spec(data), budget_s=0)
    longer_data = chain(
        4, 6, transfer=0.5 * longer, schedule="eager-1f1b", contention=contention, skips=((0, 2),)
    )
    timeline = find_timeline(load_spec(data), budget_s=0)
    assert stretched_makespan(timeline, longer) == pytest.approx(run_with(plan, longer_data))
