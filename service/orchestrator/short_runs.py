"""Short Ray jobs that answer with a line of their output: measuring a job, exporting its weights.

One that is lost with this control plane ends by itself; who waits for it, in which process, is up to shared_runs.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from service.orchestrator.decide import RayState
from service.orchestrator.ray_jobs import Cluster, ClusterError, ClusterUnreachableError, Submission

LOOK_EVERY_S = 0.5
LOG_SETTLES_S = 20.0
OVER = (RayState.SUCCEEDED, RayState.FAILED, RayState.STOPPED)

Answer = TypeVar("Answer")


class RunTooLongError(Exception):
    """The run had not ended in time and was stopped; `began`: it had its resources."""

    def __init__(self, began: bool) -> None:
        super().__init__(f"{'ran' if began else 'waited for its turn'} for too long")
        self.began = began


class NoAnswerError(Exception):
    """The run ended without an answer; the message is what Ray or the last line of its output says."""


async def run_for_answer(
    cluster: Cluster, submission: Submission, read: Callable[[str], Answer | None], *, limit_s: float
) -> Answer:
    """Start `submission`, wait until it has ended and read its answer; it is stopped in any case.

    `read` gives what the output says, None where it is not there yet, and may raise. Raises RunTooLongError after
    `limit_s`, NoAnswerError, and ClusterError where it could not be started.
    """
    deadline = time.monotonic() + limit_s
    try:
        await cluster.submit(submission)
        await _until_over(cluster, submission.id, deadline)
        return await _answer(cluster, submission.id, read)
    finally:
        with contextlib.suppress(ClusterError):
            await cluster.stop(submission.id)


async def _until_over(cluster: Cluster, run_id: str, deadline: float) -> None:
    state = None
    while time.monotonic() < deadline:
        with contextlib.suppress(ClusterUnreachableError):
            state = (await cluster.job(run_id)).state
        if state in OVER:
            return
        await asyncio.sleep(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
    raise RunTooLongError(began=state is not RayState.PENDING)


async def _answer(cluster: Cluster, run_id: str, read: Callable[[str], Answer | None]) -> Answer:
    deadline = time.monotonic() + LOG_SETTLES_S
    log = ""
    while time.monotonic() < deadline:  # the last lines come a little after the end
        with contextlib.suppress(ClusterUnreachableError):
            log = await cluster.log(run_id)
        if (answer := read(log)) is not None:
            return answer
        await asyncio.sleep(LOOK_EVERY_S)
    job = await cluster.job(run_id)
    last = next((line for line in reversed(log.strip().splitlines()) if line.strip()), "no output")
    raise NoAnswerError(job.message or last)
