"""Models with complex parameters, as Fourier neural operators have, train as in a plain loop of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from service.spec.job import JobSpec
from tests.tiers import some_by_day
from tests.worker.checkpoint.test_jobs import saved
from tests.worker.plain_job import PlainJob
from tests.worker.verify.proving import proof_of
from tests.worker.workers import Workers
from worker.checkpoint.weights import export_safetensors
from worker.engine.optim import reduce_and_step

STEPS = range(1, 5)
POINTS = 16


class Waves(torch.utils.data.Dataset):
    """A wave on a line and the same, shifted and smoothed."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        wave = torch.randn(1, POINTS, generator=draw)
        return wave, torch.roll(wave, 1, -1) * 0.5


class SpectralConvolution(nn.Module):
    """Multiplies the lowest Fourier modes of each channel by complex weights (Li et al. 2021), beside a pointwise layer."""

    def __init__(self, width: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.complex64) / width)
        self.pointwise = nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,iom->bom", spectrum, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[-1]) + self.pointwise(x)


def operator(width: int = 6, modes: int = 4) -> nn.Module:
    """A Fourier neural operator of four layers."""
    layers: list[nn.Module] = [nn.Conv1d(1, width, 1)]
    for _ in range(4):
        layers += [SpectralConvolution(width, modes), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv1d(width, 1, 1))


class Filter(nn.Module):
    """One complex parameter, shared by its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(POINTS, POINTS) for _ in range(4)])
        self.filter = nn.Parameter(torch.randn(POINTS // 2 + 1, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.fft.irfft(torch.fft.rfft(torch.tanh(layer(x))) * self.filter, n=POINTS)
        return x


def filtered() -> nn.Module:
    return Filter()


def spec(factory: str, optimizer: str, args: dict[str, Any], **changes: Any) -> dict[str, Any]:
    training = {"steps": 4, "global_batch": 16, "microbatches": 4, "seed": 3, **changes.pop("training", {})}
    return JobSpec.model_validate(
        {
            "name": "waves",
            "model": {"factory": f"{__name__}:{factory}"},
            "data": {"factory": f"{__name__}:Waves"},
            "loss": {"factory": "torch.nn:MSELoss"},
            "optimizer": {"factory": f"torch.optim:{optimizer}", "args": args},
            "training": training,
            "pipeline": {"stages": 3},
            "resources": {"meshes": 3, "device": "cpu"},
            **changes,
        }
    ).model_dump(mode="json")


SGD = ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAM = ("Adam", {"lr": 0.01})


@some_by_day(
    ("factory", "optimizer", "clip"),
    [
        ("operator", ADAM, 0.05),
        ("operator", SGD, None),
        ("filtered", SGD, 0.05),
        ("filtered", ADAM, None),
        ("operator", ("AdamW", {"lr": 0.01, "amsgrad": True}), 1.0),
    ],
    by_day=1,
)
def test_complex_parameters_train_in_three_stages_as_in_a_plain_loop(factory, optimizer, clip):
    job = spec(factory, *optimizer, training={"clip_grad_norm": clip})
    plain = PlainJob(job).train(STEPS)
    with Workers(job) as run:
        losses = run.losses(STEPS)
        states = [worker.engine.state()["parameters"] for worker in run.workers]
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    trained = {name: value for state in states for name, value in state.items()}
    assert any(value.is_complex() for value in trained.values())
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": {"stages": 2}, "resources": {"meshes": 2, "workers_per_mesh": 2, "device": "cpu"}},
        {
            "pipeline": {"stages": 2},
            "resources": {
                "meshes": [{"workers": 2, "shard": "optimizer"}, {"workers": 2, "shard": "optimizer"}],
                "device": "cpu",
            },
        },
        {"training": {"clip_grad_norm": 0.05, "precision": "bf16"}},
        {"training": {"clip_grad_norm": 0.05}, "pipeline": {"stages": 3, "recompute": "all"}},
    ],
    ids=["data parallel", "zero1", "bf16", "recomputed"],
)
def test_complex_parameters_train_as_in_a_plain_loop_in_other_layouts(changes):
    job = spec("operator", *ADAM, **changes)
    plain = PlainJob(job).train(STEPS)
    with Workers(job) as run:
        losses = run.losses(STEPS)
    tolerance = 2e-2 if job["training"]["precision"] == "bf16" else 1e-5
    assert losses == pytest.approx(plain.losses, rel=tolerance)


@pytest.mark.slow
def test_a_checkpoint_of_complex_parameters_goes_on_in_other_stages_and_is_exported(tmp_path):
    job = spec("operator", *ADAM, training={"clip_grad_norm": 0.05})
    plain = PlainJob(job).train(STEPS)
    with Workers(job) as run:
        run.losses(range(1, 3))
        uri = saved(run, str(tmp_path / "c"), 2)
        trained = {
            name: value.clone()
            for worker in run.workers
            for name, value in worker.engine.state()["parameters"].items()
        }
    export_safetensors(uri, str(tmp_path / "out"))
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == trained.keys()
    for name, value in trained.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=0)
    with Workers({**job, "pipeline": {"stages": 2}, "resources": {"meshes": 2, "device": "cpu"}}) as run:
        run.call(lambda worker: worker.restore(uri))
        assert run.losses(range(3, 5)) == pytest.approx(plain.losses[2:], rel=1e-5)


@pytest.mark.slow
def test_a_proof_compares_complex_parameters_with_the_plain_model(monkeypatch):
    job = {**spec("filtered", *ADAM, training={"clip_grad_norm": 0.05}), "name": "waves"}
    assert proof_of(job, steps=2).difference is None
    with monkeypatch.context() as patch:
        patch.setattr(reduce_and_step, "real_view", lambda gradient: gradient.real)
        found = proof_of(job, steps=1).difference
    assert found is not None and "norm" in found
