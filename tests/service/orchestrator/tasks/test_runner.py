"""Runs of processes that share a database, on SQLite as on PostgreSQL: begun once, told once, by whichever is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from sqlalchemy import select, text, update

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.planning.pool import PlannerBusyError
from service.orchestrator.ray.clusters import Clusters, NamedCluster, build_clusters
from service.orchestrator.ray.jobs_api import RayJobSubmission, RayNode
from service.orchestrator.tasks import runner
from service.orchestrator.tasks.artifacts import ExportTask
from service.orchestrator.tasks.runner import Task, TaskRunner, TaskState
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import NodeMark, NodeState
from service.store.database import Database, run_to_completion, utc_now
from service.store.jobs import NewJob, create_jobs
from service.store.leases import delete_old_tasks
from service.store.node_states import set_node_mark
from service.store.tables import TaskRow
from tests.polling import until_async
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster
from worker.contract.tasks import ExportRequest


class Work:
    """Goes on until it is told its answer."""

    def __init__(self) -> None:
        self.begun = self.cancelled = 0
        self.answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> str | None:
        self.begun += 1
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


Request = tuple[str, Callable[[], Awaitable[str | None]]]
"""The key of a request, and what its run does."""


class WorkTask(Task[Request, str]):
    """Does the work of its request, in no cluster."""

    name, concurrency, queue_limit, error = "test", 1, 1, RuntimeError

    def key(self, request: Request, cluster: str) -> str:
        return request[0]

    async def perform(self, request: Request, cluster: NamedCluster) -> str | None:
        return await request[1]()

    def read_result(self, text: str) -> str:
        return text

    def busy_message(self, runs: int) -> str:
        return f"{runs} go on"

    def timeout_message(self, began: bool) -> str:
        raise NotImplementedError

    def no_result_message(self, detail: str) -> str:
        raise NotImplementedError


@pytest.fixture
async def pair(database: Database, database_url: str) -> AsyncIterator[tuple[TaskRunner, TaskRunner]]:
    other = Database(database_url)
    runs = [TaskRunner(one, Clusters([]), WorkTask(one)) for one in (database, other)]
    yield runs[0], runs[1]
    for one in runs:
        await one.close()
    await other.close()


@pytest.fixture
async def work() -> Work:
    return Work()


async def silenced(database: Database) -> None:
    """As if nobody had heard of any run for long."""
    async with database.write() as session:
        await session.execute(update(TaskRow).values(beat_at=0.0))


async def rows(database: Database) -> list[TaskRow]:
    async with database.read() as session:
        return list((await session.execute(select(TaskRow))).scalars())


async def test_whoever_is_asked_it_is_begun_once_and_told_once(pair, work: Work):
    first, second = pair
    asked = await asyncio.gather(
        *(one.result(("x", work), cluster="here") for one in (first, second, first, second))
    )
    assert asked == [TaskState.RUNNING] * 4
    await until_async(lambda: work.begun)
    work.answer.set_result("found")
    await until_async(lambda: not first._runs and not second._runs)
    assert await second.result(("x", work), cluster="here") == "found" and work.begun == 1
    work.answer = asyncio.get_running_loop().create_future()
    assert await first.result(("x", work), cluster="here") is TaskState.RUNNING, "told once: it begins again"
    await until_async(lambda: work.begun == 2)


async def test_why_there_is_no_answer_is_told_by_the_other_too(pair, work: Work):
    first, second = pair
    await first.result(("x", work), cluster="here")
    work.answer.set_exception(ValueError("no such model"))
    await until_async(lambda: not first._runs)
    with pytest.raises(RuntimeError, match="no such model"):
        await second.result(("x", work), cluster="here")
    assert await second.result(("x", Work()), cluster="here") is TaskState.RUNNING


async def test_an_answer_of_none_leaves_nothing_behind(pair, work: Work, database: Database):
    first, _second = pair
    await first.result(("x", work), cluster="here")
    work.answer.set_result(None)
    await until_async(lambda: not first._runs)
    assert await rows(database) == []


async def test_the_run_of_a_process_that_died_is_begun_by_who_is_asked_next(
    pair, work: Work, database: Database
):
    first, second = pair
    await first.result(("x", work), cluster="here")
    await until_async(lambda: work.begun)
    assert await second.result(("x", work), cluster="here") is TaskState.RUNNING and work.begun == 1
    await silenced(database)
    again = Work()
    assert await second.result(("x", again), cluster="here") is TaskState.RUNNING
    await until_async(lambda: again.begun)
    work.answer.set_result("of one that was given up")
    await until_async(lambda: not first._runs)
    assert await second.result(("x", again), cluster="here") is TaskState.RUNNING, (
        "nobody hears the first any more"
    )
    again.answer.set_result("of who has it")
    await until_async(lambda: not second._runs)
    assert await first.result(("x", work), cluster="here") == "of who has it"


async def test_one_that_was_frozen_ends_the_run_that_another_has_taken(
    pair, work: Work, database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "TASK_RENEWAL_S", 0.05)
    first, second = pair
    await first.result(("x", work), cluster="here")
    await until_async(lambda: work.begun)
    renewing, first._renewing = first._renewing, None
    renewing.cancel()
    await silenced(database)
    await second.result(("x", again := Work()), cluster="here")
    first._renewing = asyncio.create_task(first._renew_for_ever())
    await until_async(lambda: work.cancelled)
    await until_async(lambda: not first._runs)
    assert again.begun == 1 and not again.cancelled and len(await rows(database)) == 1


async def test_a_process_that_ends_leaves_its_runs_to_others_at_once(pair, work: Work):
    first, second = pair
    await first.result(("x", work), cluster="here")
    await until_async(lambda: work.begun)
    await first.close()
    assert work.cancelled == 1
    await second.result(("x", work), cluster="here")
    await until_async(lambda: work.begun == 2)


async def test_few_go_on_at_once_few_wait_and_what_has_ended_is_told_all_the_same(pair, work: Work):
    first, second = pair
    await second.result(("of the other", other := Work()), cluster="here")
    other.answer.set_result("there")
    await until_async(lambda: not second._runs)
    waiting = Work()
    await first.result(("x", work), cluster="here")
    await first.result(("y", waiting), cluster="here")
    await until_async(lambda: work.begun)
    with pytest.raises(PlannerBusyError, match="2 go on"):
        await first.result(("z", work), cluster="here")
    assert await first.result(("of the other", other), cluster="here") == "there"
    elsewhere = Work()
    assert await first.result(("x", elsewhere), cluster="there") is TaskState.RUNNING
    await until_async(lambda: elsewhere.begun)
    assert not waiting.begun, "another place has turns of its own"
    work.answer.set_result("x")
    await until_async(lambda: waiting.begun)


async def test_what_nobody_asks_for_is_forgotten(pair, work: Work, database: Database):
    first, _ = pair
    await first.result(("x", work), cluster="here")
    work.answer.set_result("found")
    await until_async(lambda: not first._runs)
    async with database.write() as session:
        await delete_old_tasks(session)
    assert len(await rows(database)) == 1
    await silenced(database)
    async with database.write() as session:
        await delete_old_tasks(session)
    assert await rows(database) == []


async def test_two_replicas_that_are_asked_for_the_same_weights_write_them_once(
    database: Database, database_url: str, tmp_path
):
    settings, cluster, other = Settings(data_dir=tmp_path), FakeCluster(), Database(database_url)
    clusters = build_clusters(settings, {DEFAULT_CLUSTER: cluster}, refresh_s=600)
    replicas = [TaskRunner(one, clusters, ExportTask(one)) for one in (database, other)]
    async with database.write() as session:
        (job,) = await create_jobs(session, [NewJob(JobSpec.model_validate(job_body()), utc_now())])
    request = ExportRequest("/runs", job.id)
    for _ in range(3):
        for replica in replicas:
            assert await replica.result(request) is TaskState.RUNNING
    await until_async(lambda: cluster.submissions)
    for replica in replicas:  # every replica has looked again after that
        assert await replica.result(request) is TaskState.RUNNING
    assert len(cluster.submissions) == 1
    for replica in replicas:
        await replica.close()
    await other.close()


class ThreeNodes(FakeCluster):
    """A head without accelerators, and two nodes with them; a driver has ended as soon as it is there."""

    async def submit(self, submission: RayJobSubmission) -> None:
        await super().submit(submission)
        self.states[submission.id] = RayJob(RayState.SUCCEEDED)

    async def nodes(self) -> list[RayNode]:
        head = RayNode("id-head", "10.0.0.1", {"node:__internal_head__": 1.0}, host="head")
        return [
            head,
            *(RayNode(f"id-{n}", f"10.0.0.{n}", {"slotline_worker": 1.0}, host=n) for n in ("x", "y")),
        ]


@pytest.mark.parametrize(
    ("marked", "resources", "avoided"),
    [
        ({}, {"slotline_worker": 1}, ()),
        ({"x": NodeState.EXCLUDED}, {"slotline_worker": 1}, ("id-x",)),
        ({"x": NodeState.DRAINING, "y": NodeState.QUARANTINED}, {"slotline_worker": 1}, ("id-x", "id-y")),
        ({"x": NodeState.READY}, {"slotline_worker": 1}, ()),
        ({"x": NodeState.EXCLUDED}, {}, ()),  # runs on the head, as Ray has it where no label is asked for
        ({"x": NodeState.EXCLUDED, "head": NodeState.EXCLUDED}, {}, ("id-head", "id-x")),
    ],
)
async def test_a_task_lands_on_no_node_that_takes_no_work(
    database: Database, tmp_path, marked: dict[str, NodeState], resources: dict[str, float], avoided
):
    ray = ThreeNodes()
    clusters = build_clusters(Settings(data_dir=tmp_path), {DEFAULT_CLUSTER: ray}, refresh_s=600)
    await clusters.refresh()
    async with database.write() as session:
        for name, state in marked.items():
            mark = NodeMark(DEFAULT_CLUSTER, name, state, "test", utc_now(), "for a test")
            await set_node_mark(session, mark)
    cluster, task = clusters.of(DEFAULT_CLUSTER), ExportTask(database)
    submission = replace(task.submission(cluster, {}), resources=resources)
    ray.logs[submission.id] = "answer"
    assert await task.run_in_ray(cluster, submission, lambda log: log.strip() or None) == "answer"
    assert ray.submissions[submission.id].avoid == avoided


async def test_a_process_that_ends_in_the_middle_of_a_query_keeps_nobody_waiting(database: Database, pair):
    """Cut off there, SQLite would keep its lock, and the end of the run would wait for it for half a minute."""
    runs, running, cancelled = pair[0], asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def in_the_middle() -> int:
        """Called by SQLite inside the query, in the thread of its connection."""
        loop.call_soon_threadsafe(running.set)
        return int(cancelled.wait(60))

    async def work() -> None:
        await run_to_completion(write())

    async def write() -> None:
        async with database.write() as session:
            await session.execute(update(TaskRow).values(beat_at=TaskRow.beat_at))
            if not database.is_sqlite:
                running.set()
                await session.execute(text("SELECT pg_sleep(0.2)"))
                return
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.create_function("in_the_middle", 0, in_the_middle)
            await session.execute(text("SELECT in_the_middle()"))

    await runs.result(("x", work), cluster="here")
    async with asyncio.timeout(60):
        await running.wait()
    ending = asyncio.create_task(runs.close())
    await asyncio.sleep(0.05)  # whatever a cancelled task does, it has done
    cancelled.set()
    async with asyncio.timeout(20):
        await ending
    assert await rows(database) == []


async def test_a_process_that_ray_does_not_start_is_given_up_early_with_what_ray_says():
    cluster = FakeCluster()
    submission = RayJobSubmission("check-1", "python", {}, {})

    async def submit(_: RayJobSubmission) -> None:
        cluster.states["check-1"] = RayJob(RayState.PENDING, "Job has not started yet.\nmore")

    cluster.submit = submit
    with pytest.raises(runner.TaskTimeoutError) as ended:
        await runner.run_ray_task(cluster, submission, lambda log: log, limit_s=100, start_limit_s=0)
    assert (ended.value.began, ended.value.said) == (False, "PENDING: Job has not started yet.")
    assert cluster.stopped == ["check-1"]
