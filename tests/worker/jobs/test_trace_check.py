"""A job whose traced model computes something else than its model ends before the first step, with the reason."""

from __future__ import annotations

import pytest

from tests.worker.actor.test_actor import job
from worker.actor.actor import Worker
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason

LYING = "tests.worker.model.lying_models"


def traced(model, *, memory="auto", data=None, **training):
    """What a worker that traces the model for all tells of it."""
    spec = job(stages=2, meshes=1)
    spec["model"] = model
    spec["data"] = data or {"factory": f"{__name__}:Points"}
    spec["loss"] = {"factory": "torch.nn:MSELoss"}
    spec["training"] |= training
    spec["resources"]["memory_per_worker"] = memory
    worker = Worker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu")
    worker.prepare(1)
    return worker.trace(2)


class Points:
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import torch

        return torch.arange(6.0) / (index + 1), torch.ones(6)


def test_a_backward_that_tracing_loses_ends_the_attempt_unless_the_job_leaves_out_the_check():
    with pytest.raises(AttemptFailure, match=r"gradient of 'first.*_Reversed.*check_trace: false") as failed:
        traced({"factory": f"{LYING}:OwnBackward"})
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED
    assert traced({"factory": f"{LYING}:OwnBackward"}, check_trace=False) == []


@pytest.mark.parametrize(
    ("factory", "message"), [("frozen", "nothing to train"), ("ComplexWeight", "'filter' is complex")]
)
def test_what_cannot_be_trained_is_refused_also_without_the_check(factory, message):
    with pytest.raises(AttemptFailure, match=message) as failed:
        traced({"factory": f"{LYING}:{factory}"}, check_trace=False)
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED


def test_a_model_without_room_beside_its_graph_is_not_compared_and_the_driver_is_told():
    (note,) = traced({"factory": f"{LYING}:OwnBackward"}, memory=1000)
    assert "not compared" in note and "1,000 are free" in note


def test_a_note_of_a_harmless_model_comes_to_the_driver():
    (note,) = traced({"factory": f"{LYING}:CountsInVain"})
    assert "changes 'calls' of CountsInVain" in note
