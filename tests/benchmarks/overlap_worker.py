"""One mesh of the overlap benchmark: python overlap_worker.py <json>, started inside a network namespace.

Talks to overlap_cpu.py through the rendezvous store: measures its links, then runs every row it is given.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from overlap_stage import Record, RelayingStage, SleepingStage, loss

from worker.contract.planned import MeshProgram
from worker.contract.program import program_from_json
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import optimizer_of
from worker.engine.results import RunOptions
from worker.transport.base import Topology, finish
from worker.transport.gloo import GlooTransport


class Edge:
    """A tensor from one stage to another."""

    def __init__(self, source: int, target: int, tensor: str, shape: tuple[int, ...]):
        self.source, self.target, self.tensor = source, target, tensor
        self.shape, self.dtype, self.differentiable = shape, torch.float32, True


class Worker:
    def __init__(self, job):
        self.job = job
        self.rank, self.count = job["rank"], job["count"]
        self.meshes = tuple(f"m{k}" for k in range(self.count))
        self.shape = (1, job["elements"])
        self.store = dist.TCPStore(
            job["host"], job["port"], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=600)
        )
        self.record = Record()
        self.barriers = 0
        os.environ["GLOO_SOCKET_IFNAME"] = "port"
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("torch", self.store),
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=600),
        )

    def barrier(self) -> None:
        """All workers leave within about a millisecond of each other."""
        self.barriers += 1
        key = f"barrier/{self.barriers}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.count:
            time.sleep(0.001)

    def transport(self, name: str) -> GlooTransport:
        return GlooTransport(
            Topology(self.meshes),
            mesh=self.meshes[self.rank],
            worker=0,
            store=(self.job["host"], self.job["port"]),
            host=self.job["address"],
            prefix=name,
        )

    def measure_links(self, name: str, repeats: int = 7) -> list[float]:
        """Seconds of one transfer from this mesh to the next, nothing else running; and stage overhead."""
        lanes = tuple((f"m{k}", f"m{k + 1}") for k in range(self.count - 1))
        transport = self.transport(f"links-{name}")
        transport.connect({}, lanes)
        tensor, times = torch.zeros(self.shape), []
        for k in range(self.count - 1):
            for repeat in range(repeats):
                self.barrier()
                start = time.monotonic()
                if self.rank == k:
                    finish(transport.send(f"m{k + 1}", repeat, tensor))
                elif self.rank == k + 1:
                    finish(transport.receive(f"m{k}", repeat, tensor))
                    times.append(time.monotonic() - start)
        transport.close()
        return times

    def measure_stage(self, repeats: int = 5) -> list[float]:
        """Seconds of F, I and W of the sleeping stage, with what autograd and the tensors cost."""
        chain = [(0, 1, "h0"), (1, 2, "h1")]
        stage, rows = SleepingStage(1, chain, self.job["seconds"], self.record), []
        for _ in range(repeats):
            x = torch.zeros(self.shape, requires_grad=True)
            start = time.monotonic()
            y = stage(x)
            middle = time.monotonic()
            y.backward(torch.ones(self.shape))
            rows.append((middle - start, time.monotonic() - middle))
        forward, backward = (statistics.median(column) for column in zip(*rows, strict=True))
        share = self.job["seconds"][1] / (self.job["seconds"][1] + self.job["seconds"][2])
        return [forward, backward * share, backward * (1 - share)]

    def run_ours(self, row) -> list[dict]:
        mesh, microbatches = self.meshes[self.rank], self.job["microbatches"]
        stage = SleepingStage(self.rank, self.job["edges"], self.job["seconds"], self.record)
        program = MeshProgram(program_from_json(row["programs"][mesh]), microbatches)
        edges = [Edge(*edge, self.shape) for edge in self.job["edges"]]
        options = RunOptions(seed=None)
        transport = self.transport(row["name"])
        engine = Engine(
            program,
            LocalStages({self.rank: stage}, self.meshes, edges),
            engine_collectives(transport, program, self.meshes, {}, options),
            loss=loss,
            optimizer=optimizer_of({0: stage}, lambda parameters, _: torch.optim.SGD(parameters, lr=0.0)),
            options=options,
        )
        engine.connect()
        inputs = [(torch.zeros(self.shape),) for _ in range(microbatches)]
        targets = [torch.zeros(self.shape) for _ in range(microbatches)]
        found = []
        for step in range(self.job["steps"] + 1):
            self.begin_step()
            result = engine.run_step(step, inputs, targets)
            transfers = [s.end_s - s.start_s for s in result.slots if s.action.startswith("RECV")]
            found.append(self.end_step({"received_s": sorted(transfers)[len(transfers) // 2]}))
        self.barrier()
        engine.close()
        return found[1:]

    def run_torch(self, row) -> list[dict]:
        from torch.distributed.pipelining import PipelineStage, schedules

        microbatches = self.job["microbatches"]
        stage = SleepingStage(self.rank, self.job["edges"], self.job["seconds"], self.record)
        relaying = RelayingStage(self.rank, self.job["edges"], stage)
        pipeline_stage = PipelineStage(relaying, self.rank, self.count, torch.device("cpu"))
        kind = getattr(schedules, row["schedule"])
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        schedule = kind(
            [pipeline_stage] if several else pipeline_stage, microbatches, loss_fn=loss, scale_grads=False
        )
        batch = torch.zeros(microbatches, self.shape[1])
        found = []
        for _ in range(self.job["steps"] + 1):
            stage.zero_grad()
            self.begin_step()
            schedule.step(
                *((batch,) if self.rank == 0 else ()),
                **({"target": batch} if self.rank == self.count - 1 else {}),
            )
            found.append(self.end_step({}))
        return found[1:]

    def begin_step(self) -> None:
        self.record.clear()
        self.barrier()

    def end_step(self, more: dict) -> dict:
        actions = self.record.actions
        return {
            "start": min(a[1] for a in actions),
            "end": max(a[2] for a in actions),
            "peak": self.record.peak,
            "actions": len(actions),
            **more,
        }

    def run(self) -> None:
        for ratio in self.job["ratios"]:
            self.store.wait([f"rate/{ratio}"], timedelta(seconds=600))
            self.put(
                f"measured/{ratio}", {"links": self.measure_links(f"{ratio}"), "stage": self.measure_stage()}
            )
            rows = json.loads(self.store.get(f"rows/{ratio}"))
            for row in rows:
                found = self.run_ours(row) if row["kind"] == "ours" else self.run_torch(row)
                self.put(f"result/{row['name']}", found)
        self.barrier()

    def put(self, key: str, value) -> None:
        self.store.set(f"{key}/{self.rank}", json.dumps(value))


if __name__ == "__main__":
    torch.set_num_threads(1)
    Worker(json.loads(sys.argv[1])).run()
    os._exit(0)  # torch's own group has threads that outlive a plain exit
