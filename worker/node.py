"""Where a process of the cluster runs: what an actor says of itself, and the driver reads.

Light: no torch. Ray is asked only when a function is called.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerAddress:
    """Where one worker runs; JSON of it goes to the control plane with the request for a plan."""

    mesh: str
    worker: int
    node: str
    node_id: str
    process_id: int
    device: str


def own_node_address() -> str:
    """The address under which the cluster knows the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)
