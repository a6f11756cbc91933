"""Whole jobs beside their plain loops: tables whose rows have everything that a job may ask for, every pair of it (slow) and
every three (matrix), and losses, evaluations and parameters that are those of one process.

What is particular to one way of training (its refusals, what it resumes, what it keeps) has a file of its own.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers, mean_loss
from worker.engine.recomputation.blocks import StageBlocks
from worker.engine.recomputation.products import KeptProducts

STEPS = range(1, 4)
DRAWN = 5000
"""Rows that are drawn for each column of what goes together: any such choice is in some of them."""
CANDIDATES = 24
"""Rows that are compared for a choice that is missing in the table."""
IGNORED = 7
TEXT = {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}}
CROSS_ENTROPY = {"factory": "torch.nn:CrossEntropyLoss"}
# Adam makes as much of a gradient that is rounding as of any other: models with such gradients have SGD.
ADAMW = {"factory": "torch.optim:AdamW", "args": {"lr": 1e-2}}
SGD = {"factory": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 3, "width": 16, "heads": 2, "length": 8, "tied": True},
        },
        "data": TEXT,
        "loss": CROSS_ENTROPY,
        "optimizer": ADAMW,
    },
    "unet": {
        "model": {"factory": "worker.examples.unet:build", "args": {"width": 4}},
        "data": {"factory": "worker.examples.digits:NoisyDigits"},
        "loss": {"factory": "torch.nn.functional:mse_loss"},
        "optimizer": SGD,
    },
    "encoder-decoder": {
        "model": {
            "factory": "tests.benchmarks.planned_models.planned_models:encoder_decoder",
            "args": {"layers": 1, "width": 16, "heads": 2},
        },
        "data": TEXT,
        "loss": CROSS_ENTROPY,
        "optimizer": SGD,
    },
}
LAYOUTS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "one": (1, [(1, 1)]),
    "two meshes": (2, [(1, 1)] * 2),
    "four stages on two": (4, [(1, 1)] * 2),
    "three meshes": (3, [(1, 1)] * 3),
    "data 2": (2, [(2, 1)] * 2),
    "data 2 and 1": (4, [(2, 1), (1, 1)]),
    "tensor 2": (2, [(1, 2)] * 2),
    "tensor 2, looped": (4, [(1, 2)] * 2),
    "data 2 x tensor 2": (2, [(2, 2)] * 2),
    "tensor 2 and 1": (2, [(1, 2), (1, 1)]),
    "tensor 2, data 2": (2, [(1, 2), (2, 1)]),
}
"""Stages, and (data, tensor) of each mesh."""
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3, "fp16": 1e-3}
SCALING = {"init_scale": 2.0**22}


@pytest.fixture(autouse=True)
def scale_grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.optim.grad_scaler.GROWTH_INTERVAL", 2)


class UnequalTexts:
    """Windows of which a different part is a target; of one in four nothing is."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        tokens = torch.randint(10, 200, (8,), generator=draw)
        length = 0 if index % 4 == 3 else 1 + index % 8
        return tokens, torch.where(torch.arange(8) < length, tokens, IGNORED)


@dataclass(frozen=True)
class Row:
    """What one job asks for."""

    model: str
    layout: str
    precision: str
    schedule: str
    recompute: str
    shard: str
    nodes: str
    reduction: str
    evaluation: str
    clip: str

    def __str__(self) -> str:
        return ", ".join(str(getattr(self, one.name)) for one in fields(self))


CHOICES: dict[str, list[str]] = {
    "model": list(MODELS),
    "layout": list(LAYOUTS),
    "precision": list(TOLERANCES),
    "schedule": ["auto", "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-v"],
    "recompute": ["none", "all", "selective", "by_block", "auto"],
    "shard": ["none", "optimizer"],
    "nodes": ["one node", "a node a mesh"],
    "reduction": ["mean", "tokens"],
    "evaluation": ["no evaluation", "evaluated"],
    "clip": ["clipped", "not clipped"],
}


def can_be(row: Row) -> bool:
    """Whether a row is a job that is not refused."""
    stages, meshes = LAYOUTS[row.layout]
    looped, alike = stages > len(meshes), len(set(meshes)) == 1
    fits = {
        "gpipe": not looped,
        "1f1b": not looped,
        "eager-1f1b": not looped,
        "zb-h1": not looped,
        "interleaved-1f1b": looped,
        "zb-v": stages == 2 * len(meshes) and alike,
    }
    sharing = row.shard == "none" or any(data > 1 for data, _ in meshes)
    return fits.get(row.schedule, True) and sharing and (row.reduction == "mean" or row.model != "unet")


