"""Models and losses beside which a proof must say "different", or a job must be refused by name, or all is equal."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from tests.worker.model.lying_models import WIDTH
from tests.worker.model.stateful_models import LATE, Plain


class FrozenNorm(Plain):
    """Keeps its norm in eval mode whatever is asked for, as detectors keep those of a backbone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        nn.init.uniform_(self.norm.running_mean)

    def between(self, x):
        return self.norm(x)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


class PartInEvalMode(nn.Sequential):
    """One of its two dropouts is off, as a factory leaves a part that it has loaded."""

    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(0.5),
            nn.Linear(WIDTH, WIDTH),
        )
        self[1].eval()


class Derivative(nn.Module):
    """A PINN by torch.func, in the root's own forward."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x):
        parameters = dict(self.body.named_parameters())

        def value(row):
            return functional_call(self.body, parameters, (row[None],)).sum()

        return x + vmap(grad(value))(x)


class SharedCumulativeNorm(Plain):
    """A batch norm with momentum=None, which divides by the number of its calls, called twice a forward."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def between(self, x):
        return self.norm(torch.tanh(self.norm(x)))


class WeighedLoss(nn.Module):
    """Uncertainty weighting: a loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return ((output - target) ** 2).mean() * torch.exp(-self.log_variance) + self.log_variance


class LongerByEight:
    """Rows of which every eighth is longer, as texts are that are padded by the batch."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        width = WIDTH if index % 8 else 2 * WIDTH
        draw = torch.Generator().manual_seed(index)
        return torch.randn(width, WIDTH, generator=draw), torch.randn(width, WIDTH, generator=draw)


class DrawsLate(Plain):
    """Draws from a numpy generator of its own from its ninth forward on."""

    def __init__(self):
        super().__init__()
        self.random, self.calls = np.random.default_rng(3), 0

    def between(self, x):
        self.calls += 1
        return x * float(self.random.random() + 0.5) if self.calls > LATE else x
