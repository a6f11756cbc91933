"""JobProfiler: layer and link costs of a job that does not train, from the store or measured by one Ray worker.

Each kind of job (by its costs digest, owner and cluster) is measured once at a time, few at once on a cluster;
callers get None while that goes on and ask again. Jobs with secrets are not profiled: secrets are given to attempts
only.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.orchestrator.attempts.submit import Submitter
from service.orchestrator.decisions.decide import device_of
from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.tasks.runner import NoTaskResultError, TaskRunner, TaskTimeoutError, run_ray_task
from service.settings.clusters import DEFAULT_CLUSTER
from service.spec.principals import ANONYMOUS
from service.store.database import Database, run_to_completion, utc_now
from service.store.measurements import MEASURED_BY_ONE_WORKER, find_costs, record_costs, scoped_costs_digest
from service.store.secrets import spec_secret_names
from worker.contract.costs import PROFILE_RESULT_MARK, costs_digest
from worker.contract.tasks import task_result

_CONCURRENT_PROFILES = 4
_QUEUED_PROFILES = 64


class ProfilingFailedError(ValueError):
    """The job could not be measured; the message says why, as an attempt would have."""


@dataclass(frozen=True)
class MeasuredCosts:
    """What was measured (JSON of a driver's request for a plan), and by whom."""

    costs: Mapping[str, Any]
    measured_by: str


class JobProfiler:
    """Finds the costs of jobs; each kind of job is measured once at a time, for `limit_s` at most, few at once on
    a cluster."""

    def __init__(
        self,
        database: Database,
        clusters: Clusters,
        submitter: Submitter,
        *,
        limit_s: float,
    ) -> None:
        self._database, self._clusters, self._submitter = database, clusters, submitter
        self._limit_s = limit_s
        self._runs = TaskRunner(
            database,
            "profile",
            at_once=_CONCURRENT_PROFILES,
            in_line=_QUEUED_PROFILES,
            busy=lambda runs: f"{runs} jobs are being measured or wait for it",
            failed=ProfilingFailedError,
        )

    async def costs(
        self,
        spec: Mapping[str, Any],
        counts: Sequence[int],
        *,
        owner: str = ANONYMOUS,
        cluster: str = DEFAULT_CLUSTER,
    ) -> MeasuredCosts | None:
        """What is known of the owner's job (JSON of a JobSpec) with these numbers of microbatches, as measured on this
        cluster; None while it is being measured there, which begins with the first call: ask again.

        Raises ProfilingFailedError, once, where measuring has failed, and PlannerBusyError.
        """
        digest = scoped_costs_digest(costs_digest(spec), owner, cluster)
        if (found := await self._found(digest, counts)) is not None:
            return found
        if names := spec_secret_names(spec):
            raise ProfilingFailedError(
                f"its secrets ({', '.join(names)}) are given to attempts only: submit it, or plan it without them"
            )
        measure = functools.partial(self._measure, digest, spec, counts, self._clusters.of(cluster))
        await self._runs.answer(digest, measure, place=cluster)
        return None

    async def close(self) -> None:
        """End what is being measured."""
        await self._runs.close()

    async def _measure(
        self, digest: str, spec: Mapping[str, Any], counts: Sequence[int], cluster: NamedCluster
    ) -> None:
        if await run_to_completion(self._found(digest, counts)) is not None:
            return  # the last run ended just when its costs were looked for
        costs = await self._run(spec, cluster)
        await run_to_completion(self._record(digest, costs))

    async def _found(self, digest: str, counts: Sequence[int]) -> MeasuredCosts | None:
        async with self._database.read() as session:
            found = await find_costs(session, digest, counts)
        return None if found is None else MeasuredCosts(*found)

    async def _record(self, digest: str, costs: dict[str, Any]) -> None:
        async with self._database.write() as session:
            await record_costs(session, digest, costs, measured_by=MEASURED_BY_ONE_WORKER, at=utc_now())

    async def _run(self, spec: Mapping[str, Any], cluster: NamedCluster) -> dict[str, Any]:
        """Have one worker measure; ProfilingFailedError where it fails or takes too long."""
        capacity = cluster.watcher.capacity
        if capacity is None:
            named = "the Ray cluster" if len(self._clusters) == 1 else f"the Ray cluster {cluster.name}"
            raise ProfilingFailedError(f"{named} does not answer: ask again when it does")
        resources = spec["resources"]
        gang = sum(resources.get("workers") or [resources["workers_per_mesh"]] * (resources["meshes"] or 1))
        run_id = f"profile-{secrets.token_hex(8)}"
        device = device_of(resources["device"], gang, capacity)
        submission = await self._submitter.profile_submission(run_id, spec, device, cluster)
        try:
            return await run_ray_task(cluster.ray, submission, read_profile_result, limit_s=self._limit_s)
        except TaskTimeoutError as error:
            what = "measured" if error.began else "waited for a free accelerator"
            raise ProfilingFailedError(
                f"one worker {what} for more than {self._limit_s:g} s and was ended: ask again when the cluster is less "
                "busy, or raise SLOTLINE_PROFILE_TIMEOUT_S"
            ) from None
        except NoTaskResultError as error:
            raise ProfilingFailedError(
                f"the worker that measured the job ended without a result ({error})"
            ) from None


def read_profile_result(output: str) -> dict[str, Any] | None:
    """The costs in the output of worker/tasks/profile.py; None where it has not come to its end.

    Raises ProfilingFailedError with what it says of its failure.
    """
    answer = task_result(output, PROFILE_RESULT_MARK)
    if answer is None:
        return None
    if "failed" in answer:
        raise ProfilingFailedError(f"{answer['failed']}: {answer['message']}")
    return answer["costs"]
