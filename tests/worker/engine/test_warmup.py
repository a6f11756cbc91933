"""What happens before the first slot: kernels warmed, limits derived."""

import copy
import functools
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.worker.engine.engine_support import LocalPipeline, Plain, batch, chain, serial_programs, skips
from tests.worker.engine.lanes.test_cuda import CudaPipeline
from worker.contract.program import Instruction
from worker.engine import warmup
from worker.engine.actions import Actions
from worker.engine.results import SlotLimits, StageError, slot_limits
from worker.transport.base import EngineError
from worker.transport.local import LocalTransport

MESHES = ["m0", "m0", "m1", "m1"]


def dropping():
    """A chain with dropout and running statistics."""
    graph = chain(4, dropout=0.3)
    graph.stages[2].lin = nn.Sequential(graph.stages[2].lin, nn.BatchNorm1d(6, dtype=torch.float64))
    graph.stages[2].original_names = {n: f"2.{n}" for n in graph.stages[2].state_dict()}
    return named(graph)


def named(graph):
    """The stages of `graph` with the buffers that they update named, as by a trace."""
    for stage in graph.stages:
        stage.updated_buffers = tuple(name for name, _ in stage.named_buffers())
    return graph


class Counter(torch.optim.SGD):
    """SGD with noise, whose rate depends on a counter and on an entry of its own groups."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls = 0
        self.param_groups[0]["seen"] = torch.zeros(())

    def step(self, closure=None):
        self.calls += 1
        group = self.param_groups[0]
        group["seen"] += 1
        group["lr"] = 0.1 / (self.calls + float(group["seen"])) + 1e-3 * random.random() * np.random.rand()
        return super().step(closure)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": Counter,
    "fused": functools.partial(torch.optim.AdamW, fused=True),  # skips by itself
    "fused momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def trained(make, steps, warm, seed):
    """All states, gradient norms and random numbers after some steps, and again after a resume."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    found, state = [], None
    for _ in range(2):
        with make() as pipeline:
            if state:
                pipeline.each(lambda key, engine, state=state: engine.load_state(state[key]))
            if warm:
                pipeline.each(lambda key, engine: engine.warm_up(0, *batch(2)))
            for step in range(steps):
                results = pipeline.step(step, [batch(2, seed=step)])
                found.append({key: r.grad_norm for key, r in results.items()})
            state = copy.deepcopy({key: engine.state() for key, engine in pipeline.engines.items()})
            found.append(state)
    return [*found, float(torch.rand(())), random.random(), np.random.rand()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("lanes", ["threads", "streams"])
def test_training_is_equal_to_the_bit_with_and_without_warming_up(lanes, split, optimizer, monkeypatch):
    # one engine: python's generators are shared, and engines of one process draw in no order
    graph, meshes = dropping(), ["m0"] * 4
    programs = serial_programs(graph, meshes, 2, split)
    options = {"optimizer": OPTIMIZERS[optimizer], "clip_grad_norm": 0.5}

    def make():
        if lanes == "threads":
            return LocalPipeline(graph, meshes, programs, 2, **options)
        return CudaPipeline(monkeypatch, graph, meshes, programs, 2, seed=None, **options)

    without, with_it = (trained(make, 3, warm, seed=7) for warm in (False, True))
    for a, b in zip(without, with_it, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("split", [False, True])
def test_every_instruction_runs_on_the_threads_of_the_step_without_a_transfer(split, monkeypatch):
    graph = skips()
    programs = serial_programs(graph, MESHES, 2, split)
    ran, moved = [], []
    of = Actions.of

    def noted(actions, index):
        action = of(actions, index)

        def run():
            ran.append((str(actions._program[index]), threading.current_thread().name))
            return action()

        return run

    monkeypatch.setattr(Actions, "of", noted)
    for name in ("send", "receive", "all_reduce", "start_all_reduce"):
        real = getattr(LocalTransport, name)
        monkeypatch.setattr(
            LocalTransport, name, lambda *a, n=name, real=real: moved.append(n) or real(*a), raising=True
        )
    with LocalPipeline(graph, MESHES, programs, 2, optimizer=torch.optim.AdamW) as pipeline:
        pipeline.each(lambda key, engine: engine.warm_up(0, *batch(2)))
        assert moved == []
        first, before = sorted(ran), len(ran)
        assert [name for name, _ in first] == sorted(str(i) for p in programs.values() for i in p)
        pipeline.step(0, [batch(2)])
        computes = {"F", "I", "B", "W", "REDUCE", "STEP"}

        def on_compute(entries):
            return sorted(e for e in entries if e[0].strip("0123456789") in computes)

        assert on_compute(ran[before:]) == on_compute(first), "the same actions on the same threads"
        assert {thread for name, thread in on_compute(first)} == {"slotline-compute"}
        assert moved


def test_meshes_warm_up_alone_and_the_loss_of_zeros_does_not_matter():
    graph = chain(4)
    programs = serial_programs(graph, MESHES, 2)
    stepped = []

    class Noted(torch.optim.SGD):
        def step(self, closure=None):
            stepped.append(1)
            return super().step(closure)

    def no_number(output, target):
        return torch.log(output.mean() * 0.0)

    with LocalPipeline(graph, MESHES, programs, 2, optimizer=Noted, loss=no_number) as pipeline:
        before = copy.deepcopy(pipeline.engines["m1", 0].state())
        pipeline.engines["m1", 0].warm_up(0, *batch(2))
        assert stepped == [1], "STEP does what it does in a step"
        assert same(before, pipeline.engines["m1", 0].state())


def test_streams_warm_up_by_themselves_before_the_first_step(monkeypatch):
    graph = chain(4)
    meshes = ["m0", "m1", "m2", "m3"]
    programs = serial_programs(graph, meshes, 2)
    plain = Plain(graph)
    for seed in range(3):
        with CudaPipeline(monkeypatch, graph, meshes, programs, 2, seed=seed, warm_up=True) as pipeline:
            losses, gradients = plain.step(*batch(2))
            assert pipeline.step(0, [batch(2)])["m3", 0].losses == pytest.approx(losses, abs=1e-10)
            for name, gradient in pipeline.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
            order = [entry.split()[1] for entry in pipeline.machine.order if entry.startswith("m1 ")]
            assert len(order) == 2 * len(programs["m1"])


def test_a_stage_that_raises_while_warming_up_is_named():
    graph = chain(4)
    graph.stages[3]._function = lambda module, x: 1 / 0
    with LocalPipeline(graph, MESHES, serial_programs(graph, MESHES, 2), 2) as pipeline:
        with pytest.raises(EngineError, match=r"call warm_up\(\) before rehearse"):
            pipeline.engines["m1", 0].rehearse(0)
        with pytest.raises(StageError, match="3F0 raised ZeroDivisionError"):
            pipeline.engines["m1", 0].warm_up(0, *batch(2))
        with pytest.raises(EngineError, match="ended before"):
            pipeline.engines["m1", 0].run_step(0, *batch(2))


@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_workers_that_share_an_optimizer_warm_up_without_a_trace(optimizer):
    graph, meshes = named(chain(4)), ["m0"] * 4
    states = []
    for warm in (False, True):
        with LocalPipeline(
            graph,
            meshes,
            serial_programs(graph, meshes, 2),
            2,
            optimizer=OPTIMIZERS[optimizer],
            workers=2,
            sharded=("m0",),
        ) as pipeline:
            for step in range(2):
                if warm:
                    pipeline.each(lambda key, engine, step=step: engine.warm_up(step, *batch(2)))
                pipeline.step(step, [batch(2, seed=step + 7 * worker) for worker in range(2)])
            states.append(copy.deepcopy(pipeline.each(lambda key, engine: engine.state())))
    assert same(*states)


@pytest.mark.parametrize(("optimizer", "copied"), [("adamw", "all"), ("fused", "buffers")])
def test_what_a_step_can_leave_as_it_is_is_not_copied(optimizer, copied, monkeypatch):
    """Host memory of a node: parameters and optimizer state of all its GPUs were there twice while they warmed up."""
    graph = chain(4)
    for stage in graph.stages:
        stage.register_buffer("calls", torch.zeros(3))
    named(graph)
    for stage in graph.stages:
        stage.register_buffer("constant", torch.zeros(1000))
    snapshots = []
    taken = warmup.StateSnapshot.__init__
    monkeypatch.setattr(
        warmup.StateSnapshot, "__init__", lambda self, *a, **k: snapshots.append(self) or taken(self, *a, **k)
    )
    with LocalPipeline(
        graph, ["m0"] * 4, serial_programs(graph, ["m0"] * 4, 2), 2, optimizer=OPTIMIZERS[optimizer]
    ) as pipeline:
        pipeline.step(0, [batch(2)])  # as after a resume the optimizer has state
        engine = pipeline.engines["m0", 0]
        sizes = sum(p.nbytes for p in engine._update.parameters.values())
        engine.warm_up(1, *batch(2))
    held = {id(leaf): leaf for leaf in tree_leaves([snapshots[-1]._tensors, snapshots[-1]._state])}
    copies = [leaf.values for leaf in held.values() if isinstance(leaf, warmup._TensorCopy)]
    buffers = sum(stage.calls.nbytes for stage in graph.stages)
    assert sum(one.nbytes for one in copies if one.ndim) == buffers + (3 * sizes if copied == "all" else 0)


def test_limits_allow_for_what_an_instruction_waits_for():
    program = (
        Instruction("F", "compute", stage=0, microbatch=0),
        Instruction("SEND_F", "send:m1", stage=0, microbatch=0, edge=0, peer="m1"),
        Instruction("B", "compute", stage=0, microbatch=0),
        Instruction("REDUCE", "compute"),
    )
    limits = SlotLimits(factor=10.0, floor_s=3.0)
    assert slot_limits(program, [1.0, 0.1, 2.0, 0.0], limits) == [10.0, 21.0, 20.0, 30.0]
    assert slot_limits(program, [0.01] * 4, limits) == [3.0] * 4
    assert slot_limits(program, None, limits) == [3.0] * 4
