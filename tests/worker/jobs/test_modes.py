"""Jobs of models that a factory returns in eval mode, or that keep a part of themselves in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from service.spec.job import JobSpec
from tests.tiers import some_by_day
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers, mean_loss

STEPS = range(1, 5)


class Rows(torch.utils.data.Dataset):
    """Numbers and the class of each row."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        row = torch.randn(8, generator=draw)
        return row, (row[0] > 0).long()


def layers() -> list[nn.Module]:
    return [
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Linear(8, 2),
    ]


def in_eval_mode() -> nn.Module:
    """As from_pretrained returns a model."""
    return nn.Sequential(*layers()).eval()


class FrozenNorm(nn.Sequential):
    """Its first norm is in eval mode whatever is asked for, as detectors keep those of a backbone."""

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self[1].eval()
        return self


def frozen_norm() -> nn.Module:
    return FrozenNorm(*layers())


class CannotTrain(nn.Sequential):
    def train(self, mode: bool = True) -> nn.Module:
        raise RuntimeError("only evaluated")


def cannot_train() -> nn.Module:
    return CannotTrain(*layers())


def spec(factory: str, **model: Any) -> dict[str, Any]:
    return JobSpec.model_validate(
        {
            "name": "modes",
            "model": {"factory": f"{__name__}:{factory}", **model},
            "data": {"factory": f"{__name__}:Rows"},
            "loss": {"factory": "torch.nn.functional:cross_entropy"},
            "optimizer": {"factory": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}},
            "training": {"steps": 4, "global_batch": 16, "microbatches": 2, "seed": 3},
            "evaluation": {"data": {"factory": f"{__name__}:Rows"}, "steps": 1},
            "pipeline": {"stages": 2},
            "resources": {"meshes": 2, "device": "cpu"},
        }
    ).model_dump(mode="json")


@some_by_day(
    ("factory", "train", "notes"),
    [
        ("in_eval_mode", "called", ["the factory returned the model in eval mode"]),
        ("in_eval_mode", "as_built", ["Sequential trains in eval mode (model.train: as_built)"]),
        ("frozen_norm", "called", ["in another than what contains them: 1 (BatchNorm1d, eval mode)"]),
        ("frozen_norm", "as_built", []),
    ],
    by_day=2,
)
def test_each_module_trains_in_the_mode_of_the_plain_loop(factory: str, train: str, notes: list[str]):
    job = spec(factory, train=train)
    plain = PlainJob(job)
    with Workers(job) as run:
        losses = run.losses(STEPS[:3])
        plain.train(STEPS[:3])
        assert run.evaluate().loss == pytest.approx(plain.evaluate(), rel=1e-5)
        losses.append(mean_loss(run.step(STEPS[3])))
        plain.train(STEPS[3:])
        state = {name: t for worker in run.workers for name, t in worker.engine.state()["buffers"].items()}
        told = run.notes
    assert losses == pytest.approx(plain.run.losses, rel=1e-5)
    assert {name for name in state if "running" in name} == {
        f"{norm}.running_{what}" for norm in (1, 4) for what in ("mean", "var")
    }
    for name, buffer in plain.model.named_buffers():
        if name not in state:  # a norm in eval mode counts no batches, and no stage has its count
            continue
        torch.testing.assert_close(state[name], buffer, rtol=1e-4, atol=1e-6, msg=name)
    found = [note for note in told if " mode" in note]
    assert len(found) == len(notes) and all(text in note for text, note in zip(notes, found, strict=True))


def test_a_train_method_that_raises_is_refused_with_the_way_out():
    with pytest.raises(
        Exception, match=r"CannotTrain.train\(\) raised RuntimeError: only evaluated.*as_built"
    ):
        Workers(spec("cannot_train"))
