"""Users' API tokens in the store: their digests under a name; the token itself is shown once and never kept."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import ApiToken


def new_token() -> str:
    return f"slotline_{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """What the store keeps of a user's token."""
    return hashlib.sha256(token.encode()).hexdigest()


async def find_token(session: AsyncSession, digest: str, *, at: datetime) -> bool:
    """Whether there is one that is valid at this time."""
    lasts = or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > at)
    query = select(ApiToken.name).where(ApiToken.digest == digest, lasts)
    return (await session.execute(query)).first() is not None


async def list_tokens(session: AsyncSession) -> Sequence[ApiToken]:
    return (await session.execute(select(ApiToken).order_by(ApiToken.name))).scalars().all()


def store_token(
    session: AsyncSession, name: str, digest: str, *, at: datetime, expires_at: datetime | None = None
) -> None:
    session.add(ApiToken(name=name, digest=digest, created_at=at, expires_at=expires_at))


async def delete_token(session: AsyncSession, name: str) -> bool:
    """Whether there was one."""
    return (await session.execute(delete(ApiToken).where(ApiToken.name == name))).rowcount > 0
