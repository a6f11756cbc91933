"""`data.lengths` of a job: what it implies, and what it cannot stand beside."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from service.spec.job import JobSpec
from tests.service.conftest import job_body
from worker.contract.job import Job, Lengths

BUCKETS = [64, 128, 256]
LOSS = {"factory": "torch.nn.functional:cross_entropy"}


def body(lengths: Any = None, *, data: dict | None = None, **changes: Any) -> dict[str, Any]:
    made = job_body(**{"loss": LOSS, **changes})
    made["data"] = {
        **made["data"],
        **(data or {}),
        "lengths": {"buckets": BUCKETS} if lengths is None else lengths,
    }
    return made


def refusal(*args: Any, **changes: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(body(*args, **changes))
    return str(caught.value)


def evaluated(**lengths: Any) -> dict[str, Any]:
    return {"data": {**job_body()["data"], "lengths": lengths}}


def test_tokens_are_implied_and_a_worker_reads_what_is_stored():
    stored = JobSpec.model_validate(body({"field": "ids", "buckets": BUCKETS, "pad": 3})).model_dump(
        mode="json"
    )
    assert stored["training"]["loss_reduction"] == "tokens"
    assert Job.from_json(stored).data.lengths == Lengths("ids", (64, 128, 256), 3)
    assert JobSpec.model_validate(stored).model_dump(mode="json") == stored


def test_defaults_choose_the_buckets():
    stored = JobSpec.model_validate(body({})).model_dump(mode="json")
    assert Job.from_json(stored).data.lengths == Lengths(None, "auto", 0)
    assert JobSpec.model_validate(job_body()).data.lengths is None


@pytest.mark.parametrize(
    "buckets",
    [[], [64, 64], [128, 64], [0, 3], [True], ["64"], "64", list(range(1, 10)), 64, [64.0]],
    ids=str,
)
def test_buckets_are_a_few_ascending_lengths(buckets):
    assert "data.lengths.buckets" in refusal({"buckets": buckets})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"loss": None},
            "data.lengths weighs microbatches by their targets, and the model's own loss tells none",
        ),
        ({"training": {"loss_reduction": "mean"}}, "training.loss_reduction is mean, and with data.lengths"),
        ({"training": {"loss_reduction": "microbatches"}}, "write tokens, or leave it out"),
        ({"training": {"compile": True}}, "data.lengths is given and training.compile is true"),
        (
            {"training": {"sync_batch_norm": True}},
            "data.lengths is given and training.sync_batch_norm is true",
        ),
        ({"data": {"collate": {"factory": "a:b"}}}, "lengths and collate, which both make microbatches"),
        ({"parallelism": {"pp": 2, "tp": 2}}, "data.lengths is given and parallelism.tp is 2"),
        ({"resources": {"device": "cuda"}}, "data.lengths is given and resources.device is cuda"),
        (
            {"resources": {"meshes": [{"workers": 2}, {"workers": 1}]}, "pipeline": {"stages": 2}},
            "data.lengths is given and resources.meshes lists meshes that differ",
        ),
        (
            {"evaluation": evaluated()},
            "evaluation.data.lengths.buckets is auto, and evaluation runs stages of one",
        ),
        (
            {"evaluation": evaluated(buckets=BUCKETS)},
            r"is \[64, 128, 256\], and evaluation runs stages of one",
        ),
        (
            {"evaluation": evaluated(buckets=[128])},
            r"the largest of data.lengths.buckets is 256, .* write \[256\]",
        ),
    ],
)
def test_what_knows_one_length_only_is_refused_by_name(changes, says):
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate(body(**changes))


def test_an_evaluation_of_unequal_lengths_wants_them_in_training_too():
    with pytest.raises(ValidationError, match=r"evaluation.data.lengths is given and data.lengths is not"):
        JobSpec.model_validate(job_body(loss=LOSS, evaluation=evaluated(buckets=[64])))


def test_an_evaluation_of_the_longest_is_a_job():
    JobSpec.model_validate(body(evaluation=evaluated(buckets=[256])))
    JobSpec.model_validate(body({}, evaluation=evaluated(buckets=[256])))
