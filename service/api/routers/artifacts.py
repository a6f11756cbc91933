"""Routes for files that jobs need or leave: code packages, checkpoints, exported weights, and storage usage.

The control plane lists checkpoints itself only below paths, s3, gs and az, never at any other host a user names.
Exports and deletions run on the cluster: 202 until they are done, the same request is sent again.
A package is stored once, under the SHA-256 of its zip, after a check that it is safe to unpack.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import time
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import PurePosixPath
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Path, Query, Response
from sqlalchemy.exc import IntegrityError

from service.api.auth import Caller
from service.api.dependencies import CurrentService, Service, accepted
from service.api.errors import ProblemCode, ProblemError, responses
from service.api.middleware import UserRoute
from service.api.routers.jobs import JobId, check_admitted, check_may_change, existing_job
from service.orchestrator.tasks.artifacts import RemovalFailedError
from service.schemas.artifacts import (
    ArtifactList,
    ArtifactView,
    OwnerUsage,
    RemovedView,
    RemovingView,
    UsageList,
)
from service.schemas.jobs import (
    CheckpointFile,
    CheckpointFiles,
    ExportedFile,
    ExportingView,
    ExportView,
    PackageView,
)
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import FOR_EVER
from service.spec.job import OWNER_PATTERN, PACKAGE_PREFIX, stored_field
from service.spec.states import JobState, Principal
from service.store.database import utc_now
from service.store.files import (
    StorageInUseError,
    StoredArtifact,
    find_package,
    package_size_and_time,
    renew_package,
    resume_checkpoint_folder,
    storage_usage_by_owner,
    store_package,
    stored_artifacts_of,
)
from service.store.measurements import losses_at
from service.store.tables import Job
from worker.contract.checkpoint_files import (
    CheckpointError,
    FoundCheckpoint,
    FoundExport,
    find_exports,
    inspect_checkpoints,
    job_uri,
    step_folder_name,
)
from worker.contract.tasks import ExportFailedError, ExportRequest

weights_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 409, 422), route_class=UserRoute
)
_LOOK_LIMIT_S = 20.0
_CHECKSUM_LIMIT_S = 40.0
_WRITE_TIMEOUT_S = 600.0  # a driver waits no longer for a checkpoint
# Not whatever a user names: calls to other hosts would be made by this process, from inside its network.
_LISTABLE_SCHEMES = ("", "file", "s3", "gs", "gcs", "az", "abfs", "abfss")


@weights_router.get("/checkpoints", responses=responses(503))
async def read_checkpoints(
    job_id: JobId,
    service: CurrentService,
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
    uri = _checkpoint_uri(job)
    if not is_listable(uri):
        raise ProblemError(
            503,
            f"the control plane looks at no checkpoints below {_uri_scheme(uri)}:// ({uri}), only at paths, s3 and gs: look "
            "from a worker's machine",
        )
    limit_s = _CHECKSUM_LIMIT_S if sums else 0.0
    try:
        looking = asyncio.to_thread(inspect_checkpoints, uri, job_id, sums=sums, limit_s=limit_s)
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
        items=_checkpoint_views(
            found,
            losses,
            (job.best_checkpoint or {}).get("step"),
            ended=JobState(job.state).final,
            every=stored_field(job.spec, "checkpoint", "keep_every", 0),
        ),
    )


@weights_router.post(
    "/export",
    response_model=ExportView,
    responses={
        202: {"model": ExportingView, "description": "Being written: ask again"},
        **responses(403, 503),
    },
)
async def export_weights(
    job_id: JobId,
    caller: Caller,
    service: CurrentService,
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
    cluster = job.began_on or service.settings.cluster_of(job.queue) or DEFAULT_CLUSTER
    try:
        request = ExportRequest(_checkpoint_uri(job), job_id, step, None, format, merged)
        found = await service.exporter.exported(request, cluster=cluster)
    except ExportFailedError as error:
        raise ProblemError(422, f"the weights of {job_id} could not be written: {error}") from None
    if found is None:
        return accepted(
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


def is_listable(uri: str) -> bool:
    """Whether the control plane itself may look what lies below a job's checkpoint.uri."""
    return _uri_scheme(uri) in _LISTABLE_SCHEMES


def _uri_scheme(uri: str) -> str:
    """What is before `://`, or the chain of file systems that fsspec takes before `::`; empty for a path."""
    scheme, found, _ = uri.partition("::" if "::" in uri else "://")
    return scheme if found else ""


def _checkpoint_uri(job: Job) -> str:
    uri = stored_field(job.spec, "checkpoint", "uri", "")
    if not uri:
        raise ProblemError(
            409, f"job {job.id} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}"
        )
    return uri


