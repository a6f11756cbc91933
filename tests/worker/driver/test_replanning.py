"""Programs that are swapped while a job trains: when, by whom, with which losses, and when it is undone."""

from __future__ import annotations

import copy
import functools
import threading
from types import SimpleNamespace

import httpx
import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from tests.worker.actor.test_actor import job, plain
from tests.worker.driver.test_step_loop import HERE, Actor, Heard
from tests.worker.driver.test_step_loop import Gang as OneLogGang
from tests.worker.workers import Workers
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy, Job
from worker.contract.planned import parse_planned_job
from worker.contract.reasons import Reason
from worker.driver import planning, step_loop
from worker.driver.checkpoints import Checkpoints
from worker.driver.control_plane_client import Refused
from worker.driver.evaluation import Evaluations
from worker.driver.gang.gang import Mesh
from worker.driver.planning import (
    BACK_OFF,
    BROUGHT_SHARE,
    JUDGED_STEPS,
    PROFILED_STEPS,
    STEPS_BETWEEN_SWAPS,
    BroughtLess,
    Replanner,
    SwapHistory,
    plan_obstacle,
)
from worker.driver.step_loop import DataEnd, StepLog, StepLoop, StepPublisher
from worker.driver.stopping import Interruption
from worker.engine.engine import Engine

STEPS = 8


@pytest.fixture(autouse=True)
def one_node(monkeypatch):
    """Nobody asks Ray where this is."""
    monkeypatch.setattr(step_loop, "own_node_address", lambda: HERE)


# What a history of makespans says


def observed(history: SwapHistory, steps: int, makespan_s: float = 1.0, *, profiled: bool = False):
    for _ in range(steps):
        history.observe(makespan_s, profiled=profiled)


def test_a_plan_is_asked_for_after_nine_warm_profiled_steps_and_again_after_nine_more():
    history = SwapHistory()
    observed(history, PROFILED_STEPS, profiled=True)
    observed(history, 1000)
    assert not history.asks, "the first profiled step is cold"
    observed(history, 1, profiled=True)
    assert history.asks
    history.asked()
    observed(history, PROFILED_STEPS - 1, profiled=True)
    assert not history.asks
    observed(history, 1, profiled=True)
    assert history.asks


def test_between_two_swaps_lie_many_steps_and_the_verdict_on_the_first():
    history = SwapHistory()
    observed(history, PROFILED_STEPS + 1, profiled=True)
    history.swapped(0.1)
    observed(history, JUDGED_STEPS, 0.9, profiled=True)
    assert history.judge() is None
    observed(history, STEPS_BETWEEN_SWAPS - JUDGED_STEPS - 1, 0.9, profiled=True)
    assert not history.asks
    observed(history, 1, 0.9)
    assert history.asks


