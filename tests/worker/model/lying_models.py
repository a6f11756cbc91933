"""Models whose trace computes something else than they do themselves."""

import itertools
import random

import numpy as np
import torch
from torch import nn

WIDTH = 6


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class _Square(torch.autograd.Function):
    """With the backward that autograd derives too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def between(self, x):
        return x

    def forward(self, x):
        return self.third(self.second(self.between(torch.tanh(self.first(x)))))


class OwnBackward(_Layers):
    def between(self, x):
        return _Reversed.apply(x)


class TrueBackward(_Layers):
    def between(self, x):
        return _Square.apply(x)


class HookInForward(_Layers):
    def between(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x


class PythonRandom(_Layers):
    def between(self, x):
        return x * 2 if random.random() < 0.5 else x


class NumpyRandom(_Layers):
    def between(self, x):
        return x * float(np.random.rand())


class DrawsInVain(_Layers):
    """As models of some libraries do, which draw for dropped layers and drop none."""

    def between(self, x):
        return x * 2 if random.random() < 0.0 else x


class Counter(_Layers):
    """Changes after a thousand calls, which no run on one microbatch comes to."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def between(self, x):
        self.calls += 1
        return x if self.calls < 1000 else 3 * x


class CountsInVain(_Layers):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def between(self, x):
        self.calls += 1
        return x


class CountsInList(_Layers):
    def __init__(self):
        super().__init__()
        self.calls = []

    def between(self, x):
        self.calls.append(None)
        return x * len(self.calls)


class CountsElsewhere(_Layers):
    """In an iterator."""

    def __init__(self):
        super().__init__()
        self.calls = itertools.count(1)

    def between(self, x):
        return x * next(self.calls)


class Detached(_Layers):
    def forward(self, x):
        return super().forward(x).detach()


class ComplexWeight(_Layers):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def between(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH)


class Embedded(nn.Module):
    def __init__(self, **arguments):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH, **arguments)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def hooked_parameter():
    model = _Layers()
    model.second.weight.register_hook(lambda gradient: gradient.clamp(-1e9, 1e9))
    return model


def hooked_after_accumulation():
    model = _Layers()
    model.second.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def hooked_module():
    model = _Layers()
    model.second.register_full_backward_hook(lambda module, before, after: (2 * before[0],))
    return model


def frozen():
    return _Layers().requires_grad_(False)
