"""A recomputed stage keeps its inputs only, and everything comes out as if it had kept all: bit for bit."""

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiers import some_by_day
from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import (
    SHAPE,
    Edge,
    Graph,
    LocalPipeline,
    batch,
    chain,
    linear,
    make_stage,
    planned,
    random_graph,
    skips,
    squared_error,
    tied_chain,
    two_branches,
)
from tests.worker.engine.test_models import MICROBATCHES, PLACEMENTS, gpt_job, unet_job
from tests.worker.model.odd_models import make
from worker.engine.results import StageError
from worker.model.export import trace

GRAPHS = {"chain": lambda: chain(4, 0.3), "skips": skips, "branches": two_branches, "tied": tied_chain}


def run(graph, meshes, programs, batches, recomputed=(), steps=2, **options):
    """Losses of each step, and what parameters, their gradients and buffers are in the end."""
    with LocalPipeline(
        graph,
        meshes,
        programs,
        len(batches[0]),
        recomputed=recomputed,
        seed=3,
        **options,
    ) as pipeline:
        losses = []
        for step in range(steps):
            results = pipeline.step(step, [batches])
            losses.append([loss for result in results.values() for loss in result.losses])
        state = {}
        for engine in pipeline.engines.values():
            state |= engine.state()["parameters"] | engine.state()["buffers"]
        return losses, pipeline.gradients(), {name: value.clone() for name, value in state.items()}


def check_same(first, second):
    assert first[0] == second[0]
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def choices(stages):
    return [set(range(stages)), {0}, {stages - 1}, set(range(0, stages, 2))]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@some_by_day("name", GRAPHS, by_day=2)
def test_losses_and_gradients_are_those_of_a_run_that_keeps_everything(name, schedule):
    graph = GRAPHS[name]()
    meshes = [f"m{s}" for s in range(len(graph.stages))]
    _, programs = planned(graph, meshes, 6, schedule)
    whole = run(graph, meshes, programs, batch(6))
    for recomputed in choices(len(graph.stages)):
        check_same(run(graph, meshes, programs, batch(6), recomputed), whole)


@pytest.mark.parametrize("seed", range(10))
def test_on_random_graphs_placements_and_choices(seed):
    rng = random.Random(seed)
    graph = random_graph(rng)
    count = len(graph.stages)
    meshes = [f"m{rng.randrange(min(2, count))}" for _ in range(count)]
    split = rng.random() < 0.5
    _, programs = planned(graph, meshes, 4, "auto", split_backward=split)
    recomputed = {s for s in range(count) if rng.random() < 0.6}
    methods = {s: "selective" if rng.random() < 0.5 else "whole" for s in recomputed}
    again = run(graph, meshes, programs, batch(4), methods)
    check_same(again, run(graph, meshes, programs, batch(4)))


@some_by_day("schedule", ["zb-h1", "1f1b"], by_day=1)
@some_by_day(
    "job", [functools.partial(gpt_job, 0.2), functools.partial(gpt_job, tied=True), unet_job], by_day=1
)
def test_traced_models_with_dropout_ties_and_skips(job, schedule):
    job = job()
    meshes = PLACEMENTS["four meshes"][0]
    graph = job.cut(4)
    _, programs = planned(graph, meshes, MICROBATCHES, schedule)
    batches = job.inputs, job.targets
    whole = run(graph, meshes, programs, batches, loss=job.loss)
    for recomputed in choices(4):
        check_same(run(graph, meshes, programs, batches, recomputed, loss=job.loss), whole)
    methods = {0: "selective", 1: "by_block", 2: "whole", 3: "selective"}
    for turn in range(3):
        turned = {stage: methods[(stage + turn) % 4] for stage in methods}
        check_same(run(graph, meshes, programs, batches, turned, loss=job.loss), whole)


def test_under_autocast():
    job = gpt_job(0.2)
    graph = job.cut(4)
    for stage in graph.stages:
        stage.float()
    graph = Graph(graph.stages, [copy.copy(edge) for edge in graph.edges], graph.tied)
    for edge in graph.edges:
        object.__setattr__(edge, "dtype", torch.float32)
    meshes = PLACEMENTS["four meshes"][0]
    _, programs = planned(graph, meshes, MICROBATCHES, "1f1b")
    batches = job.inputs, job.targets
    whole = run(graph, meshes, programs, batches, loss=job.loss, precision="bf16")
    for method in ("whole", "selective", "by_block"):
        methods = dict.fromkeys(range(4), method)
        check_same(run(graph, meshes, programs, batches, methods, loss=job.loss, precision="bf16"), whole)


