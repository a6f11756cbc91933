"""Random small graphs of what models do, beside one worker: the outputs and the gradients of all parameters are the same."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.parallel.tensor.beside_one import check_equal
from worker.parallel.tensor.placement import LayoutError

STEPS = 14
X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
PLAN = {"*.wide": "colwise", "*.fused": "colwise", "*.back": "rowwise", "*.table": "vocab"}


class Graph(nn.Module):
    """`seed` says what is done to which of the values so far; the result looks at every element of all of them."""

    def __init__(self, seed):
        super().__init__()
        self.wide, self.fused, self.back = nn.Linear(8, 8), nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.table, self.plain = nn.Embedding(12, 8, padding_idx=3), nn.Linear(8, 8)
        self.register_buffer("words", torch.arange(8).view(2, 4) * 5 % 12)
        self.register_buffer("mask", torch.arange(64).remainder(3).bool())
        self._seed = seed

    def forward(self, x):
        draw = random.Random(self._seed)
        values = [x, self.wide(x), *self.fused(x).split(8, -1), self.table(self.words)]
        for _ in range(STEPS):
            made = draw.choice(DO)(self, draw, draw.choice(values), values)
            if made is not None and 0 < made.numel() <= 2048 and made.dim():
                values.append(made if made.dtype == torch.float32 else made.float())
        return torch.stack([(one * torch.arange(one.numel()).cos().view(one.shape)).sum() for one in values])


def _dim(draw, x):
    return draw.randrange(-x.dim(), x.dim())


def _linear(m, draw, x, values):
    layer = draw.choice([m.wide, m.back, m.plain, m.fused])
    return torch.tanh(layer(x)) if x.shape[-1] == 8 else None


def _reshape(m, draw, x, values):
    sizes, left = [], x.numel()
    for _ in range(draw.randrange(1, 4)):
        size = draw.choice([n for n in (1, 2, 4, 6, 8, 16) if left % n == 0])
        sizes.append(size)
        left //= size
    sizes.insert(draw.randrange(len(sizes) + 1), left)
    return x.reshape(sizes)


def _heads(m, draw, x, values):
    return x.view(*x.shape[:-1], 2, 4).transpose(-3, -2) if x.shape[-1] == 8 and x.dim() > 1 else None


def _attention(m, draw, x, values):
    alike = [one for one in values if one.shape == x.shape]
    if x.dim() < 4:
        return None
    mask = None
    if draw.random() < 0.6:
        shape = [x.shape[-2], x.shape[-2]]
        for size in reversed(x.shape[:-2]):
            shape.insert(0, draw.choice([1, size]))
        mask = torch.arange(torch.Size(shape).numel()).sin().view(shape)
    return functional.scaled_dot_product_attention(x, draw.choice(alike), draw.choice(alike), attn_mask=mask)


def _grouped(m, draw, x, values):
    if x.dim() != 4 or x.shape[1] % 2:
        return None
    few = x[:, : x.shape[1] // 2]
    return functional.scaled_dot_product_attention(x, few, few, is_causal=True, enable_gqa=True)


def _rotary(m, draw, x, values):
    if x.shape[-1] % 2:
        return None
    half = x.shape[-1] // 2
    angles = torch.arange(half).repeat(2)
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()


def _two(m, draw, x, values):
    other = draw.choice(values)
    try:
        torch.broadcast_shapes(x.shape, other.shape)
    except RuntimeError:
        return None
    kind = draw.randrange(4)
    if kind == 0:
        return x + other
    return [torch.tanh(x * other), torch.where(x > other, x, other), torch.maximum(x, other)][kind - 1]


def _joined(m, draw, x, values):
    alike = [one for one in values if one.shape == x.shape]
    return draw.choice([torch.cat, torch.stack])([x, draw.choice(alike), draw.choice(alike)], _dim(draw, x))


def _product(m, draw, x, values):
    other = draw.choice([one for one in values if one.dim() > 1] or [x])
    if x.dim() < 2 or other.dim() < 2:
        return None
    if x.shape[-1] != other.shape[-2]:
        other = other.transpose(-1, -2)
    try:
        torch.broadcast_shapes(x.shape[:-2], other.shape[:-2])
    except RuntimeError:
        return None
    return torch.tanh(x @ other) if x.shape[-1] == other.shape[-2] else None


def _slice(m, draw, x, values):
    dim = _dim(draw, x)
    start = draw.randrange(x.shape[dim])
    return x.narrow(dim, start, draw.randrange(1, x.shape[dim] - start + 1))


def _parts(m, draw, x, values):
    parts = x.chunk(draw.choice([2, 3, 4]), _dim(draw, x))
    return draw.choice(parts)


def _reduced(m, draw, x, values):
    dim, keep = _dim(draw, x), draw.random() < 0.5
    by = draw.choice([torch.sum, torch.mean, torch.amax, torch.logsumexp])
    return by(x, dim, keepdim=keep)


def _wider(m, draw, x, values):
    dim = draw.randrange(x.dim() + 1)
    sizes = list(x.shape)
    sizes.insert(dim, 2)
    return x.unsqueeze(dim).expand(sizes)


def _channels(m, draw, x, values):
    if x.dim() == 4 and x.shape[1] % 2 == 0:
        x = functional.group_norm(x, draw.choice([1, 2]))
    return functional.avg_pool2d(x, 2) if x.dim() in (3, 4) and min(x.shape[-2:]) > 1 else None


def _convolved(m, draw, x, values):
    if x.dim() != 3 or x.shape[1] != 8:
        return None
    weight = draw.choice([m.wide.weight, m.back.weight]).unsqueeze(-1)
    groups = draw.choice([1, 1, 2])
    return torch.tanh(functional.conv1d(x, weight[:, : 8 // groups], m.wide.bias, groups=groups))


def _changed(m, draw, x, values):
    own = x + 1.0
    view = own.narrow(_dim(draw, x), 0, 1) if draw.random() < 0.5 else own
    view.mul_(0.5)
    return own


DO = [
    _linear, _linear, _reshape, _heads, _heads, _attention, _grouped, _rotary, _two, _two, _joined, _product, _slice,
    _parts, _reduced, _wider, _channels, _convolved, _changed,
    lambda m, draw, x, values: x.softmax(_dim(draw, x)),
    lambda m, draw, x, values: x.log_softmax(_dim(draw, x)) * 0.2,
    lambda m, draw, x, values: x.cumsum(_dim(draw, x)) * 0.3,
    lambda m, draw, x, values: functional.layer_norm(x, x.shape[-draw.choice([1, 1, x.dim()]):]),
    lambda m, draw, x, values: functional.gelu(x),
    lambda m, draw, x, values: x.transpose(_dim(draw, x), _dim(draw, x)),
    lambda m, draw, x, values: x.permute(draw.sample(range(x.dim()), x.dim())),
    lambda m, draw, x, values: x.select(_dim(draw, x), 0),
    lambda m, draw, x, values: x.repeat_interleave(2, _dim(draw, x)),
    lambda m, draw, x, values: x.flip(_dim(draw, x)),
    lambda m, draw, x, values: x.double().exp().clamp(max=3.0),
    lambda m, draw, x, values: x.masked_fill(m.mask[: x.shape[-1]], 0.25) if x.shape[-1] <= 64 else None,
    lambda m, draw, x, values: functional.embedding(m.words, m.table.weight),
    lambda m, draw, x, values: torch.tanh(x @ m.table.weight.T) if x.shape[-1] == 8 else None,
]  # fmt: skip


def beside_one(seed):
    torch.manual_seed(seed)
    workers = 2 if seed % 3 else 4
    split = seed % 4 == 0
    return check_equal(
        nn.Sequential(Graph(seed)), (X,), torch.sum, workers=workers, plan=PLAN, split_backward=split
    )


@some_by_day("seed", range(8), by_day=3)
def test_a_random_graph_is_that_of_one_worker_or_refused_by_name(seed):
    try:
        _, shared = beside_one(seed)
    except LayoutError as error:
        assert "set `tensor` to one of" in str(error) or "write the operation that makes a new one" in str(
            error
        )
    else:
        assert {"0.wide.weight", "0.table.weight"} <= shared.splits.keys()
