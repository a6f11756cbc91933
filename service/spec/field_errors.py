"""Messages for what a job specification gets wrong: field, value, cause and remedy, from pydantic's errors.

The server's answers and the commands that read a job without a server say the same. Unknown fields are compared with
those of a JobSpec.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from service.spec.job import JobSpec
from service.spec.resources import ResourcesSection
from service.spec.short_forms import MESH_RANGE_FIELD, STORED_MESH_FIELDS

_VALUE_LIMIT = 200
_INLINE_VALUE_LIMIT = 80  # longer ones stand in `errors` only
_ERRORS_SHOWN = 50  # each unknown name is compared with all known ones
_UNION_TAG = re.compile(r"(list|dict|literal|function-\w+|constrained-\w+|tagged-\w+)\[.*\]", re.DOTALL)
"""Pydantic's name, in the location of an error, for one of a field's several forms. No name of ours has brackets."""


def field_errors(details: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The errors of a ValidationError, {field, value, message} each, and all of them as one sentence. The first part of
    a location is where the value came from (body, query, path)."""
    errors = [_field_error(detail) for detail in details[:_ERRORS_SHOWN]]
    errors = [shown for k, shown in enumerate(errors) if shown not in errors[:k]]
    message = "; ".join(f"{shown['field']}: {shown['message']}" for shown in errors)
    if len(details) > len(errors):
        message += f"; and {len(details) - len(errors)} more"
    return errors, message


def _field_error(error: Mapping[str, Any]) -> dict[str, Any]:
    where, *path = error["loc"] or ("body",)
    path = [part for part in path if not _UNION_TAG.fullmatch(str(part))]
    field = ".".join(str(part) for part in path) or str(where)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = _unknown_field(path)
    elif error["type"] == "missing":
        return {"field": field, "value": None, "message": "is missing: give it"}
    elif error["type"] in ("model_attributes_type", "dict_type", "model_type") and not path:
        message = "is no JSON object: send one, with Content-Type: application/json"
    elif error["type"] == "string_pattern_mismatch" and field.endswith("factory"):
        message = "is no import path: write package.module:attribute"
    elif error["type"] == "string_pattern_mismatch" and field in ("name", "queue"):
        message = "is no name: begin with a letter or digit, go on with letters, digits, '.', '_' and '-'"
    elif error["type"] == "json_invalid":
        field, message = "body", f"is not JSON: {error.get('ctx', {}).get('error', 'syntax error')}"
    return {
        "field": field,
        "value": _json_value(error.get("input")),
        "message": message + _refused_value(error),
    }


def _refused_value(error: Mapping[str, Any]) -> str:
    """The value that a rule of a type refused, where it is short; our own rules name what they refuse themselves."""
    if error["type"] in (
        "value_error",
        "assertion_error",
        "extra_forbidden",
        "json_invalid",
        "finite_number",
    ):
        return ""
    shown = json.dumps(error.get("input"), default=str, ensure_ascii=False)
    return f", not {shown}" if len(shown) <= _INLINE_VALUE_LIMIT else ""


_SCALES_ITSELF = "the scale grows and backs off as torch.amp.GradScaler's does by default"
RETIRED_FIELDS = {
    "data.skip_limit_s": "a resume may pass over samples for half an hour; a data set with state_dict() and "
    "load_state_dict() passes over none",
    "training.compile_limit_s": "a worker compiles for 20 minutes at most, and the stages that are left run as traced",
    "training.loss_scaling.growth_factor": _SCALES_ITSELF,
    "training.loss_scaling.backoff_factor": _SCALES_ITSELF,
    "training.loss_scaling.growth_interval": _SCALES_ITSELF,
    "training.loss_scaling.max_skipped_steps": "24 skipped steps in a row end the job",
}
"""Fields that were, and what holds in their place; evaluation.data had those of data too."""


def _unknown_field(path: Sequence[Any]) -> str:
    if retired := RETIRED_FIELDS.get(".".join(map(str, path)).removeprefix("evaluation.")):
        return f"is no field any more: {retired}. Remove it"
    known = sorted(_fields_at(JobSpec, path[:-1]))
    unknown = str(path[-1]) if path else ""
    begun = [
        name for name in known if unknown and name.startswith(f"{unknown}_")
    ]  # every for every_steps, not keep_every
    near = begun or (difflib.get_close_matches(unknown, known, n=1) if path else [])
    if near:
        return f"unknown field: did you mean {near[0]}?"
    known_here = f"; known here: {', '.join(known)}" if known else ""
    return f"unknown field: remove it{known_here}"


def _fields_at(model: type[BaseModel], path: Sequence[Any]) -> set[str]:
    """Names of the fields of a job specification below `path`; empty where the path is not of a job."""
    for part in path:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()  # also X of `X | None`
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            return set()
        model = inner
    return set(model.model_fields) - (
        {*STORED_MESH_FIELDS, MESH_RANGE_FIELD} if model is ResourcesSection else set()
    )


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}..."