class CountingCasts(TorchDispatchMode):
    """Notes in `casts` each cast of a weight."""

    def __init__(self, weight, casts):
        super().__init__()
        self.weight, self.casts = weight.data_ptr(), casts

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten._to_copy.default and arguments[0].data_ptr() == self.weight:
            self.casts.append(keywords["dtype"])
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_under_autocast_a_weight_is_cast_once_a_step(schedule):
    """By the forwards of all microbatches, the first and the second."""
    casts = []

    def forward(module, x):
        with CountingCasts(module.l.weight, casts):
            return (torch.tanh(module.l(x)),)

    graph = Graph([make_stage(0, ["input:0"], ["output"], forward, l=linear().float())], ())
    _, programs = planned(graph, ["m0"], 6, schedule)
    run(graph, ["m0"], programs, batch(6, dtype=torch.float32), {0}, steps=2, precision="bf16")
    assert len(casts) == 2


def running_statistics():
    """Three stages; the second normalises by its batch and counts, and its output depends on the count."""
    torch.manual_seed(5)

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(SHAPE[1], dtype=torch.float64)
            self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.calls += 1
            return self.norm(torch.tanh(x)) * (1 + 0.1 * float(self.calls))

    stages = [
        make_stage(0, ["input:0"], ["a"], lambda m, x: (m.l(x),), l=linear()),
        make_stage(1, ["a"], ["b"], lambda m, a: (m.n(m.l(a)),), l=linear(), n=Middle()),
        make_stage(2, ["b"], ["output"], lambda m, b: (m.l(b),), l=linear()),
    ]
    for name, _ in stages[1].named_buffers():
        stages[1].original_names[name] = f"1.{name}"
    return Graph(stages, (Edge(0, 1, "a", SHAPE), Edge(1, 2, "b", SHAPE)))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_running_statistics_move_once_a_microbatch_and_the_second_run_sees_what_the_first_saw(schedule):
    graph = running_statistics()
    meshes = ["m0", "m1", "m2"]
    _, programs = planned(graph, meshes, 5, schedule)
    whole = run(graph, meshes, programs, batch(5))
    assert whole[2]["1.n.calls"] == 10
    check_same(run(graph, meshes, programs, batch(5), {0, 1, 2}), whole)


@pytest.mark.parametrize(
    "name", ["batch norm and dropout", "parametrised", "a running mean", "constants", "noise and dropout"]
)
def test_the_buffers_that_a_traced_stage_updates_are_known_and_no_others(name):
    model, inputs = make(name)
    (stage,) = cut_evenly(trace(model, inputs), 1).stages
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}
    stage(*inputs)
    changed = {name for name, buffer in stage.named_buffers() if not torch.equal(before[name], buffer)}
    assert set(stage.updated_buffers) == changed
    assert bool(changed) == (name not in ("constants", "noise and dropout"))


class Counting(nn.Module):
    """A loss that changes with every call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, output, target):
        self.calls += 1
        return squared_error(output, target) * self.calls


def test_a_loss_is_called_once_a_microbatch():
    graph, meshes = chain(2), ["m0", "m1"]
    _, programs = planned(graph, meshes, 4, "1f1b")
    whole = run(graph, meshes, programs, batch(4), loss=Counting())
    check_same(run(graph, meshes, programs, batch(4), {0, 1}, loss=Counting()), whole)


def test_a_stage_that_changes_its_input_is_refused_by_name():
    stages = [
        make_stage(0, ["input:0"], ["a"], lambda m, x: (m.l(x),), l=linear()),
        make_stage(1, ["a"], ["output"], lambda m, a: (m.l(a.detach().mul_(2.0) + a),), l=linear()),
    ]
    graph, meshes = Graph(stages, (Edge(0, 1, "a", SHAPE),)), ["m0", "m1"]
    _, programs = planned(graph, meshes, 2, "1f1b")
    with pytest.raises(StageError, match=r"1F0 .* argument 0 of the stage was changed in place .*recompute"):
        run(graph, meshes, programs, batch(2), {1})
