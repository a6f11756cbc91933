"""The form of a model, by which a plan that was kept knows the model that it was made for."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from worker.benchmark.layer_costs import measure_layers
from worker.contract.planned import ModelSignature
from worker.examples import gpt, unet
from worker.model.export import trace


def gpt_of(width: int = 16, layers: int = 2, length: int = 8) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    model = gpt.build(layers=layers, width=width, heads=2, length=length)
    return model, (torch.zeros(2, length, dtype=torch.long),)


def unet_of() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return unet.build(), (torch.randn(2, 1, 8, 8),)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean() + 0 * target.sum()


@pytest.mark.parametrize("build", [gpt_of, unet_of])
def test_a_model_has_the_same_form_as_traced_and_as_measured(build):
    """Control planes know what was measured, drivers what they trace: both must mean the same."""
    model, inputs = build()
    traced = trace(model, inputs)
    profile = measure_layers(traced, loss, torch.zeros(1), repeats=1)
    form = traced.signature()
    measured = ModelSignature.of_profile(profile)
    assert form.difference(measured) is None and measured.difference(form) is None
    assert len(form.layers) > 3 and sum(len(layer.parameters) for layer in form.layers) > 5
    assert ModelSignature.from_json(json.loads(json.dumps(form.to_json()))).difference(form) is None
    without = traced.signature(whole=False)
    assert without.difference(ModelSignature.of_profile(profile, whole=False)) is None
    assert all(layer.parameters == {} for layer in without.layers)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"width": 32}, "bytes"),
        ({"layers": 3}, "layers, and not"),
        ({"length": 4}, "bytes"),
    ],
)
def test_another_model_is_told_by_what_differs(other, says):
    forms = [trace(*gpt_of(**changes)).signature() for changes in ({}, other)]
    assert says in forms[1].difference(forms[0])


def test_another_parameter_inside_a_layer_is_told_though_its_tensors_are_the_same():
    def built(hidden: int) -> nn.Module:
        block = nn.Sequential(nn.Linear(4, hidden), nn.Linear(hidden, 4))
        return nn.Sequential(nn.ModuleDict({"block": block})["block"], nn.Linear(4, 4))

    forms = [trace(built(hidden), (torch.randn(2, 4),)).signature() for hidden in (8, 12)]
    different = forms[1].difference(forms[0])
    assert "bytes" in different and ("192" in different or "12" in different), different
