"""Recomputation by block: what is kept, what runs again and when, and that everything comes out as without it."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.engine.engine_support import planned
from tests.worker.engine.recomputation.test_recompute import check_same, run
from tests.worker.engine.test_models import MICROBATCHES, gpt_job
from worker.engine.autograd import WeightBackward
from worker.engine.forward import keeping_no_tensors
from worker.engine.recomputation.blocks import KeptBlocks, StageBlocks
from worker.engine.results import StageError
from worker.model.export import trace

WIDTH = 8


class Block(nn.Module):
    """Normalises, which moves running statistics, drops, and adds what came in."""

    def __init__(self, drop):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), drop

    def forward(self, x):
        return x + functional.dropout(self.norm(torch.tanh(self.linear(x))), self.drop)


class Blocks(nn.Module):
    """Blocks in a row, the first two also added behind the last. `side_too`: a tuple with what a layer before them makes."""

    def __init__(self, count=4, *, side_too=False, tied=False, drop=0.25):
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.side = nn.Linear(WIDTH, WIDTH) if side_too else None
        if tied:
            self.head.weight = self.blocks[0].linear.weight

    def forward(self, x):
        side, made = None if self.side is None else self.side(x), []
        for block in self.blocks:
            x = block(x)
            made.append(x)
        x = self.head(x + made[0] + made[1])
        return x if side is None else (x, side)


def stage_of(model, rows=6):
    torch.manual_seed(0)
    return trace(model.double(), (torch.randn(rows, WIDTH, dtype=torch.float64),)).cut(
        ["side" if model.side is not None else "blocks.0"]
    )


def job(rows=6):
    draw = torch.Generator().manual_seed(1)
    values = [torch.randn(rows, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2 * MICROBATCHES)]
    return [(value,) for value in values[:MICROBATCHES]], values[MICROBATCHES:]


def on_one_mesh(graph, method, **options):
    meshes = ["m0"] * len(graph.stages)
    _, programs = planned(graph, meshes, MICROBATCHES, "auto")
    return run(graph, meshes, programs, job(), {0: method} if method else {}, **options)


class Linears(TorchDispatchMode):
    """Notes each product of a linear layer."""

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.addmm.default:
            self.notes.append("linear")
        return function(*arguments, **(keywords or {}))


def test_blocks_are_the_layers_and_run_again_one_at_a_time_from_the_last():
    (stage,) = stage_of(Blocks(drop=0.0)).stages
    blocks, kept, notes = StageBlocks(stage.body), KeptBlocks(), []
    assert len(blocks) == 5
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    with keeping_no_tensors():
        (first,) = blocks.run(x, kept=kept)
    # what the four blocks make; the head's result is kept by nobody
    assert sorted(value.numel() for value in kept.values.values()) == [6 * WIDTH] * 4

    def again(module, values):
        notes.append("block")
        with Linears(notes):
            return module(*values)

    def backward(roots, gradients, leaves):
        notes.append(f"backward to {len(leaves)}")
        torch.autograd.backward(roots, gradients)
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found, WeightBackward()

    last = blocks.last([x], kept)
    with Linears(notes):
        (second,) = last(*last.arguments)
    assert torch.equal(first, second)
    ones = torch.ones_like(second)
    (found,), _ = blocks.backward(kept, last, [second], [ones], [x], run=again, backward=backward)
    assert notes == [
        *("linear", "backward to 3"),  # the head takes three results
        *(("block", "linear", "backward to 1") * 4),
    ]
    assert not kept.values.keys() - {"x"}
    plain = x.detach().requires_grad_()
    stage(plain)[0].sum().backward()
    assert torch.equal(found, plain.grad)


@pytest.mark.parametrize("options", [{}, {"side_too": True}])
def test_dropout_running_statistics_and_outputs_of_early_blocks_come_out_as_they_do(options):
    def loss(output, target):
        if isinstance(output, tuple):
            output, side = output
            side.mul_(0.5)  # what the model returned is the loss's own
            return functional.mse_loss(output, target) + side.square().mean()
        return functional.mse_loss(output, target)

    graph = stage_of(Blocks(**options))
    whole = on_one_mesh(graph, None, loss=loss)
    assert any("running_mean" in name for name in whole[2])
    check_same(on_one_mesh(graph, "by_block", loss=loss), whole)


def test_a_loss_draws_what_it_drew_without_recomputing():
    def loss(output, target):
        return functional.mse_loss(functional.dropout(output, 0.5), target)

    graph = stage_of(Blocks())  # the head, which runs again before the loss, draws nothing
    whole = on_one_mesh(graph, None, loss=loss)
    for method in ("whole", "by_block"):
        check_same(on_one_mesh(graph, method, loss=loss), whole)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_a_parameter_of_two_blocks_differ_by_the_order_of_sums_alone(precision):
    graph = stage_of(Blocks(tied=True))
    whole, again = (on_one_mesh(graph, method, steps=1, precision=precision) for method in (None, "by_block"))
    assert again[0] == whole[0]
    different = [name for name, value in whole[1].items() if not torch.equal(again[1][name], value)]
    assert {*different} <= {"blocks.0.linear.weight"}
    for name in different:
        torch.testing.assert_close(again[1][name], whole[1][name], rtol=1e-12, atol=1e-14)


def test_a_value_between_blocks_that_is_changed_in_place_is_refused_by_name():
    graph = stage_of(Blocks())
    (stage,) = graph.stages
    (head,) = [node for node in stage.body.graph.nodes if node.name == "linear_4"]
    with stage.body.graph.inserting_before(head):
        alone = stage.body.graph.call_function(torch.ops.aten.detach.default, (head.args[0].args[1],))
        changed = stage.body.graph.call_function(torch.ops.aten.mul_.Tensor, (alone, 0.5))
    for node in (alone, changed):
        node.meta |= head.meta
    stage.body.recompile()
    with pytest.raises(
        StageError, match=r"0F\d raised RuntimeError: 'add_1', which .* changed in place .*recompute"
    ):
        on_one_mesh(graph, "by_block")


def test_a_stage_of_one_layer_recomputes_wholly():
    job = gpt_job()
    graph = job.cut(7)
    assert [len(StageBlocks(stage.body)) for stage in graph.stages] == [1] * 7
