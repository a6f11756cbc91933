"""Transfers run beside computation: stages that sleep, links that take time, slots that tell."""

import time

import pytest
import torch
from engine_support import LocalPipeline, batch, chain, planned

from worker.driver.timing import rendezvous_times
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
    slots = rendezvous_times({mesh: result.slots for (mesh, _), result in results.items()})
    compute = [s for mesh in slots.values() for s in mesh if s.action in ("F", "B")]
    return max(s.end_s for s in compute) - min(s.start_s for s in compute), slots, plan.makespan_s


def test_a_step_is_never_shorter_than_planned_and_overlap_shortens_it(slow):
    blocking, _, planned_blocking = run(slow, "1f1b", overlap=False)
    overlapped, _, planned_overlapped = run(slow, "eager-1f1b")
    assert planned_overlapped < 0.75 * planned_blocking
    assert overlapped < blocking
    assert planned_overlapped * 0.98 < overlapped


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
    transfers = [s for s in slots["m1"] if s.action == "RECV_F"]
    compute = [s for s in slots["m1"] if s.action in ("F", "B")]
    beside = [t for t in transfers if any(c.start_s < t.end_s and t.start_s < c.end_s for c in compute)]
    assert len(beside) >= len(transfers) // 2
