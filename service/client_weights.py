"""The client's calls about what a job has saved; a part of service.client.Client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from service.api.artifact_schemas import ArtifactList, OwnerUsage, RemovedView, RemovingView, UsageList
from service.api.schemas import CheckpointFiles, ExportingView, ExportView

EXPORT_LIMIT_S = 3600.0
"""So long who asks for weights waits until the cluster has written them."""
REMOVAL_LIMIT_S = 900.0
"""So long who deletes a checkpoint waits until the cluster has."""
_CHECKPOINTS_LIMIT_S = 90.0


class WeightsCalls:
    """Checkpoints and final weights; `_call`, `_parsed` and `_until_answered` are the client's."""

    _call: Callable[..., Any]
    _parsed: Callable[..., Any]
    _until_answered: Callable[..., Any]

    def checkpoints(self, job_id: str, *, sums: bool = False) -> CheckpointFiles:
        """The job's checkpoints, newest first, as the server sees them; with `sums` their content is compared too."""
        path, params = f"/api/v1/jobs/{job_id}/checkpoints", {"sums": sums}
        response = self._call("GET", path, params=params, timeout=_CHECKPOINTS_LIMIT_S)
        return self._parsed(CheckpointFiles, response)

    def remove_checkpoint(
        self,
        job_id: str,
        step: int,
        *,
        limit_s: float = REMOVAL_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> RemovedView:
        """Have the cluster delete the checkpoint after `step`; one that is not there is no mistake.

        `waiting` hears of it once; ClientError after `limit_s`.
        """
        path = f"/api/v1/jobs/{job_id}/checkpoints/{step}"
        return self._until_removed(path, limit_s, waiting)

    def remove_export(
        self,
        job_id: str,
        name: str,
        *,
        limit_s: float = REMOVAL_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> RemovedView:
        """Have the cluster delete exported weights, by their name in `artifacts`; as `remove_checkpoint`."""
        return self._until_removed(f"/api/v1/jobs/{job_id}/exports/{name}", limit_s, waiting)

    def _until_removed(self, path: str, limit_s: float, waiting: Callable[[str], None]) -> RemovedView:
        return self._until_answered(
            RemovedView, RemovingView, path, {}, limit_s=limit_s, waiting=waiting, method="DELETE"
        )

    def artifacts(self, job_id: str) -> ArtifactList:
        """What the job has left beside its checkpoints, how much that is, and when it goes."""
        path = f"/api/v1/jobs/{job_id}/artifacts"
        return self._parsed(ArtifactList, self._call("GET", path, timeout=_CHECKPOINTS_LIMIT_S))

    def usage(self, *, owner: str | None = None) -> list[OwnerUsage]:
        """How many bytes there are of whom, most first."""
        params = {} if owner is None else {"owner": owner}
        return self._parsed(UsageList, self._call("GET", "/api/v1/usage", params=params)).items

    def export(
        self,
        job_id: str,
        *,
        step: int | None = None,
        format: str = "safetensors",
        merged: bool = False,
        limit_s: float = EXPORT_LIMIT_S,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> ExportView:
        """Have the cluster write the job's weights beside its checkpoints, those after `step` or the newest whole ones;
        of a model of peft the adapters, or `merged` the whole model with them.

        With the `format` "dcp" all of the checkpoint, as torch.distributed.checkpoint writes one.
        `waiting` hears of it once; ClientError after `limit_s`.
        """
        asked = {"format": format, "step": step, "merged": merged or None}
        call = {"params": {name: value for name, value in asked.items() if value is not None}}
        path = f"/api/v1/jobs/{job_id}/export"
        return self._until_answered(ExportView, ExportingView, path, call, limit_s=limit_s, waiting=waiting)
