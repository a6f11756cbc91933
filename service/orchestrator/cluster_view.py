"""The cluster as last seen, for the API and the orchestrator alike; nobody else asks Ray for its nodes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from service.orchestrator.decide import RESOURCES, Capacity
from service.orchestrator.ray_jobs import Cluster, ClusterError, Held, Node
from worker.group_name import group_name

logger = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.5
_ROUNDING = 0.01  # a third of a GPU is 0.3333 for Ray


@dataclass(frozen=True)
class ClusterSnapshot:
    """What was last seen of the cluster; `error` says why `nodes` is empty or old."""

    nodes: tuple[Node, ...] = ()
    held: tuple[Held, ...] = ()
    seen_at: float | None = None
    error: str | None = "not asked yet"

    @property
    def available(self) -> bool:
        return self.error is None


class ClusterWatcher:
    """Renews `snapshot` every `refresh_s` between `start` and `stop`, sooner while the cluster is away."""

    def __init__(self, cluster: Cluster, *, refresh_s: float, workers_per_gpu: int) -> None:
        self.snapshot = ClusterSnapshot()
        self._cluster, self._refresh_s, self._workers_per_gpu = cluster, refresh_s, workers_per_gpu
        self._listeners: list[Callable[[], None]] = []
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def capacity(self) -> Capacity | None:
        """Accelerators by device; None while the cluster does not answer."""
        if not self.snapshot.available:
            return None
        shares = self._shares
        total = {
            device: sum(int(node.resources.get(name, 0) * shares[device]) for node in self.snapshot.nodes)
            for device, name in RESOURCES.items()
        }
        return Capacity(total)

    def others(self, attempts: Collection[str]) -> dict[str, int]:
        """Accelerators by device that somebody else holds than these attempts: other programs on the same Ray, and
        attempts that are over but have not let go of theirs."""
        ours = {group_name(attempt) for attempt in attempts}
        held = [one.resources for one in self.snapshot.held if one.name not in ours]
        return {
            device: sum(math.ceil(one.get(name, 0) * self._shares[device] - _ROUNDING) for one in held)
            for device, name in RESOURCES.items()
        }

    @property
    def _shares(self) -> dict[str, int]:
        return {"cpu": 1, "cuda": self._workers_per_gpu}

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when nodes came or went, and when a cluster that was away is back."""
        self._listeners.append(listener)

    def start(self) -> None:
        self._refreshing = asyncio.create_task(self._refresh_for_ever())

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def refresh(self) -> None:
        """Look at the cluster's nodes."""
        try:
            nodes, held = await self._cluster.nodes(), await self._cluster.held()
        except ClusterError as error:
            if self.snapshot.error != str(error):
                logger.warning("%s", error)
            self.snapshot = replace(self.snapshot, error=str(error))
            return
        before, self.snapshot = self.snapshot, ClusterSnapshot(tuple(nodes), tuple(held), time.time(), None)
        if not before.available or self.snapshot.nodes != before.nodes:
            for listener in self._listeners:
                listener()

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self.refresh()
            except Exception:
                logger.exception("the cluster's answer was not understood")
            await asyncio.sleep(self._refresh_s if self.snapshot.available else _ASK_AGAIN_S)
