"""A job whose traced model computes something else than its model ends before the first step, with the reason."""

from __future__ import annotations

import re

import pytest
from torch import nn

from tests.worker.actor.test_actor import job
from worker.actor import model_host
from worker.actor.actor import NewWorker
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.model.export import trace

LYING = "tests.worker.model.lying_models"
STATEFUL = "tests.worker.model.stateful_models"


def traced(model, *, memory="auto", data=None, loss=None, changes=None, **training):
    """What a worker that traces the model for all tells of it."""
    spec = job(stages=2, meshes=1) | (changes or {})
    spec["model"] = model
    spec["data"] = data or {"factory": f"{__name__}:Points"}
    spec["loss"] = loss or {"factory": "torch.nn:MSELoss"}
    spec["training"] |= {"loss_reduction": "microbatches", **training}
    spec["resources"]["memory_per_worker"] = memory
    worker = NewWorker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu").prepare()
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


def test_a_loss_that_is_not_tried_as_the_model_does_not_run_is_said():
    (note,) = traced({"factory": f"{LYING}:OwnBackward"}, check_trace=False, loss_reduction="mean")
    assert note.startswith("the loss was not tried on parts of a batch")


def test_what_cannot_be_trained_is_refused_also_without_the_check():
    with pytest.raises(AttemptFailure, match="nothing to train") as failed:
        traced({"factory": f"{LYING}:frozen"}, check_trace=False)
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED


def test_a_model_without_room_beside_its_graph_is_not_compared_and_the_driver_is_told():
    (note,) = traced({"factory": f"{LYING}:OwnBackward"}, memory=1000)
    assert "not compared" in note and "1,000 are free" in note


def test_the_driver_is_told_where_the_factories_of_a_job_have_moved():
    args = {"layers": 1, "width": 8, "heads": 2, "length": 8}
    notes = traced(
        {"factory": "worker.model.gpt:build", "args": args},
        data={"factory": "worker.data.text:ByteWindows", "args": {"length": 8}},
        loss={"factory": "torch.nn:CrossEntropyLoss"},
        check_trace=False,
    )
    assert [note.partition(":")[0] for note in notes] == [
        "factory 'worker.model.gpt",
        "factory 'worker.data.text",
    ]
    assert all("'worker.examples." in note for note in notes)


def test_a_note_of_a_harmless_model_comes_to_the_driver():
    (note,) = traced({"factory": f"{LYING}:CountsInVain"})
    assert "changes 'calls' of CountsInVain" in note


MEMORY = (
    r"the result of Memory\.forward may depend on the tensor 'mem' of Memory, which forward itself changes and a trace "
    r"keeps as it was: register it in __init__ with register_buffer"
)


def test_a_tensor_that_forward_keeps_is_refused_by_name_where_nothing_can_be_compared():
    with pytest.raises(AttemptFailure, match=rf"{MEMORY}.*1,000 are free.*check_trace: false") as failed:
        traced({"factory": f"{STATEFUL}:Memory"}, memory=1000)
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED


def test_a_job_without_the_check_is_told_of_tensors_that_forward_keeps_in_the_same_words():
    (note,) = traced({"factory": f"{STATEFUL}:Memory"}, check_trace=False)
    assert re.match(MEMORY, note)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("MovingMeanInPlace", r"the tensor 'means\['x'\]' of MovingMeanInPlace"),
        ("FirstMean", "the tensor 'cache' of FirstMean"),
        ("KeepsStatistics", "the tensor 'kept' of KeepsStatistics"),
        ("ObjectCounts", r"the number 'state\.count' of ObjectCounts"),
        ("ClosureCounts", "the closure cell count of function"),
        ("GlobalCounts", "the global CALLS of module"),
        ("IteratorCounts", "the iterator 'it' of IteratorCounts"),
        ("ArrayCounts", "the array 'calls' of ArrayCounts"),
    ],
)
def test_state_that_moves_while_a_model_is_traced_is_named_without_the_check(model, path):
    (note,) = traced({"factory": f"{STATEFUL}:{model}"}, check_trace=False)
    assert re.match(rf"the result of {model}\.forward may depend on {path}.*register_buffer", note)


def test_values_that_forward_keeps_train_with_a_note_where_nothing_can_be_compared():
    notes = traced({"factory": f"{LYING}:CountsInVain"}, memory=1000)
    assert ["1,000 are free" in note for note in notes] == [True, False]
    assert "may depend on the number 'calls' of CountsInVain" in notes[1]


class LargeBehindTheFirst(Points):
    """Small numbers in the first of two microbatches."""

    first = frozenset(BatchSampler(16, 8, 2, seed=5).indices(0, 0))

    def __getitem__(self, index):
        row, target = super().__getitem__(index)
        return row * (0.1 if index in self.first else 100.0), target


def test_a_trace_is_compared_on_further_microbatches_of_the_data():
    with pytest.raises(AttemptFailure, match=r"in forward number \d+ the gradient of .*_Clipped"):
        traced(
            {"factory": f"{STATEFUL}:ClipsLargeInputs"}, data={"factory": f"{__name__}:LargeBehindTheFirst"}
        )


def drops():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))


def test_a_job_that_evaluates_has_the_trace_in_eval_mode_compared(monkeypatch):
    changes = {"evaluation": {"data": {"factory": f"{__name__}:Points"}, "steps": 1}}
    assert traced({"factory": f"{__name__}:drops"}, changes=changes) == []

    def in_train_mode(model, inputs, **options):
        return trace(model, inputs, **options)

    monkeypatch.setattr(model_host, "trace_in_eval_mode", in_train_mode)
    with pytest.raises(
        AttemptFailure, match=r"in eval mode, which `evaluation` needs: the output differs"
    ) as failed:
        traced({"factory": f"{__name__}:drops"}, changes=changes)
    assert failed.value.reason is Reason.MODEL_BUILD_FAILED
