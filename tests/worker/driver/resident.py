"""An actor for gangs that compute nothing, and the setting of their Ray. The actor's processes import this module: no
torch, no test."""

from __future__ import annotations

import os
import time

import ray

from worker.actor.node import WorkerAddress

AS_OTHERS = {"worker_niceness": 0}
"""Of a Ray whose processes are no nicer than other tests': with Ray's own 15 they wait for those all along."""


class Resident:
    """A worker that says where it is."""

    def __init__(self, mesh: str, worker: int):
        self.mesh, self.worker = mesh, worker

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def address(self) -> WorkerAddress:
        context = ray.get_runtime_context()
        node = ray.util.get_node_ip_address()
        return WorkerAddress(self.mesh, self.worker, node, context.get_node_id(), os.getpid(), "cpu")
