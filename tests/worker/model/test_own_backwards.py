"""Autograd functions of transformers that are written anew: values and gradients of the library's own, also in a graph."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from tests.missing import needs_libraries
from worker.checks.trace import check_trace
from worker.contract.profile import TraceError
from worker.model.export import trace
from worker.model.hf_patches import patch_autograd_functions

pytestmark = needs_libraries("transformers")


def library(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def root(x):
    return library("recurrent_gemma").SqrtBoundDerivative.apply(x)


def mixed(x):
    gates = torch.softmax(x, -1).detach()
    selected = torch.tensor([[1], [0], [3]])
    multiplier = torch.softmax(x, -1).gather(-1, selected)
    mask = torch.tensor([[1.0], [0.3333], [1.0]])
    return library("phimoe").PhimoeMultiplier.apply(x, multiplier, selected, gates, mask)


POINTS = {
    "root": (root, torch.tensor([[0.0, 1e-9, 1e-7, 0.3], [0.5, 1.0, 4.0, 1e-8], [2.0, 1e-3, 0.0, 9.0]])),
    "mixed": (mixed, torch.randn(3, 4, generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", POINTS)
def test_a_function_written_anew_has_the_librarys_values_and_gradients(name):
    function, x = POINTS[name]
    made = []
    for kept in (False, True):
        at = x.clone().requires_grad_()
        if kept:
            with patch_autograd_functions():
                value = function(at)
        else:
            value = function(at)
        (value * torch.arange(1.0, 1 + value.numel()).view_as(value)).sum().backward()
        made.append((value.detach(), at.grad))
    for expected, found in zip(*made, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


class Between(nn.Module):
    """A layer, then such a function, of values and to values of another size."""

    def __init__(self, function, before=1.0, after=1.0):
        super().__init__()
        self.layer, self._function, self._before, self._after = nn.Linear(4, 4), function, before, after

    def forward(self, x):
        return self._after * self._function(self.layer(x).abs() * self._before)


# roots of numbers whose slope is bounded
MODELS = {"root": lambda: Between(root, 1e-9, 1e6), "mixed": lambda: Between(mixed)}


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_has_the_backward_of_the_function(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(MODELS[name](), nn.Linear(4 if name == "root" else 1, 4)), torch.randn(3, 4)
    assert check_trace(model, trace(model, (x,)), nn.MSELoss, torch.ones(3, 4)) == []


class Doubled(torch.autograd.Function):
    """One that nobody has written anew."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_any_other_own_backward_is_still_refused():
    model, x = nn.Sequential(Between(Doubled.apply), nn.Linear(4, 4)), torch.randn(3, 4)
    with pytest.raises(TraceError, match="autograd function Doubled"):
        check_trace(model, trace(model, (x,)), nn.MSELoss, torch.ones(3, 4))
