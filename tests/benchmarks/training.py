"""Samples a second of whole training runs: a Slotline job beside torch's own pipelining and beside one process.

`python -m tests.benchmarks.training`, about six minutes. Four processes on this machine train the demo's GPT and a
larger one: a Slotline job as users run it (Ray, driver, reports, profiling, a plan), a plain script on
torch.distributed.pipelining (1F1B and zero bubble), and one process that accumulates gradients; the same model, samples,
optimizer and clipping. Medians over the steps after the first ones. "cpu" is processor time of all processes a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MESHES = 4
LIMIT_S = 300
TORCH = {"torch 1F1B": "Schedule1F1B", "torch zero bubble": "ScheduleInterleavedZeroBubble"}
SLOTLINE, ALONE = "Slotline job", "one process, accumulating"
MODELS = {
    "demo": {"layers": 6, "width": 96, "heads": 4, "length": 64},
    "larger": {"layers": 8, "width": 256, "heads": 4, "length": 128},
}
STEPS = {"demo": 60, "larger": 20}
WARM = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plain:
        path, rank = options.plain.split(",")
        _Plain(json.loads(Path(path).read_text()), int(rank)).run()
        os._exit(0)
    for name in options.models:
        _compare(name, WARM + int(STEPS[name] * options.scale))
    return 0


def _compare(name: str, steps: int) -> None:
    spec = _job(name, steps)
    found = {SLOTLINE: _slotline(spec)}
    for label, schedule in TORCH.items():
        found[label] = _plain(spec, schedule, MESHES)
    found[ALONE] = _plain(spec, None, 1)
    batch = spec["training"]["global_batch"]
    rate = {label: batch / run["step_s"] for label, run in found.items()}
    print(f"\n## {name}: {MODELS[name]}, {os.cpu_count()} cores, {steps - WARM} steps\n", flush=True)
    print("| | samples/s | step ms | cpu ms a step | last loss | Slotline is × |")
    print("|---|---|---|---|---|---|")
    for label, run in found.items():
        print(
            f"| {label} | {rate[label]:.0f} | {1e3 * run['step_s']:.1f} | {1e3 * run['cpu_s']:.0f} "
            f"| {run['loss']:.4f} | {rate[SLOTLINE] / rate[label]:.2f} |"
        )
    best = max(rate[label] for label in TORCH)
    ours = found[SLOTLINE]
    print(
        f"\nSlotline over torch's best: {rate[SLOTLINE] / best:.2f} ×; step over measured makespan: ", end=""
    )
    print(f"{ours['step_s'] / ours['makespan_s']:.3f}; step less makespan: ", end="")
    print(f"{1e3 * (ours['step_s'] - ours['makespan_s']):.2f} ms, of it REDUCE and STEP ", end="")
    print(f"{1e3 * ours['final_s']:.2f} ms")
    for label in (SLOTLINE, *TORCH):
        threads = sorted(found[label]["threads"].items(), key=lambda item: -item[1])
        shown = ", ".join(f"{thread} {1e3 * cpu:.1f}" for thread, cpu in threads[:10] if cpu > 2e-5)
        print(f"cpu ms a step by thread, {label}: {shown}")
    sys.stdout.flush()


def _job(name: str, steps: int) -> dict[str, Any]:
    model = MODELS[name]
    return {
        "model": {"factory": "worker.examples.gpt:build", "args": model},
        "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": model["length"]}},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1.0e-3}},
        "training": {
            "steps": steps,
            "global_batch": 32,
            "microbatches": 8,
            "seed": 0,
            "clip_grad_norm": 1.0,
        },
        "pipeline": {"stages": MESHES, "cut": "auto", "schedule": "auto"},
        "resources": {"meshes": MESHES, "device": "cpu"},
    }


# Slotline, as a job


def _slotline(spec: dict[str, Any]) -> dict[str, Any]:
    sys.path[:0] = [str(ROOT / "tests/worker"), str(ROOT / "tests/worker/driver")]
    import ray
    from control_plane import ControlPlane

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SLOTLINE_BENCHMARK_THREADS"] = folder
        spec = {**spec, "data": {**spec["data"], "factory": "tests.benchmarks.training:watched_windows"}}
        cluster = ray.init(
            address="local",
            num_cpus=1,
            resources={"slotline_worker": MESHES},
            include_dashboard=False,
            log_to_driver=False,
        )
        plane = ControlPlane({"job_id": "job", "number": 1, "job": spec, "device": "cpu", "resume": None})
        driver = None
        try:
            driver = subprocess.Popen(
                [sys.executable, "-m", "worker.driver"],
                cwd=ROOT,
                env=os.environ
                | {
                    "SLOTLINE_CONTROL_URL": plane.url,
                    "SLOTLINE_ATTEMPT_ID": "job-1",
                    "SLOTLINE_ATTEMPT_TOKEN": "secret",
                    "SLOTLINE_DRIVER_RAY_ADDRESS": cluster.address_info["gcs_address"],
                    "SLOTLINE_LIMIT_LINGER_S": "0",
                    "SLOTLINE_LOG_LEVEL": "WARNING",
                },
            )
            driver_cpu = _Sampled(driver.pid, lambda: len(plane.steps))
            while driver.poll() is None:
                driver_cpu.look()
                time.sleep(0.2)
            if driver.returncode or plane.states[-1:] != ["SUCCEEDED"]:
                raise RuntimeError(f"the job of the benchmark failed: {plane.reports[-1:]}")
            threads, cpu_s = _threads_of_workers(Path(folder))
        finally:
            if driver is not None:
                driver.kill()
            plane.close()
            ray.shutdown()
    steps = [step for step in plane.steps if step["step"] > WARM]
    final = {t["step"]: _final_s(t["slots"]) for report in plane.reports for t in report["timelines"]}
    each = driver_cpu.per_step()
    return {
        "step_s": statistics.median(step["step_s"] for step in steps),
        "makespan_s": statistics.median(step["makespan_s"] for step in steps),
        "final_s": statistics.median([s for number, s in final.items() if number > WARM] or [0.0]),
        "loss": steps[-1]["loss"],
        "cpu_s": cpu_s + each,
        "threads": {**threads, "driver": each},
    }


def _final_s(slots: list[dict[str, Any]]) -> float:
    """From the end of the makespan to that of the last STEP."""
    ends = [s["end_s"] for s in slots]
    return max(ends) - max(s["end_s"] for s in slots if s["action"] not in ("REDUCE", "STEP"))


class _Sampled:
    """Processor time of a process over the steps that it reports."""

    def __init__(self, pid: int, steps: Any):
        self._pid, self._steps = pid, steps
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def look(self) -> None:
        if (done := self._steps()) >= WARM:
            try:
                now = (done, sum(_cpu_s(self._pid).values()))
            except OSError:
                return
            self._first = self._first or now
            self._last = now

    def per_step(self) -> float:
        if not self._first or not self._last or self._last[0] == self._first[0]:
            return 0.0
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])


def watched_windows(**arguments: Any) -> Any:
    """The data set of the job; in the worker that makes it, a thread that writes down where processor time goes."""
    import threading

    from worker.engine.engine import Engine
    from worker.examples.text import ByteWindows

    step, run_step = [0], Engine.run_step

    def noted(engine: Engine, number: int, *samples: Any) -> Any:
        step[0] = number
        return run_step(engine, number, *samples)

    Engine.run_step = noted
    threading.Thread(target=_write_threads, args=(step,), name="benchmark", daemon=True).start()
    return ByteWindows(**arguments)


def _write_threads(step: list[int]) -> None:
    """Every half second: processor seconds by thread, and the step that the worker runs."""
    path = Path(os.environ["SLOTLINE_BENCHMARK_THREADS"]) / f"{os.getpid()}.jsonl"
    while True:
        time.sleep(0.5)
        with path.open("a") as file:
            file.write(json.dumps({"step": step[0], "threads": _cpu_s(os.getpid())}) + "\n")


def _cpu_s(pid: int) -> dict[str, float]:
    """Processor seconds of a process by thread; those of this process by python's names."""
    import threading

    own = {t.native_id: t.name for t in threading.enumerate()} if pid == os.getpid() else {}
    found: dict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        label = own.get(int(task.name), f"native {name}" if own else name)
        found[label] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return dict(found)


