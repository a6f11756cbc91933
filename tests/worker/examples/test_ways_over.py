"""The ways over of the page, in small: the loop is run as it is written there, and the job after it finds its losses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from service.spec.job import JobSpec
from tests.missing import needs_libraries
from tests.worker.examples.test_gallery import JOBS, PAGE, SECTIONS
from tests.worker.workers import Workers
from worker.data.sampler import BatchSampler

STEPS = 5
WARMUP = 2
RATE = 3e-3
BATCH = 8
BEFORE = {
    title: re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    for title, text in SECTIONS.items()
    if title in ("From a plain loop", "From Trainer", "From accelerate")
}
TRAINING = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        inner = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), *inner, nn.Linear(width, 1))

    def forward(self, points):
        return self.layers(points)


class Points:
    def __init__(self, count):
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        point = self.points[index]
        return point, point.prod(0, keepdim=True)


class Samples:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = (index * 7 + torch.arange(12).square()) % 96
        return {"input_ids": tokens, "labels": tokens}


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, vocab_size=96, **sizes))
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The user's module, importable as by a job whose code.working_dir it lies in."""
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, Any] = {}
    exec(TRAINING, names)
    yield SimpleNamespace(**names)


class OrderedLoader:
    """Batches in the order in which a job deals samples out: a DataLoader's own is another permutation of them."""

    def __init__(self, data: Any, batch_size: int, shuffle: bool = True):
        assert shuffle
        self.data, self.size = data, batch_size

    def __iter__(self) -> Iterator[Any]:
        for indices in dealt_order(len(self.data), self.size):
            yield torch.utils.data.default_collate([self.data[index] for index in indices])


def dealt_order(samples: int, batch: int, batches: int = 10 * STEPS) -> list[list[int]]:
    """The samples of each batch, as a job with one microbatch deals them out."""
    sampler = BatchSampler(samples, batch, 1, seed=0)
    return [sampler.indices(step, 0) for step in range(1, batches + 1)]


def flat_order(samples: int) -> list[int]:
    """The samples of STEPS steps one after the other."""
    return [index for batch in dealt_order(samples, BATCH, STEPS) for index in batch]


def in_small(text: str, changes: dict[str, str]) -> str:
    """The page's code with each key replaced, which stands there once at least."""
    for before, after in changes.items():
        assert before in text, f"the page has no {before} any more"
        text = text.replace(before, after)
    return text


def small_job(title: str, **changes: Any) -> dict[str, Any]:
    """The job of a section as a server keeps it, of STEPS steps in fp32, without checkpoints and trackers."""
    job = copy.deepcopy(JOBS[title])
    for name in ("checkpoint", "code", "tracking", "evaluation"):
        job.pop(name, None)
    job["training"] |= {"steps": STEPS, "precision": "fp32", "global_batch": BATCH, "microbatches": 4}
    job["optimizer"]["args"]["lr"] = RATE
    if (
        "decay" in job["optimizer"]["schedule"]
    ):  # as the page says: warm-up of transformers begins at a rate of 0
        factory = f"transformers:get_{job['optimizer']['schedule']['decay']}_schedule_with_warmup"
        assert factory.replace("linear", "cosine") in PAGE
        args = {"num_warmup_steps": WARMUP, "num_training_steps": STEPS}
        job["optimizer"]["schedule"] = {"factory": factory, "args": args}
    return JobSpec.model_validate(job | changes).model_dump(mode="json")


def losses_of(job: dict[str, Any]) -> list[float]:
    with Workers(job) as workers:
        return workers.losses(range(1, STEPS + 1))


def recorded(function: Callable[..., torch.Tensor], values: list[float]) -> Callable[..., torch.Tensor]:
    def call(*arguments: Any, **options: Any) -> torch.Tensor:
        value = function(*arguments, **options)
        values.append(value.item())
        return value

    return call


