"""Kills workers and drivers of one job at random moments, and compares its record with that of a run left alone.

`python -m tests.benchmarks.kills`, about 15 minutes: `slotline serve` with a local Ray of its own trains the demo's GPT on
three meshes twice, first undisturbed. Then one process after the other dies by SIGKILL, a worker or the driver, while it
trains or, one time in four, while it still recovers. Every step has to stand in the record once, with the same loss to the
bit. Exit status 1 where that is not so.

With `--copies N` two more jobs do the same with copies in host memory every N steps, and those left alone take turns, in
which the cost of copies shows. With `--spares N` jobs have so many spares, of which none is killed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from service.cli.demo import GPT_JOB
from service.cli.serve import LocalServer
from service.client.client import Client
from service.orchestrator.ray.local_ray import free_ports
from service.schemas.jobs import JobView

MESHES = 3
LIMIT_S = 120.0
"""The longest that a job may take from a kill to a step that is new."""
LEFT_LIMIT_S = 30.0
WARM_STEPS = 20
TOUCHED_STEPS = 2


@dataclass
class Kill:
    """A process that was killed, and what came of it: seconds to the next new step (None: another kill or the end came
    first)."""

    victim: str
    attempt: int
    """The number of the attempt that it was in."""
    seconds: float | None = None
    reached: int = 0
    """The last step that had been recorded when the next attempt began."""
    lost: int | None = None
    """The recorded steps that the next attempt made again."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--copies", type=int, help="steps between copies; without it there are none")
    parser.add_argument("--turns", type=int, default=3, help="runs left alone, of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-workers", action="store_true", help="kill no driver")
    parser.add_argument("--spares", type=int, default=0, help="accelerators that wait to take over")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        server = LocalServer(
            directory=place,
            port=free_ports(1)[0],
            log=place / "log",
            environment={"SLOTLINE_LOCAL_WORKERS": f"{MESHES + options.spares}"},
        )
        with server, Client(server.url) as client:
            site = Site(server, client, options.spares)
            alone = Runs(site, options.steps, options.every, place)
            expected = site.record(alone.ended("alone"))
            status = 0
            for copies in dict.fromkeys((None, options.copies)):
                killed = alone.submitted("killed", copies)
                kills = kill_again_and_again(
                    site,
                    killed,
                    options.kills,
                    random.Random(options.seed),
                    drivers_too=not options.only_workers,
                )
                job = site.finished(killed)
                site.note_lost_steps(killed, kills)
                what = "without copies" if copies is None else f"with copies every {copies} steps"
                print(f"\n== {what}, a checkpoint every {options.every} steps")
                status |= report(job, kills, expected, site.record(killed), site.left(), options.steps)
            if options.copies is not None:
                status |= report_cost(alone, options.copies, options.turns, expected)
    return status


@dataclass
class Runs:
    """Jobs of one kind, with copies or without."""

    site: Site
    steps: int
    every: int
    place: Path

    def submitted(self, name: str, copies: int | None = None) -> str:
        return self.site.submit(name, self.steps, self.every, self.place, copies)

    def ended(self, name: str, copies: int | None = None) -> str:
        """The id of a job that was left alone to its end."""
        job_id = self.submitted(name, copies)
        self.site.finished(job_id)
        return job_id


