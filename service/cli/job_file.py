"""Reads job.yaml (YAML or JSON) strictly, changes and writes job files.

Refused with file and line: a key that stands twice, a value that JSON cannot hold, a file that is neither format.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

from service.cli.output import CliError
from service.spec.short_forms import file_form

_NO_JOB_MESSAGE = "holds no job: give model, data, loss, ... as worker/README.md shows"


def read_spec(file: Path, otherwise: str = _NO_JOB_MESSAGE) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; CliError where it cannot be read, or with `otherwise` where it is no mapping."""
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text("utf-8-sig")
        spec = _parse_text(text)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is no text in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise CliError(f"{file} is neither YAML nor JSON: {_yaml_error_text(error)}") from None
    except RecursionError:
        raise CliError(f"{file} is nested too deeply: flatten it") from None
    except _AmbiguousFileError as error:
        raise CliError(f"{file}: {error}") from None
    if not isinstance(spec, dict):
        raise CliError(f"{file} {otherwise}")
    try:
        json.dumps(spec, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CliError(
            f"{file} holds a value that JSON has not ({error}): quote dates, leave out .nan"
        ) from None
    return spec


def with_changes(spec: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """`spec` with `path=value` set, one after the other: dots lead into mappings and lists, values are YAML."""
    changed = copy.deepcopy(spec)
    for change in changes:
        path, equals, text = change.partition("=")
        names = path.split(".")
        if not equals or not all(names):
            raise CliError(f"--set {change} changes nothing: write path=value, as training.steps=1000")
        try:
            value = yaml.load(text, StrictYamlLoader)
            json.dumps(value, allow_nan=False)
        except (yaml.YAMLError, _AmbiguousFileError, TypeError, ValueError) as error:
            reason = _yaml_error_text(error) if isinstance(error, yaml.YAMLError) else error
            raise CliError(f"--set {path}: {text!r} is no value of YAML that JSON has: {reason}") from None
        at: Any = changed
        for depth, name in enumerate(names):
            last = depth == len(names) - 1
            if isinstance(at, list) and name.isdigit() and int(name) < len(at):
                key: Any = int(name)
            elif isinstance(at, dict):
                key = name
            else:
                kind = f"a list of {len(at)}" if isinstance(at, list) else f"{at!r}"
                where = ".".join(names[:depth])
                raise CliError(f"--set {path}: {where} is {kind}, which has no {name!r}")
            if last:
                at[key] = value
            elif isinstance(at, dict):
                at = at.setdefault(key, {})
            else:
                at = at[key]
    return changed


def job_file_text(spec: Mapping[str, Any]) -> str:
    """A job file that submits the same again, without what has its default."""
    from pydantic import ValidationError

    from service.spec.job import JobSpec

    try:
        spec = JobSpec.model_validate(spec).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:  # of another version: whole, as it was stored
        spec = dict(spec)
    return yaml.safe_dump(file_form(spec), sort_keys=False, allow_unicode=True)


def spec_differences(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[tuple[str, str | None, str | None]]:
    """(path, value there, value here) of each field that differs, values as JSON, None where there is none."""
    leaves = [dict(_leaves("", file_form(spec))) for spec in (first, second)]
    return [
        (path, leaves[0].get(path), leaves[1].get(path))
        for path in dict.fromkeys([*leaves[0], *leaves[1]])
        if leaves[0].get(path) != leaves[1].get(path)
    ]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}".lstrip("."), part)
    else:
        yield path, json.dumps(value)


def _parse_text(text: str) -> Any:
    """JSON first: indented by tabs it is no YAML."""
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except json.JSONDecodeError:
        return yaml.load(text, StrictYamlLoader)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise _AmbiguousFileError(f"{name} stands twice in one object: keep one")
        mapping[name] = value
    return mapping


def _yaml_error_text(error: yaml.YAMLError) -> str:
    """The problem with line and column, in one line; for tabs, which look like blanks, with the remedy."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    remedy = ": indent with blanks" if "'\\t'" in problem else ""
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}{remedy}"


class _AmbiguousFileError(Exception):
    """The text parses, and gives one name two values."""


class StrictYamlLoader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, as YAML 1.2 and JSON do, and refuses a name that stands twice.

    YAML 1.1 takes 1e-3 for text, and of two `training:` it would drop the first without a word.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _AmbiguousFileError(
                    f"{key.value} stands twice, in lines {lines[key.value]} and {line}: keep one"
                )
            lines[key.value] = line
        return node


StrictYamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
