"""LaunchCheck: a job is checked beside its launch, in a process of a node that offers its accelerators.

There files and packages are as the workers have them. The process yields to the launch, and nothing waits for it. What
it finds wrong ends the attempt, whatever phase that is in, also where steps are trained already: it names the field,
all that is wrong at once, and what no worker has tried yet. Must not know gangs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.contract.tasks import CHECK_LIMIT_S, JobCheck, check_job_process
from worker.driver.gang import CPU_RESOURCE

CAUSE_LIMIT_S = 10.0
"""A launch that fails waits so long for what its check has to say."""
_START_LIMIT_S = 60.0
"""For Ray to start the process of a task."""
_CANCEL_S = 5.0
_NOT_CHECKED = "the job was not checked beside its launch"
log = logging.getLogger(__name__)


class RunningCheck(Protocol):
    """A check that runs elsewhere."""

    def answer(self, wait_s: float) -> JobCheck | None:
        """Its result, once it has one, or notes why there is none; None where it takes longer than `wait_s`."""

    def end(self) -> None:
        """Stop it."""


class LaunchCheck:
    """The check of one attempt's job: `begin` starts it, and `raise_if_wrong` is asked again and again from then on.

    `start` starts the process, `note` reports what could not be checked."""

    def __init__(self, start: Callable[[], RunningCheck], note: Callable[[str], None]) -> None:
        self._start, self._note = start, note
        self._running: RunningCheck | None = None

    def begin(self) -> None:
        """Start the check, which goes on by itself."""
        self._running = self._start()

    def raise_if_wrong(self, wait_s: float = 0.0) -> None:
        """AttemptFailure with all that was found wrong, as soon as that is known; waits for it for `wait_s` at most."""
        running = self._running
        if running is None or (check := running.answer(wait_s)) is None:
            return
        self._running = None
        for text in check.checked:
            log.info("checked %s", text)
        for text in check.notes:
            self._note(text)
        if check.problems:
            details = "\n".join(problem.details for problem in check.problems if problem.details)
            raise AttemptFailure(
                Reason(check.problems[0].reason), "; ".join(map(str, check.problems)), details
            )

    def end(self) -> None:
        """Stop the check where it still runs."""
        running, self._running = self._running, None
        if running is not None:
            running.end()


def check_node(nodes: Collection[str], *, own: str, left_out: Collection[str]) -> str | None:
    """The node (Ray's id) on which a job is checked: the driver's own where it offers accelerators; None where none is
    left."""
    open_nodes = [node for node in nodes if node not in left_out]
    return own if own in open_nodes else min(open_nodes, default=None)


def start_check(
    spec: Mapping[str, Any], *, device: str, secrets: Mapping[str, str], left_out: Collection[str]
) -> RunningCheck:
    """Check the job `spec` in a process of a node that offers accelerators of `device`, of which it takes none, and takes
    work. Without such a node there are only notes."""
    resource = "GPU" if device == "cuda" else CPU_RESOURCE
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
    node_id = check_node(nodes, own=ray.get_runtime_context().get_node_id(), left_out=left_out)
    if node_id is None:
        others = f" but {len(nodes)} that take no work" if nodes else ""
        return _Unchecked(f"no node offers {resource}{others}")
    # softly Ray would take any other node where this one is lost meanwhile, also one that is to have no work
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=not left_out)
    task = ray.remote(check_job_process).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return _TaskOfRay(task.remote(spec, environment=dict(secrets)))


class _Unchecked:
    """A check that could not be started."""

    def __init__(self, why: str) -> None:
        self._why = why

    def answer(self, wait_s: float) -> JobCheck:
        return JobCheck(notes=(f"{_NOT_CHECKED}: {self._why}",))

    def end(self) -> None:
        """Nothing runs."""


class _TaskOfRay:
    """A check in a task of Ray."""

    def __init__(self, result: ray.ObjectRef) -> None:
        self._result = result
        self._deadline = time.monotonic() + CHECK_LIMIT_S + _START_LIMIT_S

    def answer(self, wait_s: float) -> JobCheck | None:
        if not ray.wait([self._result], timeout=wait_s)[0]:
            if time.monotonic() < self._deadline:
                return None
            self.end()
            return JobCheck(notes=(f"{_NOT_CHECKED}: no answer in time",))
        try:
            return ray.get(self._result)
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:500]
            return JobCheck(notes=(f"{_NOT_CHECKED}: {reason}",))

    def end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(self._result, force=True)
            # Ray may crash where it is shut down in the middle of a cancellation
            ray.wait([self._result], timeout=_CANCEL_S)
