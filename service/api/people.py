"""Who calls, who may call, who did what: tokens and the audit list."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from sqlalchemy.exc import IntegrityError

from service.api.auth import Caller
from service.api.context import Current
from service.api.errors import ProblemError, responses
from service.api.guarded import UserRoute
from service.api.people_schemas import (
    AuditPage,
    AuditView,
    NewToken,
    TokenList,
    TokenRequest,
    TokenView,
    Whoami,
)
from service.jobspec import NAME_PATTERN, OWNER_PATTERN
from service.store.audit import list_audit
from service.store.database import utc_now
from service.store.tokens import delete_token, list_tokens, new_token, store_token, token_digest

router = APIRouter(prefix="/api/v1", tags=["people"], route_class=UserRoute)

TokenName = Annotated[str, Path(pattern=NAME_PATTERN, max_length=100)]
Who = Annotated[str | None, Query(max_length=200, pattern=OWNER_PATTERN)]


@router.get("/whoami")
async def whoami(caller: Caller) -> Whoami:
    """The name and the role of the token that the call carries."""
    return Whoami(name=caller.name, role=caller.role)


@router.get("/tokens")
async def list_all(service: Current) -> TokenList:
    """All tokens, also expired ones, without what opens anything."""
    async with service.database.read() as session:
        found = await list_tokens(session)
    return TokenList(items=[TokenView.model_validate(one, from_attributes=True) for one in found])


@router.post("/tokens", status_code=201, responses=responses(409, 422))
async def create(wanted: TokenRequest, caller: Caller, service: Current) -> NewToken:
    """Make a token; it is in this answer and nowhere else."""
    if not service.settings.authenticates:
        raise ProblemError(
            409,
            "this server asks nobody for a token, so anybody could make one that opens it later: "
            "set SLOTLINE_REQUIRE_TOKEN=true, or use `slotline token create` beside its database",
        )
    token, now = new_token(), utc_now()
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


@router.delete("/tokens/{name}", status_code=204, responses=responses(404, 422))
async def revoke(name: TokenName, caller: Caller, service: Current) -> Response:
    """Make a token invalid, at once."""
    async with service.database.write() as session:
        known = await delete_token(session, name, by=caller.name, at=utc_now())
    if not known:
        raise ProblemError(404, f"there is no token named {name}: GET /api/v1/tokens lists them")
    return Response(status_code=204)


@router.get("/audit", responses=responses(422))
async def audit(
    service: Current,
    principal: Who = None,
    subject: Who = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    page_token: Annotated[str | None, Query(pattern=r"^\d{1,18}$")] = None,
) -> AuditPage:
    """Who did what, newest first: submits, cancels, retries, tokens made and revoked."""
    before = None if page_token is None else int(page_token)
    async with service.database.read() as session:
        found = await list_audit(
            session, principal=principal, subject=subject, before=before, limit=limit + 1
        )
    token = str(found[limit - 1].number) if len(found) > limit else None
    views = [AuditView.model_validate(one, from_attributes=True) for one in found[:limit]]
    return AuditPage(items=views, next_page_token=token)
