"""REST bodies for the server itself: version, health, and the body of every error.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class LoginIssuer(BaseModel):
    """The identity provider of the server, and the client of it as which users log in (`slotline login`)."""

    issuer: str
    client_id: str


class Version(BaseModel):
    version: str
    api: Literal["v1"]
    login: LoginIssuer | None = None


class Health(BaseModel):
    status: Literal["ok"]


class Readiness(Health):
    """`clusters_away`: clusters that do not answer, each with its error; absent where all answer."""

    clusters_away: dict[str, str] = {}


class ProblemDetails(BaseModel):
    """The body of every error."""

    type: str = "about:blank"
    title: str
    status: int
    code: str = Field(default="", description="What went wrong, for programs; a code is never renamed")
    detail: str
    errors: list[dict[str, Any]] | None = None
