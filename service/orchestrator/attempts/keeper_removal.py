"""Ends the keepers that hold copies of jobs which have ended, whoever ended them and whenever: their memory is the nodes'.

The cluster is looked at, and not the ends of jobs: what a control plane missed while it was away it sees when it is back. A
driver ends the keepers of its job itself where it can, a moment before the job ends: those are not looked for.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Coroutine
from datetime import timedelta
from typing import Any

from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.ray.jobs_api import ClusterError, RayJobSubmission
from service.orchestrator.tasks.runner import NoTaskResultError, TaskTimeoutError, run_ray_task
from service.store.database import Sessions, utc_now
from service.store.jobs import jobs_that_ended
from worker.contract.tasks import (
    RELEASE_REQUEST_VARIABLE,
    ReleaseRequest,
    ReleaseResult,
    read_release_result,
)

logger = logging.getLogger(__name__)

SETTLE_S = 5.0
"""Behind the end of a job: its driver may be ending them, and Ray tells of it in some seconds."""
PAUSE_S = 10.0
"""Between two releases on one cluster."""
_LIMIT_S = 120.0


class KeeperRemoval:
    """The releases of the control plane that has the lease, one at a time on each cluster."""

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        self._database, self._clusters = database, clusters
        self._begun_at: dict[str, float] = {}
        self._busy: set[str] = set()

    def due(self, unended: Collection[str]) -> list[Coroutine[Any, Any, None]]:
        """The releases to be made now, to be awaited beside the rounds; nothing of the jobs `unended` ends."""
        now, due = time.monotonic(), []
        for cluster in self._clusters:
            jobs = cluster.watcher.jobs_with_keepers - {*unended}
            begun_at = self._begun_at.get(cluster.name)
            paused = begun_at is not None and now - begun_at < PAUSE_S
            if jobs and cluster.name not in self._busy and not paused and cluster.watcher.snapshot.available:
                self._busy.add(cluster.name)
                due.append(self._release(cluster, jobs))
        return due

    async def _release(self, cluster: NamedCluster, jobs: Collection[str]) -> None:
        """End the keepers of those of the jobs that have ended; others may be of another control plane."""
        try:
            async with self._database.read() as session:
                ended = await jobs_that_ended(session, jobs, before=utc_now() - timedelta(seconds=SETTLE_S))
            if ended:
                self._begun_at[cluster.name] = time.monotonic()
                result = await _run(cluster, ReleaseRequest(tuple(sorted(ended))))
                logger.info("ended %d keepers of copies of %s", len(result.keepers), ", ".join(sorted(ended)))
        except (ClusterError, NoTaskResultError, TaskTimeoutError) as error:
            logger.warning(
                "keepers of copies were not ended on cluster %s, and will be: %s", cluster.name, error
            )
        finally:
            self._busy.discard(cluster.name)


async def _run(cluster: NamedCluster, request: ReleaseRequest) -> ReleaseResult:
    run_id = f"release-{secrets.token_hex(8)}"
    submission = RayJobSubmission(
        id=run_id,
        entrypoint=f"{cluster.drivers.entrypoint('worker.tasks')} release",
        interpreter=cluster.drivers.interpreter(),
        env={RELEASE_REQUEST_VARIABLE: request.to_json(), **cluster.drivers.ray_environment},
        metadata={"slotline_release": run_id},
    )
    return await run_ray_task(cluster.ray, submission, read_release_result, limit_s=_LIMIT_S)
