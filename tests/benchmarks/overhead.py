"""Host time of one action: stages that do nothing, Slotline's engine and torch's runtimes, same schedule.

`python -m tests.benchmarks.overhead`. Four processes over loopback. "cpu" is processor time of the whole
process (all threads) for one compute action with its transfers; "wall" the step divided by the actions
of one mesh, which on fewer than eight cores mostly says how the processes share them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

MESHES = 4
ROWS = ("torch Schedule1F1B", "torch _PipelineScheduleRuntime, same orders", "slotline 1f1b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        path, rank = options.worker.split(",")
        Worker({**json.loads(Path(path).read_text()), "rank": int(rank)}).run()
        os._exit(0)
    _drive(options)
    return 0


def _drive(options: argparse.Namespace) -> None:
    from worker.transport.rendezvous import host_store

    store = host_store("127.0.0.1")
    plan = _plan(options.microbatches)
    with tempfile.TemporaryDirectory() as folder:
        orders = Path(folder) / "orders.csv"
        with orders.open("w", newline="") as file:
            csv.writer(file).writerows(plan["orders"])
        job = {
            "port": store.port,
            "microbatches": options.microbatches,
            "steps": options.steps,
            "programs": plan["programs"],
            "orders": str(orders),
        }
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
        workers = [
            subprocess.Popen([*command, f"{path},{rank}"], env={**os.environ, "OMP_NUM_THREADS": "1"})
            for rank in range(MESHES)
        ]
        try:
            for worker in workers:
                if worker.wait(300):
                    raise RuntimeError("a worker of the benchmark failed")
        finally:
            for worker in workers:
                worker.kill()
    print(
        f"{MESHES} meshes, {options.microbatches} microbatches, {os.cpu_count()} cores, medians of {options.steps}"
    )
    print("| runtime | cpu µs an action, mesh by mesh | mean | wall µs an action |")
    print("|---|---|---|---|")
    for number, row in enumerate(ROWS):
        found = [json.loads(store.get(f"result/{number}/{rank}")) for rank in range(MESHES)]
        cpu = [f["cpu_us"] for f in found]
        wall = max(f["wall_us"] for f in found)
        print(f"| {row} | {' '.join(f'{c:.0f}' for c in cpu)} | {statistics.mean(cpu):.0f} | {wall:.0f} |")


def _plan(microbatches: int) -> dict:
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import PipelineSpec

    plan = make_plan(
        PipelineSpec.model_validate(
            {
                "microbatches": microbatches,
                "meshes": [{"name": f"m{k}"} for k in range(MESHES)],
                "stages": [
                    {
                        "name": f"s{k}",
                        "mesh": f"m{k}",
                        "forward_s": 1.0,
                        "backward_input_s": 1.0,
                        "backward_weight_s": 1.0,
                        "activation_bytes": 1,
                    }
                    for k in range(MESHES)
                ],
                "edges": [
                    {
                        "source": f"s{k}",
                        "target": f"s{k + 1}",
                        "tensor": f"h{k}",
                        "forward_s": 0.1,
                        "backward_s": 0.1,
                    }
                    for k in range(MESHES - 1)
                ],
                "schedule": "1f1b",
            }
        )
    )
    programs = {m: [i if isinstance(i, dict) else i.to_json() for i in p] for m, p in plan.programs.items()}
    orders = [
        [f"{k}{i['op']}{i['microbatch']}" for i in programs[f"m{k}"] if i["op"] in ("F", "B")]
        for k in range(MESHES)
    ]
    return {"programs": programs, "orders": orders}


class Worker:
    """One mesh; imports torch only here."""

    def __init__(self, job: dict):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.job, self.rank = job, job["rank"]
        self.torch = torch
        self.store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False)
        prefix = dist.PrefixStore("torch", self.store)
        dist.init_process_group(
            "gloo", store=prefix, rank=self.rank, world_size=MESHES, timeout=timedelta(seconds=120)
        )
        self.barriers = 0
        self.shape = (1, 16)

    def run(self) -> None:
        for number, run in enumerate((self.torch_plain, self.torch_orders, self.ours)):
            step = run()
            found = [self.measure(step) for _ in range(self.job["steps"] + 2)][2:]
            self.store.set(
                f"result/{number}/{self.rank}",
                json.dumps({k: statistics.median(f[k] for f in found) for k in ("cpu_us", "wall_us")}),
            )
        self.barrier()

    def measure(self, step) -> dict:
        self.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        actions = 2 * self.job["microbatches"]
        return {
            "wall_us": (time.perf_counter() - wall) / actions * 1e6,
            "cpu_us": (time.process_time() - cpu) / actions * 1e6,
        }

    def barrier(self) -> None:
        self.barriers += 1
        key = f"barrier/{self.barriers}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < MESHES:
            time.sleep(0.002)

    def stage(self):
        torch, rank = self.torch, self.rank

        class Nothing(torch.nn.Module):
            inputs = ("input:0",) if rank == 0 else (f"h{rank - 1}",)
            outputs = ("output",) if rank == MESHES - 1 else (f"h{rank}",)

            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def forward(self, x):
                return x + self.weight

        return Nothing()

    def torch_plain(self):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = PipelineStage(self.stage(), self.rank, MESHES, self.torch.device("cpu"))
        schedule = Schedule1F1B(stage, self.job["microbatches"], loss_fn=_loss, scale_grads=False)
        return lambda: self.torch_step(schedule)

    def torch_orders(self):
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

        stage = PipelineStage(self.stage(), self.rank, MESHES, self.torch.device("cpu"))
        schedule = _PipelineScheduleRuntime(
            [stage], self.job["microbatches"], loss_fn=_loss, scale_grads=False
        )
        schedule._load_csv(self.job["orders"])
        return lambda: self.torch_step(schedule)

    def torch_step(self, schedule) -> None:
        batch = self.torch.zeros(self.job["microbatches"], self.shape[1])
        arguments = (batch,) if self.rank == 0 else ()
        schedule.step(*arguments, **({"target": batch} if self.rank == MESHES - 1 else {}))

    def ours(self):
        from worker.contract.planned import MeshProgram
        from worker.contract.program import program_from_json
        from worker.engine.engine import Engine, engine_collectives
        from worker.engine.local_stages import LocalStages
        from worker.engine.results import RunOptions
        from worker.transport.base import Topology
        from worker.transport.gloo import GlooTransport

        torch, meshes, microbatches = (
            self.torch,
            tuple(f"m{k}" for k in range(MESHES)),
            self.job["microbatches"],
        )
        mesh = meshes[self.rank]
        transport = GlooTransport(
            Topology(meshes),
            mesh=mesh,
            worker=0,
            store=("127.0.0.1", self.job["port"]),
            host="127.0.0.1",
            prefix="slotline",
        )
        program = MeshProgram(program_from_json(self.job["programs"][mesh]), microbatches)
        edges = [_Edge(k, self.shape, torch.float32) for k in range(MESHES - 1)]
        options = RunOptions(seed=None)
        engine = Engine(
            program,
            LocalStages({self.rank: self.stage()}, meshes, edges),
            engine_collectives(transport, program, meshes, {}, options),
            loss=_loss,
            options=options,
        )
        engine.connect()
        inputs = [(torch.zeros(self.shape),) for _ in range(microbatches)]
        targets = [torch.zeros(self.shape) for _ in range(microbatches)]
        return lambda: engine.run_step(0, inputs, targets)


class _Edge:
    def __init__(self, source: int, shape: tuple[int, ...], dtype):
        self.source, self.target, self.tensor = source, source + 1, f"h{source}"
        self.shape, self.dtype, self.differentiable = shape, dtype, True


def _loss(output, target):
    return (output - target).square().sum()


if __name__ == "__main__":
    sys.exit(main())
