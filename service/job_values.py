"""Kinds of values that a job's specification is made of: texts, numbers that JSON has, patterns of parameter names.

Values only, beside service/jobspec.py.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

_NOT_STORABLE = re.compile("[\x00\ud800-\udfff]")
_EXPRESSION = "re:"


def _printable(value: str) -> str:
    if any(ord(character) < 32 for character in value):
        raise ValueError(f"{value!r} holds control characters: remove them")
    return value


def finite(value: JsonValue) -> JsonValue:
    """The value; ValueError for what JSON or a database cannot hold, however deep."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a JSON number: give a finite number, or null")
    if isinstance(value, str) and _NOT_STORABLE.search(value):
        raise ValueError(f"{value!a} holds a NUL or half a character, which no database stores: remove it")
    for inner in (
        (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        finite(inner)
    return value


def _pattern(value: str) -> str:
    if value.startswith(_EXPRESSION):
        try:
            re.compile(value.removeprefix(_EXPRESSION))
        except (
            re.error,
            OverflowError,
            RecursionError,
        ) as error:  # a{99999999999}, and a thousand groups in each other
            raise ValueError(f"{value!r} is no regular expression ({error}): correct it") from None
    return value


FiniteJson = Annotated[JsonValue, AfterValidator(finite)]
Text = Annotated[str, Field(max_length=4096), AfterValidator(_printable)]
Pattern = Annotated[Text, Field(min_length=1), AfterValidator(_pattern)]
Patterns = Annotated[list[Pattern], Field(fail_fast=True)]


class ParameterGroup(BaseModel):
    """Parameters by name, and beside `match` the optimizer's settings for them: weight_decay, lr, …"""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, FiniteJson]
    match: Annotated[Patterns, Field(min_length=1)]

    @model_validator(mode="after")
    def _sets_something(self) -> Self:
        for name in self.__pydantic_extra__:
            _printable(name)
        if not self.__pydantic_extra__:
            raise ValueError("a group of parameters sets nothing: add weight_decay: 0, say, or leave it out")
        if len(self.__pydantic_extra__) > 100:
            raise ValueError(f"a group of parameters sets {len(self.__pydantic_extra__)} values: at most 100")
        if "params" in self.__pydantic_extra__:
            raise ValueError("params of a group are named by `match`: leave params out")
        return self


class Part(BaseModel):
    """A part of a specification: no field that is not known, and not thousands of those."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _not_full_of_unknown_fields(cls, data: object) -> object:
        if isinstance(data, dict) and len(data) > 100:
            raise ValueError(
                f"holds {len(data)} fields, of which {len(cls.model_fields)} are known: remove the others"
            )
        return data
