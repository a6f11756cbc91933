"""Profiles of layers in the store: kept by model, microbatch shape and device, for later attempts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Profile
from service.store.upsert import upsert


async def record_profile(session: AsyncSession, key: str, body: dict[str, Any], *, at: datetime) -> None:
    await upsert(session, Profile, [{"key": key, "created_at": at, "body": body}])


async def find_profile(session: AsyncSession, key: str) -> dict[str, Any] | None:
    profile = await session.get(Profile, key)
    return None if profile is None else profile.body
