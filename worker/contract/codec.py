"""The codec of dataclasses at borders: dataclass to JSON value by its fields, and back by their types.

Tuples travel as lists, sets as sorted lists, nested dataclasses as objects. Reading checks field names, not the types
of scalars: both ends are ours, and a number stays as it was written. `worker.contract.job` reads what users write.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

Decoded = TypeVar("Decoded")
Decoder = Callable[[Any], Any]

OMIT_EMPTY = {"omit_empty": True}
"""Metadata of a field that is not written while empty, since readers of an older version do not know it."""


def to_json(value: Any) -> Any:
    """`value` as json.dumps takes it; `from_json` is its inverse."""
    if value is None or isinstance(value, str | int | float):  # most values, and plans have thousands
        return value
    if is_dataclass(value):
        entries = (
            (name, getattr(value, name), omit_empty) for name, omit_empty in _written_fields(type(value))
        )
        return {name: to_json(entry) for name, entry, omit_empty in entries if entry or not omit_empty}
    if isinstance(value, Mapping):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    return [to_json(entry) for entry in value] if isinstance(value, list | tuple) else value


def from_json(
    cls: type[Decoded], data: Mapping[str, Any], *, label: str = "", ignore_unknown: bool = False
) -> Decoded:
    """A dataclass from its JSON object; ValueError names an unknown or missing field.

    `label` stands for the class in messages. `ignore_unknown` concerns the outermost object only.
    """
    names, required, decoders = _read_fields(cls)
    if ignore_unknown:
        data = {name: value for name, value in data.items() if name in names}
    elif unknown := sorted(set(data) - names):
        raise ValueError(
            f"{label or cls.__name__} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(names))}"
        )
    if missing := sorted(required - set(data)):
        raise ValueError(f"{label or cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: decoders[name](value) if name in decoders else value for name, value in data.items()})


@cache
def _written_fields(cls: type) -> tuple[tuple[str, bool], ...]:
    return tuple((one.name, bool(one.metadata.get("omit_empty"))) for one in fields(cls))


@cache
def _read_fields(cls: type) -> tuple[frozenset[str], frozenset[str], Mapping[str, Decoder]]:
    """The names of all fields, of the required ones, and the decoders of those whose values JSON changes."""
    declared = typing.get_type_hints(cls)
    decoders = {one.name: _decoder(declared[one.name]) for one in fields(cls)}
    required = (one.name for one in fields(cls) if one.default is MISSING and one.default_factory is MISSING)
    return (
        frozenset(decoders),
        frozenset(required),
        {name: decoder for name, decoder in decoders.items() if decoder is not None},
    )


def _decoder(declared: Any) -> Decoder | None:
    """The function from a JSON value to the declared type; None where both are equal."""
    if is_dataclass(declared):
        return lambda data: from_json(declared, data)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is types.UnionType:
        (decoder,) = [_decoder(choice) for choice in arguments if choice is not type(None)]
        return decoder and (lambda value: None if value is None else decoder(value))
    if origin is tuple:
        entry = _decoder(arguments[0]) if arguments[-1] is Ellipsis else None
        return tuple if entry is None else lambda values: tuple(map(entry, values))
    return frozenset if origin is frozenset else None
