"""Compiled inner loops over flat arrays. They know tasks by number; arrays.py says what a number means.

Compiled on first use and cached on disk; a change in any of these files compiles all of them again.
"""

from service.scheduler.kernels.arrays import BACKWARD, FORWARD, OPS, WEIGHT, Limits, Receives, Rows, Tasks
from service.scheduler.kernels.dispatcher import TOLERANCE, dispatch
from service.scheduler.kernels.paths import compress, jackson, latest_starts, longest_paths, tails
from service.scheduler.kernels.tabu import TASK, Disjunctive, tabu_round
from service.scheduler.kernels.waits import Local, clocks, compile_waits, first_unmet

__all__ = [
    "BACKWARD",
    "FORWARD",
    "OPS",
    "TASK",
    "TOLERANCE",
    "WEIGHT",
    "Disjunctive",
    "Limits",
    "Local",
    "Receives",
    "Rows",
    "Tasks",
    "clocks",
    "compile_waits",
    "compress",
    "dispatch",
    "first_unmet",
    "jackson",
    "latest_starts",
    "longest_paths",
    "tabu_round",
    "tails",
]
