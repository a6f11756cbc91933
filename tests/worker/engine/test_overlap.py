"""Transfers run beside computation: stages that sleep, links that take time, slots that tell."""

import itertools
import threading
import time

import pytest
import torch

from tests.worker.engine.engine_support import LocalPipeline, batch, chain, planned
from worker.driver.step_measurement import align_transfers
from worker.transport.local import LocalTransport

STAGE_S, LINK_S = 0.02, 0.02
MESHES = ["m0", "m1", "m2", "m3"]
COSTS = [(STAGE_S, STAGE_S, STAGE_S)] * 4, LINK_S


@pytest.fixture
def slow(monkeypatch):
    """A chain whose forward sleeps as long as a transfer takes, and its backward twice as long."""
    receive = LocalTransport.receive

    def slow_receive(self, peer, tag, out):
        wait = receive(self, peer, tag, out)

        def slow_wait():
            wait()
            time.sleep(LINK_S)

        return slow_wait

    monkeypatch.setattr(LocalTransport, "receive", slow_receive)

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(STAGE_S)
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(2 * STAGE_S)
            return gradient.clone()

    graph = chain(4)
    for stage in graph.stages:
        stage._function = lambda module, x: (Sleep.apply(module.lin(x)),)
    return graph


def run(graph, schedule, **spec):
    """Measured makespan and slots of the second step, and the planned makespan."""
    plan, programs = planned(graph, MESHES, 6, schedule, COSTS, network={"contention": "link"}, **spec)
    with LocalPipeline(graph, MESHES, programs, 6, seed=None) as pipeline:
        pipeline.step(0, [batch(6)])
        results = pipeline.step(1, [batch(6)])
    slots = align_transfers({mesh: result.slots for (mesh, _), result in results.items()})
    compute = [s for mesh in slots.values() for s in mesh if s.action in ("F", "B")]
    return max(s.end_s for s in compute) - min(s.start_s for s in compute), slots, plan.makespan_s


@pytest.mark.slow
def test_a_step_is_never_shorter_than_planned_and_overlap_shortens_the_plan(slow):
    _, _, planned_blocking = run(slow, "1f1b", overlap=False)
    overlapped, _, planned_overlapped = run(slow, "eager-1f1b")
    assert planned_overlapped < 0.75 * planned_blocking
    assert planned_overlapped * 0.98 < overlapped, "sleeps are never shorter than they say"


class Meeting:
    """Forwards of the second mesh and the tensors that it receives, which wait for each other's beginning."""

    def __init__(self, microbatches):
        self.computing = [threading.Event() for _ in range(microbatches)]
        self.receiving = [threading.Event() for _ in range(microbatches)]
        self.missed = []

    def wait_for(self, event, what):
        if not event.wait(20):
            self.missed.append(what)


def meet(monkeypatch, meeting, overlap):
    """One step of two meshes: each forward of the second ends when the next tensor is on its way, and that
    tensor arrives when the forward has begun."""
    graph, receive, microbatches = chain(2), LocalTransport.receive, len(meeting.computing)
    receives, forwards = itertools.count(), itertools.count()

    def receive_beside(self, peer, tag, out):
        wait = receive(self, peer, tag, out)
        if self.mesh != "m1":
            return wait
        number = next(receives)
        meeting.receiving[number].set()

        def wait_beside():
            if number > 0 and overlap:
                meeting.wait_for(meeting.computing[number - 1], f"receive {number}")
            wait()

        return wait_beside

    def forward_beside(module, x):
        number = next(forwards)
        meeting.computing[number].set()
        if number + 1 < microbatches and overlap:
            meeting.wait_for(meeting.receiving[number + 1], f"forward {number}")
        elif number + 1 < microbatches and meeting.receiving[number + 1].is_set():
            meeting.missed.append(f"forward {number} beside a transfer")
        return (module.lin(x),)

    monkeypatch.setattr(LocalTransport, "receive", receive_beside)
    graph.stages[1]._function = forward_beside
    costs = [(1.0, 1.0, 1.0)] * 2, 1.0
    meshes = ["m0", "m1"]
    options = {"network": {"contention": "link"}, "overlap": overlap}
    _, programs = planned(graph, meshes, microbatches, "gpipe", costs, **options)
    with LocalPipeline(graph, meshes, programs, microbatches, seed=None) as pipeline:
        pipeline.step(0, [batch(microbatches)])


def test_a_tensor_is_on_its_way_while_the_one_before_it_is_computed(monkeypatch):
    meeting = Meeting(6)
    meet(monkeypatch, meeting, overlap=True)
    assert meeting.missed == []


def test_without_overlap_no_tensor_is_on_its_way_while_its_mesh_computes(monkeypatch):
    meeting = Meeting(6)
    meet(monkeypatch, meeting, overlap=False)
    assert meeting.missed == []


@pytest.mark.slow
def test_slots_keep_the_order_of_their_lane_and_every_transfer_has_equal_halves(slow):
    _, slots, _ = run(slow, "eager-1f1b")
    halves = {}
    for mesh in slots.values():
        lanes = {}
        for slot in mesh:
            lanes.setdefault(slot.lane, []).append(slot)
            if slot.edge is not None:
                key = (slot.edge, slot.microbatch, slot.action[-1])
                halves.setdefault(key, set()).add((slot.start_s, slot.end_s))
        for lane in lanes.values():
            starts = [slot.start_s for slot in lane]
            assert starts == sorted(starts)
    assert len(halves) == 3 * 6 * 2 and all(len(times) == 1 for times in halves.values())
