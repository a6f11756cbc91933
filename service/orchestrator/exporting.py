"""Final weights of a job: a short Ray job writes them where the checkpoints lie, since workers see that place."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Mapping
from typing import Any

from service.cluster_settings import DEFAULT
from service.orchestrator.clusters import Clusters, NamedCluster
from service.orchestrator.shared_runs import SharedRuns
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.store.database import Database, utc_now
from service.store.storage_uses import InUseError, Use, begin_use, end_use
from service.store.uncut import uncut
from worker.checkpoint_files import folder_name
from worker.weights.request import ExportFailedError, ExportRequest, read_answer

_RUNS = 16
_SPARE_S = 60.0


class JobExporter:
    """Exports weights; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(
        self, database: Database, clusters: Clusters, submitter: Submitter, *, limit_s: float
    ) -> None:
        self._database, self._clusters = database, clusters
        self._submitter, self._limit_s = submitter, limit_s
        self._runs = SharedRuns(
            database,
            "export",
            at_once=_RUNS,
            busy=lambda runs: f"{runs} exports are under way",
            failed=ExportFailedError,
        )

    async def exported(self, request: ExportRequest, *, cluster: str = DEFAULT) -> Mapping[str, Any] | None:
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
            use = await uncut(self._begin(request))
        except InUseError as error:
            raise ExportFailedError(str(error)) from None
        try:
            return await self._written(request, cluster)
        finally:
            await uncut(self._end(use))

    async def _begin(self, request: ExportRequest) -> str:
        folders = None if request.step is None else [folder_name(request.step)]
        limit_s = self._limit_s + _SPARE_S
        async with self._database.write() as session:
            return await begin_use(session, request.job, Use.READING, folders, at=utc_now(), limit_s=limit_s)

    async def _end(self, use: str) -> None:
        async with self._database.write() as session:
            await end_use(session, use)

    async def _written(self, request: ExportRequest, cluster: NamedCluster) -> str:
        submission = self._submitter.exporting(f"export-{secrets.token_hex(8)}", request, cluster)
        try:
            return json.dumps(
                await run_for_answer(cluster.ray, submission, read_answer, limit_s=self._limit_s)
            )
        except RunTooLongError as error:
            what = "was written" if error.began else "waited for the cluster"
            raise ExportFailedError(
                f"it {what} for more than {self._limit_s:g} s and was ended: ask again, or raise "
                "SLOTLINE_EXPORT_TIMEOUT_S"
            ) from None
        except NoAnswerError as error:
            raise ExportFailedError(f"the process that wrote them ended without a result ({error})") from None
