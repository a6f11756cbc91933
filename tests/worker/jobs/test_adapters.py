"""A frozen model with adapters of peft, from import paths and arguments: the adapters train as in a plain loop, all else
stays as it was, wherever the adapters are."""

from __future__ import annotations

import pytest
import torch

from tests.missing import needs_libraries
from tests.worker.jobs import test_plain_modules as test_raw_models
from tests.worker.workers import Workers
from worker.model.factory import build_model

pytestmark = needs_libraries("transformers", "peft")


LAYERS = {"everywhere": None, "first": [0], "last": [3]}


def spec_of(where):
    spec = test_raw_models.spec_of("gpt2", loss=None, stages=4, meshes=2)
    base = {"factory": spec["model"]["factory"], "args": spec["model"]["args"]}
    base["args"]["config"]["args"] = base["args"]["config"]["args"] | {"n_layer": 4}
    adapters = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "init_lora_weights": False}
    adapters |= {"layers_to_transform": LAYERS[where]}
    config = {"factory": "peft:LoraConfig", "args": adapters}
    spec["model"] = {"factory": "peft:get_peft_model", "args": {"model": base, "peft_config": config}}
    spec["pipeline"]["schedule"] = "auto"
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("where", LAYERS)
def test_adapters_train_as_in_a_plain_loop_and_nothing_else_moves(where):
    spec = spec_of(where)
    expected = test_raw_models.plain_losses(spec, range(1, 4), lambda model, batch: model(**batch).loss)
    before = build_model(spec["model"]["factory"], spec["model"]["args"], seed=spec["training"]["seed"])
    trained = {name for name, p in before.named_parameters() if p.requires_grad}
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        moved = {
            stage.original_names[local]
            for worker in run.workers
            for stage in worker.stages.values()
            for local, p in stage.named_parameters()
            if not torch.equal(p, before.get_parameter(stage.original_names[local]))
        }
    assert moved == trained and all("lora_" in name for name in trained)