def _checkpoint_views(
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
            state=_checkpoint_state(one, after=None if ended else max(whole, default=0)),
            damage=one.damage,
            checked="checksums" if one.summed else "sizes",
            blocking_s=one.seconds and one.seconds.blocking,
            writing_s=one.seconds and one.seconds.writing,
            loss=losses.get(one.step),
            kept=_kept_because(one, whole[0] if whole else None, best, every),
            latest=bool(whole) and one.step == whole[0],
            best=one.step == best,
        )
        for one in found
    ]


def _kept_because(one: FoundCheckpoint, newest: int | None, best: int | None, every: int) -> list[str]:
    """Why it stays, beside being one of the newest so many."""
    if one.damage is not None:
        return []
    kept = {"latest": one.step == newest, "best": one.step == best, "every": every and one.step % every == 0}
    return [why for why, holds in kept.items() if holds]


def _checkpoint_state(one: FoundCheckpoint, after: int | None) -> str:
    """`after`: only what is of a later step is being written, None for nothing is."""
    if one.damage is None:
        return "complete"
    if one.finished:
        return "damaged"
    lately = one.saved_at is None or time.time() - one.saved_at < _WRITE_TIMEOUT_S
    return "being written" if after is not None and one.step > after and lately else "unfinished"


artifacts_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 422), route_class=UserRoute
)
usage_router = APIRouter(prefix="/api/v1/usage", tags=["people"], route_class=UserRoute)

_REMOVAL_RESPONSES = {
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


@artifacts_router.get("/artifacts")
async def read_artifacts(job_id: JobId, service: CurrentService) -> ArtifactList:
    """What the job has left beside its checkpoints, how much that is, and when it goes."""
    settings = service.settings
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        left = await stored_artifacts_of(session, job_id)
        place = stored_field(job.spec, "code", "working_dir", "")
        digest = place.removeprefix(PACKAGE_PREFIX) if place.startswith(PACKAGE_PREFIX) else ""
        package = await package_size_and_time(session, digest) if digest else None
    days = {
        "postmortem": settings.keep_history_days,
        "log": settings.keep_history_days,
        "plan": settings.keep_history_days,
        "timelines": settings.keep_timelines_days,
    }
    items = [_stored_artifact(job, one, _expiry(job, days[one.kind])) for one in left]
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
    exports, notes = await _find_exports(job)
    expires_at = _expiry(job, settings.keep_checkpoints_days)
    items += [_export_artifact(one, expires_at) for one in exports]
    return ArtifactList(items=items, stored_bytes=job.stored_bytes, notes=notes)


@artifacts_router.delete("/checkpoints/{step}", response_model=RemovedView, responses=_REMOVAL_RESPONSES)
async def remove_checkpoint(
    job_id: JobId, step: StepPath, caller: Caller, service: CurrentService
) -> Response:
    """Delete a checkpoint, by a process of the cluster: 202 until it has, send the same again.

    The one from which a job would go on stays until the job has ended; one that an export reads until that has.
    """
    return await _remove(service, caller, job_id, step_folder_name(step))


@artifacts_router.delete("/exports/{name}", response_model=RemovedView, responses=_REMOVAL_RESPONSES)
async def remove_export(job_id: JobId, name: ExportName, caller: Caller, service: CurrentService) -> Response:
    """Delete exported weights, as a checkpoint is deleted."""
    return await _remove(service, caller, job_id, name)


@usage_router.get("", responses=responses(422))
async def read_usage(
    service: CurrentService,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's")
    ] = None,
) -> UsageList:
    """How many bytes there are of whom: checkpoints and exports, kept plans, packages."""
    async with service.database.read() as session:
        found = await storage_usage_by_owner(session, owner=owner)
    return UsageList(items=[OwnerUsage.model_validate(one, from_attributes=True) for one in found])


