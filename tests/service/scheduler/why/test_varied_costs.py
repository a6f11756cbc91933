"""Plans chosen by their mean makespan where costs vary, judged by a simulation with noise that they have not seen."""

from dataclasses import replace
from statistics import fmean

import pytest

from service.scheduler.planner import make_plan, replan
from service.scheduler.problem.spec import edge_costs
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.why import varied_costs
from service.scheduler.why.calibration import calibrate, measured_graphs
from service.scheduler.why.measured import measured_spec, task_seconds, with_decided_recomputation
from service.scheduler.why.varied_costs import VariedCosts
from tests.service.scheduler.specs import chain, measured
from tests.service.scheduler.why.simulation import World, makespan, planned_step, run
from worker.contract.program import program_from_json

STEPS, FRESH = 9, 60


def measured_plan(data, noise):
    """The plan of `data`, what its steps gave, and the costs that vary as they did."""
    spec = load_spec(data)
    plan = make_plan(spec, budget_s=0.5)
    steps = [run(spec, plan, World(noise=noise, seed=seed)) for seed in range(STEPS)]
    programs = planned_step(spec, plan).programs
    _, usual = calibrate(spec, programs, plan.slots, steps)
    graphs = [graph for graph, _ in measured_graphs(spec, programs, plan.slots, steps)]
    return (
        plan,
        with_decided_recomputation(measured_spec(spec, usual), []),
        usual,
        VariedCosts.of(graphs, usual),
    )


def replanned(data, noise, *, by_means=True):
    """The running plan, the one in its place (None: it stays), and the means that the choice went by."""
    plan, spec, usual, varied = measured_plan(data, noise)
    means = varied.mean_makespans(spec, usual, []) if by_means else None
    running = {mesh: program_from_json(planned_step(spec, plan).programs[mesh]) for mesh in plan.programs}
    return plan, replan(spec, running, budget_s=0.5, means=means), means


def mean_of_fresh_steps(data, plan, noise):
    """The mean over steps of the plan's programs at the costs of `data`, with noise that no plan was made by."""
    spec = load_spec(data)
    stages, edge_s = {stage.name: stage for stage in spec.stages}, edge_costs(spec)

    def at_costs(slot):
        if slot.edge is not None:
            lasts_s = edge_s(slot.edge)[slot.action.endswith("_B")]
        else:
            stage = stages[slot.stage]
            lasts_s = {
                "F": stage.forward_s,
                "B": stage.whole_backward_s,
                "I": stage.backward_input_s,
                "W": stage.backward_weight_s,
            }[slot.action]
        return replace(slot, end_s=slot.start_s + lasts_s)

    plan = plan.model_copy(update={"slots": [at_costs(slot) for slot in plan.slots]})
    return fmean(makespan(run(spec, plan, World(noise=noise, seed=1000 + seed))) for seed in range(FRESH))


@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_free_memory_is_spent_on_microbatches_in_flight_where_costs_vary(noise):
    data = chain(4, 16, transfer=0.1, contention="link", schedule="auto")
    for stage in data["stages"]:
        stage["activation_bytes"] = 10
    before, shorter, means = replanned(data, noise)
    assert shorter is not None
    gain = mean_of_fresh_steps(data, before, noise) / mean_of_fresh_steps(data, shorter.plan, noise)
    assert gain > 1.03
    assert shorter.running_s == means.running_s and shorter.running_s / shorter.planned_s > 1.02
    peaks = [sum(mesh.peak_activation_bytes for mesh in plan.meshes) for plan in (before, shorter.plan)]
    assert peaks[0] < peaks[1]


def test_where_costs_do_not_vary_no_plan_takes_the_place_of_an_equal_one():
    data = chain(4, 16, transfer=0.1, contention="link", schedule="auto")
    for stage in data["stages"]:
        stage["activation_bytes"] = 10
    before, shorter, means = replanned(data, 0.0)
    assert shorter is None
    assert means.running_s == pytest.approx(before.makespan_s, rel=1e-9)


@pytest.mark.parametrize("data", [chain(3, 5, transfer=0.2, contention="link"), measured(4, 6, 3)])
def test_a_mean_is_that_of_the_programs_with_times_of_measured_steps_each_shifted_by_all_microbatches(data):
    _, spec, usual, varied = measured_plan(data, 0.4)
    usual_s = task_seconds(spec, usual, [])
    every = []
    for factors in varied.steps:
        for by in range(spec.microbatches):
            lasts = []
            for task, seconds in zip(usual.tasks, usual_s, strict=True):
                letter = "F" if task.op == "F" else "B"
                key = (letter, task.stage, None) if task.edge is None else (letter, task.edge, task.target)
                lasts.append(seconds * factors[key][(task.microbatch + by) % spec.microbatches])
            every.append(usual.replay(lasts))
    assert varied.mean_makespan(usual, usual_s) == pytest.approx(fmean(every), rel=1e-12)
    assert fmean(every) > usual.replay(usual_s), "lanes wait for the last of several inputs"
    assert len({round(value, 9) for value in every}) > len(every) / 2


def test_of_a_long_plan_some_replays_are_made_and_of_one_that_is_too_long_none(monkeypatch):
    _, spec, usual, varied = measured_plan(chain(3, 8, transfer=0.1, contention="link"), 0.3)
    usual_s = task_seconds(spec, usual, [])
    whole = varied.mean_makespan(usual, usual_s)
    monkeypatch.setattr(varied_costs, "_REPLAYED_TASKS", 20 * len(usual.tasks))
    assert varied.mean_makespan(usual, usual_s) == pytest.approx(whole, rel=0.03)
    monkeypatch.setattr(varied_costs, "_REPLAYED_TASKS", 7 * len(usual.tasks))
    assert varied.mean_makespan(usual, usual_s) is None
    assert varied.mean_makespans(spec, usual, []) is None