@functools.cache
def rows(together: int) -> list[Row]:
    """A table that has every possible choice of any `together` columns in a row, found greedily: of some rows that have
    the first choice that is missing, the one that has most of what is missing."""
    choices = [*CHOICES.values()]
    draw = random.Random(0)
    drawn = dict.fromkeys(tuple(draw.randrange(len(of)) for of in choices) for _ in range(DRAWN * together))
    possible = [
        found for found in drawn if can_be(Row(*(of[k] for of, k in zip(choices, found, strict=True))))
    ]
    columns = [*itertools.combinations(range(len(choices)), together)]

    def chosen(row: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {(at, *(row[k] for k in of)) for at, of in enumerate(columns)}

    having: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for row in possible:
        for one in chosen(row):
            if len(of := having.setdefault(one, [])) < CANDIDATES:
                of.append(row)
    table, missing = [], dict.fromkeys(sorted(having))
    while missing:
        best = max(having[next(iter(missing))], key=lambda row: sum(one in missing for one in chosen(row)))
        table.append(Row(*(of[k] for of, k in zip(choices, best, strict=True))))
        for one in chosen(best):
            missing.pop(one, None)
    return table


def spec_of(row: Row) -> dict[str, Any]:
    """The job of a row, as the control plane hands it to its workers."""
    stages, meshes = LAYOUTS[row.layout]
    spec = {
        **MODELS[row.model],
        "name": "row",
        "training": {
            "steps": len(STEPS),
            "global_batch": 8,
            "microbatches": 2,
            "seed": 5,
            "precision": row.precision,
            "clip_grad_norm": 0.5 if row.clip == "clipped" else None,
            "loss_reduction": row.reduction,
            "loss_scaling": SCALING if row.precision == "fp16" else None,
        },
        "pipeline": {"stages": stages, "schedule": row.schedule, "recompute": row.recompute},
        "resources": {
            "meshes": [
                {
                    "workers": data * tensor,
                    "parallel": {"data": data, "tensor": tensor},
                    "shard": row.shard if data > 1 else "none",
                }
                for data, tensor in meshes
            ],
            "device": "cpu",
        },
    }
    if row.reduction == "tokens":
        spec["data"] = {"factory": f"{__name__}:UnequalTexts"}
        spec["loss"] = {**CROSS_ENTROPY, "args": {"ignore_index": IGNORED}}
    if row.evaluation == "evaluated":
        spec["evaluation"] = {"data": MODELS[row.model]["data"], "steps": 2}
    return JobSpec.model_validate(spec).model_dump(mode="json")


def check(row: Row) -> None:
    """Train the row's job and its plain loop: two steps, an evaluation, one more, and the parameters at the end."""
    spec = spec_of(row)
    nodes = {f"m{k}": f"node {k}" for k in range(spec["resources"]["meshes"])}
    close = TOLERANCES[row.precision]
    plain = PlainJob(spec)
    with (
        Workers(spec, nodes if row.nodes == "a node a mesh" else None) as run,
        patch.object(KeptProducts, "taking", autospec=True, side_effect=KeptProducts.taking) as taking,
        patch.object(StageBlocks, "last", autospec=True, side_effect=StageBlocks.last) as last,
    ):
        told = [run.step(step) for step in STEPS[:2]]
        plain.train(STEPS[:2])
        if row.evaluation == "evaluated":
            assert run.evaluate().loss == pytest.approx(plain.evaluate(), rel=close)
        told.append(run.step(STEPS[2]))
        plain.train(STEPS[2:])
        runners = (runner for worker in run.workers for runner in worker.engine.runners.values())
        several_blocks = any(runner.runs_by_block for runner in runners)
        whole = [f"m{k}" for k, (_, tensor) in enumerate(LAYOUTS[row.layout][1]) if tensor == 1]
        state = {
            name: parameter
            for worker, of in zip(run.workers, run.call(lambda worker: worker.engine.state()), strict=True)
            if worker.mesh in whole
            for name, parameter in of["parameters"].items()
        }
    assert taking.called or row.recompute != "selective"
    assert last.called or row.recompute != "by_block" or not several_blocks
    assert [mean_loss(step) for step in told] == pytest.approx(plain.run.losses, rel=close)
    if row.precision == "fp16":
        assert [(s[0].loss_scale, s[0].skipped) for s in told] == plain.run.scales
    if MODELS[row.model]["optimizer"] is SGD and row.precision == "fp32":
        expected = dict(plain.model.named_parameters())
        for name, parameter in state.items():
            torch.testing.assert_close(parameter, expected[name].detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("row", rows(1), ids=str)
def test_a_job_is_its_plain_loop(row: Row) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(2), ids=str)
def test_a_job_of_any_two_choices_is_its_plain_loop(row: Row) -> None:
    check(row)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("model", MODELS)
def test_a_job_of_any_three_choices_is_its_plain_loop(
    model: str, precision: str, subtests: pytest.Subtests
) -> None:
    for row in rows(3):
        if (row.model, row.precision) == (model, precision):
            with subtests.test(row=str(row)):
                check(row)