def _threads_of_workers(folder: Path) -> tuple[dict[str, float], float]:
    """Processor seconds a step by thread, all workers together, and their sum."""
    found: dict[str, float] = defaultdict(float)
    for path in folder.glob("*.jsonl"):
        lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["step"] > WARM]
        if len(lines) < 2 or lines[-1]["step"] == lines[0]["step"]:
            raise RuntimeError("the job was too short to see where processor time goes: raise --scale")
        steps = lines[-1]["step"] - lines[0]["step"]
        for thread, cpu_s in lines[-1]["threads"].items():
            found[thread] += (cpu_s - lines[0]["threads"].get(thread, 0.0)) / steps
    return dict(found), sum(cpu_s for thread, cpu_s in found.items() if thread != "benchmark")


# Plain scripts


def _plain(spec: dict[str, Any], schedule: str | None, processes: int) -> dict[str, Any]:
    from worker.transport.rendezvous import host_store

    store = host_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({"spec": spec, "schedule": schedule, "port": store.port}))
        threads = "1" if processes > 1 else str(os.cpu_count())
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.training", "--plain", f"{path},{rank}"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            for rank in range(processes)
        ]
        try:
            for worker in workers:
                if worker.wait(LIMIT_S):
                    raise RuntimeError(f"a process of {schedule or ALONE} failed")
        finally:
            for worker in workers:
                worker.kill()
        found = [json.loads(store.get(f"result/{rank}")) for rank in range(processes)]
    threads_s: dict[str, float] = defaultdict(float)
    for one in found:
        for thread, cpu_s in one["threads"].items():
            threads_s[thread] += cpu_s
    return {
        "step_s": max(one["step_s"] for one in found),
        "cpu_s": sum(threads_s.values()),
        "loss": found[-1]["loss"],
        "threads": threads_s,
    }


