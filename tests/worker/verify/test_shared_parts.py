"""Streams whose saved state leads elsewhere than the stream went are found beside the stream itself."""

from __future__ import annotations

import itertools

import pytest
import torch

from worker.contract.job import Job
from worker.data.stream import Stream
from worker.verify.comparison import DifferenceFound
from worker.verify.shared_parts import check_resumed_stream

SAMPLES = 11


class Rows(torch.utils.data.IterableDataset):
    """Numbers from where it was sent to, in every further epoch too, unless it is made anew."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.begin, self.now = samples, 0, 0

    def __iter__(self):
        for number in range(self.begin, self.samples):
            self.now = number + 1
            yield torch.tensor([float(number)]), torch.tensor(number)

    def state_dict(self):
        return {"now": self.now}

    def load_state_dict(self, saved):
        self.begin = saved["now"]


class Skipping(Rows):
    """Leaves out a sample some places behind where it was sent to."""

    def __iter__(self):
        for number, row in enumerate(super().__iter__(), start=self.begin):
            if not (self.begin and number == 9):
                yield row


class Stateless(Rows):
    """Has no state: a resume passes over its samples."""

    state_dict = None
    load_state_dict = None


def job_of(data: str, *, at_end: str = "repeat", **arguments) -> Job:
    return Job.from_json(
        {
            "model": {"factory": "torch.nn:Linear"},
            "data": {"factory": f"{__name__}:{data}", "args": arguments, "at_end": at_end},
            "optimizer": {"factory": "torch.optim:SGD"},
            "training": {"steps": 1, "global_batch": 4, "microbatches": 2},
            "pipeline": {},
            "resources": {},
        }
    )


@pytest.mark.parametrize("at_end", ["repeat", "stop"])
@pytest.mark.parametrize("data", ["Rows", "Stateless"])
def test_a_stream_that_goes_on_as_it_was_is_equal_over_the_end_of_its_epoch(data, at_end):
    assert check_resumed_stream(job_of(data, at_end=at_end), 2) is None


def test_a_stream_that_begins_its_next_epoch_where_it_was_sent_to_is_found(monkeypatch):
    """Planted: streams that were restored are not made anew at their epoch's end."""
    monkeypatch.setattr(Stream, "_leave_restored_epoch", lambda self, restored: None)
    with pytest.raises(
        DifferenceFound, match=r"Rows, resumed behind step 1.*another sample 3 of step 3 than"
    ):
        check_resumed_stream(job_of("Rows"), 2)


@pytest.mark.parametrize("at_end", ["repeat", "stop"])
def test_a_sample_that_a_state_loses_later_is_found(at_end):
    with pytest.raises(DifferenceFound, match=r"another sample 1 of step 3 than without"):
        check_resumed_stream(job_of("Skipping", at_end=at_end, samples=15), 2)


def test_what_takes_too_long_is_a_note_with_how_far_it_came():
    seconds = itertools.count(step=4.0)
    note = check_resumed_stream(job_of("Rows", samples=10**9), 2, limit_s=10.0, clock=lambda: next(seconds))
    assert "compared with itself behind a resume up to step 4, in 10 s" in note


def test_data_with_indices_is_left_alone():
    assert check_resumed_stream(job_of("Indexed"), 2) is None


class Indexed:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor(index)
