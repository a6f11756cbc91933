"""Exports a job's weights and deletes its checkpoints and exports, by one-shot Ray tasks on the job's cluster.

Workers see the place where checkpoints lie; the control plane need not. Each request runs once at a time, few at
once. A storage use in the store keeps exports and removals of the same folders apart, and is ended also where this
process ends.
"""

from __future__ import annotations

import functools
import json
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from service.orchestrator.attempts.submit import Submitter
from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.tasks.runner import NoTaskResultError, TaskRunner, TaskTimeoutError, run_ray_task
from service.settings.clusters import DEFAULT_CLUSTER
from service.store.database import Database, Sessions, run_to_completion, utc_now
from service.store.files import (
    PendingRemoval,
    StorageInUseError,
    StorageUseKind,
    begin_removal,
    begin_storage_use,
    end_removal,
    end_storage_use,
    jobs_with_expired_files,
)
from worker.contract.checkpoint_files import step_folder_name
from worker.contract.tasks import (
    ExportFailedError,
    ExportRequest,
    RemovalResult,
    read_export_result,
    read_removal_results,
    removal_result_from_json,
)

_CONCURRENT_EXPORTS = 16
_STORAGE_USE_SPARE_S = 60.0


class JobExporter:
    """Exports weights; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(
        self, database: Database, clusters: Clusters, submitter: Submitter, *, limit_s: float
    ) -> None:
        self._database, self._clusters = database, clusters
        self._submitter, self._limit_s = submitter, limit_s
        self._runs = TaskRunner(
            database,
            "export",
            at_once=_CONCURRENT_EXPORTS,
            busy=lambda runs: f"{runs} exports are under way",
            failed=ExportFailedError,
        )

    async def exported(
        self, request: ExportRequest, *, cluster: str = DEFAULT_CLUSTER
    ) -> Mapping[str, Any] | None:
        """What was written (JSON of an Exported), once; None while the job's cluster writes it, which begins with the
        first call: ask again. Raises ExportFailedError, once, and PlannerBusyError."""
        write = functools.partial(self._run, request, self._clusters.of(cluster))
        answer = await self._runs.answer(request.to_json(), write, place=cluster)
        return None if answer is None else json.loads(answer)

    async def close(self) -> None:
        """End what is being written."""
        await self._runs.close()

    async def _run(self, request: ExportRequest, cluster: NamedCluster) -> str:
        """Nobody may delete meanwhile what is read: without a step that may be any checkpoint of the job."""
        try:
            use = await run_to_completion(self._begin(request))
        except StorageInUseError as error:
            raise ExportFailedError(str(error)) from None
        try:
            return await self._written(request, cluster)
        finally:
            await run_to_completion(self._end(use))

    async def _begin(self, request: ExportRequest) -> str:
        folders = None if request.step is None else [step_folder_name(request.step)]
        limit_s = self._limit_s + _STORAGE_USE_SPARE_S
        async with self._database.write() as session:
            return await begin_storage_use(
                session, request.job, StorageUseKind.READING, folders, at=utc_now(), limit_s=limit_s
            )

    async def _end(self, use: str) -> None:
        async with self._database.write() as session:
            await end_storage_use(session, use)

    async def _written(self, request: ExportRequest, cluster: NamedCluster) -> str:
        submission = self._submitter.export_submission(f"export-{secrets.token_hex(8)}", request, cluster)
        try:
            return json.dumps(
                await run_ray_task(cluster.ray, submission, read_export_result, limit_s=self._limit_s)
            )
        except TaskTimeoutError as error:
            what = "was written" if error.began else "waited for the cluster"
            raise ExportFailedError(
                f"it {what} for more than {self._limit_s:g} s and was ended: ask again, or raise "
                "SLOTLINE_EXPORT_TIMEOUT_S"
            ) from None
        except NoTaskResultError as error:
            raise ExportFailedError(f"the process that wrote them ended without a result ({error})") from None


_CONCURRENT_REMOVALS = 16


class RemovalFailedError(ValueError):
    """Nothing is known to be deleted; the message says why."""


class JobRemover:
    """Deletes what jobs have saved; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(
        self, database: Sessions, clusters: Clusters, submitter: Submitter, *, limit_s: float
    ) -> None:
        self._database, self._clusters = database, clusters
        self._submitter, self._limit_s = submitter, limit_s
        self._runs = TaskRunner(
            database,
            "remove",
            at_once=_CONCURRENT_REMOVALS,
            busy=lambda runs: f"{runs} deletions are under way",
            failed=RemovalFailedError,
        )

    async def removed(
        self, job_id: str, folders: tuple[str, ...], *, by: str, cluster: str
    ) -> RemovalResult | None:
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
            raise StorageInUseError(told["in_use"])
        return removal_result_from_json(told)

    async def empty(self, days: float) -> None:
        """Delete all that jobs have saved that ended so many days ago; in one process of each cluster for many of them."""
        async with self._database.read() as session:
            job_ids = await jobs_with_expired_files(session, days=days, at=utc_now())
        begun = defaultdict[str, list[PendingRemoval]](list)
        for job_id in job_ids:
            try:
                one = await self._begin(job_id, None, "", days)
            except StorageInUseError:
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
            begun = await run_to_completion(self._begin(job_id, folders, by))
        except StorageInUseError as error:
            return json.dumps({"in_use": str(error)})
        (found,) = await self._run([begun])
        if found.failed is not None:
            raise RemovalFailedError(found.failed)
        return json.dumps(asdict(found))

    async def _begin(
        self, job_id: str, folders: tuple[str, ...] | None, by: str, days: float | None = None
    ) -> PendingRemoval:
        async with self._database.write() as session:
            return await begin_removal(
                session,
                job_id,
                folders,
                at=utc_now(),
                limit_s=self._limit_s + _STORAGE_USE_SPARE_S,
                by=by,
                days=days,
            )

    async def _run(self, begun: Sequence[PendingRemoval]) -> list[RemovalResult]:
        found: Sequence[RemovalResult | None] = [None] * len(begun)
        try:
            found = await self._in_cluster(begun)
            return list(found)
        finally:  # also where this process ends
            await run_to_completion(self._end(begun, found))

    async def _end(self, begun: Sequence[PendingRemoval], found: Sequence[RemovalResult | None]) -> None:
        for one, answer in zip(begun, found, strict=True):
            async with self._database.write() as session:
                await end_removal(session, one, answer, at=utc_now())

    async def _in_cluster(self, begun: Sequence[PendingRemoval]) -> list[RemovalResult]:
        """Of jobs of one cluster."""
        requests, cluster = [one.request for one in begun], self._clusters.of(begun[0].cluster)
        submission = self._submitter.removal_submission(f"remove-{secrets.token_hex(8)}", requests, cluster)
        try:
            found = await run_ray_task(cluster.ray, submission, read_removal_results, limit_s=self._limit_s)
        except TaskTimeoutError:
            raise RemovalFailedError(
                f"it took more than {self._limit_s:g} s and was ended: ask again"
            ) from None
        except NoTaskResultError as error:
            raise RemovalFailedError(f"the process that deletes ended without a result ({error})") from None
        except Exception as error:  # a cluster that is away
            raise RemovalFailedError(str(error) or type(error).__name__) from error
        if len(found) != len(requests):
            raise RemovalFailedError(
                f"the process answered for {len(found)} jobs, and not for {len(requests)}"
            )
        return found
