"""Costs of jobs that do not train: from the store, else measured by one worker, a short Ray job.

State is in this process only: what is measured is in the store afterwards; a run that is lost with this
control plane ends by itself and is begun again by the next request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.cluster_settings import DEFAULT
from service.orchestrator.clusters import Clusters, NamedCluster
from service.orchestrator.decide import device_of
from service.orchestrator.planning import PlannerBusyError
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.principals import NOBODY
from service.store.database import Database, utc_now
from service.store.profiles import ONE_WORKER, find_costs, owned_digest, record_costs
from service.store.secrets import stored_names
from worker.costs import ANSWER_MARK, costs_digest
from worker.marked import marked_answer

_RUNS_AT_ONCE = 4
_RUNS_IN_LINE = 64
_FAILURES_KEPT = 100


class ProfilingFailedError(ValueError):
    """The job could not be measured; the message says why, as an attempt would have."""


class ProfilingBusyError(PlannerBusyError):
    """As many jobs are being measured, and wait for it, as may."""


@dataclass(frozen=True)
class KnownCosts:
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
        self._runs: dict[str, dict[str, asyncio.Task[None]]] = {}
        self._turns = dict[str, asyncio.Semaphore]()
        self._failures: dict[str, str] = {}

    async def costs(
        self,
        spec: Mapping[str, Any],
        counts: Sequence[int],
        *,
        owner: str = NOBODY,
        cluster: str = DEFAULT,
    ) -> KnownCosts | None:
        """What is known of the owner's job (JSON of a JobSpec) with these numbers of microbatches, as measured on this
        cluster; None while it is being measured there, which begins with the first call: ask again.

        Raises ProfilingFailedError, once, where measuring has failed, and ProfilingBusyError.
        """
        digest = owned_digest(costs_digest(spec), owner, cluster)
        runs = self._runs.setdefault(cluster, {})
        running = digest in runs  # it may end while the store is asked, which then says what was before
        async with self._database.read() as session:
            found = await find_costs(session, digest, counts)
        if found is not None:
            return KnownCosts(*found)
        if (failure := self._failures.pop(digest, None)) is not None:
            raise ProfilingFailedError(failure)
        if names := stored_names(spec):
            raise ProfilingFailedError(
                f"its secrets ({', '.join(names)}) are given to attempts only: submit it, or plan it without them"
            )
        if not running and digest not in runs:
            if len(runs) >= _RUNS_AT_ONCE + _RUNS_IN_LINE:
                raise ProfilingBusyError(f"{len(runs)} jobs are being measured or wait for it")
            task = runs[digest] = asyncio.create_task(self._measure(digest, spec, cluster))
            task.add_done_callback(lambda _: runs.pop(digest, None))
        return None

    async def close(self) -> None:
        """End what is being measured."""
        runs = [task for of_cluster in self._runs.values() for task in of_cluster.values()]
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def _measure(self, digest: str, spec: Mapping[str, Any], cluster: str) -> None:
        try:
            async with self._turns.setdefault(cluster, asyncio.Semaphore(_RUNS_AT_ONCE)):
                costs = await self._run(spec, self._clusters.of(cluster))
            async with self._database.write() as session:
                await record_costs(session, digest, costs, measured_by=ONE_WORKER, at=utc_now())
        except Exception as error:
            while len(self._failures) >= _FAILURES_KEPT:
                self._failures.pop(next(iter(self._failures)))
            self._failures[digest] = str(error) or type(error).__name__

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
        submission = await self._submitter.profiling(run_id, spec, device, cluster)
        try:
            return await run_for_answer(cluster.ray, submission, read_answer, limit_s=self._limit_s)
        except RunTooLongError as error:
            what = "measured" if error.began else "waited for a free accelerator"
            raise ProfilingFailedError(
                f"one worker {what} for more than {self._limit_s:g} s and was ended: ask again when the cluster is less "
                "busy, or raise SLOTLINE_PROFILE_TIMEOUT_S"
            ) from None
        except NoAnswerError as error:
            raise ProfilingFailedError(
                f"the worker that measured the job ended without a result ({error})"
            ) from None


def read_answer(output: str) -> dict[str, Any] | None:
    """The costs in the output of worker/profiler.py; None where it has not come to its end.

    Raises ProfilingFailedError with what it says of its failure.
    """
    answer = marked_answer(output, ANSWER_MARK)
    if answer is None:
        return None
    if "failed" in answer:
        raise ProfilingFailedError(f"{answer['failed']}: {answer['message']}")
    return answer["costs"]
