"""What it costs to see a step: slot timing, records, reports, metrics that are scraped, profiled steps, spans.

`python -m tests.benchmarks.seeing [--model demo]`. One process trains a GPT on two meshes by the real engine; what the
driver does with each step is done here too. Blocks of steps with everything and with nothing alternate, in random
order within each pair, so that whatever else the machine does meets both alike. Off means that the engine reads no clock
for a slot and makes none, and that nothing of a step is recorded.

Two figures: the difference between the blocks, in processor time of the whole process and in wall time; and, as the
machine's noise is larger than what is looked for, the processor time of the parts themselves, each measured around its
call in the blocks that have it. What goes by the clock (heartbeats, scrapes, profiled steps) counts as often as it comes
in a step for which each mesh has a core. The reports go over HTTP to a process that throws them away: what the control
plane does with them is not a step's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import pickle
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = {
    "demo": {"layers": 6, "width": 96, "heads": 4, "length": 64},
    "larger": {"layers": 8, "width": 256, "heads": 4, "length": 128},
}
MESHES, MICROBATCHES = 2, 8
PROFILE_EVERY_S, SCRAPE_EVERY_S = 30.0, 5.0  # as SLOTLINE_PROFILE_EVERY_S and deploy/prometheus.yml have them
HEARTBEAT_S = 1.0  # as worker/driver/reporter.py has it
SLOTS, RECORD = "slots to the driver (pickled as Ray does)", "record of the step"
METRICS, REPORT, PROFILED = "metrics, report and spans of the step", "report", "profiled step"
AIM = 0.01
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="larger")
    parser.add_argument("--pairs", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "worker"))
    import torch
    from workers import Workers

    torch.set_num_threads(1)
    with _control_plane() as url, Workers(_job(MODELS[options.model])) as run, _Seeing(run, url) as seeing:
        for step in (1, 2):
            seeing.on(step)
        step = 2
        seeing.parts.clear()
        blocks: dict[bool, list[Block]] = {True: [], False: []}
        for _ in range(options.pairs):
            for on in random.sample((True, False), 2):
                with _engine_blind() if not on else contextlib.nullcontext():
                    blocks[on].append(_block(seeing.on if on else seeing.off, step, options.steps))
                step += options.steps
        _tell(blocks, seeing, options)
    return 0


_NOW = [0.0]


@dataclass(frozen=True)
class Block:
    """Seconds of a step, on average over a block."""

    cpu_s: float
    wall_s: float


def _block(run: Callable[[int], None], before: int, steps: int) -> Block:
    cpu, wall = time.process_time(), time.perf_counter()
    for step in range(before + 1, before + steps + 1):
        run(step)
    return Block((time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps)


@dataclass
class _Parts:
    """Processor seconds of each part, call by call, on whatever thread it runs."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds[name].append(time.thread_time() - began)

    def clear(self) -> None:
        self.seconds.clear()


class _Seeing:
    """A step as the driver sees it, and one that nobody sees."""

    def __init__(self, run: Any, url: str) -> None:
        from worker.contract.logs import TraceParent
        from worker.driver.control_plane_client import ControlPlaneClient
        from worker.driver.metrics import DriverMetrics, ModelFlops
        from worker.driver.reporter import Reporter, Spans

        self.run, self.parts, self.steps = run, _Parts(), 0
        self.plan = run.planned
        self.control = ControlPlaneClient(url, "attempt", "token")
        report = self.control.report

        def timed(body: Any) -> Any:
            with self.parts.of(REPORT):
                return report(body)

        self.control.report = timed  # type: ignore[method-assign]
        self.reporter = Reporter(self.control)
        self.metrics = DriverMetrics("job")
        self.metrics.set_plan(self.plan["plan"], step_s=0.1)
        self.metrics.set_model_flops(ModelFlops(10**9))
        self.spans = Spans(TraceParent.read(TRACE), self.reporter.span)
        self.next_timeline = 0.0
        self.closing = threading.Event()
        self.scraped = threading.Thread(target=self._scrape, daemon=True)
        self.slots = 0

    def __enter__(self) -> _Seeing:
        self.reporter.start()
        self.endpoint = self.metrics.serve()
        self.scraped.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.scraped.join(10)
        self.reporter.close()
        self.metrics.close()
        self.control.close()

    def off(self, step: int) -> None:
        _NOW[0] = time.monotonic()  # once a step: the watch for stalled slots compares with it
        self.run.step(step)

    def on(self, step: int) -> None:
        from worker.driver.step_measurement import ClockOffset, measure_step

        began = time.monotonic()
        results = self.run.step(step)
        self.slots = sum(len(result.slots) for result in results)
        with self.parts.of(SLOTS):
            results = [pickle.loads(pickle.dumps(result, protocol=5)) for result in results]
        with self.parts.of(RECORD):
            record = measure_step(
                step=step,
                workers={f"m{index}": 1 for index in range(MESHES)},
                stage_names=[stage["name"] for stage in self.plan["spec"]["stages"]],
                results=results,
                offsets=[ClockOffset(0.0, 0.0)] * MESHES,
                step_s=time.monotonic() - began,
                clock=(time.time(), time.monotonic()),
                samples=32,
            )
        keep = time.monotonic() >= self.next_timeline
        with self.parts.of(METRICS):
            self.reporter.step(record.report)
            self.metrics.observe_step(record.report, self.spans.step(record, profiled=keep))
            self.metrics.observe_usage(record.usage)
        if keep:
            self.next_timeline = time.monotonic() + PROFILE_EVERY_S
            with self.parts.of(PROFILED):
                self.reporter.timeline(record.timeline)
                self.metrics.set_timeline(record.timeline)
        self.steps += 1

    def _scrape(self) -> None:
        """As Prometheus does, in blocks of both kinds: the answers are made by the driver's own thread."""
        accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        while not self.closing.wait(SCRAPE_EVERY_S):
            for path in ("/metrics", "/metrics/slots"):
                request = urllib.request.Request(f"http://{self.endpoint}{path}", headers=accept)
                with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
                    answer.read()


