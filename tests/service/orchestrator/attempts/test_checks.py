"""Queued jobs are checked before their first attempt: what is wrong ends them before they take an accelerator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from service.orchestrator.attempts import checks
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.loop import Orchestrator
from service.orchestrator.ray.jobs_api import RayNode, ResourceUse
from service.orchestrator.tasks import runner
from service.orchestrator.tasks.check import CheckTask
from service.orchestrator.tasks.runner import TaskRunner
from service.spec.states import AttemptState, CheckState, JobState, NodeMark, NodeState
from service.store.database import Database, utc_now
from service.store.events import events_of
from service.store.jobs import retry_job
from service.store.node_states import set_node_mark
from service.store.tables import Base
from service.store.transitions import lock_job
from tests.polling import until_async
from tests.service.orchestrator.test_loop import World
from worker.contract.codec import to_json
from worker.contract.job import placement_group_name
from worker.contract.reasons import Reason
from worker.contract.tasks import (
    CHECK_REQUEST_VARIABLE,
    CHECK_RESULT_MARK,
    JobCheck,
    JobProblem,
    read_check_result,
)

PASSED = JobCheck(checked=("model: GPT with 12 parameters", "loss: torch.nn.functional:cross_entropy"))
RAISED = JobProblem("data", "KeyError: 3", "DATA_FAILED", details='File "own.py", line 2')
TYPO = JobCheck(problems=(JobProblem("model.factory", "there is no module 'gtp'", "MODEL_BUILD_FAILED"),))


def gang(meshes: int, factory: str) -> dict[str, Any]:
    """The fields of a job that wants so many meshes for a model of its own."""
    return {
        "model": {"factory": factory},
        "pipeline": {"stages": meshes},
        "resources": {"meshes": meshes, "device": "cpu"},
    }


class CheckedWorld(World):
    """A world whose orchestrator has jobs checked; a test says what the processes find."""

    def restart(self) -> None:
        super().restart()
        self.runner = TaskRunner(self.database, self.clusters, CheckTask(self.database))
        backoff, limits = self.orchestrator.attempts.backoff, self.orchestrator.attempts.limits
        self.orchestrator = Orchestrator(self.settings, self.database, self.clusters, self.runner)
        self.orchestrator.attempts.backoff, self.orchestrator.attempts.limits = backoff, limits

    @property
    def checks(self) -> list[str]:
        """Ids of the Ray jobs that are checks, in the order of their submission."""
        return [job_id for job_id in self.cluster.submissions if job_id.startswith("check-")]

    def checked_name(self, check: str) -> str:
        request = json.loads(self.cluster.submissions[check].env[CHECK_REQUEST_VARIABLE])
        return request["job"]["name"]

    async def until_checks(self, number: int) -> None:
        """Rounds until `number` checks were begun in all."""

        async def begun() -> bool:
            await self.rounds()
            return len(self.checks) >= number

        if len(self.checks) < number:
            await until_async(begun, "checks to begin")

    async def answer(self, check: str, result: JobCheck) -> None:
        """The process of a check ends with `result`, and the orchestrator reads it."""
        self.cluster.logs[check] = f"noise\n{CHECK_RESULT_MARK}{json.dumps(to_json(result))}\n"
        await self.end(check, RayJob(RayState.SUCCEEDED))

    async def end(self, check: str, state: RayJob) -> None:
        self.cluster.states[check] = state
        await until_async(lambda: check in self.cluster.stopped, f"{check} to be stopped")
        await until_async(lambda: len(self.runner._runs) <= len(self.open_checks), "its answer to be read")
        await self.rounds(3)

    @property
    def open_checks(self) -> list[str]:
        return [check for check in self.checks if check not in self.cluster.stopped]

    async def messages(self, job_id: str, kind: str) -> list[str]:
        async with self.database.read() as session:
            return [event.message for event in await events_of(session, job_id) if event.kind == kind]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CheckedWorld]:
    monkeypatch.setattr(runner, "TASK_POLL_S", 0.005)
    monkeypatch.setattr(runner, "TASK_LOG_SETTLES_S", 0.02)
    monkeypatch.setattr("service.orchestrator.attempts.watch._STOP_EVERY_S", 0.0)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    database = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    world = CheckedWorld(database)
    yield world
    await world.runner.close()
    await database.close()


async def test_a_wrong_job_ends_while_another_holds_every_accelerator(world: CheckedWorld):
    running = await world.submit(name="runs")
    await world.until_checks(1)
    assert (await world.job(running)).reason == Reason.CHECKING, "free accelerators wait for the answer"
    await world.answer(world.checks[0], PASSED)
    await world.report(f"{running}-1", 1, state=AttemptState.RUNNING)
    wrong = await world.submit(name="wrong", model={"factory": "gtp:build"})
    await world.until_checks(2)
    await world.answer(world.checks[1], TYPO)
    job = await world.job(wrong)
    assert (job.job_state, job.reason) == (JobState.FAILED, Reason.MODEL_BUILD_FAILED)
    assert job.message == "model.factory: there is no module 'gtp'"
    assert job.attempts_made == 0 and (await world.job(running)).job_state is JobState.RUNNING


async def test_the_end_of_a_check_wakes_the_orchestrator_and_the_job_starts_in_that_round(
    world: CheckedWorld,
):
    job_id = await world.submit()
    await world.until_checks(1)
    check = world.checks[0]
    world.orchestrator._urgent.clear()
    world.cluster.logs[check] = f"{CHECK_RESULT_MARK}{json.dumps(to_json(PASSED))}\n"
    world.cluster.states[check] = RayJob(RayState.SUCCEEDED)
    await asyncio.wait_for(world.orchestrator._urgent.wait(), 30)
    await world.rounds(1)
    assert (await world.job(job_id)).attempts_made == 1


async def test_the_check_of_a_job_that_fits_begins_before_those_that_are_too_large_are_read(
    world: CheckedWorld, monkeypatch: pytest.MonkeyPatch
):
    seen: list[str] = []
    find_job, result = checks.find_job, world.runner.result

    async def find(session: Any, job_id: str) -> Any:
        seen.append(job_id)
        return await find_job(session, job_id)

    async def ask(request: Any, **options: Any) -> Any:
        seen.append(f"run {request.spec['name']}")
        return await result(request, **options)

    monkeypatch.setattr(checks, "find_job", find)
    monkeypatch.setattr(world.runner, "result", ask)
    large = [await world.submit(name=f"large-{n}", **gang(64, f"own:large_{n}")) for n in range(5)]
    fits = await world.submit(name="fits")
    await world.rounds(1)
    assert seen[:2] == [fits, "run fits"]
    assert seen[2] in large


async def test_the_traceback_of_what_a_jobs_code_raised_is_in_its_events(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    await world.answer(world.checks[0], JobCheck(problems=(RAISED, *TYPO.problems)))
    assert (await world.job(job_id)).message == "data: KeyError: 3; model.factory: there is no module 'gtp'"
    assert await world.messages(job_id, "check_traceback") == ['data: File "own.py", line 2']


async def test_a_job_without_problems_starts_and_says_what_was_checked(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    await world.rounds(2)
    assert (await world.job(job_id)).job_state is JobState.QUEUED
    await world.answer(world.checks[0], PASSED)
    job = await world.job(job_id)
    assert (job.job_state, job.check_state) == (JobState.STARTING, CheckState.PASSED)
    (message,) = await world.messages(job_id, "checked")
    assert message.startswith("model: GPT with 12 parameters; loss: torch.nn.functional:cross_entropy in ")
    assert message.endswith(" s")


async def test_a_check_holds_no_accelerator_and_has_the_jobs_code_and_environment(world: CheckedWorld):
    async def nodes() -> list[RayNode]:
        head = RayNode("id-head", "10.0.0.1", {"node:__internal_head__": 1.0, "CPU": 8.0})
        return [head, RayNode("id-x", "10.0.0.2", {"slotline_worker": 4.0})]

    world.cluster.nodes = nodes
    await world.submit(
        code={"working_dir": "https://example.org/code.zip", "pip": ["einops"]}, env={"COLOUR": "blue"}
    )
    await world.until_checks(1)
    check = world.cluster.submissions[world.checks[0]]
    assert check.resources == {} and check.avoid == ("id-head",), "it runs where the workers would"
    assert (check.working_dir, check.pip) == ("https://example.org/code.zip", ("einops",))
    assert (check.env["COLOUR"], check.env["CUDA_VISIBLE_DEVICES"]) == ("blue", "")
    assert check.entrypoint.endswith("-m worker.tasks check")


@pytest.mark.parametrize(
    ("state", "log", "said"),
    [
        (RayJob(RayState.FAILED), "Segmentation fault", "ended without a result (Segmentation fault)"),
        (RayJob(RayState.MISSING), "", "ended without a result"),
    ],
)
async def test_a_check_without_an_answer_leaves_the_job_to_its_driver(
    world: CheckedWorld, state: RayJob, log: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    if state.state is RayState.MISSING:
        monkeypatch.setattr(CheckTask, "limit_s", 0.05)
        state, said = RayJob(RayState.RUNNING), "no answer within 0.05 s"
    job_id = await world.submit()
    await world.until_checks(1)
    world.cluster.logs[world.checks[0]] = log
    await world.end(world.checks[0], state)
    job = await world.job(job_id)
    assert (job.job_state, job.check_state) == (JobState.STARTING, CheckState.UNDECIDED)
    (message,) = await world.messages(job_id, "check")
    assert said in message and "its driver does it" in message


async def test_packages_that_cannot_be_installed_end_the_job(world: CheckedWorld):
    job_id = await world.submit(code={"pip": ["enops"]})
    await world.until_checks(1)
    setup = "runtime_env setup failed: pip:\nERROR: No matching distribution found for enops\n"
    await world.end(world.checks[0], RayJob(RayState.FAILED, setup))
    job = await world.job(job_id)
    assert (job.job_state, job.reason) == (JobState.FAILED, Reason.CODE_SETUP_FAILED)
    assert "No matching distribution found for enops" in job.message


async def test_equal_jobs_share_a_check_and_its_answer_holds_for_a_while(
    world: CheckedWorld, monkeypatch: pytest.MonkeyPatch
):
    first, second = await world.submit(name="one"), await world.submit(name="two", priority=3)
    await world.until_checks(1)
    await world.rounds(2)
    await world.answer(world.checks[0], PASSED)
    third = await world.submit(name="three", queue="default")
    await world.rounds(3)
    assert len(world.checks) == 1
    assert [(await world.job(job)).check_state for job in (first, second, third)] == ["PASSED"] * 3
    monkeypatch.setattr(checks, "PASSED_KEPT_S", -1.0)
    await world.submit(model={"factory": "own.models:build"})
    await world.until_checks(2)
    await world.answer(world.checks[1], PASSED)
    await world.submit(model={"factory": "own.models:build"})
    await world.until_checks(3)


async def test_few_checks_run_at_once_and_owners_take_turns(world: CheckedWorld):
    for number in range(6):
        job_id = await world.submit(name=f"a{number}", model={"factory": f"m:f{number}"})
        async with world.database.write() as session:
            (await lock_job(session, job_id)).owner = "alice"
    last = await world.submit(name="b", model={"factory": "m:other"})
    async with world.database.write() as session:
        (await lock_job(session, last)).owner = "bob"
    await world.until_checks(4)
    await world.rounds(3)
    names = [world.checked_name(check) for check in world.checks]
    assert len(names) == CheckTask.concurrency and "b" in names, "one job of another owner comes before many"


async def test_jobs_that_could_start_are_checked_before_those_that_wait_and_those_too_large(
    world: CheckedWorld,
):
    for number in range(2 * CheckTask.concurrency):
        await world.submit(name=f"large{number}", priority=9, **gang(64, f"m:l{number}"))
    holder = await world.submit(name="holder", **gang(3, "m:holder"))
    await world.until_checks(CheckTask.concurrency)
    holders_check = next(check for check in world.checks if world.checked_name(check) == "holder")
    await world.answer(holders_check, PASSED)
    assert (await world.job(holder)).job_state is JobState.STARTING
    await world.report(f"{holder}-1", 1, state=AttemptState.RUNNING)
    world.cluster.others = [ResourceUse(placement_group_name(f"{holder}-1"), {"slotline_worker": 3.0})]
    begun = len(world.checks)
    waits = await world.submit(name="waits", priority=5, **gang(2, "m:waits"))
    await world.submit(name="fits", priority=1, **gang(1, "m:fits"))
    for check in list(world.open_checks):
        await world.answer(check, PASSED)
    await world.until_checks(begun + CheckTask.concurrency)
    names = [world.checked_name(check) for check in world.checks[begun:]]
    assert names[:2] == ["fits", "waits"] and names[2].startswith("large")
    assert (await world.job(waits)).reason == Reason.CHECKING, "it is held: it could start when others end"


async def test_a_job_that_is_too_large_is_told_so_while_it_waits_for_its_check(world: CheckedWorld):
    larges = [await world.submit(**gang(64, f"m:l{number}")) for number in range(CheckTask.concurrency + 1)]
    await world.until_checks(CheckTask.concurrency)
    assert {(await world.job(large)).reason for large in larges} == {Reason.CLUSTER_TOO_SMALL}
    await world.answer(world.checks[0], TYPO)
    assert (await world.job(larges[0])).reason == Reason.MODEL_BUILD_FAILED


async def test_a_job_that_waits_for_a_check_for_too_long_starts_unchecked(world: CheckedWorld):
    for number in range(CheckTask.concurrency):
        await world.submit(priority=5, model={"factory": f"m:f{number}"})
    behind = await world.submit(model={"factory": "m:last"})
    await world.until_checks(CheckTask.concurrency)
    assert (await world.job(behind)).job_state is JobState.QUEUED
    async with world.database.write() as session:
        job = await lock_job(session, behind)
        job.queued_at -= timedelta(seconds=checks.TURN_LIMIT_S)
    await world.rounds(2)
    job = await world.job(behind)
    assert (job.job_state, job.check_state) == (JobState.STARTING, None)


async def test_a_cancelled_job_stays_cancelled_whatever_its_check_finds(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    await world.cancel(job_id)
    await world.answer(world.checks[0], TYPO)
    job = await world.job(job_id)
    assert (job.job_state, job.reason) == (JobState.CANCELLED, Reason.CANCELLED_BY_USER)
    assert job.check_state is None


async def test_a_control_plane_that_ends_in_the_middle_leaves_the_check_to_the_next(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    await world.runner.close()
    await world.orchestrator.lease.release()
    world.restart()
    await world.until_checks(2)
    assert (await world.job(job_id)).job_state is JobState.QUEUED
    await world.answer(world.checks[1], TYPO)
    assert (await world.job(job_id)).job_state is JobState.FAILED


async def test_an_answer_is_read_by_whichever_control_plane_has_the_lease(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    first = world.runner
    await world.orchestrator.lease.release()
    world.restart()
    await world.rounds(2)
    assert len(world.checks) == 1, "it runs, in the other control plane"
    world.runner, second = first, world.runner
    await world.answer(world.checks[0], TYPO)
    world.runner = second
    await world.rounds(2)
    assert (await world.job(job_id)).job_state is JobState.FAILED
    await first.close()


async def test_jobs_of_a_cluster_that_is_away_or_takes_no_work_are_not_checked(world: CheckedWorld):
    world.cluster.away = True
    job_id = await world.submit()
    await world.rounds(3)
    assert (await world.job(job_id)).reason == Reason.WAITS_FOR_CLUSTER
    world.cluster.away = False
    mark = NodeMark("default", "node-1", NodeState.EXCLUDED, "test", utc_now(), "for a test")
    async with world.database.write() as session:
        await set_node_mark(session, mark)
    await world.rounds(3)
    assert (await world.job(job_id)).reason == Reason.WAITS_FOR_ACCELERATORS and not world.checks


async def test_a_job_with_secrets_is_left_to_its_driver(world: CheckedWorld):
    job_id = await world.submit(secrets=["HF_TOKEN"])
    await world.rounds(3)
    assert (await world.job(job_id)).check_state == CheckState.UNDECIDED and not world.checks
    (message,) = await world.messages(job_id, "check")
    assert "HF_TOKEN" in message


async def test_a_retried_job_is_checked_again(world: CheckedWorld):
    job_id = await world.submit()
    await world.until_checks(1)
    await world.answer(world.checks[0], TYPO)
    async with world.database.write() as session:
        await retry_job(session, job_id, at=utc_now())
    await world.until_checks(2)
    await world.answer(world.checks[1], PASSED)
    assert (await world.job(job_id)).job_state is JobState.STARTING


def test_the_last_whole_result_of_a_process_is_read():
    text = f"{CHECK_RESULT_MARK}{json.dumps(to_json(TYPO))}\n{CHECK_RESULT_MARK}{{"
    assert read_check_result(text) == TYPO and read_check_result("nothing") is None
