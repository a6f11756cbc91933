"""What selective recomputation keeps and computes again, operation by operation, and what runs no longer so."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from worker.benchmark.layer_costs import measure_layers
from worker.engine.forward import compute_context, drop_casts, keeping_no_tensors
from worker.engine.recomputation.products import KeptProducts, StageProducts
from worker.model.export import trace

SHAPE = (2, 4, 6, 8)


class Mixed(nn.Module):
    """Convolution, attention and linear layers, with an activation and a norm between them."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = dropout

    def forward(self, x):
        x = self.norm(self.convolution(x) + 1.0)
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)
        return self.narrow(functional.gelu(self.wide(x)))


class Operations(TorchDispatchMode):
    """Counts the operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*arguments, **(keywords or {}))


def traced_stage(**options):
    torch.manual_seed(0)
    return trace(Mixed(**options), (torch.randn(SHAPE),)).cut(["convolution"]).stages[0]


def twice(stage, inputs, observe=None):
    """Outputs, gradients and operations of a first forward and of a second one that takes its products."""
    products, kept = StageProducts(), KeptProducts(observe)
    products.find(stage)
    with Operations() as first, keeping_no_tensors(), products.keeping(kept):
        (made,) = stage(inputs)
    with Operations() as second, products.taking(kept):
        (again,) = stage(inputs)
    again.square().sum().backward()
    return made, again, first.counts, second.counts


def test_the_second_forward_computes_all_but_the_products_and_has_the_gradients_of_the_plain_one():
    stage, inputs = traced_stage(), torch.randn(SHAPE, requires_grad=True)
    (plain,) = stage(inputs)
    plain.square().sum().backward()
    wanted = {name: value.grad.clone() for name, value in stage.named_parameters()} | {
        "": inputs.grad.clone()
    }
    stage.zero_grad(set_to_none=True)
    inputs.grad = None
    sizes = []
    made, again, first, second = twice(stage, inputs, lambda value: sizes.append(value.numel()))
    assert torch.equal(made, plain) and torch.equal(again, plain)
    for name, gradient in wanted.items():
        found = inputs.grad if not name else stage.get_parameter(name).grad
        assert torch.equal(found, gradient), name
    kernels = {"convolution": 1, "addmm": 2, "_scaled_dot_product_flash_attention_for_cpu": 1}
    assert {name: first[name] for name in kernels} == kernels
    assert not second.keys() & kernels.keys()
    assert second["gelu"] == first["gelu"] == 1 and second["native_layer_norm"] == 1
    # the convolution, attention and its logsumexp, and both linear layers
    assert sorted(sizes) == sorted([384, 384, 48, 1536, 384])


def test_attention_without_a_kernel_of_its_own_is_computed_again_and_keeps_nothing_for_pairs_of_words():
    sizes = []
    stage = traced_stage(dropout=0.5)
    _, _, first, second = twice(
        stage, torch.randn(SHAPE, requires_grad=True), lambda v: sizes.append(v.numel())
    )
    assert first["bmm"] == second["bmm"] == 2
    assert sorted(sizes) == [384, 384, 1536]


def test_a_forward_outside_runs_as_it_did_and_a_second_one_of_other_products_is_refused():
    stage, inputs = traced_stage(), torch.randn(SHAPE, requires_grad=True)
    (plain,) = stage(inputs)
    products, kept = StageProducts(), KeptProducts()
    products.find(stage)
    assert torch.equal(stage(inputs)[0], plain)
    with products.keeping(kept), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    with Operations() as operations:
        stage(inputs)
    assert operations.counts["addmm"] == 2
    with pytest.raises(KeyError), products.taking(kept):
        stage(inputs)


@pytest.mark.parametrize("dropped", ["before", "between"])
def test_a_second_forward_may_cast_weights_that_the_first_found_cast(dropped: str):
    """The casts are the process's: the workers of `slotline verify` are threads, and each drops them at its step's end."""
    stage, inputs = traced_stage(), torch.randn(SHAPE, requires_grad=True)
    products, kept = StageProducts(), KeptProducts()
    products.find(stage)
    autocast = {"training": True, "autocast_dtype": torch.bfloat16}
    with compute_context("cpu", **autocast):
        (plain,) = stage(inputs)
        if dropped == "before":
            drop_casts()
        with keeping_no_tensors(), products.keeping(kept):
            stage(inputs)
    drop_casts()
    with compute_context("cpu", **autocast), products.taking(kept):
        (again,) = stage(inputs)
    drop_casts()
    assert torch.equal(again, plain) and again.requires_grad


def test_a_product_that_is_changed_in_place_is_not_taken():
    stage = traced_stage()
    (node,) = (node for node in stage.body.graph.nodes if node.target == torch.ops.aten.add.Tensor)
    node.target = torch.ops.aten.add_.Tensor
    stage.body.recompile()
    with pytest.raises(RuntimeError, match="has been mutated"):
        twice(stage, torch.randn(SHAPE, requires_grad=True))


def test_a_profile_counts_products_and_those_that_autograd_would_not_keep():
    traced = trace(Mixed(), (torch.randn(SHAPE),))
    profile = measure_layers(traced, lambda out, y: out.sum(), torch.zeros(1), repeats=1)
    sizes = {layer.name: (layer.selective_bytes, layer.selective_only_bytes) for layer in profile.layers}
    assert sum(size for size, _ in sizes.values()) == 4 * (384 + 384 + 48 + 1536 + 384)
    assert sizes["narrow"] == (4 * 384, 4 * 384)  # nobody needs the sum of its loss again
