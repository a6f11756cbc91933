"""Reads job.yaml (YAML or JSON) strictly and uploads its code folder as a reproducible zip.

Refused with file and line: a key that stands twice, a value that JSON cannot hold, a file that is neither format.
The zip has the same bytes for the same content (fixed order, fixed times), so that the server stores it once.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import typer
import yaml

from service.cli.output import CliError
from service.client.client import Client
from service.spec.job import PACKAGE_PREFIX, REMOTE_CODE_PREFIXES

_SKIPPED_NAMES = {
    ".git",
    ".venv",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    "node_modules",
}
_ZIP_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
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


def upload_code(client: Client, spec: dict[str, Any], file: Path) -> dict[str, Any]:
    """The job with its code.working_dir, a folder of this machine, replaced by the URI of its uploaded package."""
    code = spec.get("code")
    place = code.get("working_dir") if isinstance(code, dict) else None
    if not isinstance(place, str) or place.startswith((PACKAGE_PREFIX, *REMOTE_CODE_PREFIXES)):
        return spec
    folder = Path(place).expanduser()
    if not folder.is_absolute() and str(file) != "-":
        folder = file.parent / folder
    package = client.upload_package(zip_folder(folder))
    return {**spec, "code": {**code, "working_dir": package.uri}}


def zip_folder(folder: Path) -> bytes:
    """Files of `folder` in a fixed order with a fixed time; caches, links and .git stay out."""
    if not folder.is_dir():
        raise CliError(f"code.working_dir {folder} is no folder: give the folder that holds your modules")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            path = file.relative_to(folder)
            if _SKIPPED_NAMES.isdisjoint(path.parts) and file.is_file() and not file.is_symlink():
                entry = zipfile.ZipInfo(path.as_posix(), _ZIP_TIMESTAMP)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (0o100755 if file.stat().st_mode & 0o100 else 0o100644) << 16
                archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()
