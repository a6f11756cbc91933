"""Compiled inner loops over flat arrays. They know tasks by number; problem.py says what a number means.

Compiled on first use and cached on disk; each file calls only functions of its own, as numba's cache asks.
"""

from service.scheduler.kernels.dispatcher import TOLERANCE, dispatch
from service.scheduler.kernels.paths import jackson, longest_paths, tails
from service.scheduler.kernels.swaps import improve_orders
from service.scheduler.kernels.waits import clocks, compile_waits, first_unmet

__all__ = [
    "TOLERANCE",
    "clocks",
    "compile_waits",
    "dispatch",
    "first_unmet",
    "improve_orders",
    "jackson",
    "longest_paths",
    "tails",
]
