"""Evaluations within the driver's loop over real workers: when, what is kept, when a job ends early, and after a resume."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from tests.worker.actor.test_evaluation import Numbers, spec_of
from tests.worker.driver.test_step_loop import LIMIT_S, Gang, Heard
from tests.worker.workers import Workers
from worker.actor.step_result import EvaluatedBatch
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy, Data, Evaluation, Job
from worker.contract.reasons import Reason
from worker.driver import step_loop
from worker.driver.checkpoints import Checkpoints
from worker.driver.evaluation import EarlyStopping, EvaluationResult, Evaluations, combine_batches
from worker.driver.stopping import Interruption

DATA = Data(f"{Numbers.__module__}:Numbers")


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    monkeypatch.setattr(step_loop, "own_node_address", lambda: "127.0.0.1")


class Listener(Heard):
    """Hears evaluations and the best checkpoint too; `values` stand in for what was measured of the metric, if given."""

    def __init__(self, log):
        super().__init__(log)
        self.evaluations, self.best, self.events = [], [], []

    def evaluation(self, report):
        self.log.append(("evaluated", report["step"]))
        self.evaluations.append(report)

    def best_checkpoint(self, best):
        self.best.append(best)

    def event(self, *parts):
        self.events.append(parts)

    def observe_step(self, *_):
        pass

    observe_evaluation = observe_usage = set_timeline = observe_step


def train(
    spec,
    steps,
    evaluation,
    *,
    policy=None,
    values=None,
    monkeypatch=None,
    interrupted=lambda: None,
    log=None,
    tracking=None,
):
    """The loop over all steps, from the newest checkpoint; what was heard and why it ended early."""
    log = [] if log is None else log
    with Workers(spec) as run:
        gang, heard = Gang(run.workers, log, interrupted), Listener(log)
        planned = SimpleNamespace(plan={"makespan_s": 0.01}, step_s=0.01, stage_names=["s0", "s1"])
        shared = {"gang": gang, "reporter": heard}
        checkpoints = Checkpoints(policy, "job", limit_s=LIMIT_S, keeps_best=evaluation.keep_best, **shared)
        try:
            done = checkpoints.restore(None)
            evaluations = Evaluations(
                evaluation,
                metrics=heard,
                early_stopping=checkpoints.early_stopping,
                tracking=tracking,
                **shared,
            )
            if values is not None:
                measured = iter(values[done // evaluation.every_steps :])
                evaluations._run = lambda *_: EvaluationResult(next(measured), {})
            loop = step_loop.StepLoop(
                planned,
                samples=8,
                gang=gang,
                checkpoints=checkpoints,
                evaluations=evaluations,
                data_end=step_loop.DataEnd(Job.from_json(spec), gang=gang),
                publisher=step_loop.StepPublisher(
                    heard, heard, profile_every_s=30.0, step_log=step_loop.StepLog(5), tracking=tracking
                ),
                interruption=Interruption(),
            )
            stop_reason = loop.run(done + 1, steps)
        except (
            BaseException
        ):  # as the gang's processes are ended: one may wait for another that was not asked
            for actor in gang.workers:
                actor._worker.engine.abort("the loop has ended")
            raise
        finally:
            for actor in gang.workers:
                actor._queue.shutdown(wait=True, cancel_futures=True)
    heard.stop_reason, heard.early_stopping = stop_reason, evaluations.early_stopping
    return heard


def saved(folder):
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folder.glob("job/*/manifest.json"))


def test_evaluations_come_before_the_first_step_between_steps_and_after_the_last():
    log = []
    heard = train(spec_of(16), 5, Evaluation(DATA, every_steps=2, at_start=True), log=log)
    assert [one["step"] for one in heard.evaluations] == [0, 2, 4, 5]
    for step in (2, 4):
        at = log.index(("evaluated", step))
        assert log.index(("end run_step", step)) < at < log.index(("ask run_step", step + 1))
    assert log.index(("ask run_step", 4)) < log.index(("report", 3)), "others are asked for ahead"
    assert {one["samples"] for one in heard.evaluations} == {16}
    assert all(math.isfinite(v) for one in heard.evaluations for v in (one["loss"], *one["metrics"].values()))
    assert heard.stop_reason is None


@pytest.mark.slow
def test_the_curve_is_that_of_the_job_without_evaluations():
    policy = Evaluation(DATA, every_steps=2, at_start=True)
    never = Evaluation(DATA, every_steps=1000)
    curves = [[s["loss"] for s in train(spec_of(16), 5, one).steps] for one in (policy, never)]
    assert curves[0] == curves[1]


def test_a_metric_that_the_loss_does_not_return_is_told_by_name():
    with pytest.raises(
        AttemptFailure, match=r"metric is 'f1', and the loss returned accuracy, nested.largest-1"
    ):
        train(spec_of(16), 5, Evaluation(DATA, every_steps=2, metric="f1", mode="max"))


@pytest.mark.slow
def test_a_cancel_within_an_evaluation_ends_the_loop_there():
    log = []

    class Cancelled(Exception):
        pass

    def interrupted():
        if ("ask evaluate", 0) in log:
            raise Cancelled

    with pytest.raises(Cancelled):
        train(spec_of(16), 1000, Evaluation(DATA, every_steps=2), interrupted=interrupted, log=log)
    assert max(step for what, step in log if what == "ask run_step") == 2
    assert ("evaluated", 2) not in log


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path):
    policy = CheckpointPolicy(str(tmp_path), every_steps=2, keep=1)
    evaluation = Evaluation(DATA, every_steps=1, keep_best=True)
    heard = train(
        spec_of(8), 8, evaluation, policy=policy, values=[5.0, 4.0, 1.0, 2.0, math.nan, 3.0, 1.5, 1.0]
    )
    assert saved(tmp_path) == [3, 8], "step 3 was the best, and not due; 8 is only as good"
    assert [best["step"] for best in heard.best] == [1, 2, 3]
    assert heard.best[-1] == {
        "step": 3,
        "uri": checkpoint_format.step_uri(str(tmp_path), "job", 3),
        "metric": "loss",
        "value": 1.0,
    }


@pytest.mark.slow
def test_a_job_whose_evaluations_get_no_better_ends_with_a_checkpoint_and_says_why(tmp_path):
    policy = CheckpointPolicy(str(tmp_path), every_steps=100, keep=2)
    evaluation = Evaluation(DATA, every_steps=1, patience=2)
    heard = train(spec_of(8), 9, evaluation, policy=policy, values=[3.0, 2.0, 2.0, 2.5, 0.0])
    assert [step["step"] for step in heard.steps] == [1, 2, 3, 4]
    assert (
        heard.stop_reason
        == "evaluation.patience: loss was no better in 2 evaluations; the best was 2 after step 2"
    )
    assert saved(tmp_path) == [4]
    again = train(spec_of(8), 9, evaluation, policy=policy, values=[3.0, 2.0, 2.0, 2.5, 0.0])
    assert (again.stop_reason, again.steps, again.evaluations) == (heard.stop_reason, [], [])


@pytest.mark.slow
def test_patience_and_the_best_go_on_behind_a_resume(tmp_path):
    values = [5.0, 2.0, 3.0, 4.0, 2.5, 9.0]
    evaluation = Evaluation(DATA, every_steps=1, patience=3, keep_best=True)
    policy = CheckpointPolicy(str(tmp_path), every_steps=1, keep=1)
    first = train(spec_of(8), 3, evaluation, policy=policy, values=values)
    assert (saved(tmp_path), first.stop_reason) == ([2, 3], None)
    second = train(spec_of(8), 9, evaluation, policy=policy, values=values)
    assert [step["step"] for step in second.steps] == [4, 5]
    assert (second.early_stopping, saved(tmp_path)) == (EarlyStopping(2.0, 2, 3), [2, 5])
    assert second.stop_reason.endswith("the best was 2 after step 2")


@pytest.mark.slow
def test_where_the_best_checkpoint_is_gone_the_next_is_the_best(tmp_path):
    evaluation = Evaluation(DATA, every_steps=1, keep_best=True)
    policy = CheckpointPolicy(str(tmp_path), every_steps=1, keep=1)
    train(spec_of(8), 2, evaluation, policy=policy, values=[1.0, 2.0])
    (tmp_path / "job" / "step-0000000001" / "manifest.json").unlink()
    heard = train(spec_of(8), 3, evaluation, policy=policy, values=[1.0, 2.0, 3.0])
    assert [best["step"] for best in heard.best] == [3] and saved(tmp_path) == [3]


@pytest.mark.slow
def test_a_checkpoint_of_an_older_version_has_no_course(tmp_path):
    policy = CheckpointPolicy(str(tmp_path), every_steps=1, keep=1)
    train(spec_of(8), 1, Evaluation(DATA, every_steps=1), policy=policy)
    manifest = tmp_path / "job" / "step-0000000001" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["notes"]
    manifest.write_text(json.dumps(content))
    assert checkpoint_format.checkpoint_notes(str(manifest.parent)) == {}
    assert train(spec_of(8), 1, Evaluation(DATA), policy=policy).early_stopping == EarlyStopping()


@pytest.mark.parametrize(
    ("mode", "values", "best", "worse"),
    [
        (None, [3, 2, 2, 4], 2, 2),
        ("min", [3, 2, 1], 3, 0),
        ("max", [3, 2, 4, 4], 3, 1),
        ("max", [math.nan, None, -math.inf], None, 3),
        ("min", [math.nan, 7], 2, 0),
    ],
)
def test_what_is_better(mode, values, best, worse):
    policy, course = Evaluation(DATA, metric="x", mode=mode, patience=3), EarlyStopping()
    for step, value in enumerate(values, 1):
        course = course.after(step, value, policy)
    assert (course.best_step, course.worse) == (best, worse)
    assert EarlyStopping.from_json(json.loads(json.dumps(course.to_json()))) == course
    assert (course.stop_reason(policy) is not None) == (worse >= 3)


def test_microbatches_count_by_their_weights_and_what_counts_nothing_is_left_out():
    results = [
        EvaluatedBatch([1.0, math.nan], {"a": [2.0, math.nan]}, weights=[3.0, 0.0]),
        EvaluatedBatch([], {}, weights=[]),
        EvaluatedBatch([5.0], {"a": [6.0]}, weights=[1.0]),
    ]
    assert combine_batches(results) == EvaluationResult(2.0, {"a": 3.0})
    with pytest.raises(AttemptFailure, match="metrics a on one worker and b on another") as failed:
        combine_batches([results[0], EvaluatedBatch([1.0], {"b": [1.0]}, weights=[1.0])])
    assert failed.value.reason is Reason.USER_CODE_RAISED
