"""One worker of the resharding benchmark: python resharding_worker.py <json>, started inside a network namespace.

Talks to resharding.py through the rendezvous store: measures its links, then runs every plan that it is given.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from itertools import permutations

import torch
import torch.distributed as dist

from worker.contract.resharding import ReshardingPlan
from worker.parallel.resharding import Resharder
from worker.transport.base import Topology, finish
from worker.transport.gloo import GlooTransport

_LONG = timedelta(seconds=600)


class Worker:
    def __init__(self, job):
        self.job = job
        self.name, self.names = job["name"], tuple(job["names"])
        self.store = dist.TCPStore(
            job["host"], job["port"], is_master=False, wait_for_workers=False, timeout=_LONG
        )
        self.transport = GlooTransport(
            Topology(self.names),
            mesh=self.name,
            worker=0,
            store=(job["host"], job["port"]),
            host=job["address"],
            prefix=job["prefix"],
            connect_timeout_s=120.0,
        )
        self.transport.connect({}, tuple(permutations(self.names, 2)))
        self.barriers = self.tag = 0

    def barrier(self) -> None:
        """All workers leave within about a millisecond of each other."""
        self.barriers += 1
        key = f"{self.job['prefix']}/barrier/{self.barriers}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < len(self.names):
            time.sleep(0.001)

    def measure(self, sender: str, receiver: str, size: int, repeats: int = 5) -> float:
        """Seconds of a message of `size` bytes between two workers, nothing else running; median, 0 elsewhere."""
        tensor, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(repeats):
            self.barrier()
            self.tag += 1
            begun = time.monotonic()
            if self.name == sender:
                finish(self.transport.send(receiver, self.tag, tensor))
            elif self.name == receiver:
                finish(self.transport.receive(sender, self.tag, tensor))
                times.append(time.monotonic() - begun)
        return statistics.median(times) if times else 0.0

    def run_plan(self, data, repeats: int) -> list[list[float]]:
        """(begin, end) of each repetition but the first; raises where a bit is wrong."""
        plan = ReshardingPlan.from_json(data)
        whole = torch.arange(self.job["elements"], dtype=torch.int32).view(plan.shape)
        right = whole[tuple(slice(begin, end) for begin, end in plan.box(self.name))].contiguous()
        found = []
        for _ in range(repeats + 1):
            tensor = right if self.name in plan.sources else torch.full_like(right, -1)
            resharder = Resharder(plan, self.name, self.transport, limit_s=120.0)
            self.barrier()
            begun = time.monotonic()
            resharder.run(tensor, self.tag + 1)
            found.append([begun, time.monotonic()])
            self.tag += len(plan.messages)
            assert torch.equal(tensor, right), f"{self.name} has not what it must have"
        return found[1:]

    def run(self) -> None:
        for number, (sender, receiver, size) in enumerate(self.job["measure"]):
            self.put(f"measured/{number}", self.measure(sender, receiver, size))
        for number in range(self.job["plans"]):
            key = f"{self.job['prefix']}/plan/{number}"
            self.store.wait([key], _LONG)
            self.put(f"result/{number}", self.run_plan(json.loads(self.store.get(key)), self.job["repeats"]))
        self.barrier()
        self.transport.close()

    def put(self, key: str, value) -> None:
        self.store.set(f"{self.job['prefix']}/{key}/{self.name}", json.dumps(value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Worker(json.loads(sys.argv[1])).run()
    os._exit(0)  # gloo has threads that outlive a plain exit
