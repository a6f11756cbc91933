"""What the workers of a group compute together is what one computes alone: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiers import some_by_day
from tests.worker.parallel.tensor.beside_one import TOKENS, check_equal, mean_square, whole_stage
from worker.examples import gpt, unet
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.placement import LayoutError
from worker.parallel.tensor.plans import check_tensor_plan
from worker.parallel.tensor.tensor_stage import tensor_stage


@some_by_day("workers", [2, 4], by_day=1)
@pytest.mark.parametrize("tied", [False, True])
def test_the_built_in_gpt(workers, tied):
    torch.manual_seed(0)
    model = gpt.build(2, 32, 4, vocab=32, length=16, tied=tied)
    together, shared = check_equal(model, TOKENS, mean_square, workers=workers)
    assert len(shared.splits) == 13
    # of each block two sums on the way there and two back, and the table of words; the logits are gathered
    assert shared.gathered.elements == (2 * 16 * 32 if tied else 0)
    assert len(together.summed[0]) == (11 if tied else 9)


def test_dropout_draws_the_masks_of_one_worker():
    """Each operation starts from its own state, as the engine has it: here from one seed before the whole run."""
    torch.manual_seed(0)
    model = gpt.build(2, 32, 4, vocab=32, length=16, dropout=0.3)
    stage = whole_stage(model, TOKENS)
    shared = tensor_stage(stage, None, TensorGroup(0, 2))
    random = [node.name for node in shared.module.body.graph.nodes if "dropout" in node.name]
    assert random == [node.name for node in stage.body.graph.nodes if "dropout" in node.name]
    attention = next(n for n in shared.module.body.graph.nodes if n.name == "scaled_dot_product_attention")
    assert all(one.op == "call_module" for one in attention.all_input_nodes), "whole heads, for whole masks"


def test_the_unet_shares_the_channels_between_its_convolutions():
    torch.manual_seed(0)
    _, shared = check_equal(unet.build(width=8), (torch.randn(2, 1, 8, 8),), mean_square, workers=2)
    assert shared.gathered.elements == 0
    assert "down.0.conv1.weight" in shared.splits and "down.0.conv2.weight" in shared.splits


def test_backwards_in_two_parts():
    torch.manual_seed(0)
    check_equal(gpt.build(2, 32, 4, vocab=32, length=16), TOKENS, mean_square, split_backward=True)


class Mixed(nn.Module):
    """Operations with and without a rule, of whole and of split tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.place = nn.Parameter(torch.linspace(-1, 1, 6).reshape(6, 1))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.scale  # a parameter along the split
        h = torch.where(h > 0, h, h.flip(-1))  # flip has no rule
        h = (
            self.norm(h.unflatten(-1, (4, 4))).transpose(1, 2) + self.place
        )  # a norm within the parts, a parameter beside
        h = torch.cat([h, -h], dim=-1).chunk(2, dim=-1)[0] + torch.stack([h, h]).sum(0)
        h = h.softmax(-1).cumsum(-1).mean(1, keepdim=True).expand(-1, 4, -1, -1).transpose(1, 2)
        return self.second(h.reshape(3, 6, 16)) @ x.transpose(1, 2)


def test_whatever_has_no_rule_sees_whole_tensors():
    torch.manual_seed(0)
    plan = {"first": "colwise", "second": "rowwise"}
    _, shared = check_equal(Mixed(), (torch.randn(3, 6, 8),), mean_square, plan=plan)
    assert shared.gathered.elements > 0
    assert set(shared.splits) == {"first.weight", "first.bias", "second.weight"}


class FusedUnevenly(nn.Module):
    """Queries of four heads, keys and values of two: grouped-query attention from one matrix, as Phi-3's."""

    def __init__(self, *, slices: bool):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(16, 32), nn.Linear(16, 16)
        self.slices = slices

    def forward(self, x):
        qkv = self.qkv_proj(x)
        q, k, v = (
            (qkv[..., :16], qkv[..., 16:24], qkv[..., 24:]) if self.slices else qkv.split([16, 8, 8], -1)
        )
        q, k, v = (one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in (q, k, v))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("slices", [False, True])
def test_parts_of_a_fused_projection_are_found(slices):
    torch.manual_seed(0)
    plan = {"qkv_proj": "colwise", "o_proj": "rowwise"}
    _, shared = check_equal(FusedUnevenly(slices=slices), (torch.randn(2, 6, 16),), mean_square, plan=plan)
    assert shared.splits["qkv_proj.weight"].parts == (16, 8, 8)
    assert shared.gathered.elements == 0


def test_heads_that_cannot_be_shared_are_named_with_what_fits():
    stage = whole_stage(gpt.build(1, 48, 3, vocab=32, length=16), TOKENS)
    with pytest.raises(
        LayoutError, match=r"attention\.qkv\.weight makes: 3 cannot be split over 2 .* one of 1, 3"
    ):
        tensor_stage(stage, None, TensorGroup(0, 2))


