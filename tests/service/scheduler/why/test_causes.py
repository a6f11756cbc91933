"""Whatever is planted in a step is named first; where nothing is, nobody is accused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec, edge_costs
from service.scheduler.problem.spec_checks import load_spec
from service.scheduler.programs.plan import Plan
from service.scheduler.why.explain import explain
from service.scheduler.why.measured import CauseKind, ChangeKind, Explanation, duration_text
from tests.service.scheduler.specs import chain, measured
from tests.service.scheduler.why.simulation import RanSlot, World, makespan, planned_step, run
from tests.tiers import some_by_day

NOISE = 0.06
MODELS = {
    "measured 4x8": lambda: measured(4, 8, 1),
    "chain 3x12": lambda: measured(3, 12, 4, skips=False),
    "two stages a mesh": lambda: measured(2, 8, 2, loops=2, contention="full-duplex"),
    "1f1b with a skip": lambda: chain(
        4, 8, transfer=0.2, skips=((0, 3),), schedule="1f1b", contention="link"
    ),
}
LIMITED = {
    "little memory": lambda: measured(4, 12, 1, memory=1.3),
    "memory enough": lambda: measured(4, 12, 1, memory=12),
}


@cache
def planned(model: str) -> tuple[PipelineSpec, Plan]:
    spec = load_spec((MODELS | LIMITED)[model]())
    return spec, make_plan(spec, budget_s=0.0)


def why(model: str, world: World, **given: float) -> Explanation:
    spec, plan = planned(model)
    return explain(planned_step(spec, plan), run(spec, plan, world), **given)


@pytest.mark.parametrize("model", MODELS)
@some_by_day("seed", range(4), by_day=2)
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_a_healthy_step_is_near_its_plan_and_nothing_is_to_blame(model: str, seed: int, noise: float):
    _, plan = planned(model)
    found = why(model, World(noise=noise, seed=seed))
    assert found.causes == ()
    assert found.healthy == (plan.makespan_s <= 1.1 * plan.lower_bound_s)
    assert "near its plan" in found.verdict and "nothing is to blame" in found.verdict.lower()


def test_most_models_of_these_tests_are_planned_at_their_bound():
    """Else the test above would say nothing of `healthy`."""
    assert sum(plan.makespan_s <= 1.1 * plan.lower_bound_s for _, plan in map(planned, MODELS)) >= 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("model", "link"),
    [("measured 4x8", ("m1", "m2")), ("chain 3x12", ("m2", "m1")), ("1f1b with a skip", ("m0", "m1"))],
)
def test_a_slow_link_is_named_first(model: str, link: tuple[str, str], seed: int):
    found = why(model, World(links={link: 12.0}, noise=NOISE, seed=seed))
    assert found.causes[0].kind is CauseKind.LINK
    assert f"{link[0]} -> {link[1]}" in found.causes[0].subject
    assert link[0] in found.verdict and link[1] in found.verdict
    best = next(change for change in found.changes if change.kind is not ChangeKind.NETWORK)
    assert (best.kind, best.subject) == (ChangeKind.LINK, " - ".join(sorted(link)))


@pytest.mark.parametrize("resharded", [False, True])
def test_a_link_that_was_measured_to_be_slow_is_named_though_it_keeps_to_its_plan(resharded):
    data = measured(3, 8, 4, skips=False)
    for link in data["network"]["links"]:
        link["bandwidth_bytes_per_s"] = 4e7 if {link["source"], link["target"]} == {"m0", "m1"} else 1e9
    spec = load_spec(data)
    if resharded:  # whose plan says how long transfers last
        seconds = [edge_costs(spec)(index) for index in range(len(spec.edges))]
        edges = [
            edge.model_copy(
                update={
                    **dict.fromkeys(("forward_bytes", "backward_bytes")),
                    **{"held_bytes": edge.forward_bytes, "forward_s": there_s, "backward_s": back_s},
                }
            )
            for edge, (there_s, back_s) in zip(spec.edges, seconds, strict=True)
        ]
        spec = spec.model_copy(update={"edges": edges})
    plan = make_plan(spec, budget_s=0.0)
    found = explain(planned_step(spec, plan), run(spec, plan, World(noise=NOISE)))
    assert found.causes[0].kind is CauseKind.LINK
    assert "m0 -> m1" in found.causes[0].subject
    assert "below that of other links" in found.causes[0].message
    assert "as long as planned" not in found.causes[0].message, "it keeps to its plan"


NODES = {"m0": ["a"], "m1": ["b"], "m2": ["b"]}


def slow_between_nodes(*, known=True, links=None):
    """What is said of three meshes on NODES, whose links between nodes are of 10 MB/s, and those inside of 1 GB/s."""
    data = measured(3, 8, 4, skips=False)
    for link in data["network"]["links"]:
        inside = NODES[link["source"]] == NODES[link["target"]]
        link["bandwidth_bytes_per_s"] = 1e9 if inside else 1e7
    spec = load_spec(data)
    plan = make_plan(spec, budget_s=0.0)
    step = replace(planned_step(spec, plan), nodes=NODES if known else {})
    return explain(step, run(spec, plan, World(links=links or {})))


def test_a_link_between_nodes_is_not_called_slow_beside_memory_inside_a_node():
    assert not [cause for cause in slow_between_nodes().causes if cause.kind is CauseKind.LINK]
    (blind,) = [cause for cause in slow_between_nodes(known=False).causes if cause.kind is CauseKind.LINK]
    assert "below that of other links" in blind.message, "where nodes are not known all are compared"


def test_what_is_said_of_a_slow_link_are_only_its_slow_transfers():
    found = slow_between_nodes(links={("m0", "m1"): 4.0})
    (slow,) = [cause for cause in found.causes if cause.kind is CauseKind.LINK]
    assert slow.subject == "m0 -> m1"
    assert "m1 to m0" not in slow.message and "below that" not in slow.message
    assert slow.message.startswith("transfers from m0 to m1 take 4.00 times as long as planned (")
    assert slow.message.endswith("transfers on other links take 1.00 times as long as planned")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", ["m0", "m1"])
def test_a_straggling_mesh_is_named_first_and_not_taken_for_its_host(model: str, mesh: str, seed: int):
    found = why(model, World(meshes={mesh: 1.7}, noise=NOISE, seed=seed))
    assert (found.causes[0].kind, found.causes[0].subject) == (CauseKind.MESH, mesh)
    assert all(cause.kind is not CauseKind.HOST for cause in found.causes)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stage", ["s0", "s3"])
def test_one_slow_stage_of_a_mesh_is_told_from_a_slow_mesh(stage: str, seed: int):
    found = why("two stages a mesh", World(stages={stage: 2.0}, noise=NOISE, seed=seed))
    assert (found.causes[0].kind, found.causes[0].subject) == (CauseKind.STAGE, stage)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model", MODELS)
def test_a_slow_host_loop_is_named_first_and_not_taken_for_a_straggler(model: str, seed: int):
    spec, _ = planned(model)
    late_s = 0.5 * max(stage.forward_s for stage in spec.stages)
    found = why(model, World(late_s={"m1": late_s}, noise=NOISE, seed=seed))
    assert (found.causes[0].kind, found.causes[0].subject) == (CauseKind.HOST, "m1")
    assert all(cause.kind not in (CauseKind.MESH, CauseKind.STAGE) for cause in found.causes)
    everywhere = why(model, World(late_s={mesh.name: late_s for mesh in spec.meshes}, noise=NOISE, seed=seed))
    assert (everywhere.causes[0].kind, everywhere.causes[0].subject) == (CauseKind.HOST, "all meshes")
    assert next(iter(everywhere.changes)).kind is ChangeKind.HOST


@pytest.mark.parametrize("model", MODELS)
def test_a_driver_that_is_slow_between_steps_is_named_first(model: str):
    spec, plan = planned(model)
    slots = run(spec, plan, World(noise=NOISE))
    update_s = 0.01 * plan.makespan_s
    slots += [
        RanSlot(mesh.name, "compute", "STEP", None, None, None, makespan(slots), makespan(slots) + update_s)
        for mesh in spec.meshes
    ]
    plan_of = planned_step(spec, plan, update_s=update_s)
    assert explain(plan_of, slots, step_s=1.02 * makespan(slots)).causes == ()
    found = explain(plan_of, slots, step_s=1.5 * makespan(slots))
    assert found.causes[0].kind is CauseKind.BETWEEN
    assert found.causes[0].cost_s == pytest.approx(found.step_s / 3, rel=1e-6)
    longer = [replace(slot, end_s=slot.end_s + 0.3 * plan.makespan_s) if slot.action == "STEP" else slot for slot in slots]  # fmt: skip  # noqa: E501
    assert explain(plan_of, longer).causes[0].kind is CauseKind.UPDATE


@pytest.mark.parametrize("seed", range(3))
def test_what_all_have_in_common_is_nobodys_alone(seed: int):
    _, plan = planned("measured 4x8")
    meshes = why("measured 4x8", World(meshes=dict.fromkeys(plan.programs, 1.5), noise=NOISE, seed=seed))
    assert meshes.causes[0].kind is CauseKind.COMPUTE and CauseKind.MESH not in {
        c.kind for c in meshes.causes
    }
    links = {(a, b): 12.0 for a in plan.programs for b in plan.programs}
    network = why("measured 4x8", World(links=links, noise=NOISE, seed=seed))
    assert network.causes[0].kind is CauseKind.NETWORK


@pytest.mark.parametrize("seed", range(3))
def test_a_memory_limit_is_named_first_with_what_it_would_need(seed: int):
    _, plan = planned("little memory")
    found = why("little memory", World(noise=NOISE, seed=seed))
    assert found.causes[0].kind is CauseKind.MEMORY
    best = planned("memory enough")[1].makespan_s
    change = next(change for change in found.changes if change.kind is ChangeKind.MEMORY)
    assert change.gain_s >= 0.7 * (plan.makespan_s - best)
    assert "would hold" in change.message


def test_a_memory_limit_that_holds_nothing_up_is_not_named():
    found = why("memory enough", World(noise=NOISE))
    assert all(cause.kind is not CauseKind.MEMORY for cause in found.causes)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (9.61e-5, "0.0961 ms"),
        (0.987, "987 ms"),
        (0.99951, "1 s"),
        (1.2576, "1.26 s"),
        (12.5, "12.5 s"),
        (4321.0, "4,321 s"),
        (-1.5, "-1.5 s"),
    ],
)
def test_times_are_told_without_powers_of_ten(seconds: float, told: str):
    assert duration_text(seconds) == told
