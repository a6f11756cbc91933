"""What a route may use: the running service's parts, found on the application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, FastAPI
from starlette.requests import HTTPConnection

from service.api.job_feed import JobFeed
from service.api.oidc import IdentityProvider
from service.cluster_settings import DEFAULT
from service.orchestrator.cluster_view import ClusterWatcher
from service.orchestrator.clusters import Clusters
from service.orchestrator.exporting import JobExporter
from service.orchestrator.logs import LogReader
from service.orchestrator.outcome import Backoff
from service.orchestrator.planning import Planner
from service.orchestrator.profiling import JobProfiler
from service.orchestrator.removing import JobRemover
from service.settings import Settings
from service.store.database import Database
from service.store.submissions import Submissions


@dataclass
class Service:
    """What routes work with. `wake` tells the orchestrator that a job changed, if it is in this process;
    `problem` says why that one does not go on, `lag_s` since when it has not come round (None: none runs here), `leads`
    whether it has the lease."""

    settings: Settings
    database: Database
    planner: Planner
    profiler: JobProfiler
    exporter: JobExporter
    remover: JobRemover
    clusters: Clusters
    logs: LogReader
    wake: Callable[[], None]
    problem: Callable[[], str | None] = lambda: None
    identity: IdentityProvider | None = None
    lag_s: Callable[[], float | None] = lambda: None
    leads: Callable[[], bool] = lambda: False
    submissions: Submissions = field(init=False)
    feed: JobFeed = field(init=False)

    def __post_init__(self) -> None:
        self.submissions = Submissions(self.database)
        self.feed = JobFeed(self.database)

    @property
    def cluster(self) -> ClusterWatcher:
        """What was last seen of the cluster named default."""
        return self.clusters.of(DEFAULT).watcher

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.settings.retry_backoff_s, self.settings.retry_backoff_limit_s)


def service_of(app: FastAPI) -> Service:
    """The service behind an application made by `create_app`."""
    return app.state.service


async def _current(connection: HTTPConnection) -> Service:  # not async, it would be run in a thread
    return service_of(connection.app)


Current = Annotated[Service, Depends(_current)]
