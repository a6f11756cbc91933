"""Receive buffers: reused, never while somebody still needs what is in them."""

import random
import time
import weakref
from dataclasses import replace

import pytest
import torch

from tests.polling import until
from tests.worker.engine.engine_support import (
    Graph,
    LocalPipeline,
    Plain,
    batch,
    chain,
    make_stage,
    planned,
    random_graph,
)
from worker.contract.program import COMPUTE_OPS, RECEIVE_OPS, Instruction
from worker.engine.actions import plan_buffers
from worker.engine.results import StageError
from worker.engine.routes import find_routes
from worker.transport.local import LocalTransport


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
                engine._buffers.buffer_of[index] = 0
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


def handing_through(last: int) -> Graph:
    """A chain of which stages 1 to `last` hand on what they get: nothing of it is theirs to keep."""
    graph = chain(4)
    for s in range(1, last + 1):
        name = "output" if s == 3 else f"h{s}"
        graph.stages[s] = make_stage(s, [f"h{s - 1}"], [name], lambda module, x: (x.view_as(x),))
    return graph


@pytest.fixture
def slow_sends(monkeypatch):
    """Tensors leave a mesh long after their send began: its next receives come first, if they may."""
    receive = LocalTransport._receive

    def slow_receive(self, box, peer, tag, out):
        if self.mesh in ("m0", "m2", "m3"):
            time.sleep(0.02)
        receive(self, box, peer, tag, out)

    monkeypatch.setattr(LocalTransport, "_receive", slow_receive)


@pytest.mark.parametrize("last", [1, 2, 3], ids=["one stage", "two stages", "up to the model's output"])
@pytest.mark.parametrize("mesh_of_stage", [["m0", "m1", "m2", "m3"], ["m0", "m1", "m1", "m2"]], ids=str)
def test_what_a_stage_hands_through_arrives_as_it_was_though_its_buffer_is_taken_again(
    last, mesh_of_stage, slow_sends
):
    graph = handing_through(last)
    _, programs = planned(graph, mesh_of_stage, 8, "inference")
    inputs, _ = batch(8)
    with LocalPipeline(graph, mesh_of_stage, programs, 8) as pipeline:
        results = pipeline.step(0, [(inputs, None)])
    found = results[mesh_of_stage[-1], 0].outputs
    for output, (x,) in zip(found, inputs, strict=True):
        for stage in graph.stages:
            (x,) = stage(x)
        torch.testing.assert_close(output, x.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("mesh_of_stage", [["m0", "m1", "m2", "m3"], ["m0", "m1", "m1", "m2"]], ids=str)
def test_gradients_through_a_stage_that_hands_them_on_are_those_of_the_plain_run(
    last, mesh_of_stage, split, slow_sends
):
    graph = handing_through(last)
    schedule = "gpipe" if len(set(mesh_of_stage)) == 4 else "auto"
    _, programs = planned(graph, mesh_of_stage, 8, schedule, split_backward=split)
    losses, gradients = Plain(graph).step(*batch(8))
    with LocalPipeline(graph, mesh_of_stage, programs, 8) as pipeline:
        results = pipeline.step(0, [batch(8)])
        assert results[mesh_of_stage[-1], 0].losses == pytest.approx(losses, abs=1e-10)
        found = pipeline.gradients()
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


def residual_chain(count: int) -> Graph:
    """A chain of which no operation keeps what a stage hands on: x + tanh(linear)."""
    graph = chain(count)
    for s, stage in enumerate(graph.stages):
        graph.stages[s] = make_stage(
            s, stage.inputs, stage.outputs, lambda m, x: (x + torch.tanh(m.lin(x)),), lin=stage.lin
        )
    return graph


class OutputsInMemory:
    """Observes a stage: when the first gradient arrives, which its peer made of what was sent, waits until the memory of
    all outputs is free."""

    def __init__(self):
        self.made = []
        self.waited = False

    def on_output(self, stage, tensor, microbatch, value):
        self.made.append(weakref.ref(value.untyped_storage()))

    def on_send(self, route, backward, microbatch, tensor):
        pass

    def on_receive(self, route, backward, microbatch, tensor):
        if backward and not self.waited:
            self.waited = True
            until(lambda: not self.left(), lambda: f"{self.left()} of {len(self.made)}", limit_s=10)

    def on_action_end(self, action, stage, microbatch):
        pass

    def left(self):
        return sum(storage() is not None for storage in self.made)


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_an_output_that_was_sent_takes_no_memory_until_its_backward(split):
    graph, mesh_of_stage = residual_chain(2), ["m0", "m1"]
    _, programs = planned(graph, mesh_of_stage, 8, "gpipe", split_backward=split)
    losses, gradients = Plain(graph).step(*batch(8))
    observer = OutputsInMemory()
    with LocalPipeline(graph, mesh_of_stage, programs, 8) as pipeline:
        pipeline.engines["m0", 0].runners[0].observe(observer)
        results = pipeline.step(0, [batch(8)])
        assert results["m1", 0].losses == pytest.approx(losses, abs=1e-10)
        found = pipeline.gradients()
    assert observer.waited and len(observer.made) == 8
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