class _Plain:
    """One process of a plain script: all of the model, or a quarter of its blocks under torch's pipelining."""

    def __init__(self, job: dict[str, Any], rank: int):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.rank = torch, dist, rank
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.spec, self.training = job["spec"], job["spec"]["training"]
        self.schedule = job["schedule"]
        self.store = dist.TCPStore("127.0.0.1", job["port"], is_master=False, wait_for_workers=False)
        if self.schedule:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("torch", self.store),
                rank=rank,
                world_size=MESHES,
                timeout=timedelta(seconds=120),
            )
        self._make()

    def _make(self) -> None:
        from worker.data.sampler import BatchSampler
        from worker.model.factory import build_model, call_factory

        spec, training = self.spec, self.training
        model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
        self.data = call_factory(spec["data"]["factory"], spec["data"]["args"])
        self.sampler = BatchSampler(
            len(self.data), training["global_batch"], training["microbatches"], seed=training["seed"]
        )
        if self.schedule:
            model = self._part(model)
        self.model = model
        self.optimizer = self.torch.optim.AdamW(model.parameters(), **spec["optimizer"]["args"])

    def _part(self, model: Any) -> Any:
        torch, rank, blocks = self.torch, self.rank, len(model.blocks)
        bounds = [round(k * blocks / MESHES) for k in range(MESHES + 1)]
        layers = list(model.blocks[bounds[rank] : bounds[rank + 1]])
        if rank == 0:
            layers.insert(0, model.embed)
        if rank == MESHES - 1:

            class Head(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.norm, self.head = model.norm, model.head

                def forward(self, x):
                    return self.head(self.norm(x)).transpose(1, 2)

            layers.append(Head())
        return torch.nn.Sequential(*layers)

    def run(self) -> None:
        step = self._pipelined() if self.schedule else self._accumulated
        times: list[float] = []
        threads: dict[str, float] = {}
        for number in range(1, self.training["steps"] + 1):
            if number == WARM + 1:
                threads = _cpu_s(os.getpid())
            began = time.perf_counter()
            loss = step(number)
            times.append(time.perf_counter() - began)
        count = len(times) - WARM
        spent = {
            name: (cpu_s - threads.get(name, 0.0)) / count for name, cpu_s in _cpu_s(os.getpid()).items()
        }
        self.store.set(
            f"result/{self.rank}",
            json.dumps({"step_s": statistics.median(times[WARM:]), "loss": loss, "threads": spent}),
        )
        if self.schedule:
            self.dist.barrier()

    def _batch(self, step: int) -> tuple[Any, Any]:
        """All microbatches, one after the other, as torch's schedules cut them again."""
        from worker.data.sampler import collate

        indices = [i for m in range(self.training["microbatches"]) for i in self.sampler.indices(step, m)]
        (inputs,), targets = collate([self.data[i] for i in indices])
        return inputs, targets

    def _accumulated(self, step: int) -> float:
        torch, count = self.torch, self.training["microbatches"]
        self.optimizer.zero_grad()
        inputs, targets = self._batch(step)
        total = 0.0
        for x, y in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            (loss / count).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training["clip_grad_norm"])
        self.optimizer.step()
        return total / count

    def _pipelined(self) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        kind = getattr(schedules, self.schedule)
        stage = PipelineStage(self.model, self.rank, MESHES, self.torch.device("cpu"))
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        schedule = kind(
            [stage] if several else stage,
            self.training["microbatches"],
            loss_fn=self.torch.nn.functional.cross_entropy,
        )
        return lambda step: self._pipelined_step(schedule, step)

    def _pipelined_step(self, schedule: Any, step: int) -> float:
        torch = self.torch
        self.optimizer.zero_grad()
        first, last = self.rank == 0, self.rank == MESHES - 1
        inputs, targets = self._batch(step) if first or last else (None, None)
        losses: list[Any] = []
        schedule.step(
            *((inputs,) if first else ()), **({"target": targets, "losses": losses} if last else {})
        )
        parameters = list(self.model.parameters())
        norms = torch.stack(torch._foreach_norm([p.grad for p in parameters]))
        total = norms.square().sum()
        self.dist.all_reduce(total)
        scale = torch.clamp(self.training["clip_grad_norm"] / (total.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([p.grad for p in parameters], scale)
        self.optimizer.step()
        return float(torch.stack(losses).detach().mean()) if last else 0.0


if __name__ == "__main__":
    sys.exit(main())
