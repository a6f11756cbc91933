"""Requests and results of one-shot worker processes: the marked result line, and a process that ends in time.

A task reads its request from an environment variable or standard input and prints one JSON line behind a mark; other
output of the process and its libraries is skipped, and the last whole line counts. Light: no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.contract.codec import from_json, to_json
from worker.contract.failures import CrashReport, read_crash_report, remove_crash_report
from worker.contract.job import ACCELERATOR_TYPE_LABEL


def task_result(output: str, mark: str) -> dict[str, Any] | None:
    """The JSON object behind `mark` in the last line that has one whole; None where it has not come to its end."""
    for line in reversed(output.splitlines()):
        _, found, text = line.partition(mark)
        if not found:
            continue
        try:
            return json.loads(text)
        except ValueError:
            continue
    return None


@dataclass(frozen=True)
class EndedTask:
    """A task that has ended: its result (None: it had none), exit code, and the crash report of its process."""

    result: dict[str, Any] | None
    exit_code: int
    crash: CrashReport | None = None


def run_task(
    task: str,
    request: Mapping[str, Any],
    mark: str,
    *,
    limit_s: float,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> EndedTask:
    """Run `python -m worker.tasks task` with `request` on its standard input, in `folder`; what it prints to standard
    error appears on this process's. Raises TimeoutError, with the action it was in as text, after `limit_s` seconds.
    The process and those that it started are gone then."""
    with subprocess.Popen(
        [sys.executable, "-m", "worker.tasks", task],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(json.dumps(request), timeout=limit_s)
            return EndedTask(
                task_result(output, mark), process.returncode, crash=read_crash_report(process.pid)
            )
        except subprocess.TimeoutExpired:
            report = read_crash_report(process.pid)
            raise TimeoutError(report.action if report else "") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            remove_crash_report(process.pid)


_POOL_END_S = 5.0


def kill_pool(pool: ProcessPoolExecutor) -> None:
    """End a pool's processes at once, also in the middle of a call; calls that wait are cancelled."""
    # Until Python 3.14 (kill_workers) the executor has no public way to end a running call.
    processes, manager = list((pool._processes or {}).values()), pool._executor_manager_thread
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    # at its exit Python wakes the thread of each pool, and stumbles over the pipe that a thread has just closed
    if manager is not None:
        manager.join(_POOL_END_S)


SCALE_REQUEST_VARIABLE = "SLOTLINE_SCALE"
SCALE_RESULT_MARK = "SLOTLINE_SCALED "


@dataclass(frozen=True)
class Bundles:
    """`number` bundles of `amount` of one Ray resource each, which may lie on different nodes, of one accelerator type where
    they tell it."""

    resource: str
    amount: float
    number: int
    accelerator_type: str | None = None

    @property
    def bundle(self) -> dict[str, float]:
        """One of them, as Ray takes it."""
        return {self.resource: self.amount}

    @property
    def label_selector(self) -> dict[str, str]:
        """The labels of the nodes that each may lie on, as Ray takes them."""
        return {} if self.accelerator_type is None else {ACCELERATOR_TYPE_LABEL: self.accelerator_type}


@dataclass(frozen=True)
class ScaleRequest:
    """Bundles that a cluster is to have room for in all: those that are `held`, and of each gang that waits, in the order
    of their turns. Nothing of either: the cluster may shrink."""

    held: tuple[Bundles, ...] = ()
    gangs: tuple[Bundles, ...] = ()

    def to_json(self) -> str:
        """For the variable of the environment; `from_json` is its inverse."""
        return json.dumps(to_json(self))

    @classmethod
    def from_json(cls, text: str) -> ScaleRequest:
        """Inverse of `to_json`."""
        return from_json(cls, json.loads(text))


@dataclass(frozen=True)
class ScaleResult:
    """`autoscaler`: the cluster has one that answers. It takes the first `accepted` gangs, and a request for them
    `stands` until the next one; else Ray has none."""

    autoscaler: bool
    accepted: int = 0
    stands: bool = False


def read_scale_result(output: str) -> ScaleResult | None:
    """The result of a request; None where its process has not come to its end."""
    answer = task_result(output, SCALE_RESULT_MARK)
    return None if answer is None else from_json(ScaleResult, answer)


RELEASE_REQUEST_VARIABLE = "SLOTLINE_RELEASE"
RELEASE_RESULT_MARK = "SLOTLINE_RELEASED "


@dataclass(frozen=True)
class ReleaseRequest:
    """Jobs that have ended, whose keepers of copies are to end."""

    jobs: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(to_json(self))

    @classmethod
    def from_json(cls, text: str) -> ReleaseRequest:
        """Inverse of `to_json`."""
        return from_json(cls, json.loads(text))


@dataclass(frozen=True)
class ReleaseResult:
    """The names of the keepers that were ended."""

    keepers: tuple[str, ...]


def read_release_result(output: str) -> ReleaseResult | None:
    """The result of a release; None where its process has not come to its end."""
    answer = task_result(output, RELEASE_RESULT_MARK)
    return None if answer is None else from_json(ReleaseResult, answer)


CHECK_REQUEST_VARIABLE = "SLOTLINE_CHECK"
CHECK_RESULT_MARK = "SLOTLINE_CHECKED "
CHECK_LIMIT_S = 420.0
"""Of `python -m worker.tasks check`: its five steps have limits of their own, imports have the rest."""


