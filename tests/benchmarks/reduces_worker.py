"""One worker of the benchmark of sums of gradients: python reduces_worker.py <json>, inside a network namespace.

Talks to reduces.py through the rendezvous store: measures, then runs every row that it is given.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from overlap_stage import Record, SleepingStage, loss
from overlap_worker import Edge
from torch import nn

from worker.benchmark.optimizer_step import (
    WORKERS_GROUP,
    measure_all_reduce,
    measure_reduce_scatter_all_gather,
    measure_update,
)
from worker.contract.buckets import BucketedProgram
from worker.contract.planned import MeshProgram
from worker.contract.program import program_from_json
from worker.engine import lowering
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import optimizer_of
from worker.engine.results import RunOptions
from worker.transport.base import Topology, finish
from worker.transport.gloo import GlooTransport

MESHES = ("m0", "m1")
WORKERS_PER_MESH = 2


class HeavyStage(SleepingStage):
    """Sleeps, and has a parameter whose gradient is large."""

    def __init__(self, index, edges, seconds, record, elements):
        super().__init__(index, edges, seconds, record)
        self.ballast = nn.Parameter(torch.zeros(elements))
        self.original_names["ballast"] = f"{index}.ballast"

    def forward(self, *inputs):
        return super().forward(*inputs) + self.ballast[:1]


def sgd(parameters, _=()):
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


class Worker:
    def __init__(self, job):
        self.job, self.rank = job, job["rank"]
        self.mesh, self.worker = MESHES[self.rank // WORKERS_PER_MESH], self.rank % WORKERS_PER_MESH
        self.shape = (1, job["elements"])
        self.edges = [(k, k + 1, f"h{k}") for k in range(job["stages"] - 1)]
        self.mesh_of_stage = [MESHES[k % len(MESHES)] for k in range(job["stages"])]
        self.store = dist.TCPStore(
            job["host"], job["port"], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=600)
        )
        self.record = Record()
        self.barriers = 0

    def barrier(self) -> None:
        """All workers leave within about a millisecond of each other."""
        self.barriers += 1
        key = f"barrier/{self.barriers}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < len(MESHES) * WORKERS_PER_MESH:
            time.sleep(0.001)

    def transport(self, name: str, topology: Topology | None = None) -> GlooTransport:
        return GlooTransport(
            topology or Topology(MESHES, WORKERS_PER_MESH),
            mesh=self.mesh,
            worker=self.worker,
            store=(self.job["host"], self.job["port"]),
            host=self.job["address"],
            prefix=name,
        )

    def measure(self) -> dict:
        """What a driver measures: a transfer, sums within the mesh (one mesh after the other), REDUCE and STEP alone,
        and the stage."""
        of_mesh = self.transport("sums-" + self.mesh, Topology((self.mesh,), WORKERS_PER_MESH))
        of_mesh.connect({WORKERS_GROUP: tuple(range(WORKERS_PER_MESH))}, ())
        transport = self.transport("link")
        transport.connect({}, (("m0", "m1"),))
        large, sums = 4 * self.job["ballast"], None
        for mesh in MESHES:
            self.barrier()
            if mesh == self.mesh:
                alone = measure_all_reduce(of_mesh, "cpu", large_bytes=large)
                scatter, gather = measure_reduce_scatter_all_gather(of_mesh, "cpu", large_bytes=large)
                sums = (*alone, *scatter, *gather)
        of_mesh.close()
        tensor, links = torch.zeros(self.shape), []
        for repeat in range(7):
            self.barrier()
            started = time.monotonic()
            move = transport.send if self.mesh == "m0" else transport.receive
            finish(move("m1" if self.mesh == "m0" else "m0", repeat, tensor))
            links.append(time.monotonic() - started)
        transport.close()
        self.barrier()
        return {
            "sums": sums,
            "link_s": statistics.median(links[2:]),
            "update": asdict(measure_update(sgd, "cpu", None)),
            "stage": self.measure_stage(),
        }

    def measure_stage(self) -> list[float]:
        """Seconds of F and B of a stage, with what autograd and the tensors cost."""
        stage, rows = HeavyStage(1, self.edges, self.job["seconds"], self.record, self.job["ballast"]), []
        for _ in range(5):
            x = torch.zeros(self.shape, requires_grad=True)
            started = time.monotonic()
            y = stage(x)
            middle = time.monotonic()
            y.backward(torch.ones(self.shape))
            rows.append((middle - started, time.monotonic() - middle))
        return [statistics.median(column) for column in zip(*rows, strict=True)]

    def run_row(self, row) -> list[dict]:
        microbatches = self.job["microbatches"]
        if not row["early"]:
            lowering.with_buckets = lambda program, _: BucketedProgram(
                program, {}, tuple(range(len(program)))
            )
        else:
            from worker.contract.buckets import with_buckets

            lowering.with_buckets = with_buckets
        program = MeshProgram(program_from_json(row["programs"][self.mesh]), microbatches)
        stages = {
            k: HeavyStage(k, self.edges, self.job["seconds"], self.record, self.job["ballast"])
            for k, mesh in enumerate(self.mesh_of_stage)
            if mesh == self.mesh
        }
        options = RunOptions(seed=None, sharded=tuple(row["sharded"]))
        transport = self.transport(row["name"])
        engine = Engine(
            program,
            LocalStages(stages, self.mesh_of_stage, [Edge(*edge, self.shape) for edge in self.edges]),
            engine_collectives(transport, program, self.mesh_of_stage, {}, options),
            loss=loss,
            optimizer=optimizer_of(stages, sgd),
            options=options,
        )
        engine.connect()
        inputs = [(torch.zeros(self.shape),) for _ in range(microbatches)]
        targets = [torch.zeros(self.shape) for _ in range(microbatches)]
        found = []
        for step in range(self.job["steps"] + 1):
            self.barrier()
            slots = engine.run_step(step, inputs, targets).slots
            found.append(
                {
                    "start": min(s.start_s for s in slots),
                    "end": max(s.end_s for s in slots),
                    "computed": max(s.end_s for s in slots if s.action in ("F", "B", "I", "W")),
                    "reduces": [(s.start_s, s.end_s) for s in slots if s.lane == "reduce"],
                }
            )
        self.barrier()
        engine.close()
        return found[1:]

    def run(self) -> None:
        self.store.wait(["rate"], timedelta(seconds=600))
        self.put("measured", self.measure())
        for row in json.loads(self.store.get("rows")):
            self.put(f"result/{row['name']}", self.run_row(row))
        self.barrier()

    def put(self, key: str, value) -> None:
        self.store.set(f"{key}/{self.rank}", json.dumps(value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Worker(json.loads(sys.argv[1])).run()
    os._exit(0)
