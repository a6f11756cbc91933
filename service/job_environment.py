"""The environment variables that a job gives to its driver and workers: by value, or by the name of a secret.

Values only: no database, no HTTP, no Ray.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
SHORTEST_SECRET = 8
"""Shorter ones would be found, and blanked, in every other line of a log."""
LONGEST_SECRET = 32_768
_MOST_VARIABLES = 100
_MOST_CHARACTERS = 65_536
_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")
_RESERVED_PREFIXES = ("SLOTLINE_", "RAY_", "LD_", "DYLD_")
_RESERVED = frozenset(
    {
        *("PATH", "HOME", "SHELL", "ENV", "BASH_ENV", "SHELLOPTS", "IFS", "VIRTUAL_ENV", "GLIBC_TUNABLES"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONEXECUTABLE"),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_HOSTID"),
    }
)


def checked_name(name: str) -> str:
    """The name of a variable that a job may set; ValueError for another."""
    if not re.fullmatch(VARIABLE_PATTERN.strip("^$"), name):
        raise ValueError(f"{name[:200]!a} is no name of a variable: write letters, digits and _")
    if name.upper().startswith(_RESERVED_PREFIXES) or name.upper() in _RESERVED:
        raise ValueError(f"{name} is not a job's to set: Slotline, Ray, Python or the linker reads it")
    return name


def _environment(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MOST_VARIABLES:
        raise ValueError(f"holds {len(value)} variables, the limit is {_MOST_VARIABLES}")
    for name, text in value.items():
        checked_name(name)
        if _NOT_STORABLE.search(text):
            raise ValueError(f"{name} holds a NUL or half a character, which no environment holds: remove it")
    if (size := sum(map(len, value.values()))) > _MOST_CHARACTERS:
        raise ValueError(f"holds {size} characters, the limit is {_MOST_CHARACTERS}: put them into a file")
    return value


def _each_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError("names a secret twice: name each once")
    return names


Environment = Annotated[dict[str, str], AfterValidator(_environment)]
SecretName = Annotated[str, Field(max_length=128), AfterValidator(checked_name)]
SecretNames = Annotated[
    list[SecretName], Field(max_length=_MOST_VARIABLES, fail_fast=True), AfterValidator(_each_once)
]
