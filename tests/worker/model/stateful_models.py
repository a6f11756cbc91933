"""Models whose forward keeps state in Python: some depend on it, late or at once, some keep it for looking at."""

import functools
import itertools
import queue
import random
from collections import deque

import numpy as np
import torch
from torch import nn

from tests.worker.model.lying_models import WIDTH

LATE = 8
"""After so many calls these models make something else."""


class Plain(nn.Module):
    """Two layers, between which `between` is called; `between` keeps the state."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def between(self, x):
        return x

    def forward(self, x):
        return self.second(self.between(torch.tanh(self.first(x))))


class Calls:
    def __init__(self):
        self.count = 0


class SlottedCalls:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class ObjectCounts(Plain):
    def __init__(self, calls=Calls):
        super().__init__()
        self.state = calls()

    def between(self, x):
        self.state.count += 1
        return 3 * x if self.state.count > LATE else x


class NestedCounts(Plain):
    """In a dict in a list in an object of an inner module."""

    def __init__(self):
        super().__init__()
        self.second.state = Calls()
        self.second.state.tables = [{"calls": 0}]

    def between(self, x):
        table = self.second.state.tables[0]
        table["calls"] += 1
        return 3 * x if table["calls"] > LATE else x


class ClosureCounts(Plain):
    def __init__(self):
        super().__init__()
        count = 0

        def scale(x):
            nonlocal count
            count += 1
            return 3 * x if count > LATE else x

        self.between = scale


class HookCounts(Plain):
    def __init__(self):
        super().__init__()
        count = [0]

        def hook(module, inputs, output):
            count[0] += 1
            return 3 * output if count[0] > LATE else output

        self.first.register_forward_hook(hook)


class DefaultCounts(Plain):
    def between(self, x, calls=[0]):  # noqa: B006
        calls[0] += 1
        return 3 * x if calls[0] > LATE else x


class FunctionCounts(Plain):
    def between(self, x):
        return counted(x)


def counted(x):
    counted.calls = getattr(counted, "calls", 0) + 1
    return 3 * x if counted.calls > LATE else x


counted.calls = 0
CALLS = 0


class GlobalCounts(Plain):
    def between(self, x):
        global CALLS
        CALLS += 1
        return 3 * x if CALLS > LATE else x


class ClassCounts(Plain):
    calls = 0

    def between(self, x):
        type(self).calls += 1
        return 3 * x if self.calls > LATE else x


class IteratorCounts(Plain):
    def __init__(self):
        super().__init__()
        self.it = itertools.count(1)

    def between(self, x):
        return 3 * x if next(self.it) > LATE else x


class ListIterator(Plain):
    """Factors of later calls, which no jump comes to."""

    def __init__(self):
        super().__init__()
        self.factors = iter([1.0] * (LATE + 1) + [3.0] * 100)

    def between(self, x):
        return x * next(self.factors)


class CodeGenerator(Plain):
    def __init__(self):
        super().__init__()
        self.factors = factors()

    def between(self, x):
        return x * next(self.factors)


def factors():
    for call in itertools.count(1):
        yield 3.0 if call > LATE else 1.0


class DequeCounts(Plain):
    def __init__(self):
        super().__init__()
        self.last = deque(maxlen=50)

    def between(self, x):
        self.last.append(1)
        return 3 * x if len(self.last) > LATE else x


class ArrayCounts(Plain):
    def __init__(self):
        super().__init__()
        self.calls = np.zeros(1, dtype=np.int64)

    def between(self, x):
        self.calls += 1
        return 3 * x if self.calls[0] > LATE else x


class Memory(Plain):
    """Transformer-XL's way."""

    def __init__(self):
        super().__init__()
        self.mem = None

    def between(self, x):
        y = x if self.mem is None else x + 0.5 * self.mem
        self.mem = x.detach()
        return y


class MovingMean(Plain):
    def __init__(self):
        super().__init__()
        self.mem = torch.zeros(WIDTH)

    def between(self, x):
        y = x - self.mem
        self.mem = 0.9 * self.mem + 0.1 * x.detach().mean(0)
        return y


class MovingMeanInPlace(Plain):
    def __init__(self):
        super().__init__()
        self.means = {"x": torch.zeros(WIDTH)}

    def between(self, x):
        y = x - self.means["x"]
        with torch.no_grad():
            self.means["x"].mul_(0.9).add_(0.1 * x.mean(0))
        return y


