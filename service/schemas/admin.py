"""REST bodies for tokens, projects, secrets, the audit list, and notifications.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.spec.job import OWNER_PATTERN, Name
from service.spec.principals import Role


class DeliveryView(BaseModel):
    """The notification of one job state to one URL; `id` is the `webhook-id` that the receiver sees, in every try."""

    id: str
    job_id: str
    event: int = Field(description="The number of the job's event that it reports")
    job_state: str
    url: str
    secret: str | None = Field(description="The name of the secret that signs it; null: the operator's")
    state: Literal["PENDING", "DELIVERED", "GIVEN_UP"]
    tries: int
    created_at: datetime
    next_at: datetime | None = Field(description="When it is tried next; null where it is not")
    last_at: datetime | None
    status: int | None = Field(description="What the receiver answered last")
    error: str | None


class DeliveryPage(BaseModel):
    items: list[DeliveryView]
    next_page_token: str | None


TokenDays = Annotated[float, Field(ge=0, le=36_500, allow_inf_nan=False)]


class Whoami(BaseModel):
    """The caller; the name is empty where the server asks nobody for a token."""

    name: str
    role: Role


class ProjectMember(BaseModel):
    """A principal's role in a project; * and ? in the name stand for others: `oidc:*@nlp.example`."""

    model_config = ConfigDict(extra="forbid")

    principal: str = Field(
        pattern=OWNER_PATTERN, description="A name as whoami has it, or a pattern of names"
    )
    role: Literal[Role.VIEWER, Role.SUBMITTER, Role.ADMIN]


class ProjectQuotaView(BaseModel):
    """A project's quota in a queue: the accelerators that its running jobs may hold there together, and do hold."""

    queue: str
    quota: int
    used: int


class ProjectView(BaseModel):
    """A project that the caller sees: the role that it has there, its quotas in queues, and the members; the default one
    lists none."""

    name: str
    role: Role
    members: list[ProjectMember]
    quotas: list[ProjectQuotaView] = []


class ProjectList(BaseModel):
    items: list[ProjectView]


class TokenRequest(BaseModel):
    """A token to make, under a name that no other has: its jobs, packages and secrets belong to that name."""

    model_config = ConfigDict(extra="forbid")

    name: Name
    role: Role = Role.SUBMITTER
    days: TokenDays | None = Field(
        default=None, description="Days that it is valid; null: until it is revoked"
    )


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
    """An action of `principal` (e.g. job.cancel) on `subject` (a job's id, a token's name)."""

    number: int
    at: datetime
    principal: str
    action: str
    subject: str
    detail: str


class AuditPage(BaseModel):
    items: list[AuditView]
    next_page_token: str | None
