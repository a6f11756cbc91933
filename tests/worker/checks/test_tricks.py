"""Tricks of other people's models that no other test has: equal to the model itself, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.worker.model.lying_models import WIDTH, ComplexWeight
from tests.worker.model.stateful_models import Plain
from worker.checks.hazards import check_trainable
from worker.checks.trace import check_trace
from worker.contract.profile import TraceError
from worker.model.export import trace


class Reassigned(Plain):
    """A buffer that is given a new tensor, and read before and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def between(self, x):
        y = x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return y + self.mean


class Draws(Plain):
    """Random numbers of torch, by all the operators that models choose with."""

    def between(self, x):
        order = torch.randperm(x.shape[-1])
        chosen = torch.multinomial(functional.softmax(x.detach(), -1), 1)
        return x[:, order] * functional.gumbel_softmax(x, hard=True).sum(-1, keepdim=True) + chosen


class CountedEmbedding(nn.Module):
    """Gradients of words divided by how often they stand in a microbatch, and none for padding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH, padding_idx=0, scale_grad_by_freq=True)
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        words = (x > 0).long() + (x > 1).long()
        return self.first(self.embed(words).mean(1))


class GradientsTurnedOn(Plain):
    def between(self, x):
        with torch.no_grad():
            mask = (x > 0).float()
            with torch.enable_grad():
                x = x * 2
        return x * mask


class SecondOrder(Plain):
    """A penalty on the gradient of its own layer."""

    def between(self, x):
        made = torch.tanh(self.first(x))
        (slope,) = torch.autograd.grad(made.sum(), self.first.weight, create_graph=True)
        return made + slope.square().mean()


class Compiled(Plain):
    def between(self, x):
        return _compiled(x)


_compiled = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")


class MakesParameter(Plain):
    """A weight that the first forward makes, as for an unknown number of features."""

    def between(self, x):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(x.shape[-1]))
        return x * self.scale


class Scripted(Plain):
    def __init__(self):
        super().__init__()
        self.first = torch.jit.script(self.first)


def rows():
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def checked(model):
    torch.manual_seed(0)
    built = model()
    check_trainable(built)
    traced = trace(built, (rows(),))
    return check_trace(built, traced, nn.MSELoss, torch.full((4, WIDTH), 0.5))


@pytest.mark.parametrize(
    "model", [Reassigned, Draws, CountedEmbedding, GradientsTurnedOn, Compiled, ComplexWeight]
)
def test_a_trick_that_a_trace_holds_is_equal_to_the_model_itself(model):
    assert checked(model) == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_module_is_refused_by_name():
    with pytest.raises(
        TraceError, match=r"cannot trace Scripted, in module 'first' \(RecursiveScriptModule\)"
    ):
        checked(Scripted)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (SecondOrder, r"test_tricks.py:\d+: it takes gradients with torch\.autograd\.grad"),
        (MakesParameter, r"forward makes 'scale', a parameter .*make it in __init__"),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH)),
            "parameter '1.weight' has no shape",
        ),
    ],
)
def test_a_trick_that_no_trace_holds_is_refused_by_name(model, message):
    with pytest.raises(TraceError, match=message):
        checked(model)
