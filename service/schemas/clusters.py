"""REST bodies for Ray clusters: nodes, accelerators, gangs and their state.

Values only, shared by the routes and service.client.client: no web framework, no database, no Ray.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.spec.states import NodeState


class NodeAccelerators(BaseModel):
    """Accelerators of one device on a node; `used` by whomever, `free` also where the node takes no work."""

    device: str
    accelerator_type: str | None = Field(
        default=None, description="As the node tells it, by a label or to Ray"
    )
    total: int
    used: int
    free: int


class NodeJob(BaseModel):
    """An attempt that has workers on a node: their number, by mesh."""

    job_id: str
    attempt: int
    meshes: dict[str, int]


class NodeView(BaseModel):
    """A Ray node. Operators set the state of its `name`: the Kubernetes node, else the host, else the address.

    `id` is empty for a node that is gone and of which a state is set: it holds again when a node of that name is back.
    """

    id: str
    address: str
    resources: dict[str, float]
    cluster: str = "default"
    name: str = ""
    host: str = Field(default="", description="Its host name; of a Ray pod the pod's")
    kubernetes_node: str | None = Field(
        default=None, description="By the Ray label kubernetes.io/hostname, which our chart gives to Ray pods"
    )
    labels: dict[str, str] = {}
    state: NodeState = NodeState.READY
    reason: str = ""
    by: str = Field(
        default="",
        description="Who set the state: a principal, ray, or slotline (a quarantine, or a node that was lost)",
    )
    since: datetime | None = None
    until: datetime | None = Field(default=None, description="When the state ends by itself; null: never")
    accelerators: list[NodeAccelerators] = []
    jobs: list[NodeJob] = []


class NodeList(BaseModel):
    items: list[NodeView]


class NodeChange(BaseModel):
    """DRAINING: jobs there save and go on elsewhere, and nothing new lands. EXCLUDED: nothing new lands. READY: undone."""

    model_config = ConfigDict(extra="forbid")

    state: Literal[NodeState.READY, NodeState.EXCLUDED, NodeState.DRAINING]
    reason: Annotated[str, Field(max_length=500)] = ""


class AcceleratorsView(BaseModel):
    """Accelerators of one device of a cluster; `used` counts what Slotline's own attempts hold, `left_out` those of nodes
    that take no work, which are never free."""

    device: str
    resource: str
    total: int
    used: int
    free: int
    left_out: int = 0
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
