"""Reserves all accelerators of an attempt at once, in one placement group of Ray.

Each worker has a bundle of the group, pinned to the node that the placement has for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from worker.contract.failures import AttemptFailure
from worker.contract.job import gpu_share, placement_group_name
from worker.contract.reasons import Reason
from worker.driver.gang.drains import DrainWatch
from worker.machine.node import ClusterNode, WorkerAddress, cluster_nodes, offered_nodes, spare_nodes

log = logging.getLogger(__name__)

CPU_RESOURCE = "slotline_worker"
POLL_S = 0.25
RESERVE_S = 20.0
"""After this time without its accelerators a placement is made anew: what seemed free was taken."""
_PLACE_AGAIN_S = 1.0
_NODE_ID_LABEL = "ray.io/node-id"
_PARTS_NAMED = 40
Placer = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any] | None]
"""From JSON of the offered nodes to `workers`, the node id of each worker by mesh, or why they do not fit: `refused`, and
`final` where waiting is of no use. None where Ray is to place them."""


@dataclass(frozen=True)
class Reservation:
    """A placement group of so many accelerators, one a bundle: first those of the workers, on `node_ids` (None: as Ray has
    them), then those of spares."""

    group: PlacementGroup
    accelerators: int
    node_ids: Sequence[str] | None

    def give_back(self) -> None:
        remove_placement_group(self.group)


class AcceleratorDemand:
    """The demand of a gang: an accelerator of `device` for each worker of meshes of these `sizes`, placed by `place` on
    nodes that are not drained; `raise_if_interrupted` is asked while it is waited for."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        device: str,
        workers_per_gpu: int,
        place: Placer,
        drains: DrainWatch,
        raise_if_interrupted: Callable[[], None],
    ) -> None:
        self._workers = sum(sizes)
        self._resource, self._share = (
            ("GPU", gpu_share(workers_per_gpu)) if device == "cuda" else (CPU_RESOURCE, 1.0)
        )
        self._place, self._drains, self._raise_if_interrupted = place, drains, raise_if_interrupted

    def reserve(self, spares: int, limit_s: float) -> Reservation:
        """Wait until a placement group has all accelerators, with those of so many spares at most.

        A placement is made of what is free on each node now, and made anew while it cannot be had. Raises AttemptFailure:
        PLAN_INFEASIBLE where it never will be, ACCELERATORS_TAKEN after `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        bundle = {self._resource: self._share}
        # by this name the control plane knows it as its own
        name = placement_group_name(os.environ.get("SLOTLINE_ATTEMPT_ID", ""))
        while True:
            self._raise_if_interrupted()
            free = ray._private.state.available_resources_per_node()
            self._drains.read()
            nodes = offered_nodes(cluster_nodes(), free, self._resource, self._share, self._drains.nodes)
            answer = self._place(nodes) or {}
            why = answer.get("refused") or ""
            if why and answer.get("final"):
                raise AttemptFailure(Reason.PLAN_INFEASIBLE, why)
            if not why:
                placed = [node_id for mesh in answer.get("workers") or () for node_id in mesh]
                with_spares = [*placed, *spare_nodes(placed, nodes, spares)]
                number = len(with_spares) if placed else self._workers + spares
                group = placement_group(
                    [bundle] * number,
                    strategy="PACK",
                    name=name,
                    bundle_label_selector=[{_NODE_ID_LABEL: node_id} for node_id in with_spares] or None,
                )
                until = min(deadline, time.monotonic() + RESERVE_S) if placed else deadline
                if self._is_complete(group, until):
                    return Reservation(group, number, placed or None)
            if time.monotonic() > deadline:
                raise AttemptFailure(
                    Reason.ACCELERATORS_TAKEN,
                    f"the cluster did not offer {self._workers} × {bundle} within {limit_s:.0f} s "
                    f"(free now: {_free_resources(self._resource)}); ask for fewer meshes or add nodes"
                    + (f"; {why}" if why else ""),
                )
            time.sleep(_PLACE_AGAIN_S)

    def _is_complete(self, group: PlacementGroup, until: float) -> bool:
        """True once the group has its accelerators; False, and it is gone, where it has not by `until` or was removed."""
        is_complete = False
        # asked once: `group.wait` takes whole seconds, and asks Ray's head anew each time, which has to answer within them
        ready = group.ready()
        try:
            while not ray.wait([ready], timeout=POLL_S)[0]:
                self._raise_if_interrupted()
                if time.monotonic() > until:
                    return False
            ray.get(ready)  # it is there: the group, or that somebody removed it
            is_complete = True
        except ray.exceptions.TaskPlacementGroupRemoved as error:
            log.info("no accelerators yet: %s", error)
        finally:
            if not is_complete:
                remove_placement_group(group)
        return is_complete


def placement_text(addresses: Sequence[WorkerAddress], nodes: Sequence[ClusterNode]) -> str:
    """Says which meshes are on which node, and which of them are spread over several."""
    names = _node_names(addresses, nodes)
    nodes_of: dict[str, list[str]] = {}
    for address in addresses:
        nodes_of.setdefault(address.mesh, []).append(address.node_id)
    whole: dict[str, list[str]] = {}
    spread = []
    for mesh, ids in nodes_of.items():
        if len(set(ids)) == 1:
            whole.setdefault(ids[0], []).append(mesh)
        else:
            counts = [f"{_workers(ids.count(node_id))} on {names[node_id]}" for node_id in dict.fromkeys(ids)]
            spread.append(f"{mesh} is spread over {len(counts)} nodes: {', '.join(counts)}")
    parts = [*(f"{', '.join(meshes)} on {names[node_id]}" for node_id, meshes in whole.items()), *spread]
    left = len(parts) - _PARTS_NAMED
    return (
        f"{_workers(len(addresses))} on {len(names)} node{'s' if len(names) > 1 else ''}: "
        f"{'; '.join(parts[:_PARTS_NAMED])}" + (f"; and {left} more" if left > 0 else "")
    )


def _workers(count: int) -> str:
    return f"{count} worker{'s' if count > 1 else ''}"


def _node_names(addresses: Sequence[WorkerAddress], nodes: Sequence[ClusterNode]) -> dict[str, str]:
    """The names of the workers' nodes by id; nodes of Ray on one machine have their id beside it."""
    known = {node.node_id: node.name for node in nodes}
    names = {address.node_id: known.get(address.node_id, address.node) for address in addresses}
    seen = list(names.values())
    return {
        node_id: name if seen.count(name) == 1 else f"{name} node {node_id[:8]}"
        for node_id, name in names.items()
    }


def _free_resources(resource: str) -> str:
    return f"{ray.available_resources().get(resource, 0.0):g} of {ray.cluster_resources().get(resource, 0.0):g} {resource}"
