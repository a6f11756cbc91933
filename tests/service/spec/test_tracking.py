"""The trackers of a job: what is taken, and what is refused with the value and the way out."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.spec.job import JobSpec
from worker.contract.job import Job, TrackerSpec

MINIMAL = {"model": {"factory": "mine:Model"}, "data": {"factory": "mine:Data"}}


def spec_of(*trackers):
    return JobSpec.model_validate({**MINIMAL, "tracking": [*trackers]})


def test_the_driver_reads_the_trackers_that_the_server_takes():
    spec = spec_of(
        {"to": "tensorboard", "dir": "/shared/runs"},
        {"to": "wandb", "project": "language", "entity": "team"},
        {"to": "mlflow", "experiment": "language", "uri": "http://mlflow:5000"},
        {"to": "trackio", "project": "language"},
        {"factory": "mine:make", "args": {"place": "here"}},
    )
    assert Job.from_json(spec.model_dump(mode="json")).tracking == (
        TrackerSpec(to="tensorboard", dir="/shared/runs"),
        TrackerSpec(to="wandb", project="language", entity="team"),
        TrackerSpec(to="mlflow", experiment="language", uri="http://mlflow:5000"),
        TrackerSpec(to="trackio", project="language"),
        TrackerSpec(factory="mine:make", args={"place": "here"}),
    )
    assert Job.from_json(JobSpec.model_validate(MINIMAL).model_dump(mode="json")).tracking == ()


def test_a_url_is_a_place_of_tensorboard_and_mlflow_may_take_its_server_from_the_environment():
    assert spec_of(
        {"to": "tensorboard", "dir": "s3://bucket/runs"}, {"to": "mlflow", "experiment": "language"}
    )


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        (
            [{"to": "neptune"}],
            "to is 'neptune': write tensorboard, wandb, mlflow or trackio, or give a factory",
        ),
        ([{}], "names no tracker: give `to`"),
        ([{"to": "wandb"}], "wandb has no project: write {to: wandb, project: …}"),
        ([{"to": "mlflow", "uri": "http://mlflow:5000"}], "mlflow has no experiment"),
        ([{"to": "trackio", "project": "p", "entity": "team"}], "entity with trackio, which takes none"),
        ([{"to": "tensorboard", "dir": "runs"}], "dir 'runs' is relative"),
        (
            [{"to": "wandb", "project": "p", "experiment": "e", "dir": "/runs"}],
            "dir, experiment with wandb, which takes none: leave out dir and experiment",
        ),
        ([{"factory": "mine:make", "project": "p"}], "project with a factory, which takes none"),
        (
            [{"to": "wandb", "project": "a"}, {"to": "wandb", "project": "b"}],
            "names wandb twice: a job has one run",
        ),
        ([{"factory": "mine"}], "String should match pattern"),
        ([{"to": "wandb", "project": "p", "api_key": "secret"}], "Extra inputs are not permitted"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_with_the_way_out(trackers, message):
    with pytest.raises(ValidationError) as refused:
        spec_of(*trackers)
    assert message in str(refused.value)
