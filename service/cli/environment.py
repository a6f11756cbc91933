"""Settings of the command's own process, refused in words for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from service.cli.output import CliError
from service.settings import Settings, load_settings


def settings_or_fail(**values: object) -> Settings:
    """Settings from the environment and `values`; CliError names each wrong variable."""
    try:
        return load_settings(**values)
    except ValidationError as error:
        raise CliError("; ".join(_setting_error(one) for one in error.errors())) from None
    except SettingsError as error:
        raise CliError(f"{error}: give JSON in it, as in SLOTLINE_QUEUES='{{\"default\": null}}'") from None


def _setting_error(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    name = ".".join(str(part) for part in error["loc"])
    if not name:
        return message
    value = str(error["input"])
    secret = (
        "@" in value or name.startswith("clusters") or name.upper().endswith(("TOKEN", "KEY"))
    )  # with @: the password of a database's URL
    shown = "..." if secret else repr(value)
    return f"SLOTLINE_{name.removeprefix('SLOTLINE_').upper()}={shown}: {message}"
