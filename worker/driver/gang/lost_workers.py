"""Says why a worker was lost, by the crash report that it left on its node, and ends what is left of processes.

What is of the driver's own node needs no process of Ray, which may have to start first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.contract.failures import (
    AttemptFailure,
    CrashReport,
    as_failure,
    read_crash_report,
    remove_crash_report,
)
from worker.contract.reasons import Reason
from worker.machine.node import WorkerAddress, cluster_nodes, end_mps_clients, own_node_id

log = logging.getLogger(__name__)

KILL_GRACE_S = 3.0
_CRASH_REPORT_LIMIT_S = (
    30.0  # of all together, on nodes that answer: a process of Ray may have to start first
)
WORKER_LOST_ERRORS = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.ObjectLostError,
)


def call_failure(error: Exception, worker: str, what: str) -> AttemptFailure:
    """The failure of an actor's call: the error that it raised, or the loss of `worker` during `what`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, AttemptFailure) else as_failure(cause, Reason.INTERNAL)
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return AttemptFailure(Reason.SLOT_STALLED, f"{what}: no answer from {worker}")
    if isinstance(error, WORKER_LOST_ERRORS):
        return AttemptFailure(Reason.WORKER_LOST, f"{what}: {worker} is gone: {one_line(error)}")
    return as_failure(error, Reason.INTERNAL)


class CrashReports:
    """The crash reports of workers at these addresses, each read on the worker's node."""

    def __init__(self, addresses: Sequence[WorkerAddress]) -> None:
        self._addresses = addresses
        self._requested: dict[int, ray.ObjectRef] = {}
        self._read: dict[int, CrashReport | None] = {}

    def request(self, index: int) -> None:
        """Begin to read the report of worker `index`, without waiting for it; nothing where it never came up."""
        if index in self._requested or index in self._read or index >= len(self._addresses):
            return
        address = self._addresses[index]
        if address.node_id == own_node_id():
            self._read[index] = read_crash_report(address.process_id)
        else:
            self._requested[index] = _on_node(address.node_id, _read_crash_report).remote(address.process_id)

    def added_to(self, failures: Sequence[tuple[int, AttemptFailure]]) -> list[AttemptFailure]:
        """The failures by numbers of workers, those of lost workers with the reports that their processes left."""
        for index, failure in failures:
            if failure.reason is Reason.WORKER_LOST:
                self.request(index)
        refs = list(self._requested.values())
        done, late = (
            ray.wait(refs, num_returns=len(refs), timeout=_CRASH_REPORT_LIMIT_S) if refs else ([], [])
        )
        for ref in late:
            ray.cancel(ref, force=True)
        return [self._added_to(index, failure, done) for index, failure in failures]

    def _added_to(self, index: int, failure: AttemptFailure, done: Sequence[ray.ObjectRef]) -> AttemptFailure:
        if failure.reason is not Reason.WORKER_LOST:
            return failure
        report, ref = self._read.get(index), self._requested.get(index)
        if ref in done:
            try:
                report = ray.get(ref)
            except Exception as error:  # the node may be gone by now
                log.debug("no crash report of worker %s: %s", index, error)
        return failure if report is None else add_crash_report(failure, report)


def add_crash_report(failure: AttemptFailure, report: CrashReport) -> AttemptFailure:
    """`failure` with the action and the native error of a process that left `report`."""
    where = f" in {report.action}" if report.action else ""
    if report.signal is None:
        message = f"{failure.message}; it was{where}" if where else failure.message
        return AttemptFailure(failure.reason, message, failure.details)
    return AttemptFailure(
        failure.reason,
        f"{failure.message}; its process died in native code ({report.signal}){where}: an operator of torch or of "
        "another library that the model calls crashed, which is no error that Python sees; the log has the Python "
        "stack, whose first lines are the call",
        f"{failure.details}\n{report.stack}".strip(),
    )


def end_left_over(addresses: Iterable[WorkerAddress], *, lost_nodes: set[str]) -> None:
    """End what is left of the workers' processes on their nodes but those that are lost, and remove their crash reports: Ray
    asks a process to end, and one that is stopped never answers."""
    by_node: dict[str, list[int]] = {}
    for address in addresses:
        by_node.setdefault(address.node_id, []).append(address.process_id)
    if not by_node:
        return
    alive = {node.node_id for node in cluster_nodes() if node.alive} - lost_nodes
    here = by_node.pop(own_node_id(), [])
    refs = [
        _on_node(node_id, _kill_processes).remote(ids, KILL_GRACE_S)
        for node_id, ids in by_node.items()
        if node_id in alive
    ]
    killed = []
    with _logged("could not look for left-over worker processes"):
        killed += end_processes(here, KILL_GRACE_S)
    done, late = ray.wait(refs, num_returns=len(refs), timeout=KILL_GRACE_S + 10.0) if refs else ([], [])
    for ref in late:
        ray.cancel(ref, force=True)
    for ref in done:
        with _logged("could not look for left-over worker processes"):
            killed += ray.get(ref)
    if killed:
        log.warning("worker processes %s did not end when asked and were killed", killed)


def end_processes(process_ids: Sequence[int], grace_s: float) -> list[int]:
    """Wait until the processes of this node's workers are gone; kill and return the remaining ones."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(_is_ray_worker(p) for p in process_ids):
        time.sleep(0.05)
    left = [p for p in process_ids if _is_ray_worker(p)]
    end_mps_clients(left)
    for process_id in left:
        os.kill(process_id, signal.SIGKILL)
    for process_id in process_ids:
        remove_crash_report(process_id)
    return left


_read_crash_report = ray.remote(max_retries=0)(read_crash_report)
_kill_processes = ray.remote(max_retries=0)(end_processes)


def _on_node(node_id: str, task: Any) -> Any:
    """The task on that node, for which Ray may have to start a process; what is of this node needs none."""
    return task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log what the body raises."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


def _is_ray_worker(process_id: int) -> bool:
    """True while this is a Ray worker's process; ids are reused, so its command line is read."""
    try:
        with open(f"/proc/{process_id}/cmdline", "rb") as file:
            command = file.read()
    except OSError:
        return False
    return b"ray::" in command or b"default_worker.py" in command


def one_line(error: BaseException) -> str:
    """The message of an error without its lines, 500 characters of it at most."""
    return " ".join(str(error).split())[:500]
