"""What a test needs and a machine may lack: left out by name at home, a failure in continuous integration."""

from __future__ import annotations

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
