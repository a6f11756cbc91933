"""Compiled inner loops over flat arrays. They know tasks by number; arrays.py says what a number means.

Compiled on first use and cached on disk; a change in any of these files compiles all of them again.
"""

from service.scheduler.kernels.arrays import (
    BACKWARD,
    FORWARD,
    OPS,
    WEIGHT,
    LaneLimits,
    ReceiveBufferLimits,
    Rows,
    Tasks,
)
from service.scheduler.kernels.dispatcher import TOLERANCE, dispatch
from service.scheduler.kernels.paths import (
    compress_rows,
    jackson_makespan,
    latest_starts,
    longest_paths,
    tails,
)
from service.scheduler.kernels.tabu import TABU_TASK_DTYPE, DisjunctiveGraph, tabu_round
from service.scheduler.kernels.waits import (
    MeshInstructions,
    compile_waits,
    first_unmet_dependency,
    vector_clocks,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "OPS",
    "TABU_TASK_DTYPE",
    "TOLERANCE",
    "WEIGHT",
    "DisjunctiveGraph",
    "LaneLimits",
    "MeshInstructions",
    "ReceiveBufferLimits",
    "Rows",
    "Tasks",
    "compile_waits",
    "compress_rows",
    "dispatch",
    "first_unmet_dependency",
    "jackson_makespan",
    "latest_starts",
    "longest_paths",
    "tabu_round",
    "tails",
    "vector_clocks",
]
