"""Short forms of job files: the long form that each one stands for, and the sentences for wrong ones."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.spec.field_errors import field_errors
from service.spec.job import JobSpec, SubmittedJob
from service.spec.short_forms import file_form, steps_of
from tests.service.conftest import job_body


def spec(**changes):
    return JobSpec.model_validate(job_body(**changes)).model_dump(mode="json")


def refusal(**changes):
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(job_body(**changes))
    return str(caught.value)


CONFIG = {"n_layer": 4, "n_embd": 64}


@pytest.mark.parametrize(
    ("model", "factory", "config"),
    [
        (
            {"hf": {"class": "GPT2LMHeadModel", "config": CONFIG}},
            "transformers:GPT2LMHeadModel",
            {"factory": "transformers:GPT2LMHeadModel.config_class", "args": CONFIG},
        ),
        (
            {"hf": {"class": "GPT2LMHeadModel", "config": "gpt2/config.json"}},
            "transformers:GPT2LMHeadModel",
            {
                "factory": "transformers:AutoConfig.from_pretrained",
                "args": {"pretrained_model_name_or_path": "gpt2/config.json"},
            },
        ),
        (
            {"hf": {"class": "AutoModelForCausalLM", "config": {"model_type": "gpt2", **CONFIG}}},
            "transformers:AutoModelForCausalLM.from_config",
            {"factory": "transformers:AutoConfig.for_model", "args": {"model_type": "gpt2", **CONFIG}},
        ),
        ("hf:gpt2/config.json", "worker.model.factory:transformers_model", "gpt2/config.json"),
        ({"hf": "gpt2/config.json"}, "worker.model.factory:transformers_model", "gpt2/config.json"),
    ],
)
def test_a_model_of_transformers_is_its_class_called_with_its_configuration(model, factory, config):
    made = spec(model=model)["model"]
    assert (made["factory"], made["args"]) == (factory, {"config": config})
    if isinstance(model, dict):
        kept = spec(model={**model, "output": "logits", "freeze": ["*.bias"]})["model"]
        assert (kept["output"], kept["freeze"]) == ("logits", ["*.bias"])


def test_parallelism_is_as_many_meshes_of_dp_times_tp_workers_with_one_stage_each():
    short = spec(
        parallelism={"pp": 4, "dp": 2, "tp": 2}, pipeline={}, training={"global_batch": 8, "microbatches": 4}
    )
    resources = {"meshes": 4, "workers_per_mesh": 4, "tensor": 2}
    long = spec(resources=resources, pipeline={"stages": 4}, training={"global_batch": 8, "microbatches": 4})
    assert short == long and "parallelism" not in short
    more = spec(parallelism={"pp": 2}, pipeline={"stages": 4}, resources={"device": "cpu"})
    assert (more["pipeline"]["stages"], more["resources"]["meshes"], more["resources"]["device"]) == (
        4,
        2,
        "cpu",
    )


MESHES = [
    {"resources": {"meshes": 2}},
    {"resources": {"meshes": 2, "device": "cpu", "shard": "optimizer"}},
    {"parallelism": {"pp": 2, "dp": 2}},
    {"parallelism": {"pp": 2, "tp": 2}, "resources": {"tensor_plan": {"*": "colwise"}}},
    {"parallelism": {"pp": 1, "dp": 2, "tp": 2}, "resources": {"shard": "optimizer"}},
    {"resources": {"meshes": [{"workers": 2}, {"workers": 1}]}},
    {"resources": {"meshes": [{"workers": 2, "parallel": {"tensor": 2}}, {"workers": 2}]}},
    {"resources": {"meshes": [{"workers": 4, "parallel": {"tensor": 2}, "shard": "optimizer"}, {}]}},
]


@pytest.mark.parametrize("meshes", MESHES)
def test_a_stored_job_as_users_write_it_is_the_same_job(meshes):
    job = SubmittedJob.model_validate(job_body(pipeline={"stages": 2}, **meshes))
    whole = job.model_dump(mode="json")
    assert SubmittedJob.model_validate(whole) == job, "what an answer has may be sent again"
    for stored in (whole, job.model_dump(mode="json", exclude_defaults=True)):
        written = file_form(stored)
        assert not {*STORED} & {*written.get("resources", {})}
        assert SubmittedJob.model_validate(written).model_dump() == job.model_dump()


STORED = ("workers_per_mesh", "workers", "tensor", "tensors")


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        (
            {"workers_per_mesh": 2},
            "workers_per_mesh is no field any more: write parallelism: {pp: 2, dp: 2, tp: 1}",
        ),
        ({"meshes": 1, "workers_per_mesh": 4, "tensor": 2}, "write parallelism: {pp: 1, dp: 2, tp: 2}"),
        ({"tensor": 2}, "resources.tensor is no field any more: write parallelism: {pp: 2, dp: 1, tp: 2}"),
        ({"meshes": 2, "workers": [2, 1]}, "or resources.meshes as a list where meshes differ"),
        ({"workers_per_mesh": "many"}, "resources.workers_per_mesh is no field any more"),
    ],
)
def test_fields_of_stored_jobs_are_refused_with_what_users_write(resources, sentence):
    with pytest.raises(ValidationError) as caught:
        SubmittedJob.model_validate(job_body(pipeline={"stages": 2}, resources=resources))
    assert sentence in str(caught.value)


def test_no_schema_and_no_suggestion_names_a_field_of_stored_jobs():
    schema = SubmittedJob.model_json_schema()["$defs"]["ResourcesSection"]["properties"]
    assert not {*STORED} & {*schema} and {"meshes", "shard", "device"} <= {*schema}
    error = {
        "loc": ("body", "resources", "worker_per_mesh"),
        "type": "extra_forbidden",
        "msg": "",
        "input": 1,
    }
    assert "workers_per_mesh" not in field_errors([error])[1]


def test_a_schedule_by_warmup_and_decay_takes_the_steps_of_the_training():
    optimizer = {"factory": "torch.optim:SGD", "schedule": {"warmup": 10, "decay": "cosine"}}
    made = spec(optimizer=optimizer, training={"steps": 70})["optimizer"]["schedule"]
    assert made == {
        "factory": "worker.actor.optimizer:warmup_decay",
        "args": {"steps": 70, "warmup": 10, "decay": "cosine"},
    }
    optimizer["schedule"] = {"decay": "linear"}
    default = spec(optimizer=optimizer, training={})
    assert default["optimizer"]["schedule"]["args"]["steps"] == default["training"]["steps"]


def test_what_is_stored_is_the_long_form_and_stays_itself():
    changes = {
        "model": {"hf": {"class": "GPT2LMHeadModel", "config": CONFIG}},
        "parallelism": {"pp": 2},
        "pipeline": {},
        "optimizer": {"factory": "torch.optim:SGD", "schedule": {"warmup": 1}},
    }
    stored = spec(**changes)
    assert JobSpec.model_validate(stored).model_dump(mode="json") == stored


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "hf:"}, "model is 'hf:' without a path: write hf:path/config.json"),
        ({"model": {"hf": "a.json", "args": {}}}, "model.hf and model.args both say what the model is"),
        (
            {"model": {"hf": {"clas": "X", "config": "a"}}},
            "model.hf.clas: unknown field: did you mean class?",
        ),
        ({"model": {"hf": {"config": "a"}}}, "model.hf.class is None: name a class of transformers"),
        ({"model": {"hf": {"class": "X"}}}, "model.hf.config is None: write the settings"),
        ({"model": {"hf": {"class": "AutoModel", "config": {}}}}, "names none: add model_type: llama, say"),
        ({"model": {"hf": 3}}, "model.hf is 3: write {class: LlamaForCausalLM"),
        ({"parallelism": {"pp": 4, "cp": 2}}, "parallelism.cp: unknown field"),
        ({"parallelism": {"pp": True}}, "parallelism.pp is True: write a whole number from 1 to 1024"),
        ({"parallelism": 4}, "parallelism is 4: write {pp: 4, dp: 2, tp: 2}"),
        (
            {"parallelism": {"pp": 4}, "resources": {"meshes": 4}},
            "parallelism and resources.meshes both say how the workers are arranged",
        ),
        ({"parallelism": {"pp": 4, "dp": 3}}, "cannot be shared by 3 data-parallel workers of a mesh"),
        ({"training": {"steps": 5, "epochs": 2}}, "training.steps and training.epochs all say how long"),
        ({"training": {"epochs": 2}}, "submit with `slotline submit`, which reads it on your machine"),
        ({"training": {"tokens": -5}}, "training.tokens is -5: write a number above 0"),
        (
            {"optimizer": {"factory": "torch.optim:SGD", "schedule": {"warmup": 11}}},
            "warmup 11 is longer than",
        ),
        (
            {"optimizer": {"factory": "torch.optim:SGD", "schedule": {"decay": "cosin"}}},
            "optimizer.schedule.decay is 'cosin': write one of constant, linear, cosine",
        ),
        (
            {"optimizer": {"factory": "torch.optim:SGD", "schedule": {"warmup": 1, "steps": 3}}},
            "optimizer.schedule.steps: unknown field: it has warmup, decay",
        ),
    ],
)
def test_a_wrong_short_form_is_refused_with_field_value_and_way_out(changes, sentence):
    assert sentence in refusal(**changes)


@pytest.mark.parametrize(
    ("training", "samples", "tokens", "steps"),
    [
        ({"epochs": 3}, 64, None, 24),
        ({"epochs": 1}, 65, None, 9),
        ({"epochs": 0.5}, 64, 16, 4),
        ({"tokens": 1000}, None, 16, 8),
        ({"tokens": 1}, 64, 16, 1),
    ],
)
def test_epochs_and_tokens_are_steps_rounded_up(training, samples, tokens, steps):
    assert steps_of(training, global_batch=8, samples=samples, tokens=tokens) == steps


def test_what_the_data_does_not_say_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"a stream, whose length nobody knows: give training\.steps"):
        steps_of({"epochs": 1}, global_batch=8, samples=None, tokens=16)
    with pytest.raises(ValueError, match=r"no input of token ids.*give training\.steps"):
        steps_of({"tokens": 10}, global_batch=8, samples=64, tokens=None)
