"""What jobs leave: lists of it, what it takes, and its deletion."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from service.api.artifact_schemas import (
    ArtifactList,
    ArtifactView,
    OwnerUsage,
    RemovedView,
    RemovingView,
    UsageList,
)
from service.api.asking_again import ask_again
from service.api.auth import Caller
from service.api.context import Current, Service
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.manage import JobId, check_theirs, existing_job
from service.api.problem_codes import Code
from service.api.weights import looked_at
from service.cluster_settings import DEFAULT
from service.jobspec import OWNER_PATTERN, PACKAGE_PREFIX, stored
from service.orchestrator.removing import RemovalFailedError
from service.principals import Principal
from service.settings_keeping import FOR_EVER
from service.store.removals import reported_folder
from service.store.storage_uses import InUseError
from service.store.tables import Job
from service.store.usage import Left, left_by, package_of, usage_of_owners
from worker.checkpoint_files import CheckpointError, folder_name
from worker.export_files import FoundExport, exports_of

jobs = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)
usage_router = APIRouter(prefix="/api/v1/usage", tags=["people"], route_class=UserRoute)

_LOOK_LIMIT_S = 20.0
_DELETED = {
    202: {"model": RemovingView, "description": "Being deleted: ask again"},
    **responses(409, 503),
}
StepPath = Annotated[int, Path(ge=0, lt=2**31, description="After this step")]
ExportName = Annotated[
    str,
    Path(
        pattern=r"^(export|export-dcp|merged)-step-\d{10}$",
        description="As the list of artifacts has it, e.g. export-step-0000000050",
    ),
]


@jobs.get("/artifacts")
async def artifacts(job_id: JobId, service: Current) -> ArtifactList:
    """What the job has left beside its checkpoints, how much that is, and when it goes."""
    settings = service.settings
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        left = await left_by(session, job_id)
        place = stored(job.spec, "code", "working_dir", "")
        digest = place.removeprefix(PACKAGE_PREFIX) if place.startswith(PACKAGE_PREFIX) else ""
        package = await package_of(session, digest) if digest else None
    days = {
        "postmortem": settings.keep_history_days,
        "log": settings.keep_history_days,
        "plan": settings.keep_history_days,
        "timelines": settings.keep_timelines_days,
    }
    items = [_of_database(job, one, _expiry(job, days[one.kind])) for one in left]
    if package is not None:
        items.append(
            ArtifactView(
                kind="package",
                name=place,
                place=place,
                size_bytes=package[0],
                made_at=package[1],
                expires_at=None,
            )
        )
    exports, notes = await _exports(job)
    expires_at = _expiry(job, settings.keep_checkpoints_days)
    items += [_of_storage(one, expires_at) for one in exports]
    return ArtifactList(items=items, stored_bytes=job.stored_bytes, notes=notes)


@jobs.delete("/checkpoints/{step}", response_model=RemovedView, responses=_DELETED)
async def remove_checkpoint(job_id: JobId, step: StepPath, caller: Caller, service: Current) -> Response:
    """Delete a checkpoint, by a process of the cluster: 202 until it has, send the same again.

    The one from which a job would go on stays until the job has ended; one that an export reads until that has.
    """
    return await _remove(service, caller, job_id, folder_name(step))


@jobs.delete("/exports/{name}", response_model=RemovedView, responses=_DELETED)
async def remove_export(job_id: JobId, name: ExportName, caller: Caller, service: Current) -> Response:
    """Delete exported weights, as a checkpoint is deleted."""
    return await _remove(service, caller, job_id, name)


@usage_router.get("", responses=responses(422))
async def usage(
    service: Current,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's")
    ] = None,
) -> UsageList:
    """How many bytes there are of whom: checkpoints and exports, kept plans, packages."""
    async with service.database.read() as session:
        found = await usage_of_owners(session, owner=owner)
    return UsageList(items=[OwnerUsage.model_validate(one, from_attributes=True) for one in found])


async def _remove(service: Service, caller: Principal, job_id: str, folder: str) -> Response:
    async with service.database.read() as session:
        await check_theirs(session, caller, job_id)
        job = await existing_job(session, job_id)
    if not stored(job.spec, "checkpoint", "uri", ""):
        raise ProblemError(409, f"job {job_id} saves no checkpoints: there is nothing to be deleted")
    if not job.job_state.final and reported_folder(job) == folder:
        raise ProblemError(
            409,
            f"job {job_id} is {job.state}, and would go on from this checkpoint: it stays until the job has ended",
            code=Code.CHECKPOINT_IN_USE,
        )
    try:
        found = await service.remover.removed(
            job_id, (folder,), by=caller.name, cluster=job.began_on or DEFAULT
        )
    except InUseError as error:
        raise ProblemError(409, str(error), code=Code.CHECKPOINT_IN_USE) from None
    except RemovalFailedError as error:
        raise ProblemError(503, f"{folder} of {job_id} could not be deleted: {error}") from None
    if found is None:
        return ask_again(RemovingView(state="REMOVING", message=f"the cluster deletes {folder} of {job_id}"))
    if found.refused:
        raise ProblemError(
            409,
            "; ".join(f"{name} of {job_id} stays: {why}" for name, why in found.refused.items()),
            code=Code.CHECKPOINT_IN_USE,
        )
    view = RemovedView(
        removed=list(found.removed),
        refused=dict(found.refused),
        left=list(found.left),
        freed_bytes=found.freed_bytes,
    )
    return Response(view.model_dump_json(), media_type="application/json")


async def _exports(job: Job) -> tuple[list[FoundExport], list[str]]:
    """Those that this control plane sees, and why it sees none."""
    uri = stored(job.spec, "checkpoint", "uri", "")
    if not uri:
        return [], []
    if not looked_at(uri):
        return [], [f"exports below {uri} are not listed: the control plane looks only at paths, s3 and gs"]
    try:
        looking = asyncio.to_thread(exports_of, uri, job.id)
        return await asyncio.wait_for(looking, _LOOK_LIMIT_S), []
    except TimeoutError:
        return [], [f"exports are not listed: {uri} did not answer in {_LOOK_LIMIT_S:g} s"]
    except CheckpointError as error:
        nothing_saved = job.checkpoint_step is None
        return [], [] if nothing_saved else [f"exports are not listed: {error} (the control plane's machine)"]


def _expiry(job: Job, days: float) -> datetime | None:
    if days == FOR_EVER or job.finished_at is None or not job.job_state.final:
        return None
    return job.finished_at + timedelta(days=days)


def _of_database(job: Job, one: Left, expires_at: datetime | None) -> ArtifactView:
    path = f"/api/v1/jobs/{job.id}"
    places = {
        "postmortem": f"{path}/postmortem?attempt={one.attempt}",
        "log": f"{path}/logs?attempt={one.attempt}",
        "plan": f"{path}/plan",
        "timelines": f"{path}/timeline",
    }
    names = {
        "postmortem": f"post-mortem of attempt {one.attempt}",
        "log": f"log of attempt {one.attempt}",
        "plan": f"plan of attempt {one.attempt}",
        "timelines": f"{one.count} measured steps",
    }
    return ArtifactView(
        kind=one.kind,
        name=names[one.kind],
        place=places[one.kind],
        attempt=one.attempt,
        size_bytes=one.size_bytes,
        made_at=one.made_at,
        expires_at=expires_at,
    )


def _of_storage(one: FoundExport, expires_at: datetime | None) -> ArtifactView:
    return ArtifactView(
        kind="export",
        name=one.name,
        place=one.uri,
        step=one.step,
        size_bytes=one.size_bytes,
        made_at=None if one.made_at is None else datetime.fromtimestamp(one.made_at, UTC),
        expires_at=expires_at,
    )
