"""Breaks a cluster in every way that one machine can, and asks how each fault was noticed, named and survived.

`make chaos` (Linux, root): Ray nodes with networks of their own (tests/cluster/networked_ray.py) and `slotline serve`.
One job trains through all faults from which a job goes on, in an order that the seed draws, as many as fit in `--minutes`;
faults that end a job have one each. Of two at once the second comes up to three seconds after the first. A fault is named
right where the attempt's reason is the one expected, and its message names the node that was hit. At the end every step
stands in the record once, with the loss of a plain loop, and no worker is left.
Exit status 1 where that is not so, or where a healthy attempt was ended.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from service.orchestrator.ray.local_ray import free_ports
from tests.cluster.networked_ray import RATE, NetworkedRay, networked, process_title
from tests.end_to_end.conftest import Server, job_spec
from tests.end_to_end.test_jobs import plain_losses
from tests.polling import until

LIMIT_S = 150.0
"""The longest that a fault may take to be noticed, and the job to train again."""
CUT_S = 8.0
"""Length of an interruption that ends no attempt."""
LIMITS = {
    "SLOTLINE_LIMIT_SLOT_FLOOR_S": "15",
    "SLOTLINE_LIMIT_STEP_FLOOR_S": "40",
    "SLOTLINE_LIMIT_CHECKPOINT_S": "60",
}
"""Shorter than by default, for the faults that only a limit finds."""


class NothingToBreakError(Exception):
    """What a fault needs is not there."""


@dataclass
class Site:
    """The cluster, its control plane, and the job that trains through all faults."""

    ray: NetworkedRay
    server: Server
    folder: Path
    """A file system of its own, with the job's checkpoints."""
    job_id: str = ""
    cleanup: list[Callable[[], None]] = field(default_factory=list)

    def spec(self, name: str, **changes: Any) -> dict[str, Any]:
        spec = job_spec("gpt", **changes) | {"name": name}
        args = {"layers": 4, "width": 32, "heads": 2, "length": 32, "order": str(self.order(name))}
        spec["model"] = {"factory": "tests.benchmarks.chaotic:build", "args": args}
        spec["training"] |= {"steps": 1_000_000, "clip_grad_norm": None}
        spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos of its own: both loops stay together
        meshes = 4 if name == "survivor" else 2
        spec["pipeline"] = {"stages": meshes, "schedule": "auto"}
        spec["resources"] = {"meshes": meshes, "device": "cpu"}
        spec["retry"] = {"infrastructure": -1}
        return spec

    def order(self, name: str) -> Path:
        return self.folder.parent / f"order-{name}"  # the disk may be full

    def attempt(self, job_id: str = "") -> dict[str, Any]:
        return self.server.job(job_id or self.job_id)["attempts"][-1]

    def step(self, job_id: str = "") -> int:
        return self.server.job(job_id or self.job_id)["progress"]["step"]

    def train(self, steps: int, job_id: str = "") -> None:
        """Wait until the job has trained so many more steps."""
        wanted = self.step(job_id) + steps
        until(
            lambda: self.step(job_id) >= wanted,
            lambda: self.server.job(job_id or self.job_id),
            every_s=0.1,
            limit_s=LIMIT_S,
        )

    def include_nodes(self) -> None:
        """Put back the nodes that are quarantined, as an operator does who has mended them."""
        for node in self.server.client.get("/api/v1/nodes").raise_for_status().json()["items"]:
            if node["state"] == "QUARANTINED":
                change = self.server.client.put(f"/api/v1/nodes/{node['name']}", json={"state": "READY"})
                change.raise_for_status()

    def nodes_in_use(self) -> list[int]:
        hosts = {mesh["node"] for mesh in self.attempt()["placed"]}
        return [k for k, host in enumerate(self.ray.hosts) if host in hosts]

    def driver(self) -> psutil.Process:
        """The driver of the last attempt, which runs on the head; it may have run the attempts before that one too."""
        found = []
        for process in psutil.process_iter():
            if "worker.driver" in process_title(process):
                with contextlib.suppress(psutil.Error):
                    own = process.environ().get("SLOTLINE_ATTEMPT_ID", "").startswith(f"{self.job_id}-")
                    if own and process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        if not found:
            raise NothingToBreakError(f"no driver of {self.job_id}")
        return max(found, key=psutil.Process.create_time)


