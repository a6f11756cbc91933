"""Five architectures that the product was not written for, in eight variants of a job, beside plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.jobs import unfamiliar_models
from tests.worker.jobs.unfamiliar_models import LENGTH, WIDTH, WORDS
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers, mean_loss
from worker.engine import compile as engine_compile
from worker.engine.optim import grad_scaler

PLACE = unfamiliar_models.__name__
STEPS = range(1, 5)
WORD_ROW = [[LENGTH], WORDS]
SQUARES, CLASS = "torch.nn.functional:mse_loss", "torch.nn.functional:cross_entropy"
MODELS: dict[str, tuple[list[Any], Any, str, dict[str, str]]] = {
    "SentenceTransformer": (
        [WORD_ROW],
        [WIDTH],
        SQUARES,
        {"*.query": "colwise", "*.key": "colwise", "*.value": "colwise", "*.out": "rowwise"},
    ),
    "Whisper": (
        [[4, 2 * LENGTH], WORD_ROW],
        WORD_ROW,
        f"{PLACE}:next_words",
        {"*.mlp.0": "colwise", "*.mlp.2": "rowwise", "words": "vocab"},
    ),
    "EfficientNet": (
        [[3, 16, 16]],
        [[], 4],
        CLASS,
        {"blocks.*.reduce": "colwise", "blocks.*.excite": "rowwise"},
    ),
    "NHiTS": ([[12], [12, 2], [6, 2]], [6], SQUARES, {"*.layers.0": "colwise", "*.layers.2": "rowwise"}),
    "RRDBNet": ([[3, 6, 6]], [3, 12, 12], SQUARES, {"larger": "colwise", "last": "rowwise"}),
}
"""Shapes of a sample's inputs and target, the loss, and a plan for tensor parallelism."""
TOLERANCES = {"bf16": 3e-3, "fp16": 1e-3}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"training": {"precision": "bf16"}},
    "fp16": {"training": {"precision": "fp16", "loss_scaling": {"init_scale": 2.0**16}}},
    "tensor 2": {"pipeline": {"stages": 2}, "resources": {"meshes": 2, "workers_per_mesh": 2, "tensor": 2}},
    "unlike meshes": {"pipeline": {"stages": 2}, "resources": {"meshes": [{"workers": 2}, {"workers": 1}]}},
    "compile": {"training": {"compile": True}},
    "stream": {"data": {"factory": f"{PLACE}:Streamed"}},
    "freeze": {"model": {"freeze": ["*.bias", "re:^(first|conv1|words|stem|blocks.0)"]}},
    "groups": {
        "optimizer": {
            "args": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
            "groups": [{"match": ["*.bias"], "weight_decay": 0.0, "lr": 0.01}],
        }
    },
}


def spec_of(model: str, variant: str) -> dict[str, Any]:
    inputs, target, loss, plan = MODELS[model]
    sections: dict[str, dict[str, Any]] = {
        "model": {"factory": f"{PLACE}:{model}"},
        "data": {"factory": f"{PLACE}:Drawn", "args": {"inputs": inputs, "target": target}},
        "loss": {"factory": loss},
        "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.05, "momentum": 0.9}},
        "training": {"steps": 4, "global_batch": 8, "microbatches": 2, "seed": 5, "clip_grad_norm": 1.0},
        "pipeline": {"stages": 3, "schedule": "zb-h1"},
        "resources": {"meshes": 3, "device": "cpu"},
    }
    for section, changes in VARIANTS[variant].items():
        sections[section] |= changes
    if variant == "tensor 2":
        sections["resources"]["tensor_plan"] = plan
    if (
        variant == "unlike meshes" and model == "EfficientNet"
    ):  # a worker's rows would have statistics of their own
        sections["training"]["sync_batch_norm"] = True
    return JobSpec.model_validate(sections).model_dump(mode="json")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", MODELS)
def test_an_unfamiliar_model_trains_as_its_plain_loop(
    model: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_scaler, "GROWTH_INTERVAL", 2)
    monkeypatch.setattr(engine_compile, "BACKEND", "aot_eager")  # inductor's own code takes minutes
    monkeypatch.setattr(engine_compile, "missing_compiler", lambda device: None)
    spec = spec_of(model, variant)
    plain = PlainJob(spec)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    plain.train(STEPS)
    with Workers(spec) as run:
        results = [run.step(step) for step in STEPS]
        states = [worker.engine.state() for worker in run.workers]
        notes = run.notes
    precision = spec["training"]["precision"]
    close = TOLERANCES.get(precision, 1e-5)
    assert [mean_loss(step) for step in results] == pytest.approx(plain.run.losses, rel=close)
    if precision == "fp16":
        assert [(step[0].loss_scale, step[0].skipped) for step in results] == plain.run.scales
        assert not all(skipped for _, skipped in plain.run.scales)
    if variant == "compile":
        assert any(note.startswith("by torch.compile, stages in graphs") for note in notes)
        assert not any("runs as traced" in note for note in notes), notes
    if variant == "tensor 2" or precision != "fp32":
        return
    after, compared = plain.model.state_dict(), set()
    for state in states:
        for name, value in {**state["parameters"], **state["buffers"]}.items():
            torch.testing.assert_close(value, after[name], rtol=1e-4, atol=1e-5, msg=name)
            compared.add(name)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved <= compared and moved
