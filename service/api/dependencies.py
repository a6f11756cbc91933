"""FastAPI dependencies of the routes: the running service, its shared job feed, and helpers for long requests.

`Service` holds the parts of the running process; routes find it on the application. `JobFeed` polls the store once
for all streams that follow jobs, and only while a stream waits. `while_connected` cancels work when its caller
disconnects.
Times in queries are ISO 8601 with a zone, as `format: date-time` says, and nothing else that could be read as one.
A 202 answer carries Retry-After and asks for the same request again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator
from starlette.requests import HTTPConnection

from service.api.errors import ProblemError
from service.api.oidc import IdentityProvider
from service.orchestrator.attempts.outcome import Backoff
from service.orchestrator.planning.pool import Planner
from service.orchestrator.ray.clusters import Clusters, ClusterWatcher
from service.orchestrator.ray.driver_logs import LogReader
from service.orchestrator.tasks.artifacts import FolderRemoval
from service.orchestrator.tasks.profile import MeasuredCosts, ProfileRequest
from service.orchestrator.tasks.runner import TaskRunner
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import Settings
from service.store.database import Database
from service.store.events import JobVersion, events_of, job_versions
from service.store.jobs import SubmissionBatcher
from service.store.tables import Event
from worker.contract.tasks import ExportRequest, RemovalResult

_RETRY_AFTER_S = "1"


def accepted(waiting: BaseModel) -> Response:
    """Says what is under way, and asks for the same request a second later."""
    return Response(
        waiting.model_dump_json(),
        status_code=202,
        media_type="application/json",
        headers={"Retry-After": _RETRY_AFTER_S},
    )


T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the connection ends before it has one."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            raise ProblemError(503, "the caller has gone")  # nobody reads it
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    await request.body()  # it was read already: what comes behind it is the end of the connection
    while (await request.receive())["type"] != "http.disconnect":
        pass


class JobFeed:
    """Looks only while somebody waits for a look."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._asked: dict[str, asyncio.Future[JobVersion | None]] = {}
        self._polling: asyncio.Task[None] | None = None
        self._polls: set[asyncio.Task[None]] = set()  # the loop itself holds its tasks weakly
        self._reading: dict[tuple[str, int], asyncio.Task[Sequence[Event]]] = {}

    async def now(self, job_id: str) -> JobVersion | None:
        """The job at this moment; None: no such job."""
        async with self._database.read() as session:
            return (await job_versions(session, [job_id])).get(job_id)

    async def next(self, job_id: str, *, within_s: float) -> JobVersion | None:
        """The job at the next look, about `within_s` from now or from when somebody else asked for it."""
        if (asked := self._asked.get(job_id)) is None:
            asked = self._asked[job_id] = asyncio.get_running_loop().create_future()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll(within_s))
            self._polls.add(self._polling)
            self._polling.add_done_callback(self._polls.discard)
        return await asyncio.shield(asked)  # others wait for it too

    async def events(self, job_id: str, *, after: int) -> Sequence[Event]:
        """The job's events behind `after`; read once for all that ask for the same at the same time, as all do that
        have seen as much: each with a read of its own would take every connection at once."""
        key = (job_id, after)
        if (reading := self._reading.get(key)) is None:
            reading = self._reading[key] = asyncio.create_task(self._read(job_id, after))
            reading.add_done_callback(lambda _: self._reading.pop(key))
        return await asyncio.shield(reading)

    async def _read(self, job_id: str, after: int) -> Sequence[Event]:
        async with self._database.read() as session:
            return await events_of(session, job_id, after=after)

    async def _poll(self, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
        finally:
            asked, self._asked, self._polling = self._asked, {}, None
        try:
            async with self._database.read() as session:
                found = await job_versions(session, list(asked))
        except Exception as error:
            for one in asked.values():
                one.set_exception(error)
                one.exception()  # who waited may have gone: then nobody has to hear of it
        else:
            for job_id, one in asked.items():
                one.set_result(found.get(job_id))


@dataclass
class Service:
    """What routes work with. `wake` tells the orchestrator that a job changed, if it is in this process;
    `problem` says why that one does not go on, `lag_s` since when it has not come round (None: none runs here), `leads`
    whether it has the lease."""

    settings: Settings
    database: Database
    planner: Planner
    profiler: TaskRunner[ProfileRequest, MeasuredCosts]
    exporter: TaskRunner[ExportRequest, Mapping[str, Any]]
    remover: TaskRunner[FolderRemoval, RemovalResult]
    clusters: Clusters
    logs: LogReader
    wake: Callable[[], None]
    problem: Callable[[], str | None] = lambda: None
    identity: IdentityProvider | None = None
    lag_s: Callable[[], float | None] = lambda: None
    leads: Callable[[], bool] = lambda: False
    submissions: SubmissionBatcher = field(init=False)
    feed: JobFeed = field(init=False)

    def __post_init__(self) -> None:
        self.submissions = SubmissionBatcher(self.database)
        self.feed = JobFeed(self.database)

    @property
    def cluster(self) -> ClusterWatcher:
        """What was last seen of the cluster named default."""
        return self.clusters.of(DEFAULT_CLUSTER).watcher

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.settings.retry_backoff_s, self.settings.retry_backoff_limit_s)


def service_of(app: FastAPI) -> Service:
    """The service behind an application made by `create_app`."""
    return app.state.service


async def _current_service(connection: HTTPConnection) -> Service:  # not async, it would be run in a thread
    return service_of(connection.app)


CurrentService = Annotated[Service, Depends(_current_service)]


_DATE_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d([.,]\d{1,9})?)?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _check_iso8601(value: object) -> object:
    if isinstance(value, str) and not _DATE_TIME.fullmatch(value):
        raise ValueError(f"{value!r} is no time with a zone: write e.g. 2026-05-17T12:00:00Z")
    return value


def _to_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{time.isoformat()} is before or after all times: give another") from None


UtcTime = Annotated[AwareDatetime, BeforeValidator(_check_iso8601), AfterValidator(_to_utc)]
"""A time in UTC."""
