"""Routes for tokens, the audit list, a caller's secrets, and the log of notifications sent for a job.

Secrets are stored encrypted; no answer ever holds one, only the drivers of their owner's jobs read them.
A token is shown once: the store keeps its digest.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response
from sqlalchemy.exc import IntegrityError

from service.api.auth import Caller
from service.api.dependencies import CurrentService, JobId
from service.api.errors import responses
from service.api.middleware import UserRoute
from service.jobs.lifecycle import existing_job
from service.jobs.problems import ProblemError
from service.jobs.views import delivery_view
from service.schemas.admin import (
    AuditPage,
    AuditView,
    DeliveryPage,
    NewToken,
    SecretList,
    SecretView,
    TokenList,
    TokenRequest,
    TokenView,
    Whoami,
)
from service.spec.job import NAME_PATTERN, OWNER_PATTERN
from service.spec.principals import Role
from service.spec.values import MAX_SECRET_LENGTH, MIN_SECRET_LENGTH, VARIABLE_PATTERN, checked_variable_name
from service.store.database import utc_now
from service.store.events import list_audit
from service.store.notifications import deliveries_of
from service.store.secrets import (
    NoSecretsKeyError,
    SecretBox,
    delete_secret,
    delete_token,
    generate_token,
    list_secrets,
    list_tokens,
    store_secret,
    store_token,
    token_digest,
)

notifications_router = APIRouter(prefix="/api/v1/jobs", tags=["jobs"], route_class=UserRoute)


@notifications_router.get("/{job_id}/notifications", responses=responses(404, 422))
async def list_deliveries(
    job_id: JobId,
    caller: Caller,
    service: CurrentService,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^[0-9]{1,9}$")] = None,
) -> DeliveryPage:
    """Notifications of the job's states, and how their delivery went. Only operators see the operator's URL."""
    skip = int(page_token or 0)
    async with service.database.read() as session:
        await existing_job(session, job_id)
        deliveries = await deliveries_of(session, job_id, skip=skip, limit=limit + 1)
    token = str(skip + limit) if len(deliveries) > limit else None
    operator = caller.role.includes(Role.OPERATOR)
    return DeliveryPage(
        items=[delivery_view(delivery, operator) for delivery in deliveries[:limit]], next_page_token=token
    )


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
    async with service.database.read() as session:
        tokens = await list_tokens(session)
    return TokenList(items=[TokenView.model_validate(token, from_attributes=True) for token in tokens])


@people_router.post("/tokens", status_code=201, responses=responses(409, 422))
async def create_token(wanted: TokenRequest, caller: Caller, service: CurrentService) -> NewToken:
    """Make a token; it is in this answer and nowhere else."""
    if not service.settings.authenticates:
        raise ProblemError(
            409,
            "this server asks nobody for a token, so anybody could make one that opens it later: "
            "set SLOTLINE_REQUIRE_TOKEN=true, or use `slotline token create` beside its database",
        )
    token, now = generate_token(), utc_now()
    expires_at = None if wanted.days is None else now + timedelta(days=wanted.days)
    try:
        async with service.database.write() as session:
            stored = await store_token(
                session,
                wanted.name,
                wanted.role,
                token_digest(token),
                by=caller.name,
                at=now,
                expires_at=expires_at,
            )
    except IntegrityError:
        raise ProblemError(
            409, f"there is a token named {wanted.name} already: choose another name, or revoke it"
        ) from None
    view = TokenView.model_validate(stored, from_attributes=True)
    return NewToken(**view.model_dump(), token=token)


@people_router.delete("/tokens/{name}", status_code=204, responses=responses(404, 422))
async def revoke_token(name: TokenName, caller: Caller, service: CurrentService) -> Response:
    """Make a token invalid, at once."""
    async with service.database.write() as session:
        known = await delete_token(session, name, by=caller.name, at=utc_now())
    if not known:
        raise ProblemError(404, f"there is no token named {name}: GET /api/v1/tokens lists them")
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
    async with service.database.read() as session:
        entries = await list_audit(
            session, principal=principal, subject=subject, before=before, limit=limit + 1
        )
    token = str(entries[limit - 1].number) if len(entries) > limit else None
    views = [AuditView.model_validate(entry, from_attributes=True) for entry in entries[:limit]]
    return AuditPage(items=views, next_page_token=token)


secrets_router = APIRouter(prefix="/api/v1/secrets", tags=["people"], route_class=UserRoute)
SecretName = Annotated[
    str, Path(pattern=VARIABLE_PATTERN, description="The variable that jobs will find it in")
]


@secrets_router.get("")
async def read_secrets(caller: Caller, service: CurrentService) -> SecretList:
    """The names of the caller's secrets, and when each was set."""
    async with service.database.read() as session:
        secrets = await list_secrets(session, caller.name)
    return SecretList(items=[SecretView.model_validate(secret, from_attributes=True) for secret in secrets])


@secrets_router.put("/{name}", status_code=204, responses=responses(409, 413, 422))
async def write_secret(
    name: SecretName,
    value: Annotated[bytes, Body(media_type="text/plain")],
    caller: Caller,
    service: CurrentService,
) -> Response:
    """Keep a secret, encrypted, under its name; no answer ever holds it. The body is the value as it is, in UTF-8."""
    try:
        checked_variable_name(name)
    except ValueError as error:
        raise ProblemError(422, str(error)) from None
    if len(value) > MAX_SECRET_LENGTH:
        raise ProblemError(413, f"the secret is longer than {MAX_SECRET_LENGTH} bytes: put it into a file")
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise ProblemError(422, "the secret is not text in UTF-8: encode it, e.g. in base64") from None
    if len(text.strip()) < MIN_SECRET_LENGTH or "\0" in text:
        raise ProblemError(
            422,
            f"a secret has at least {MIN_SECRET_LENGTH} characters, none of them NUL, so that it can be kept out of "
            "logs: what is no secret belongs into the job's env",
        )
    try:
        sealed = SecretBox.of(service.settings).seal(caller.name, name, text)
    except NoSecretsKeyError as error:
        raise ProblemError(409, str(error)) from None
    async with service.database.write() as session:
        await store_secret(session, caller.name, name, sealed, at=utc_now())
    return Response(status_code=204)


@secrets_router.delete("/{name}", status_code=204, responses=responses(404, 422))
async def remove_secret(name: SecretName, caller: Caller, service: CurrentService) -> Response:
    """Forget a secret: jobs that name it end with a reason at their next attempt."""
    async with service.database.write() as session:
        known = await delete_secret(session, caller.name, name, at=utc_now())
    if not known:
        raise ProblemError(404, f"you have no secret {name}: GET /api/v1/secrets lists them")
    return Response(status_code=204)
