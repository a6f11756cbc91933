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


class SpecLoader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-3 for text, and people write learning rates so: a number, as in YAML 1.2 and JSON."""


SpecLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


_NO_JOB = "holds no job: give model, data, loss, ... as the README shows"


def read_spec(file: Path, otherwise: str = _NO_JOB) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; CliError when there is none, which says `otherwise` of a file without."""
    try:
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        spec = yaml.load(text, SpecLoader)
    except OSError as error:
        raise CliError(f"cannot read {file}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CliError(f"{file} is no YAML: {error}") from None
    if not isinstance(spec, dict):
        raise CliError(f"{file} {otherwise}")
    try:
        json.dumps(spec, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CliError(
            f"{file} holds a value that JSON has not ({error}): quote dates, leave out .nan"
        ) from None
    return spec


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
