"""I and W together do exactly what B does: same gradients, same work, nothing twice."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from worker.engine.autograd import backward, backward_input

torch.manual_seed(0)
WIDTH = 8


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, WIDTH), nn.Tanh()
        )

    def forward(self, x, _):
        return (self.layers(x),)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.position = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x, y):
        q, k, v = self.qkv(x.view(1, 5, WIDTH) + self.position).chunk(3, -1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended).view(5, WIDTH) + x, y * 2


class TiedInside(nn.Module):
    """One weight, twice on the path of the input and once beside it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        h = self.other(torch.tanh(x @ self.w))
        return torch.tanh(h @ self.w.T) + self.w[0] * y, h


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.second = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, x, y):
        h = self.second(functional.silu(self.norm(self.first(x[:, None]))))[:, 0]
        return (torch.cat([h, y], 1),)


class FreeOutput(nn.Module):
    """An output that no input reaches, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.free = nn.Parameter(torch.randn(5, WIDTH))
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, x, y):
        return self.scale(x * self.frozen), self.scale(self.free)


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return (self.layer(x),)


class Identity(nn.Module):
    def forward(self, x, y):
        return x.view_as(x), y


MODULES = [Mlp, Attention, TiedInside, Convolutions, FreeOutput, UnusedInput, Identity]


def run(module, needs_gradient, split):
    torch.manual_seed(1)
    inputs = [torch.randn(5, WIDTH), torch.randn(5, WIDTH)]
    leaves = [x.requires_grad_() for x, need in zip(inputs, needs_gradient, strict=True) if need]
    outputs = [o for o in module(*inputs) if o.requires_grad]
    gradients = [torch.randn_like(output) for output in outputs]
    with FlopCounterMode(display=False) as work:
        if split:
            before = [p.grad for p in module.parameters()]
            found, rest = backward_input(outputs, gradients, leaves)
            assert all(p.grad is b for p, b in zip(module.parameters(), before, strict=True))
            del outputs
            rest.run()
        else:
            found = backward(outputs, gradients, leaves)
    return found, {n: p.grad for n, p in module.named_parameters()}, work.get_total_flops()


@pytest.mark.parametrize("needs_gradient", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_input_then_weight_gradients_equal_those_of_one_backward(kind, needs_gradient):
    module = kind().train()
    whole = run(copy.deepcopy(module), needs_gradient, split=False)
    parts = run(copy.deepcopy(module), needs_gradient, split=True)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-6)
    if kind is not TiedInside:  # there the shared weight makes W walk a piece of the path again
        assert parts[2] == whole[2]


def test_gradients_accumulate_over_microbatches_in_both_forms():
    whole, parts = Mlp(), None
    parts = copy.deepcopy(whole)
    for _ in range(3):
        run(whole, (True, False), split=False)
        run(parts, (True, False), split=True)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_handed_through_does_not_alias_what_came_in():
    x = torch.randn(5, WIDTH, requires_grad=True)
    parameter = nn.Parameter(torch.zeros(5, WIDTH))
    came_in = torch.randn(5, WIDTH)
    backward([x + parameter], [came_in], [x])
    before = parameter.grad.clone()
    came_in.zero_()
    torch.testing.assert_close(parameter.grad, before)
