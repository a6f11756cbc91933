"""Samples of unequal lengths: the same ones in microbatches of like length, padded to a bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.unequal_texts import LONGEST, Texts, TextStream, text_length, unequal_job
from worker.actor.batch_feed import Batches
from worker.contract.failures import AttemptFailure
from worker.contract.job import Bucket, Data, Job, Lengths
from worker.contract.reasons import Reason
from worker.data.dataset import SampleOrder
from worker.data.length_buckets import MAX_AUTO_BUCKETS, choose_lengths
from worker.data.microbatches import BatchSlice, Microbatches
from worker.data.padding import Padding
from worker.data.sampler import BatchSampler


class OfLengths:
    """Samples of given lengths, each token the index of its sample, which is never 0."""

    def __init__(self, lengths: list[int]):
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Any:
        tokens = torch.full((self._lengths[index],), index + 1)
        return tokens, tokens


class Parts:
    """Samples with a mask, places, a vector of its own and a class; `odd` has a place too few, by its `what`."""

    def __init__(self, odd: int = -1, what: str = "place_ids", dtype: str = "int64"):
        self._odd, self._what, self._dtype = odd, what, dtype

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        length = 2 + index % 7
        sample = {
            "attention_mask": torch.ones(length, dtype=torch.bool),
            "input_ids": np.arange(1, length + 1),
            "labels": torch.arange(length).to(getattr(torch, self._dtype)),
            "place_ids": list(range(1, length + 1)),
            "vector": torch.ones(9),
        }
        if index == self._odd:
            sample[self._what] = sample[self._what][:-1]
        return sample


class InAnyOrder(TextStream):
    """A stream in another order each time that it is made, which no seed gives."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        InAnyOrder.made += 1

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(InAnyOrder.made)


def microbatches(
    dataset: Any, *, batch: int, count: int, buckets: Any = "auto", **order: Any
) -> Microbatches:
    data = Data("tests.worker.unequal_texts:Texts", lengths=Lengths(buckets=buckets))
    return Microbatches(SampleOrder(data, 5, batch, count, **order), own_loss=False, dataset=dataset)


def job_of(
    factory: str = "tests.worker.unequal_texts:Texts", lengths: dict | None = None, **data: Any
) -> Job:
    spec = unequal_job()
    spec["data"] = {"factory": factory, "lengths": lengths or {}, **data}
    return Job.from_json(spec)


