"""What a job has saved: its checkpoints as they lie there, and its final weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from service.api.asking_again import ask_again
from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, check_admitted, existing_job
from service.api.schemas import CheckpointFile, CheckpointFiles, ExportedFile, ExportingView, ExportView
from service.cluster_settings import DEFAULT
from service.job_states import JobState
from service.jobspec import stored
from service.store.steps import losses_at
from service.store.tables import Job
from worker.checkpoint_files import CheckpointError, FoundCheckpoint, job_uri, look
from worker.weights.request import ExportFailedError, ExportRequest

router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 409, 422), route_class=UserRoute
)
_LOOK_LIMIT_S = 20.0
_SUMS_LIMIT_S = 40.0
_WRITING_S = 600.0  # a driver waits no longer for a checkpoint
# Not whatever a user names: calls to other hosts would be made by this process, from inside its network.
_LOOKED_AT = ("", "file", "s3", "gs", "gcs", "az", "abfs", "abfss")


@router.get("/checkpoints", responses=responses(503))
async def checkpoints(
    job_id: JobId,
    service: Current,
    sums: Annotated[
        bool,
        Query(description="Compare checksums too, of as many as can be read in 40 seconds, newest first"),
    ] = False,
) -> CheckpointFiles:
    """The job's checkpoints, newest first: which are whole, which is the latest and which had the lowest loss.

    They are looked at from here: 503 where this control plane does not see the place that workers write to.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    uri = _place(job)
    if not looked_at(uri):
        raise ProblemError(
            503,
            f"the control plane looks at no checkpoints below {_scheme(uri)}:// ({uri}), only at paths, s3 and gs: look "
            "from a worker's machine",
        )
    limit_s = _SUMS_LIMIT_S if sums else 0.0
    try:
        looking = asyncio.to_thread(look, uri, job_id, sums=sums, limit_s=limit_s)
        found = await asyncio.wait_for(looking, limit_s + _LOOK_LIMIT_S)
    except TimeoutError:
        raise ProblemError(
            503, f"{job_uri(uri, job_id)} did not answer in {limit_s + _LOOK_LIMIT_S:g} s"
        ) from None
    except CheckpointError as error:
        if job.checkpoint_step is None:
            found = []  # nothing was saved so far
        else:
            raise ProblemError(
                503,
                f"{error} (the control plane's machine); a driver last reported step {job.checkpoint_step} at "
                f"{job.checkpoint_uri}: look from a machine that sees it, or mount it here",
            ) from None
    async with service.database.read() as session:
        losses = await losses_at(session, job_id, [one.step for one in found])
    return CheckpointFiles(
        uri=job_uri(uri, job_id),
        items=_views(
            found,
            losses,
            (job.best_checkpoint or {}).get("step"),
            ended=JobState(job.state).final,
            every=stored(job.spec, "checkpoint", "keep_every", 0),
        ),
    )


@router.post(
    "/export",
    response_model=ExportView,
    responses={
        202: {"model": ExportingView, "description": "Being written: ask again"},
        **responses(403, 503),
    },
)
async def export(
    job_id: JobId,
    caller: Caller,
    service: Current,
    step: Annotated[int | None, Query(ge=1, lt=2**31, description="The newest whole one if absent")] = None,
    format: Annotated[
        Literal["safetensors", "dcp"],
        Query(description="dcp: all of the checkpoint, as torch.distributed.checkpoint writes one"),
    ] = "safetensors",
    merged: Annotated[
        bool,
        Query(
            description="Of a model of peft: not the adapters, but the whole model with them in its weights"
        ),
    ] = False,
) -> Response:
    """Write the job's weights beside its checkpoints, as safetensors with the model's own names and its configuration.

    A process of the cluster does so: 202 until it has, send the same again.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    check_admitted(service.settings, job.queue, caller)
    cluster = job.began_on or service.settings.cluster_of(job.queue) or DEFAULT
    try:
        request = ExportRequest(_place(job), job_id, step, None, format, merged)
        found = await service.exporter.exported(request, cluster=cluster)
    except ExportFailedError as error:
        raise ProblemError(422, f"the weights of {job_id} could not be written: {error}") from None
    if found is None:
        return ask_again(
            ExportingView(state="EXPORTING", message=f"the cluster writes the weights of {job_id}")
        )
    view = ExportView(
        step=found["step"],
        uri=found["uri"],
        files=[ExportedFile(**one) for one in found["files"]],
        tensors=found["tensors"],
        notes=list(found["notes"]),
    )
    return Response(view.model_dump_json(), media_type="application/json")


def looked_at(uri: str) -> bool:
    """Whether the control plane itself may look what lies below a job's checkpoint.uri."""
    return _scheme(uri) in _LOOKED_AT


def _scheme(uri: str) -> str:
    """What is before `://`, or the chain of file systems that fsspec takes before `::`; empty for a path."""
    scheme, found, _ = uri.partition("::" if "::" in uri else "://")
    return scheme if found else ""


def _place(job: Job) -> str:
    uri = stored(job.spec, "checkpoint", "uri", "")
    if not uri:
        raise ProblemError(
            409, f"job {job.id} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}"
        )
    return uri


def _views(
    found: list[FoundCheckpoint], losses: Mapping[int, float], best: int | None, *, ended: bool, every: int
) -> list[CheckpointFile]:
    """`best`: the step after which the job's evaluations were best, if there are any; else its loss says. Of a job that
    has `ended` nothing is being written."""
    whole = [one.step for one in found if one.damage is None]
    if best is None:
        best = min(
            (step for step in whole if step in losses), key=lambda step: (losses[step], -step), default=None
        )
    return [
        CheckpointFile(
            step=one.step,
            uri=one.uri,
            saved_at=None if one.saved_at is None else datetime.fromtimestamp(one.saved_at, UTC),
            size_bytes=one.size_bytes,
            state=_state(one, after=None if ended else max(whole, default=0)),
            damage=one.damage,
            checked="checksums" if one.summed else "sizes",
            blocking_s=one.seconds and one.seconds.blocking,
            writing_s=one.seconds and one.seconds.writing,
            loss=losses.get(one.step),
            kept=_kept(one, whole[0] if whole else None, best, every),
            latest=bool(whole) and one.step == whole[0],
            best=one.step == best,
        )
        for one in found
    ]


def _kept(one: FoundCheckpoint, newest: int | None, best: int | None, every: int) -> list[str]:
    """Why it stays, beside being one of the newest so many."""
    if one.damage is not None:
        return []
    kept = {"latest": one.step == newest, "best": one.step == best, "every": every and one.step % every == 0}
    return [why for why, holds in kept.items() if holds]


def _state(one: FoundCheckpoint, after: int | None) -> str:
    """`after`: only what is of a later step is being written, None for nothing is."""
    if one.damage is None:
        return "complete"
    if one.finished:
        return "damaged"
    lately = one.saved_at is None or time.time() - one.saved_at < _WRITING_S
    return "being written" if after is not None and one.step > after and lately else "unfinished"
