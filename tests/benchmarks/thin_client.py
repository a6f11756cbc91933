"""`python -m tests.benchmarks.thin_client`: the client and each extra on disk, and how long the command takes to answer.

A fresh virtual environment each for the client alone, with `server` and with `worker`, installed from this checkout with the
versions of constraints.txt: gigabytes are downloaded and thrown away. Prints a table; keeps nothing.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
EXTRAS = ("", "server", "worker")
"""Installed each for itself; the empty one is the client alone."""
PLANNING_EXTRA = "server"
STAGES, MICROBATCHES = 32, 256
RUNS = 9
SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Cost:
    """Medians of RUNS runs after a first one, in seconds of the clock and of processors."""

    wall_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.wall_s:.2f} s ({self.cpu_s:.2f} s of a processor)"


@dataclass(frozen=True)
class Installed:
    """An environment: the extra, its packages on disk in bytes, seconds of the installation, and costs of commands."""

    extra: str
    size_bytes: int
    install_s: float
    version: Cost
    plan: Cost | None


def pipeline_spec() -> dict[str, object]:
    """A chain of STAGES equal stages on a mesh each, with transfers of half a forward."""
    stage = {
        "forward_s": 0.002,
        "backward_input_s": 0.002,
        "backward_weight_s": 0.002,
        "activation_bytes": 1,
    }
    edge = {"forward_s": 0.001, "backward_s": 0.001}
    return {
        "microbatches": MICROBATCHES,
        "schedule": SCHEDULE,
        "meshes": [{"name": f"mesh{k}"} for k in range(STAGES)],
        "stages": [{"name": f"stage{k}", "mesh": f"mesh{k}", **stage} for k in range(STAGES)],
        "edges": [{"source": f"stage{k}", "target": f"stage{k + 1}", **edge} for k in range(STAGES - 1)],
    }


def folder_size(folder: Path) -> int:
    """Bytes of the regular files below, each once however many names it has; links are not followed."""
    sizes = {}
    for place, _, names in os.walk(folder):
        for name in names:
            found = (Path(place) / name).lstat()
            sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def cost_of(command: Sequence[str], folder: Path, runs: int = RUNS) -> Cost:
    """A whole process, again and again in `folder`; the first run, which fills caches, does not count."""
    walls, processors = [], []
    for _ in range(runs + 1):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        walls.append(time.monotonic() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processors.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
            )
    return Cost(median(walls[1:]), median(processors[1:]))


def install(extra: str, folder: Path) -> Installed:
    """Make an environment in `folder` with the package and `extra`, and measure it."""
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    wanted = f"{ROOT}[{extra}]" if extra else str(ROOT)
    began = time.monotonic()
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), wanted], check=True)
    install_s = time.monotonic() - began
    slotline = str(environment / "bin" / "slotline")
    spec = folder / "spec.json"
    spec.write_text(json.dumps(pipeline_spec()))
    version = cost_of([slotline, "--version"], folder)
    plan = cost_of([slotline, "plan", str(spec)], folder) if extra == PLANNING_EXTRA else None
    return Installed(extra, folder_size(environment / "lib"), install_s, version, plan)


def table(rows: Sequence[Installed]) -> str:
    """The environments as a Markdown table."""
    lines = [
        f"| `pip install` | size | installed in | `slotline --version` | `slotline plan`, {STAGES} × {MICROBATCHES} |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        wanted = f"`.[{row.extra}]`" if row.extra else "`.`"
        plan = "–" if row.plan is None else str(row.plan)
        size = f"{row.size_bytes / 1e6:,.0f} MB"
        lines.append(f"| {wanted} | {size} | {row.install_s:.0f} s | {row.version} | {plan} |")
    return "\n".join(lines)


def main() -> None:
    rows = []
    for extra in EXTRAS:
        with tempfile.TemporaryDirectory(prefix="slotline-thin-") as folder:
            rows.append(install(extra, Path(folder)))
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}; medians of {RUNS} runs"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
