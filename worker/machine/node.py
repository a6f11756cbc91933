"""The nodes of workers: WorkerAddress, the cluster's nodes as Ray has them, processor cores, and the clients of MPS.

Needs no torch, so that the driver's gang does not; Ray is imported only when a function is called.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.contract.job import accelerator_type_of, is_placement_group_name

log = logging.getLogger(__name__)

PROCESSOR_SHARE_S = 0.3
_MPS_CONTROL, _MPS_LIMIT_S = "nvidia-cuda-mps-control", 5.0
CONNECT_S = 2.0
_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class WorkerAddress:
    """The place of one worker; its JSON goes to the control plane with the request for a plan."""

    mesh: str
    worker: int
    node: str
    node_id: str
    process_id: int
    device: str


_LABELS = {
    "nvlink_domain": ("ray.io/gpu-domain", "nvidia.com/gpu.clique"),
    "rack": ("topology.kubernetes.io/rack",),
    "zone": ("topology.kubernetes.io/zone", "ray.io/availability-zone"),
}
"""The labels of a Ray node that placement reads, by what they say; of several the first one that the node has."""


@dataclass(frozen=True)
class ClusterNode:
    """A node of Ray's table, dead ones too; `resources` are all that it has or had, `death` why Ray took it for dead."""

    node_id: str
    host: str
    address: str
    alive: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    death: str = ""
    port: int = 0
    """The port of its raylet, which listens as long as the node lives."""

    @property
    def name(self) -> str:
        """Host name and address, for messages; the address alone where it has no other name."""
        return f"{self.host} ({self.address})" if self.host not in ("", self.address) else self.address


def cluster_nodes() -> list[ClusterNode]:
    """All nodes of Ray's table."""
    import ray

    return [
        ClusterNode(
            node_id=node["NodeID"],
            host=node.get("NodeManagerHostname") or "",
            address=node["NodeManagerAddress"],
            alive=node["Alive"],
            resources=node.get("Resources") or {},
            labels=node.get("Labels") or {},
            death=node.get("DeathReasonMessage") or "",
            port=node.get("NodeManagerPort") or 0,
        )
        for node in ray.nodes()
    ]


def draining_nodes() -> dict[str, float]:
    """The nodes that Ray was told to drain (autoscaler, spot reclaim, `ray drain-node`), by id, each with the Unix time of
    its end; infinite where none was named. Ray tells this inside the cluster only, not over HTTP."""
    import ray

    deadlines = ray._private.state.state.get_draining_nodes()
    return {node_id: at_ms / 1000 if at_ms > 0 else math.inf for node_id, at_ms in deadlines.items()}


def own_node_id() -> str:
    """Ray's id of the node to which this process is connected."""
    import ray

    return ray.get_runtime_context().get_node_id()


def drain_node(node_id: str, within_s: float, why: str) -> None:
    """Tell Ray that a node will be gone in `within_s` seconds, as `ray drain-node` does. RuntimeError where Ray refuses."""
    import ray
    from ray.core.generated import autoscaler_pb2

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    is_accepted, refusal = client.drain_node(node_id, reason, why, int((time.time() + within_s) * 1000))
    if not is_accepted:
        raise RuntimeError(f"Ray does not drain node {node_id}: {refusal}")


def attempts_on_node(node_id: str) -> list[str]:
    """The placement groups of attempts with accelerators on a node."""
    import ray

    return [
        group["name"]
        for group in ray.util.placement_group_table().values()
        if is_placement_group_name(group["name"])
        and group["state"] != "REMOVED"
        and node_id in group["bundles_to_node_id"].values()
    ]


