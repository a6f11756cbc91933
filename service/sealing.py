"""Secrets as the database keeps them: encrypted, each bound to its owner and name. No database here."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from service.settings import Settings

_KEY_FILE = "secrets.key"


class NoKeyError(Exception):
    """There is no key to keep secrets with; the message says how to give one."""


class SealError(Exception):
    """What is stored cannot be opened with the keys at hand, or belongs elsewhere."""


class SecretBox:
    """Seals with the first of its keys, and opens with any of them."""

    def __init__(self, keys: list[str]) -> None:
        # any long text is a key: SHA-256 makes it as long as the cipher's
        digests = [base64.urlsafe_b64encode(hashlib.sha256(key.encode()).digest()) for key in keys]
        self._cipher = MultiFernet([Fernet(digest) for digest in digests])

    @classmethod
    def of(cls, settings: Settings) -> SecretBox:
        """With the keys of the settings, else, beside a SQLite of ours, with one in a file that is made when it is
        needed. Raises NoKeyError for other databases: several servers have one, and must have one key."""
        if settings.secrets_key is not None:
            return cls([key.strip() for key in settings.secrets_key.get_secret_value().split(",")])
        if settings.database_url:
            raise NoKeyError(
                "this server has no key to keep secrets with: set SLOTLINE_SECRETS_KEY, the same on all servers of the "
                "database (openssl rand -hex 32 makes one)"
            )
        return cls([_key_in(settings.data_dir.expanduser() / _KEY_FILE)])

    def seal(self, owner: str, name: str, value: str) -> str:
        return self._cipher.encrypt(json.dumps([owner, name, value]).encode()).decode()

    def open(self, owner: str, name: str, sealed: str) -> str:
        """The value; SealError where it was sealed with another key, or for another owner or name."""
        try:
            kept_owner, kept_name, value = json.loads(self._cipher.decrypt(sealed.encode()))
        except (InvalidToken, ValueError):
            raise SealError(
                f"the secret {name} was kept with another key: set SLOTLINE_SECRETS_KEY to that one too"
            ) from None
        if (kept_owner, kept_name) != (owner, name):
            raise SealError(f"the secret {name} of {owner or 'nobody'} in the database is another one's")
        return value


def _key_in(file: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as text:
                text.write(secrets.token_hex(32))
            os.link(new, file)  # whole, or not at all; the first of several wins
        finally:
            new.unlink(missing_ok=True)
    return file.read_text()
