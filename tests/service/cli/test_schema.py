"""`slotline schema`: editors take the job files that the server takes, and mark those fields that it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from service.cli.job_file import StrictYamlLoader
from service.cli.local.check import job_schema
from service.spec.job import JobSpec
from tests.service.conftest import job_body

ROOT = Path(__file__).parents[3]
README_JOBS = [
    text
    for readme in ("README.md", "worker/README.md", "worker/driver/tracking/README.md")
    for text in re.findall(r"```yaml\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
]
FAMILIES = sorted((ROOT / "tests" / "families").glob("*.yaml"))


@pytest.fixture(scope="module")
def validator():
    schema = job_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def errors(validator, job):
    return [".".join(map(str, error.absolute_path)) for error in validator.iter_errors(job)]


@pytest.mark.parametrize("text", [*README_JOBS, *(path.read_text() for path in FAMILIES)])
def test_the_job_files_of_the_readmes_and_families_are_right(validator, text):
    """A part of one stands in a whole one."""
    job = yaml.load(text, StrictYamlLoader)
    assert errors(validator, job if "model" in job else {**job_body(), **job}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {
            "resources": {"meshes": [{"workers": 2, "parallel": {"tensor": 2}}, {"workers": 1}]},
            "pipeline": {"stages": 2},
        },
        {"max_duration": "2d12h"},
        {"max_duration": 90},
        {"pipeline": {"schedule": "1F1B"}},
        {"optimizer": {"factory": "torch.optim:SGD", "groups": [{"match": ["*.bias"], "weight_decay": 0}]}},
        {"training": {"microbatches": "auto", "clip_grad_norm": None}},
        {"model": "hf:gpt2/config.json"},
        {"model": {"hf": "gpt2/config.json", "output": "logits"}},
        {"model": {"hf": {"class": "GPT2LMHeadModel", "config": {"n_layer": 4}}, "freeze": ["*.bias"]}},
        {"parallelism": {"pp": 4, "dp": 2}},
        {"parallelism": {"pp": {"min": 2, "max": 4}, "dp": 2}, "checkpoint": {"uri": "/c"}},
        {"resources": {"meshes": {"min": 2, "max": 4}}, "checkpoint": {"uri": "/c"}},
        {"optimizer": {"factory": "torch.optim:SGD", "schedule": {"warmup": 10, "decay": "cosine"}}},
    ],
)
def test_what_a_file_may_say_besides_the_fields_own_types_is_right(validator, changes):
    job = job_body(**changes)
    JobSpec.model_validate(job)
    assert errors(validator, job) == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pipeline": {"stage": 4}}, "pipeline"),
        ({"pipeline": {"schedule": "1f2b"}}, "pipeline.schedule"),
        ({"loss": "cross_entropy"}, "loss"),
        ({"model": {"factory": "no_colon"}}, "model.factory"),
        ({"training": {"steps": 0}}, "training.steps"),
        ({"resources": {"meshes": [{"worker": 2}]}}, "resources.meshes"),
        ({"max_duration": "soon"}, "max_duration"),
        ({"max_duration": ""}, "max_duration"),
        ({"model": "gpt2"}, "model"),
        ({"model": {"hf": {"class": "GPT2LMHeadModel"}}}, "model.hf"),
        ({"model": {"hf": "gpt2/config.json", "factory": "a:b"}}, "model"),
        ({"parallelism": {"pp": 4, "cp": 2}}, "parallelism"),
        ({"parallelism": {"pp": 0}}, "parallelism.pp"),
        ({"parallelism": {"pp": {"min": 2, "most": 4}}}, "parallelism.pp"),
        ({"resources": {"meshes": {"min": 0, "max": 4}}}, "resources.meshes"),
        ({"training": {"epochs": 0}}, "training.epochs"),
    ],
)
def test_what_the_server_refuses_by_its_form_is_marked_where_it_stands(validator, changes, field):
    job = job_body(**changes)
    with pytest.raises(ValidationError):
        JobSpec.model_validate(job)
    assert errors(validator, job) == [field]


def test_the_length_of_a_training_may_be_in_epochs_or_tokens(validator):
    for length in ({"epochs": 0.5}, {"tokens": 1e9}):
        assert errors(validator, job_body(training=length)) == []


def test_the_verb_prints_the_schema_with_descriptions_and_no_made_up_titles(run):
    result = run("schema")
    assert result.code == 0 and result.json == job_schema()
    steps = result.json["$defs"]["TrainingSection"]["properties"]["steps"]
    assert steps["maximum"] == 1_000_000_000 and "title" not in steps
    assert "safetensors" in result.json["$defs"]["ModelSection"]["properties"]["weights"]["description"]
