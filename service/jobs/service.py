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
        self.shared_reads = SharedReads(commits=lambda: self.database.commits)

    @property
    def cluster(self) -> ClusterWatcher:
        """The watcher of the cluster named default."""
        return self.clusters.of(DEFAULT_CLUSTER).watcher


class SharedReads:
    """Makes an answer once for all who ask while another of its kind is made.

    Nobody gets one that was begun before they asked, so each has what was committed by then; and however many ask, one of
    a kind is made at a time. An answer may be kept for a while, as long as this process commits nothing (`commits` counts).
    """

    def __init__(
        self, *, commits: Callable[[], int] = lambda: 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._commits, self._clock = commits, clock
        self._making: dict[str, asyncio.Task[Any]] = {}
        self._next: dict[str, asyncio.Task[Any]] = {}
        self._kept: dict[str, tuple[int, float, Any]] = {}

    async def read(
        self, kind: str, make: Callable[[], Coroutine[Any, Any, Answer]], *, keep_s: float = 0.0
    ) -> Answer:
        """The answer of `make`, or of a `make` of the same kind that begins from now on; or one that was begun `keep_s` ago
        or later, with no commit since."""
        if (kept := self._kept.get(kind)) is not None:
            commits, begun_at, answer = kept
            if commits == self._commits() and self._clock() - begun_at < keep_s:
                return answer
        if (task := self._next.get(kind)) is None:
            if (before := self._making.get(kind)) is None:
                task = self._making[kind] = asyncio.create_task(self._make(kind, make))
            else:
                task = self._next[kind] = asyncio.create_task(self._make(kind, make, behind=before))
            task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)  # others wait for it too

    async def _make(
        self,
        kind: str,
        make: Callable[[], Coroutine[Any, Any, Answer]],
        *,
        behind: asyncio.Task[Any] | None = None,
    ) -> Answer:
        if behind is not None:
            await asyncio.wait([behind])
            self._making[kind] = self._next.pop(kind)
        commits, begun_at = self._commits(), self._clock()
        try:
            answer = await make()
            self._kept[kind] = commits, begun_at, answer
            return answer
        finally:
            del self._making[kind]


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
