"""One way to run a stage: what takes a gradient, what a backward starts from."""

import pytest
import torch
from torch import nn

from worker.engine.forward import gather_arguments, run_forward
from worker.engine.routes import LocalInput, ModelInput, RemoteInput, Route


def route(differentiable: bool) -> Route:
    return Route(0, 0, "t", "m0", "m1", (1,), (2,), torch.float32, differentiable)


@pytest.mark.parametrize(
    ("source", "dtype", "is_leaf"),
    [
        (ModelInput(0), torch.float32, False),
        (LocalInput(0, "t"), torch.float32, True),
        (LocalInput(0, "t"), torch.complex64, True),
        (LocalInput(0, "t"), torch.int64, False),
        (RemoteInput(route(True)), torch.float32, True),
        (RemoteInput(route(False)), torch.float32, False),
    ],
)
def test_what_another_stage_made_takes_a_gradient_where_there_can_be_one(source, dtype, is_leaf):
    made = torch.ones(2, dtype=dtype)
    found = gather_arguments([source], lambda _: made, training=True)
    assert len(found.leaves) == is_leaf and found.sources == [source] * is_leaf
    assert found.values[0].requires_grad == is_leaf
    assert not made.requires_grad, "the maker's tensor is left alone"
    assert gather_arguments([source], lambda _: made, training=False).leaves == []


class Both(nn.Module):
    def forward(self, x):
        return x * 2, x.detach(), x.sum()


def test_a_backward_starts_from_the_loss_and_from_every_other_output_with_a_gradient():
    x = torch.ones(2, requires_grad=True)
    run = run_forward(
        Both(),
        [x],
        device_type="cpu",
        training=True,
        autocast_dtype=None,
        loss_of=2,
        loss=lambda output: output * 10,
    )
    assert [root.tolist() for root in run.roots(2)] == [[2.0, 2.0], 20.0]
    run = run_forward(Both(), [x], device_type="cpu", training=False, autocast_dtype=None)
    assert run.loss is None and run.roots(None) == []


def test_the_loss_runs_under_autocast_and_sees_the_accepted_output():
    run = run_forward(
        nn.Linear(2, 2),
        [torch.ones(1, 2)],
        device_type="cpu",
        training=True,
        autocast_dtype=torch.bfloat16,
        accept=lambda outputs: [output.clone() for output in outputs],
        loss_of=0,
        loss=lambda output: torch.mm(output, output.T).sum(),
    )
    assert run.outputs[0].dtype == torch.bfloat16
    assert run.loss.dtype == torch.bfloat16, "a product under autocast"