@dataclass(frozen=True)
class Injected:
    """A fault as it was made: the words of which the attempt's message must have one, and what puts things right."""

    names: tuple[str, ...] = ()
    mend: Callable[[], None] = lambda: None


def kill_worker(site: Site, draw: random.Random) -> Injected:
    k, victim = _draw_worker(site, draw)
    victim.kill()
    return Injected((site.ray.hosts[k],))


def freeze_worker(site: Site, draw: random.Random) -> Injected:
    k, victim = _draw_worker(site, draw)
    victim.send_signal(signal.SIGSTOP)
    return Injected((site.ray.hosts[k],))


def kill_driver(site: Site, draw: random.Random) -> Injected:
    site.driver().kill()
    return Injected()


def lose_node(site: Site, draw: random.Random) -> Injected:
    k = draw.choice(site.nodes_in_use())
    site.ray.kill(k)
    return Injected((site.ray.hosts[k],), lambda: site.ray.restart(k))


def cut_for_good(site: Site, draw: random.Random) -> Injected:
    k = draw.choice(site.nodes_in_use())
    site.ray.net.set_connected(k, False)

    def mend() -> None:
        site.ray.net.set_connected(k, True)
        time.sleep(1)
        site.ray.kill(k)  # a raylet that Ray took for dead ends; a pod would be started again
        site.ray.restart(k)

    return Injected((site.ray.hosts[k],), mend)


def cut_for_a_while(site: Site, draw: random.Random) -> Injected:
    k = draw.choice(site.nodes_in_use())
    site.ray.net.set_connected(k, False)
    time.sleep(CUT_S)
    site.ray.net.set_connected(k, True)
    return Injected()


def slow_link(site: Site, draw: random.Random) -> Injected:
    k = draw.choice(site.nodes_in_use())
    site.ray.net.set_rate_of(k, RATE / 10)
    time.sleep(CUT_S)
    return Injected(mend=lambda: site.ray.net.set_rate_of(k, RATE))


def freeze_worker_for_a_while(site: Site, draw: random.Random) -> Injected:
    _, victim = _draw_worker(site, draw)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(CUT_S)
    victim.send_signal(signal.SIGCONT)
    return Injected()


def lose_control_plane(site: Site, draw: random.Random) -> Injected:
    site.server.kill()
    time.sleep(draw.uniform(0.5, 5.0))
    site.server.start()
    return Injected()


def fill_disk(site: Site, draw: random.Random) -> Injected:
    filler = site.folder / "filler"
    with open(filler, "wb") as file:
        try:
            while True:
                file.write(b"0" * (1 << 20))
                file.flush()
        except OSError:
            pass
    return Injected(("No space left", "ENOSPC"), lambda: filler.unlink())


def damage_newest_checkpoint(site: Site, draw: random.Random) -> Injected:
    """Cut the newest checkpoint's files short, then kill a worker: the one before has to be found."""
    folders = [path for path in (site.folder / "checkpoints").rglob("step-*") if path.is_dir()]
    for file in max(folders, key=lambda path: path.name).rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    return kill_worker(site, draw)


def ordered(kind: str, *names: str) -> Callable[[Site, random.Random], Injected]:
    def inject(site: Site, draw: random.Random) -> Injected:
        site.order("survivor").write_text(kind)
        return Injected(names)

    return inject


def _draw_worker(site: Site, draw: random.Random) -> tuple[int, psutil.Process]:
    """A training actor, with the number of its node."""
    workers = [(k, worker) for k in site.nodes_in_use() for worker in site.ray.workers(k)]
    if not workers:
        raise NothingToBreakError("no worker trains")
    return draw.choice(workers)


@dataclass(frozen=True)
class Kind:
    """A kind of fault that a job survives, with the reasons that are right for it; none: no attempt may end."""

    inject: Callable[[Site, random.Random], Injected]
    reasons: tuple[str, ...] = ()


