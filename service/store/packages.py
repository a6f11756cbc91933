"""Uploaded code and users' tokens in the store: small tables under a digest."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import ApiToken, Package


async def find_package(session: AsyncSession, digest: str) -> bool:
    """Whether the package is stored; its content is not read."""
    return (await session.execute(select(Package.digest).where(Package.digest == digest))).first() is not None


async def package_content(session: AsyncSession, digest: str) -> bytes | None:
    query = select(Package.content).where(Package.digest == digest)
    return (await session.execute(query)).scalar_one_or_none()


def store_package(session: AsyncSession, digest: str, content: bytes, *, at: datetime) -> None:
    session.add(Package(digest=digest, created_at=at, size_bytes=len(content), content=content))


async def renew_package(session: AsyncSession, digest: str, *, at: datetime) -> bool:
    """Whether the package is stored; it counts as uploaded at `at` then."""
    query = update(Package).where(Package.digest == digest).values(created_at=at)
    return (await session.execute(query)).rowcount > 0


async def find_token(session: AsyncSession, digest: str) -> bool:
    return (await session.execute(select(ApiToken.name).where(ApiToken.digest == digest))).first() is not None


async def list_tokens(session: AsyncSession) -> Sequence[ApiToken]:
    return (await session.execute(select(ApiToken).order_by(ApiToken.name))).scalars().all()


def store_token(session: AsyncSession, name: str, digest: str, *, at: datetime) -> None:
    session.add(ApiToken(name=name, digest=digest, created_at=at))


async def delete_token(session: AsyncSession, name: str) -> bool:
    """Whether there was one."""
    return (await session.execute(delete(ApiToken).where(ApiToken.name == name))).rowcount > 0
