"""What workers of meshes of unlike sizes may share of a tensor: by its shapes, and by its values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worker.checks.sharding import check_batch_sharding
from worker.contract.costs import batch_dimension, global_shape
from worker.contract.profile import CutError
from worker.model.export import trace
from worker.model.parity import FULL_PRECISION

ROWS, LENGTH, WIDTH = 4, 3, 5


@pytest.mark.parametrize(
    ("shapes", "sizes", "along"),
    [
        (((2, 3), (4, 3)), (2, 1), 0),
        (((3, 2), (3, 4)), (2, 1), 1),
        (((6, 5), (12, 5)), (2, 1), 0),
        (((3, 5), (2, 5)), (2, 3), 0),
    ],
)
def test_the_dimension_that_grows_with_the_rows_is_shared(shapes, sizes, along):
    assert batch_dimension("t", shapes, sizes, differentiable=True) == along
    assert global_shape(shapes[0], along, sizes[0]) == global_shape(shapes[1], along, sizes[1])


def test_what_everybody_has_whole_takes_no_gradient():
    assert batch_dimension("mask", ((3, 3), (3, 3)), (2, 1), differentiable=False) is None
    assert global_shape((3, 3), None, 2) == (3, 3)
    with pytest.raises(
        CutError, match=r"tensor 'w' cannot go between a mesh of 2 .* its gradient is a sum over workers"
    ):
        batch_dimension("w", ((3, 3), (3, 3)), (2, 1), differentiable=True)


@pytest.mark.parametrize("shapes", [((2, 2), (4, 4)), ((2, 3), (5, 3)), ((2, 3), (4, 3, 1))])
def test_shapes_that_do_not_tell_are_refused_by_name(shapes):
    with pytest.raises(CutError, match=r"tensor 't' .* no single dimension is shared"):
        batch_dimension("t", shapes, (2, 1), differentiable=False)


class Between(nn.Module):
    """`make` in one module, what it makes used in the next one; a linear layer in each."""

    def __init__(self, make, use):
        super().__init__()
        self.first, self.second = _Layer(make), _Layer(use)

    def forward(self, x):
        return self.second(x, self.first(x))


class _Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH)
        self.function = function

    def forward(self, x, *more):
        return self.function(self, self.linear(x), *more)


def _check(make, use):
    torch.manual_seed(0)
    model, x = Between(make, use), torch.randn(ROWS, LENGTH, WIDTH)
    parts = {1: [(x,)], 2: [(part.clone(),) for part in x.chunk(2)]}
    models = {size: trace(model, own[0]) for size, own in parts.items()}
    layers = models[1].layers
    begins = [layers[0], next(name for name in layers if name.startswith("second"))]
    check_batch_sharding(models, parts, begins, [2, 1], FULL_PRECISION)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda m, h: torch.tanh(h), lambda m, x, h: x + h),
        (lambda m, h: h.transpose(0, 1).contiguous(), lambda m, x, h: x + h.transpose(0, 1)),
        (lambda m, h: h.reshape(-1, WIDTH), lambda m, x, h: x + h.reshape(-1, LENGTH, WIDTH)),
        (lambda m, h: h.argmax(-1), lambda m, x, i: x + i[..., None]),
        (lambda m, h: nn.functional.dropout(h, 0.5), lambda m, x, h: x + h),
        (lambda m, h: m.norm(h), lambda m, x, h: x + h),
        (lambda m, h: h * (torch.rand(h.shape[0], 1, 1) > 0.3), lambda m, x, h: x + h),
        (lambda m, h: h + torch.randn_like(h), lambda m, x, h: x + h),
    ],
    ids=["rows", "transposed", "flattened", "integers", "dropout", "batch norm", "masked samples", "noise"],
)
def test_parts_that_are_rows_of_the_whole_may_go_between_unlike_meshes(make, use):
    _check(make, use)


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (
            lambda m, h: h.transpose(0, 1).reshape(-1, WIDTH),
            lambda m, x, h: x + h.reshape(LENGTH, -1, WIDTH).transpose(0, 1),
        ),
        (lambda m, h: h.argmax(-1) + torch.arange(h.shape[0])[:, None], lambda m, x, i: x + i[..., None]),
        (lambda m, h: h.flip(0), lambda m, x, h: x + h.flip(0)),
        (lambda m, h: h - h.mean(0), lambda m, x, h: x + h),
        (lambda m, h: (h > 0).float().mean(), lambda m, x, s: x * s),
    ],
    ids=["samples alternate", "an index of rows", "another order", "a mean", "a number of the batch"],
)
def test_parts_that_depend_on_a_workers_other_rows_are_refused_by_name(make, use):
    with pytest.raises(
        CutError, match=r"tensor '\w+' is another where 2 workers share a microbatch than where 1 do"
    ):
        _check(make, use)
