"""Uploaded code in the store: a zip under its digest, once, and who uploaded it."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.principals import NOBODY
from service.store.tables import Package, PackageOwner
from service.store.upsert import upsert


async def find_package(session: AsyncSession, digest: str, *, owner: str | None = None) -> bool:
    """Whether the package is stored, and was uploaded by `owner` where one is given; its content is not read."""
    query = select(Package.digest).where(Package.digest == digest)
    if owner is not None:
        query = query.where(
            exists().where(PackageOwner.digest == Package.digest, PackageOwner.owner == owner)
        )
    return (await session.execute(query)).first() is not None


async def package_content(session: AsyncSession, digest: str) -> bytes | None:
    query = select(Package.content).where(Package.digest == digest)
    return (await session.execute(query)).scalar_one_or_none()


async def store_package(
    session: AsyncSession, digest: str, content: bytes, *, at: datetime, owner: str = NOBODY
) -> None:
    """Keep a new package; IntegrityError where it is there already."""
    session.add(Package(digest=digest, created_at=at, size_bytes=len(content), content=content))
    await session.flush()
    session.add(PackageOwner(digest=digest, owner=owner))


async def renew_package(session: AsyncSession, digest: str, *, at: datetime, owner: str = NOBODY) -> bool:
    """Whether the package is stored; it counts as uploaded by `owner` at `at` then."""
    query = update(Package).where(Package.digest == digest).values(created_at=at)
    if (await session.execute(query)).rowcount == 0:
        return False
    await upsert(session, PackageOwner, [{"digest": digest, "owner": owner}])
    return True