@pytest.mark.parametrize(
    ("heads", "kept", "workers", "fitting"),
    [(3, 3, 2, "1, 3"), (6, 2, 4, "1, 2"), (6, 3, 2, "1, 3")],
)
def test_the_numbers_that_fit_share_the_whole_stage(heads, kept, workers, fitting):
    """Of three heads of three numbers each no matrix can be halved either; where fewer heads of keys and values are kept,
    what divides the others need not divide these."""
    stage = whole_stage(nn.Sequential(Grouped(heads, kept, size=3)), (torch.randn(2, 6, heads * 3),))
    with pytest.raises(LayoutError, match=rf"set `tensor` to one of {fitting}, or leave it whole"):
        tensor_stage(stage, None, TensorGroup(0, workers))
    for number in map(int, fitting.split(", ")):
        assert len(tensor_stage(stage, None, TensorGroup(0, number)).splits) == 7


class Grouped(nn.Module):
    """Attention with fewer heads of keys and values than of queries."""

    def __init__(self, heads, kept, *, size):
        super().__init__()
        width = heads * size
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, kept * size), nn.Linear(width, kept * size)
        self.times, self.size = heads // kept, size

    def forward(self, x):
        q, k, v = (
            one(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (one.repeat_interleave(self.times, 1) for one in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def test_words_that_do_not_divide_stay_whole_and_all_else_is_shared():
    torch.manual_seed(0)
    _, shared = check_equal(gpt.build(1, 32, 4, vocab=33, length=16), TOKENS, mean_square)
    assert "embed.token.weight" not in shared.splits and len(shared.splits) == 6


def test_a_plan_of_ones_own_that_does_not_divide_a_matrix_is_refused():
    stage = whole_stage(nn.Sequential(nn.Linear(4, 6)), (torch.randn(2, 4),))
    with pytest.raises(
        LayoutError, match=r"parameter '0.weight' \(colwise\): 6 cannot be split over 4 workers"
    ):
        tensor_stage(stage, {"0": "colwise"}, TensorGroup(0, 4))


class Turned(nn.Linear):
    """As Falcon's layers write it."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Cast(nn.Linear):
    """A matrix in another type than it is kept in."""

    def forward(self, x):
        return nn.functional.linear(x.double(), self.weight.double(), self.bias.double())


def test_matrices_that_are_turned_over_or_cast_before_they_are_used_are_shared():
    torch.manual_seed(0)
    model, plan = nn.Sequential(Turned(8, 16), nn.Tanh(), Cast(16, 8)), {"0": "colwise", "2": "rowwise"}
    _, shared = check_equal(model, (torch.randn(3, 8),), mean_square, plan=plan)
    assert shared.splits["0.weight"].dim == 0 and shared.splits["2.weight"].dim == 1
    assert shared.gathered.elements == 0


class Adapted(nn.Module):
    """A layer as peft's LoRA wraps it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base_layer.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("plan", [None, {"re:fc2$": "rowwise", "*.fc?": "colwise"}], ids=str)
def test_layers_with_adapters_are_shared_as_without(plan):
    torch.manual_seed(0)
    block = nn.Sequential()
    block.add_module("fc1", Adapted(nn.Linear(8, 16)))
    block.add_module("act", nn.GELU())
    block.add_module("fc2", Adapted(nn.Linear(16, 8)))
    model = nn.Sequential(block)
    _, shared = check_equal(model, (torch.randn(3, 8),), mean_square, plan=plan)
    assert {name: split.dim for name, split in shared.splits.items()} == {
        "0.fc1.base_layer.weight": 0,
        "0.fc1.base_layer.bias": 0,
        "0.fc2.base_layer.weight": 1,
    }
    check_tensor_plan(plan, list(shared.splits), 2)


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.table = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.first(x) + self.table.cumsum(0).sum()


def test_a_pattern_for_what_cannot_be_split_is_refused_by_name():
    """It would be kept whole by every worker, with no word to whoever asked for less memory."""
    stage = whole_stage(Looped(), (torch.randn(2, 4),))
    with pytest.raises(
        LayoutError, match=r"'table' of shape \[4, 4\] as colwise, and it is used by cumsum: .* replicate"
    ):
        tensor_stage(stage, {"re:^$|first": "colwise"}, TensorGroup(0, 2))
    shared = tensor_stage(stage, {"first": "colwise"}, TensorGroup(0, 2))
    assert set(shared.splits) == {"first.weight", "first.bias"}


class ChangesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        y = h.flip(-1)
        h.add_(1.0)
        return h + y + h.flip(-1)


def test_what_changes_in_place_is_no_copy_of_what_it_was():
    torch.manual_seed(0)
    check_equal(ChangesInPlace(), (torch.randn(2, 4),), mean_square, plan={"first": "colwise"})