@dataclass(frozen=True)
class JobProblem:
    """`field` of a job is wrong, and an attempt would end for `reason`. `local`: the machine lacks something that another
    may have, a file say. `details`: the traceback of what the job's own code raised, else ""."""

    field: str
    message: str
    reason: str
    local: bool = False
    details: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True)
class JobCheck:
    """The result of checking a job without accelerators: what is wrong, what could not be checked and why, and what was
    built or read. `samples` of the data and `tokens` of each, where they are known."""

    problems: tuple[JobProblem, ...] = ()
    notes: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    samples: int | None = None
    tokens: int | None = None


def read_check_result(output: str) -> JobCheck | None:
    """The result of a check; None where its process has not come to its end."""
    answer = task_result(output, CHECK_RESULT_MARK)
    return None if answer is None else from_json(JobCheck, answer)


def check_job_process(
    job: Mapping[str, Any], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> JobCheck:
    """Check `job` (the JSON of a JobSpec) in a process that sees no accelerator, started in `folder`, and imports as this
    one does. A check that does not come to its end has only a note, with the reason: nothing is known to be wrong."""
    paths = os.pathsep.join(path for path in sys.path if path)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        ended = run_task(
            "check",
            {"job": job},
            CHECK_RESULT_MARK,
            limit_s=CHECK_LIMIT_S,
            folder=folder,
            environment={"PYTHONPATH": paths, **(environment or {}), **hidden},
        )
    except TimeoutError as error:
        while_text = f" while {error}" if str(error) else ""
        return JobCheck(notes=(f"not checked: no answer within {CHECK_LIMIT_S:.0f} s{while_text}",))
    if ended.result is None:
        where = f" while {ended.crash.action}" if ended.crash and ended.crash.action else ""
        return JobCheck(
            notes=(f"not checked: its process ended without a result (exit code {ended.exit_code}){where}",)
        )
    return from_json(JobCheck, ended.result)


PROOF_RESULT_MARK = "SLOTLINE_PROOF "
"""`python -m worker.tasks verify` answers in a line of its output with this mark."""


REMOVAL_REQUEST_VARIABLE = "SLOTLINE_REMOVE"
REMOVAL_RESULT_MARK = "SLOTLINE_REMOVED "


@dataclass(frozen=True)
class RemovalRequest:
    """Folders of `job` below `uri`, by name; None: all that checkpoints and exports made. `in_use`: the job has not
    ended, and keeps the checkpoint that an attempt would go on from, and what is newer."""

    uri: str
    job: str
    folders: tuple[str, ...] | None = None
    in_use: bool = False


@dataclass(frozen=True)
class RemovalResult:
    """The outcome of a removal.

    `removed` are folders that were deleted, `refused` folders that stay, with the reason; `left` the steps of whole
    checkpoints that remain. `freed_bytes` were freed, and all checkpoints still hold `left_bytes`.
    """

    removed: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    left: tuple[int, ...] = ()
    freed_bytes: int = 0
    left_bytes: int = 0
    failed: str | None = None


def removal_requests_json(requests: Sequence[RemovalRequest]) -> str:
    """For the variable of the environment."""
    return json.dumps(to_json(requests))


def removal_requests_from_json(text: str) -> list[RemovalRequest]:
    """Inverse of `removal_requests_json`."""
    return [from_json(RemovalRequest, request, ignore_unknown=True) for request in json.loads(text)]


def read_removal_results(output: str) -> list[RemovalResult] | None:
    """The results of a removal, one for each request; None where the process has not come to its end."""
    answer = task_result(output, REMOVAL_RESULT_MARK)
    if answer is None:
        return None
    return [removal_result_from_json(one) for one in answer["jobs"]]


def removal_result_from_json(data: Mapping[str, Any]) -> RemovalResult:
    """A RemovalResult from its JSON object."""
    return from_json(RemovalResult, data)


EXPORT_REQUEST_VARIABLE = "SLOTLINE_EXPORT"
EXPORT_RESULT_MARK = "SLOTLINE_EXPORTED "
SAFETENSORS = "safetensors"
MERGED_MESSAGE = (
    "adapters are written alone: leave out `merged`, and merge them into their model with peft, by "
    "PeftModel.from_pretrained(model, folder).merge_and_unload()"
)
DCP_METADATA = ".metadata"  # what makes a folder one of torch.distributed.checkpoint


class ExportFailedError(ValueError):
    """There are no weights; the message says why."""


@dataclass(frozen=True)
class ExportRequest:
    """`uri` is the job's checkpoint.uri, `step` None the newest, `target` None a folder beside the checkpoints; of `format`
    there is SAFETENSORS alone, for from_pretrained, and of a model of peft the adapters, never `merged`."""

    uri: str
    job: str
    step: int | None = None
    target: str | None = None
    format: str = SAFETENSORS
    merged: bool = False

    def to_json(self) -> str:
        """For the variable of the environment; `from_json` is its inverse."""
        return json.dumps(to_json(self))

    @classmethod
    def from_json(cls, text: str) -> ExportRequest:
        """Inverse of `to_json`."""
        return from_json(cls, json.loads(text))


def read_export_result(output: str) -> Mapping[str, Any] | None:
    """The JSON of an ExportResult in the output of an export; None where the process has not come to its end.

    Raises ExportFailedError with the export's own message where it failed.
    """
    answer = task_result(output, EXPORT_RESULT_MARK)
    if answer is not None and "failed" in answer:
        raise ExportFailedError(answer["failed"])
    return answer
