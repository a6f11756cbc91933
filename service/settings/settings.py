"""Settings of the control plane, read from SLOTLINE_* environment variables.

Each has one name, and one default that works on a laptop. Field names are environment variables, so they are a
public format. What cannot work together (a reachable host without a token, several control planes on SQLite, half
an identity provider) is refused here, before anything starts. In retention settings -1 day means for ever; jobs,
attempts and events always stay.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.settings.clusters import ClusterAndQueueSettings
from service.spec.states import Role
from service.spec.values import StateName, check_webhook_secret, checked_webhook_url

MEBIBYTE = 1 << 20
FOR_EVER = -1
RetentionDays = Annotated[float, Field(ge=-1, le=100_000, allow_inf_nan=False)]


class RetentionSettings(BaseSettings):
    """In days -1 is for ever. Jobs, attempts and events always stay."""

    keep_timelines_days: RetentionDays = Field(
        default=30.0, description="Measured slots, after their job's end"
    )
    keep_history_days: RetentionDays = Field(
        default=365.0, description="Steps, plan and logs, after their job's end"
    )
    keep_packages_days: RetentionDays = Field(
        default=30.0, description="Uploaded code that no job names, after its last upload"
    )
    keep_checkpoints_days: RetentionDays = Field(
        default=-1.0, description="Checkpoints and exports, after their job's end; the cluster deletes them"
    )
    removal_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="So long the cluster may take to delete checkpoints"
    )
    keep_plans_days: RetentionDays = Field(
        default=90.0, description="Plans kept under a name, after the last job was submitted with them"
    )
    named_plans: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=100, description="Plans that one owner may keep under names"
    )
    named_plan_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=32 * MEBIBYTE, description="A plan that is kept under a name"
    )

    @field_validator(
        "keep_timelines_days",
        "keep_history_days",
        "keep_packages_days",
        "keep_plans_days",
        "keep_checkpoints_days",
    )
    @classmethod
    def _days_or_for_ever(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError(f"{value:g} is no time to keep something: give days, or -1 for ever")
        return value


KIBIBYTE = 1 << 10


class Settings(RetentionSettings, ClusterAndQueueSettings):
    """Read from SLOTLINE_* (and RAY_ADDRESS, RAY_AUTH_TOKEN); see each field for its meaning and unit."""

    model_config = SettingsConfigDict(
        env_prefix="SLOTLINE_", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    # The server and its data
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    public_url: str | None = Field(default=None, description="How drivers and users reach this server")
    driver_url: str | None = Field(
        default=None, description="How drivers reach this server, where that differs from public_url"
    )
    data_dir: Path = Path(".slotline")
    database_url: str = Field(default="", description="SQLite in data_dir when empty")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "info"
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Of the server's and of drivers' logs: lines for people, or JSON for machines",
    )

    # Who may call
    api_token: SecretStr | None = Field(default=None, description="One token that every call must carry")
    metrics_token: SecretStr | None = Field(
        default=None, description="Opens the list of drivers for Prometheus, and nothing else"
    )
    require_token: bool = Field(default=False, description="Ask for a token made by `slotline token create`")
    secrets_key: SecretStr | None = Field(
        default=None,
        description="Encrypts users' secrets: a long random text; several, with commas: the first seals, all open. "
        "With SQLite in data_dir a file there holds one when none is given",
    )
    open_access: bool = Field(default=False, description="Serve without a token beyond this machine")
    oidc_issuer: str | None = Field(
        default=None, description="JWTs of this issuer (their `iss`) are tokens too"
    )
    oidc_audience: str | None = Field(default=None, description="The `aud` that such a JWT must have")
    oidc_jwks_url: str | None = Field(
        default=None, description="Where the issuer's public keys are: https://..."
    )
    oidc_roles: dict[str, Role] = Field(
        default={}, description='Values of the role claim and the roles they give: {"ml-admins": "admin"}'
    )
    oidc_role_claim: str = Field(
        default="roles", description="A claim with a list or words, or the path of one: realm_access.roles"
    )
    oidc_name_claim: str = Field(
        default="sub", description="The claim that names its owner, for ever and uniquely: oidc:<value>"
    )

    # Whose turn it is
    preemption: bool = Field(
        default=True, description="Running jobs give way to waiting ones of a higher priority"
    )
    preemption_grace_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=60.0, description="So long a job that gives way, or whose time is over, may save a checkpoint"
    )
    queue_patience_s: Annotated[float, Field(gt=0)] = Field(
        default=3600.0, description="After so long without a start an owner has the next turn of their queue"
    )

    # Who is told of states of jobs
    webhook_url: str | None = Field(
        default=None, description="Told of every job, beside its own notifications"
    )
    webhook_secret: SecretStr | None = Field(default=None, description="Signs what webhook_url is sent")
    webhook_states: list[StateName] = Field(default=["SUCCEEDED", "FAILED", "CANCELLED"])
    webhooks_anywhere: bool = Field(
        default=False,
        description="Jobs may also name URLs of this machine and of private networks: the server calls them",
    )
    webhook_timeout_s: Annotated[float, Field(gt=0, le=120)] = 10.0
    webhook_tries: Annotated[int, Field(ge=1, le=30)] = 8
    webhook_backoff_s: Annotated[float, Field(ge=0, le=3600)] = Field(
        default=5.0,
        description="Before the second try; three times as long before each later one, at most an hour",
    )

    # The orchestrator
    orchestrator: bool = Field(
        default=True, description="false: answer only, beside others on the same PostgreSQL that start jobs"
    )
    lease_s: Annotated[float, Field(ge=1, le=600)] = Field(
        default=10.0,
        description="One that orchestrates and is not heard of for so long is replaced by another",
    )
    tick_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    cluster_refresh_s: Annotated[float, Field(gt=0)] = 2.0
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    silence_limit_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="A driver that Ray still runs but that says nothing for so long is stopped"
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    cancel_grace_s: Annotated[float, Field(ge=0)] = 15.0
    retry_backoff_s: Annotated[float, Field(ge=0)] = 2.0
    retry_backoff_limit_s: Annotated[float, Field(ge=0)] = 60.0
    metrics_linger_s: Annotated[float, Field(ge=0)] = 60.0
    profile_every_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0, description="So often the slots of a step are stored, and exposed to Prometheus"
    )
    metrics_ports: Annotated[str, Field(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$")] = Field(
        default="", description="first-last: drivers serve their metrics at one of these; empty: at any port"
    )

    grafana_url: str | None = Field(
        default=None, description="Where Grafana has our dashboards: the page of a job links to them"
    )

    # Limits
    body_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=32 * MEBIBYTE, description="Any body, so a driver's report; jobs and plans have less"
    )
    job_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=256 * KIBIBYTE, description="The specification of a job"
    )
    plan_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=MEBIBYTE, description="The specification of POST /api/v1/plans"
    )
    body_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="So long a body may take, and a second more for each 64 KiB"
    )
    profile_limit_bytes: Annotated[int, Field(ge=1024)] = Field(
        default=16 * MEBIBYTE, description="What a driver may store of one measurement"
    )
    package_limit_bytes: Annotated[int, Field(ge=1024)] = 64 * MEBIBYTE
    package_unpacked_limit_bytes: Annotated[int, Field(ge=1024)] = 512 * MEBIBYTE
    log_limit_bytes: Annotated[int, Field(ge=1024)] = 1 * MEBIBYTE
    timelines_kept: Annotated[int, Field(ge=1)] = Field(
        default=100, description="Profiled steps of one job whose slots are stored: the last ones"
    )

    # Planning
    plan_processes: Annotated[int, Field(ge=1)] = 1
    plan_queue: Annotated[int, Field(ge=0)] = Field(
        default=4, description="Plans that may wait for a process"
    )
    plan_memory_bytes: Annotated[int, Field(ge=512 * MEBIBYTE)] = Field(
        default=8192 * MEBIBYTE, description="Memory that one planning process may use"
    )
    plan_budget_s: Annotated[float, Field(ge=0)] = 10.0
    plan_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    profile_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=300.0,
        description="So long one worker may take to measure a job that is planned without training",
    )
    export_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=3600.0, description="So long the cluster may take to write a job's final weights"
    )
    plan_action_limit: Annotated[int, Field(ge=1)] = Field(
        default=200_000,
        description="Largest microbatches x (stages + edges) of POST /api/v1/plans, and of a job",
    )

    @field_validator("metrics_ports")
    @classmethod
    def _ports_are_a_range(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if value and not 1 <= int(first) <= int(last) <= 65535:
            raise ValueError("give the first and the last port, e.g. 9400-9499")
        return value

    @field_validator("api_token", "metrics_token", "ray_auth_token", mode="before")
    @classmethod
    def _token_without_blanks_around_it(cls, value: Any) -> Any:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not isinstance(text, str):
            return value
        if not text.strip():
            raise ValueError("a blank token keeps nobody out: give a secret, or leave the variable away")
        return text.strip()  # a secret made with `echo` ends in a newline

    @field_validator("secrets_key")
    @classmethod
    def _keys_are_long(cls, value: SecretStr | None) -> SecretStr | None:
        for key in (value.get_secret_value() if value else "").split(",") if value else ():
            if len(key.strip()) < 32:
                raise ValueError("a key has at least 32 characters: openssl rand -hex 32 makes one")
        return value

    @field_validator("oidc_jwks_url")
    @classmethod
    def _keys_come_over_tls(cls, value: str | None) -> str | None:
        url = urlsplit(value or "")
        if value and url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
            raise ValueError("whoever changes the keys on their way says who everybody is: write https://...")
        return value

    @field_validator("public_url", "driver_url", "grafana_url")
    @classmethod
    def _url_is_http(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("drivers and browsers call it over HTTP: write http://... or https://...")
        return value.rstrip("/") if value else None

    @field_validator("log_level", mode="before")
    @classmethod
    def _log_level_in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("database_url")
    @classmethod
    def _database_is_one_that_we_know(cls, value: str) -> str:
        kind = value.partition("://")[0].partition("+")[0]
        if value and kind not in _ASYNC_DRIVERS:
            raise ValueError("write postgresql://user:password@host/name, or leave it empty for SQLite")
        return value

    @model_validator(mode="after")
    def _identity_provider_is_whole(self) -> Settings:
        given = {
            "SLOTLINE_OIDC_ISSUER": self.oidc_issuer,
            "SLOTLINE_OIDC_AUDIENCE": self.oidc_audience,
            "SLOTLINE_OIDC_JWKS_URL": self.oidc_jwks_url,
            "SLOTLINE_OIDC_ROLES": self.oidc_roles,
        }
        missing = [name for name, value in given.items() if not value]
        if missing and len(missing) < len(given):
            raise ValueError(
                f"tokens of an identity provider need {', '.join(missing)} too: set all four or none"
            )
        return self

    @model_validator(mode="after")
    def _others_start_jobs(self) -> Settings:
        if self.orchestrator:
            return self
        if self.sqlalchemy_url.startswith("sqlite"):
            raise ValueError(
                "SLOTLINE_ORCHESTRATOR is false, and SQLite serves one control plane: nobody would start jobs; "
                "set SLOTLINE_DATABASE_URL to the PostgreSQL of the others"
            )
        if self.has_default_cluster and self.ray_address is None:
            raise ValueError(
                "SLOTLINE_ORCHESTRATOR is false: set RAY_ADDRESS to the Ray cluster that the others use"
            )
        return self

    @model_validator(mode="after")
    def _webhook_is_signed(self) -> Settings:
        if self.webhook_url is not None:
            check_webhook_secret(checked_webhook_url(self.webhook_url), self.webhook_secret)
        return self

    @model_validator(mode="after")
    def _submitters_have_names(self) -> Settings:
        named = [name for name, queue in self.queues.items() if queue.submitters is not None]
        if named and not self.authenticates:
            raise ValueError(
                f"SLOTLINE_QUEUES: queue {named[0]} names its submitters, and no token says who calls: set "
                "SLOTLINE_REQUIRE_TOKEN=true, SLOTLINE_API_TOKEN or SLOTLINE_OIDC_ISSUER"
            )
        return self

    @model_validator(mode="after")
    def _open_only_on_this_machine(self) -> Settings:
        if is_loopback(self.host) or self.authenticates or self.open_access:
            return self
        raise ValueError(
            f"SLOTLINE_HOST is {self.host}, which others can reach, and no token is asked for: set "
            "SLOTLINE_API_TOKEN, SLOTLINE_REQUIRE_TOKEN=true or SLOTLINE_OIDC_ISSUER, "
            "or SLOTLINE_OPEN_ACCESS=true to allow everyone"
        )

    @property
    def authenticates(self) -> bool:
        """True where a call needs a bearer token."""
        return self.require_token or self.api_token is not None or self.oidc_issuer is not None

    @property
    def url(self) -> str:
        """The address that users call, and drivers where no `driver_url` is set."""
        if self.public_url:
            return self.public_url
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def control_url(self) -> str:
        """The address at which drivers report: their own, or everybody's."""
        return self.driver_url or self.url

    @property
    def sqlalchemy_url(self) -> str:
        """`database_url` with the asynchronous driver named; SQLite in `data_dir` when empty."""
        url = self.database_url
        if not url:
            return f"sqlite+aiosqlite:///{self.data_dir.expanduser().resolve() / 'slotline.db'}"
        for prefix, driver in _ASYNC_DRIVERS.items():
            if url.startswith(f"{prefix}://"):
                return f"{driver}://{url.removeprefix(f'{prefix}://')}"
        return url


_ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
}


def is_loopback(host: str) -> bool:
    """True for a host name or address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def misspelt_settings(environment: Iterable[str]) -> dict[str, str]:
    """Variables that are almost a setting, and the setting that was probably meant."""
    known = {f"SLOTLINE_{name.upper()}" for name in Settings.model_fields}
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.9) for name in environment}
    return {name: found[0] for name, found in near.items() if found and name not in known}


def load_settings(**values: Any) -> Settings:
    """Settings from the environment, with `values` taking precedence (None means: not given)."""
    return Settings(**{name: value for name, value in values.items() if value is not None})
