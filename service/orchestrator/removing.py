"""Checkpoints and exports are deleted by a short Ray job, since workers see the place where they lie.

What was begun is in the store, so that nobody reads or goes on from what is deleted; what came of it is told once, by
this process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence

from service.orchestrator.planning import PlannerBusyError
from service.orchestrator.ray_jobs import Cluster
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.store.database import Sessions, utc_now
from service.store.removals import BegunRemoval, begin_removal, end_removal, jobs_to_empty
from service.store.storage_uses import InUseError
from worker.removal import Removed, read_answer

_RUNS_KEPT = 16
_SPARE_S = 60.0

Key = tuple[str, tuple[str, ...]]


class RemovalFailedError(ValueError):
    """Nothing is known to be deleted; the message says why."""


class RemovalsBusyError(PlannerBusyError):
    """As many deletions as may are under way."""


class JobRemover:
    """Deletes what jobs have saved; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(self, database: Sessions, cluster: Cluster, submitter: Submitter, *, limit_s: float) -> None:
        self._database, self._cluster = database, cluster
        self._submitter, self._limit_s = submitter, limit_s
        self._runs: dict[Key, asyncio.Task[Removed]] = {}

    async def removed(self, job_id: str, folders: tuple[str, ...], *, by: str) -> Removed | None:
        """What was deleted, once; None while it is being deleted, which begins with the first call: ask again.

        Raises InUseError where it is read, or where the job would go on from it, RemovalFailedError and
        RemovalsBusyError.
        """
        key = (job_id, folders)
        if (run := self._runs.get(key)) is None:
            for other in [
                other for other, task in self._runs.items() if task.done()
            ]:  # nobody asked any more
                if len(self._runs) >= _RUNS_KEPT:
                    self._runs.pop(other).exception()  # else asyncio says that nobody looked
            if len(self._runs) >= _RUNS_KEPT:
                raise RemovalsBusyError(f"{len(self._runs)} deletions are under way")
            self._runs[key] = asyncio.create_task(self._one(job_id, folders, by))
            return None
        if not run.done():
            return None
        del self._runs[key]
        return run.result()

    async def empty(self, days: float) -> None:
        """Delete all that jobs have saved that ended so many days ago; in one process for many of them."""
        async with self._database.read() as session:
            job_ids = await jobs_to_empty(session, days=days, at=utc_now())
        begun = []
        for job_id in job_ids:
            try:
                begun.append(await self._begin(job_id, None, "", days))
            except InUseError:
                continue  # the next time
        if begun:
            await self._run(begun)

    async def close(self) -> None:
        """End what is being deleted."""
        runs = list(self._runs.values())
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def _one(self, job_id: str, folders: tuple[str, ...], by: str) -> Removed:
        (found,) = await self._run([await self._begin(job_id, folders, by)])
        if found.failed is not None:
            raise RemovalFailedError(found.failed)
        return found

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
            for one, answer in zip(begun, found, strict=True):
                async with self._database.write() as session:
                    await end_removal(session, one, answer, at=utc_now())

    async def _in_cluster(self, begun: Sequence[BegunRemoval]) -> list[Removed]:
        requests = [one.request for one in begun]
        submission = self._submitter.removing(f"remove-{secrets.token_hex(8)}", requests)
        try:
            found = await run_for_answer(self._cluster, submission, read_answer, limit_s=self._limit_s)
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
