"""What one worker computes on: its rows, of its job's samples, and mistakes told as those of the data."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.actor.batch_feed import Batches, StageReader
from worker.contract.failures import AttemptFailure
from worker.contract.job import Factory, Job
from worker.contract.reasons import Reason
from worker.data.microbatches import MicrobatchTensors
from worker.data.sampler import BatchSampler


def job(factory: str = "Numbered", *, loss: bool = True, training: dict | None = None, **args: Any) -> Job:
    spec: dict[str, Any] = {
        "model": {"factory": "worker.examples.gpt:build"},
        "data": {"factory": f"small_data:{factory}", "args": args},
        "training": {"global_batch": 12, "microbatches": "auto", "seed": 5, **(training or {})},
    }
    if loss:
        spec["loss"] = {"factory": "torch.nn.functional:cross_entropy"}
    return Job.from_json(spec)


def batches(made: Job, worker: int = 0, workers: int = 1, microbatches: int = 3) -> Batches:
    return Batches(made, worker=worker, workers_per_mesh=workers, microbatches=microbatches)


def numbers(rows: MicrobatchTensors) -> list[int]:
    return rows[1].tolist()


def test_the_workers_of_a_mesh_read_every_sample_of_a_microbatch_once_in_blocks():
    sampler = BatchSampler(30, 12, 3, seed=5)
    workers = [batches(job(length=30), worker, 2) for worker in range(2)]
    for step in (0, 4):
        for microbatch in range(3):
            parts = [numbers(one.microbatch(step, microbatch)) for one in workers]
            assert [len(part) for part in parts] == [2, 2]
            assert parts[0] + parts[1] == sampler.indices(step, microbatch)
    assert [one.rows(3) for one in workers] == [2, 2] and workers[0].rows(1) == 6


def test_a_batch_dealt_anew_has_the_same_samples_in_more_microbatches():
    one = batches(job(length=30))
    before = sorted(n for m in range(3) for n in numbers(one.microbatch(2, m)))
    assert one.microbatches == 3 and len(numbers(one.sample)) == 4
    one.set_microbatches(6)
    assert one.microbatches == 6 and len(numbers(one.sample)) == 2
    assert numbers(one.sample) == numbers(one.microbatch(0, 0))
    assert sorted(n for m in range(6) for n in numbers(one.microbatch(2, m))) == before


def test_a_batch_dealt_as_it_is_dealt_already_is_not_read_again():
    one = batches(job(length=30))
    sample = one.sample
    one.set_microbatches(3)
    assert one.sample is sample


def test_a_plan_for_other_microbatches_than_the_job_says_is_refused():
    said = job(length=30, training={"microbatches": 3})
    assert batches(said).microbatches == 3
    with pytest.raises(AttemptFailure, match="6 microbatches were planned, but the job says 3") as caught:
        batches(said).set_microbatches(6)
    assert caught.value.reason is Reason.DATA_FAILED


def test_the_first_row_is_sample_0_alone_as_step_0_draws_it():
    one = batches(job("Noisy", length=30))
    (value,), number = one._microbatches.stack_samples([one._source.example(0, 0)]).rows
    assert number.tolist() == [0] and value.shape == (1, 1)
    assert torch.equal(value[0], one._source.example(0, 0)[0])
    assert not torch.equal(value[0], one._source.example(1, 0)[0])
    assert not torch.equal(
        value[0], batches(job("Noisy", length=30, training={"seed": 6}))._source.example(0, 0)[0]
    )


def test_a_data_set_that_draws_when_it_is_made_is_the_same_on_every_worker():
    made = [batches(job(length=30), worker, 2)._dataset.drawn for worker in range(2)]
    assert made[0] == made[1]
    assert batches(job(length=30, training={"seed": 6}))._dataset.drawn != made[0]


def test_inputs_by_name_come_in_the_order_of_their_names():
    one = batches(job("Named", length=30))
    assert one.keywords == ("a", "b")
    (first, second), number = one.microbatch(0, 0)
    assert first.flatten().tolist() == number.tolist() and second.tolist() == [[1.0]] * 4
    assert batches(job(length=30)).keywords == ()


@pytest.mark.parametrize(
    ("microbatches", "says"),
    [
        (3, "has the inputs a, b, another a, b, c: return"),
        (12, "has the inputs a, b, c, an earlier one a, b: return"),
    ],
)
def test_samples_with_other_fields_than_earlier_ones_are_refused(microbatches, says):
    order = BatchSampler(30, 12, 1, seed=5).indices(0, 0)
    one = batches(job("Named", length=30, odd=order[4]), microbatches=microbatches)
    with pytest.raises(AttemptFailure, match=says):
        one.microbatch(0, 4 * microbatches // 12)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Endless", r"returned Endless, which cannot tell how many samples it has \(__len__\)"),
        ("Unreadable", r"returned Unreadable, which cannot tell a sample by its index \(__getitem__\)"),
    ],
)
def test_what_is_no_data_set_is_refused_by_what_it_lacks(factory: str, message: str):
    with pytest.raises(AttemptFailure, match=message) as caught:
        batches(job(factory))
    assert caught.value.reason is Reason.DATA_FAILED


def test_a_sample_that_cannot_be_read_is_told_with_its_number():
    one = batches(job("Broken", length=1, training={"global_batch": 1}), microbatches=1)
    with pytest.raises(
        RuntimeError, match=r"sample 1 of data small_data:Broken raised OSError: the disk is gone"
    ):
        one._source.example(0, 1)
    with pytest.raises(AttemptFailure, match="the disk is gone") as caught:
        batches(job("Broken", length=2, training={"global_batch": 2}), microbatches=1)
    assert caught.value.reason is Reason.DATA_FAILED


def test_a_model_with_its_own_loss_takes_the_target_too():
    one = batches(job("Numbered", loss=False, length=30))
    (value, number), nothing = one.microbatch(0, 0)
    assert value.flatten().tolist() == number.tolist() and nothing.tolist() == [0.0] * 4


def test_ignored_targets_are_those_of_the_loss_or_of_all_inputs_of_a_model_with_its_own():
    tokens, target = torch.tensor([[1, 0, -100], [-100, 0, 0]]), torch.tensor([-100, 0])
    rows = (tokens, torch.full((2,), -100.0)), target
    assert batches(job("Numbered", length=30)).ignored_targets(rows) == 1
    assert batches(job("Numbered", loss=False, length=30)).ignored_targets(rows) == 2
    ignores_0 = Factory("torch.nn:CrossEntropyLoss", {"ignore_index": 0})
    assert batches(replace(job("Numbered", length=30), loss=ignores_0)).ignored_targets(rows) == 1


def sized(inputs: tuple[torch.Tensor, ...]) -> Batches:
    made = object.__new__(Batches)
    made.sample = inputs, torch.zeros(4)
    return made


@pytest.mark.parametrize(
    ("inputs", "tokens"),
    [
        ((torch.zeros(4, 32, dtype=torch.int64),), 32),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4, 77, dtype=torch.int32)), 77),
        ((torch.zeros(4, 32),), None),
        ((torch.zeros(4, dtype=torch.int64),), None),
        ((torch.zeros(4, 32, dtype=torch.bool),), None),
    ],
    ids=["tokens", "a picture and its text", "features", "classes", "a mask"],
)
def test_tokens_are_counted_where_samples_are_rows_of_whole_numbers(inputs, tokens):
    assert sized(inputs).tokens_per_sample == tokens


def four_at_a_time(factory: str, at_end: str = "repeat", **args: Any) -> Batches:
    spec = {
        "model": {"factory": "worker.examples.gpt:build"},
        "data": {"factory": factory, "args": args, "at_end": at_end},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "training": {"global_batch": 4, "microbatches": 2, "seed": 5},
    }
    return Batches(Job.from_json(spec), worker=0, workers_per_mesh=1, microbatches=2)


def step_rows(one: Batches, step: int) -> torch.Tensor:
    return torch.cat([one.microbatch(step, m)[0][0] for m in range(2)])


@pytest.mark.parametrize(
    "factory",
    [
        "small_data:Numbered",
        *(f"tests.worker.stream_data:{name}" for name in ("Shuffled", "generated", "Stateful")),
    ],
)
def test_a_step_that_begins_at_a_sample_has_what_comes_there_and_so_has_a_resume_behind_it(factory):
    undisturbed, moved = (four_at_a_time(factory, length=10) for _ in range(2))
    rows = [step_rows(undisturbed, step) for step in range(1, 6)]
    moved.begin_at(9, 8)
    assert torch.equal(moved.sample[0][0], undisturbed.sample[0][0])
    assert torch.equal(step_rows(moved, 9), rows[2]) and torch.equal(step_rows(moved, 10), rows[3])
    resumed = four_at_a_time(factory, length=10)
    resumed.begin_at(11, 16)
    resumed.go_to(11, moved.position(11))
    assert torch.equal(step_rows(resumed, 11), rows[4])


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("small_data:Numbered", "its 3 samples have no 4 for 1 steps of 4"),
        ("tests.worker.stream_data:Tokens", "ended after 3 samples: give more, or set data.at_end to repeat"),
    ],
)
def test_data_of_fewer_samples_than_a_batch_is_refused_with_both_numbers(factory: str, says: str):
    few = four_at_a_time(factory, at_end="stop", length=3)
    stage = SimpleNamespace(inputs=["input:0"], outputs=["output"])
    refusal = f"training.global_batch is 4, and data .*{says}"
    with (
        closing(StageReader({0: stage}, few, device="cpu", last=9, limit_s=60.0)) as reader,
        pytest.raises(AttemptFailure, match=refusal) as refused,
    ):
        reader.has(1)
    assert refused.value.reason is Reason.DATA_FAILED
    six = four_at_a_time(factory, at_end="stop", length=6)
    with closing(StageReader({0: stage}, six, device="cpu", last=9, limit_s=60.0)) as enough:
        assert enough.has(1) is True
        enough.take(1)
        assert enough.has(2) is False, "the data ends between steps"


def test_data_that_is_read_once_ends_by_its_samples_wherever_a_step_begins():
    one = four_at_a_time("small_data:Numbered", at_end="stop", length=10)
    one.begin_at(9, 2)
    assert len(step_rows(one, 9)) == len(step_rows(one, 10)) == 4
    with pytest.raises(AttemptFailure, match="its 10 samples have no 14 for 11 steps"):
        one.microbatch(11, 0)