def batches_of(job: Job, worker: int = 0, workers: int = 1) -> Batches:
    return Batches(job, worker=worker, workers_per_mesh=workers, microbatches=5)


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(
    lengths=LENGTHS,
    count=st.integers(1, 5),
    rows=st.integers(1, 3),
    workers=st.integers(1, 3),
    varied=st.booleans(),
    data=st.data(),
)
def test_a_step_has_its_samples_each_once_in_microbatches_of_like_length(
    lengths, count, rows, workers, varied, data
):
    """Of equally many rows, or of as many as `varied` ones take; rows without a target repeat a sample."""
    batch = count * rows * workers
    multiple = workers if varied else None
    made = microbatches(OfLengths(lengths), batch=batch, count=count, row_multiple=multiple)
    step = data.draw(st.integers(0, 4))
    read = [
        [made.read(step, m, BatchSlice(worker, workers)) for worker in range(workers)] for m in range(count)
    ]
    seen, longest = [], 0
    for of_microbatch in read:
        (bucket,) = {one.bucket for one in of_microbatch}
        own = []
        for one in of_microbatch:
            (tokens,), target = one.rows
            assert tokens.shape == target.shape == (bucket.rows // workers, bucket.length)
            assert bucket.rows == rows * workers or varied
            samples = []
            for row, aim in zip(tokens, target, strict=True):
                sample = row[0].item() - 1
                size = lengths[sample]
                assert row.tolist() == [sample + 1] * size + [0] * (bucket.length - size)
                if aim[0] == -100:
                    assert (aim == -100).all() and sample == samples[-1]
                    continue
                assert aim.tolist() == [sample + 1] * size + [-100] * (bucket.length - size)
                samples.append(sample)
            assert one.tokens == sum(lengths[sample] for sample in samples) > 0
            own += samples
        sizes = [lengths[sample] for sample in own]
        holding = [one for one in made.buckets if one.length >= max(sizes) and one.rows >= len(own)]
        assert bucket == min(holding, key=lambda one: one.tokens)
        assert min(sizes) >= longest
        longest = max(sizes)
        seen += own
    expected = BatchSampler(len(lengths), batch, 1, seed=5).indices(max(step, 0), 0)
    assert sorted(seen) == sorted(expected)
    places = [(lengths[sample], at) for at, sample in enumerate(expected)]
    assert seen == [expected[at] for _, at in sorted(places)]


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_chosen_lengths_are_few_ascending_and_hold_the_longest(lengths):
    buckets = choose_lengths(lengths)
    assert list(buckets) == sorted({*buckets}) and 1 <= len(buckets) <= MAX_AUTO_BUCKETS
    assert buckets[-1] == max(lengths)


def padding(lengths: list[int], buckets: tuple[int, ...]) -> float:
    held = sum(min(bucket for bucket in buckets if bucket >= length) for length in lengths)
    return 1 - sum(lengths) / held


def test_chosen_lengths_pad_less_than_equal_steps_and_than_one():
    lengths = [text_length(index, 512) for index in range(3000)]
    longest = max(lengths)
    steps = tuple(-(-longest * k // MAX_AUTO_BUCKETS) for k in range(1, MAX_AUTO_BUCKETS + 1))
    chosen = padding(lengths, choose_lengths(lengths))
    assert chosen < 0.75 * padding(lengths, steps) and chosen < 0.45 * padding(lengths, (longest,))


def test_a_resume_and_another_worker_have_the_same_microbatches():
    one, other = (microbatches(Texts(), batch=30, count=5) for _ in range(2))
    through = [one.read(step, m, BatchSlice(1, 3)) for step in range(1, 5) for m in range(5)]
    assert one.buckets == other.buckets
    for read, m in zip(through[15:], range(5), strict=True):
        again = other.read(4, m, BatchSlice(1, 3))
        assert again.bucket == read.bucket and torch.equal(again.rows[0][0], read.rows[0][0])


def test_a_step_of_a_stream_has_its_next_samples_in_rows_of_like_length_and_each_worker_its_rows():
    """The stream is read by hand: 45 samples an epoch, 30 a step. With `auto` all microbatches have equal rows."""
    stream, following = TextStream(), []
    for epoch in range(3):
        stream.set_epoch(epoch)
        following += list(stream)
    job = job_of("tests.worker.unequal_texts:TextStream", {"buckets": [11, 37]})
    job = replace(job, training=replace(job.training, microbatches="auto"))
    readers = [batches_of(job, worker, 2) for worker in range(2)]
    for step in range(1, 5):
        samples = sorted(following[30 * step - 30 : 30 * step], key=lambda sample: len(sample[0]))
        for m in range(5):
            for worker, reader in enumerate(readers):
                read, first = reader.read(step, m), 6 * m + 3 * worker
                own = samples[first : first + 3]
                assert read.bucket == Bucket(11 if len(samples[6 * m + 5][0]) <= 11 else 37, 6)
                assert read.tokens == sum(len(tokens) for tokens, _ in own)
                for row, (tokens, _) in zip(read.rows[0][0], own, strict=True):
                    padded = torch.nn.functional.pad(tokens, (0, read.bucket.length - len(tokens)))
                    assert torch.equal(row, padded)
        assert readers[0].bucket_numbers(step) == ()


def test_a_stream_in_another_order_when_it_is_made_again_has_another_checksum():
    lengths = {"buckets": [LONGEST]}
    first, again = batches_of(job_of("tests.worker.unequal_texts:TextStream", lengths)).checksums()
    assert first == again
    first, again = batches_of(job_of(f"{__name__}:InAnyOrder", lengths)).checksums()
    assert first != again


def test_the_position_of_a_stream_is_known_once_the_last_microbatch_of_a_step_was_read():
    batches = batches_of(job_of("tests.worker.unequal_texts:TextStream", {"buckets": [LONGEST]}))
    for m in range(4):
        batches.microbatch(1, m)
    assert batches.position(2) is None
    batches.microbatch(1, 4)
    assert batches.position(2)["position"] == 30


def test_a_table_of_lengths_makes_the_same_microbatches_and_reads_only_own_samples():
    class Counted(Texts):
        read = 0

        def __getitem__(self, index: int) -> Any:
            Counted.read += 1
            return super().__getitem__(index)

    table = Counted()
    table.lengths = [text_length(index) for index in range(len(table))]
    made, plain = (microbatches(data, batch=30, count=5) for data in (table, Texts()))
    Counted.read = 0
    for m in range(5):
        found, expected = (each.read(2, m, BatchSlice(1, 3)) for each in (made, plain))
        assert torch.equal(found.rows[0][0], expected.rows[0][0]) and found.bucket == expected.bucket
    assert Counted.read == 10


def test_the_buckets_of_later_steps_are_told_without_reading_where_the_data_has_lengths():
    table = Texts()
    table.lengths = [text_length(index) for index in range(len(table))]
    made = microbatches(table, batch=30, count=5)
    told = [made.buckets_of(step) for step in range(1, 5)]
    read = [tuple(made.read(step, m, BatchSlice(0, 1)).bucket for m in range(5)) for step in range(1, 5)]
    assert told == read and len({*told}) > 1
    assert microbatches(Texts(), batch=30, count=5).buckets_of(1) == ()
    assert microbatches(table, batch=30, count=5, buckets=(7,)).buckets_of(1) == (), "none holds the longest"


def test_parts_along_the_length_are_padded_each_in_its_way_and_others_left():
    batches = batches_of(job_of(f"{__name__}:Parts", {"buckets": [5, 9], "pad": 50}))
    assert batches.buckets == (Bucket(5, 6), Bucket(9, 6)) and tuple(batches.examples) == batches.buckets
    (mask, ids, places, vector), target = batches.microbatch(1, 0)
    assert batches.keywords == ("attention_mask", "input_ids", "place_ids", "vector")
    assert vector.shape == (6, 9) and mask.dtype == torch.bool
    for row in range(6):
        size = int(mask[row].sum())
        wanted = list(range(1, size + 1))
        assert ids[row].tolist() == wanted + [50] * (5 - size)
        assert places[row].tolist() == wanted + [0] * (5 - size)
        assert target[row].tolist() == list(range(size)) + [-100] * (5 - size)


@pytest.mark.parametrize(
    ("target", "hides"), [(torch.ones(3).long(), True), (torch.tensor(4), False), ((), False)]
)
def test_rows_are_left_only_where_every_target_lies_along_the_length(target, hides):
    found = Padding.of([(torch.arange(3), target)], Lengths(), ignored=-100, data="own:data")
    assert found.hides_targets is hides


def test_targets_are_padded_with_what_the_loss_ignores():
    spec = unequal_job()
    spec["loss"]["args"] = {"ignore_index": 7}
    _, target = batches_of(Job.from_json(spec)).microbatch(1, 0)
    assert (target == 7).any() and not (target == -100).any()


def test_the_examples_of_a_bucket_have_its_shape_and_the_sample_is_the_longest():
    batches = batches_of(job_of(lengths={"buckets": [3, 11, 64]}), 1, 2)
    for (length, rows), (inputs, target) in batches.examples.items():
        assert inputs[0].shape == target.shape == (rows // 2, length)
        assert (target != -100).any(1).all(), "an example has a sample in every row"
    assert [bucket.length for bucket in batches.buckets][-1] == 64 and len({*batches.buckets}) > 3
    assert batches.sample is batches.examples[64, 6] and batches.tokens_per_sample is None
    assert {batches.read(1, m).bucket for m in range(5)} <= {*batches.buckets}


def test_an_example_has_the_longest_samples_that_its_bucket_holds():
    """Short ones would be padding alone, on which nothing is compared."""
    microbatches = batches_of(job_of(lengths={"buckets": [3, 11, 64]}), 0, 1)._microbatches
    step = microbatches.order.first_step - 1
    lengths = sorted(map(microbatches._lengths.padding.length, microbatches.source.batch(step)))
    filled = 0
    for bucket, read in microbatches.examples(step, BatchSlice(0, 1)).items():
        held = [length for length in lengths if length <= bucket.length][-bucket.rows :]
        if len(held) == bucket.rows:
            filled += 1
            assert read.tokens == sum(held)
    assert filled > 2


def test_chosen_buckets_stay_where_the_number_of_microbatches_changes():
    spec = unequal_job(buckets="auto")
    spec["training"]["microbatches"] = "auto"
    batches = batches_of(Job.from_json(spec))
    before = [bucket.length for bucket in batches.buckets]
    batches.set_microbatches(3)
    assert [bucket.length for bucket in batches.buckets] == before and batches.microbatch(1, 0)[0][0].shape[
        0
    ] == 10


def test_both_readings_of_the_first_samples_are_of_the_data_set():
    first, again = batches_of(job_of(), 0, 2).checksums()
    assert first == again == batches_of(job_of(), 1, 2).checksums()[0]


@pytest.mark.parametrize(
    ("factory", "lengths", "says"),
    [
        (
            "tests.worker.unequal_texts:Texts",
            {"buckets": [7, 11]},
            r"sample \d+ of data .* length \d+, and the largest .* is 11: add",
        ),
        (
            "tests.worker.unequal_texts:Texts",
            {"field": "ids"},
            "data.lengths.field is 'ids', and samples .* by position: leave it out",
        ),
        (
            "tests.worker.unequal_texts:TextStream",
            {},
            "buckets is auto, which looks at all samples, and data .* is a stream, .*: write buckets",
        ),
        (
            "tests.worker.unequal_texts:TextStream",
            {"buckets": [7, 11]},
            r"sample 3 of data .* length 37, and the largest .* is 11: add",
        ),
        (
            f"{__name__}:Parts",
            {"field": "ids"},
            "field is 'ids', and a sample .* has the inputs attention_mask, input_ids",
        ),
        (
            f"{__name__}:Parts",
            {"field": "attention_mask"},
            r"input attention_mask .* is \[\d\] of torch.bool: return integers",
        ),
    ],
)
def test_lengths_that_do_not_fit_the_data_are_refused(factory, lengths, says):
    with pytest.raises(AttemptFailure, match=says) as refused:
        batches_of(job_of(factory, lengths)).microbatch(1, 0)
    assert refused.value.reason is Reason.DATA_FAILED


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"dtype": "float32"}, "target .* is torch.float32 and as long as its input: .* pads it with -100"),
        ({"dtype": "uint8"}, "target .* is torch.uint8 and as long as its input"),
    ],
)
def test_targets_that_hold_no_ignored_value_are_refused(args, says):
    with pytest.raises(AttemptFailure, match=says):
        batches_of(job_of(f"{__name__}:Parts", args=args))


