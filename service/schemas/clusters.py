"""REST bodies for Ray clusters: nodes, accelerators, gangs and their state.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel


class NodeView(BaseModel):
    id: str
    address: str
    resources: dict[str, float]
    cluster: str = "default"


class AcceleratorsView(BaseModel):
    """Accelerators of one device of a cluster; `used` counts what Slotline's own attempts hold."""

    device: str
    resource: str
    total: int
    used: int
    free: int
    cluster: str = "default"


class GangView(BaseModel):
    """The meshes of one running attempt: `workers` of each, the largest has `workers_per_mesh`."""

    job_id: str
    attempt: int
    device: str
    meshes: int
    workers_per_mesh: int
    workers: list[int] = []
    cluster: str = "default"


class ClusterState(BaseModel):
    """The availability of one cluster, and the queues whose jobs run there."""

    name: str
    available: bool
    error: str | None
    seen_at: datetime | None
    queues: list[str]


class ClusterView(BaseModel):
    """All Ray clusters, or one. `available`: each of them answers; `error` names the others; `seen_at` is the earliest of
    their times. `clusters` has each by itself."""

    available: bool
    error: str | None
    seen_at: datetime | None
    nodes: list[NodeView]
    accelerators: list[AcceleratorsView]
    gangs: list[GangView]
    clusters: list[ClusterState] = []


class TargetGroup(BaseModel):
    """An entry of Prometheus's HTTP service discovery."""

    targets: list[str]
    labels: dict[str, str]
