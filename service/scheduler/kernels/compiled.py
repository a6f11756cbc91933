"""How kernels are compiled: to machine code on first use, kept on disk where there is a place for it.

They hold no interpreter lock: several may run in threads.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any

from numba import njit

# the numpy error model: integers are never divided by zero here, and no check says so
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; its cache is left out where neither the package nor the home can be written."""
    return _compile(function, **_OPTIONS)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of compiled functions, of its own file or another, that allocates nothing; its call costs nothing.

    Without both options a named tuple is handed over array by array, each one counted in and out: the
    dispatcher took sixteen times as long. What changes in a kernel stands in few arrays of records for the same
    reason.
    """
    return _compile(function, forceinline=True, _nrt=False, **_OPTIONS)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # numba's cache knows a function by its name and its own file, and sees no change in another file whose parts
    # or constants are compiled in: so the name says what all kernels are
    function.__qualname__ = f"{_sources()}.{function.__qualname__}"
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


@functools.cache
def _sources() -> str:
    """A checksum of the files of this package."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files(__package__).iterdir()
        if file.name.endswith(".py")
    }
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