async def _remove(service: Service, caller: Principal, job_id: str, folder: str) -> Response:
    async with service.database.read() as session:
        await check_may_change(session, caller, job_id)
        job = await existing_job(session, job_id)
    if not stored_field(job.spec, "checkpoint", "uri", ""):
        raise ProblemError(409, f"job {job_id} saves no checkpoints: there is nothing to be deleted")
    if not job.job_state.final and resume_checkpoint_folder(job) == folder:
        raise ProblemError(
            409,
            f"job {job_id} is {job.state}, and would go on from this checkpoint: it stays until the job has ended",
            code=ProblemCode.CHECKPOINT_IN_USE,
        )
    try:
        found = await service.remover.removed(
            job_id, (folder,), by=caller.name, cluster=job.began_on or DEFAULT_CLUSTER
        )
    except StorageInUseError as error:
        raise ProblemError(409, str(error), code=ProblemCode.CHECKPOINT_IN_USE) from None
    except RemovalFailedError as error:
        raise ProblemError(503, f"{folder} of {job_id} could not be deleted: {error}") from None
    if found is None:
        return accepted(RemovingView(state="REMOVING", message=f"the cluster deletes {folder} of {job_id}"))
    if found.refused:
        raise ProblemError(
            409,
            "; ".join(f"{name} of {job_id} stays: {why}" for name, why in found.refused.items()),
            code=ProblemCode.CHECKPOINT_IN_USE,
        )
    view = RemovedView(
        removed=list(found.removed),
        refused=dict(found.refused),
        left=list(found.left),
        freed_bytes=found.freed_bytes,
    )
    return Response(view.model_dump_json(), media_type="application/json")


async def _find_exports(job: Job) -> tuple[list[FoundExport], list[str]]:
    """Those that this control plane sees, and why it sees none."""
    uri = stored_field(job.spec, "checkpoint", "uri", "")
    if not uri:
        return [], []
    if not is_listable(uri):
        return [], [f"exports below {uri} are not listed: the control plane looks only at paths, s3 and gs"]
    try:
        looking = asyncio.to_thread(find_exports, uri, job.id)
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


def _stored_artifact(job: Job, one: StoredArtifact, expires_at: datetime | None) -> ArtifactView:
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


def _export_artifact(one: FoundExport, expires_at: datetime | None) -> ArtifactView:
    return ArtifactView(
        kind="export",
        name=one.name,
        place=one.uri,
        step=one.step,
        size_bytes=one.size_bytes,
        made_at=None if one.made_at is None else datetime.fromtimestamp(one.made_at, UTC),
        expires_at=expires_at,
    )


packages_router = APIRouter(prefix="/api/v1/packages", tags=["packages"], route_class=UserRoute)
_MAX_ZIP_FILES = 20_000


@packages_router.post("", status_code=201, responses={200: {"model": PackageView}, **responses(413, 422)})
async def upload_package(
    content: Annotated[bytes, Body(media_type="application/zip")],
    caller: Caller,
    service: CurrentService,
    response: Response,
) -> PackageView:
    """Store a zip; 200 when the caller has done so before. `uri` goes into code.working_dir."""
    settings = service.settings
    if len(content) > settings.package_limit_bytes:
        raise ProblemError(
            413, f"the zip is longer than {settings.package_limit_bytes} bytes: leave data out"
        )
    digest = await asyncio.to_thread(_checked_zip_digest, content, settings.package_unpacked_limit_bytes)
    who = caller.name
    async with service.database.write() as session:
        theirs = await find_package(session, digest, owner=who)
        known = await renew_package(session, digest, at=utc_now(), owner=who)
    if not known:
        try:
            async with service.database.write() as session:
                await store_package(session, digest, content, at=utc_now(), owner=who)
        except IntegrityError:  # somebody stored the same one a moment ago
            async with service.database.write() as session:
                theirs = await find_package(session, digest, owner=who)
                await renew_package(session, digest, at=utc_now(), owner=who)
    if theirs:
        response.status_code = 200
    return PackageView(uri=f"{PACKAGE_PREFIX}{digest}", digest=digest, size_bytes=len(content))


def _checked_zip_digest(content: bytes, unpacked_limit_bytes: int) -> str:
    """The SHA-256 of a zip that is safe to unpack; 422 or 413 for any other."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise ProblemError(422, f"the body is no zip ({error}): send one as application/zip") from None
    if len(entries) > _MAX_ZIP_FILES:
        raise ProblemError(413, f"the zip holds {len(entries)} files, the limit is {_MAX_ZIP_FILES}")
    size = sum(entry.file_size for entry in entries)
    if size > unpacked_limit_bytes:
        raise ProblemError(413, f"the zip unpacks to {size} bytes, the limit is {unpacked_limit_bytes}")
    for entry in entries:
        _check_zip_entry(entry)
    return hashlib.sha256(content).hexdigest()


def _check_zip_entry(entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if path.is_absolute() or ".." in path.parts or ":" in entry.filename[:3]:
        raise ProblemError(
            422, f"{entry.filename!r} would be unpacked outside its folder: use relative paths"
        )
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ProblemError(422, f"{entry.filename!r} is a link or a device: send plain files")
    if entry.flag_bits & 0x1:
        raise ProblemError(422, f"{entry.filename!r} is encrypted: send a plain zip")
