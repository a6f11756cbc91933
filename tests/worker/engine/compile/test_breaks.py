"""torch.compile leaves out what draws from an own seed or sums with others, and breaks its graphs at nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from tests.worker.engine.compile.staged import TOKENS, gpt_stage, made
from worker.engine.compile import StageCompiler
from worker.engine.recomputation.products import KeptProducts, StageProducts

pytestmark = pytest.mark.usefixtures("no_generated_code")


def compiled(stage):
    compiler = StageCompiler(device="cpu", autocast=None, limit_s=3600)
    assert compiler.compile("stage s0", stage, [TOKENS]), compiler.notes
    return stage.compiled.graphs


def test_without_dropout_a_stage_is_one_graph_and_with_it_every_draw_begins_one():
    stage, _ = gpt_stage(layers=2)
    assert compiled(stage) == 1
    stage, _ = gpt_stage(layers=2, dropout=0.3)
    draws = [node.next for node in stage.body.graph.nodes if "restart" in str(node.target)]
    assert compiled(stage) == len(draws) + 1 > 5


def test_a_loss_that_draws_finds_the_generator_where_the_trace_leaves_it():
    """The restart in front of an attention that drops nothing is the last one, and no dropout comes behind it."""
    drawn = []
    for compiles in (False, True):
        stage, state = gpt_stage()
        if compiles:
            compiled(stage)
        torch.manual_seed(11 if compiles else 12)
        made(stage, state)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


def test_dropout_within_products_that_are_kept_has_its_masks():
    """With selective recomputation a module stands in the place of an attention."""
    results = []
    for compiles in (False, True):
        stage, state = gpt_stage(dropout=0.3)
        products = StageProducts()
        products.find(stage)
        if compiles:
            compiled(stage)
        kept = KeptProducts()
        with products.keeping(kept):
            first = made(stage, state)
        with products.taking(kept):
            assert all(torch.equal(a, b) for a, b in zip(first, made(stage, state), strict=True))
        results.append(first)
    for traced, found in zip(*results, strict=True):
        torch.testing.assert_close(found, traced)


class Sums(nn.Module):
    """As a sum with other workers: a compiler that looked into it would find what it cannot trace."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        assert not torch.compiler.is_compiling()
        self.calls += 1
        return _Double.apply(x)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_modules_run_as_they_are_between_graphs_and_other_strides_compile_nothing_more():
    root = nn.Module()
    root.sums, root.weight = Sums(), nn.Parameter(torch.randn(4, 4))
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.get_attr("weight")
    product = graph.call_function(torch.ops.aten.mm.default, (x, weight))
    summed = graph.call_module("sums", (product,))
    last = graph.call_function(torch.ops.aten.add.Tensor, (product, summed))
    graph.output((graph.call_function(torch.ops.aten.relu.default, (last,)),))
    stage = _Stage(fx.GraphModule(root, graph))
    compiler = StageCompiler(device="cpu", autocast=None, limit_s=3600)
    assert compiler.compile("stage s0", stage, [torch.randn(3, 4)]), compiler.notes
    assert stage.compiled.graphs == 2
    given = torch.randn(4, 3).t()  # as a stage of the same mesh may hand it on
    calls = root.sums.calls
    (found,) = stage(given)
    torch.testing.assert_close(found, (3 * given @ root.weight).relu())
    assert stage.compiled.graphs == 2
    assert stage.body.sums.calls == calls + 1


class _Stage(nn.Module):
    """A stage of one tensor."""

    inputs, outputs, model_outputs = ("x",), ("y",), ()

    def __init__(self, body):
        super().__init__()
        self.body, self.compiled = body, None

    def forward(self, x):
        return (self.compiled or self.body)(x)
