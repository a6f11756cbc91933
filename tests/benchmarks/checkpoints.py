"""`make bench-checkpoints`: what a save costs training, waited for beside written while training goes on, in one run.

One worker with the engine, the saver and the driver's own code (worker/driver/checkpoints.py), without Ray: a GPT with AdamW
whose state is some hundred MB, and a folder on this machine's disk. Saves of the two kinds take turns. A step's delay is how
much later than an undisturbed one the step behind a save ends; the writing goes on for some steps more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from tests.worker.actor.test_actor import job
from tests.worker.driver.fake_gang import FakeActor, SimpleGang
from tests.worker.workers import Workers
from worker.contract.job import CheckpointPolicy
from worker.driver.checkpoints import Checkpoints

QUIET = 4
"""Undisturbed steps before each save."""


@dataclass(frozen=True)
class Cost:
    """Of one save: for how long training stood still, by how much later the step behind it ended, the writing itself, and
    how many times as long as undisturbed ones the steps took meanwhile."""

    block_s: float
    delay_s: float
    write_s: float
    slowdown: float


class Saver:
    """The driver's part of saving, on workers of this process."""

    def __init__(self, run: Workers, folder: str):
        self.seconds: dict[str, float] = {}
        self.beside = False

        def wait(refs, **_):
            return [ref() for ref in refs]

        def asked(worker, name):
            return lambda *given: lambda: getattr(worker, name)(*given)

        names = ("save", "begin_save", "saved")
        workers = [FakeActor(**{name: asked(one, name) for name in names}) for one in run.workers]
        meshes = [SimpleNamespace(name=name) for name in dict.fromkeys(one.mesh for one in run.workers)]
        self.kept = Checkpoints(
            CheckpointPolicy(folder, every_steps=1, keep=1),
            "job",
            gang=SimpleGang(workers=workers, meshes=meshes, wait=wait, name=str),
            reporter=SimpleNamespace(
                event=lambda *_: None,
                checkpoint=lambda *_: None,
                undelivered=lambda _: {},
                deliver_again=lambda *_: None,
            ),
            limit_s=600.0,
            timed=lambda operation, seconds: self.seconds.__setitem__(operation, seconds),
        )

    def begin(self, step: int, *, beside: bool) -> None:
        self.seconds.clear()
        self.kept._asynchronous = beside
        self.kept.after(step, last=False)

    def look(self, step: int) -> bool:
        """Whether the save is known to be written, after one more step."""
        if self.kept._pending is not None:
            self.kept.poll_behind(step)
            outcome = self.kept._pending.outcome_after(step)
            if outcome is not None:
                self.kept._handle_outcome(outcome)
        return bool(self.seconds)


def measure(spec: dict, rounds: int, folder: str) -> tuple[float, int, dict[bool, list[Cost]]]:
    """The length of an undisturbed step, the bytes of a checkpoint, and the costs of saves, by whether beside."""
    quiet, found, step = [], {False: [], True: []}, 0
    with Workers(spec) as run:
        saver = Saver(run, folder)

        def timed_step() -> float:
            nonlocal step
            step += 1
            began = time.monotonic()
            run.step(step)
            return time.monotonic() - began

        for _ in range(2):
            timed_step()
        for turn in range(2 * rounds):
            around = [timed_step() for _ in range(QUIET)]
            quiet += around
            began = time.monotonic()
            saver.begin(step, beside=bool(turn % 2))
            meanwhile = [timed_step()]
            usual = statistics.median(around)
            delay_s = time.monotonic() - began - usual
            while not saver.look(step):
                meanwhile.append(timed_step())
            seconds = saver.seconds
            slowdown = statistics.mean(meanwhile) / usual
            found[bool(turn % 2)].append(Cost(seconds["block"], delay_s, seconds["write"], slowdown))
        size = sum(path.stat().st_size for path in sorted(Path(folder).glob("job/*"))[-1].glob("*.distcp"))
    return statistics.median(quiet), size, found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--layers", type=int, default=8)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--length", type=int, default=16, help="tokens of a sample: how long a step takes")
    given = arguments.parse_args()
    spec = job(stages=1, meshes=1)
    sizes = {"layers": given.layers, "width": given.width, "heads": 8, "length": given.length, "tied": True}
    spec["model"] = {**spec["model"], "args": sizes}
    spec["data"] = {**spec["data"], "args": {"length": given.length}}
    spec["training"] |= {"steps": 10**6, "check_trace": False}
    with tempfile.TemporaryDirectory(dir=os.environ.get("SLOTLINE_BENCH_DIR")) as folder:
        step_s, size, costs = measure(spec, given.rounds, folder)
    print(
        f"state {size / 1e6:.0f} MB, an undisturbed step {step_s:.2f} s, {given.rounds} saves of each kind, medians"
    )
    print(f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores\n")
    print(
        "| checkpoint | training stands still | the step behind it ends later by | steps meanwhile | written in |"
    )
    print("|---|---|---|---|---|")
    middle = {}
    for beside, name in ((False, "waited for"), (True, "beside training")):
        one = middle[beside] = Cost(
            *(
                statistics.median(getattr(cost, what) for cost in costs[beside])
                for what in ("block_s", "delay_s", "write_s", "slowdown")
            )
        )
        meanwhile = f"× {one.slowdown:.2f}" if beside else ""
        print(f"| {name} | {one.block_s:.3f} s | {one.delay_s:.2f} s | {meanwhile} | {one.write_s:.2f} s |")
    waiting, beside = middle[False], middle[True]
    print(
        f"\nBeside training it stands still for {beside.block_s / waiting.block_s:.1%} of the time, and the step behind a "
        f"save is later by {beside.delay_s / waiting.delay_s:.1%} of what it is later by where the save is waited for."
    )
    for kind, name in ((False, "waited for"), (True, "beside training")):
        print(
            f"{name}, each: " + "; ".join(f"{one.block_s:.3f} s, {one.delay_s:.2f} s" for one in costs[kind])
        )


if __name__ == "__main__":
    main()
