"""Settings of the control plane, read from SLOTLINE_* environment variables.

Each has one name, and one default that works on a laptop. Field names are environment variables, so they are a
public format. Settings that contradict each other (a reachable host without a token, several control planes on
SQLite, half an identity provider) are refused here, before anything starts. In retention settings -1 day means for
ever; jobs, attempts and events always stay.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.settings.clusters import (
    DEFAULT_CLUSTER,
    ClusterSettings,
    QueueOrQuota,
    QueueSettings,
    checked_dashboard_address,
)
from service.spec.job import Name
from service.spec.principals import Role
from service.spec.values import check_webhook_secret, checked_webhook_url, is_listable, uri_scheme

MEBIBYTE = 1 << 20
FOR_EVER = -1
RetentionDays = Annotated[float, Field(ge=-1, le=100_000, allow_inf_nan=False)]
_ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
}


class Settings(BaseSettings):
    """Every setting with its default and meaning, from SLOTLINE_* and RAY_*; units are in the names.

    service/README.md shows the descriptions as a table: `python -m tests.service.settings_table` renews it.
    """

    model_config = SettingsConfigDict(
        env_prefix="SLOTLINE_", extra="ignore", env_ignore_empty=True, populate_by_name=True
    )

    # The server and its data
    host: str = Field(
        default="127.0.0.1", description="Address to listen on; beyond this machine a token must be required"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=8000, description="Port to listen on")
    public_url: str | None = Field(
        default=None,
        description="How users reach this server, and drivers where `SLOTLINE_DRIVER_URL` is not set",
    )
    driver_url: str | None = Field(
        default=None, description="How drivers reach this server, where that differs"
    )
    data_dir: Path = Field(default=Path(".slotline"), description="SQLite, local logs and the key of secrets")
    database_url: str = Field(
        default="",
        description="`postgresql://user:password@host/name`; empty: SQLite in `SLOTLINE_DATA_DIR`, for one server",
    )
    packages_uri: str | None = Field(
        default=None,
        description="Where uploaded code lies: `s3://bucket/folder`, `gs://...`, or a path that all servers share; empty: "
        "in the database",
    )
    log_level: Literal["debug", "info", "warning", "error", "critical"] = Field(
        default="info",
        description="Least level of log lines: `debug`, `info`, `warning`, `error`, `critical`",
    )
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="`text`, or `json`: log lines of server and drivers as objects with job, attempt, step and trace_id",
    )
    grafana_url: str | None = Field(
        default=None, description="Grafana with our dashboards: a job's page links to them"
    )

    # Callers
    api_token: SecretStr | None = Field(
        default=None, description="One fixed token, an admin's, that every call may carry"
    )
    metrics_token: SecretStr | None = Field(
        default=None, description="Opens the list of drivers for Prometheus, and nothing else"
    )
    require_token: bool = Field(default=False, description="Ask for a token made by `slotline token create`")
    secrets_key: SecretStr | None = Field(
        default=None,
        description="Encrypts users' secrets (`openssl rand -hex 32`); several, with commas: the first encrypts, all "
        "decrypt. Without one SQLite has a key file of its own, PostgreSQL takes no secrets",
    )
    open_access: bool = Field(default=False, description="Serve without a token beyond this machine")
    oidc_issuer: str | None = Field(
        default=None,
        description="Identity provider, `https://...`: JWTs with this `iss` are tokens too, and pages log in there",
    )
    oidc_audience: str | None = Field(
        default=None, description="The `aud` that such a JWT must have: the id of Slotline's client there"
    )
    oidc_client_secret: SecretStr | None = Field(
        default=None, description="Secret of that client, where it has one; logins of pages send it"
    )
    oidc_roles: dict[str, Role] = Field(
        default={},
        description='Values of the role claim and the roles that they give: `{"ml-admins": "admin"}`',
    )
    oidc_role_claim: str = Field(
        default="roles", description="Claim with a list or words, or the path of one: `realm_access.roles`"
    )
    oidc_name_claim: str = Field(
        default="sub", description="Claim that names the owner, uniquely and for ever: `oidc:<value>`"
    )

    # The Ray cluster named default
    ray_address: str | None = Field(
        default=None,
        validation_alias=AliasChoices("SLOTLINE_RAY_ADDRESS", "RAY_ADDRESS"),
        description="Dashboard of the Ray cluster `default` (`http://head:8265`); without it a local Ray is started",
    )
    ray_auth_token: SecretStr | None = Field(
        default=None,
        validation_alias=AliasChoices("SLOTLINE_RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN"),
        description="Token of that cluster; where it is not set it is read as Ray does, from the file `RAY_AUTH_TOKEN_PATH` "
        "or `~/.ray/auth_token`",
    )
    local_workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="Accelerators that a local Ray offers"
    )

    # Further clusters, and queues
    clusters: dict[Name, ClusterSettings] = Field(
        default={}, description="Further Ray clusters by name, see *Several Ray clusters*"
    )
    queues: Annotated[dict[Name, QueueOrQuota], Field(min_length=1)] = Field(
        default={DEFAULT_CLUSTER: QueueSettings()},
        description="Queues: a quota of accelerators each, or `quota`, `cluster` and `submitters`, see *Queues*",
    )
    preemption: bool = Field(
        default=True, description="Running jobs are preempted by waiting jobs of a higher priority"
    )
    preemption_grace_s: Annotated[float, Field(ge=0, le=86_400)] = Field(
        default=60.0,
        description="Time to save a checkpoint for a job that is preempted, or whose `max_duration` is over",
    )

    # The orchestrator
    orchestrator: bool = Field(
        default=True,
        description="`false`: this server only answers, beside others on the same PostgreSQL that start jobs",
    )
    profile_every_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=30.0,
        description="Time between two steps whose slots are stored and exposed, at most; more often at the start of an "
        "attempt: its first six steps, then after 1 s, 2 s, 4 s, ...; its last step too",
    )
    metrics_ports: Annotated[str, Field(pattern=r"^([0-9]{1,5}-[0-9]{1,5})?$")] = Field(
        default="",
        description="`first-last`: drivers serve their metrics at one of these ports (`9400-9499`); empty: at any port",
    )

    # Planning and tasks
    plan_processes: Annotated[int, Field(ge=1)] = Field(
        default=1, description="Plans computed at once for users; one process more is kept for drivers"
    )
    plan_memory_bytes: Annotated[int, Field(ge=512 * MEBIBYTE)] | None = Field(
        default=None,
        description="Memory of one planning process (512 MiB at least); not set: 8 GiB, or its part of the container's "
        "limit without 1 GiB for the server",
    )
    plan_budget_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="Search time of `auto`, counted as work; a job waits for a hundredth of what it trains at most",
    )

    # Retention
    keep_timelines_days: RetentionDays = Field(
        default=30.0, description="Days from a job's end until its measured slots are deleted; -1: never"
    )
    keep_history_days: RetentionDays = Field(
        default=365.0,
        description="Days from a job's end until its steps, plan, post-mortems and logs are deleted; -1: never",
    )
    keep_checkpoints_days: RetentionDays = Field(
        default=-1.0,
        description="Days from a job's end until the cluster deletes its checkpoints and exports; -1: never",
    )

    # Webhooks
    webhook_url: str | None = Field(
        default=None, description="Called when a job ends, beside the job's own notifications"
    )
    webhook_secret: SecretStr | None = Field(
        default=None, description="Signs what `SLOTLINE_WEBHOOK_URL` is sent"
    )
    webhooks_anywhere: bool = Field(
        default=False,
        description="Jobs may also name URLs of this machine and of private networks: the server calls them",
    )

    @field_validator("ray_address")
    @classmethod
    def _ray_address_is_http(cls, value: str | None) -> str | None:
        return checked_dashboard_address(value, "RAY_ADDRESS") if value else None

    @field_validator("clusters")
    @classmethod
    def _default_is_another_setting(cls, value: dict[str, ClusterSettings]) -> dict[str, ClusterSettings]:
        if DEFAULT_CLUSTER in value:
            raise ValueError(
                f"{DEFAULT_CLUSTER} is the cluster of RAY_ADDRESS: set that, or choose another name"
            )
        return value

    @field_validator("keep_timelines_days", "keep_history_days", "keep_checkpoints_days")
    @classmethod
    def _days_or_for_ever(cls, value: float) -> float:
        if -1 < value < 0:
            raise ValueError(f"{value:g} is no time to keep something: give days, or -1 for ever")
        return value

    @field_validator("metrics_ports")
    @classmethod
    def _ports_are_a_range(cls, value: str) -> str:
        first, _, last = value.partition("-")
        if value and not 1 <= int(first) <= int(last) <= 65535:
            raise ValueError("give the first and the last port, e.g. 9400-9499")
        return value

    @field_validator("api_token", "metrics_token", "ray_auth_token", "oidc_client_secret", mode="before")
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

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer_is_reached_over_tls(cls, value: str | None) -> str | None:
        url = urlsplit(value or "")
        if value and url.scheme != "https" and not (url.scheme == "http" and is_loopback(url.hostname or "")):
            raise ValueError(
                "whoever changes the issuer's keys on their way can forge every identity: write https://..."
            )
        return value

    @field_validator("public_url", "driver_url", "grafana_url")
    @classmethod
    def _url_is_http(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("drivers and browsers call it over HTTP: write http://... or https://...")
        return value.rstrip("/") if value else None

    @field_validator("packages_uri")
    @classmethod
    def _packages_can_be_stored(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme = uri_scheme(value)
        if not is_listable(value) or (scheme == "" and not Path(value).is_absolute()):
            raise ValueError("write s3://bucket/folder, gs://bucket/folder, or an absolute path")
        from fsspec import get_filesystem_class  # which a client alone has not

        try:
            get_filesystem_class(scheme or "file")
        except ImportError as error:
            raise ValueError(f"{error}: install slotline[storage]") from None
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _log_level_in_any_case(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("database_url")
    @classmethod
    def _database_is_supported(cls, value: str) -> str:
        kind = value.partition("://")[0].partition("+")[0]
        if value and kind not in _ASYNC_DRIVERS:
            raise ValueError("write postgresql://user:password@host/name, or leave it empty for SQLite")
        return value

    @model_validator(mode="after")
    def _queues_belong_to_clusters(self) -> Settings:
        for name, queue in self.queues.items():
            if queue.cluster != DEFAULT_CLUSTER and queue.cluster not in self.clusters:
                known = ", ".join([DEFAULT_CLUSTER, *sorted(self.clusters)])
                raise ValueError(
                    f"SLOTLINE_QUEUES: queue {name} belongs to the cluster {queue.cluster!r}, which SLOTLINE_CLUSTERS does "
                    f"not name: use one of {known}"
                )
        return self

    @model_validator(mode="after")
    def _identity_provider_is_whole(self) -> Settings:
        provider = {
            "SLOTLINE_OIDC_ISSUER": self.oidc_issuer,
            "SLOTLINE_OIDC_AUDIENCE": self.oidc_audience,
            "SLOTLINE_OIDC_ROLES": self.oidc_roles,
        }
        missing = [name for name, value in provider.items() if not value]
        if missing and (len(missing) < len(provider) or self.oidc_client_secret is not None):
            raise ValueError(
                f"an identity provider needs {', '.join(missing)} too: set all three or none of it"
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
        """The address at which drivers report: `driver_url`, or else `url`."""
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

    @property
    def quotas(self) -> dict[str, int | None]:
        """The configured quota of each queue."""
        return {name: queue.quota for name, queue in self.queues.items()}

    @property
    def has_default_cluster(self) -> bool:
        """True where a cluster is named default: it has an address, or a queue belongs to it."""
        return self.ray_address is not None or any(
            queue.cluster == DEFAULT_CLUSTER for queue in self.queues.values()
        )

    def cluster_of(self, queue: str) -> str | None:
        """The cluster of a queue's jobs.

        None for an unknown queue where there are several clusters: it may have been another tenant's.
        """
        if queue in self.queues:
            return self.queues[queue].cluster
        return None if self.clusters else DEFAULT_CLUSTER

    @property
    def ray_token(self) -> str | None:
        """The default cluster's token: given, or in Ray's own file."""
        if self.ray_auth_token is not None:
            return self.ray_auth_token.get_secret_value()
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
        return file.read_text().strip() or None if file.is_file() else None

    @property
    def ray_tokens(self) -> list[str]:
        """The tokens of all clusters that have one."""
        tokens = [self.ray_token, *(cluster.ray_token for cluster in self.clusters.values())]
        return [token for token in tokens if token]


class RetiredSettingError(ValueError):
    """The environment holds a setting that is none any more; the message names it and what to do."""


def is_loopback(host: str) -> bool:
    """True for a host name or address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_FIXED_VALUES = """
    BODY_LIMIT_BYTES CANCEL_GRACE_S CLUSTER_REFRESH_S EXPORT_TIMEOUT_S KEEP_PACKAGES_DAYS KEEP_PLANS_DAYS LEASE_S
    LOCAL_RAY_PORT LOG_LIMIT_BYTES METRICS_LINGER_S NAMED_PLANS NAMED_PLAN_LIMIT_BYTES PACKAGE_LIMIT_BYTES
    PACKAGE_UNPACKED_LIMIT_BYTES PLAN_ACTION_LIMIT PLAN_TIMEOUT_S PROFILE_LIMIT_BYTES PROFILE_TIMEOUT_S
    QUEUE_PATIENCE_S RAY_TIMEOUT_S REMOVAL_TIMEOUT_S RETRY_BACKOFF_LIMIT_S RETRY_BACKOFF_S SILENCE_LIMIT_S
    START_TIMEOUT_S TICK_S TIMELINES_KEPT
"""
_AS_CLUSTER = "name that cluster in SLOTLINE_CLUSTERS, with {}, and let its queues name it (SLOTLINE_QUEUES)"
RETIRED_SETTINGS = {
    "SLOTLINE_DRIVER_PYTHON": _AS_CLUSTER.format("driver_python"),
    "SLOTLINE_DRIVER_RAY_ADDRESS": _AS_CLUSTER.format("driver_ray_address"),
    "SLOTLINE_WORKERS_PER_GPU": _AS_CLUSTER.format("workers_per_gpu"),
    "SLOTLINE_OIDC_JWKS_URL": "SLOTLINE_OIDC_ISSUER names its keys itself, at /.well-known/openid-configuration",
    "SLOTLINE_RAY_AUTH_TOKEN_PATH": "set RAY_AUTH_TOKEN_PATH, as for Ray's own commands",
    "SLOTLINE_WEBHOOK_STATES": "SLOTLINE_WEBHOOK_URL is called when a job ends; a job's own notifications name its states",
    **{f"SLOTLINE_{name}": "its value is fixed now" for name in _FIXED_VALUES.split()},
}
"""Variables that were settings, with what to do; they are refused, since a value that is ignored misleads."""


def misspelt_settings(environment: Iterable[str]) -> dict[str, str]:
    """Variables whose names are almost a setting's, with the setting that was probably meant."""
    known = {f"SLOTLINE_{name.upper()}" for name in Settings.model_fields}
    nearest = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.9) for name in environment}
    return {name: matches[0] for name, matches in nearest.items() if matches and name not in known}


def load_settings(**values: Any) -> Settings:
    """Settings from the environment, with `values` taking precedence (None means: not given).

    Raises RetiredSettingError for variables that were settings.
    """
    if retired := [name for name in RETIRED_SETTINGS if os.environ.get(name)]:
        remedies = "; ".join(f"{name} is no setting any more: {RETIRED_SETTINGS[name]}" for name in retired)
        raise RetiredSettingError(
            f"{remedies}. Remove {'it' if len(retired) == 1 else 'them'} from the environment"
        )
    return Settings(**{name: value for name, value in values.items() if value is not None})
