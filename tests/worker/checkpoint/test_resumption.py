"""What a job takes over from a checkpoint of another training, by what both jobs say."""

from __future__ import annotations

import pytest

from service.spec.job import JobSpec
from worker.checkpoint.resumption import (
    ResumedWorker,
    ResumeSource,
    SavedTraining,
    name_mismatch,
    plan_takeover,
    resumed_message,
    training_note,
)
from worker.contract.job import Job


def spec(**changes):
    given = {
        "model": {"factory": "m:f"},
        "data": {"factory": "d:f", "args": {"path": "/a"}, "columns": ["x"]},
        "loss": {"factory": "torch.nn:MSELoss"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}},
        "training": {"steps": 100, "global_batch": 8},
        **changes,
    }
    return JobSpec.model_validate(given).model_dump(mode="json")


def saved(**changes):
    """The training of a job after step 50, as it comes back from a manifest."""
    return SavedTraining.of_notes(training_note("job-a", 400, spec(**changes)))


def takeover(before, after):
    return plan_takeover(saved(**before), Job.from_json(spec(**after)), 50)


def test_a_job_with_nothing_changed_takes_everything_over():
    found = takeover({}, {})
    assert found.settings and found.data and found.sample == 400
    assert found.omitted == () and found.changes == ()


@pytest.mark.parametrize(
    ("after", "omitted"),
    [
        ({"data": {"factory": "other:f"}}, "data other:f, was d:f"),
        (
            {"data": {"factory": "d:f", "args": {"path": "/b"}, "columns": ["x"]}},
            "data.args.path /b (was /a)",
        ),
        (
            {"data": {"factory": "d:f", "args": {"path": "/a"}, "columns": ["x"], "shuffle": False}},
            "data.shuffle False, was True",
        ),
        ({"training": {"steps": 100, "global_batch": 8, "seed": 3}}, "training.seed 3, was 0"),
    ],
)
def test_what_orders_samples_otherwise_begins_the_data_anew(after, omitted):
    found = takeover({}, after)
    assert not found.data and found.sample == 0
    assert found.omitted == (f"position in data, which begins anew ({omitted})",)


def test_what_only_reads_the_same_samples_otherwise_continues_them():
    data = {
        "factory": "d:f",
        "args": {"path": "/a"},
        "columns": ["x"],
        "prefetch": 0,
        "loader": {"workers": 2},
    }
    found = takeover({}, {"data": data, "training": {"steps": 200, "global_batch": 16, "precision": "bf16"}})
    assert found.data and found.sample == 400 and found.settings
    assert found.changes == (
        "training.steps 200 (was 100)",
        "training.global_batch 16 (was 8)",
        "training.precision bf16 (was fp32)",
    )


def test_settings_of_the_optimizer_are_the_new_jobs_where_any_differs():
    cosine = {"factory": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 9}}
    optimizer = {"factory": "torch.optim:AdamW", "args": {"weight_decay": 0.1}, "schedule": cosine}
    found = takeover({}, {"optimizer": optimizer})
    assert not found.settings and found.data
    assert found.changes == (
        "optimizer.args.lr its default (was 0.001)",
        "optimizer.args.weight_decay 0.1 (was its default)",
        "optimizer.schedule torch.optim.lr_scheduler:CosineAnnealingLR(T_max=9), at its step 50 (was none)",
    )


@pytest.mark.parametrize(
    "notes", [{}, {"training": None}, {"training": {"job": "a", "samples": 3, "spec": {}}}]
)
def test_a_checkpoint_that_does_not_describe_its_training_gives_its_data_and_the_job_its_settings(notes):
    assert SavedTraining.of_notes(notes) is None
    found = plan_takeover(None, Job.from_json(spec()), 50)
    assert (found.settings, found.data, found.sample) == (False, True, 400)
    assert "optimizer settings are this job's own" in found.changes[0]


def test_a_description_of_an_older_version_has_the_defaults_of_fields_that_it_does_not_know():
    note = training_note("job-a", 400, spec())
    del note["training"]["spec"]["training"]["tf32"], note["training"]["spec"]["optimizer"]["groups"]
    note["training"]["spec"]["data"]["gone"] = 1
    found = plan_takeover(SavedTraining.of_notes(note), Job.from_json(spec()), 50)
    assert found.settings and found.data and found.changes == ()


def test_tensors_that_either_side_lacks_are_named_however_shards_hold_them():
    held = {"m0": ["a", "b"], "model": ["unused"]}
    assert name_mismatch(held, {"a", "b", "unused"}) is None
    assert "missing: c; unexpected: b, unused. Give" in name_mismatch(held, {"a", "c"})


def test_the_event_tells_the_loss_scale_parameters_without_state_and_each_omission_once():
    found = takeover({}, {"data": {"factory": "other:f"}})
    workers = [
        ResumedWorker(50, optimizer=True, new_state=("w",), loss_scale=1024.0, saved_rate=1e-3, rate=1e-4),
        ResumedWorker(50),
    ]
    source = ResumeSource("/runs/job-a/step-0000000050", "job-a", 50)
    assert resumed_message(source, found, workers, precision="fp16") == (
        "resumed from job job-a step 50: parameters, optimizer state, loss scale 1024; not taken over: optimizer state of "
        "w, of which the checkpoint has none; not position in data, which begins anew (data other:f, was d:f); "
        "learning rate 0.0001 (was 0.001)"
    )
    assert "loss scale" not in resumed_message(source, found, workers, precision="bf16")
