"""I and W together do exactly what B does: same gradients, same work, nothing twice."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
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


class Embeddings(nn.Module):
    """A table that is looked up beside the path, and is the weight of the last product."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, WIDTH)
        self.positions = nn.Embedding(5, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        h = self.layer(x + self.positions(torch.arange(5))) + self.table(torch.tensor([0, 1, 1, 5, 2]))
        return functional.linear(h, self.table.weight), y * self.table.weight[:5]


class ProductAndFactor(nn.Module):
    """Parameters that a product takes, and elsewhere an operation that has no product: neither can wait for W."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.kernel = nn.Parameter(torch.randn(1, 1, 3))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x, y):
        h = functional.linear(x, self.w)
        h = functional.conv1d(h[:, None], self.kernel, self.bias, padding=1)[:, 0]
        square = torch.addmm(self.w, self.w, h.T @ h, beta=0.5)
        return h * self.w[:5] * self.bias, (square * self.w).sum(0), y * self.bias


class UnusedInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        return (self.layer(x),)


class Identity(nn.Module):
    def forward(self, x, y):
        return x.view_as(x), y


MODULES = [
    Mlp,
    Attention,
    TiedInside,
    Convolutions,
    Embeddings,
    ProductAndFactor,
    FreeOutput,
    UnusedInput,
    Identity,
]


def run(module, needs_gradient, split):
    torch.manual_seed(1)
    inputs = [torch.randn(5, WIDTH), torch.randn(5, WIDTH)]
    leaves = [x.requires_grad_() for x, need in zip(inputs, needs_gradient, strict=True) if need]
    outputs = [o for o in module(*inputs) if o.requires_grad]
    gradients = [torch.randn_like(output) for output in outputs]
    with FlopCounterMode(display=False) as work:
        if split:
            found, rest = backward_input(outputs, gradients, leaves)
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
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-5, atol=1e-6, check_stride=True)
    assert parts[2] == whole[2]


def test_gradients_accumulate_over_microbatches_in_both_forms():
    whole, parts = Mlp(), None
    parts = copy.deepcopy(whole)
    for _ in range(3):
        run(whole, (True, False), split=False)
        run(parts, (True, False), split=True)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_gradients_lie_in_memory_as_autograd_lays_them_out():
    """In the order of their parameters, though those of channels-last images come in another."""
    whole = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    parts = copy.deepcopy(whole)
    image = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    for model, split in ((whole, False), (parts, True)):
        x = image.clone().requires_grad_()
        y = model(x)
        if split:
            backward_input([y], [torch.ones_like(y)], [x])[1].run()
        else:
            backward([y], [torch.ones_like(y)], [x])
    gradients = [[p.grad for p in model.parameters()] for model in (parts, whole)]
    torch.testing.assert_close(*gradients, check_stride=True)


def blocks(count):
    return nn.Sequential(
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
            for _ in range(count)
        )
    )


class CountingOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += 1
        return function(*arguments, **(keywords or {}))


def reachable(roots):
    seen, stack = set(), [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    while stack:
        if (node := stack.pop()) is not None and node not in seen:
            seen.add(node)
            stack += [below for below, _ in node.next_functions]
    return len(seen)


def work_of_w(count, monkeypatch):
    """The operations that W runs, and the nodes over which it sends autograd."""
    module, x = blocks(count), torch.randn(5, WIDTH, requires_grad=True)
    visited, run_autograd = [], torch.autograd.backward

    def counted(roots, *arguments, **keywords):
        visited.append(reachable(roots))
        run_autograd(roots, *arguments, **keywords)

    for _ in range(2):  # the second time gradients are there to add to
        output = module(x)
        _, rest = backward_input([output], [torch.randn_like(output)], [x])
        del output
        with monkeypatch.context() as patch, CountingOperations() as operations:
            patch.setattr(torch.autograd, "backward", counted)
            rest.run()
    return operations.count + sum(visited)


def test_a_block_costs_w_no_more_in_a_deep_stage_than_in_a_shallow_one(monkeypatch):
    assert work_of_w(32, monkeypatch) / 32 <= 1.3 * work_of_w(4, monkeypatch) / 4


def test_between_i_and_w_only_what_the_weights_need_is_kept():
    """Of each product its input and the gradient of its output; and of norms and biases nothing is left to do."""
    kept = weakref.WeakSet()

    class Box:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            kept.add(self)

    module, x = blocks(2), torch.randn(5, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(Box, lambda box: box.tensor):
        output = module(x)
    assert kept
    gradient = torch.randn_like(output)
    _, rest = backward_input([output], [gradient], [x])
    del output
    assert not kept, "a graph is kept for W"
    sizes = sorted(tensor.numel() for tensor in rest.tensors())
    assert sizes == sorted([5 * WIDTH, 5 * 16, 5 * 16, 5 * WIDTH] * 2)
    missing = {name for name, p in module.named_parameters() if p.grad is None}
    assert missing == {f"{block}.{layer}.weight" for block in (0, 1) for layer in (1, 3)}
    rest.run()
    assert not list(rest.tensors()) and all(p.grad is not None for p in module.parameters())


def test_an_operand_that_was_overwritten_before_w_is_an_error():
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(5, WIDTH, requires_grad=True)
    buffer = (x * 1).detach().requires_grad_()
    output = layer(buffer)
    _, rest = backward_input([output], [torch.ones_like(output)], [buffer])
    buffer.detach().zero_()
    with pytest.raises(RuntimeError, match="changed in place after I had kept it"):
        rest.run()


def test_a_gradient_that_is_handed_through_does_not_alias_what_came_in():
    x = torch.randn(5, WIDTH, requires_grad=True)
    parameter = nn.Parameter(torch.zeros(5, WIDTH))
    came_in = torch.randn(5, WIDTH)
    backward([x + parameter], [came_in], [x])
    before = parameter.grad.clone()
    came_in.zero_()
    torch.testing.assert_close(parameter.grad, before)
