"""Loader processes: the samples that the worker itself would read, in order; and what died or hangs told by name.

A process takes seconds to start: tests share them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import torch

from worker.actor.batch_feed import Batches
from worker.contract.failures import AttemptFailure
from worker.contract.job import Job
from worker.contract.reasons import Reason
from worker.data.prefetch import ReadTooSlowError, prefetch_steps

pytestmark = pytest.mark.timeout(
    900
)  # on a machine that does ten other things, a process needs a minute to start


def made(factory: str, *, workers: int = 0, worker: int = 0, of: int = 1, **args: Any) -> Batches:
    return Batches(job(factory, workers=workers, **args), worker=worker, workers_per_mesh=of, microbatches=2)


def job(factory: str, *, workers: int = 0, shuffle: bool = True, **args: Any) -> Job:
    return Job.from_json(
        {
            "model": {"factory": "worker.examples.gpt:build"},
            "data": {
                "factory": factory,
                "args": args,
                "shuffle": shuffle,
                "loader": {"workers": workers},
            },
            "loss": {"factory": "torch.nn.functional:cross_entropy"},
            "training": {"steps": 40, "global_batch": 4, "microbatches": 2, "seed": 5},
        }
    )


@pytest.fixture
def batches():
    with contextlib.ExitStack() as stack:

        def begin(*args: Any, **more: Any) -> Batches:
            one = made(*args, **more)
            stack.callback(one.close)
            return one

        yield begin


def same(first: Batches, second: Batches, steps: range) -> bool:
    pairs = [[one.microbatch(step, m) for step in steps for m in range(2)] for one in (first, second)]
    return all(
        torch.equal(x, y)
        for mine, theirs in zip(*pairs, strict=True)
        for x, y in zip((*mine[0], mine[1]), (*theirs[0], theirs[1]), strict=True)
    )


@pytest.mark.slow
def test_two_processes_read_by_index_what_the_worker_would_read(batches):
    """Random masks too: each sample is seeded. The process's own generators stay where they stand."""
    here, there = (batches("stream_data:MaskedByIndex", workers=n, worker=1, of=2, length=11) for n in (0, 2))
    before = torch.get_rng_state()
    assert same(here, there, range(1, 5))
    assert torch.equal(before, torch.get_rng_state())
    assert there.position(4) == here.position(4) and "samples" in there.position(4)


@pytest.mark.slow
def test_one_process_reads_a_stream_from_the_place_where_a_checkpoint_left_it(batches):
    arguments = {"worker": 1, "of": 2, "length": 11}
    here, there = (batches("stream_data:Stateful", workers=n, **arguments) for n in (0, 1))
    assert same(here, there, range(1, 8))
    place = there.position(6)
    assert place["position"] == 20 and place["following"] == here.position(6)["following"]
    there.go_to(6, place)
    fresh = batches("stream_data:Stateful", **arguments)
    assert same(fresh, there, range(6, 9))


def test_a_stream_is_read_by_one_process_at_most():
    with pytest.raises(
        AttemptFailure, match=r"is a stream, and data.loader.workers is 2: .* give 1, or"
    ) as told:
        made("stream_data:Tokens", workers=2, length=9)
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.slow
def test_what_a_data_set_raises_in_a_process_is_told_with_the_sample(batches):
    one = batches("stream_data:HostileByIndex", workers=1, length=40, at=5, what="raises")
    with pytest.raises(
        AttemptFailure, match=r"sample 5 of data stream_data:HostileByIndex raised OSError"
    ) as told:
        for step in range(1, 11):
            one.microbatch(step, 0), one.microbatch(step, 1)
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.slow
def test_a_process_that_hangs_and_one_that_is_killed_are_told_by_number_and_none_is_left(batches):
    """Sample 17 never comes: step 5 has it, whoever reads, and however fast."""
    one = batches("stream_data:HostileByIndex", workers=1, length=40, at=17, what="hangs", shuffle=False)
    ahead = prefetch_steps(
        one.microbatch, 2, device="cpu", ahead=1, last=40, limit_s=800.0, reading=one.reading
    )
    for step in range(1, 5):
        ahead.take(step)
    (process,) = one._loader._processes()
    stuck = rf"step 5 were not there within 1 s: data .*: loader process {process.pid} reads microbatch 0 of step 5"
    with pytest.raises(ReadTooSlowError, match=stuck):
        ahead.take(5, limit_s=1.0)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(
        AttemptFailure, match=rf"died \(process {process.pid} was ended by SIGKILL\) before"
    ) as told:
        ahead.take(5)
    assert told.value.reason is Reason.DATA_FAILED
    one.close()
    assert ahead.close(60.0)
    process.join(60.0)
    assert not process.is_alive()
