"""Plans of single steps in the driver: when they are asked for, which steps run by them, and what is reported."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from service.scheduler.job.plan_job import plan_steps
from tests.service.scheduler.job.test_step_plans import planned, steps
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.local_attempt import run_attempt
from tests.worker.driver.test_replanning import News, events
from tests.worker.jobs.test_unequal_lengths import PlainLoop
from tests.worker.unequal_texts import unequal_job
from tests.worker.workers import step_plans_of
from worker.actor.step_result import LENGTHS_AHEAD, StepLengths
from worker.contract.job import Bucket, Job
from worker.contract.planned import parse_planned_job
from worker.driver.control_plane_client import Refused
from worker.driver.planning import MOST_ASKED, StepPlans
from worker.driver.trainer import Trainer

OF, COSTS, ANSWER = planned(7)
FIRST, SECOND, *_ = map(tuple, steps(7))
LEFT = 1000


class Control:
    """Plans for real; `errors` are raised first, one after the other, and `held` keeps answers back."""

    def __init__(self, *errors, answers=None):
        self.errors, self.asked, self.answers = list(errors), [], answers
        self.held = threading.Event()
        self.held.set()

    def plan_steps(self, steps):
        self.asked.append([tuple(of_step) for of_step in steps])
        assert self.held.wait(60.0)
        if self.errors:
            raise self.errors.pop(0)
        return self.answers or plan_steps(OF, COSTS, ANSWER, steps)


def plans_of(control, obstacle=lambda planned: None):
    news = News()
    return (
        StepPlans(
            parse_planned_job(ANSWER), ANSWER, control=control, reporter=news, metrics=news, obstacle=obstacle
        ),
        news,
    )


def answered():
    for thread in threading.enumerate():
        if thread.name == "slotline-step-plans":
            thread.join(60.0)


def observe(plans, step, later, left=LEFT):
    plans.observe(step, StepLengths((Bucket(8, 4),), 10, 20, later), steps_left=left)


def test_steps_run_by_plans_that_were_made_ahead_and_equal_lengths_are_asked_for_once():
    control = Control()
    plans, news = plans_of(control)
    assert plans.take(1) is None
    for step, later in ((1, FIRST), (2, SECOND), (3, FIRST)):
        observe(plans, step, later)
        answered()
    assert control.asked == [[FIRST], [SECOND]]
    taken = {step: plans.take(step) for step in range(2, 2 + LENGTHS_AHEAD + 2)}
    planned_steps = [step - LENGTHS_AHEAD for step, plan in taken.items() if plan is not None]
    assert planned_steps == [1, 2, 3]
    first, second, again = (taken[step + LENGTHS_AHEAD] for step in (1, 2, 3))
    assert first is again and first is not second
    for plan, lengths in ((first, FIRST), (second, SECOND)):
        (expected,) = plan_steps(OF, COSTS, ANSWER, [lengths])
        assert plan.planned.plan["slots"] == expected["plan"]["slots"]
        assert plan.programs == parse_planned_job({**ANSWER, **expected}).programs()
    (message,) = events(news, "steps_planned")
    assert "to rounding" in message


def test_a_step_whose_plan_is_not_there_in_time_runs_by_the_jobs_own_and_later_ones_by_theirs():
    control = Control()
    plans, _ = plans_of(control)
    control.held.clear()
    for step, later in enumerate((FIRST, SECOND, FIRST), start=1):
        observe(plans, step, later)
    assert control.asked == [[FIRST]] and plans.take(1 + LENGTHS_AHEAD) is None
    control.held.set()
    answered()
    observe(plans, 4, SECOND)
    answered()
    assert control.asked == [[FIRST], [SECOND]]
    assert plans.take(2 + LENGTHS_AHEAD) is not None and plans.take(3 + LENGTHS_AHEAD) is not None


def test_few_steps_are_planned_by_one_question_the_last_ones_first():
    control = Control()
    plans, _ = plans_of(control)
    control.held.clear()
    lengths = [tuple(of_step) for of_step in steps(3, count=MOST_ASKED + 3)]
    for step, later in enumerate(lengths, start=1):
        observe(plans, step, later)
    control.held.set()
    answered()
    observe(plans, 99, lengths[0])
    answered()
    assert control.asked == [lengths[:1], lengths[: -1 - MOST_ASKED : -1]]


def test_a_step_for_which_the_jobs_plan_is_as_short_and_one_behind_the_last_have_no_plan():
    control = Control(answers=[None])
    plans, news = plans_of(control)
    observe(plans, 1, FIRST)
    answered()
    assert plans.take(1 + LENGTHS_AHEAD) is None and not news.events
    observe(plans, 2, FIRST)
    assert control.asked == [[FIRST]], "it is known"
    observe(plans, 3, SECOND, left=LENGTHS_AHEAD - 1)
    answered()
    assert control.asked == [[FIRST]]


def test_a_control_plane_that_does_not_answer_is_asked_again_and_one_that_refuses_is_not():
    control = Control(httpx.ConnectError("away"))
    plans, _ = plans_of(control)
    for step in (1, 2):
        observe(plans, step, FIRST)
        answered()
    assert control.asked == [[FIRST], [FIRST]] and plans.take(1 + LENGTHS_AHEAD) is not None
    control = Control(Refused(404, "no such path", None))
    plans, news = plans_of(control)
    for step in (1, 2):
        observe(plans, step, FIRST)
        answered()
    assert control.asked == [[FIRST]] and plans.take(1 + LENGTHS_AHEAD) is None
    (message,) = events(news, "plan_kept")
    assert "plans no single steps: no such path" in message


def test_a_plan_over_the_limit_of_memory_or_beside_which_no_copy_fits_is_not_run():
    over = {
        **ANSWER,
        "spec": {**ANSWER["spec"], "meshes": [{"name": f"m{m}", "memory_bytes": 5} for m in range(3)]},
    }
    for plans in (
        StepPlans(parse_planned_job(over), over, control=Control(), reporter=News(), metrics=News()),
        plans_of(Control(), obstacle=lambda planned: "no room")[0],
    ):
        observe(plans, 1, FIRST)
        answered()
        assert plans.take(1 + LENGTHS_AHEAD) is None


def test_data_that_tells_no_lengths_is_named_once():
    control = Control()
    plans, news = plans_of(control)
    for step in range(3):
        observe(plans, step, ())
    (message,) = events(news, "plan_kept")
    assert "has no attribute `lengths`" in message and not control.asked


def test_the_plan_of_a_profiled_step_is_the_one_that_is_reported_and_that_metrics_are_compared_with():
    plans, news = plans_of(Control())
    shown = []
    plans._metrics = SimpleNamespace(set_plan=lambda plan, step_s: shown.append(plan["makespan_s"]))
    observe(plans, 1, FIRST)
    answered()
    own = plans.take(1 + LENGTHS_AHEAD)
    for step, plan, profiled in (
        (1, None, True),
        (2, own, False),
        (3, own, True),
        (4, own, True),
        (5, None, True),
    ):
        plans.ran(plan)
        if profiled:
            plans.profiled(step)
    assert [(since, answer["plan"]["makespan_s"]) for since, answer in news.plans] == [
        (3, own.planned.plan["makespan_s"]),
        (5, ANSWER["plan"]["makespan_s"]),
    ]
    assert all("step_planner" in answer for _, answer in news.plans), "the next steps are planned by it"
    assert shown == [own.planned.plan["makespan_s"], ANSWER["plan"]["makespan_s"]]


def of_trainer(spec, answer=ANSWER, **planned):
    """The plans of single steps that a trainer makes for a job, and what it says of them."""
    news = News()
    trainer = SimpleNamespace(
        _job=Job.from_json(spec),
        _attempt=SimpleNamespace(device="cpu"),
        _planner=SimpleNamespace(answer=answer),
        _reporter=news,
        _metrics=news,
        _control=None,
        _snapshot_obstacle=None,
    )
    trainer._keeps_plan = lambda planned: Trainer._keeps_plan(trainer, planned)
    return Trainer._step_plans(trainer, replace(parse_planned_job(answer), **planned)), news


def automatic(**training):
    spec = unequal_job(stages=3)
    spec["pipeline"]["schedule"] = "auto"
    spec["training"] |= training
    return spec


def test_jobs_that_keep_their_plan_and_those_of_one_length_plan_no_steps_and_say_nothing():
    assert isinstance(of_trainer(automatic())[0], StepPlans)
    kept, alike = automatic(), automatic()
    kept["pipeline"]["replan"] = "off"
    del alike["data"]["lengths"]
    for spec, named in ((kept, {}), (alike, {}), (automatic(), {"saved_plan": "mine"})):
        plans, news = of_trainer(spec, **named)
        assert plans is None and news.events == []


@pytest.mark.parametrize(
    ("spec", "named", "says"),
    [
        (unequal_job(stages=3), {}, "pipeline.schedule is 1f1b, whose order stays"),
        (automatic(microbatches="auto"), {}, "training.microbatches is auto; with a number"),
        (automatic(), {"slowdown": 1.4}, "workers share processor cores"),
        (automatic(), {}, "data.lengths has one bucket"),
    ],
)
def test_a_job_whose_steps_could_be_planned_says_what_is_missing(spec, named, says):
    answer = {name: value for name, value in ANSWER.items() if name != "step_planner"}
    plans, news = of_trainer(spec, answer, **named)
    (message,) = events(news, "plan_kept")
    assert plans is None and says in message


class WithCores(ControlPlane):
    """Plans as if no workers shared processor cores."""

    def plan(self, costs):
        return super().plan({**costs, "workers": []})

    def plan_steps(self, steps):
        costs = {**self.plan_requests[0], "workers": []}
        return step_plans_of(self.given["job"], costs, self.plan_answers[0], steps)


@pytest.mark.slow
def test_an_attempt_runs_steps_by_plans_of_their_own_with_the_losses_of_a_plain_loop():
    spec = unequal_job(stages=3)
    spec["training"]["steps"] = last = 2 * LENGTHS_AHEAD + 4
    spec["pipeline"]["schedule"] = "auto"
    spec["data"]["factory"] = "tests.worker.unequal_texts:TextsWithLengths"
    plane, code = run_attempt(spec, control=WithCores)
    assert code == 0, plane.reports[-1]
    expected = PlainLoop(spec).train(range(1, last + 1)).losses
    assert [step["loss"] for step in plane.steps] == pytest.approx(expected, rel=1e-4)
    told = {event["kind"]: event["message"] for report in plane.reports for event in report["events"]}
    assert "runs by a plan for the shapes of its microbatches" in told["steps_planned"]
    running = [report["running_plan"] for report in plane.reports if report.get("running_plan")]
    assert running and all(one["plan"]["spec"]["bucket_of"] for one in running)
    assert len({tuple(of_step) for asked in plane.step_plan_requests for of_step in asked}) == sum(
        len(asked) for asked in plane.step_plan_requests
    )
