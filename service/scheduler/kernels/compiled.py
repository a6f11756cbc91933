"""How kernels are compiled: to machine code on first use, kept on disk where there is a place for it.

They hold no interpreter lock: several may run in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

# the numpy error model: integers are never divided by zero here, and no check says so
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; its cache is left out where neither the package nor the home can be written."""
    return _compile(function, **_OPTIONS)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a compiled function of the same file that allocates nothing; its call costs nothing.

    Without both options a named tuple is handed over array by array, each one counted in and out: the
    dispatcher took sixteen times as long. What changes in a kernel stands in few arrays of records for the same
    reason.
    """
    return _compile(function, forceinline=True, _nrt=False, **_OPTIONS)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)
