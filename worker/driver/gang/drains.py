"""Follows which nodes Ray drains, beside training."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

from worker.machine.node import draining_nodes

log = logging.getLogger(__name__)

DRAIN_POLL_S = 2.0


class DrainWatch:
    """The nodes that Ray drains, by id, each with the Unix time of its end; `report` is called when they have changed."""

    def __init__(self, report: Callable[[Mapping[str, float]], None]) -> None:
        self.nodes: Mapping[str, float] = {}
        self._report = report
        self._asked_at_s = -math.inf
        self._thread: threading.Thread | None = None

    def read(self) -> None:
        """Ask Ray now; as long as its head is away this does not return."""
        try:
            nodes = draining_nodes()
        except Exception as error:
            log.debug("Ray does not say which nodes it drains: %s", error)
            return
        if nodes != self.nodes:
            self.nodes = nodes
            self._report(nodes)

    def poll(self) -> None:
        """Have a thread of its own ask, every DRAIN_POLL_S at most: training goes on while the head is away."""
        asks = self._thread is not None and self._thread.is_alive()
        if asks or time.monotonic() - self._asked_at_s < DRAIN_POLL_S:
            return
        self._asked_at_s = time.monotonic()
        self._thread = threading.Thread(target=self.read, name="slotline-drains", daemon=True)
        self._thread.start()
