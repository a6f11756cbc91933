"""The parts of a running control plane that rules and routes work with, and the feed of job versions that streams share.

`JobFeed` polls the store once for all streams that follow jobs, and only while a stream waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic_core import from_json, to_json

from service.orchestrator.attempts.outcome import Backoff
from service.orchestrator.planning.pool import PlannerPool
from service.orchestrator.ray.clusters import Clusters, ClusterWatcher
from service.orchestrator.ray.driver_logs import LogReader
from service.orchestrator.tasks.artifacts import FolderRemoval
from service.orchestrator.tasks.profile import MeasuredCosts, ProfileRequest
from service.orchestrator.tasks.runner import TaskRunner
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.spec.principals import Principal
from service.store.database import Database
from service.store.events import JobVersion, events_of, job_versions
from service.store.jobs import SubmissionBatcher
from service.store.tables import EventRow
from worker.contract.tasks import ExportRequest, RemovalResult

Answer = TypeVar("Answer")
MakeAnswer = Callable[[], Coroutine[Any, Any, Answer]]
RunWork = Callable[[Coroutine[Any, Any, str]], Coroutine[Any, Any, str]]
"""Awaits a plan or an analysis, and may cancel it: routes do so when their caller disconnects."""


class IdentityVerifier(Protocol):
    """Maps the token of an identity provider to the principal that it was issued to."""

    async def principal(self, token: str) -> Principal: ...


@dataclass
class Service:
    """Parts of the control plane in this process, where the orchestrator may run or not.

    `wake` tells the orchestrator that a job changed. `problem` is the reason why it does not go on, `lag_s` the time since
    its last round (None: it runs elsewhere), `leads` is true while it has the lease.
    """

    settings: Settings
    database: Database
    planner: PlannerPool
    profiler: TaskRunner[ProfileRequest, MeasuredCosts]
    exporter: TaskRunner[ExportRequest, Mapping[str, Any]]
    remover: TaskRunner[FolderRemoval, RemovalResult]
    clusters: Clusters
    logs: LogReader
    wake: Callable[[], None]
    backoff: Backoff = field(default_factory=Backoff)
    problem: Callable[[], str | None] = lambda: None
    identity: IdentityVerifier | None = None
    lag_s: Callable[[], float | None] = lambda: None
    leads: Callable[[], bool] = lambda: False
    submissions: SubmissionBatcher = field(init=False)
    feed: JobFeed = field(init=False)
    shared_reads: SharedReads = field(init=False)

    def __post_init__(self) -> None:
        self.submissions = SubmissionBatcher(self.database)
        self.feed = JobFeed(self.database)
        self.shared_reads = SharedReads(changes=lambda: self.database.changes)

    @property
    def cluster(self) -> ClusterWatcher:
        """The watcher of the cluster named default."""
        return self.clusters.of(DEFAULT_CLUSTER).watcher


class SharedReads:
    """Makes an answer once for all who ask, and anew every while as long as somebody goes on asking, so that they need not
    wait for it.

    Nobody gets an answer that was begun before the last change that they may know of (`changes` counts them, as
    Database.changes does), and one of a kind is made at a time.
    """

    def __init__(
        self,
        *,
        changes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
    ) -> None:
        self._changes, self._clock, self._sleep = changes, clock, sleep
        self._answers: dict[str, _SharedAnswer] = {}

    async def read(self, kind: str, make: MakeAnswer[Answer], *, every_s: float) -> Answer:
        """The answer of `make`, or the last one of the same kind, begun at most about `every_s` ago."""
        if (shared := self._answers.get(kind)) is None:
            shared = _SharedAnswer(make, every_s, self._changes, self._clock, self._sleep)
            self._answers[kind] = shared
        return await shared.read()

    async def close(self) -> None:
        """End what is being made."""
        tasks = [task for shared in self._answers.values() for task in shared.tasks]
        self._answers.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


_ASKED_WITHIN_S = 40.0
"""An answer for which nobody has asked for so long is not made anew: two scrapes of Prometheus, and a little."""
_OLDEST_FACTOR = 4.0
"""An answer that is older than so many times `every_s` is not given."""
_MAKING_REST_FACTOR = 10.0
"""An answer that takes long is made anew after so many times what it takes."""


class _SharedAnswer:
    """The answers of one kind: the last one, with the number of changes and the time at which it was begun."""

    def __init__(
        self,
        make: MakeAnswer[Any],
        every_s: float,
        changes: Callable[[], int],
        clock: Callable[[], float],
        sleep: Callable[[float], Coroutine[Any, Any, None]],
    ) -> None:
        self._make, self._every_s = make, every_s
        self._changes, self._clock, self._sleep = changes, clock, sleep
        self._last: tuple[int, float, Any] | None = None
        self._making: asyncio.Task[Any] | None = None
        self._making_since = 0
        self._repeating: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in (self._making, self._repeating) if task is not None]

    async def read(self) -> Any:
        self._asked_at, wanted = self._clock(), self._changes()
        if self._repeating is None or self._repeating.done():
            self._repeating = asyncio.create_task(self._repeat())
        if self._last is not None:
            since, begun_at, answer = self._last
            if since >= wanted and self._asked_at - begun_at < _OLDEST_FACTOR * self._every_s:
                return answer
        making = self._begin()
        while self._making_since < wanted:
            await asyncio.wait([making])
            making = self._begin()
        return await asyncio.shield(making)  # others wait for it too

    def _begin(self) -> asyncio.Task[Any]:
        """The answer that is being made, or that begins now."""
        if self._making is None or self._making.done():
            self._making_since = self._changes()
            self._making = asyncio.create_task(self._make_answer())
            self._making.add_done_callback(_retrieve_exception)
        return self._making

    async def _make_answer(self) -> Any:
        since, begun_at = self._making_since, self._clock()
        answer = await self._make()
        self._last = since, begun_at, answer
        return answer

    async def _repeat(self) -> None:
        while (begun_at := self._clock()) - self._asked_at < _ASKED_WITHIN_S:
            await asyncio.wait([self._begin()])
            await self._sleep(max(self._every_s, _MAKING_REST_FACTOR * (self._clock() - begun_at)))


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Mark an exception as retrieved: all who waited for the task may have gone."""
    if not task.cancelled():
        task.exception()