@pytest.mark.parametrize(("what", "shown"), [("place_ids", "place_ids"), ("labels", "target")])
def test_a_part_that_is_shorter_than_its_sample_is_refused(what, shown):
    first = {*BatchSampler(24, 30, 1, seed=5).indices(1, 0)[:24]}
    spec = unequal_job()
    spec["training"]["global_batch"] = 10
    later = [index for index in BatchSampler(24, 10, 1, seed=5).indices(2, 0)]
    assert later[0] in first
    spec["data"] = {
        "factory": f"{__name__}:Parts",
        "args": {"odd": later[0], "what": what},
        "lengths": {"buckets": [9]},
    }
    batches = batches_of(Job.from_json(spec))
    batches.microbatch(1, 0)
    with pytest.raises(AttemptFailure, match=f"the {shown} of a sample .* its length is"):
        for microbatch in range(5):
            batches.microbatch(2, microbatch)


def test_a_table_that_lies_is_refused():
    made = job_of("tests.worker.unequal_texts:TextsWithLengths", {"buckets": [64]}, args={"wrong": 4})
    with pytest.raises(AttemptFailure, match=r"sample 4 of data .* has length .* and its `lengths` say"):
        batches = batches_of(made)
        for step, microbatch in ((s, m) for s in (1, 2) for m in range(5)):
            batches.microbatch(step, microbatch)


