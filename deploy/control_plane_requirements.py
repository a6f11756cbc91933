"""Prints what the control plane needs of pyproject.toml: everything but what only workers import, and what exports traces.

The image of the control plane is built from this list; a test proves that it suffices.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

WORKERS_ONLY = ("torch", "ray", "safetensors", "scikit-learn")


def requirements(pyproject: Path) -> list[str]:
    """The requirement strings, in the file's order, those of the extra `otel` last."""
    project = tomllib.loads(pyproject.read_text())["project"]
    dependencies = project["dependencies"] + project["optional-dependencies"]["otel"]
    return [text for text in dependencies if re.split(r"[^A-Za-z0-9_.-]", text)[0] not in WORKERS_ONLY]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"))))
