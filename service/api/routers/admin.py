"""Routes for tokens, projects, the audit list, a caller's secrets, and the log of notifications sent for a job.

No answer ever holds a secret; a token is in the answer to its creation, and in no other.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from service.api.auth import Caller
from service.api.dependencies import CurrentService, JobId
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.jobs import admin
from service.schemas.admin import (
    AuditPage,
    DeliveryPage,
    NewToken,
    ProjectList,
    ProjectMember,
    ProjectView,
    SecretList,
    TokenList,
    TokenRequest,
    Whoami,
)
from service.spec.job import OWNER_PATTERN
from service.spec.names import NAME_PATTERN
from service.spec.values import VARIABLE_PATTERN

notifications_router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)


@notifications_router.get("/{job_id}/notifications", responses=responses(404, 422))
async def list_deliveries(
    job_id: JobId,
    service: CurrentService,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,9}$")] = None,
) -> DeliveryPage:
    """Notifications of the job's states, and how their delivery went. The operator's URL is not shown."""
    return await admin.read_deliveries(service, job_id, skip=int(page_token or 0), limit=limit)


people_router = APIRouter(prefix="/api/v1", tags=["people"], route_class=UserRoute)
TokenName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100)]
PrincipalQuery = Annotated[str | None, Query(max_length=200, pattern=OWNER_PATTERN)]


@people_router.get("/whoami")
async def whoami(caller: Caller) -> Whoami:
    """The name and the role of the token that the call carries."""
    return Whoami(name=caller.name, role=caller.role)


@people_router.get("/tokens")
async def read_tokens(service: CurrentService) -> TokenList:
    """All tokens, also expired ones, without their texts."""
    return await admin.read_tokens(service)


@people_router.post("/tokens", status_code=201, responses=responses(409, 422))
async def create_token(wanted: TokenRequest, caller: Caller, service: CurrentService) -> NewToken:
    """Make a token; it is in this answer and nowhere else."""
    return await admin.create_token(service, wanted, caller)


@people_router.delete("/tokens/{name}", status_code=204, responses=responses(404, 422))
async def revoke_token(name: TokenName, caller: Caller, service: CurrentService) -> Response:
    """Make a token invalid, at once."""
    await admin.revoke_token(service, name, caller)
    return Response(status_code=204)


@people_router.get("/audit", responses=responses(422))
async def read_audit(
    service: CurrentService,
    principal: PrincipalQuery = None,
    subject: PrincipalQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^\d{1,18}$")] = None,
) -> AuditPage:
    """Actions of all principals, newest first: submits, cancels, retries, tokens made and revoked."""
    before = None if page_token is None else int(page_token)
    return await admin.read_audit(service, principal=principal, subject=subject, before=before, limit=limit)


projects_router = APIRouter(prefix="/api/v1/projects", tags=["people"], route_class=UserRoute)
ProjectName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100, description="A project")]


@projects_router.get("")
async def read_projects(caller: Caller, service: CurrentService) -> ProjectList:
    """The projects that the caller is in, all for operators, with their members."""
    return await admin.read_projects(service, caller)


@projects_router.get("/{name}", responses=responses(404, 422))
async def read_project(name: ProjectName, caller: Caller, service: CurrentService) -> ProjectView:
    """A project that the caller is in, with its members."""
    return await admin.read_project(service, name, caller)


@projects_router.put("/{name}/members", responses=responses(422))
async def set_project_member(
    name: ProjectName, member: ProjectMember, caller: Caller, service: CurrentService
) -> ProjectView:
    """Give a principal, or all whose names fit a pattern, a role in the project, at once. The first member makes it."""
    return await admin.set_member(service, name, member, caller)


@projects_router.delete("/{name}/members", status_code=204, responses=responses(404, 422))
async def remove_project_member(
    name: ProjectName,
    principal: Annotated[
        str, Query(max_length=200, pattern=OWNER_PATTERN, description="As the project lists it")
    ],
    caller: Caller,
    service: CurrentService,
) -> Response:
    """Take a principal or pattern out of the project: its jobs are no longer there for who is in it by no other."""
    await admin.remove_member(service, name, principal, caller)
    return Response(status_code=204)


secrets_router = APIRouter(prefix="/api/v1/secrets", tags=["people"], route_class=UserRoute)
SecretName = Annotated[
    str, Path(pattern=VARIABLE_PATTERN, description="The variable that jobs will find it in")
]


@secrets_router.get("")
async def read_secrets(caller: Caller, service: CurrentService) -> SecretList:
    """The names of the caller's secrets, and when each was set."""
    return await admin.read_secrets(service, caller)


@secrets_router.put("/{name}", status_code=204, responses=responses(409, 413, 422))
async def write_secret(
    name: SecretName,
    value: Annotated[bytes, Body(media_type="text/plain")],
    caller: Caller,
    service: CurrentService,
) -> Response:
    """Keep a secret, encrypted, under its name; no answer ever holds it. The body is the value as it is, in UTF-8."""
    await admin.write_secret(service, name, value, caller)
    return Response(status_code=204)


@secrets_router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove_secret(name: SecretName, caller: Caller, service: CurrentService) -> Response:
    """Forget a secret: jobs that name it end with a reason at their next attempt."""
    await admin.remove_secret(service, name, caller)
    return Response(status_code=204)
