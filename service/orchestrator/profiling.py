"""Costs of jobs that do not train: from the store, else measured by one worker, a short Ray job."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.cluster_settings import DEFAULT
from service.orchestrator.clusters import Clusters, NamedCluster
from service.orchestrator.decide import device_of
from service.orchestrator.shared_runs import SharedRuns
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.principals import NOBODY
from service.store.database import Database, utc_now
from service.store.profiles import ONE_WORKER, find_costs, owned_digest, record_costs
from service.store.secrets import stored_names
from service.store.uncut import uncut
from worker.costs import ANSWER_MARK, costs_digest
from worker.marked import marked_answer

_RUNS_AT_ONCE = 4
_RUNS_IN_LINE = 64


class ProfilingFailedError(ValueError):
    """The job could not be measured; the message says why, as an attempt would have."""


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
        self._runs = SharedRuns(
            database,
            "profile",
            at_once=_RUNS_AT_ONCE,
            in_line=_RUNS_IN_LINE,
            busy=lambda runs: f"{runs} jobs are being measured or wait for it",
            failed=ProfilingFailedError,
        )

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

        Raises ProfilingFailedError, once, where measuring has failed, and PlannerBusyError.
        """
        digest = owned_digest(costs_digest(spec), owner, cluster)
        if (found := await self._found(digest, counts)) is not None:
            return found
        if names := stored_names(spec):
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
        if await uncut(self._found(digest, counts)) is not None:
            return  # the last run ended just when its costs were looked for
        costs = await self._run(spec, cluster)
        await uncut(self._record(digest, costs))

    async def _found(self, digest: str, counts: Sequence[int]) -> KnownCosts | None:
        async with self._database.read() as session:
            found = await find_costs(session, digest, counts)
        return None if found is None else KnownCosts(*found)

    async def _record(self, digest: str, costs: dict[str, Any]) -> None:
        async with self._database.write() as session:
            await record_costs(session, digest, costs, measured_by=ONE_WORKER, at=utc_now())

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
