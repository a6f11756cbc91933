"""Guards against infinities in forward are traced as passed, and told; other questions about values are not."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from worker.checks.trace import check_trace
from worker.contract.profile import TraceError
from worker.model.export import trace
from worker.model.interface import adapt_model


class Guarded(nn.Module):
    """A layer that asks `question` of what it made, as detectors of transformers do, and clamps it then."""

    def __init__(self, question):
        super().__init__()
        self.linear, self._question = nn.Linear(4, 4), question

    def forward(self, x):
        x = self.linear(x)
        if self._question(x):
            x = torch.clamp(x, min=-1000.0, max=1000.0)
        return x


def guarded(question):
    torch.manual_seed(0)
    return nn.Sequential(*(Guarded(question) for _ in range(3)))


FINITE = {
    "not isfinite all": lambda x: not torch.isfinite(x).all(),
    "method": lambda x: not x.isfinite().all(),
    "isinf any": lambda x: torch.isinf(x).any(),
    "isnan any item": lambda x: x.isnan().any().item(),
    "either": lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
}


@pytest.mark.parametrize("question", FINITE)
def test_a_guard_against_infinities_is_traced_as_passed_and_told(question):
    model, inputs = guarded(FINITE[question]), (torch.randn(2, 4),)
    traced = trace(model, inputs)
    notes = check_trace(model, traced, lambda: nn.functional.mse_loss, torch.randn(2, 4))
    asked = 6 if question == "either" else 3
    assert len(notes) == 1 and notes[0].startswith(f"forward asks {asked} times whether a tensor is finite")


@pytest.mark.parametrize(
    "question",
    [
        lambda x: torch.isfinite(x).any(),
        lambda x: (x > 0).all(),
        lambda x: torch.isinf(x).all(),
        lambda x: torch.isfinite(x).all(-1)[0],
        lambda x: torch.isfinite(x)[0, 0],
    ],
)
def test_a_module_that_asks_another_question_about_values_runs_as_it_is_and_is_told(question):
    model, inputs = guarded(question), (torch.randn(2, 4),)
    traced = trace(model, inputs)
    assert list(traced.opaque) == ["0", "1", "2"]
    *_, note = check_trace(model, traced, lambda: nn.functional.mse_loss, torch.randn(2, 4))
    assert re.search(r"in module '0' .*test_guards.py:\d+: .*data-dependent", note)


def test_a_model_that_was_infinite_on_the_first_microbatch_is_refused():
    model, inputs = guarded(FINITE["not isfinite all"]), (torch.full((2, 4), float("inf")),)
    traced = trace(model, inputs)
    with pytest.raises(TraceError, match="differs between the traced model and the model itself"):
        check_trace(model, traced, lambda: nn.functional.mse_loss, torch.randn(2, 4))


class Labelled(nn.Module):
    """Computes its own loss of those that have a label only, as some classifiers of transformers do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        if labels is None:
            return {"logits": logits}
        chosen = (labels >= 0).nonzero()
        if chosen.size(0) > 0:
            return {"loss": nn.functional.cross_entropy(logits[chosen[:, 0]], labels[chosen[:, 0]])}
        return {"loss": logits.sum() * 0}


def test_a_models_own_loss_that_cannot_be_traced_is_told_with_the_way_around_it():
    model, inputs = Labelled(), (torch.tensor([0, 1]), torch.randn(2, 4))
    adapt_model(model, ["labels", "x"], own_loss=True)
    with pytest.raises(TraceError, match=r"test_guards.py:\d+: .*let the job have a `loss` .*model.output"):
        trace(model, inputs)
    other = Labelled()
    adapt_model(other, ["x"], output="logits")
    assert len(trace(other, inputs[1:]).layers) == 2


class Dropped(nn.Module):
    """Leaves out layers at random, as the models of speech and translation of transformers do."""

    def __init__(self, layerdrop):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.config = SimpleNamespace(encoder_layerdrop=layerdrop, decoder_layerdrop=0.0)

    def forward(self, x):
        for layer in self.layers:
            if self.config.encoder_layerdrop and torch.rand([]) < self.config.encoder_layerdrop:
                continue
            x = layer(x)
        return x


def test_layers_left_out_at_random_are_told_with_the_setting_that_keeps_them():
    with pytest.raises(
        TraceError, match=r"at random, set encoder_layerdrop \(now 0\.1\) to 0 in the model's conf"
    ):
        trace(Dropped(0.1), (torch.randn(2, 4),))
    assert len(trace(Dropped(0.0), (torch.randn(2, 4),)).layers) == 2
