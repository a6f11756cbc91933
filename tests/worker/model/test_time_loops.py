"""Loops over time cost in proportion to their tokens: calls are counted, and no clock is read."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from torch import nn

from worker.checks.trace import check_trace
from worker.model.export import trace

WIDTH, LAYERS = 8, 2


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.into, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, state):
        state = torch.sigmoid(self.gate(x)) * state + torch.tanh(self.into(x))
        return x + self.out(state), state


class CellsInTurn(nn.Module):
    """All cells at each token, as of a decoder: each call of a cell may begin a stage."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([Cell() for _ in range(LAYERS)])

    def forward(self, x):
        states, found = [x.new_zeros(len(x), WIDTH) for _ in self.cells], []
        for token in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                token, states[layer] = cell(token, states[layer])
            found.append(token)
        return torch.stack(found, 1)


class Scan(nn.Module):
    """A state-space layer, which writes each token's result in place."""

    def __init__(self):
        super().__init__()
        self.cell = Cell()

    def forward(self, x):
        state, found = x.new_zeros(len(x), WIDTH), torch.zeros_like(x)
        for token in range(x.shape[1]):
            found[:, token], state = self.cell(x[:, token], state)
        return x + found


def scans():
    return nn.Sequential(*(Scan() for _ in range(LAYERS)))


def calls_for(build, tokens: int) -> int:
    """How many Python calls tracing, describing and checking the model takes for so many tokens."""
    torch.manual_seed(0)
    model, inputs = build(), torch.randn(2, tokens, WIDTH)
    with cProfile.Profile() as profile:
        traced = trace(model, (inputs,))
        traced.signature()
        check_trace(model, traced, nn.MSELoss, torch.zeros_like(inputs))
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
@pytest.mark.parametrize(("build", "tokens"), [(CellsInTurn, 3), (CellsInTurn, 8), (scans, 3), (scans, 8)])
def test_twice_the_tokens_take_at_most_three_times_the_calls(build, tokens):
    calls_for(build, 2)  # what torch remembers of its first trace
    assert calls_for(build, 2 * tokens) <= 3 * calls_for(build, tokens)