@dataclass
class Site:
    """A running control plane and its local Ray."""

    server: LocalServer
    client: Client
    spares: int

    def submit(self, name: str, steps: int, every: int, place: Path, copies: int | None = None) -> str:
        """Submit the demo's GPT; returns its id. Its order is fixed: sums in another order round apart."""
        spec = GPT_JOB | {
            "name": name,
            "training": GPT_JOB["training"] | {"steps": steps},
            "pipeline": {"stages": MESHES, "schedule": "1f1b", "replan": "off"},
            "resources": {"meshes": MESHES, "spares": self.spares, "device": "cpu"},
            "checkpoint": {
                "uri": str(place / "checkpoints"),
                "every_steps": every,
                "copy_every_steps": copies,
            },
            "retry": {"infrastructure": -1},
        }
        return self.client.submit(spec).id

    def finished(self, job_id: str) -> JobView:
        """The job once it has ended; SystemExit where it makes no step for LIMIT_S."""
        until, step = time.monotonic() + LIMIT_S, -1
        while not (job := self.client.job(job_id)).state.final:
            if job.progress.step > step:
                until, step = time.monotonic() + LIMIT_S, job.progress.step
            if time.monotonic() > until:
                raise SystemExit(f"no step behind {step} for {LIMIT_S:g} s: {job.state}, {job.message}")
            time.sleep(0.5)
        return job

    def record(self, job_id: str) -> list[tuple[int, float | None]]:
        """The number and the loss of each step of the job's record, as it stands there."""
        return [(step.step, step.loss) for step in self.client.steps(job_id)]

    def note_lost_steps(self, job_id: str, kills: list[Kill]) -> None:
        """Note in each kill how many recorded steps the next attempt that trained made again."""
        begins = {
            event.attempt: int(event.message.split()[3])
            for event in self.client.events(job_id)
            if event.kind == "resumed"
        }
        trained = {step.attempt for step in self.client.steps(job_id)} | {*begins}
        for kill in kills:
            following = min((attempt for attempt in trained if attempt > kill.attempt), default=None)
            if following is not None and kill.seconds is not None:
                kill.lost = max(0, kill.reached - begins.get(following, 0))

    def workers(self) -> list[psutil.Process]:
        """The training actors of this server's Ray, without spares, which are started last."""
        return sorted(self._actors("Worker"), key=psutil.Process.create_time)[:MESHES]

    def left(self) -> int:
        """The actors of jobs, and keepers of their copies, that are there a while behind their end."""
        until = time.monotonic() + LEFT_LIMIT_S
        while (left := self._actors("Worker") + self._actors("CopyKeeper")) and time.monotonic() < until:
            time.sleep(0.2)
        return len(left)

    def _actors(self, name: str) -> list[psutil.Process]:
        process = psutil.Process(self.server._process.pid)
        return [one for one in process.children(recursive=True) if _title(one).startswith(f"ray::{name}")]

    def drivers(self, job: JobView) -> list[psutil.Process]:
        """The driver of a job's last attempt, by the port of its metrics; those of others stay for a while."""
        groups = httpx.get(f"{self.server.url}/api/v1/prometheus/targets", trust_env=False).json()
        own = {"__meta_slotline_job": job.id, "__meta_slotline_attempt": str(len(job.attempts))}
        ports = {
            int(target.rpartition(":")[2])
            for group in groups
            if own.items() <= group["labels"].items()
            for target in group["targets"]
        }
        return [
            psutil.Process(one.pid)
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr.port in ports and one.pid is not None
        ]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def kill_again_and_again(
    site: Site, job_id: str, count: int, draw: random.Random, *, drivers_too: bool = True
) -> list[Kill]:
    """Kill `count` processes of a job one after the other, as long as it goes on."""
    kills: list[Kill] = []
    reached, last_kill_at = 0, time.monotonic()
    while len(kills) < count:
        job = site.client.job(job_id)
        if job.state.final:
            break
        reached = max(reached, job.progress.step)
        recovers = bool(kills) and draw.random() < 0.25
        if not recovers:
            reached = _wait_for_a_new_step(site, job_id, reached, kills[-1] if kills else None, last_kill_at)
        time.sleep(draw.uniform(0.0, 4.0))
        job = site.client.job(job_id)
        victims = [("worker", one) for one in site.workers()]
        if drivers_too and draw.random() < 0.5 and (drivers := site.drivers(job)):
            victims = [("driver", one) for one in drivers]
        if not victims:
            continue
        kind, victim = draw.choice(victims)
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
        kills.append(Kill(kind + (", recovering" if recovers else ""), len(job.attempts)))
        last_kill_at = time.monotonic()
        print(f"{len(kills):3d} {kills[-1].victim} behind step {job.progress.step}", flush=True)
    _wait_for_a_new_step(site, job_id, reached, kills[-1] if kills else None, last_kill_at)
    return kills


def _wait_for_a_new_step(site: Site, job_id: str, reached: int, kill: Kill | None, killed_at: float) -> int:
    """Wait for a step behind `reached`, behind a kill one of a later attempt, and note in `kill` how long that took; returns
    the step."""
    before: int | None = None
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        job = site.client.job(job_id)
        step = job.progress.step
        if job.state.final:
            return step
        goes_on = kill is None or len(job.attempts) > kill.attempt
        if goes_on and before is None:  # the killed attempt reports no more
            before = max(reached, step)
        if goes_on and before is not None and step > before:
            if kill is not None and kill.seconds is None:
                kill.seconds, kill.reached = time.monotonic() - killed_at, before
            return step
        time.sleep(0.05)
    raise SystemExit(f"no new step within {LIMIT_S:g} s of a kill: {site.client.job(job_id).message}")


