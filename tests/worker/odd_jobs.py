"""Data sets and models of jobs that draw random numbers, some of them where nobody seeds them."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
from torch import nn

from worker.examples import gpt
from worker.examples.text import ByteWindows


class Masked(ByteWindows):
    """Masked language modelling: of each window a third is hidden from the input and is the target, as one draw
    says, from python's, numpy's and torch's generators."""

    def __getitem__(self, index):
        window, _ = super().__getitem__(index)
        places = random.sample(range(len(window)), len(window))
        places = torch.tensor(places)[np.random.permutation(len(window))][torch.randperm(len(window))]
        hidden = torch.zeros(len(window), dtype=torch.bool)
        hidden[places[: len(window) // 3]] = True
        return torch.where(hidden, 0, window), torch.where(hidden, window, -100)


class DrawsInVain(ByteWindows):
    """The same samples as ByteWindows, after drawing numbers that nobody uses."""

    def __getitem__(self, index):
        torch.rand(index % 7 + 1), np.random.rand(3), random.random()
        return super().__getitem__(index)


class OwnGenerator(ByteWindows):
    """Masks by a generator of its own, which nobody can seed."""

    def __getitem__(self, index):
        window, _ = super().__getitem__(index)
        hidden = torch.from_numpy(np.random.default_rng().random(len(window)) < 0.5)
        return torch.where(hidden, 0, window), window


class ShuffledOnce(ByteWindows):
    """In an order that is drawn when the data set is made; `unseeded`: from the machine's entropy."""

    def __init__(self, length, unseeded=False):
        super().__init__(length)
        entropy = int.from_bytes(os.urandom(8), "little") if unseeded else random.getrandbits(60)
        self._order = np.random.default_rng(entropy).permutation(len(self))

    def __getitem__(self, index):
        return super().__getitem__(int(self._order[index]))


class Vectors(torch.utils.data.Dataset):
    """Rows of four numbers, and which of two they are."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.sin(torch.arange(4.0) + index)
        return row, int(row.sum() > 0)


class Twice(nn.Module):
    """One weight used in the first layer and in the last."""

    def __init__(self, weight):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.first.weight = nn.Parameter(weight)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def tied_from_entropy():
    """Its weights come from the machine's entropy: another model on every worker."""
    drawn = np.frombuffer(os.urandom(16), dtype=np.uint8).astype(np.float32) / 255 - 0.5
    return Twice(torch.from_numpy(drawn).reshape(4, 4))


def tied_from_python_and_numpy():
    """Its weights come from python's and numpy's generators."""
    drawn = np.random.rand(4, 4).astype(np.float32) - random.random()
    return Twice(torch.from_numpy(drawn))


def adamw_by_shape(parameters, lr):
    """Matrices decay; vectors do not, and learn faster. A mesh that has no vectors has one group."""
    groups = [
        {
            "name": "vectors",
            "params": [p for p in parameters if p.dim() < 2],
            "lr": 3 * lr,
            "weight_decay": 0.0,
        },
        {"name": "matrices", "params": [p for p in parameters if p.dim() > 1], "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, weight_decay=0.3)


def warm_up_then_cosine(optimizer):
    """A schedule of two, one after the other."""
    rates = torch.optim.lr_scheduler
    parts = [rates.LinearLR(optimizer, 0.2, total_iters=3), rates.CosineAnnealingLR(optimizer, 6)]
    return rates.SequentialLR(optimizer, parts, milestones=[3])


class EasesOff(torch.optim.lr_scheduler.ExponentialLR):
    """Looks at a metric if it is given one: without it nothing ever changes."""

    def __init__(self, optimizer):
        super().__init__(optimizer, 0.9)

    def step(self, metrics=None):
        if metrics is not None or self.last_epoch < 0:
            super().step()


class PlateauOfNothing(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Its metric has a default, so that it can be called as other schedules are."""

    def step(self, measured=1.0):
        super().step(measured)


def eases_off_in_a_chain(optimizer):
    """A schedule that looks at a metric inside one that does not."""
    rates = torch.optim.lr_scheduler
    return rates.ChainedScheduler([rates.ExponentialLR(optimizer, 0.9), EasesOff(optimizer)])


def sgd_by_shape(parameters, lr):
    """Vectors learn at a rate of their own."""
    vectors, others = ([p for p in parameters if (p.ndim < 2) == wanted] for wanted in (True, False))
    return torch.optim.SGD([{"params": vectors, "lr": 5 * lr}, {"params": others}], lr=lr)


def gpt_from_entropy(**args):
    """A GPT whose first head weights come from the machine's entropy."""
    model = gpt.build(**args)
    with torch.no_grad():
        model.head.weight[0, 0] += int.from_bytes(os.urandom(2), "little") + 1
    return model


class Rowwise(torch.optim.Optimizer):
    """Normalises whole gradients."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


class SgdWithOddState(torch.optim.SGD):
    """Keeps its last gradient as a vector."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = p.grad.reshape(-1).clone()


class HeadFirst(nn.Module):
    """A stack of layers of which the last is registered first, in an order that no cut keeps."""

    def __init__(self, layers=3, width=4, bias=True):
        super().__init__()
        self.head = nn.Linear(width, 4, bias)
        inputs = [4, *[width] * (layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(size, width, bias) for size in inputs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)
