"""Final weights of a job: a short Ray job writes them where the checkpoints lie, since workers see that place.

What was begun and what came of it is in this process only, and is told once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any

from service.cluster_settings import DEFAULT
from service.orchestrator.clusters import Clusters, NamedCluster
from service.orchestrator.planning import PlannerBusyError
from service.orchestrator.short_runs import NoAnswerError, RunTooLongError, run_for_answer
from service.orchestrator.submission import Submitter
from worker.weights.request import ExportFailedError, ExportRequest, read_answer

_RUNS_KEPT = 16


class ExportsBusyError(PlannerBusyError):
    """As many exports as may are under way."""


class JobExporter:
    """Exports weights; each request once at a time, for `limit_s` at most, few at once."""

    def __init__(self, clusters: Clusters, submitter: Submitter, *, limit_s: float) -> None:
        self._clusters, self._submitter, self._limit_s = clusters, submitter, limit_s
        self._runs: dict[str, dict[ExportRequest, asyncio.Task[Mapping[str, Any]]]] = {}

    async def exported(self, request: ExportRequest, *, cluster: str = DEFAULT) -> Mapping[str, Any] | None:
        """What was written (JSON of an Exported), once; None while the job's cluster writes it, which begins with the
        first call: ask again. Raises ExportFailedError, once, and ExportsBusyError."""
        runs = self._runs.setdefault(cluster, {})
        run = runs.get(request)
        if run is None:
            for key in [key for key, other in runs.items() if other.done()]:  # nobody asked any more
                if len(runs) >= _RUNS_KEPT:
                    runs.pop(key).exception()  # else asyncio says that nobody looked
            if len(runs) >= _RUNS_KEPT:
                raise ExportsBusyError(f"{len(runs)} exports are under way")
            runs[request] = asyncio.create_task(self._run(request, self._clusters.of(cluster)))
            return None
        if not run.done():
            return None
        del runs[request]
        return run.result()

    async def close(self) -> None:
        """End what is being written."""
        runs = [task for of_cluster in self._runs.values() for task in of_cluster.values()]
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    async def _run(self, request: ExportRequest, cluster: NamedCluster) -> Mapping[str, Any]:
        submission = self._submitter.exporting(f"export-{secrets.token_hex(8)}", request, cluster)
        try:
            return await run_for_answer(cluster.ray, submission, read_answer, limit_s=self._limit_s)
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
