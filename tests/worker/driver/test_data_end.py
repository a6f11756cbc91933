"""A job that ends with its data: after its last whole batch, with a checkpoint, and by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.worker.actor.test_actor import job
from tests.worker.driver.fake_gang import FakeActor, SimpleGang
from tests.worker.driver.test_step_loop import HERE, LIMIT_S, Gang, Heard
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy, Job
from worker.contract.reasons import Reason
from worker.driver import step_loop
from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import Evaluations
from worker.driver.step_loop import DataEnd, StepLog, StepPublisher
from worker.driver.stopping import Interruption


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    monkeypatch.setattr(step_loop, "own_node_address", lambda: HERE)


def stopping_job(at_end="stop"):
    return job(data={"factory": "stream_data:Tokens", "args": {"length": 19}, "at_end": at_end})


@pytest.mark.slow
def test_a_stream_of_19_has_two_steps_of_8_and_the_state_after_them_is_kept(tmp_path):
    spec, log = stopping_job(), []
    with Workers(spec) as run:
        gang, heard = Gang(run.workers, log), Heard(log)
        saving = Checkpoints(
            CheckpointPolicy(str(tmp_path), every_steps=50),
            "job",
            gang=gang,
            reporter=heard,
            limit_s=LIMIT_S,
        )
        loop = step_loop.StepLoop(
            SimpleNamespace(plan={"makespan_s": 0.01}, step_s=0.01, stage_names=["s0", "s1"]),
            samples=8,
            gang=gang,
            checkpoints=saving,
            evaluations=Evaluations(None, gang=gang, reporter=heard, metrics=heard),
            data_end=DataEnd(Job.from_json(spec), gang=gang),
            publisher=StepPublisher(heard, heard, profile_every_s=30.0, step_log=StepLog(5)),
            interruption=Interruption(),
        )
        try:
            said = loop.run(1, 8)
            again = loop.run(3, 8)
        finally:
            for actor in gang.workers:
                actor._queue.shutdown(wait=True, cancel_futures=True)
    assert said == again == "data stream_data:Tokens ended after step 2 (data.at_end: stop)"
    assert [report["step"] for report in heard.steps] == [1, 2]
    assert [
        checkpoint_format.load_checkpoint(uri)[1]
        for uri in checkpoint_format.complete_checkpoints(str(tmp_path), "job")
    ] == [2]


def asked(*answers, at_end="stop"):
    gang = SimpleGang(
        workers=[FakeActor(has_data=lambda step, a=a: a) for a in answers],
        name=lambda at: f"worker {at}",
    )
    end = DataEnd(Job.from_json(stopping_job(at_end)), gang=gang)
    return end.end_reason(3)


def test_only_those_that_read_are_listened_to_and_they_must_agree():
    assert asked(True, None, True) is None
    assert "ended after step 2" in asked(False, None, False)
    assert asked(False, None, False, at_end="repeat") is None
    with pytest.raises(
        AttemptFailure, match="ends before step 3 on worker 0, and goes on on worker 2"
    ) as told:
        asked(False, None, True)
    assert told.value.reason is Reason.DATA_FAILED
