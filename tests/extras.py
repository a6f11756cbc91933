"""What the package and its extras bring, by pyproject.toml and the metadata of what is installed here."""

from __future__ import annotations

import contextlib
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    """A distribution's name as all of them are compared."""
    return name.lower().replace("_", "-")


def distributions_of(*extras: str) -> set[str]:
    """What `pip install slotline[extras]` brings to this machine, with everything that those need in turn."""
    listed = [
        *PROJECT["dependencies"],
        *(text for one in extras for text in PROJECT["optional-dependencies"][one]),
    ]
    found, todo = set[tuple[str, str]](), [(Requirement(text), "") for text in listed]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            if (normal(requirement.name), wanted) not in found:
                found.add((normal(requirement.name), wanted))
                with contextlib.suppress(PackageNotFoundError):  # what is not here brings nothing here
                    needed = distribution(requirement.name).requires or ()
                    todo += [(Requirement(text), wanted) for text in needed]
    return {name for name, _ in found}


def modules_beyond(*extras: str) -> list[str]:
    """The modules of this environment that one with Slotline and only `extras` would not have."""
    there = distributions_of(*extras) | {"slotline"}
    return [
        module
        for module, names in packages_distributions().items()
        if not there & set(map(normal, names)) and not module.startswith("_")
    ]
