"""A job as a user keeps it in a file: read as YAML or JSON, its folder of code uploaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import typer
import yaml

from service.cli.output import CliError
from service.cli.packing import zip_folder
from service.client import Client
from service.jobspec import PACKAGE_PREFIX, REMOTE_CODE


class _Refused(Exception):
    """The text can be read, and says two things at once."""


class SpecLoader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for text, and people write learning rates so: a number, as in YAML 1.2 and JSON.

    A name that stands twice is refused: of two `training:` the first would be forgotten without a word.
    """

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                raise _Refused(f"{key.value} stands twice, in lines {lines[key.value]} and {line}: keep one")
            lines[key.value] = line
        return node


SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


_NO_JOB = "holds no job: give model, data, loss, ... as the README shows"


def read_spec(file: Path, otherwise: str = _NO_JOB) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; CliError when there is none, which says `otherwise` of a file without."""
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text("utf-8-sig")
        spec = _parsed(text)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CliError(f"{file} is no text in UTF-8: {error}") from None
    except yaml.YAMLError as error:
        raise CliError(f"{file} is neither YAML nor JSON: {_where(error)}") from None
    except RecursionError:
        raise CliError(f"{file} is nested too deeply: flatten it") from None
    except _Refused as error:
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


def _parsed(text: str) -> Any:
    """JSON first: indented by tabs it is no YAML."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError:
        return yaml.load(text, SpecLoader)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Refused(f"{name} stands twice in one object: keep one")
        found[name] = value
    return found


def _where(error: yaml.YAMLError) -> str:
    """What is wrong in which line, in one line; for tabs, which look like blanks, what to do."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error)
    remedy = ": indent with blanks" if "'\\t'" in problem else ""
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}{remedy}"


def upload_code(client: Client, spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """A folder of this machine in code.working_dir becomes the URI of an uploaded package."""
    code = spec.get("code")
    place = code.get("working_dir") if isinstance(code, dict) else None
    if not isinstance(place, str) or place.startswith((PACKAGE_PREFIX, *REMOTE_CODE)):
        return spec
    folder = Path(place).expanduser()
    if not folder.is_absolute() and str(file) != "-":
        folder = file.parent / folder
    package = client.upload_package(zip_folder(folder))
    return {**spec, "code": {**code, "working_dir": package.uri}}
