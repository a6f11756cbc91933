"""Starts what is measured: the control plane on SQLite or on a PostgreSQL of its own, and a Ray of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]


@dataclass
class Served:
    """A control plane in a process of its own; `told` says what happened in it since it was last asked."""

    url: str
    process: subprocess.Popen[str]

    def told(self) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@contextlib.contextmanager
def served(database_url: str, folder: Path, *, accelerators: int) -> Iterator[Served]:
    """A control plane with this database, which is migrated first."""
    command = [sys.executable, "-m", "tests.benchmarks.service.served", database_url, folder, accelerators]
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the control plane ended with code {process.wait()}: its messages are above")
        yield Served(json.loads(line)["url"], process)
        process.stdin.close()
        process.wait(30)
    finally:
        process.kill()
        process.wait()


def processor_s_of_session(session_id: int) -> float:
    """Processor time of all processes of a session (Linux), those that ended and were waited for too."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
