"""ExportTask and RemovalTask: write a job's weights and delete its checkpoints and exports, on the job's cluster.

Workers see the place where checkpoints lie; the control plane need not. A storage use in the store keeps exports and
removals of the same folders apart, and is ended also where this process ends.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service.orchestrator.ray.clusters import Clusters, NamedCluster
from service.orchestrator.tasks.runner import (
    Task,
)
from service.store.database import Sessions, run_to_completion, utc_now
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
    EXPORT_REQUEST_VARIABLE,
    REMOVAL_REQUEST_VARIABLE,
    ExportFailedError,
    ExportRequest,
    RemovalResult,
    read_export_result,
    read_removal_results,
    removal_requests_json,
    removal_result_from_json,
)

_STORAGE_USE_SPARE_S = 60.0


class ExportTask(Task[ExportRequest, Mapping[str, Any]]):
    """Writes a job's weights where its checkpoints lie; the result is JSON of an ExportResult."""

    name = "export"
    concurrency = 16
    limit_s = 7200.0  # a terabyte at 140 MB/s; where its process dies, the checkpoint cannot be deleted for this time
    error = ExportFailedError

    def key(self, request: ExportRequest, cluster: str) -> str:
        return request.to_json()

    async def perform(self, request: ExportRequest, cluster: NamedCluster) -> str:
        try:
            use_id = await run_to_completion(self._begin_reading(request))
        except StorageInUseError as error:
            raise ExportFailedError(str(error)) from None
        environment = {EXPORT_REQUEST_VARIABLE: request.to_json()}
        try:
            submission = self.submission(cluster, environment, job_id=request.job)
            return json.dumps(await self.run_in_ray(cluster, submission, read_export_result))
        finally:
            await run_to_completion(self._end_reading(use_id))

    def read_result(self, text: str) -> Mapping[str, Any]:
        return json.loads(text)

    def busy_message(self, runs: int) -> str:
        return f"{runs} exports are under way"

    def timeout_message(self, began: bool) -> str:
        return (
            f"it {'was written' if began else 'waited for the cluster'} for more than {self.limit_s:g} s and was ended: "
            "ask again when the cluster is less busy"
        )

    def no_result_message(self, detail: str) -> str:
        return f"the process that wrote them ended without a result ({detail})"

    async def _begin_reading(self, request: ExportRequest) -> str:
        """Keep others from deleting the checkpoint; without a step that may be any of the job's."""
        folders = None if request.step is None else [step_folder_name(request.step)]
        limit_s = self.limit_s + _STORAGE_USE_SPARE_S
        async with self._database.write() as session:
            return await begin_storage_use(
                session, request.job, StorageUseKind.READING, folders, at=utc_now(), limit_s=limit_s
            )

    async def _end_reading(self, use_id: str) -> None:
        async with self._database.write() as session:
            await end_storage_use(session, use_id)


class RemovalFailedError(ValueError):
    """Nothing is known to be deleted; the message says why."""


@dataclass(frozen=True)
class FolderRemoval:
    """Folders of a job that `by` wants deleted, by name."""

    job_id: str
    folders: tuple[str, ...]
    by: str


class RemovalTask(Task[FolderRemoval, RemovalResult]):
    """Deletes folders that a job has saved.

    The result raises StorageInUseError for what an export reads, or what the job would go on from.
    """

    name = "remove"
    concurrency = 16
    limit_s = 600.0  # what is left then is deleted by the next one
    error = RemovalFailedError

    def __init__(self, database: Sessions, clusters: Clusters) -> None:
        super().__init__(database)
        self._clusters = clusters

    def key(self, request: FolderRemoval, cluster: str) -> str:
        return json.dumps([request.job_id, *request.folders])

    async def perform(self, request: FolderRemoval, cluster: NamedCluster) -> str:
        try:
            removal = await run_to_completion(self._begin(request.job_id, request.folders, by=request.by))
        except StorageInUseError as error:
            return json.dumps({"in_use": str(error)})
        (result,) = await self._remove([removal])
        if result.failed is not None:
            raise RemovalFailedError(result.failed)
        return json.dumps(asdict(result))

    def read_result(self, text: str) -> RemovalResult:
        body = json.loads(text)
        if "in_use" in body:
            raise StorageInUseError(body["in_use"])
        return removal_result_from_json(body)

    def busy_message(self, runs: int) -> str:
        return f"{runs} deletions are under way"

    def timeout_message(self, began: bool) -> str:
        return f"it took more than {self.limit_s:g} s and was ended: ask again"

    def no_result_message(self, detail: str) -> str:
        return f"the process that deletes ended without a result ({detail})"

    async def remove_expired(self, days: float) -> None:
        """Delete all files of jobs that ended `days` ago, many jobs in one process of each cluster.

        Raises RemovalFailedError after all clusters had their turn.
        """
        async with self._database.read() as session:
            job_ids = await jobs_with_expired_files(session, days=days, at=utc_now())
        removals_by_cluster = defaultdict[str, list[PendingRemoval]](list)
        for job_id in job_ids:
            try:
                removal = await self._begin(job_id, None, by="", days=days)
            except StorageInUseError:
                continue  # the next time
            removals_by_cluster[removal.cluster].append(removal)
        failures = []
        for removals in removals_by_cluster.values():
            try:
                await self._remove(removals)
            except RemovalFailedError as error:
                failures.append(str(error))
        if failures:
            raise RemovalFailedError("; ".join(failures))

    async def _begin(
        self, job_id: str, folders: tuple[str, ...] | None, *, by: str, days: float | None = None
    ) -> PendingRemoval:
        limit_s = self.limit_s + _STORAGE_USE_SPARE_S
        async with self._database.write() as session:
            return await begin_removal(
                session, job_id, folders, at=utc_now(), limit_s=limit_s, by=by, days=days
            )

    async def _remove(self, removals: Sequence[PendingRemoval]) -> list[RemovalResult]:
        """Delete files of jobs of one cluster by one process; one result a removal."""
        results: Sequence[RemovalResult | None] = [None] * len(removals)
        try:
            results = removed = await self._remove_in_ray(removals)
            return removed
        finally:  # also where this process ends
            await run_to_completion(self._end(removals, results))

    async def _remove_in_ray(self, removals: Sequence[PendingRemoval]) -> list[RemovalResult]:
        requests = [removal.request for removal in removals]
        cluster = self._clusters.of(removals[0].cluster)
        environment = {REMOVAL_REQUEST_VARIABLE: removal_requests_json(requests)}
        submission = self.submission(cluster, environment, job_id=requests[0].job)
        results = await self.run_in_ray(cluster, submission, read_removal_results)
        if len(results) != len(requests):
            raise RemovalFailedError(
                f"the process answered for {len(results)} jobs, and not for {len(requests)}"
            )
        return results

    async def _end(self, removals: Sequence[PendingRemoval], results: Sequence[RemovalResult | None]) -> None:
        for removal, result in zip(removals, results, strict=True):
            async with self._database.write() as session:
                await end_removal(session, removal, result, at=utc_now())
