"""How kernels are compiled: to machine code on first use, kept on disk where there is a place for it.

They hold no interpreter lock: several may run in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; its cache is left out where neither the package nor the home can be written."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)
