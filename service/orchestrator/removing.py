"""Checkpoints and exports are deleted by a short Ray job, since workers see the place where they lie.

What was begun is in the store, so that nobody reads or goes on from what is deleted.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from service.orchestrator.clusters import Clusters
from service.orchestrator.shared_runs import SharedRuns
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.store.database import Sessions, utc_now
from service.store.removals import BegunRemoval, begin_removal, end_removal, jobs_to_empty
from service.store.storage_uses import InUseError
from service.store.uncut import uncut
from worker.removal_request import Removed, read_removed, removed_from

_RUNS = 16
_SPARE_S = 60.0


class RemovalFailedError(ValueError):
    """Nothing is known to be deleted; the message says why."""


class JobRemover:
    """Deletes what jobs have saved; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(
        self, database: Sessions, clusters: Clusters, submitter: Submitter, *, limit_s: float
    ) -> None:
        self._database, self._clusters = database, clusters
        self._submitter, self._limit_s = submitter, limit_s
        self._runs = SharedRuns(
            database,
            "remove",
            at_once=_RUNS,
            busy=lambda runs: f"{runs} deletions are under way",
            failed=RemovalFailedError,
        )

    async def removed(
        self, job_id: str, folders: tuple[str, ...], *, by: str, cluster: str
    ) -> Removed | None:
        """What was deleted, once; None while the job's cluster deletes it, which begins with the first call: ask again.

        Raises InUseError where it is read, or where the job would go on from it, RemovalFailedError and
        PlannerBusyError.
        """
        remove = functools.partial(self._one, job_id, folders, by)
        answer = await self._runs.answer(json.dumps([job_id, *folders]), remove, place=cluster)
        if answer is None:
            return None
        told = json.loads(answer)
        if "in_use" in told:
            raise InUseError(told["in_use"])
        return removed_from(told)

    async def empty(self, days: float) -> None:
        """Delete all that jobs have saved that ended so many days ago; in one process of each cluster for many of them."""
        async with self._database.read() as session:
            job_ids = await jobs_to_empty(session, days=days, at=utc_now())
        begun = defaultdict[str, list[BegunRemoval]](list)
        for job_id in job_ids:
            try:
                one = await self._begin(job_id, None, "", days)
            except InUseError:
                continue  # the next time
            begun[one.cluster].append(one)
        failed = []
        for of_cluster in begun.values():
            try:
                await self._run(of_cluster)
            except RemovalFailedError as error:
                failed.append(str(error))
        if failed:
            raise RemovalFailedError("; ".join(failed))

    async def close(self) -> None:
        """End what is being deleted."""
        await self._runs.close()

    async def _one(self, job_id: str, folders: tuple[str, ...], by: str) -> str:
        try:
            begun = await uncut(self._begin(job_id, folders, by))
        except InUseError as error:
            return json.dumps({"in_use": str(error)})
        (found,) = await self._run([begun])
        if found.failed is not None:
            raise RemovalFailedError(found.failed)
        return json.dumps(asdict(found))

    async def _begin(
        self, job_id: str, folders: tuple[str, ...] | None, by: str, days: float | None = None
    ) -> BegunRemoval:
        async with self._database.write() as session:
            return await begin_removal(
                session, job_id, folders, at=utc_now(), limit_s=self._limit_s + _SPARE_S, by=by, days=days
            )

    async def _run(self, begun: Sequence[BegunRemoval]) -> list[Removed]:
        found: Sequence[Removed | None] = [None] * len(begun)
        try:
            found = await self._in_cluster(begun)
            return list(found)
        finally:  # also where this process ends
            await uncut(self._end(begun, found))

    async def _end(self, begun: Sequence[BegunRemoval], found: Sequence[Removed | None]) -> None:
        for one, answer in zip(begun, found, strict=True):
            async with self._database.write() as session:
                await end_removal(session, one, answer, at=utc_now())

    async def _in_cluster(self, begun: Sequence[BegunRemoval]) -> list[Removed]:
        """Of jobs of one cluster."""
        requests, cluster = [one.request for one in begun], self._clusters.of(begun[0].cluster)
        submission = self._submitter.removing(f"remove-{secrets.token_hex(8)}", requests, cluster)
        try:
            found = await run_for_answer(cluster.ray, submission, read_removed, limit_s=self._limit_s)
        except RunTooLongError:
            raise RemovalFailedError(
                f"it took more than {self._limit_s:g} s and was ended: ask again"
            ) from None
        except NoAnswerError as error:
            raise RemovalFailedError(f"the process that deletes ended without a result ({error})") from None
        except Exception as error:  # a cluster that is away
            raise RemovalFailedError(str(error) or type(error).__name__) from error
        if len(found) != len(requests):
            raise RemovalFailedError(
                f"the process answered for {len(found)} jobs, and not for {len(requests)}"
            )
        return found