class FirstMean(Plain):
    """Keeps the mean of its first microbatch for all time, as some initialisations do."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def between(self, x):
        if "mean" not in self.cache:
            self.cache["mean"] = x.detach().mean()
        return x - self.cache["mean"]


class RareRandom(Plain):
    def between(self, x):
        return 5 * x if random.random() < 0.02 else x


class OwnRandom(Plain):
    def __init__(self):
        super().__init__()
        self.random = random.Random(3)

    def between(self, x):
        return 5 * x if self.random.random() < 0.02 else x


class OwnNumpyRandom(Plain):
    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)

    def between(self, x):
        return x * float(self.random.random() + 0.5)


class _LateBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _LateBackward.calls += 1
        return 3 * gradient if _LateBackward.calls > LATE else gradient


class _CountingBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _CountingBackward.calls += 1
        return 3 * gradient if _CountingBackward.calls > _CountingBackward.last else gradient

    last = 10**9


class CountsBackwards(Plain):
    """For a log: what it counts matters after a thousand million calls."""

    def between(self, x):
        return _CountingBackward.apply(x)


class _LastBackward(_CountingBackward):
    """Changes after more calls than any check makes."""

    @staticmethod
    def backward(ctx, gradient):
        _LastBackward.calls += 1
        return 3 * gradient if _LastBackward.calls > 500 else gradient


class VeryLateBackward(Plain):
    def between(self, x):
        return _LastBackward.apply(x)


class ByteCounts(Plain):
    def __init__(self, make=lambda: bytearray(2)):
        super().__init__()
        self.calls = make()

    def between(self, x):
        self.calls[0] += 1
        return 3 * x if self.calls[0] > 100 else x


class QueueCounts(Plain):
    def __init__(self, kind=queue.Queue):
        super().__init__()
        self.last = kind()

    def between(self, x):
        self.last.put(1)
        return 3 * x if self.last.qsize() > LATE else x


class _Clipped(torch.autograd.Function):
    """A clip whose gradient passes: as autograd's where nothing is clipped."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(-4, 4)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ClipsLargeInputs(Plain):
    def forward(self, x):
        return super().forward(_Clipped.apply(self.second(x)))


class LateBackward(Plain):
    def between(self, x):
        return _LateBackward.apply(x)


class RaisesLate(Plain):
    """An iterator that ends."""

    def __init__(self):
        super().__init__()
        self.factors = iter([1.0] * LATE)

    def between(self, x):
        return x * next(self.factors)


class LogsCalls(Plain):
    """Counts for a log, in all places."""

    def __init__(self):
        super().__init__()
        self.calls, self.state, self.it = 0, Calls(), itertools.count()
        self.history, self.sums = [], np.zeros(3)

    def between(self, x):
        self.calls += 1
        self.state.count += 1
        next(self.it)
        self.history.append(self.calls)
        self.sums[0] += 1.0
        return x


class KeepsMap(Plain):
    """An attention map for looking at."""

    def __init__(self):
        super().__init__()
        self.attention_map = None

    def between(self, x):
        weights = torch.softmax(x @ x.transpose(-1, -2), -1)
        self.attention_map = weights.detach()
        return weights @ x


class KeepsStatistics(Plain):
    """A list of what the layers make, with gradients, and of their norms."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def between(self, x):
        self.kept = [x, {"mean": x.mean()}]
        return x


class RotaryCache(Plain):
    """A table without parameters in a place that torch.export does not put back."""

    def __init__(self):
        super().__init__()
        self.tables = Calls()

    def between(self, x):
        if not hasattr(self.tables, "cos"):
            self.tables.cos = torch.arange(WIDTH).float().cos()
        return x * self.tables.cos


class RotaryDict(Plain):
    def __init__(self):
        super().__init__()
        self.tables = {}

    def between(self, x):
        key = x.shape[-1]
        if key not in self.tables:
            self.tables[key] = torch.arange(key).float().cos()
        return x * self.tables[key]


class RotaryNew(Plain):
    """An attribute that is there from the first forward on."""

    def between(self, x):
        if not hasattr(self, "cos"):
            self.cos = torch.arange(WIDTH).float().cos()
        return x * self.cos


class RotaryMemo(Plain):
    def between(self, x):
        return x * cosines(x.shape[-1])


@functools.lru_cache
def cosines(width):
    return torch.arange(width).float().cos()


class TargetChanged(nn.Module):
    """A loss that changes its target."""

    def forward(self, output, target):
        return ((output - target.mul_(2)) ** 2).mean()


class OwnGenerator(Plain):
    def __init__(self):
        super().__init__()
        self.noise = torch.Generator()

    def between(self, x):
        return x + torch.randn(x.shape, generator=self.noise)


class WritesBufferData(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def between(self, x):
        self.mean.data.mul_(0.9)
        return x * self.mean


class ClampsWeightData(Plain):
    def between(self, x):
        self.first.weight.data.clamp_(-0.1, 0.1)
        return x


class Masks(nn.Module):
    """Draws dropout masks ahead, and takes the next ones in each call, as speechbrain's LiGRU does."""

    def __init__(self):
        super().__init__()
        self.rows = self.taken = 0
        self.register_buffer("masks", torch.ones(64, WIDTH))

    def forward(self, x):
        if self.rows != len(x):
            self.rows, self.masks = len(x), nn.functional.dropout(torch.ones(64, WIDTH)).data
        if self.taken + len(x) > len(self.masks):
            self.taken = 0
        self.taken += len(x)
        return x * self.masks[self.taken - len(x) : self.taken]


class DrawsAhead(Plain):
    def __init__(self):
        super().__init__()
        self.drop = Masks()

    def between(self, x):
        return self.drop(x)


class TakesGradients(nn.Module):
    """A PINN: the derivative of its own output by its input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        u = self.body(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u + slope.sum(-1, keepdim=True)