@pytest.mark.parametrize(("after_s", "undone"), [(0.95, False), (0.9501, True), (1.2, True), (0.5, False)])
def test_a_swap_that_brings_less_than_half_of_its_promise_is_undone_and_the_next_is_long_in_coming(
    after_s, undone
):
    assert BROUGHT_SHARE == 0.5
    history = SwapHistory()
    observed(history, JUDGED_STEPS)
    history.swapped(0.1)
    observed(history, JUDGED_STEPS // 2 + 1, after_s)
    observed(history, JUDGED_STEPS // 2 - 2, 50.0)  # disturbed steps, fewer than half
    assert history.judge() is None, "too early"
    observed(history, 1, after_s)
    verdict = history.judge()
    assert verdict == (BroughtLess(0.1, pytest.approx(1.0 - after_s)) if undone else None)
    assert history.judge() is None
    observed(history, STEPS_BETWEEN_SWAPS, after_s, profiled=True)
    assert history.asks != undone
    observed(history, (BACK_OFF - 1) * STEPS_BETWEEN_SWAPS - 1, after_s, profiled=True)
    assert history.asks != undone
    observed(history, 1, after_s)
    assert history.asks, "costs that change later are answered all the same"


def test_each_swap_that_comes_to_nothing_puts_the_next_question_off_for_longer():
    history = SwapHistory()
    for distance in (BACK_OFF, BACK_OFF**2, BACK_OFF**3):
        history.back_off()
        observed(history, distance * STEPS_BETWEEN_SWAPS - 1, profiled=True)
        assert not history.asks
        observed(history, 1)
        assert history.asks


# Which plans a running job takes


def poor_answer(answer):
    """The same plan in which each microbatch's forwards and backwards come before the next one's."""
    spec = PipelineSpec.model_validate(answer["spec"])
    orders: dict[str, list[str]] = {mesh.name: [] for mesh in spec.meshes}
    for microbatch in range(spec.microbatches):
        for op, stages in (("F", spec.stages), ("B", spec.stages[::-1])):
            for stage in stages:
                orders[stage.mesh].append(f"{spec.stages.index(stage)}{op}{microbatch}")
    plan = make_plan(spec.model_copy(update={"schedule": "csv", "orders": orders}), budget_s=0.0)
    return {**answer, "plan": plan.model_dump(mode="json")}


def planned_answer():
    stages = [
        {"name": f"s{s}", "mesh": f"m{s}", "forward_s": 1.0, "backward_input_s": 1.0, "activation_bytes": 10}
        for s in range(2)
    ]
    spec = PipelineSpec.model_validate(
        {
            "microbatches": 4,
            "meshes": [{"name": "m0", "memory_bytes": 40}, {"name": "m1"}],
            "stages": stages,
            "edges": [{"source": "s0", "target": "s1", "forward_s": 0.1, "backward_s": 0.1}],
        }
    )
    plan = make_plan(spec.model_copy(update={"schedule": "gpipe"}), budget_s=0.0)
    return {
        "begins": ["a", "b"],
        "spec": spec.model_dump(mode="json"),
        "plan": plan.model_dump(mode="json"),
    }


def changed(change):
    answer = copy.deepcopy(planned_answer())
    change(answer)
    return parse_planned_job(answer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda answer: answer.update(begins=["a", "c"]), "another cut"),
        (lambda answer: answer["spec"]["stages"][0].update(mesh="m1"), "another placement"),
        (lambda answer: answer["spec"].update(microbatches=2), "another number of microbatches"),
        (lambda answer: answer["plan"]["stages"][1].update(recomputed=True), "another recomputation"),
        (
            lambda answer: answer["plan"]["meshes"][0].update(peak_memory_bytes=41),
            "m0 would hold 41 bytes, and may hold 40",
        ),
        (lambda answer: None, None),
        (lambda answer: answer["plan"]["meshes"][0].update(peak_memory_bytes=40), None),
    ],
)
def test_a_plan_of_another_kind_or_with_more_memory_than_there_is_is_not_taken(change, says):
    found = plan_obstacle(parse_planned_job(planned_answer()), changed(change))
    assert found is None if says is None else says in found


def test_a_plan_that_keeps_other_results_while_it_recomputes_is_not_taken():
    wholly = changed(lambda answer: answer["plan"]["stages"][1].update(recomputed=True))
    selectively = changed(lambda answer: answer["plan"]["stages"][1].update(recomputed=True, selective=True))
    by_block = changed(lambda answer: answer["plan"]["stages"][1].update(recomputed=True, by_block=True))
    said = plan_obstacle(wholly, selectively)
    assert "another recomputation: {1: 'selective'}, and {1: 'whole'} runs" in said
    assert "{1: 'by_block'}" in plan_obstacle(selectively, by_block)
    assert plan_obstacle(selectively, selectively) is None
    for planned, method in ((wholly, "whole"), (selectively, "selective"), (by_block, "by_block")):
        assert all(program.recomputed == {1: method} for program in planned.programs().values())


# The loop over real workers


class Gang(OneLogGang):
    """Every worker has a log of its own."""

    def __init__(self, workers):
        super().__init__(workers, [])
        self.logs = [[] for _ in workers]
        self.workers = [Actor(worker, log) for worker, log in zip(workers, self.logs, strict=True)]
        self.meshes = tuple(
            Mesh(name, tuple(a for a, w in zip(self.workers, workers, strict=True) if w.mesh == name))
            for name in dict.fromkeys(worker.mesh for worker in workers)
        )
        self.addresses = [SimpleNamespace(node=HERE, mesh=worker.mesh) for worker in workers]

    def name(self, index):
        return f"worker {index}"


class News(Heard):
    """What is said of plans too."""

    def __init__(self):
        super().__init__([])
        self.plans = []

    def running_plan(self, since_step, plan):
        self.plans.append((since_step, plan))

    def set_plan(self, *_, **__):
        pass

    set_planned_memory = set_plan


class PromptReplanner(Replanner):
    """Every step waits for an answer, so that a test knows which one is the last before a swap."""

    def observe(self, *given, **named):
        super().observe(*given, **named)
        for thread in threading.enumerate():
            if thread.name == "slotline-replan":
                thread.join(60.0)


