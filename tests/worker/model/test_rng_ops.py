"""A model and its graph draw the same numbers, also where the model draws some that it never uses, or in another order
than its layers: the check before the first step finds such a model true."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from worker.checks.trace import check_trace
from worker.contract.profile import TraceError
from worker.model.export import trace
from worker.model.rng import RandomState, reseed_at_random_ops, seeded
from worker.model.rng_ops import RngKey, RngOpMismatchError, replay_rng, traced_rng_ops

HERE = RngKey(seed=3, worker=0, step=1, microbatch=2)


class Half(nn.Module):
    """A layer that drops out twice and returns the second only, where `used` does not say both."""

    def __init__(self, used):
        super().__init__()
        self.linear, self._used = nn.Linear(6, 6), used

    def forward(self, x):
        whole = nn.functional.dropout(torch.tanh(x), 0.5)  # of another shape than what is used
        part = nn.functional.dropout(self.linear(x)[:, :4], 0.5)
        return nn.functional.pad(part, (0, 2)) + (whole if self._used else 0)


class LaterUsed(nn.Module):
    """Drops out between layers what only the last layer takes."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (Half(True) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        aside = nn.functional.dropout(x, 0.3)
        return self.third(self.second(x) + aside)


class Other(nn.Module):
    """Draws at other places once it is traced."""

    def __init__(self):
        super().__init__()
        self.layers, self.traced = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x if self.traced else nn.functional.dropout(x, 0.5)
        return x


class Exchanging(nn.Module):
    """Exchanges a block of its own in its first forward, as BigBird does for short texts."""

    def __init__(self):
        super().__init__()
        self.kind, self.block, self.last = "sparse", nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 2)

    def forward(self, x):
        if self.kind == "sparse":
            self.kind, self.block = "full", nn.Sequential(self.block[0], nn.Dropout(0.5))
        return self.last(nn.functional.dropout(self.block(x), 0.3))


MODELS = {
    "exchanges a block": Exchanging,
    "unused": lambda: nn.Sequential(Half(True), Half(False), Half(True), nn.Dropout(0.2), nn.Linear(6, 2)),
    "another order": LaterUsed,
    "called again": lambda: nn.Sequential(*[Half(True)] * 3, nn.Linear(6, 2)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_draws_what_its_graph_draws(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(3, 6)
    anew = copy.deepcopy(model)
    traced = trace(model, (x,))
    stage = traced.builder([0]).stage(0)
    state = RandomState(3, 0, torch.device("cpu"))
    reseed_at_random_ops(stage, state)
    with state.forward(1, 2, 0):
        (expected,) = stage(x)
    with replay_rng(model, traced_rng_ops(traced), HERE):
        found = model(x)
    assert torch.equal(found, expected)
    with replay_rng(anew, traced_rng_ops(traced), HERE):
        assert torch.equal(anew(x), expected)
    assert not torch.equal(model(x), expected)
    assert check_trace(model, traced, nn.MSELoss, torch.zeros_like(found)) == []


def test_a_model_that_no_longer_draws_what_its_graph_draws_is_told():
    model, x = Other(), torch.randn(3, 6)
    traced = trace(model, (x,))
    calls = traced_rng_ops(traced)
    model.traced = True
    with (
        pytest.raises(RngOpMismatchError, match=r"0 of the 2 .* of shape \[3, 6\] in module ''"),
        replay_rng(model, calls, HERE),
    ):
        model(x)
    with pytest.raises(TraceError, match="the output differs"):
        check_trace(model, traced, nn.MSELoss, torch.zeros(3, 6))


def test_no_other_thread_draws_while_a_model_draws_what_its_graph_draws():
    """A prefetch thread reads samples of the next step, seeded, in the process of a proof."""
    model, x = Half(True), torch.randn(3, 6)
    calls = traced_rng_ops(trace(model, (x,)))
    began, drew = threading.Event(), threading.Event()

    def read():
        began.wait(60)
        with seeded(9):
            torch.rand(5)
        drew.set()

    reader = threading.Thread(target=read)
    reader.start()
    with replay_rng(model, calls, HERE):
        began.set()
        drawn_meanwhile = drew.wait(0.2)
        model(x)
    reader.join(60)
    assert (drawn_meanwhile, drew.is_set()) == (False, True)
