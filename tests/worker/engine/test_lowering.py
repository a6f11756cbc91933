"""Sent tensors on streams: dropped behind an action that waits for their send, and never more than planned."""

import random
import threading

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import Plain, batch, chain, planned, random_graph, skips, times_of
from tests.worker.engine.lanes.test_cuda import CudaPipeline
from worker.contract.program import COMPUTE_OPS, SEND_OPS
from worker.engine.lowering import bound_send_lifetimes
from worker.engine.routes import find_routes
from worker.transport.nccl import NcclTransport

SIZE = 3 * 6 * 8  # bytes of every tensor of engine_support's graphs


def live(engine):
    return len(engine._state.to_send) + len(engine._state.gradients_to_send)


class Counting(CudaPipeline):
    """Notes, whenever a compute action of a mesh has run, how many sent tensors live there."""

    def __init__(self, *arguments, **options):
        self.most = {}
        super().__init__(*arguments, **options)

    def logged(self, cuda, engine, index, action):
        def counted():
            action()
            if engine._program[index].op in COMPUTE_OPS:
                mesh = engine._mesh
                self.most[mesh] = max(self.most.get(mesh, 0), live(engine))

        return lambda: cuda.operation(index, engine._program[index], counted)


def planned_most(plan, mesh):
    """Of the sent tensors of a mesh, the most that the plan has at a time, when an action ends: those whose send has
    not ended when it starts, and its own."""
    slots = [s for s in plan.slots if s.mesh == mesh]
    sends = [s for s in slots if s.action in SEND_OPS]
    computes = {(s.action[-1], s.stage, s.microbatch): s for s in slots if s.lane == "compute"}

    def made_s(send):
        kinds = ("F",) if send.action == "SEND_F" else ("B", "I")
        return next(
            computes[k, send.stage, send.microbatch].end_s
            for k in kinds
            if (k, send.stage, send.microbatch) in computes
        )

    most = 0
    for action in computes.values():
        alive = [s for s in sends if made_s(s) <= action.end_s + 1e-9 and s.end_s > action.start_s + 1e-9]
        most = max(most, len(alive))
    return most


@some_by_day("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"], by_day=2)
def test_in_any_order_no_more_sent_tensors_live_than_the_plan_has(schedule, monkeypatch):
    graph = chain(4)
    meshes = [f"m{s}" for s in range(4)]
    plan, programs = planned(graph, meshes, 8, schedule)
    losses, gradients = Plain(graph).step(*batch(8))
    unbounded = 0
    for seed in range(6):
        with Counting(monkeypatch, graph, meshes, programs, 8, seed=seed, times=times_of(plan)) as pipeline:
            results = pipeline.step(0, [batch(8)])
            assert results["m3", 0].losses == pytest.approx(losses, abs=1e-10)
            for name, gradient in pipeline.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
            for mesh, most in pipeline.most.items():
                assert most <= planned_most(plan, mesh), (mesh, seed)
        with Counting(monkeypatch, graph, meshes, programs, 8, seed=seed) as pipeline:
            pipeline.step(0, [batch(8)])
            unbounded = max(unbounded, *pipeline.most.values())
    assert unbounded > max(planned_most(plan, mesh) for mesh in meshes), (
        "without planned times none is dropped"
    )


@pytest.mark.parametrize("seed", range(12))
def test_releases_never_make_a_cycle_whatever_the_graph(seed, monkeypatch):
    rng = random.Random(seed)
    graph = random_graph(rng)
    meshes = [f"m{s}" for s in range(len(graph.stages))]
    plan, programs = planned(graph, meshes, rng.randint(2, 6), "1f1b", split_backward=rng.random() < 0.5)
    microbatches = 1 + max(i.microbatch for i in programs["m0"] if i.microbatch is not None)
    with CudaPipeline(
        monkeypatch, graph, meshes, programs, microbatches, seed=seed, times=times_of(plan)
    ) as pipeline:
        pipeline.step(0, [batch(microbatches)])
        for engine in pipeline.engines.values():
            finished = pipeline.cudas[engine._mesh].finished_before()
            for action, sends in engine._actions._releases.items():
                assert all(send in finished[action] for send in sends)


def test_a_drop_that_does_not_wait_shows_in_some_order(monkeypatch):
    graph = chain(3)
    meshes = ["m0", "m1", "m2"]
    plan, programs = planned(graph, meshes, 6, "gpipe")

    def right(seed, changed):
        with CudaPipeline(
            monkeypatch, graph, meshes, programs, 6, seed=seed, times=times_of(plan), changed=changed
        ) as pipeline:
            try:
                pipeline.step(0, [batch(6)])
            except Exception:
                return False
            return True

    def forget(engine, lanes):
        for action in engine._actions._releases:
            lanes._waits[action] = [w for w in lanes._waits[action] if engine._program[w].op not in SEND_OPS]

    assert all(right(seed, lambda engine, lanes: None) for seed in range(6))
    assert not all(right(seed, forget) for seed in range(6))


def test_a_send_is_released_as_late_as_the_peak_of_the_plan_allows():
    graph = skips()
    meshes = ["m0", "m1", "m2", "m3"]
    plan, programs = planned(graph, meshes, 6, "1f1b")
    times = times_of(plan)
    for mesh in meshes:
        found = bound_send_lifetimes(
            programs[mesh],
            times[mesh]["planned_starts_s"],
            times[mesh]["planned_s"],
            find_routes(graph.edges, tuple(meshes)),
            lambda route: SIZE,
        )
        assert found.peak_bytes == SIZE * planned_most(plan, mesh)
        dropped = [send for sends in found.released_before.values() for send in sends]
        assert len(dropped) == len(set(dropped))
        assert all(programs[mesh][send].op in SEND_OPS for send in dropped)


def test_an_nccl_send_leaves_the_tensor_to_who_holds_it():
    class OnDevice(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream):
            raise AssertionError("the allocator would keep the tensor until the host sees the send end")

    transport = NcclTransport.__new__(NcclTransport)
    sent = []
    transport._state, transport._calls, transport._ender = threading.Condition(), 0, None
    transport._stream_pointer = lambda: 7
    transport._sends = {"m1": type("Link", (), {"send": lambda self, *arguments: sent.append(arguments)})()}
    tensor = torch.zeros(2).as_subclass(OnDevice)
    assert transport.send("m1", 0, tensor) is None
    assert sent == [(tensor.data_ptr(), 8, 1, 1, 7)]
