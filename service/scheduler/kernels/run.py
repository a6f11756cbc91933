"""What the dispatcher keeps of tasks, kinds, stages, meshes and resources while tasks run: arrays of records."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.scheduler.kernels.arrays import OPS
from service.scheduler.kernels.compiled import compiled

_TASK = np.dtype(
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
_KIND = np.dtype(
    [
        ("next", np.int64),  # microbatch
        ("queue_head", np.int64),
        ("queue_tail", np.int64),
    ]
)
_STAGE = np.dtype(
    [
        ("started", np.int64),  # forwards begun,
        ("returned", np.int64),  # B or I ended,
        ("finished", np.int64),  # whole backwards ended
    ]
)
_MESH = np.dtype(
    [
        ("held", np.int64),  # bytes
        ("choice", np.int64),  # what a free lane would run next, −1 for nothing
        ("stale", np.int64),  # whether that choice must be made again
        ("position", np.int64),  # the next of a given lane
        ("buffers", np.int64),  # receive buffers in use
        ("buffer_low", np.int64),  # every transfer before this place of its row has begun
    ]
)
_RESOURCE = np.dtype([("busy", np.int64), ("free_at", np.float64)])
_COUNT = np.dtype(
    [
        ("begun", np.int64),
        ("running", np.int64),  # begun and not ended: a heap
        ("waiting_kinds", np.int64),  # queues that are not empty
    ]
)


class Run(NamedTuple):
    """What changes while tasks run."""

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
def new_run(tasks, lanes, receives, limited):
    """Before the first task; `limited`: some mesh has a limit of receive buffers."""
    count = tasks.duration.shape[0]
    microbatches = tasks.microbatches
    kinds = count // microbatches
    first_transfer = OPS * tasks.stages
    run = Run(
        np.zeros(count, dtype=_TASK),
        np.zeros(kinds, dtype=_KIND),
        np.zeros(tasks.stages, dtype=_STAGE),
        np.zeros(tasks.meshes, dtype=_MESH),
        np.zeros(tasks.resource_count, dtype=_RESOURCE),
        np.zeros(1, dtype=_COUNT),
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
