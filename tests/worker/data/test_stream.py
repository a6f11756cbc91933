"""Streams: epoch behind epoch, at a place that is found again, and told by name where that fails."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker import stream_data
from worker.contract.failures import AttemptFailure
from worker.data.checksum import checksum
from worker.data.stream import DataEndedError, Stream, StreamPosition


def stream(kind: Any, length: int = 7, *, repeats: bool = True, limit_s: float = 60.0, **more: Any) -> Stream:
    return Stream(lambda: kind(length, **more), name="rows", seed=3, repeats=repeats, skip_limit_s=limit_s)


def sums(samples: list[Any]) -> list[str]:
    return [checksum(sample) for sample in samples]


KINDS = [
    stream_data.Tokens,
    stream_data.generated,
    stream_data.Shuffled,
    stream_data.Counting,
    stream_data.Stateful,
    stream_data.StatefulIterator,
    stream_data.BeginsWhereItWasSent,
    stream_data.ShuffledWhereItWasSent,
    stream_data.CountingStateful,
    stream_data.Masked,
    range,
]


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not stream_data.Masked], ids=lambda k: k.__name__)
def test_epochs_follow_each_other_as_in_a_plain_loop(kind):
    """Independent: what a loop over the data set gives, made anew only where it can be iterated once."""
    once, expected = kind(7), []
    for epoch in range(3):
        if hasattr(once, "set_epoch"):
            once.set_epoch(epoch)
        rows = list(once) or list(kind(7))
        expected += rows
    assert sums(stream(kind).take(20)) == sums(expected[:20])


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("at", [1, 5, 7, 12, 16])
def test_a_place_is_found_again_to_the_sample(kind, at):
    whole = sums(stream(kind).take(25))
    first = stream(kind)
    first.take(at)
    place = StreamPosition.from_state(first.place().to_state())
    assert sums(first.take(3)) == whole[at : at + 3], "asking for the place takes nothing away"
    again = stream(kind)
    again.go_to(at, place)
    assert again.position == at and sums(again.take(25 - at)) == whole[at:]
    passed_over = stream(kind)
    passed_over.go_to(at)
    assert sums(passed_over.take(25 - at)) == whole[at:]
    passed_over.go_to(at)
    assert sums(passed_over.take(2)) == whole[at : at + 2], "back again"


@pytest.mark.parametrize("kind", [stream_data.Stateful, stream_data.StatefulIterator])
def test_a_data_set_that_goes_to_a_place_by_itself_reads_nothing_before_it(kind):
    first = stream(kind, 1000)
    first.take(600)
    place = first.place()
    stream_data.Stateful.read = 0
    again = stream(kind, 1000)
    again.go_to(600, place)
    again.take(1)
    assert stream_data.Stateful.read <= 2


def test_a_state_that_leads_elsewhere_is_found_out_and_samples_are_passed_over(caplog):
    first = stream(stream_data.Stateful, 50)
    first.take(30)
    again = stream(stream_data.Stateful, 50, wrong=1)
    again.go_to(30, first.place())
    assert sums(again.take(3)) == sums(first.take(3))
    assert "the state of data rows led to another sample" in caplog.text


def test_data_that_is_another_than_the_checkpoints_is_refused():
    first = stream(stream_data.Tokens, 50)
    first.take(30)
    with pytest.raises(AttemptFailure, match=r"sample 30 of data rows is not the one that followed when"):
        stream(stream_data.Tokens, 20).go_to(30, first.place())


def test_passing_over_ends_at_its_limit_with_how_far_it_came():
    with pytest.raises(
        AttemptFailure, match=r"\d+ of 1000000000 samples of data rows were passed over in 0 s"
    ):
        stream(lambda _: itertools.count(), limit_s=0.1).go_to(1_000_000_000)


def test_a_stream_that_does_not_begin_again_ends_by_name_and_its_place_is_still_told():
    ends = stream(stream_data.Tokens, repeats=False)
    ends.take(7)
    assert ends.place().following is None
    with pytest.raises(
        DataEndedError, match=r"data rows ended after 7 samples: give more, or set data.at_end"
    ):
        ends.take(1)


@pytest.mark.parametrize("kind", [stream_data.Tokens, stream_data.generated, iter])
def test_an_empty_stream_is_refused_and_does_not_turn_for_ever(kind):
    with pytest.raises(ValueError, match="data rows is empty: iterating it gave no sample"):
        stream(kind, () if kind is iter else 0).take(1)


def test_what_a_stream_raises_is_told_with_the_sample():
    hostile = stream(stream_data.Hostile, 9, at=4, what="raises")
    with pytest.raises(
        RuntimeError, match=r"sample 4 of data rows \(epoch 0, its number 4\) raised OSError: the disk"
    ):
        hostile.take(9)


def test_a_state_that_cannot_be_stored_is_told_once_and_samples_are_passed_over(caplog):
    class Odd(stream_data.Stateful):
        def state_dict(self):
            return {"at": stream_data.Tokens}

    first = stream(Odd)
    first.take(5)
    place = first.place()
    assert place.state is None and "the state_dict() of data rows cannot be stored" in caplog.text
    again = stream(Odd)
    again.go_to(5, place)
    assert sums(again.take(4)) == sums(first.take(4))


def test_random_numbers_of_a_stream_follow_from_the_place_and_leave_the_process_its_own():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    found = sums(stream(stream_data.Masked).take(9))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(2)
    assert sums(stream(stream_data.Masked).take(9)) == found and len(set(found)) == 9


def test_a_checksum_sees_types_shapes_names_and_bits():
    values = [
        *(1, 1.0, True, None, "1", b"1", [1], {"a": 1}, {"b": 1}, (), torch.zeros(2), torch.zeros(2, 1)),
        *(torch.zeros(2).double(), torch.tensor([0.0, -0.0]), torch.zeros(2).numpy()),
    ]
    found = [checksum(value) for value in values]
    assert len(set(found)) == len(values)
    assert checksum({"a": 1, "b": [2]}) == checksum({"b": [2], "a": 1})


def test_the_digest_of_a_sample_in_checkpoints_of_before_is_still_the_same():
    sample = {
        "x": torch.arange(6).reshape(2, 3).float(),
        "y": [1, 2.5, "a", None, b"z", True],
        "n": np.arange(4, dtype=np.int16),
    }
    assert checksum(sample) == "6abf08210d6ee30a69c372a85a50b092"