def report(
    job: JobView,
    kills: list[Kill],
    expected: list[tuple[int, float | None]],
    found: list[tuple[int, float | None]],
    left: int,
    steps: int,
) -> int:
    """Print what came of it; 0 where the record is whole and equal."""
    numbers = Counter(step for step, _ in found)
    missing = [step for step in range(1, steps + 1) if step not in numbers]
    twice = [step for step, count in numbers.items() if count > 1]
    wanted = dict(expected)
    differ = [step for step, loss in found if loss != wanted.get(step)]
    seconds = sorted(kill.seconds for kill in kills if kill.seconds is not None)
    causes = Counter(attempt.reason for attempt in job.attempts if attempt.reason)
    print(
        f"\n{len(kills)} kills: {dict(Counter(kill.victim for kill in kills))}; the job {job.state}, {dict(causes)}"
    )
    if seconds:
        ninth = seconds[int(0.9 * (len(seconds) - 1))]
        print(
            f"from a kill to the next new step ({len(seconds)} that came to one): median "
            f"{statistics.median(seconds):.1f} s, 90 % within {ninth:.1f} s, at most {seconds[-1]:.1f} s"
        )
    if lost := sorted(kill.lost for kill in kills if kill.lost is not None):
        print(
            f"recorded steps that were made again for a kill ({len(lost)} kills): mean {statistics.mean(lost):.1f}, median "
            f"{statistics.median(lost):g}, at most {lost[-1]}"
        )
    print(f"steps that count but are missing: {missing or 'none'}; twice: {twice or 'none'}")
    print(f"losses other than of the run left alone: {differ or 'none'} of {steps}")
    print(f"training actors and keepers left at the end: {left}")
    whole = job.state == "SUCCEEDED" and not missing and not twice and not differ and not left
    return 0 if whole else 1


def report_cost(runs: Runs, copies: int, turns: int, expected: list[tuple[int, float | None]]) -> int:
    """Print what copies cost of a step, of jobs with them and without in turn; 0 where their losses are equal."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    shares, same = [], True
    for _ in range(turns):
        for with_copies in (False, True):
            job_id = runs.ended("alone", copies if with_copies else None)
            same = same and runs.site.record(job_id) == expected
            steps = {
                step.step: step.step_s for step in runs.site.client.steps(job_id) if step.step > WARM_STEPS
            }
            seconds[with_copies] += steps.values()
            if with_copies:
                shares.append(copy_share(steps, copies, runs.every))
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    means = {kind: _trimmed_mean(values) for kind, values in seconds.items()}
    print(f"\n== cost of copies every {copies} steps, {turns} runs of each kind in turn")
    for name, values in (("median", medians), ("mean without the slowest 5 %", means)):
        print(
            f"a step, {name}: {1e3 * values[False]:.2f} ms without and {1e3 * values[True]:.2f} ms with copies: "
            f"{values[True] / values[False] - 1:+.2%}"
        )
    print(
        "steps behind a copy against the others of the same run, as a share of all: "
        f"{', '.join(f'{share:+.2%}' for share in shares)}"
    )
    print(f"losses of these runs are {'equal to the bit' if same else 'DIFFERENT'}")
    return 0 if same else 1


def copy_share(steps: dict[int, float], copies: int, every: int) -> float:
    """By how much the steps of a run are longer than those that no copy touches: the first two behind a copy are touched,
    as it is snapshot before the first and arrives in these. Steps beside a checkpoint are left out."""
    touched: dict[bool, list[float]] = {False: [], True: []}
    for step, seconds in steps.items():
        if 0 < (step - 1) % every < copies:
            continue
        touched[(step - 1) % copies < TOUCHED_STEPS].append(seconds)
    quiet = _trimmed_mean(touched[False])
    return (_trimmed_mean(touched[True]) - quiet) * TOUCHED_STEPS / copies / quiet


def _trimmed_mean(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: int(0.95 * len(values))])


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
