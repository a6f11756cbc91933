"""A job's check beside its launch: what it finds wrong ends the launch, whenever it comes, and nothing else does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.worker.actor.test_actor import job
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.local_attempt import run_attempt
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.contract.tasks import JobCheck, JobProblem
from worker.driver.stopping import CAUSE_LIMIT_S, LaunchCheck
from worker.driver.trainer import check_node

RAISED = JobProblem("data", "KeyError: 3", "DATA_FAILED", details="File own.py, line 2")
TYPO = JobProblem("model.factory", "found by the check", "MODEL_BUILD_FAILED")


class Answers:
    """A running check that answers in turn, at the end again and again; `waits` are what it was given."""

    def __init__(self, *answers: JobCheck | None):
        self.answers, self.waits, self.ended = list(answers), [], 0

    def answer(self, wait_s):
        self.waits.append(wait_s)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def end(self):
        self.ended += 1


class Late(Answers):
    """A check that answers only whoever waits for it."""

    def answer(self, wait_s):
        return super().answer(wait_s) if wait_s else None


def test_all_that_is_wrong_is_raised_as_soon_as_it_is_known_and_once():
    told, running = [], Answers(None, None, JobCheck((RAISED, TYPO), ("the loss was not checked",)))
    check = LaunchCheck(lambda: running, lambda *event: told.append(event))
    check.raise_if_wrong()
    assert running.waits == [], "it has not begun"
    check.begin()
    check.raise_if_wrong()
    check.raise_if_wrong()
    with pytest.raises(AttemptFailure) as raised:
        check.raise_if_wrong(3.0)
    assert raised.value.reason is Reason.DATA_FAILED
    assert raised.value.message == "data: KeyError: 3; model.factory: found by the check"
    assert raised.value.details == "File own.py, line 2"
    assert told == [("check", "the loss was not checked")] and running.waits == [0.0, 0.0, 3.0]
    check.raise_if_wrong()
    check.end()
    assert len(running.waits) == 3 and running.ended == 0


def test_a_check_that_finds_nothing_leaves_the_launch_alone_and_one_that_still_runs_is_ended():
    told, running = [], Answers(JobCheck(checked=("data: a stream", "model: GPT")))
    check = LaunchCheck(lambda: running, lambda *event: told.append(event))
    check.begin()
    check.raise_if_wrong()
    check.raise_if_wrong()
    assert len(running.waits) == 1 and told == [("checked", "data: a stream; model: GPT")]
    running = Answers(None)
    check.begin()
    check.raise_if_wrong()
    check.end()
    check.end()
    assert running.ended == 1


def test_a_launch_that_fails_before_its_check_answers_ends_for_what_the_check_says():
    spec = job("cosine", meshes=1, stages=1)
    spec["model"] = {"factory": "gtp:build"}
    late = Late(JobCheck((TYPO,)))
    plane, code = run_attempt(spec, check=late)
    assert (code, plane.reports[-1]["message"]) == (1, "model.factory: found by the check")
    assert late.waits == [CAUSE_LIMIT_S]
    silent = Answers(None)
    plane, code = run_attempt(spec, check=silent)
    assert code == 1 and "no module 'gtp'" in plane.reports[-1]["message"] and silent.ended == 1


@pytest.mark.slow
def test_training_does_not_wait_for_the_answer_and_ends_with_one_that_comes_late():
    spec = job("cosine", meshes=1, stages=1)
    spec["training"]["steps"] = 100_000
    planes = []

    def control(*given):
        planes.append(ControlPlane(*given))
        return planes[0]

    def answer(wait_s):
        return JobCheck((TYPO,)) if planes[0].steps else None

    running = SimpleNamespace(answer=answer, end=pytest.fail)
    plane, code = run_attempt(spec, check=running, control=control)
    assert code == 1 and plane.states == ["RUNNING", "FAILED"] and 0 < len(plane.steps) < 100_000
    assert plane.reports[-1]["message"] == "model.factory: found by the check"


@pytest.mark.slow
def test_a_job_that_the_control_plane_had_checked_is_not_checked_again():
    wrong = JobCheck(problems=(TYPO,))
    spec = job("cosine", meshes=1, stages=1)
    spec["model"] = {"factory": "gtp:build"}
    for checked, message in ((False, "model.factory: found by the check"), (True, "no module 'gtp'")):
        plane, code = run_attempt(spec, check=wrong, checked=checked)
        assert (code, plane.reports[-1]["reason"]) == (1, "MODEL_BUILD_FAILED")
        assert message in plane.reports[-1]["message"]


def test_a_job_is_checked_on_its_drivers_node_or_the_first_other_that_takes_work():
    nodes = ["c", "a", "b"]
    assert check_node(nodes, own="b", left_out=()) == "b"
    assert check_node(nodes, own="b", left_out={"b"}) == "a"
    assert check_node(nodes, own="head", left_out={"a"}) == "b"
    assert check_node(nodes, own="b", left_out={"a", "b", "c"}) is None
    assert check_node([], own="b", left_out=()) is None
