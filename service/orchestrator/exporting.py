"""Final weights of a job: a short Ray job writes them where the checkpoints lie, since workers see that place.

What was begun and what came of it is in this process only, and is told once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from service.orchestrator.planning import PlannerBusyError
from service.orchestrator.ray_jobs import Cluster
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from service.store.database import Sessions, utc_now
from service.store.storage_uses import InUseError, Use, begin_use, end_use
from worker.checkpoint_files import folder_name
from worker.weights.request import ExportFailedError, ExportRequest, read_answer

_RUNS_KEPT = 16
_SPARE_S = 60.0


class ExportsBusyError(PlannerBusyError):
    """As many exports as may are under way."""


class JobExporter:
    """Exports weights; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(
        self, cluster: Cluster, submitter: Submitter, *, limit_s: float, database: Sessions | None = None
    ) -> None:
        self._cluster, self._submitter, self._limit_s = cluster, submitter, limit_s
        self._database = database
        self._runs: dict[ExportRequest, asyncio.Task[Mapping[str, Any]]] = {}

    async def exported(self, request: ExportRequest) -> Mapping[str, Any] | None:
        """What was written (JSON of an Exported), once; None while it is being written, which begins with the first
        call: ask again. Raises ExportFailedError, once, and ExportsBusyError."""
        run = self._runs.get(request)
        if run is None:
            for key in [key for key, other in self._runs.items() if other.done()]:  # nobody asked any more
                if len(self._runs) >= _RUNS_KEPT:
                    self._forget(key)
            if len(self._runs) >= _RUNS_KEPT:
                raise ExportsBusyError(f"{len(self._runs)} exports are under way")
            self._runs[request] = asyncio.create_task(self._run(request))
            return None
        if not run.done():
            return None
        del self._runs[request]
        return run.result()

    async def close(self) -> None:
        """End what is being written."""
        runs = list(self._runs.values())
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    def _forget(self, key: ExportRequest) -> None:
        self._runs.pop(key).exception()  # else asyncio says that nobody looked

    async def _run(self, request: ExportRequest) -> Mapping[str, Any]:
        """Nobody may delete meanwhile what is read: without a step that may be any checkpoint of the job."""
        if self._database is None:
            return await self._written(request)
        try:
            async with self._database.write() as session:
                folders = None if request.step is None else [folder_name(request.step)]
                limit_s = self._limit_s + _SPARE_S
                use = await begin_use(
                    session, request.job, Use.READING, folders, at=utc_now(), limit_s=limit_s
                )
        except InUseError as error:
            raise ExportFailedError(str(error)) from None
        try:
            return await self._written(request)
        finally:
            async with self._database.write() as session:
                await end_use(session, use)

    async def _written(self, request: ExportRequest) -> Mapping[str, Any]:
        submission = self._submitter.exporting(f"export-{secrets.token_hex(8)}", request)
        try:
            return await run_for_answer(self._cluster, submission, read_answer, limit_s=self._limit_s)
        except RunTooLongError as error:
            what = "was written" if error.began else "waited for the cluster"
            raise ExportFailedError(
                f"it {what} for more than {self._limit_s:g} s and was ended: ask again, or raise "
                "SLOTLINE_EXPORT_TIMEOUT_S"
            ) from None
        except NoAnswerError as error:
            raise ExportFailedError(f"the process that wrote them ended without a result ({error})") from None
        except ExportFailedError:
            raise
        except Exception as error:  # a cluster that is away
            raise ExportFailedError(str(error) or type(error).__name__) from error
