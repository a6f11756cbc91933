"""Validated value types of a job specification: texts, finite JSON, patterns, labels, durations, env, webhooks.

Values only: no database, no HTTP, no Ray. Whatever passes can be stored as JSON in PostgreSQL and in SQLite (no
NUL, no half of a surrogate pair, no NaN). Variables that Slotline, Ray, Python or the linker read are not a job's
to set.
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from pathlib import PurePath
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    model_validator,
)

_LISTABLE_SCHEMES = ("", "file", "s3", "gs", "gcs", "az", "abfs", "abfss")
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
MIN_SECRET_LENGTH = 8
"""A shorter secret would match, and blank, text in every other line of a log."""
MAX_SECRET_LENGTH = 32_768
_MAX_VARIABLES = 100
_MAX_ENVIRONMENT_CHARACTERS = 65_536
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")
_RESERVED_VARIABLE_PREFIXES = ("SLOTLINE_", "RAY_", "LD_", "DYLD_")
_RESERVED_VARIABLES = frozenset(
    {
        *("PATH", "HOME", "SHELL", "ENV", "BASH_ENV", "SHELLOPTS", "IFS", "VIRTUAL_ENV", "GLIBC_TUNABLES"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONEXECUTABLE"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_HOSTID"),
    }
)


def is_listable(uri: str) -> bool:
    """True where the control plane itself may list what lies below a job's checkpoint.uri."""
    return uri_scheme(uri) in _LISTABLE_SCHEMES


def uri_scheme(uri: str) -> str:
    """The part before `://`, or the chain of file systems that fsspec takes before `::`; empty for a path."""
    scheme, separator, _ = uri.partition("::" if "::" in uri else "://")
    return scheme if separator else ""


def checked_variable_name(name: str) -> str:
    """The name of a variable that a job may set; ValueError for another."""
    if not re.fullmatch(VARIABLE_PATTERN.strip("^$"), name):
        raise ValueError(f"{name[:200]!a} is no name of a variable: write letters, digits and _")
    if name.upper().startswith(_RESERVED_VARIABLE_PREFIXES) or name.upper() in _RESERVED_VARIABLES:
        raise ValueError(f"{name} is not a job's to set: Slotline, Ray, Python or the linker reads it")
    return name


def _check_environment(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MAX_VARIABLES:
        raise ValueError(f"holds {len(value)} variables, the limit is {_MAX_VARIABLES}")
    for name, text in value.items():
        checked_variable_name(name)
        if _NOT_STORABLE.search(text):
            raise ValueError(f"{name} holds a NUL or half a character, which no environment holds: remove it")
    if (size := sum(map(len, value.values()))) > _MAX_ENVIRONMENT_CHARACTERS:
        raise ValueError(
            f"holds {size} characters, the limit is {_MAX_ENVIRONMENT_CHARACTERS}: put them into a file"
        )
    return value


def _check_unique_names(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("names a secret twice: name each once")
    return names


Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]
SecretName = Annotated[str, Field(max_length=128), AfterValidator(checked_variable_name)]
SecretNames = Annotated[
    list[SecretName], Field(max_length=_MAX_VARIABLES, fail_fast=True), AfterValidator(_check_unique_names)
]


OWN_PACKAGES = ("service", "worker")


_NEEDED_PACKAGES = (
    "ray",
    "torch",
    "numpy",
    "pydantic",
    "fsspec",
    "safetensors",
    "prometheus_client",
    "tenacity",
)
_UNUSED_OF_PYTHON = {"test", "this", "antigravity", "turtle", "turtledemo", "idlelib", "tkinter", "lib2to3"}


def shadowing_message(path: PurePath) -> str | None:
    """Why a module at `path` of a job's code would stand before one of Slotline's own, of Python's or of Ray's; None where
    it does not."""
    name = path.parts[0].removesuffix(".py") if path.parts else ""
    if path.suffix != ".py":
        return None
    is_top = path.parts in ((f"{name}.py",), (name, "__init__.py"))
    if is_top and name in {*_NEEDED_PACKAGES, *(sys.stdlib_module_names - _UNUSED_OF_PYTHON)}:
        whose = "the installed one" if name in _NEEDED_PACKAGES else "Python's own"
        return (
            f"{str(path)!r}: in a job's processes a module named {name!r} stands before {whose}, which they need: rename "
            "it, or give a folder below as code.working_dir"
        )
    if name not in OWN_PACKAGES:
        return None
    return (
        f"{str(path)!r}: in a job's driver a module named {name!r} stands in the way of Slotline's own packages "
        f"({', '.join(OWN_PACKAGES)}): rename it, or give a folder below as code.working_dir"
    )


LABEL_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9._/:@-]{0,61}[A-Za-z0-9])?)?$"
MAX_LABELS = 16
_DURATION_UNITS_S = (86400, 3600, 60, 1)
_DURATION_PATTERN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_MAX_DURATION_S = 10 * 366 * 86400


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    if len(labels) > MAX_LABELS:
        raise ValueError(f"holds {len(labels)} labels, the limit is {MAX_LABELS}: remove some")
    for name, value in labels.items():
        if not re.fullmatch(LABEL_NAME_PATTERN, name) or name.endswith("\n"):
            raise ValueError(
                f"{name!r} is no label's name: begin and end with a letter or digit, at most 63 characters, "
                "between them also '.', '_', '/' and '-'"
            )
        if not re.fullmatch(LABEL_VALUE_PATTERN, value) or value.endswith("\n"):
            raise ValueError(
                f"label {name} is {value!r}: begin and end with a letter or digit, at most 63 characters, "
                "between them also '.', '_', '/', ':', '@' and '-'"
            )
    return labels


