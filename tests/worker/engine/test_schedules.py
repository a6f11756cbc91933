"""Programs of the scheduler: whatever the schedule and the placement, the gradients of the unsplit model."""

import random

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import (
    LocalPipeline,
    Plain,
    batch,
    chain,
    planned,
    random_graph,
    serial_programs,
    skips,
    tied_chain,
    two_branches,
)

MICROBATCHES = 6
GRAPHS = {"chain": lambda: chain(4), "skips": skips, "branches": two_branches, "tied": tied_chain}
ONE_EACH = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "auto"]
ANY_PLACEMENT = ["auto"]


def check_step(graph, mesh_of_stage, programs, microbatches=MICROBATCHES, split=None):
    inputs, targets = batch(microbatches)
    losses, gradients = Plain(graph).step(inputs, targets)
    with LocalPipeline(graph, mesh_of_stage, programs, microbatches) as pipeline:
        for step in range(2):
            if step == 1:  # the same parameters once more, so that buffers of the first step are reused
                for engine in pipeline.engines.values():
                    engine.load_state(
                        {**engine.state(), "parameters": initial(graph), "optimizer_groups": []}
                    )
            results = pipeline.step(step, [(inputs, targets)])
            found = [loss for result in results.values() for loss in result.losses]
            assert found == pytest.approx(losses, abs=1e-10)
            measured = pipeline.gradients()
            assert measured.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(measured[name], gradient, rtol=1e-10, atol=1e-12)


def initial(graph):
    return {
        stage.original_names[local]: parameter.detach()
        for stage in graph.stages
        for local, parameter in stage.named_parameters()
    }


@pytest.mark.parametrize("schedule", ONE_EACH)
@some_by_day("graph", GRAPHS, by_day=2)
def test_every_schedule_with_one_stage_a_mesh(graph, schedule):
    graph = GRAPHS[graph]()
    mesh_of_stage = [f"m{s}" for s in range(len(graph.stages))]
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, schedule)
    check_step(graph, mesh_of_stage, programs)


@pytest.mark.parametrize(
    ("schedule", "mesh_of_stage", "split"),
    [
        ("auto", ["m0"] * 4, None),
        ("auto", ["m0", "m0", "m1", "m1"], None),
        ("auto", ["m0", "m1", "m1", "m0"], None),
        ("auto", ["m0", "m1", "m1", "m0"], False),
        ("interleaved-1f1b", ["m0", "m1", "m0", "m1"], None),
        ("zb-v", ["m0", "m1", "m1", "m0"], None),
    ],
)
@some_by_day("graph", ["skips", "chain", "branches"], by_day=2)
def test_every_placement_with_several_stages_a_mesh(graph, schedule, mesh_of_stage, split):
    graph = GRAPHS[graph]()
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, schedule, split_backward=split)
    check_step(graph, mesh_of_stage, programs)


def test_forwards_that_wait_until_there_is_memory():
    mesh_of_stage = ["m0", "m1", "m2"]
    costs = {"forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0, "activation_bytes": 2}
    stages = [{"name": f"s{s}", "mesh": f"m{s}", "weight_stash_bytes": 1, **costs} for s in range(3)]
    edges = [
        {"source": f"s{s}", "target": f"s{s + 1}", "forward_s": 6.0, "backward_s": 6.0, "held_bytes": 6}
        for s in range(2)
    ]
    limited = {
        "stages": stages,
        "edges": edges,
        "meshes": [{"name": "m0", "memory_bytes": 12}, {"name": "m1"}, {"name": "m2"}],
        "network": {"contention": "link"},
    }
    _, programs = planned(chain(3), mesh_of_stage, 3, "auto", **limited)
    sends = {one.record for one in programs["m0"] if one.op == "SEND_F"}
    assert any(one.op == "F" and sends & {*one.wait} for one in programs["m0"])
    check_step(chain(3), mesh_of_stage, programs, 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
def test_a_named_schedule_with_split_backward(schedule):
    graph = skips()
    mesh_of_stage = [f"m{s}" for s in range(4)]
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, schedule, split_backward=True)
    assert any(i.op == "W" for i in programs["m0"])
    check_step(graph, mesh_of_stage, programs)


@some_by_day("seed", range(25), by_day=8)
def test_random_graphs_placements_costs_and_contention(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    count = len(graph.stages)
    names = [f"m{k}" for k in range(rng.randint(1, count))]
    mesh_of_stage = [*names, *(rng.choice(names) for _ in range(count - len(names)))]
    rng.shuffle(mesh_of_stage)
    costs = (
        [tuple(rng.choice([0.5, 1.0, 2.0]) for _ in range(3)) for _ in range(count)],
        rng.choice([0.0, 0.5, 2.0]),
    )
    microbatches = rng.randint(1, 7)
    _, programs = planned(
        graph,
        mesh_of_stage,
        microbatches,
        "auto",
        costs,
        network={"contention": rng.choice(["none", "link", "full-duplex", "half-duplex"])},
        overlap=rng.random() < 0.8,
        split_backward=rng.choice([None, True, False]),
    )
    check_step(graph, mesh_of_stage, programs, microbatches)


def test_inference_returns_the_outputs_of_the_unsplit_model():
    graph = skips()
    mesh_of_stage = [f"m{s}" for s in range(4)]
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, "inference")
    inputs, _ = batch(MICROBATCHES)
    expected = []
    for arguments in inputs:
        tensors = {"input:0": arguments[0]}
        for stage in graph.stages:
            tensors.update(zip(stage.outputs, stage(*(tensors[name] for name in stage.inputs)), strict=True))
        expected.append(tensors["output"].detach())
    with LocalPipeline(graph, mesh_of_stage, programs, MICROBATCHES) as pipeline:
        outputs = pipeline.step(0, [(inputs, None)])["m3", 0].outputs
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_a_given_order_of_backwards_is_run_as_given(split):
    graph = chain(4)
    meshes = [f"m{s}" for s in range(4)]
    kinds = ("I", "W") if split else ("B",)
    orders = {
        f"m{s}": [f"{s}F{m}" for m in range(3)] + [f"{s}{kind}{m}" for m in (1, 2, 0) for kind in kinds]
        for s in range(4)
    }
    _, programs = planned(graph, meshes, 3, "csv", orders=orders)
    check_step(graph, meshes, programs, 3)


def test_losses_and_gradients_go_by_microbatch_and_not_by_order_of_arrival():
    graph = skips()
    meshes = [f"m{s}" for s in range(4)]
    check_step(graph, meshes, serial_programs(graph, meshes, 4, order=[2, 0, 3, 1]), 4)


def test_a_cap_on_microbatches_in_flight_changes_nothing_but_the_order():
    graph = chain(4)
    meshes = [f"m{s}" for s in range(4)]
    _, programs = planned(graph, meshes, MICROBATCHES, "eager-1f1b", max_in_flight=4)
    check_step(graph, meshes, programs)
