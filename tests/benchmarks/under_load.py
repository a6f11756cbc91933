"""Trains for an hour on a cluster that is overloaded, loses packets and freezes: no healthy attempt may end.

`python -m tests.benchmarks.under_load` (Linux, root; nftables, PostgreSQL): Ray nodes with networks of their own
(tests/cluster/networked_ray.py), one packet in a hundred dropped in each, and `--load` processes that only compute. One job
trains all the time, small ones start and end beside it. Every half minute or so a worker, a driver or the control plane is
stopped for 20 s, and every ten minutes the database for two minutes. No fault here is one that an attempt has to end for.
Exit status 1 where an attempt ended before its job did, where a step is missing or twice, or a loss is not the plain loop's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.orchestrator.ray.local_ray import free_ports
from tests.benchmarks.overlap_net import Network
from tests.cluster.networked_ray import NetworkedRay, networked, process_title
from tests.end_to_end.conftest import FINAL, Server, job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until
from tests.service.conftest import create_postgres_database
from tests.service.postgres import private_postgres

STOPPED_S = 20.0
DATABASE_AWAY_S = 120.0
DATABASE_EVERY_S = 600.0
SMALL_STEPS = 40
LIMIT_S = 900.0
"""The longest that a job may take to train its next step."""
_LOSSES = "table ip loss {\n chain in {\n type filter hook input priority 0;\n numgen random mod 100 < 1 drop\n }\n}\n"


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def lose_packets(net: Network) -> None:
    """Drop one of a hundred packets that arrive in each namespace; netem is not in every kernel."""
    for name in net.names:
        subprocess.run(["ip", "netns", "exec", name, "nft", "-f", "-"], input=_LOSSES, text=True, check=True)


def stop_for(processes: list[psutil.Process], seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long."""
    for number, pause in ((signal.SIGSTOP, seconds), (signal.SIGCONT, 0.0)):
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        time.sleep(pause)


class Hour:
    """The cluster, its control plane and database, and the jobs on it."""

    def __init__(self, ray: NetworkedRay, server: Server, folder: Path, database: Path) -> None:
        self.ray, self.server, self.folder, self.database = ray, server, folder, database
        self.jobs: dict[str, dict[str, Any]] = {}

    def submit(self, name: str, steps: int) -> str:
        spec = job_spec("gpt", resources={"meshes": 2, "device": "cpu"}) | {"name": name}
        spec["pipeline"] = {"stages": 2, "schedule": "auto"}
        spec["training"] |= {"steps": steps, "clip_grad_norm": None}
        spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos of its own: both loops stay together
        spec["checkpoint"] = {"uri": str(self.folder / name), "every_steps": 50, "keep": 2}
        spec["retry"] = {"infrastructure": -1}
        job_id = self.asked(lambda: self.server.submit(spec))
        self.jobs[job_id] = spec
        return job_id

    def asked(self, question: Callable[[], Any]) -> Any:
        """The answer of the control plane, as soon as it has one: its database may be away."""
        answer: list[Any] = []

        def is_answered() -> bool:
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                answer.append(question())
            return bool(answer)

        until(is_answered, "no answer of the control plane", every_s=0.5, limit_s=LIMIT_S)
        return answer[0]

    def job(self, job_id: str) -> dict[str, Any]:
        return self.asked(lambda: self.server.job(job_id))

    def draw(self, draw: random.Random) -> tuple[str, list[psutil.Process]]:
        """What is stopped next."""
        drivers = [p for p in psutil.process_iter() if "worker.driver" in process_title(p)]
        kinds = {"worker": self.ray.workers(), "driver": drivers, "control plane": self._control_plane()}
        kind = draw.choice([kind for kind, processes in kinds.items() if processes])
        return kind, kinds[kind] if kind == "control plane" else [draw.choice(kinds[kind])]

    def _control_plane(self) -> list[psutil.Process]:
        (serving,) = (p for p in psutil.Process().children() if "service.cli serve" in process_title(p))
        return [serving, *serving.children(recursive=True)]

    def database_processes(self) -> list[psutil.Process]:
        server = next(p for p in psutil.process_iter() if str(self.database) in process_title(p))
        return [server, *server.children(recursive=True)]