def test_a_large_data_set_without_lengths_is_not_read_for_its_buckets(monkeypatch):
    monkeypatch.setattr("worker.data.padding.MAX_READ_SAMPLES", 44)
    with pytest.raises(
        AttemptFailure, match="45: write buckets, or give the data set an attribute `lengths`"
    ):
        batches_of(job_of())
    assert batches_of(job_of("tests.worker.unequal_texts:TextsWithLengths")).buckets[-1].length <= LONGEST


def test_a_loss_that_cannot_weigh_unequal_microbatches_is_refused_by_the_worker():
    job = job_of()
    job = replace(job, training=replace(job.training, loss_reduction="mean"))
    with pytest.raises(
        AttemptFailure, match=r"wants a `loss` and training.loss_reduction tokens, which is mean"
    ):
        batches_of(job)


def test_an_evaluation_keeps_the_order_of_its_data():
    made = microbatches(Texts(), batch=10, count=2, buckets=(64,), first_step=0, once=True)
    tokens = [row for m in range(2) for row in made.read(1, m, BatchSlice(0, 1)).rows[0][0]]
    for index, row in zip(range(10, 20), tokens, strict=True):
        assert row[: text_length(index)].tolist() == Texts()[index][0].tolist()


def test_data_that_stops_at_its_end_ends_behind_the_last_whole_step():
    batches = batches_of(job_of(at_end="stop"))
    batches.microbatch(1, 0)
    with pytest.raises(AttemptFailure, match=r"its 45 samples have no 60 for 2 steps of 30"):
        batches.microbatch(2, 0)
