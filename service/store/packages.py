"""Uploaded code in the store: a zip under its digest."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Package


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
