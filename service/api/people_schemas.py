"""What the API answers about people: who calls, tokens, who did what. Values only, as in schemas.py."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from service.jobspec import Name
from service.principals import Role

Days = Annotated[float, Field(ge=0, le=36_500, allow_inf_nan=False)]


class Whoami(BaseModel):
    """The caller; the name is empty where the server asks nobody for a token."""

    name: str
    role: Role


class TokenRequest(BaseModel):
    """A token to make, under a name that no other has: its jobs, packages and secrets belong to that name."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    role: Role = Role.SUBMITTER
    days: Days | None = Field(default=None, description="So long it is valid; null: until it is revoked")


class TokenView(BaseModel):
    name: str
    role: Role
    created_at: datetime
    expires_at: datetime | None


class NewToken(TokenView):
    """`token` is shown this once: the store keeps only its digest."""

    token: str


class TokenList(BaseModel):
    items: list[TokenView]


class SecretView(BaseModel):
    """A secret's name; no answer holds its value."""

    name: str
    set_at: datetime


class SecretList(BaseModel):
    items: list[SecretView]


class AuditView(BaseModel):
    """What `principal` did (e.g. job.cancel) to `subject` (a job's id, a token's name)."""

    number: int
    at: datetime
    principal: str
    action: str
    subject: str
    detail: str


class AuditPage(BaseModel):
    items: list[AuditView]
    next_page_token: str | None
