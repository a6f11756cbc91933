"""Whom a job tells of its states: a URL that is called, and the secret that signs what is sent. Values only."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from service.job_environment import SecretName

StateName = Literal[
    "QUEUED", "STARTING", "RUNNING", "RECOVERING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"
]
_LONGEST_URL = 2000


def checked_url(url: str) -> str:
    """A URL that can be called; ValueError for another."""
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise ValueError(f"{url[:200]!r} holds characters that no URL has: encode them (%20)")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url[:200]!r} is no URL ({error}): write https://host/path") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{url[:200]!r} is not called: write https://host/path, or http://")
    if "@" in parts.netloc:
        raise ValueError(
            "a URL with a password in it is shown to all who may read the job: what is sent is signed instead"
        )
    return url


def check_signed(url: str, secret: SecretStr | None) -> None:
    """ValueError unless there is a secret to sign with what the operator's `url` is sent."""
    if secret is None or len(secret.get_secret_value().strip()) < 16:
        raise ValueError(
            f"SLOTLINE_WEBHOOK_URL is {url}: it needs SLOTLINE_WEBHOOK_SECRET, of at least 16 characters"
        )


class Notification(BaseModel):
    """A URL that is told when the job comes into one of `states`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: Annotated[str, Field(max_length=_LONGEST_URL), AfterValidator(checked_url)]
    secret: SecretName = Field(
        description="The name of a secret of the job's owner: HMAC-SHA256 with it signs what is sent"
    )
    states: Annotated[list[StateName], Field(min_length=1, max_length=8, fail_fast=True)] = [
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
    ]


Notifications = Annotated[list[Notification], Field(max_length=5, fail_fast=True)]
