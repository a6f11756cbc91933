"""Programs that are swapped between two steps: the values of a run without swaps, and refusals that change nothing."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import (
    SHAPE,
    WIDTH,
    Edge,
    Graph,
    LocalPipeline,
    Plain,
    Recorder,
    batch,
    chain,
    linear,
    make_stage,
    planned,
    serial_programs,
    skips,
    tied_chain,
)
from tests.worker.engine.test_buffers import handing_through, slow_sends  # noqa: F401 (a fixture)
from worker.contract.planned import MeshProgram
from worker.transport.base import EngineError

MICROBATCHES = 4


def momentum(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


def prepared(pipeline, programs, microbatches=MICROBATCHES, **fields):
    """What each engine says of its program; all prepare at once."""
    return pipeline.each(
        lambda key, engine: engine.prepare_program(
            MeshProgram(tuple(programs[key[0]]), microbatches, **fields)
        )
    )


def ran(graph, mesh_of_stage, programs, *, other=None, swap_before=2, steps=4, workers=1, **options):
    """(losses, state at the end, what was said of the order of sums) of a run in which `other` is swapped in."""
    losses, same = [], {}
    with LocalPipeline(
        graph, mesh_of_stage, programs, MICROBATCHES, optimizer=momentum, workers=workers, **options
    ) as pipeline:
        for step in range(steps):
            if other is not None and step == swap_before:
                same = prepared(pipeline, other)
                pipeline.each(lambda key, engine: engine.swap_program())
            results = pipeline.step(step, [batch(MICROBATCHES, seed=9 * step + w) for w in range(workers)])
            losses.append([results[key].losses for key in sorted(results) if results[key].losses])
        states = pipeline.each(lambda key, engine: copy.deepcopy(engine.state()))
    merged = {"parameters": {}, "buffers": {}, "optimizer": {}}
    for (_, worker), state in states.items():
        for kind, found in merged.items() if worker == 0 else ():
            found.update(state[kind])
    return losses, merged, same


def assert_equal_to_the_bit(one, other):
    assert one["parameters"].keys() == other["parameters"].keys()
    for name, tensor in one["parameters"].items():
        assert torch.equal(tensor, other["parameters"][name]), name
    for name, entry in one["optimizer"].items():
        for key, tensor in entry.items():
            assert torch.equal(torch.as_tensor(tensor), torch.as_tensor(other["optimizer"][name][key])), name


@pytest.mark.parametrize("workers", [1, 2])
@some_by_day("graph", [skips, lambda: chain(4), tied_chain], by_day=1, ids=["skips", "chain", "tied"])
def test_another_order_of_slots_gives_the_run_without_a_swap_to_the_bit(graph, workers):
    graph = graph()
    meshes = [f"m{s}" for s in range(len(graph.stages))]
    programs = serial_programs(graph, meshes, MICROBATCHES)
    other = planned(graph, meshes, MICROBATCHES, "1f1b")[1]
    assert any([str(i) for i in other[mesh]] != [str(i) for i in programs[mesh]] for mesh in meshes)
    losses, state, _ = ran(graph, meshes, programs, workers=workers)
    swapped = ran(graph, meshes, programs, other=other, workers=workers)
    assert swapped[0] == losses
    assert_equal_to_the_bit(swapped[1], state)
    assert set(swapped[2].values()) == {True}


def normalised() -> Graph:
    """Stages that move buffers, draw and hand an input through: its receive buffer is used again."""
    torch.manual_seed(5)

    def layers():
        return {"l": linear(), "n": nn.BatchNorm1d(WIDTH, dtype=torch.float64), "d": nn.Dropout(0.3)}

    stages = [
        make_stage(0, ["input:0"], ["a"], lambda m, x: (m.d(m.n(m.l(x))),), **layers()),
        make_stage(1, ["a"], ["a'", "b"], lambda m, a: (a, m.d(m.n(m.l(a)))), **layers()),
        make_stage(2, ["a'", "b"], ["output"], lambda m, a, b: (m.l(m.n(a * b)),), **layers()),
    ]
    return Graph(stages, (Edge(0, 1, "a", SHAPE), Edge(1, 2, "a'", SHAPE), Edge(1, 2, "b", SHAPE)))


def test_random_numbers_moved_buffers_and_shared_optimizer_state_go_on_to_the_bit():
    graph, meshes = normalised(), ["m0", "m1", "m2"]
    programs = planned(graph, meshes, MICROBATCHES, "1f1b")[1]
    other = serial_programs(graph, meshes, MICROBATCHES)
    options = {"workers": 2, "seed": 3, "sharded": ("m0", "m1", "m2")}
    losses, state, _ = ran(graph, meshes, programs, **options)
    swapped = ran(graph, meshes, programs, other=other, **options)
    assert swapped[0] == losses and set(swapped[2].values()) == {True}
    assert_equal_to_the_bit(swapped[1], state)
    for name, tensor in state["buffers"].items():
        assert torch.equal(tensor, swapped[1]["buffers"][name]), name


@pytest.mark.parametrize("change", ["order of backwards", "split backwards"])
def test_another_order_of_sums_is_told_and_gives_the_run_without_a_swap_to_rounding(change):
    graph = skips()
    meshes = ["m0", "m0", "m1", "m1"]
    programs = serial_programs(graph, meshes, MICROBATCHES)
    split, order = change == "split backwards", [2, 0, 3, 1] if change == "order of backwards" else None
    other = serial_programs(graph, meshes, MICROBATCHES, split, order)
    losses, state, _ = ran(graph, meshes, programs)
    swapped = ran(graph, meshes, programs, other=other)
    assert set(swapped[2].values()) == {False}
    torch.testing.assert_close(swapped[0], losses, rtol=1e-10, atol=1e-12)
    for name, tensor in state["parameters"].items():
        torch.testing.assert_close(swapped[1]["parameters"][name], tensor, rtol=1e-10, atol=1e-12)


def test_stages_with_common_tensors_keep_the_order_of_sums_only_in_the_order_of_all_their_actions():
    graph = tied_chain()
    meshes = ["m0", "m1", "m0"]
    programs = serial_programs(graph, meshes, MICROBATCHES)
    orders = {
        "m0": [
            f"{s}{op}{m}" for s, op in ((0, "F"), (2, "F"), (2, "B"), (0, "B")) for m in range(MICROBATCHES)
        ],
        "m1": [f"1{op}{m}" for op in "FB" for m in range(MICROBATCHES)],
    }
    other = planned(graph, meshes, MICROBATCHES, "csv", orders=orders)[1]
    assert ran(graph, meshes, programs, other=other)[2] == {("m0", 0): False, ("m1", 0): True}


def other_programs():
    """What a running chain of two stages on two meshes refuses, and why."""
    graph, meshes = chain(2), ["m0", "m1"]
    programs = serial_programs(graph, meshes, MICROBATCHES)
    moved = serial_programs(graph, meshes[::-1], MICROBATCHES)
    return [
        ("another cut or placement", moved, {}),
        ("keeps its microbatches", serial_programs(graph, meshes, 2), {"microbatches": 2}),
        ("keeps what recomputes", programs, {"recomputed": {0: "whole"}}),
        ("keeps what recomputes", programs, {"recomputed": {0: "selective"}}),
        ("which nothing before it records", {m: tuple(reversed(p)) for m, p in programs.items()}, {}),
    ]


@pytest.mark.parametrize(("message", "programs", "fields"), other_programs())
def test_a_program_that_cannot_go_on_is_refused_and_the_running_one_goes_on(message, programs, fields):
    graph = chain(2)
    inputs, targets = batch(MICROBATCHES)
    losses, _ = Plain(graph).step(inputs, targets)
    with LocalPipeline(
        graph, ["m0", "m1"], serial_programs(graph, ["m0", "m1"], MICROBATCHES), MICROBATCHES
    ) as pipeline:
        with pytest.raises(ValueError, match=message):
            prepared(pipeline, programs, **fields)
        with pytest.raises(EngineError, match="no program was prepared"):
            pipeline.engines["m0", 0].swap_program()
        results = pipeline.step(0, [(inputs, targets)])
    assert results["m1", 0].losses == pytest.approx(losses, abs=1e-10)


def test_a_program_that_was_prepared_and_dropped_leaves_no_thread_and_a_swap_ends_those_of_before():
    graph, meshes = chain(2), ["m0", "m1"]
    programs = serial_programs(graph, meshes, MICROBATCHES)
    before = threading.active_count()
    with LocalPipeline(graph, meshes, programs, MICROBATCHES, optimizer=Recorder) as pipeline:
        running = threading.active_count()
        prepared(pipeline, programs)
        assert threading.active_count() > running
        pipeline.each(lambda key, engine: engine.drop_program())
        assert threading.active_count() == running
        for _ in range(3):
            prepared(pipeline, programs)
            pipeline.each(lambda key, engine: engine.swap_program())
            assert threading.active_count() == running
        prepared(pipeline, programs)
    assert threading.active_count() == before


@pytest.mark.usefixtures("slow_sends")
def test_what_a_stage_hands_through_is_copied_out_of_the_buffers_of_the_program_that_runs():
    graph, meshes = handing_through(2), [f"m{s}" for s in range(4)]
    programs = planned(graph, meshes, 8, "inference")[1]
    inputs, _ = batch(8)
    with LocalPipeline(graph, meshes, programs, 8) as pipeline:
        prepared(pipeline, programs, 8)
        pipeline.each(lambda key, engine: engine.swap_program())
        found = pipeline.step(0, [(inputs, None)])["m3", 0].outputs
    for output, (x,) in zip(found, inputs, strict=True):
        for stage in graph.stages:
            (x,) = stage(x)
        torch.testing.assert_close(output, x.detach(), rtol=1e-12, atol=1e-12)