SURVIVED = {
    "worker killed": Kind(kill_worker, ("WORKER_LOST",)),
    "worker frozen": Kind(freeze_worker, ("SLOT_STALLED", "WORKER_LOST")),
    "worker frozen for a while": Kind(freeze_worker_for_a_while),
    "driver killed": Kind(kill_driver, ("DRIVER_LOST",)),
    "node lost": Kind(lose_node, ("NODE_LOST",)),
    "link cut for good": Kind(cut_for_good, ("NODE_LOST",)),
    "link cut for a while": Kind(cut_for_a_while),
    "link ten times slower": Kind(slow_link),
    "control plane killed": Kind(lose_control_plane),
    "disk full at a save": Kind(fill_disk, ("CHECKPOINT_FAILED",)),
    "newest checkpoint damaged": Kind(damage_newest_checkpoint, ("WORKER_LOST",)),
    "user code exits": Kind(ordered("exits"), ("WORKER_LOST",)),
    "user code hangs": Kind(ordered("hangs"), ("SLOT_STALLED",)),
    "accelerator failed": Kind(ordered("accelerator"), ("ACCELERATOR_FAILED",)),
}
ORDERED = {"user code exits", "user code hangs", "accelerator failed"}
FATAL = {"user code raises": ("raises", "USER_CODE_RAISED"), "wrong shape": ("shape", "USER_CODE_RAISED")}
"""What ends a job, with the order to its model, and the reason."""


@dataclass
class Outcome:
    """What came of one fault: the attempt's reason and message, and seconds until it was noticed and trained again."""

    kind: str
    right: bool
    reason: str | None = None
    message: str = ""
    noticed_s: float | None = None
    again_s: float | None = None


def survive(site: Site, name: str, draw: random.Random) -> Outcome:
    """Make a fault, or two at once, while the job trains, and wait until it trains again."""
    kinds = [SURVIVED[part] for part in name.split(AND)]
    reasons = [reason for kind in kinds for reason in kind.reasons]
    site.train(draw.randint(1, 30))
    time.sleep(draw.uniform(0.0, 1.0))
    before = site.attempt()["number"]
    began = time.monotonic()
    injected: list[Injected] = []
    try:
        for kind in kinds:
            if not injected:
                injected.append(kind.inject(site, draw))
                continue
            time.sleep(draw.uniform(0.0, 3.0))
            with contextlib.suppress(
                NothingToBreakError, psutil.NoSuchProcess
            ):  # the first fault was quicker
                injected.append(kind.inject(site, draw))
        if not reasons:
            site.train(5)
            number = site.attempt()["number"]
            reason = site.server.job(site.job_id)["attempts"][before - 1]["reason"]
            return Outcome(name, number == before, reason, again_s=time.monotonic() - began)

        def ended() -> dict[str, Any] | None:
            attempt = site.server.job(site.job_id)["attempts"][before - 1]
            return attempt if attempt["finished_at"] is not None else None

        attempt = until(ended, lambda: site.server.job(site.job_id), every_s=0.1, limit_s=LIMIT_S)
        noticed_s = time.monotonic() - began
        names = [made.names for made in injected]
        while injected:
            injected.pop().mend()
        site.train(5)
        named = any(not words or any(word in attempt["message"] for word in words) for words in names)
        return Outcome(
            name,
            attempt["reason"] in reasons and named,
            attempt["reason"],
            attempt["message"],
            noticed_s,
            time.monotonic() - began,
        )
    finally:
        for made in injected:
            made.mend()
        site.ray.wait_until_known(site.server.client)
        site.include_nodes()


