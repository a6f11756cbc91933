"""User secrets, sealed with Fernet and bound to owner and name, and digests of API tokens.

Sealed with the first of the keys, opened with any. Beside a SQLite of ours the key is a file, created once by
whichever process comes first; other databases are shared by servers, which need the same SLOTLINE_SECRETS_KEY.
No value of a secret is ever in a message. A token is shown once; the store keeps the SHA-256 of its 256 random bits.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from sqlalchemy import delete, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from service.settings.settings import Settings
from service.spec.principals import Principal, Role
from service.store.database import upsert
from service.store.events import add_audit
from service.store.tables import ApiTokenRow, SecretRow

KEY_FILE = "secrets.key"


class NoSecretsKeyError(Exception):
    """No key is configured to seal secrets with; the message says how to set it."""


class SealError(Exception):
    """A stored secret cannot be opened with the configured keys, or was sealed for another owner or name."""


class SecretBox:
    """Fernet cipher that seals with the first of its keys and opens with any of them."""

    def __init__(self, keys: list[str]) -> None:
        # a key may be any long text: SHA-256 gives it the length that Fernet needs
        digests = [base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()) for key in keys]
        self._cipher = MultiFernet([Fernet(digest) for digest in digests])

    @classmethod
    def of(cls, settings: Settings) -> SecretBox:
        """A box with the keys of the settings, else, beside the default SQLite file, with a key file created on demand.

        Raises NoSecretsKeyError for other databases, whose servers must all have the same key.
        """
        if settings.secrets_key is not None:
            return cls([key.strip() for key in settings.secrets_key.get_secret_value().split(",")])
        if settings.database_url:
            raise NoSecretsKeyError(
                "this server has no key to keep secrets with: set SLOTLINE_SECRETS_KEY, the same on all servers of the "
                "database (openssl rand -hex 32 makes one)"
            )
        return cls([_read_or_create_key(settings.data_dir.expanduser() / KEY_FILE)])

    def seal(self, owner: str, name: str, value: str) -> str:
        return self._cipher.encrypt(json.dumps([owner, name, value]).encode()).decode()

    def open(self, owner: str, name: str, sealed: str) -> str:
        """The value. Raises SealError where it was sealed with another key, or for another owner or name."""
        try:
            sealed_owner, sealed_name, value = json.loads(self._cipher.decrypt(sealed.encode()))
        except (InvalidToken, ValueError):
            raise SealError(
                f"the secret {name} was kept with another key: set SLOTLINE_SECRETS_KEY to that one too"
            ) from None
        if (sealed_owner, sealed_name) != (owner, name):
            raise SealError(f"the secret {name} of {owner or 'nobody'} in the database is another one's")
        return value


def _read_or_create_key(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as text:
                text.write(secrets.token_hex(32))
            os.link(new, file)  # atomic; the first of several processes wins
        finally:
            new.unlink(missing_ok=True)
    return file.read_text()


class MissingSecretError(Exception):
    """A secret that a job names does not exist or cannot be opened; the message has its name, never its value."""


async def store_secret(session: AsyncSession, owner: str, name: str, sealed: str, *, at: datetime) -> None:
    """Store a sealed secret under its name; an earlier one is replaced."""
    await upsert(session, SecretRow, [{"owner": owner, "name": name, "sealed": sealed, "set_at": at}])
    add_audit(session, owner, "secret.set", name, at=at)


async def list_secrets(session: AsyncSession, owner: str) -> Sequence[SecretRow]:
    query = select(SecretRow).where(SecretRow.owner == owner).order_by(SecretRow.name)
    return (await session.execute(query)).scalars().all()


async def delete_secret(session: AsyncSession, owner: str, name: str, *, at: datetime) -> bool:
    """Delete the secret; returns whether it existed."""
    query = delete(SecretRow).where(SecretRow.owner == owner, SecretRow.name == name)
    existed = (await session.execute(query)).rowcount > 0
    if existed:
        add_audit(session, owner, "secret.remove", name, at=at)
    return existed


async def missing_secrets(session: AsyncSession, owner: str, names: Sequence[str]) -> list[str]:
    """The `names` of secrets that the owner does not have."""
    known = {secret.name for secret in await list_secrets(session, owner)} if names else set()
    return [name for name in names if name not in known]


async def open_secrets(
    session: AsyncSession, box: SecretBox, owner: str, names: Sequence[str]
) -> dict[str, str]:
    """The values of the owner's secrets by name. Raises MissingSecretError."""
    sealed = {secret.name: secret.sealed for secret in await list_secrets(session, owner)} if names else {}
    values = {}
    for name in names:
        if name not in sealed:
            raise MissingSecretError(
                f"the job's secret {name} is gone: `slotline secret set {name}`, then retry the job"
            )
        try:
            values[name] = box.open(owner, name, sealed[name])
        except SealError as error:
            raise MissingSecretError(str(error)) from None
    return values


def spec_secret_names(spec: Mapping[str, Any]) -> list[str]:
    """The secrets that a stored specification, perhaps of another version, names."""
    names = spec.get("secrets")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def spec_environment(spec: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that a stored specification, perhaps of another version, sets."""
    env = spec.get("env")
    return {k: v for k, v in env.items() if isinstance(v, str)} if isinstance(env, dict) else {}


def generate_token() -> str:
    """A new API token of 256 random bits, for which a plain SHA-256 is as safe as a slow digest."""
    return f"slotline_{secrets.token_urlsafe(32)}"


def token_digest(token: str) -> str:
    """The SHA-256 of a user's token, which is stored in its place."""
    return hashlib.sha256(token.encode()).hexdigest()


async def find_token(session: AsyncSession, digest: str, *, at: datetime) -> Principal | None:
    """The principal whose token has this digest and is valid at this time; None: there is no such token."""
    is_valid = or_(ApiTokenRow.expires_at.is_(None), ApiTokenRow.expires_at > at)
    query = select(ApiTokenRow).where(ApiTokenRow.digest == digest, is_valid)
    token = (await session.execute(query)).scalar_one_or_none()
    if token is None or not hmac.compare_digest(token.digest, digest):
        return None
    if token.role not in list(Role):
        return None  # a role of a newer Slotline gets no rights here
    return Principal(token.name, Role(token.role))


async def list_tokens(session: AsyncSession) -> Sequence[ApiTokenRow]:
    return (await session.execute(select(ApiTokenRow).order_by(ApiTokenRow.name))).scalars().all()


async def store_token(
    session: AsyncSession,
    name: str,
    role: Role,
    digest: str,
    *,
    by: str,
    at: datetime,
    expires_at: datetime | None = None,
) -> ApiTokenRow:
    """Store a token, made by `by`, under a new name. Raises sqlalchemy's IntegrityError where the name is taken."""
    token = ApiTokenRow(name=name, role=role, digest=digest, created_at=at, expires_at=expires_at)
    session.add(token)
    await session.flush()
    until = "for ever" if expires_at is None else f"until {expires_at.isoformat()}"
    add_audit(session, by, "token.create", name, at=at, detail=f"{role} {until}")
    return token


async def delete_token(session: AsyncSession, name: str, *, by: str, at: datetime) -> bool:
    """Revoke the token; returns whether it existed."""
    existed = (await session.execute(delete(ApiTokenRow).where(ApiTokenRow.name == name))).rowcount > 0
    if existed:
        add_audit(session, by, "token.revoke", name, at=at)
    return existed
