"""Where a process of the cluster runs: what an actor says of itself, and the driver reads.

Light: no torch. Ray is asked only when a function is called.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

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
    cores: float | None = None  # processor cores of the node, where workers compute on them


def processor_cores() -> float:
    """How many cores the processes of this node (or container) may use together."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds of each period
        quota, period = _CGROUP_LIMIT.read_text().split()
        cores = min(cores, float(quota) / float(period))
    return cores


def own_node_address() -> str:
    """The address under which the cluster knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
