"""The first hour on a machine with GPUs: `make gpu-check` runs all checks in their order and writes one report."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu_check.runner import (
    ROOT,
    Check,
    CommandResult,
    Figure,
    Finding,
    Row,
    module,
    report_text,
    run_checks,
)

_JUNIT = Path(tempfile.gettempdir()) / f"slotline-gpu-check-{os.getpid()}.xml"


def read_pytest(result: CommandResult) -> Finding:
    """The numbers of pytest's tests. A run in which a test was skipped has not shown what it is for."""
    try:
        suite = ElementTree.parse(_JUNIT).getroot().find("testsuite")
        count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
    except (OSError, ElementTree.ParseError, AttributeError, TypeError):
        return Finding(failure=f"pytest ended with status {result.status} and wrote no results")
    figures = (
        Figure("tests", str(count["tests"]), "tests marked gpu that pytest found below tests/worker"),
        Figure("skipped", str(count["skipped"]), "a GPU is there: none may be skipped"),
    )
    reasons = {skip.get("message", "") for skip in suite.iter("skipped")}
    if result.status != 0:
        return Finding(
            figures, f"{count['failures']} tests failed, {count['errors']} had errors (pytest -m gpu)"
        )
    if count["skipped"] or not count["tests"]:
        return Finding(
            figures,
            f"{count['skipped']} of {count['tests']} tests were skipped: {'; '.join(sorted(reasons))}",
        )
    return Finding(figures)


_ROW = re.compile(r"^\| ([^|]+) \| ([\d.]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
_FAILED_ROW = re.compile(r"^\| ([^|]+) \| failed: (.*?) \|", re.MULTILINE)


def read_overlap(result: CommandResult) -> Finding:
    """The rows of gpu_overlap's table; a failure where one failed or there are none."""
    figures = [
        Figure("costs", line.strip(), "as the benchmark measured them: its plans take these")
        for line in re.findall(r"^(?:F, I, W ms|transfer ).*$", result.output, re.MULTILINE)
    ]
    for label, step_ms, planned_ms, ratio in _ROW.findall(result.output):
        planned = "not planned by us" if ratio == "-" else f"planned {planned_ms} ms, {ratio} times as long"
        figures.append(Figure(label, f"{step_ms} ms a step", planned))
    if failed := _FAILED_ROW.findall(result.output):
        return Finding(tuple(figures), "; ".join(f"{label}: {error}" for label, error in failed))
    if result.status != 0 or not _ROW.search(result.output):
        return Finding(tuple(figures), f"gpu_overlap ended with status {result.status} and measured no row")
    return Finding(tuple(figures))


def overlap_command(gpus: int) -> list[str]:
    """gpu_overlap; several stages share one GPU by CUDA MPS."""
    return [*module("tests.benchmarks.gpu_overlap")(gpus), *(["--mps"] if gpus == 1 else [])]


_PYTEST = module(
    "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={_JUNIT}", "tests/worker"
)

CHECKS = (
    Check(
        "machine",
        "Versions, driver, topology and shared memory are such that torch finds its GPUs",
        module("tests.gpu_check.machine", "facts"),
        120,
    ),
    Check(
        "NCCL",
        "torch and cupy load one and the same NCCL",
        module("tests.gpu_check.machine", "nccl"),
        120,
    ),
    Check(
        "tests", "What is tested on recording fakes elsewhere passes on the GPU", _PYTEST, 2400, read_pytest
    ),
    Check(
        "lanes",
        "Lanes of one worker do not wait for each other, and the watch can ask behind a full launch queue",
        module("tests.gpu_check.lanes"),
        300,
    ),
    Check(
        "communicators",
        "Memory, threads and shared memory that NCCL takes for its communicators",
        module("tests.gpu_check.connections", "communicators"),
        900,
    ),
    Check(
        "bandwidth",
        "Bandwidth of a pair of GPUs by the number of NCCL's channels, and what a waiting receive takes of compute",
        module("tests.gpu_check.connections", "bandwidth"),
        900,
        least_gpus=2,
    ),
    Check(
        "losses",
        "Losses are those of the plain loop: bf16, tensor 2, data 2, sharded, fp16 with an overflow",
        module("tests.gpu_check.jobs", "losses"),
        2400,
    ),
    Check(
        "faults",
        "A killed and a stopped worker, a receive whose peer never sends and an illegal address end the others in time, "
        "and the GPU is free afterwards",
        module("tests.gpu_check.jobs", "faults"),
        1500,
    ),
    Check(
        "checkpoint",
        "A job that resumes from its checkpoint goes on as the one that was not interrupted",
        module("tests.gpu_check.jobs", "checkpoint"),
        1500,
    ),
    Check(
        "overlap",
        "Steps of 1F1B, eager 1F1B, zero bubble and auto beside their plans and torch's schedules",
        overlap_command,
        3600,
        read_overlap,
    ),
)
"""All checks, each after those that it builds upon."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, default=ROOT / "gpu-check.md", help="the file of the report")
    parser.add_argument("--from", dest="first", choices=[check.name for check in CHECKS[1:]],
                        help="go on at this check, after the first")  # fmt: skip
    options = parser.parse_args()
    heading = {
        "begun": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "host": platform.node(),
        "commit": _commit(),
    }

    def write(rows: list[Row]) -> None:
        options.report.write_text(report_text(rows, heading))
        row = next(row for row in reversed(rows) if row.state != "not run")
        print(f"{row.check.name}: {row.state}" + (f": {row.finding.failure}" if row.finding.failure else ""))

    names = [check.name for check in CHECKS]
    begin = names.index(options.first) if options.first else 1
    if begin > 1:
        heading["left out by --from"] = ", ".join(names[1:begin])
    passed = run_checks([CHECKS[0], *CHECKS[begin:]], report=write)
    print(f"report: {options.report}")
    return 0 if passed else 1


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git repository"


if __name__ == "__main__":
    sys.exit(main())
