"""Whatever a graph does with split tensors, its outputs and gradients are those of one worker; or it is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.worker.parallel.tensor.beside_one import check_equal, mean_square, whole_stage
from worker.parallel.tensor.graph_collectives import TensorGroup, VocabParallelLookup
from worker.parallel.tensor.placement import LayoutError
from worker.parallel.tensor.tensor_stage import tensor_stage


class Calls(nn.Module):
    """Two linear layers, the first split by what comes out; `run` does something with what it makes."""

    def __init__(self, run, *, inside=4, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(inside, width), nn.Linear(width, inside)
        self._run = run

    def forward(self, x):
        return self._run(self, x)


PLAN = {"*.first": "colwise", "*.last": "rowwise"}


def layer(run, **sizes):
    """As one layer of a model: what it changes in place of its own is changed in place."""
    return nn.Sequential(Calls(run, **sizes))


X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))


def _changed_through_a_view(m, x):
    """A view that no split follows is one of a gathered copy: what is done to it is not done to the parts."""
    h = m.first(x)
    h[..., 1:3].mul_(2.0)
    return m.last(h)


def _changed_behind_a_view(m, x):
    h = m.first(x)
    view = h[..., 1:3]
    h.mul_(2.0)
    return view + 0.0


def _picked_and_changed(m, x):
    """What was picked of a whole value is picked again once that has changed."""
    whole, h = torch.cat([x, x * x], -1), m.first(x)
    view, before = whole.view(2, 3, 16), h + whole
    view.add_(1.0)
    return m.last(before + whole)


def _changed_part_of_one_head(m, x):
    """Where a worker's part has one head, what copies a whole tensor would be a view of the part."""
    h = m.first(x).view(2, 6, 2, 4).transpose(1, 2)
    copied = h.contiguous()
    copied.mul_(2.0)
    return copied + h


REFUSED = "write the operation that makes a new one"
SOUND = {
    "picked and changed": _picked_and_changed,
    "one head": _changed_part_of_one_head,
    "bits": lambda m, x: m.last(m.first(x).detach().view(torch.int32).bitwise_and(3).float()) + m.last(m.first(x)),
    "pool without a batch": lambda m, x: functional.avg_pool2d(m.first(x), 2),
    "two results": lambda m, x: torch.frexp(m.first(x).detach())[0] + m.first(x),
    "complex": lambda m, x: torch.view_as_real(
        torch.view_as_complex(m.first(x).view(2, 6, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    ),
    "rotated": lambda m, x: m.last(torch.cat([-m.first(x)[..., 4:], m.first(x)[..., :4]], -1)),
    "masks of each head": lambda m, x: _attended(m, x, torch.arange(2 * 6 * 6).view(1, 2, 6, 6) % 7 * -0.3),
    "masks of all heads": lambda m, x: _attended(m, x, torch.arange(36).view(6, 6) % 7 * -0.3),
    "softmax of what is split": lambda m, x: m.first(x).softmax(-1),
    "softmax of another": lambda m, x: m.last(m.first(x).softmax(1)),
    "norm over what is split": lambda m, x: m.last(functional.layer_norm(m.first(x), (8,))),
    "lost words": lambda m, x: functional.cross_entropy(
        m.first(x).flatten(0, 1), torch.arange(12) % 8, ignore_index=3, label_smoothing=0.1
    ),
    "a weight with one row": lambda m, x: functional.linear(m.first(x), m.first.bias),
}  # fmt: skip


def _attended(m, x, mask):
    q, k, v = (part.view(2, 6, 2, 4).transpose(1, 2) for part in (m.first(x), m.first(x * 2), m.first(x * x)))
    made = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.float())
    return m.last(made.transpose(1, 2).reshape(2, 6, 8))


@pytest.mark.parametrize("name", SOUND)
def test_these_are_those_of_one_worker(name):
    torch.manual_seed(0)
    check_equal(layer(SOUND[name]), (X,), mean_square, plan=PLAN)


@pytest.mark.parametrize("run", [_changed_through_a_view, _changed_behind_a_view])
def test_a_change_in_place_that_another_view_would_miss_is_refused_by_name(run):
    with pytest.raises(LayoutError, match=REFUSED):
        tensor_stage(whole_stage(layer(run), (X,)), PLAN, TensorGroup(0, 2))


def test_a_buffer_of_a_split_module_stays_a_buffer():
    """As a parameter it would be in another place of a checkpoint than on one worker."""
    model = layer(lambda m, x: m.first(x) * m.first.scale)
    model[0].first.register_buffer("scale", torch.arange(8.0))
    _, shared = check_equal(model, (X,), mean_square, plan=PLAN)
    (local,) = (name for name, _ in shared.module.named_buffers())
    assert shared.module.original_names[local] == "0.first.scale"
    assert "0.first.scale" not in shared.splits


@pytest.mark.parametrize("word", [-1, 8])
def test_a_word_that_no_table_has_is_an_error_as_on_one_worker(word):
    look = VocabParallelLookup(TensorGroup(1, 2), 8, -1)
    with pytest.raises(IndexError, match=f"word {word} is not in a table of 8"):
        look(torch.randn(4, 3), torch.tensor([1, word]))


def test_no_words_are_looked_up_as_none():
    found = VocabParallelLookup(TensorGroup(1, 2), 8, -1)(
        torch.randn(4, 3), torch.empty(2, 0, dtype=torch.long)
    )
    assert found.shape == (2, 0, 3)