def lost_nodes(node_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(name, why it counts as lost) of each of these nodes that Ray has for dead or does not know, or whose raylet takes no
    connection: Ray itself takes a killed node for alive for some 15 seconds."""
    known = {node.node_id: node for node in cluster_nodes()}
    wanted = list(dict.fromkeys(node_ids))
    asked = [known[node_id] for node_id in wanted if node_id in known and known[node_id].alive]
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(asked)))) as pool:
        answers = dict(zip((node.node_id for node in asked), pool.map(_connection_error, asked), strict=True))
    lost = {}
    for node_id in wanted:
        node = known.get(node_id)
        if node is None:
            lost[node_id] = node_id, "Ray no longer knows it"
        elif not node.alive:
            lost[node_id] = node.name, f"Ray has it for dead: {node.death or 'no reason given'}"
        elif error := answers[node_id]:
            lost[node_id] = node.name, f"its raylet at {node.address}:{node.port} does not answer: {error}"
    return lost


def _connection_error(node: ClusterNode) -> str | None:
    """Why the raylet of this node takes no connection; None where it does."""
    try:
        socket.create_connection((node.address, node.port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error)
    return None


def offered_nodes(
    nodes: Sequence[ClusterNode],
    free: Mapping[str, Mapping[str, float]],
    resource: str,
    share: float,
    draining: Collection[str] = (),
) -> list[dict[str, Any]]:
    """JSON of the living nodes with `resource` for a request for a placement; a worker takes `share` of it, and `free` has
    the resources that are free by node id. Nothing is free on a draining node."""

    def workers(amount: float) -> int:
        return int((amount + 1e-6) / share)  # shares and what is left of a GPU are rounded to 1/10000

    return [
        {
            "name": node.node_id,
            "free": 0 if node.node_id in draining else workers(free.get(node.node_id, {}).get(resource, 0.0)),
            "total": workers(node.resources[resource]),
            **{what: _label(node, keys) for what, keys in _LABELS.items()},
            "accelerator_type": accelerator_type_of(resource, node.labels, node.resources),
        }
        for node in nodes
        if node.alive and node.resources.get(resource, 0.0) > 0
    ]


def spare_nodes(placed: Sequence[str], nodes: Sequence[Mapping[str, Any]], spares: int) -> list[str]:
    """The nodes of a gang's spares, of those that `offered_nodes` gives: of nodes with workers, which are `placed`, each has
    one before any has two, those with the most workers first; as many as accelerators are free there, at most `spares`."""
    free = {node["name"]: node["free"] - placed.count(node["name"]) for node in nodes}
    by_workers = sorted({*placed}, key=lambda name: (-placed.count(name), placed.index(name)))
    rounds = range(max((free[name] for name in by_workers), default=0))
    return [name for turn in rounds for name in by_workers if turn < free[name]][:spares]


def _label(node: ClusterNode, keys: Sequence[str]) -> str | None:
    return next((node.labels[key] for key in keys if node.labels.get(key)), None)


def processor_cores() -> float:
    """The number of cores that the processes of this node (or container) may use together."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):  # cgroup v2: "max 100000", or microseconds of each period
        quota, period = _CGROUP_CPU_MAX.read_text().split()
        cores = min(cores, float(quota) / float(period))
    return cores


def processor_share(seconds: float = PROCESSOR_SHARE_S) -> float:
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


def end_mps_clients(process_ids: Collection[int]) -> list[int]:
    """End the work that these processes of this node have on a GPU which they share by CUDA MPS; the clients that MPS was
    asked to end. A client that is killed while it computes may take the MPS server and all its other clients along
    (NVIDIA's Multi-Process Service, terminate_client). Nothing to do where no MPS runs."""
    if shutil.which(_MPS_CONTROL) is None:
        return []
    ended = []
    try:
        for server in _mps_answer("get_server_list").split():
            clients = {int(client) for client in _mps_answer(f"get_client_list {server}").split()}
            for process_id in sorted(clients & {*process_ids}):
                _mps_answer(f"terminate_client {server} {process_id}")
                ended.append(process_id)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        log.warning(
            "the MPS of this node was not asked to end its clients %s: %s", sorted(process_ids), error
        )
    return ended


def _mps_answer(command: str) -> str:
    done = subprocess.run(
        [_MPS_CONTROL], input=f"{command}\n", capture_output=True, text=True, timeout=_MPS_LIMIT_S, check=True
    )
    return done.stdout
