"""Receive buffers: reused, never while somebody still needs what is in them."""

import random
from dataclasses import replace

import pytest
import torch
from engine_support import LocalPipeline, batch, chain, planned, random_graph, skips

from worker.engine import StageError
from worker.engine.buffers import plan_buffers
from worker.engine.routes import find_routes
from worker.program import COMPUTE_OPS, RECEIVE_OPS, Instruction


def make_pipeline(microbatches=8):
    graph = chain(4)
    mesh_of_stage = ["m0", "m1", "m2", "m3"]
    _, programs = planned(graph, mesh_of_stage, microbatches, "1f1b")
    return LocalPipeline(graph, mesh_of_stage, programs, microbatches)


def test_a_buffer_that_is_overwritten_early_is_found_by_the_backward_that_needs_it():
    with make_pipeline() as pipeline:
        engine = pipeline.engines["m1", 0]
        for index, instruction in enumerate(engine._program):
            if instruction.op == "RECV_F":  # all forwards into one buffer: the second overwrites the first
                engine._buffers.of[index] = 0
                lane = engine._lanes._lanes[instruction.lane]
                lane.entries = [
                    replace(entry, action=engine._actions.of(index)) if entry.index == index else entry
                    for entry in lane.entries
                ]
        with pytest.raises((StageError, RuntimeError), match="modified by an inplace operation"):
            pipeline.step(0, [batch(8)])
        assert isinstance(pipeline.errors["m1", 0], StageError)


def test_buffers_are_as_few_as_microbatches_in_flight():
    with make_pipeline(microbatches=16) as pipeline:
        counts = [len(pipeline.engines[f"m{k}", 0]._buffers.tensors) for k in range(4)]
    # 1f1b keeps 3, 2 and 1 microbatches on these meshes; one more of each direction may be on its way.
    assert counts[1] <= 3 + 2 and counts[2] <= 2 + 2 and counts[3] <= 1 + 2, counts


@pytest.mark.parametrize("seed", range(20))
def test_no_order_that_the_events_allow_lets_two_tensors_share_a_buffer(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    mesh_of_stage = [f"m{s}" for s in range(len(graph.stages))]
    routes = find_routes(graph.edges, mesh_of_stage)
    _, programs = planned(graph, mesh_of_stage, rng.randint(2, 7), "1f1b", split_backward=rng.random() < 0.5)
    for program in programs.values():
        buffer = plan_buffers(program, routes).buffer
        assert all((b is not None) == (i.op in RECEIVE_OPS) for i, b in zip(program, buffer, strict=True))
        for _ in range(5):
            check_run(program, buffer, routes, rng)


def check_run(program, buffer, routes, rng):
    """Run the lanes in a random order, receives as early as the events allow, and watch the buffers."""
    lanes = {}
    for index, instruction in enumerate(program):
        lanes.setdefault(instruction.lane, []).append(index)
    done, owner = set(), {}
    remaining = {
        key: sum(i.op in COMPUTE_OPS and (i.stage, i.microbatch) == key for i in program)
        for key in {(i.stage, i.microbatch) for i in program if i.op in COMPUTE_OPS}
    }
    while any(lanes.values()):
        ready = [lane for lane, queue in lanes.items() if queue and set(program[queue[0]].wait) <= done]
        assert ready, "the program is stuck"
        receives = [lane for lane in ready if lane.startswith("recv:")]
        lane = rng.choice(receives if receives and rng.random() < 0.9 else ready)
        index = lanes[lane].pop(0)
        instruction = program[index]
        if instruction.op in RECEIVE_OPS:
            route = routes[instruction.edge]
            users = route.consumers if instruction.op == "RECV_F" else (route.source,)
            needed = {(user, instruction.microbatch) for user in users}
            held = owner.get(buffer[index], set())
            assert not any(remaining[key] for key in held), f"{instruction} overwrites what {held} need"
            owner[buffer[index]] = needed
        elif instruction.op in COMPUTE_OPS:
            remaining[instruction.stage, instruction.microbatch] -= 1
        if instruction.record is not None:
            done.add(instruction.record)


def test_a_wait_that_is_enqueued_before_its_record_is_refused():
    program = (
        Instruction("F", "compute", stage=0, microbatch=0, wait=(1,), record=0),
        Instruction("F", "compute", stage=0, microbatch=1, record=1),
    )
    with pytest.raises(ValueError, match="0F0 waits for event 1"):
        plan_buffers(program, {})


def test_a_stage_that_hands_its_input_through_keeps_no_pooled_memory_alive():
    graph = skips()
    graph.stages[1]._function = lambda module, a, x: (a,)
    mesh_of_stage = [f"m{s}" for s in range(4)]
    _, programs = planned(graph, mesh_of_stage, 6, "gpipe")
    with LocalPipeline(graph, mesh_of_stage, programs, 6) as pipeline:
        pipeline.step(0, [batch(6)])
        assert torch.isfinite(torch.tensor(pipeline.engines["m1", 0]._updated.grad_norm))
