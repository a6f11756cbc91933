"""Which numbers a job that says auto may be given."""

from __future__ import annotations

import itertools

import pytest

from worker.contract.job import (
    MAX_MICROBATCHES_PER_MESH,
    MAX_PROFILED_COUNTS,
    Job,
    may_interleave,
    microbatch_counts,
    stage_counts,
)
from worker.contract.profile import CutError


def job(*, batch=32, microbatches="auto", workers=1, meshes=2, **pipeline):
    return Job.from_json(
        {
            **{name: {"factory": "a:b"} for name in ("model", "data", "loss")},
            "training": {"global_batch": batch, "microbatches": microbatches},
            "pipeline": {"stages": "auto", **pipeline},
            "resources": {"meshes": meshes, "workers_per_mesh": workers},
        }
    )


@pytest.mark.parametrize(
    ("batch", "workers", "counts"),
    [(32, 1, (1, 2, 4, 8, 16, 32)), (12, 2, (1, 2, 3, 6)), (12, 12, (1,)), (7, 1, (1, 7)), (1, 1, (1,))],
)
def test_microbatches_are_divisors_that_leave_each_worker_whole_samples(batch, workers, counts):
    assert microbatch_counts(job(batch=batch, workers=workers)) == counts
    assert all(batch % count == 0 and batch // count % workers == 0 for count in counts)


def test_a_number_that_is_given_is_the_only_one():
    assert microbatch_counts(job(microbatches=4)) == (4,)


@pytest.mark.parametrize("batch", [720720, 2**20, 55440])
def test_of_many_divisors_few_are_tried_that_cover_the_range(batch):
    counts = microbatch_counts(job(batch=batch))
    assert 4 <= len(counts) <= MAX_PROFILED_COUNTS and counts[0] == 1
    assert MAX_MICROBATCHES_PER_MESH <= counts[-1] <= 2 * MAX_MICROBATCHES_PER_MESH
    assert all(batch % count == 0 for count in counts)
    assert all(later <= 4 * earlier for earlier, later in itertools.pairwise(counts))


def test_a_batch_that_the_workers_cannot_share_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"global_batch 10 .*by 4 data-parallel workers .*multiple of 4"):
        microbatch_counts(job(batch=10, workers=4))


@pytest.mark.parametrize(
    ("schedule", "layers", "counts"),
    [
        ("auto", 20, (2, 4, 6, 8)),
        ("auto", 5, (2, 4)),
        ("1f1b", 20, (2,)),
        ("zb-v", 20, (4,)),
        ("interleaved-1f1b", 20, (4, 6, 8)),
    ],
)
def test_stages_are_the_multiples_of_the_meshes_that_the_schedule_can_run(schedule, layers, counts):
    assert stage_counts(job(schedule=schedule), layers) == counts
    assert may_interleave(job(schedule=schedule)) == (counts[-1] > 2 or schedule == "auto")


def test_one_mesh_has_one_stage_and_named_modules_are_as_many_stages():
    assert stage_counts(job(meshes=1), 20) == (1,)
    assert stage_counts(job(cut=["a", "b", "c"]), 20) == (3,)
    assert stage_counts(job(stages=5), 20) == (5,)
    assert (
        not may_interleave(job(meshes=1))
        and may_interleave(job(stages=5))
        and not may_interleave(job(stages=2))
    )


def test_too_few_layers_are_refused_with_the_way_out():
    with pytest.raises(CutError, match=r"stages auto .*meshes 2 .*only 3 modules.*meshes to 1"):
        stage_counts(job(schedule="zb-v"), 3)
