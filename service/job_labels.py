"""Labels and durations of jobs as users type them. Values only."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

LABEL_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9._/:@-]{0,61}[A-Za-z0-9])?)?$"
MAX_LABELS = 16
_UNITS_S = (86400, 3600, 60, 1)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_LONGEST_S = 10 * 366 * 86400


def _labels(labels: dict[str, str]) -> dict[str, str]:
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


def _seconds(value: object) -> object:
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if not value or found is None or any(len(part or "") > 9 for part in found.groups()):
            raise ValueError(f"is {value!r}: write seconds as a number, or e.g. 90m, 12h or 2d12h")
        return float(sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS_S, strict=True)))
    if isinstance(value, bool):
        raise ValueError(f"is {value}: write seconds as a number, or e.g. 90m, 12h or 2d12h")
    return value


Labels = Annotated[dict[str, str], AfterValidator(_labels)]
Duration = Annotated[float, Field(ge=1, le=_LONGEST_S, allow_inf_nan=False), BeforeValidator(_seconds)]
"""Seconds; also read from a text such as 90m."""
