"""A job as workers read it agrees with what the control plane accepts and stores."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

import worker.contract
from service.spec import job as jobs
from service.spec.job import LoaderSection
from worker.contract import job as parsed
from worker.contract.job import CheckpointPolicy, Job, LossScaling, Model, Optimizer

SMALLEST = {
    "model": {"factory": "worker.examples.gpt:build"},
    "data": {"factory": "worker.examples.text:ByteWindows"},
    "loss": {"factory": "torch.nn.functional:cross_entropy"},
}
WHOLE = {
    **SMALLEST,
    "data": {
        "factory": "datasets:load_from_disk",
        "args": {"dataset_path": "/data/text"},
        "prefetch": 3,
        "split": "train",
        "columns": {"input_ids": "tokens", "labels": "tokens"},
        "shuffle": False,
        "at_end": "stop",
        "loader": {"workers": 2, "prefetch": 4, "pin_memory": False, "timeout_s": 30.0},
        "collate": {"factory": "transformers:default_data_collator"},
    },
    "name": "gpt",
    "model": {"factory": "a:b", "weights": "/weights/gpt", "freeze": ["wte.*"]},
    "optimizer": {
        "factory": "torch.optim:SGD",
        "args": {"lr": 0.5},
        "schedule": {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3}},
        "groups": [{"match": ["*.bias", "re:norm"], "weight_decay": 0, "lr": 0.1}],
    },
    "training": {
        "steps": 7,
        "global_batch": 12,
        "microbatches": 3,
        "seed": 2,
        "precision": "bf16",
        "transfers": "bf16",
        "clip_grad_norm": 2.0,
        "non_finite": "skip",
        "check_trace": False,
    },
    "pipeline": {
        "stages": 2,
        "cut": ["a", "b"],
        "schedule": "1f1b",
        "overlap": False,
        "recompute": ["s1"],
        "replan": "off",
    },
    "resources": {"meshes": 2, "workers_per_mesh": 2, "device": "cpu", "memory_per_worker": 2**30},
    "checkpoint": {"uri": "s3://bucket/c", "every_steps": 5, "keep": 3},
    "tracking": [{"to": "wandb", "project": "language"}, {"factory": "mine:make", "args": {"place": "here"}}],
    "code": {"working_dir": None, "pip": ["einops"]},
}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (parsed.Factory, jobs.FactorySection),
        (parsed.Model, jobs.ModelSection),
        (parsed.Data, jobs.DataSection),
        (parsed.Loader, LoaderSection),
        (parsed.Optimizer, jobs.OptimizerSection),
        (parsed.Training, jobs.TrainingSection),
        (LossScaling, jobs.LossScalingSection),
        (parsed.Pipeline, jobs.PipelineSection),
        (parsed.Resources, jobs.ResourcesSection),
        (parsed.CheckpointPolicy, jobs.CheckpointSection),
        (parsed.TrackerSpec, jobs.TrackerSection),
        (parsed.Code, jobs.CodeSection),
    ],
)
def test_fields_and_defaults_are_those_of_the_control_plane(ours, theirs):
    found = {
        one.name: one.default if one.default_factory is MISSING else one.default_factory()
        for one in fields(ours)
    }
    expected = {
        name: MISSING if one.default is PydanticUndefined else one.default
        for name, one in theirs.model_fields.items()
    }
    as_lists = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    parts = {name: asdict(value) for name, value in as_lists.items() if is_dataclass(value)}
    expected |= {name: expected[name].model_dump() for name in parts}
    assert as_lists | parts == expected


@pytest.mark.parametrize("given", [SMALLEST, WHOLE])
def test_a_job_that_the_control_plane_stored_is_read_whole(given):
    stored = jobs.JobSpec.model_validate(given).model_dump(mode="json")
    job = Job.from_json(stored)
    only_the_control_plane_reads = {
        "name",
        "retry",
        "queue",
        "project",
        "priority",
        "max_duration",
        "labels",
        "notifications",
        "env",
        "secrets",
        "plan",
    }
    assert set(stored) - {one.name for one in fields(Job)} == only_the_control_plane_reads
    found = asdict(job)
    found["code"]["pip"] = list(found["code"]["pip"])
    found["tracking"] = list(found["tracking"])
    found["model"]["freeze"] = list(found["model"]["freeze"])
    groups = found["optimizer"]["groups"]
    found["optimizer"]["groups"] = [{"match": list(one["match"]), **one["settings"]} for one in groups]
    for name in ("cut", "recompute"):
        if isinstance(found["pipeline"][name], tuple):
            found["pipeline"][name] = list(found["pipeline"][name])
    assert found == {name: stored[name] for name in found}
    assert job.meshes == stored["resources"]["meshes"]


def test_parts_are_typed_and_what_is_absent_has_its_default():
    job = Job.from_json(SMALLEST | {"checkpoint": {"uri": "/c"}, "pipeline": {"stages": 3}})
    assert job.checkpoint == CheckpointPolicy("/c", 50, 2)
    assert job.model == Model("worker.examples.gpt:build", {})
    assert job.optimizer == Optimizer("torch.optim:AdamW", {}, None)
    assert job.meshes == 3
    assert Job.from_json(SMALLEST).checkpoint is None


def test_fields_of_a_newer_control_plane_are_passed_over():
    newer = {**SMALLEST, "tuning": {"every_steps": 3}, "training": {"steps": 2, "warmth": 1}}
    assert Job.from_json(newer).training.steps == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": {"steps": "many"}}, r"job\.training\.steps is 'many': int is wanted"),
        ({"training": {"steps": True}}, r"job\.training\.steps is True"),
        ({"training": {"clip_grad_norm": "x"}}, r"job\.training\.clip_grad_norm is 'x': float or null"),
        ({"training": 3}, r"job\.training is 3"),
        ({"data": {"factory": "a:b", "prefetch": "all"}}, r"job\.data\.prefetch is 'all': int is wanted"),
        ({"model": {"args": {}}}, r"job\.model\.factory is missing"),
        ({"optimizer": {"factory": "a:b", "schedule": {"args": {}}}}, r"job\.optimizer\.schedule\.factory"),
        ({"checkpoint": {}}, r"job\.checkpoint\.uri is missing"),
        ({"code": {"pip": [1]}}, r"job\.code\.pip\[0\] is 1"),
        ({"pipeline": {"cut": None}}, r"job\.pipeline\.cut is None"),
        (
            {"resources": {"memory_per_worker": None}},
            r"job\.resources\.memory_per_worker is None: str or int is wanted",
        ),
    ],
)
def test_a_job_that_cannot_be_read_is_refused_by_the_name_of_the_field(changes, said):
    with pytest.raises(ValueError, match=said):
        Job.from_json({**SMALLEST, **changes})


def test_a_job_is_read_without_torch():
    modules = (path.stem for path in Path(worker.contract.__path__[0]).glob("[a-z]*.py"))
    code = f"import sys, {', '.join(f'worker.contract.{module}' for module in modules)}\n"
    subprocess.run([sys.executable, "-c", code + "assert not {'torch', 'ray'} & {*sys.modules}"], check=True)
