"""Settings of Ray clusters and of the queues that belong to them.

`RAY_ADDRESS` and `RAY_AUTH_TOKEN` describe the cluster named default; without an address that is a local Ray.
Further clusters, and those whose drivers need more said, have names: `clusters`. Tokens are SecretStr and are never printed.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from service.spec.job import Name

DEFAULT_CLUSTER = "default"
"""Name of the cluster of RAY_ADDRESS, or of the local one; queues that name no cluster belong to it."""


def checked_dashboard_address(value: str, setting: str) -> str:
    """A Ray dashboard's address without a slash at its end; ValueError, which names `setting`, for one without http."""
    if not value.startswith(("http://", "https://")):
        raise ValueError(
            f"{setting} is {value!r}; Slotline talks to the Jobs API over HTTP: "
            "give the dashboard's address, e.g. http://head:8265"
        )
    return value.rstrip("/")


class ClusterSettings(BaseModel):
    """A Ray cluster beside the default one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(description="Address of its dashboard: http://head:8265")
    token: SecretStr | None = Field(default=None, description="The cluster's token (RAY_AUTH_TOKEN there)")
    token_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="The environment variable that holds the token, in place of it"
    )
    driver_ray_address: str | None = Field(
        default=None,
        description="`host:port` at which its drivers join Ray; needed where several Rays run on one machine",
    )
    driver_url: str | None = Field(
        default=None, description="How its drivers reach this server, where that differs from other clusters'"
    )
    driver_python: str = Field(default="python", description="Python that runs its drivers")
    workers_per_gpu: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1,
        description="Workers that share one GPU, each counted as an accelerator; to try a pipeline on one GPU",
    )

    @field_validator("address")
    @classmethod
    def _address_is_http(cls, value: str) -> str:
        return checked_dashboard_address(value, "address")

    @field_validator("driver_url")
    @classmethod
    def _driver_url_is_http(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("drivers call it over HTTP: write http://... or https://...")
        return value.rstrip("/") if value else None

    @field_validator("token")
    @classmethod
    def _token_without_blanks(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip():
            raise ValueError("a blank token opens nothing: give the cluster's, or leave it away")
        return None if value is None else SecretStr(value.get_secret_value().strip())

    @model_validator(mode="after")
    def _token_is_there_once(self) -> ClusterSettings:
        if self.token is not None and self.token_variable is not None:
            raise ValueError("token and token_variable are both given: leave out one")
        if self.token_variable is not None and not os.environ.get(self.token_variable, "").strip():
            raise ValueError(
                f"token_variable is {self.token_variable}, and the environment has no such variable, or a blank "
                "one: set it to the cluster's token"
            )
        return self

    @property
    def ray_token(self) -> str | None:
        """The cluster's token, given or in its variable."""
        if self.token_variable is not None:
            return os.environ[self.token_variable].strip()
        return None if self.token is None else self.token.get_secret_value()


class QueueSettings(BaseModel):
    """A queue: its quota of accelerators (null: none), its cluster, and its submitters (null: all).

    The quota bounds the accelerators that the queue's running jobs hold together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    quota: Annotated[int, Field(ge=0)] | None = None
    cluster: Name = DEFAULT_CLUSTER
    submitters: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] | None = Field(
        default=None, description="Names of principals, with * and ?: alice, ci-*, oidc:*@team.example"
    )

    def admits(self, principal: str) -> bool:
        """True where a submitter of this name may use the queue."""
        return self.submitters is None or any(fnmatchcase(principal, name) for name in self.submitters)


def _queue_from_quota(value: Any) -> Any:
    return value if isinstance(value, dict | QueueSettings) else {"quota": value}


QueueOrQuota = Annotated[QueueSettings, BeforeValidator(_queue_from_quota)]
"""A QueueSettings, or its quota alone."""
