"""What workers measured in one step, put together: numbers worked out by hand."""

from __future__ import annotations

import pytest

from worker.actor.step_result import StepLengths, WorkerStep
from worker.contract.failures import AttemptFailure
from worker.contract.job import Bucket
from worker.contract.program import MeasuredSlot
from worker.contract.reasons import Reason
from worker.driver.step_measurement import ClockOffset, measure_step
from worker.machine.telemetry import GpuUsage


def slot(lane, action, start, end, stage=0, **fields):
    given = {"microbatch": 0, "edge": None, "peer_mesh": None, "peer_stage": None}
    return MeasuredSlot(
        lane=lane, action=action, stage=stage, start_s=start, end_s=end, **{**given, **fields}
    )


def result(slots, losses=(), **fields):
    return WorkerStep(slots, list(losses), **fields)


BUCKETS = (Bucket(4, 2), Bucket(8, 2))


def measured_lengths(of_workers):
    """The lengths of a step of two meshes of two workers."""
    return measure_step(
        step=3,
        workers={"m0": 2, "m1": 2},
        stage_names=["front", "back"],
        results=[result([slot("compute", "F", 1.0, 2.0)], lengths=lengths) for lengths in of_workers],
        offsets=[ClockOffset(0.0, 0.0)] * 4,
        step_s=1.0,
        clock=(0.0, 0.0),
        samples=8,
    )


def test_tokens_of_unequal_lengths_are_those_of_the_workers_of_one_mesh():
    mesh = [StepLengths(BUCKETS, 11, 24), StepLengths(BUCKETS, 13, 24)]
    record = measured_lengths([*mesh, *mesh])
    assert record.lengths == StepLengths(BUCKETS, 24, 48) and record.usage.tokens == 24


@pytest.mark.parametrize(
    "other", [StepLengths((Bucket(4, 2), Bucket(8, 1)), 13, 24), StepLengths(BUCKETS, 14, 24)]
)
def test_workers_that_saw_other_lengths_than_others_end_the_attempt(other):
    mesh = [StepLengths(BUCKETS, 11, 24), StepLengths(BUCKETS, 13, 24)]
    with pytest.raises(AttemptFailure, match="read samples of other lengths than others") as caught:
        measured_lengths([*mesh, mesh[0], other])
    assert caught.value.reason is Reason.DATA_FAILED


def test_a_step_of_two_meshes_of_two_workers_on_clocks_of_their_own():
    """m1's clock is 1000 s ahead. m0 computes for 2 s, the tensor travels from 12.5 (the receive is posted
    late) to 13, m1 computes for 3 s; the second workers lend their losses only."""
    first = [
        slot("compute", "F", 10.0, 12.0),
        slot("send:m1", "SEND_F", 12.0, 13.2, edge=0, peer_mesh="m1", peer_stage=1),
    ]
    second = [
        slot("recv:m0", "RECV_F", 1012.5, 1013.0, 1, edge=0, peer_mesh="m0", peer_stage=0),
        slot("compute", "F", 1013.0, 1016.0, 1),
        slot("compute", "STEP", 1016.0, 1099.0, None, microbatch=None),
    ]
    usage = GpuUsage(0.5, 1, 2)
    record = measure_step(
        step=7,
        workers={"m0": 2, "m1": 2},
        stage_names=["front", "back"],
        results=[
            result(first, peak_memory_bytes=5),
            result([], peak_memory_bytes=9, gpu=usage),
            result(second, [1.0, 2.0], metrics={"a": [1.0, 4.0]}, grad_norm=0.5, learning_rate=0.01),
            result([], [3.0, 6.0], metrics={"a": [2.0, 3.0]}, grad_norm=0.5, learning_rate=0.01),
        ],
        offsets=[ClockOffset(0.0, 0.0)] * 2 + [ClockOffset(1000.0, 0.001), ClockOffset(5.0, 0.002)],
        step_s=7.0,
        clock=(1_700_000_000.0, 9.0),
    )
    assert record.gpus == {("m0", 1): usage}, "who was read, by mesh and worker"
    assert record.report.pop("peak_memory_bytes") == {"m0": 9, "m1": 0}
    assert record.report.pop("metrics") == {"a": 2.5}
    assert record.report == pytest.approx(
        {
            "step": 7,
            "loss": 3.0,
            "step_s": 7.0,
            "makespan_s": 6.0,
            "bubble_ratio": 1 - 5 / 12,
            "exposed_transfer_s": 0.0,
            "overlap_ratio": 1.0,
            "grad_norm": 0.5,
            "learning_rate": 0.01,
            "started_at": 1_700_000_001.0,
        }
    )
    assert record.timeline["uncertainty_s"] == 0.002
    times = {
        (s["mesh"], s["lane"], s["action"], s["stage"]): (s["start_s"], s["end_s"])
        for s in record.timeline["slots"]
    }
    assert times == {
        ("m0", "compute", "F", "front"): (0.0, 2.0),
        ("m0", "send:m1", "SEND_F", "front"): (2.5, 3.0),
        ("m1", "recv:m0", "RECV_F", "back"): (2.5, 3.0),
        ("m1", "compute", "F", "back"): (3.0, 6.0),
        ("m1", "compute", "STEP", None): (6.0, 89.0),
    }
    sent = next(s for s in record.timeline["slots"] if s["action"] == "SEND_F")
    assert (sent["edge"], sent["peer_mesh"], sent["peer_stage"]) == (0, "m1", "back")