def run(hour: Hour, seconds: float, draw: random.Random) -> Counter[str]:
    """Disturb for so long, and end the jobs that still train; how often each kind of process was stopped."""
    began = time.monotonic()
    long = hour.submit("long", 1_000_000)
    small = hour.submit("small-1", SMALL_STEPS)
    done, stopped = Counter[str](), Counter[str]()
    away_at = began + DATABASE_EVERY_S / 2
    while time.monotonic() < began + seconds:
        if time.monotonic() > away_at:
            stop_for(hour.database_processes(), DATABASE_AWAY_S)
            stopped["database"] += 1
            away_at += DATABASE_EVERY_S
        kind, processes = hour.draw(draw)
        stop_for(processes, STOPPED_S)
        stopped[kind] += 1
        time.sleep(draw.uniform(1.0, 20.0))
        if (job := hour.job(small))["state"] in FINAL:
            done[job["state"]] += 1
            small = hour.submit(f"small-{sum(done.values()) + 1}", SMALL_STEPS)
        step = hour.job(long)["progress"]["step"]
        print(
            f"{time.monotonic() - began:5.0f} s, load {os.getloadavg()[0]:4.1f}: step {step}, small jobs {dict(done)}, "
            f"stopped {dict(stopped)}",
            flush=True,
        )
    last = hour.job(long)["progress"]["step"]
    until(lambda: hour.job(long)["progress"]["step"] > last, lambda: hour.job(long), limit_s=LIMIT_S)
    for job_id in (long, small):
        hour.asked(lambda job_id=job_id: hour.server.client.post(f"/api/v1/jobs/{job_id}/cancel"))
    return stopped


def verdict(hour: Hour, stopped: Counter[str]) -> int:
    """Print what came of it; 0 where that is nothing."""
    ended, wrong, steps_of_all, worst = 0, [], 0, 0.0
    for job_id, spec in hour.jobs.items():
        job = hour.server.wait(job_id, limit_s=LIMIT_S)
        for attempt in job["attempts"][:-1] if job["state"] != "FAILED" else job["attempts"]:
            ended += 1
            print(
                f"{spec['name']}: attempt {attempt['number']} ended: {attempt['reason']}: {attempt['message']}"
            )
        steps = hour.server.steps(job_id)
        if [step["step"] for step in steps] != list(range(1, len(steps) + 1)):
            wrong.append(spec["name"])
            continue
        steps_of_all += len(steps)
        losses = plain_losses({**spec, "training": spec["training"] | {"steps": len(steps)}})
        for step, loss in zip(steps, losses, strict=True):
            worst = max(worst, abs(step["loss"] / loss - 1))
    print(
        f"{len(hour.jobs)} jobs, {steps_of_all} steps, stopped {dict(stopped)}: {ended} attempts ended; steps missing or "
        f"twice in {wrong or 'no job'}; losses apart by {worst:.1e} at most"
    )
    return 0 if not ended and not wrong and worst < 1e-3 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=25, help="processes that compute beside it")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if shutil.which("nft") is None:
        raise SystemExit("nft is not installed (Debian package nftables): no packet would be lost")
    with (
        tempfile.TemporaryDirectory() as folder,
        private_postgres(durable=False) as postgres,
        networked() as ray,
    ):
        (port,) = free_ports(1)
        database = {"SLOTLINE_DATABASE_URL": create_postgres_database(postgres)}
        with Server(Path(folder), ray.environment(port) | database, port) as server:
            ray.wait_until_known(server.client)
            lose_packets(ray.net)
            hour = Hour(ray, server, Path(folder), Path(postgres.partition("host=")[2]))
            with busy(options.load):
                stopped = run(hour, 60 * options.minutes, random.Random(options.seed))
            return verdict(hour, stopped)


if __name__ == "__main__":
    sys.exit(main())
