"""Routes for files that jobs need or leave: code packages, checkpoints, exported weights, and storage usage.

Exports and deletions run on the cluster: 202 until they are done, the same request is sent again.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from service.api.auth import Caller
from service.api.dependencies import CurrentService, JobId, accepted, json_text
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.jobs import artifacts as rules
from service.jobs.service import Service
from service.schemas.artifacts import (
    ArtifactList,
    CheckpointFiles,
    ExportingView,
    ExportView,
    OwnerUsage,
    PackageView,
    RemovedView,
    RemovingView,
    UsageList,
)
from service.spec.job import OWNER_PATTERN
from service.spec.principals import Principal
from service.store.files import (
    storage_usage_by_owner,
)
from worker.contract.checkpoint_files import (
    step_folder_name,
)

weights_router = APIRouter(
    prefix="/api/v1/jobs/{job_id}", tags=["jobs"], responses=responses(404, 409, 422), route_class=UserRoute
)


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
    return await rules.list_checkpoints(service, job_id, sums=sums)


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
    format: Annotated[str, Query(include_in_schema=False)] = "safetensors",
    merged: Annotated[bool, Query(include_in_schema=False)] = False,
) -> Response:
    """Write the job's weights beside its checkpoints, as safetensors with the model's own names and its configuration.

    A process of the cluster does so: 202 until it has, send the same again.
    """
    export = await rules.export_weights(service, job_id, caller, step=step, format=format, merged=merged)
    if export is None:
        message = f"the cluster writes the weights of {job_id}"
        return accepted(ExportingView(state="EXPORTING", message=message))
    return json_text(export.model_dump_json())


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
    """Artifacts of the job beside its checkpoints, with their sizes and expiry."""
    return await rules.list_artifacts(service, job_id)


@artifacts_router.delete("/checkpoints/{step}", response_model=RemovedView, responses=_REMOVAL_RESPONSES)
async def remove_checkpoint(
    job_id: JobId, step: StepPath, caller: Caller, service: CurrentService
) -> Response:
    """Delete a checkpoint, by a process of the cluster: 202 until it has, send the same again.

    The one from which a job would go on stays until the job has ended; one that an export reads until that has.
    """
    return await _remove(service, job_id, step_folder_name(step), caller)


@artifacts_router.delete("/exports/{name}", response_model=RemovedView, responses=_REMOVAL_RESPONSES)
async def remove_export(job_id: JobId, name: ExportName, caller: Caller, service: CurrentService) -> Response:
    """Delete exported weights, as a checkpoint is deleted."""
    return await _remove(service, job_id, name, caller)


async def _remove(service: Service, job_id: str, folder: str, caller: Principal) -> Response:
    removed = await rules.remove_folder(service, job_id, folder, caller)
    if removed is None:
        return accepted(RemovingView(state="REMOVING", message=f"the cluster deletes {folder} of {job_id}"))
    return json_text(removed.model_dump_json())


@usage_router.get("", responses=responses(422))
async def read_usage(
    caller: Caller,
    service: CurrentService,
    owner: Annotated[
        str | None, Query(max_length=200, pattern=OWNER_PATTERN, description="Only this principal's")
    ] = None,
) -> UsageList:
    """Stored bytes by owner: checkpoints and exports and saved plans of the caller's projects, packages."""
    async with service.database.read() as session:
        usage = await storage_usage_by_owner(session, owner=owner, projects=caller.visible_projects)
    return UsageList(
        items=[OwnerUsage.model_validate(owner_usage, from_attributes=True) for owner_usage in usage]
    )


packages_router = APIRouter(prefix="/api/v1/packages", tags=["packages"], route_class=UserRoute)


@packages_router.post("", status_code=201, responses={200: {"model": PackageView}, **responses(413, 422)})
async def upload_package(
    content: Annotated[bytes, Body(media_type="application/zip")],
    caller: Caller,
    service: CurrentService,
    response: Response,
) -> PackageView:
    """Store a zip; 200 when the caller has done so before. `uri` goes into code.working_dir."""
    package, stored_before = await rules.store_zip(service, content, caller.name)
    if stored_before:
        response.status_code = 200
    return package
