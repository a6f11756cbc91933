"""Where a process of the cluster runs: what an actor says of itself, and the driver reads.

Light: no torch. Ray is asked only when a function is called.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

SHARE_S = 0.3
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class WorkerAddress:
    """Where one worker runs; JSON of it goes to the control plane with the request for a plan."""

    mesh: str
    worker: int
    node: str
    node_id: str
    process_id: int
    device: str


def processor_cores() -> float:
    """How many cores the processes of this node (or container) may use together."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds of each period
        quota, period = _CGROUP_LIMIT.read_text().split()
        cores = min(cores, float(quota) / float(period))
    return cores


def processor_share(seconds: float = SHARE_S) -> float:
    """The part of a core that a thread of this process gets now, while it computes for `seconds`.

    Called by all workers of a node at once their sum is how many cores they have together: fewer than are there where
    others compute too, or where the machine is a guest that does not get all of its processors.
    """
    wall, own = time.monotonic(), time.thread_time()
    while time.monotonic() - wall < seconds:
        sum(range(1000))
    return (time.thread_time() - own) / (time.monotonic() - wall)


def own_node_address() -> str:
    """The address under which the cluster knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