class JobFeed:
    """Shares reads of job versions and events between streams; polls only while a stream waits for the next version."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asked: dict[str, asyncio.Future[JobVersion | None]] = {}
        self._polling: asyncio.Task[None] | None = None
        self._polls: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks weakly
        self._reading: dict[tuple[str, int], asyncio.Task[Sequence[EventRow]]] = {}

    async def now(self, job_id: str) -> JobVersion | None:
        """The job's version at this moment; None: no such job."""
        async with self._database.read() as session:
            return (await job_versions(session, [job_id])).get(job_id)

    async def next(self, job_id: str, *, within_s: float) -> JobVersion | None:
        """The job's version at the next poll, `within_s` from now or earlier, where another stream waited already."""
        if (asked := self._asked.get(job_id)) is None:
            asked = self._asked[job_id] = asyncio.get_running_loop().create_future()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(within_s))
            self._polls.add(self._polling)
            self._polling.add_done_callback(self._polls.discard)
        return await asyncio.shield(asked)  # others wait for it too

    async def events(self, job_id: str, *, after: int) -> Sequence[EventRow]:
        """The job's events behind `after`, read once for all streams that ask for the same at the same time.

        With a read of its own for each, the streams of one job would take every connection at once.
        """
        key = (job_id, after)
        if (reading := self._reading.get(key)) is None:
            reading = self._reading[key] = asyncio.create_task(self._read(job_id, after))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        return await asyncio.shield(reading)

    async def _read(self, job_id: str, after: int) -> Sequence[EventRow]:
        async with self._database.read() as session:
            return await events_of(session, job_id, after=after)

    async def _poll(self, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            asked, self._asked, self._polling = self._asked, {}, None
        try:
            async with self._database.read() as session:
                versions = await job_versions(session, list(asked))
        except Exception as error:
            for future in asked.values():
                future.set_exception(error)
                future.exception()  # marked as retrieved: the stream that waited may have gone
        else:
            for job_id, future in asked.items():
                future.set_result(versions.get(job_id))


async def with_fields(
    body: str, *, first: Mapping[str, Any] | None = None, last: Mapping[str, Any] | None = None
) -> str:
    """The JSON object `body` with fields before and after its own; in a thread, as plans are megabytes long."""

    def extended() -> str:
        return to_json({**(first or {}), **from_json(body), **(last or {})}).decode()

    return await asyncio.to_thread(extended)
