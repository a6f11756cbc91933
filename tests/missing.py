"""What a test needs and a machine may lack: left out by name at home, a failure in continuous integration."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest


def in_ci() -> bool:
    """Whether CI is set: there nothing may be left out."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def leave_out(message: str) -> NoReturn:
    """Skip the test that runs, or fail it in CI."""
    pytest.fail(f"{message}, and CI needs it") if in_ci() else pytest.skip(message)


def needs_libraries(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that use libraries, none of which is imported while tests are collected."""
    return pytest.mark.needs_libraries(*names)


def leave_out_without_libraries(item: pytest.Item) -> None:
    """Leave out a test that is marked by `needs_libraries` where one of its libraries is not installed."""
    names = [name for mark in item.iter_markers("needs_libraries") for name in mark.args]
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        leave_out(f"not installed: {', '.join(missing)}")


def needs(path: Path, what: str) -> Callable[[Any], Any]:
    """A decorator for tests that read `path`; the outermost one, as in CI one failure stands for all parameters."""
    if path.exists():
        return lambda test: test
    message = f"{path} is not there ({what})"
    if not in_ci():
        return pytest.mark.skip(message)

    def failing(test: Any) -> Any:
        def instead() -> None:
            leave_out(message)

        instead.__name__ = test.__name__
        return instead

    return failing
