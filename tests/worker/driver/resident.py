"""An actor for gangs that compute nothing, and the setting of their Ray. The actor's processes import this module: no
torch, no test."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from worker.machine.node import WorkerAddress

AS_OTHERS = {"worker_niceness": 0}
"""Of a Ray whose processes are no nicer than other tests': with Ray's own 15 they wait for those all along."""


class Resident:
    """A worker that says where it is."""

    def __init__(self, mesh: str, worker: int):
        self.mesh, self.worker = mesh, worker

    def call(self, method: str, *given: Any, **named: Any) -> Any:
        return getattr(self, method)(*given, **named)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def address(self) -> WorkerAddress:
        context = ray.get_runtime_context()
        node = ray.util.get_node_ip_address()
        return WorkerAddress(self.mesh, self.worker, node, context.get_node_id(), os.getpid(), "cpu")
