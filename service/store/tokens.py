"""Users' API tokens in the store: their digests under a name; the token itself is shown once and never kept."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.principals import Principal, Role
from service.store.audit import add_audit
from service.store.tables import ApiToken


def new_token() -> str:
    """256 random bits, so that a plain SHA-256 of it is as good as any slower digest."""
    return f"slotline_{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """What the store keeps of a user's token."""
    return hashlib.sha256(token.encode()).hexdigest()


async def find_token(session: AsyncSession, digest: str, *, at: datetime) -> Principal | None:
    """Whose token has this digest and is valid at this time."""
    lasts = or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > at)
    query = select(ApiToken).where(ApiToken.digest == digest, lasts)
    found = (await session.execute(query)).scalar_one_or_none()
    if found is None or not hmac.compare_digest(found.digest, digest):
        return None
    if found.role not in list(Role):
        return None  # a newer Slotline's: better nothing than too much
    return Principal(found.name, Role(found.role))


async def list_tokens(session: AsyncSession) -> Sequence[ApiToken]:
    return (await session.execute(select(ApiToken).order_by(ApiToken.name))).scalars().all()


async def store_token(
    session: AsyncSession,
    name: str,
    role: Role,
    digest: str,
    *,
    by: str,
    at: datetime,
    expires_at: datetime | None = None,
) -> ApiToken:
    """Keep a token under a name of its own; IntegrityError where the name is taken. `by` made it."""
    token = ApiToken(name=name, role=role, digest=digest, created_at=at, expires_at=expires_at)
    session.add(token)
    await session.flush()
    until = "for ever" if expires_at is None else f"until {expires_at.isoformat()}"
    add_audit(session, by, "token.create", name, at=at, detail=f"{role} {until}")
    return token


async def delete_token(session: AsyncSession, name: str, *, by: str, at: datetime) -> bool:
    """Whether there was one."""
    found = (await session.execute(delete(ApiToken).where(ApiToken.name == name))).rowcount > 0
    if found:
        add_audit(session, by, "token.revoke", name, at=at)
    return found