@contextlib.contextmanager
def _engine_blind() -> Iterator[None]:
    """The engine's lanes read no clock and no slot is made. (A call of a function that has an answer stays.)"""
    from worker.engine import engine
    from worker.engine.lanes import cpu as lanes_cpu

    clock, made = lanes_cpu.time, engine.label_slot_time
    lanes_cpu.time = SimpleNamespace(monotonic=lambda: _NOW[0])  # type: ignore[attr-defined]
    engine.label_slot_time = lambda *_: None  # type: ignore[assignment]
    try:
        yield
    finally:
        lanes_cpu.time, engine.label_slot_time = clock, made  # type: ignore[attr-defined]


def _of_engine(slots: int) -> float:
    """Processor seconds of two looks at the clock and a slot for each instruction."""
    from worker.contract.program import Instruction
    from worker.engine.engine import label_slot_time

    instruction = Instruction(op="F", lane="compute", stage=0, microbatch=0)
    found = []
    for _ in range(20):
        began = time.thread_time()
        for _ in range(slots):
            start = time.monotonic()
            label_slot_time("m0", {}, instruction, start, time.monotonic())
        found.append(time.thread_time() - began)
    return statistics.median(found)


def _of_scrape(seeing: _Seeing) -> float:
    """Processor seconds of an answer of each page, as OpenMetrics, with all the series there are."""
    from prometheus_client import generate_latest
    from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

    began = time.thread_time()
    for _ in range(10):
        openmetrics(seeing.metrics.registry)
        seeing.metrics._slots.text()
        generate_latest(seeing.metrics.profiled_registry)
    return (time.thread_time() - began) / 10


def _tell(blocks: dict[bool, list[Block]], seeing: _Seeing, options: argparse.Namespace) -> None:
    now = datetime.datetime.now(datetime.UTC)
    load = os.getloadavg()
    on, off = blocks[True], blocks[False]
    step_cpu = statistics.median(block.cpu_s for block in off)
    print(f"\n{now:%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load average {load[0]:.1f} {load[1]:.1f}")
    print(
        f"{MODELS[options.model]}, {MESHES} meshes, {MICROBATCHES} microbatches, {seeing.slots} slots a step;",
        end=" ",
    )
    print(f"{options.pairs} blocks of {options.steps} steps of each kind, alternated\n")
    print("| a step | off | on | on over off, medians | pair by pair: median (quartiles) |")
    print("|---|---|---|---|---|")
    for label, name in (("processor ms", "cpu_s"), ("wall ms", "wall_s")):
        with_, without = ([getattr(b, name) for b in some] for some in (on, off))
        ratios = sorted(a / b - 1 for a, b in zip(with_, without, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"| {label} | {1e3 * statistics.median(without):.2f} | {1e3 * statistics.median(with_):.2f} "
            f"| {statistics.median(with_) / statistics.median(without) - 1:+.2%} "
            f"| {middle:+.2%} ({low:+.2%} … {high:+.2%}) |"
        )
    steps = options.pairs * options.steps
    per_step = {"clock and slots in the engine": _of_engine(seeing.slots)}
    each = {part: statistics.mean(seconds) for part, seconds in seeing.parts.seconds.items()}
    for part in (SLOTS, RECORD, METRICS):
        per_step[part] = sum(seeing.parts.seconds[part]) / steps
    by_clock = {
        "report of a heartbeat, its own thread": (each[REPORT], HEARTBEAT_S),
        "profiled step": (each[PROFILED], PROFILE_EVERY_S),
        "scrape of both pages": (_of_scrape(seeing), SCRAPE_EVERY_S),
    }
    # a step as long as it is with a core for each mesh: here others take them, and what goes by the clock comes oftener
    whole_s = step_cpu / MESHES
    print("\n| part | processor µs | of a step's processor time |\n|---|---|---|")
    for part, seconds in per_step.items():
        print(f"| {part}, each step | {1e6 * seconds:.0f} | {seconds / step_cpu:.3%} |")
    shares = [seconds / step_cpu for seconds in per_step.values()]
    for part, (seconds, every_s) in by_clock.items():
        shares.append(seconds * whole_s / every_s / step_cpu)
        print(f"| {part}, every {every_s:g} s | {1e6 * seconds:.0f} | {shares[-1]:.3%} |")
    verdict = "below" if sum(shares) < AIM else "ABOVE"
    print(f"| all | | {sum(shares):.3%}, {verdict} the aim of {AIM:.0%} |")
    sys.stdout.flush()


def _job(model: dict[str, int]) -> dict[str, Any]:
    length = {"length": model["length"]}
    return {
        "model": {"factory": "worker.examples.gpt:build", "args": model},
        "data": {"factory": "worker.examples.text:ByteWindows", "args": length},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-3}},
        "training": {"steps": 1000, "global_batch": 32, "microbatches": MICROBATCHES, "seed": 0},
        "pipeline": {"stages": MESHES, "cut": "auto", "schedule": "1f1b"},
        "resources": {"meshes": MESHES, "device": "cpu"},
    }


@contextlib.contextmanager
def _control_plane() -> Iterator[str]:
    """A process that takes reports and throws them away; its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_throw_away, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


def _throw_away(pipe: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "23")
            self.end_headers()
            self.wfile.write(b'{"command": "continue"}')

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