def _parse_duration(value: object) -> object:
    if isinstance(value, str):
        match = _DURATION_PATTERN.fullmatch(value)
        if not value or match is None or any(len(part or "") > 9 for part in match.groups()):
            raise ValueError(f"is {value!r}: write seconds as a number, or e.g. 90m, 12h or 2d12h")
        return float(
            sum(int(part or 0) * unit for part, unit in zip(match.groups(), _DURATION_UNITS_S, strict=True))
        )
    if isinstance(value, bool):
        raise ValueError(f"is {value}: write seconds as a number, or e.g. 90m, 12h or 2d12h")
    return value


Labels = Annotated[dict[str, str], AfterValidator(_check_labels)]
Duration = Annotated[
    float, Field(ge=1, le=_MAX_DURATION_S, allow_inf_nan=False), BeforeValidator(_parse_duration)
]
"""Seconds; also read from a text such as 90m."""


StateName = Literal[
    "QUEUED", "STARTING", "RUNNING", "RECOVERING", "CANCELLING", "SUCCEEDED", "FAILED", "CANCELLED"
]
_MAX_URL_LENGTH = 2000


def checked_webhook_url(url: str) -> str:
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


def check_webhook_secret(url: str, secret: SecretStr | None) -> None:
    """Raise ValueError unless there is a secret that signs calls of the operator's `url`."""
    if secret is None or len(secret.get_secret_value().strip()) < 16:
        raise ValueError(
            f"SLOTLINE_WEBHOOK_URL is {url}: it needs SLOTLINE_WEBHOOK_SECRET, of at least 16 characters"
        )


class Notification(BaseModel):
    """A webhook: a URL that is called when the job reaches one of `states`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    url: Annotated[str, Field(max_length=_MAX_URL_LENGTH), AfterValidator(checked_webhook_url)]
    secret: SecretName = Field(
        description="The name of a secret of the job's owner: HMAC-SHA256 with it signs what is sent"
    )
    states: Annotated[list[StateName], Field(min_length=1, max_length=8, fail_fast=True)] = [
        "SUCCEEDED",
        "FAILED",
        "CANCELLED",
    ]


Notifications = Annotated[list[Notification], Field(max_length=5, fail_fast=True)]


_REGEX_PREFIX = "re:"


def _check_printable(value: str) -> str:
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise ValueError(f"{value!r} holds control characters: remove them")
    return value


def check_storable(value: JsonValue) -> JsonValue:
    """The value itself; ValueError where it holds, at any depth, a value that JSON or a database cannot store."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number: give a finite number, or null")
    if isinstance(value, str) and _NOT_STORABLE.search(value):
        raise ValueError(f"{value!a} holds a NUL or half a character, which no database stores: remove it")
    for inner in (
        (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        check_storable(inner)
    return value


def _check_pattern(value: str) -> str:
    if value.startswith(_REGEX_PREFIX):
        try:
            re.compile(value.removeprefix(_REGEX_PREFIX))
        except (
            re.error,
            OverflowError,
            RecursionError,
        ) as error:  # a{99999999999}, and a thousand groups in each other
            raise ValueError(f"{value!r} is no regular expression ({error}): correct it") from None
    return value


FiniteJson = Annotated[JsonValue, AfterValidator(check_storable)]
Text = Annotated[str, Field(max_length=4096), AfterValidator(_check_printable)]
Pattern = Annotated[Text, Field(min_length=1), AfterValidator(_check_pattern)]
Patterns = Annotated[list[Pattern], Field(fail_fast=True)]


class ParameterGroupSection(BaseModel):
    """Parameters by name, and beside `match` the optimizer's settings for them: weight_decay, lr, …"""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, FiniteJson]
    match: Annotated[Patterns, Field(min_length=1)]

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        for name in self.__pydantic_extra__:
            _check_printable(name)
        if not self.__pydantic_extra__:
            raise ValueError("a group of parameters sets nothing: add weight_decay: 0, say, or leave it out")
        if len(self.__pydantic_extra__) > 100:
            raise ValueError(f"a group of parameters sets {len(self.__pydantic_extra__)} values: at most 100")
        if "params" in self.__pydantic_extra__:
            raise ValueError("params of a group are named by `match`: leave params out")
        return self


class SpecPart(BaseModel):
    """A section of a specification: strict, frozen, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _not_full_of_unknown_fields(cls, data: object) -> object:
        if isinstance(data, dict) and len(data) > 100:
            raise ValueError(
                f"holds {len(data)} fields, of which {len(cls.model_fields)} are known: remove the others"
            )
        return data


_MESSAGE_LIMIT = 20_000
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless_text(text: str) -> str:
    """`text` without colours, and with other control characters than tabs and line ends written out (\\x1b): a terminal that
    it is printed to shows them and obeys none."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", _COLOURS.sub("", text))


def storable_text(text: str | None) -> str | None:
    """`text` in a form that PostgreSQL stores and no terminal obeys: no controls, no half surrogates, cut at the limit."""
    if text is None:
        return None
    text = harmless_text(
        text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    )
    return (
        text
        if len(text) <= _MESSAGE_LIMIT
        else f"{text[:_MESSAGE_LIMIT]} [cut at {_MESSAGE_LIMIT} characters]"
    )
