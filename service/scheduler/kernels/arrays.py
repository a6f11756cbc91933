"""Array layouts of the kernels, their numba decorators, and the records the dispatcher updates while it runs.

A kind is one operation of the step (a stage's F, its B or I, its W; a transfer's two directions), a task is a
kind of one microbatch: task = kind * microbatches + microbatch. The kinds of stage s are OPS * s + FORWARD, +
BACKWARD (B, or I where it is split) and + WEIGHT; the kinds of transfers follow those of all stages.
Kernels are compiled to machine code on first use and cached on disk, where either the package or the home can be
written. They hold no interpreter lock: several may run in threads. numba's cache sees no change in another file
whose inlined functions or constants are compiled in, so every kernel's qualified name carries a checksum of this
package.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numba import njit

OPS = 3
FORWARD, BACKWARD, WEIGHT = 0, 1, 2


class Rows(NamedTuple):
    """A list of lists: row i is values[pointer[i]:pointer[i + 1]]."""

    pointer: np.ndarray
    values: np.ndarray


class Tasks(NamedTuple):
    """The tasks of a problem: what they wait for, how long they last (seconds) and what they occupy."""

    microbatches: int
    stages: int
    meshes: int
    resource_count: int
    exists: np.ndarray  # bool[tasks]
    duration: np.ndarray  # float[tasks]
    missing: np.ndarray  # int32[tasks]: how many others each waits for
    dependents: Rows  # of kinds
    needs: Rows  # of kinds
    resources: np.ndarray  # int[kinds, 2], −1 for none; resource p < meshes is the compute lane of mesh p
    receiver: np.ndarray  # int[kinds]: mesh at which a kind ends
    kinds_of_mesh: Rows  # compute kinds


class LaneLimits(NamedTuple):
    """Limits of what compute lanes hold: bytes of stages and meshes (−1: no limit), and microbatches in flight."""

    activation: np.ndarray  # int[stages, microbatches]
    stash: np.ndarray  # int[stages, microbatches]
    most_activation: np.ndarray  # of each stage: of any microbatch
    activation_limit: np.ndarray  # of each mesh
    in_flight_cap: np.ndarray  # of each stage: between F and B
    source_cap: np.ndarray  # of each stage: between F and the end of its whole backward
    order: np.ndarray  # int[microbatches]: in which every kind runs them, where compute orders are not given


class ReceiveBufferLimits(NamedTuple):
    """Receive buffers: how many each mesh has (−1: no limit), and in which order transfers may take them."""

    limit: np.ndarray  # int[meshes]
    by_first_use: Rows  # of meshes: transfer tasks
    rank: np.ndarray  # int[tasks]: place in its row


# the numpy error model: integers are never divided by zero here, and no check says so; nobody calls kernels from C
_NUMBA_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function; its cache is left out where neither the package nor the home can be written."""
    return _compile(function, **_NUMBA_OPTIONS)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of compiled functions, of its own file or another, that allocates nothing; its call costs nothing.

    Without both options a named tuple is handed over array by array, each one counted in and out: the
    dispatcher took sixteen times as long. What changes in a kernel stands in few arrays of records for the same
    reason. Python cannot call it: code that reads such arguments would take longer to compile than the function.
    """
    return _compile(function, forceinline=True, _nrt=False, no_cpython_wrapper=True, **_NUMBA_OPTIONS)


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # numba's cache knows a function by its name and its own file, and sees no change in another file whose parts
    # or constants are compiled in: so the name says what all kernels are
    function.__qualname__ = f"{_package_checksum()}.{function.__qualname__}"
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


@functools.cache
def _package_checksum() -> str:
    """A checksum of the files of this package."""
    files = {
        file.name: file.read_bytes()
        for file in resources.files(__package__).iterdir()
        if file.name.endswith(".py")
    }
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]


_TASK_DTYPE = np.dtype(
    [
        ("start", np.float64),
        ("end", np.float64),
        ("ready_at", np.float64),  # latest end of a cause so far
        ("expected", np.float64),  # latest known end of a cause, ended or not
        ("missing", np.int64),  # causes that have not ended
        ("unknown", np.int64),  # causes whose end is not known yet
        ("buffer_users", np.int64),  # of a received tensor: direct users that have not ended
        ("receive_rank", np.int64),  # −1 once begun
    ]
)
_KIND_DTYPE = np.dtype(
    [
        ("next", np.int64),  # microbatch
        ("queue_head", np.int64),
        ("queue_tail", np.int64),
    ]
)
_STAGE_DTYPE = np.dtype(
    [
        ("started", np.int64),  # forwards begun,
        ("returned", np.int64),  # B or I ended,
        ("finished", np.int64),  # whole backwards ended
    ]
)
_MESH_DTYPE = np.dtype(
    [
        ("held", np.int64),  # bytes
        ("choice", np.int64),  # what a free lane would run next, −1 for nothing
        ("stale", np.int64),  # whether that choice must be made again
        ("position", np.int64),  # the next of a given lane
        ("buffers", np.int64),  # receive buffers in use
        ("buffer_low", np.int64),  # every transfer before this place of its row has begun
    ]
)
_RESOURCE_DTYPE = np.dtype([("busy", np.int64), ("free_at", np.float64)])
_COUNT_DTYPE = np.dtype(
    [
        ("begun", np.int64),
        ("running", np.int64),  # begun and not ended: a heap
        ("waiting_kinds", np.int64),  # queues that are not empty
    ]
)


class DispatchState(NamedTuple):
    """The state of a run of the dispatcher, which changes while tasks run."""

    tasks: np.ndarray
    kinds: np.ndarray
    stages: np.ndarray
    meshes: np.ndarray
    resources: np.ndarray
    counts: np.ndarray  # [1]
    order: np.ndarray  # tasks in the order in which they began
    heap: np.ndarray  # running tasks, earliest end first
    queue: np.ndarray  # int[transfer kinds, microbatches]: transfers that may start but for their resources
    pending: np.ndarray  # int[tasks]: a stack


@compiled
def new_dispatch_state(tasks, lanes, receives, limited):
    """Before the first task; `limited`: some mesh has a limit of receive buffers."""
    count = tasks.duration.shape[0]
    microbatches = tasks.microbatches
    kinds = count // microbatches
    first_transfer = OPS * tasks.stages
    run = DispatchState(
        np.zeros(count, dtype=_TASK_DTYPE),
        np.zeros(kinds, dtype=_KIND_DTYPE),
        np.zeros(tasks.stages, dtype=_STAGE_DTYPE),
        np.zeros(tasks.meshes, dtype=_MESH_DTYPE),
        np.zeros(tasks.resource_count, dtype=_RESOURCE_DTYPE),
        np.zeros(1, dtype=_COUNT_DTYPE),
        np.empty(count, dtype=np.int64),
        np.empty(count, dtype=np.int64),
        np.empty((max(kinds - first_transfer, 1), microbatches), dtype=np.int64),
        np.empty(count, dtype=np.int64),
    )
    for task in range(count):
        run.tasks[task].missing = tasks.missing[task]
        run.tasks[task].unknown = tasks.missing[task]
        run.tasks[task].receive_rank = receives.rank[task]
    for mesh in range(tasks.meshes):
        run.meshes[mesh].stale = 1
        run.meshes[mesh].position = lanes.pointer[mesh]
        run.meshes[mesh].buffer_low = receives.by_first_use.pointer[mesh]
    if limited:
        pointer = tasks.dependents.pointer
        for kind in range(first_transfer, kinds):
            for m in range(microbatches):
                run.tasks[kind * microbatches + m].buffer_users = pointer[kind + 1] - pointer[kind]
    return run