def end(site: Site, name: str, draw: random.Random) -> Outcome:
    """Start a job of its own, and give its model the order that ends it."""
    order, reason = FATAL[name]
    spec = site.spec("fatal")
    job_id = site.server.submit(spec)
    site.train(draw.randint(2, 20), job_id)
    began = time.monotonic()
    site.order("fatal").write_text(order)
    job = site.server.wait(job_id, limit_s=LIMIT_S)
    attempt = job["attempts"][-1]
    right = (job["state"], attempt["reason"], len(job["attempts"])) == ("FAILED", reason, 1)
    return Outcome(name, right, attempt["reason"], attempt["message"], time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=10, help="faults of each kind")
    parser.add_argument("--pairs", type=int, default=0, help="times that two faults come at once")
    parser.add_argument("--minutes", type=float, default=30.0, help="no fault is made after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join([*SURVIVED, *FATAL]), help="separated by commas")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kinds = [name for name in options.kinds.split(",") if name]
    faults = [name for name in kinds for _ in range(options.moments)]
    faults += draw_pairs([name for name in kinds if name in SURVIVED], options.pairs, draw)
    draw.shuffle(faults)
    deadline = time.monotonic() + 60 * options.minutes
    os.environ.update(LIMITS)
    with (
        tempfile.TemporaryDirectory() as folder,
        small_disk(Path(folder) / "disk") as disk,
        networked() as ray,
    ):
        (port,) = free_ports(1)
        with Server(Path(folder), ray.environment(port), port) as server:
            ray.wait_until_known(server.client)
            return run(Site(ray, server, disk), faults, draw, deadline)


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 64 MiB at `place`; namespaces that were there before do not see it."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "chaos", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


AND = " and "
"""Between the names of two faults at once."""


def draw_pairs(kinds: list[str], number: int, draw: random.Random) -> list[str]:
    """Pairs of different kinds; of two orders to the model there is one file."""
    possible = [
        f"{one}{AND}{other}"
        for one, other in itertools.permutations(kinds, 2)
        if not {one, other} <= ORDERED and SURVIVED[one].reasons + SURVIVED[other].reasons
    ]
    return [draw.choice(possible) for _ in range(number)]


def run(site: Site, faults: list[str], draw: random.Random, deadline: float) -> int:
    """Make the faults, and compare the job's record with a plain loop's; 0 where everything is as it should be."""
    spec = site.spec("survivor")
    spec["checkpoint"] = {"uri": str(site.folder / "checkpoints"), "every_steps": 20, "keep": 3}
    site.job_id = site.server.submit(spec)
    outcomes = []
    for number, name in enumerate(faults, start=1):
        if time.monotonic() > deadline:
            print(f"{len(faults) - number + 1} faults are left for another run")
            break
        try:
            outcome = (end if name in FATAL else survive)(site, name, draw)
        except NothingToBreakError as error:  # an attempt that has just begun or ended
            print(f"{number:3d} left out {name}: {error}", flush=True)
            continue
        outcomes.append(outcome)
        seconds = [f"{s:.1f}" if s is not None else "-" for s in (outcome.noticed_s, outcome.again_s)]
        print(
            f"{number:3d} {'right' if outcome.right else 'WRONG'} {name}: {outcome.reason}, noticed {seconds[0]} s, "
            f"again {seconds[1]} s" + ("" if outcome.right else f"\n    {outcome.message}"),
            flush=True,
        )
    site.server.client.post(f"/api/v1/jobs/{site.job_id}/cancel").raise_for_status()
    job = site.server.wait(site.job_id)
    steps = site.server.steps(site.job_id)
    spec["training"]["steps"] = len(steps)
    whole = [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    losses = plain_losses(spec)
    worst = max(abs(step["loss"] / loss - 1) for step, loss in zip(steps, losses, strict=True))
    until(lambda: not site.ray.workers(), "workers that are left", every_s=0.2, limit_s=30)
    report(outcomes)
    print(
        f"{len(job['attempts'])} attempts, {len(steps)} steps, each once: {whole}; losses apart by {worst:.1e} at most"
    )
    return 0 if whole and worst < 1e-3 and all(outcome.right for outcome in outcomes) else 1


def report(outcomes: list[Outcome]) -> None:
    """Print a table by kind."""
    by_kind = defaultdict(list)
    for outcome in outcomes:
        by_kind["two at once" if AND in outcome.kind else outcome.kind].append(outcome)
    print(f"\n{'kind':28} {'n':>3} {'right':>5} {'noticed s':>16} {'trains again s':>16}")
    for name, found in sorted(by_kind.items()):
        spans = []
        for values in ([o.noticed_s for o in found], [o.again_s for o in found]):
            known = sorted(value for value in values if value is not None)
            spans.append(f"{statistics.median(known):.1f} ({known[-1]:.1f})" if known else "-")
        right = sum(outcome.right for outcome in found)
        print(f"{name:28} {len(found):3d} {right:5d} {spans[0]:>16} {spans[1]:>16}")
    print("(median, and the longest)")


if __name__ == "__main__":
    sys.exit(main())
