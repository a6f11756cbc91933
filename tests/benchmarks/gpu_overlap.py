"""Overlap benchmark on GPUs: Slotline's engine and torch.distributed.pipelining on the same GPT stages.

`python -m tests.benchmarks.gpu_overlap`, without Ray, on one or more GPUs; GPUs are shared when there are
fewer than stages (`--mps` starts CUDA MPS with an equal share for each). `--device cpu` only tries the script.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

TORCH = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble")
OURS = ("1f1b", "eager-1f1b", "zb-h1", "auto")


def main() -> int:
    options = _options()
    if options.worker:
        path, rank = options.worker.split(",")
        Worker({**json.loads(Path(path).read_text()), "rank": int(rank)}).run()
        sys.stdout.flush()
        os._exit(0)  # torch's groups have threads that outlive a plain exit
    if reason := _why_not(options):
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as folder, _mps(options, folder):
        _drive(options, Path(folder))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=2, help="transformer blocks a stage")
    parser.add_argument("--rows", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="measured steps a row, after three warm-ups")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--mps", action="store_true", help="share one GPU by CUDA MPS")
    parser.add_argument("--channels", type=int, default=2, help="NCCL_MAX_P2P_NCHANNELS of our communicators")
    parser.add_argument("--budget-s", type=float, default=10.0, help="of the auto search")
    parser.add_argument("--only", nargs="*", help="only rows whose label contains one of these")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def _why_not(options: argparse.Namespace) -> str | None:
    if options.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device; --device cpu tries the script with small tensors"
    try:
        import cupy  # noqa: F401
    except ImportError:
        return "cupy is not installed (pip install cupy-cuda12x or cupy-cuda13x, as torch's CUDA has it)"
    return None


@contextlib.contextmanager
def _mps(options: argparse.Namespace, folder: str):
    """A private MPS daemon while the block runs; every client gets an equal part of the GPU."""
    if not options.mps:
        yield
        return
    if shutil.which("nvidia-cuda-mps-control") is None:
        raise RuntimeError("nvidia-cuda-mps-control is not installed: run without --mps")
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = f"{folder}/mps"
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = f"{folder}/mps-log"
    for name in ("mps", "mps-log"):
        os.makedirs(f"{folder}/{name}")
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // options.stages)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def _environment(options: argparse.Namespace, rank: int) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if options.device == "cuda":
        # Several ranks on one GPU: each looks like a host of its own, joined by loopback (see GPU notes).
        environment.setdefault("NCCL_HOSTID", f"slotline-{rank}")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "16")
        environment.setdefault("NCCL_MAX_P2P_NCHANNELS", str(options.channels))
    return environment


def _drive(options: argparse.Namespace, folder: Path) -> None:
    from worker.transport.rendezvous import host_store

    store = host_store("127.0.0.1")
    path = folder / "job.json"
    path.write_text(json.dumps({**vars(options), "port": store.port}))
    workers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker", f"{path},{rank}"],
            env=_environment(options, rank),
        )
        for rank in range(options.stages)
    ]
    try:
        measured = [_get(store, workers, f"measured/{rank}") for rank in range(options.stages)]
        seconds = [[m[k] for k in ("forward_s", "input_s", "weight_s")] for m in measured]
        link_s = statistics.median(t for m in measured for t in m["links_s"])
        print(f"device {measured[0]['device']}, {options.stages} stages, {options.microbatches} microbatches")
        print(f"F, I, W ms of each stage: {[[round(s * 1e3, 2) for s in stage] for stage in seconds]}")
        print(f"transfer {link_s * 1e3:.2f} ms\n")
        rows = _rows(options, seconds, link_s)
        store.set("rows", json.dumps(rows))
        print("| row | step ms | planned ms | measured/planned |\n|---|---|---|---|", flush=True)
        for number, row in enumerate(rows):
            found = [_get(store, workers, f"result/{number}/{rank}") for rank in range(options.stages)]
            if errors := [f["error"] for f in found if "error" in f]:
                print(f"| {row['label']} | failed: {errors[0]} | | |", flush=True)
                continue
            step_s = statistics.median(map(max, zip(*(f["steps_s"] for f in found), strict=True)))
            planned = row.get("makespan_s")
            tail = f"{planned * 1e3:.1f} | {step_s / planned:.3f}" if planned else "- | -"
            print(f"| {row['label']} | {step_s * 1e3:.1f} | {tail} |", flush=True)
        for worker in workers:
            worker.wait(60)
    finally:
        for worker in workers:
            worker.kill()


def _rows(options: argparse.Namespace, seconds: list[list[float]], link_s: float) -> list[dict]:
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import PipelineSpec

    rows = [
        {"kind": "torch", "schedule": name, "label": f"torch {name.removeprefix('Schedule')}"}
        for name in TORCH
    ]
    count = options.stages
    for schedule in OURS:
        spec = {
            "microbatches": options.microbatches,
            "meshes": [{"name": f"m{k}"} for k in range(count)],
            "stages": [
                {
                    "name": f"s{k}",
                    "mesh": f"m{k}",
                    "forward_s": f,
                    "backward_input_s": i if k else 0.0,
                    "backward_weight_s": w if k else i + w,
                    "activation_bytes": 1,
                    "weight_stash_bytes": 1,
                }
                for k, (f, i, w) in enumerate(seconds)
            ],
            "edges": [
                {
                    "source": f"s{k}",
                    "target": f"s{k + 1}",
                    "tensor": f"h{k}",
                    "forward_s": link_s,
                    "backward_s": link_s,
                }
                for k in range(count - 1)
            ],
            "network": {"contention": "link"},
            "schedule": schedule,
        }
        plan = make_plan(PipelineSpec.model_validate(spec), budget_s=options.budget_s)
        programs = {
            m: [i if isinstance(i, dict) else i.to_json() for i in p] for m, p in plan.programs.items()
        }
        label = f"slotline {schedule}" + (f" ({plan.chosen})" if schedule == "auto" else "")
        rows.append({"kind": "ours", "label": label, "programs": programs, "makespan_s": plan.makespan_s})
    return [row for row in rows if not options.only or any(part in row["label"] for part in options.only)]


def _get(store, workers: list[subprocess.Popen], key: str, timeout_s: float = 600.0):
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if any(worker.poll() not in (None, 0) for worker in workers) or time.monotonic() > deadline:
            raise RuntimeError(f"no answer {key}: a worker of the benchmark died or hangs")
        time.sleep(0.02)
    return json.loads(store.get(key))


class Worker:
    """One stage on one device; imports torch only here."""

    def __init__(self, job: dict):
        import torch
        import torch.distributed as dist

        self.torch, self.job, self.rank, self.count = torch, job, job["rank"], job["stages"]
        self.cuda = job["device"] == "cuda"
        torch.set_num_threads(1)
        if self.cuda:
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.meshes = tuple(f"m{k}" for k in range(self.count))
        self.shape = (job["rows"], job["length"], job["width"])
        self.store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "nccl" if self.cuda else "gloo",
            store=dist.PrefixStore("torch", self.store),
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=120),
        )
        self.barriers = 0

    def run(self) -> None:
        self.put(f"measured/{self.rank}", {**self.measure_stage(), "links_s": self.measure_links()})
        self.store.wait(["rows"], timedelta(seconds=600))
        for number, row in enumerate(json.loads(self.store.get("rows"))):
            try:
                found = {
                    "steps_s": self.run_ours(number, row) if row["kind"] == "ours" else self.run_torch(row)
                }
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            self.put(f"result/{number}/{self.rank}", found)
            self.barrier()

    def stage(self):
        """Transformer blocks; the same weights' sizes and the same kernels in every row."""
        torch, count, rank = self.torch, self.count, self.rank
        width, heads = self.job["width"], max(1, self.job["width"] // 128)

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
                self.qkv, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
                self.expand, self.contract = (
                    torch.nn.Linear(width, 4 * width),
                    torch.nn.Linear(4 * width, width),
                )

            def forward(self, x):
                b, n, _ = x.shape
                q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
                mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.project(mixed.transpose(1, 2).reshape(b, n, width))
                return x + self.contract(torch.nn.functional.gelu(self.expand(self.norm2(x))))

        class Blocks(torch.nn.Sequential):
            inputs = ("input:0",) if rank == 0 else (f"h{rank - 1}",)
            outputs = ("output",) if rank == count - 1 else (f"h{rank}",)

        torch.manual_seed(rank)
        return Blocks(*(Block() for _ in range(self.job["blocks"]))).to(self.device, self.dtype)

    def measure_stage(self, repeats: int = 7) -> dict:
        from worker.engine.autograd import backward_input

        stage, rows = self.stage(), []
        gradient = self.torch.randn(self.shape, device=self.device, dtype=self.dtype)
        for _ in range(repeats + 2):
            x = self.torch.randn(self.shape, device=self.device, dtype=self.dtype, requires_grad=True)
            times = [self.now()]
            y = stage(x)
            times.append(self.now())
            _, rest = backward_input([y], [gradient], [x])
            times.append(self.now())
            rest.run()
            times.append(self.now())
            rows.append([b - a for a, b in itertools.pairwise(times)])
        medians = [statistics.median(column) for column in zip(*rows[2:], strict=True)]
        name = self.torch.cuda.get_device_name() if self.cuda else "cpu"
        return {"forward_s": medians[0], "input_s": medians[1], "weight_s": medians[2], "device": name}

    def measure_links(self, repeats: int = 9) -> list[float]:
        """Seconds of one transfer to the next stage, nothing else running."""
        from worker.transport.base import finish

        lanes = tuple((f"m{k}", f"m{k + 1}") for k in range(self.count - 1))
        transport = self.transport("links")
        transport.connect({}, lanes)
        tensor, times = self.torch.zeros(self.shape, device=self.device, dtype=self.dtype), []
        for k in range(self.count - 1):
            for repeat in range(repeats):
                self.barrier()
                start = self.now()
                if self.rank == k:
                    finish(transport.send(f"m{k + 1}", repeat, tensor))
                elif self.rank == k + 1:
                    finish(transport.receive(f"m{k}", repeat, tensor))
                if self.rank in (k, k + 1) and repeat > 1:
                    times.append(self.now() - start)
        self.now()
        transport.close()
        return times

    def transport(self, name: str):
        from worker.transport.base import Topology
        from worker.transport.gloo import GlooTransport
        from worker.transport.nccl import NcclTransport

        common = {
            "mesh": self.meshes[self.rank],
            "worker": 0,
            "store": ("127.0.0.1", self.job["port"]),
            "prefix": name,
        }
        if self.cuda:
            return NcclTransport(Topology(self.meshes), **common)
        return GlooTransport(Topology(self.meshes), host="127.0.0.1", **common)

    def run_ours(self, number: int, row: dict) -> list[float]:
        from worker.contract.planned import MeshProgram
        from worker.contract.program import program_from_json
        from worker.engine.engine import Engine, engine_collectives
        from worker.engine.local_stages import LocalStages
        from worker.engine.results import RunOptions

        torch, microbatches = self.torch, self.job["microbatches"]
        mesh = self.meshes[self.rank]
        program = MeshProgram(program_from_json(row["programs"][mesh]), microbatches)
        edges = [_Edge(k, self.shape, self.dtype) for k in range(self.count - 1)]
        options = RunOptions(seed=None, device=str(self.device))
        transport = self.transport(f"row{number}")
        engine = Engine(
            program,
            LocalStages({self.rank: self.stage()}, self.meshes, edges),
            engine_collectives(transport, program, self.meshes, {}, options),
            loss=_loss,
            options=options,
        )
        engine.connect()
        inputs = [
            (torch.randn(self.shape, device=self.device, dtype=self.dtype),) for _ in range(microbatches)
        ]
        targets = [x for (x,) in inputs]
        try:
            return self.timed(lambda: engine.run_step(0, inputs, targets))
        finally:
            engine.close()

    def run_torch(self, row: dict) -> list[float]:
        from torch.distributed.pipelining import PipelineStage, schedules

        torch, microbatches = self.torch, self.job["microbatches"]
        module = self.stage()
        stage = PipelineStage(module, self.rank, self.count, self.device)
        kind = getattr(schedules, row["schedule"])
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        schedule = kind([stage] if several else stage, microbatches, loss_fn=_loss, scale_grads=False)
        batch = torch.randn(
            microbatches * self.shape[0], *self.shape[1:], device=self.device, dtype=self.dtype
        )
        arguments = (batch,) if self.rank == 0 else ()
        target = {"target": batch} if self.rank == self.count - 1 else {}

        def step():
            module.zero_grad()
            schedule.step(*arguments, **target)

        return self.timed(step)

    def timed(self, step) -> list[float]:
        times = []
        for _ in range(self.job["steps"] + 3):
            self.barrier()
            start = self.now()
            step()
            times.append(self.now() - start)
        return times[3:]

    def now(self) -> float:
        """Monotonic seconds once the device is idle."""
        if self.cuda:
            self.torch.cuda.synchronize()
        return time.monotonic()

    def barrier(self) -> None:
        self.barriers += 1
        key = f"barrier/{self.barriers}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.count:
            time.sleep(0.0005)

    def put(self, key: str, value) -> None:
        self.store.set(key, json.dumps(value))


class _Edge:
    def __init__(self, source: int, shape: tuple[int, ...], dtype):
        self.source, self.target, self.tensor = source, source + 1, f"h{source}"
        self.shape, self.dtype, self.differentiable = shape, dtype, True


def _loss(output, target):
    return (output.float() - target.float()).square().mean()


if __name__ == "__main__":
    sys.exit(main())
