"""The cluster as last seen, for the API and the orchestrator alike; nobody else asks Ray for its nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from service.orchestrator.decide import RESOURCES, Capacity
from service.orchestrator.ray_jobs import Cluster, ClusterError, Node

logger = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.5


@dataclass(frozen=True)
class ClusterSnapshot:
    """What was last seen of the cluster; `error` says why `nodes` is empty or old."""

    nodes: tuple[Node, ...] = ()
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
        shares = {"cpu": 1, "cuda": self._workers_per_gpu}
        total = {
            device: sum(int(node.resources.get(name, 0) * shares[device]) for node in self.snapshot.nodes)
            for device, name in RESOURCES.items()
        }
        return Capacity(total)

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
            nodes = await self._cluster.nodes()
        except ClusterError as error:
            if self.snapshot.error != str(error):
                logger.warning("%s", error)
            self.snapshot = replace(self.snapshot, error=str(error))
            return
        before, self.snapshot = self.snapshot, ClusterSnapshot(tuple(nodes), time.time(), None)
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