def assert_learns_as(expected: Sequence[float], job: dict[str, Any]) -> None:
    assert len(expected) == STEPS and expected[-1] < expected[0]
    assert losses_of(job) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_the_job_after_a_plain_loop_has_its_losses(training: SimpleNamespace):
    expected: list[float] = []
    torch.manual_seed(0)
    names = {
        "torch": torch,
        "nn": nn,
        "functional": SimpleNamespace(mse_loss=recorded(nn.functional.mse_loss, expected)),
        "DataLoader": OrderedLoader,
        "Network": training.Network,
        "Points": training.Points,
    }
    changes = {"range(1000)": f"range({STEPS})", "batch_size=64": f"batch_size={BATCH}"}
    exec(in_small(BEFORE["From a plain loop"], changes), names)
    assert_learns_as(expected, small_job("From a plain loop"))


@pytest.mark.slow
@needs_libraries("accelerate", "transformers")
def test_the_job_after_accelerate_has_its_losses(training: SimpleNamespace):
    from accelerate import Accelerator
    from transformers import get_linear_schedule_with_warmup

    torch.manual_seed(0)
    model = training.build()
    expected: list[float] = []
    model.register_forward_hook(lambda _model, _inputs, output: expected.append(output.loss.item()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    data = training.Samples()
    names = {
        "Accelerator": Accelerator,
        "model": model,
        "optimizer": optimizer,
        "schedule": get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS),
        "loader": torch.utils.data.DataLoader(data, batch_size=BATCH // 4, sampler=flat_order(len(data))),
    }
    changes = {'mixed_precision="bf16"': 'mixed_precision="no", cpu=True'}
    exec(in_small(BEFORE["From accelerate"], changes), names)
    steps = [sum(expected[k : k + 4]) / 4 for k in range(0, len(expected), 4)]
    assert_learns_as(steps, small_job("From accelerate"))


@pytest.mark.slow
@needs_libraries("accelerate", "datasets", "tensorboard", "transformers")
def test_the_job_after_trainer_has_its_losses(training: SimpleNamespace, tmp_path: Path):
    import transformers
    from datasets import Dataset, DatasetDict, load_from_disk

    torch.manual_seed(0)
    training.build().save_pretrained(tmp_path / "llama")
    samples = training.Samples()
    columns = {
        name: [samples[index][name].tolist() for index in range(len(samples))]
        for name in ("input_ids", "labels")
    }
    data = Dataset.from_dict(columns)
    DatasetDict({"train": data, "test": data.select(range(4))}).save_to_disk(tmp_path / "reviews")
    expected: list[float] = []

    class Trainer(transformers.Trainer):
        """Deals samples out as a job does, and keeps the losses, which its own log rounds."""

        def _get_train_sampler(self, *_: Any) -> list[int]:
            return flat_order(len(samples))

        def compute_loss(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
            loss = super().compute_loss(model, *arguments, **options)
            if model.training:
                expected.append(loss.item())
            return loss

    names = {
        "Trainer": Trainer,
        "TrainingArguments": transformers.TrainingArguments,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "load_from_disk": load_from_disk,
    }
    changes = {
        "/shared": str(tmp_path),
        "per_device_train_batch_size=8": f"per_device_train_batch_size={BATCH // 4}",
        "max_steps=1000": f"max_steps={STEPS}",
        "learning_rate=2e-5": f"learning_rate={RATE}",
        "warmup_steps=100": f"warmup_steps={WARMUP}",
        "bf16=True": "use_cpu=True",
        "_steps=200": f"_steps={STEPS}",
        "resume_from_checkpoint=True": "",
    }
    exec(in_small(BEFORE["From Trainer"], changes), names)
    steps = [sum(expected[k : k + 4]) for k in range(0, len(expected), 4)]
    model, data = JOBS["From Trainer"]["model"], JOBS["From Trainer"]["data"]
    here = {
        "model": {
            "hf": {**model["hf"], "config": str(tmp_path / "llama")},
            "weights": str(tmp_path / "llama"),
        },
        "data": {**data, "args": {"dataset_path": str(tmp_path / "reviews")}},
    }
    assert_learns_as(steps, small_job("From Trainer", **here))
