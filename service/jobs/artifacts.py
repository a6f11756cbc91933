"""Files that jobs need or leave: code packages, checkpoints, exported weights, and when stored ones expire.

The control plane lists checkpoints itself only below paths, s3, gs and az: a call to any other host that a user names
would be made from inside its network. Exports and deletions run on the cluster; None says that one is under way.
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

from sqlalchemy.exc import IntegrityError

from service.jobs.lifecycle import check_may_change, existing_job
from service.jobs.problems import ProblemCode, ProblemError
from service.jobs.service import Service
from service.jobs.submit import check_admitted
from service.orchestrator.tasks.artifacts import FolderRemoval, RemovalFailedError
from service.orchestrator.tasks.runner import TaskState
from service.schemas.artifacts import (
    ArtifactList,
    ArtifactView,
    CheckpointFile,
    CheckpointFiles,
    ExportedFile,
    ExportView,
    PackageView,
    RemovedView,
)
from service.settings.clusters import DEFAULT_CLUSTER
from service.settings.settings import FOR_EVER
from service.spec.job import PACKAGE_PREFIX, stored_field
from service.spec.principals import Principal
from service.spec.states import JobState
from service.spec.values import is_listable, shadowing_message, uri_scheme
from service.store.database import utc_now
from service.store.files import (
    PackagesUnreachableError,
    StorageInUseError,
    StoredArtifact,
    find_package,
    package_size_and_time,
    put_package,
    renew_package,
    resume_checkpoint_folder,
    store_package,
    stored_artifacts_of,
)
from service.store.measurements import losses_at
from service.store.tables import JobRow
from worker.contract.checkpoint_files import (
    CheckpointError,
    FoundCheckpoint,
    FoundExport,
    find_exports,
    inspect_checkpoints,
    job_uri,
)
from worker.contract.tasks import MERGED_MESSAGE, SAFETENSORS, ExportFailedError, ExportRequest

_LOOK_LIMIT_S = 20.0
_CHECKSUM_LIMIT_S = 40.0
_WRITE_TIMEOUT_S = 600.0  # a driver waits no longer for a checkpoint
PACKAGE_LIMIT_BYTES = 64 << 20
"""An uploaded zip of code at most: it lies in the database or a bucket, and every node of a job gets it."""
UNPACKED_LIMIT_BYTES = 512 << 20
"""The same, unpacked on each node."""
_MAX_ZIP_FILES = 20_000


async def list_checkpoints(service: Service, job_id: str, *, sums: bool) -> CheckpointFiles:
    """The job's checkpoints, newest first; `sums`: with checksums, of as many as can be read in 40 s.

    409 for a job that saves none, 503 where this machine does not see the place, or it does not answer.
    """
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    uri = _checkpoint_uri(job)
    if not is_listable(uri):
        raise ProblemError(
            503,
            f"the control plane looks at no checkpoints below {uri_scheme(uri)}:// ({uri}), only at paths, s3 and gs: look "
            "from a worker's machine",
        )
    checkpoints = await _inspect(job, uri, sums=sums)
    async with service.database.read() as session:
        losses = await losses_at(session, job_id, [checkpoint.step for checkpoint in checkpoints])
    return CheckpointFiles(
        uri=job_uri(uri, job_id),
        items=_checkpoint_views(
            checkpoints,
            losses,
            (job.best_checkpoint or {}).get("step"),
            ended=JobState(job.state).final,
            every=stored_field(job.spec, "checkpoint", "keep_every", 0),
        ),
    )


async def _inspect(job: JobRow, uri: str, *, sums: bool) -> list[FoundCheckpoint]:
    limit_s = _CHECKSUM_LIMIT_S if sums else 0.0
    try:
        looking = asyncio.to_thread(inspect_checkpoints, uri, job.id, sums=sums, limit_s=limit_s)
        return await asyncio.wait_for(looking, limit_s + _LOOK_LIMIT_S)
    except TimeoutError:
        raise ProblemError(
            503, f"{job_uri(uri, job.id)} did not answer in {limit_s + _LOOK_LIMIT_S:g} s"
        ) from None
    except CheckpointError as error:
        if job.checkpoint_step is None:
            return []  # nothing was saved so far
        raise ProblemError(
            503,
            f"{error} (the control plane's machine); a driver last reported step {job.checkpoint_step} at "
            f"{job.checkpoint_uri}: look from a machine that sees it, or mount it here",
        ) from None


def _checkpoint_uri(job: JobRow) -> str:
    uri = stored_field(job.spec, "checkpoint", "uri", "")
    if not uri:
        raise ProblemError(
            409, f"job {job.id} saves no checkpoints: submit it with checkpoint: {{uri: /shared/place}}"
        )
    return uri


def _checkpoint_views(
    checkpoints: list[FoundCheckpoint],
    losses: Mapping[int, float],
    best: int | None,
    *,
    ended: bool,
    every: int,
) -> list[CheckpointFile]:
    """`best` is the step after which the job's evaluations were best; None: the whole checkpoint of the lowest loss is.

    Nothing of a job that has `ended` is being written. `every` is its checkpoint.keep_every.
    """
    whole = [checkpoint.step for checkpoint in checkpoints if checkpoint.damage is None]
    if best is None:
        best = min(
            (step for step in whole if step in losses), key=lambda step: (losses[step], -step), default=None
        )
    return [
        CheckpointFile(
            step=checkpoint.step,
            uri=checkpoint.uri,
            saved_at=None
            if checkpoint.saved_at is None
            else datetime.fromtimestamp(checkpoint.saved_at, UTC),
            size_bytes=checkpoint.size_bytes,
            state=_checkpoint_state(checkpoint, after=None if ended else max(whole, default=0)),
            damage=checkpoint.damage,
            checked="checksums" if checkpoint.summed else "sizes",
            blocking_s=checkpoint.seconds and checkpoint.seconds.blocking,
            writing_s=checkpoint.seconds and checkpoint.seconds.writing,
            loss=losses.get(checkpoint.step),
            kept=_reasons_to_keep(checkpoint, whole[0] if whole else None, best, every),
            latest=bool(whole) and checkpoint.step == whole[0],
            best=checkpoint.step == best,
        )
        for checkpoint in checkpoints
    ]


def _reasons_to_keep(
    checkpoint: FoundCheckpoint, newest: int | None, best: int | None, every: int
) -> list[str]:
    """Reasons beside checkpoint.keep, which keeps the newest ones."""
    if checkpoint.damage is not None:
        return []
    step = checkpoint.step
    reasons = {"latest": step == newest, "best": step == best, "every": every and step % every == 0}
    return [reason for reason, holds in reasons.items() if holds]


def _checkpoint_state(checkpoint: FoundCheckpoint, after: int | None) -> str:
    """`after`: only a checkpoint of a later step can be in writing; None: none can."""
    if checkpoint.damage is None:
        return "complete"
    if checkpoint.finished:
        return "damaged"
    lately = checkpoint.saved_at is None or time.time() - checkpoint.saved_at < _WRITE_TIMEOUT_S
    return "being written" if after is not None and checkpoint.step > after and lately else "unfinished"


async def export_weights(
    service: Service, job_id: str, caller: Principal, *, step: int | None, format: str, merged: bool
) -> ExportView | None:
    """The weights as the cluster has written them beside the checkpoints; None while it writes them.

    `step` None is the newest whole checkpoint. 403 where the job's queue does not admit the caller.
    """
    if format != SAFETENSORS:  # what older clients may ask for
        raise ProblemError(
            422,
            f"format is {format[:40]!r}: weights are written as safetensors; torch.distributed.checkpoint reads a "
            "checkpoint as it lies, by dcp.load(state, checkpoint_id=...)",
        )
    if merged:
        raise ProblemError(422, MERGED_MESSAGE)
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
    check_admitted(service.settings, job.queue, caller)
    cluster = job.began_on or service.settings.cluster_of(job.queue) or DEFAULT_CLUSTER
    try:
        request = ExportRequest(_checkpoint_uri(job), job_id, step)
        export = await service.exporter.result(request, cluster=cluster)
    except ExportFailedError as error:
        raise ProblemError(422, f"the weights of {job_id} could not be written: {error}") from None
    if export is TaskState.RUNNING:
        return None
    return ExportView(
        step=export["step"],
        uri=export["uri"],
        files=[ExportedFile(**file) for file in export["files"]],
        tensors=export["tensors"],
        notes=list(export["notes"]),
    )


async def remove_folder(service: Service, job_id: str, folder: str, caller: Principal) -> RemovedView | None:
    """Delete a checkpoint's or an export's folder by a process of the cluster; None while it does.

    409 for the checkpoint that an unfinished job would go on from, and for a folder that is in use.
    """
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
        removal = await service.remover.result(
            FolderRemoval(job_id, (folder,), by=caller.name), cluster=job.began_on or DEFAULT_CLUSTER
        )
    except StorageInUseError as error:
        raise ProblemError(409, str(error), code=ProblemCode.CHECKPOINT_IN_USE) from None
    except RemovalFailedError as error:
        raise ProblemError(503, f"{folder} of {job_id} could not be deleted: {error}") from None
    if removal is TaskState.RUNNING:
        return None
    if removal.refused:
        raise ProblemError(
            409,
            "; ".join(f"{name} of {job_id} stays: {why}" for name, why in removal.refused.items()),
            code=ProblemCode.CHECKPOINT_IN_USE,
        )
    return RemovedView(
        removed=list(removal.removed),
        refused=dict(removal.refused),
        left=list(removal.left),
        freed_bytes=removal.freed_bytes,
    )


async def list_artifacts(service: Service, job_id: str) -> ArtifactList:
    """Everything that the job has left beside its checkpoints, with sizes and expiry."""
    async with service.database.read() as session:
        job = await existing_job(session, job_id)
        stored = await stored_artifacts_of(session, job_id)
        place = stored_field(job.spec, "code", "working_dir", "")
        digest = place.removeprefix(PACKAGE_PREFIX) if place.startswith(PACKAGE_PREFIX) else ""
        package = await package_size_and_time(session, digest) if digest else None
    settings = service.settings
    days = {
        "postmortem": settings.keep_history_days,
        "log": settings.keep_history_days,
        "plan": settings.keep_history_days,
        "timelines": settings.keep_timelines_days,
    }
    items = [_stored_artifact(job, artifact, _expiry(job, days[artifact.kind])) for artifact in stored]
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
    items += [_export_artifact(export, expires_at) for export in exports]
    return ArtifactList(items=items, stored_bytes=job.stored_bytes, notes=notes)


async def _find_exports(job: JobRow) -> tuple[list[FoundExport], list[str]]:
    """Exports that this machine sees, and a note that says why it sees none."""
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


def _expiry(job: JobRow, days: float) -> datetime | None:
    if days == FOR_EVER or job.finished_at is None or not job.job_state.final:
        return None
    return job.finished_at + timedelta(days=days)


def _stored_artifact(job: JobRow, artifact: StoredArtifact, expires_at: datetime | None) -> ArtifactView:
    path = f"/api/v1/jobs/{job.id}"
    places = {
        "postmortem": f"{path}/postmortem?attempt={artifact.attempt}",
        "log": f"{path}/logs?attempt={artifact.attempt}",
        "plan": f"{path}/plan",
        "timelines": f"{path}/timeline",
    }
    names = {
        "postmortem": f"post-mortem of attempt {artifact.attempt}",
        "log": f"log of attempt {artifact.attempt}",
        "plan": f"plan of attempt {artifact.attempt}",
        "timelines": f"{artifact.count} measured steps",
    }
    return ArtifactView(
        kind=artifact.kind,
        name=names[artifact.kind],
        place=places[artifact.kind],
        attempt=artifact.attempt,
        size_bytes=artifact.size_bytes,
        made_at=artifact.made_at,
        expires_at=expires_at,
    )


def _export_artifact(export: FoundExport, expires_at: datetime | None) -> ArtifactView:
    return ArtifactView(
        kind="export",
        name=export.name,
        place=export.uri,
        step=export.step,
        size_bytes=export.size_bytes,
        made_at=None if export.made_at is None else datetime.fromtimestamp(export.made_at, UTC),
        expires_at=expires_at,
    )


async def store_zip(service: Service, content: bytes, owner: str) -> tuple[PackageView, bool]:
    """Store a package for `owner`; the flag is true where the owner had stored the same before.

    413 for one that is too long, also unpacked, 422 for one that is not safe to unpack, 503 where its place is away.
    """
    if len(content) > PACKAGE_LIMIT_BYTES:
        raise ProblemError(413, f"the zip is longer than {PACKAGE_LIMIT_BYTES} bytes: leave data out")
    digest = await asyncio.to_thread(_checked_zip_digest, content)
    try:
        package = await put_package(digest, content, uri=service.settings.packages_uri)
    except PackagesUnreachableError as error:
        raise ProblemError(
            503,
            f"the package cannot be stored (SLOTLINE_PACKAGES_URI): {error}",
            headers={"Retry-After": "30"},
        ) from None
    async with service.database.write() as session:
        own = await find_package(session, digest, owner=owner)
        known = await renew_package(session, package, at=utc_now(), owner=owner)
    if not known:
        try:
            async with service.database.write() as session:
                await store_package(session, package, at=utc_now(), owner=owner)
        except IntegrityError:  # another request stored the same one meanwhile
            async with service.database.write() as session:
                own = await find_package(session, digest, owner=owner)
                await renew_package(session, package, at=utc_now(), owner=owner)
    return PackageView(uri=f"{PACKAGE_PREFIX}{digest}", digest=digest, size_bytes=len(content)), bool(own)


def _checked_zip_digest(content: bytes) -> str:
    """The SHA-256 of a zip that is safe to unpack; 422 or 413 for any other."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError) as error:
        raise ProblemError(422, f"the body is no zip ({error}): send one as application/zip") from None
    if len(entries) > _MAX_ZIP_FILES:
        raise ProblemError(413, f"the zip holds {len(entries)} files, the limit is {_MAX_ZIP_FILES}")
    size = sum(entry.file_size for entry in entries)
    if size > UNPACKED_LIMIT_BYTES:
        raise ProblemError(413, f"the zip unpacks to {size} bytes, the limit is {UNPACKED_LIMIT_BYTES}")
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
    if (message := shadowing_message(path)) is not None:
        raise ProblemError(422, message)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ProblemError(422, f"{entry.filename!r} is a link or a device: send plain files")
    if entry.flag_bits & 0x1:
        raise ProblemError(422, f"{entry.filename!r} is encrypted: send a plain zip")