class Control:
    """Answers with these plans or errors, one after the other, and then with none."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def replan(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0) if self.answers else {"why": "none"}
        if isinstance(answer, Exception):
            raise answer
        return answer


def offered(answer, promised_s):
    return {"found": answer, "running_s": promised_s, "planned_s": 0.0}


ALWAYS_KEPT, NEVER_KEPT = -1e9, 1e9
"""Promises in seconds, whatever the machine does meanwhile."""


def train(spec, control_of, monkeypatch, *, obstacle=lambda planned: None, policy=None, heard=None):
    """(heard, control, gang) of a run with few steps between questions, from the last checkpoint of `policy` on;
    `control_of` takes the answer of the first plan."""
    values = {"PROFILED_STEPS": 1, "STEPS_BETWEEN_SWAPS": 1, "JUDGED_STEPS": 2, "BACK_OFF": 2 * STEPS}
    for name, value in values.items():
        monkeypatch.setattr(planning, name, value)
    with Workers(spec) as run:
        gang, heard = Gang(run.workers), heard or News()
        planned, control = parse_planned_job(run.planned), control_of(run.planned)
        replanner = PromptReplanner(
            planned, run.planned, gang=gang, control=control, reporter=heard, metrics=heard, obstacle=obstacle
        )
        checkpoints = Checkpoints(policy, "job", gang=gang, reporter=heard, limit_s=60.0)
        try:
            StepLoop(
                planned,
                samples=8,
                gang=gang,
                checkpoints=checkpoints,
                evaluations=Evaluations(None, gang=gang, reporter=heard, metrics=heard),
                data_end=DataEnd(Job.from_json(spec), gang=gang),
                publisher=StepPublisher(heard, heard, profile_every_s=0.0, step_log=StepLog(5)),
                interruption=Interruption(),
                replanner=replanner,
            ).run(checkpoints.restore(None) + 1, STEPS)
        finally:
            for actor in gang.workers:
                actor._queue.shutdown(wait=True, cancel_futures=True)
    return heard, control, gang


def losses(heard):
    return [step["loss"] for step in heard.steps]


def layout(**training):
    """A job whose cut does not depend on what the machine does while its layers are measured."""
    given = job(workers_per_mesh=2)
    given["pipeline"]["cut"] = ["embed", "blocks.2"]
    return given | {"training": {**given["training"], "microbatches": 4, **training}}


@functools.cache
def plain_losses():
    return plain(layout(), range(1, STEPS + 1))[0]


def events(heard, kind):
    return [message for found, message in heard.events if found == kind]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[2, 2], [2, 1]], ids=["meshes alike", "meshes of unlike sizes"])
def test_all_workers_swap_before_the_same_step_and_losses_are_those_of_the_plain_loop(workers, monkeypatch):
    spec = layout() | {"resources": {"meshes": 2, "workers_per_mesh": 2, "workers": workers}}
    undisturbed, *_ = train(spec, lambda answer: Control(), monkeypatch)
    heard, control, gang = train(
        spec, lambda answer: Control(offered(poor_answer(answer), ALWAYS_KEPT)), monkeypatch
    )
    (message,) = events(heard, "plan_swapped")
    ((since_step, plan),) = heard.plans
    assert f"from step {since_step} on" in message and "to the bit" in message
    assert 2 < since_step < STEPS and control.asked[0]["since_step"] is None
    assert control.asked[-1]["since_step"] == since_step and control.asked[0]["seconds_left"] > 0
    for log in gang.logs:
        swap = log.index(next(entry for entry in log if entry[0] == "end swap_program"))
        assert log.index(("end run_step", since_step - 1)) < swap < log.index(("ask run_step", since_step))
    assert losses(heard) == losses(undisturbed)
    assert losses(heard) == pytest.approx(plain_losses(), rel=1e-5)
    ran = [
        slot for slot in heard.timelines[-1]["slots"] if slot["mesh"] == "m0" and slot["lane"] == "compute"
    ]
    wanted = [slot for slot in plan["plan"]["slots"] if slot["mesh"] == "m0" and slot["lane"] == "compute"]
    orders = [
        [
            (s["action"], s["microbatch"])
            for s in sorted(slots, key=lambda s: s["start_s"])
            if s["action"] in "FB"
        ]
        for slots in (ran, wanted)
    ]
    assert orders[0] == orders[1], "the workers run what was swapped in"


@pytest.mark.slow
def test_a_swap_that_brings_too_little_is_undone_and_said_so_and_losses_stay(monkeypatch):
    spec = layout()
    heard, control, _ = train(
        spec, lambda answer: Control(offered(poor_answer(answer), NEVER_KEPT)), monkeypatch
    )
    ((first, _), (second, plan)) = heard.plans
    (message,) = events(heard, "plan_undone")
    assert f"from step {second} on the plan before runs again" in message and second > first
    assert plan["plan"]["chosen"] == "1f1b" and len(control.asked) == 1, "nothing is tried again so soon"
    assert losses(heard) == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["a worker cannot prepare", "another cut", "no room for copies"])
def test_a_plan_that_is_refused_leaves_the_running_one_and_is_told(why, monkeypatch):
    spec = layout()

    def control_of(answer):
        poor = poor_answer(answer)
        if why == "another cut":
            poor["begins"] = [*poor["begins"][:-1], "elsewhere"]
        return Control(offered(poor, ALWAYS_KEPT))

    if why == "a worker cannot prepare":
        prepare = Engine.prepare_program

        def fails(engine, program):
            if (engine._mesh, engine._worker) == ("m1", 1):
                raise MemoryError("no room for buffers")
            return prepare(engine, program)

        monkeypatch.setattr(Engine, "prepare_program", fails)
    obstacle = (
        (lambda planned: "no room for copies of the state") if why == "no room for copies" else lambda _: None
    )
    heard, control, gang = train(spec, control_of, monkeypatch, obstacle=obstacle)
    assert len(control.asked) == 1, "it would be refused again, and is not asked for in these few steps"
    (message,) = events(heard, "plan_kept")
    wanted = {"a worker cannot prepare": "worker 3: MemoryError: no room", "another cut": "another cut"}
    assert wanted.get(why, "no room for copies of the state") in message
    assert heard.plans == [] and events(heard, "plan_swapped") == []
    told = [{what for what, _ in log} for log in gang.logs]
    assert not any("ask swap_program" in log for log in told)
    assert all(("end drop_program" in log) == (why == "a worker cannot prepare") for log in told)
    assert losses(heard) == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("error", [httpx.ConnectError("away"), Refused(404, "no such route")])
def test_a_control_plane_that_gives_no_plan_is_asked_again_and_training_goes_on(error, monkeypatch):
    heard, control, _ = train(layout(), lambda answer: Control(error), monkeypatch)
    assert len(control.asked) > 1 and len(heard.steps) == STEPS and heard.plans == []


@pytest.mark.slow
def test_an_attempt_that_loses_a_worker_in_the_middle_of_a_swap_ends_by_that_and_the_next_has_the_plain_losses(
    monkeypatch, tmp_path
):
    """A worker has swapped, another waits for the one that is gone: no step is run by programs that do not fit."""
    swap, asked = Engine.swap_program, []

    def half_of_it(engine):
        if engine._mesh == "m1":
            engine.abort("its process is gone")
            raise AttemptFailure(Reason.WORKER_LOST, "its process is gone")
        if engine._worker == 1:
            raise AttemptFailure(Reason.SLOT_STALLED, "nothing comes from mesh m1")
        swap(engine)

    ask = Gang.ask

    def watched(gang, method, *arguments, **named):
        asked.append(method)
        return ask(gang, method, *arguments, **named)

    policy, before = CheckpointPolicy(str(tmp_path), every_steps=2), News()
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "swap_program", half_of_it)
        patched.setattr(Gang, "ask", watched)
        with pytest.raises(AttemptFailure, match="its process is gone") as ended:
            train(
                layout(),
                lambda answer: Control(offered(poor_answer(answer), ALWAYS_KEPT)),
                monkeypatch,
                policy=policy,
                heard=before,
            )
    assert ended.value.reason is Reason.WORKER_LOST
    assert asked[-2:] == ["prepare_program", "swap_program"]
    assert before.plans == [] and events(before, "plan_swapped") == [], "no plan that nobody runs is told"
    saved = [step for what, step in before.log if what == "saved"][-1]
    assert 2 <= saved <= len(before.steps) < STEPS
    after, *_ = train(layout(), lambda answer: Control(), monkeypatch, policy=policy)
    assert [step["step"] for step in after.steps] == list(range(saved + 1, STEPS + 1))
    assert losses(before) == pytest.approx(plain_losses()[: len(before.steps)], rel=1e-5)
    assert losses(after) == pytest.approx(plain_losses()[saved:], rel=1e-5)
