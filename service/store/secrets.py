"""Users' secrets in the store, sealed: an owner's under a name, for the environment of the owner's jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.sealing import SealError, SecretBox
from service.store.audit import add_audit
from service.store.tables import Secret
from service.store.upsert import upsert


class MissingSecretError(Exception):
    """A secret that a job names is not there, or cannot be opened; the message names it, never its value."""


async def store_secret(session: AsyncSession, owner: str, name: str, sealed: str, *, at: datetime) -> None:
    """Keep a secret under its name; it replaces the one that was there."""
    await upsert(session, Secret, [{"owner": owner, "name": name, "sealed": sealed, "set_at": at}])
    add_audit(session, owner, "secret.set", name, at=at)


async def list_secrets(session: AsyncSession, owner: str) -> Sequence[Secret]:
    query = select(Secret).where(Secret.owner == owner).order_by(Secret.name)
    return (await session.execute(query)).scalars().all()


async def delete_secret(session: AsyncSession, owner: str, name: str, *, at: datetime) -> bool:
    """Whether there was one."""
    query = delete(Secret).where(Secret.owner == owner, Secret.name == name)
    found = (await session.execute(query)).rowcount > 0
    if found:
        add_audit(session, owner, "secret.remove", name, at=at)
    return found


async def missing_secrets(session: AsyncSession, owner: str, names: Sequence[str]) -> list[str]:
    """Those of `names` that the owner has not."""
    known = {secret.name for secret in await list_secrets(session, owner)} if names else set()
    return [name for name in names if name not in known]


async def open_secrets(
    session: AsyncSession, box: SecretBox, owner: str, names: Sequence[str]
) -> dict[str, str]:
    """The owner's secrets of these names. Raises MissingSecretError."""
    sealed = {secret.name: secret.sealed for secret in await list_secrets(session, owner)} if names else {}
    found = {}
    for name in names:
        if name not in sealed:
            raise MissingSecretError(
                f"the job's secret {name} is gone: `slotline secret set {name}`, then retry the job"
            )
        try:
            found[name] = box.open(owner, name, sealed[name])
        except SealError as error:
            raise MissingSecretError(str(error)) from None
    return found


def stored_names(spec: Mapping[str, Any]) -> list[str]:
    """The secrets that a stored specification names, perhaps one of another version."""
    names = spec.get("secrets")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def stored_environment(spec: Mapping[str, Any]) -> dict[str, str]:
    """The variables that a stored specification sets, perhaps one of another version."""
    env = spec.get("env")
    return {k: v for k, v in env.items() if isinstance(v, str)} if isinstance(env, dict) else {}
