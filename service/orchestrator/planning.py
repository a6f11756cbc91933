"""Plans in a bounded pool of processes: never in the event loop, never more than the machine holds.

The functions at the end run in the pool; only they import the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.scheduler import PipelineSpec

logger = logging.getLogger(__name__)

PLAN_FORMATS = {
    "json": "application/json",
    "csv": "text/csv",
    "table": "text/plain",
    "events": "application/json",
    "chrome": "application/json",
    "svg": "image/svg+xml",
    "text": "text/plain",
}


class PlanRefusedError(ValueError):
    """The scheduler refused the specification; the message says why and what to change."""


class PlannerBusyError(Exception):
    """Not now: all processes plan and as many requests wait as may, or the process was lost."""


class PlanTimeoutError(Exception):
    """A plan took longer than allowed; its process was ended."""


class Planner:
    """`processes` plan at once, `queue` more requests may wait, none longer than `timeout_s`."""

    def __init__(self, *, processes: int, queue: int, timeout_s: float) -> None:
        self._processes, self._timeout_s = processes, timeout_s
        self._guard_s = 5.0  # the scheduler looks at its deadline now and then
        self._places = processes + queue
        self._turn = asyncio.Semaphore(processes)
        self._pool: ProcessPoolExecutor | None = None

    async def plan_job(
        self, job: Mapping[str, Any], costs: Mapping[str, Any], *, earlier: str | None = None, budget_s: float
    ) -> str:
        """Partition and schedule a job (a JobSpec's JSON): JSON with begins, spec, plan and step_s.

        `costs` is what was measured, as a driver sends it (PlanRequest); `earlier` the plan of an earlier attempt,
        whose number of microbatches is kept where the job leaves it open.
        """
        return await self._run(_plan_job, job, costs, earlier, budget_s)

    async def plan_spec(self, spec: str, *, budget_s: float, format: str) -> str:
        """Schedule a PipelineSpec (JSON text) and render the plan in one of PLAN_FORMATS."""
        return await self._run(_plan_spec, spec, budget_s, format)

    def warm(self) -> None:
        """Have the processes import the scheduler before somebody waits for it."""
        for _ in range(self._processes):
            self._processes_pool().submit(_import_scheduler)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._end_processes()

    async def _run(self, function: Callable[..., str], *arguments: Any) -> str:
        if self._places <= 0:
            raise PlannerBusyError(f"all {self._processes} planning processes are busy and the line is full")
        self._places -= 1
        try:
            async with self._turn:
                return await self._in_process(function, *arguments)
        finally:
            self._places += 1

    async def _in_process(self, function: Callable[..., str], *arguments: Any) -> str:
        loop = asyncio.get_running_loop()
        deadline = time.time() + self._timeout_s
        try:
            work = loop.run_in_executor(self._processes_pool(), _guarded, function, deadline, *arguments)
            refused, text = await asyncio.wait_for(work, self._timeout_s + self._guard_s)
        except TimeoutError:
            self._end_processes()
            raise PlanTimeoutError(f"planning took more than {self._timeout_s:g} s and was ended") from None
        except BrokenProcessPool:  # out of memory, or ended together with another plan that took too long
            self._end_processes()
            raise PlannerBusyError("the planning process ended before the plan was made") from None
        if refused:
            raise PlanRefusedError(text)
        return text

    def _processes_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
            )
        return self._pool

    def _end_processes(self) -> None:
        if self._pool is None:
            return
        pool, self._pool = self._pool, None
        # Until Python 3.14 (kill_workers) the executor has no public way to end a running call.
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


# In the pool


def _begin() -> None:
    """Ctrl-C is for the server, which then ends us; and a server that is killed takes us with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _import_scheduler() -> None:
    import service.scheduler.joint
    import service.scheduler.views.render  # noqa: F401
    from service.scheduler.planner import compile_kernels

    compile_kernels()


def _guarded(function: Callable[..., str], deadline: float, *arguments: Any) -> tuple[bool, str]:
    """(refused, text): an exception of the scheduler's or the worker's own classes may not unpickle."""
    try:
        return False, function(lambda: time.time() > deadline, *arguments)
    except ValueError as error:
        return True, _message(error)


def _log_notes(notes: Sequence[str], spec: PipelineSpec) -> None:
    """What went wrong while planning is a defect of ours: it is told with all that is needed to see it again."""
    for note in notes:
        logger.error("planning: %s; the spec: %s", note, spec.model_dump_json())


def _message(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    parts = (f"{'.'.join(map(str, one['loc'])) or 'spec'}: {one['msg']}" for one in error.errors())
    return "; ".join(part.replace("Value error, ", "") for part in parts)


def _plan_spec(expired: Callable[[], bool], text: str, budget_s: float, format: str) -> str:
    from service.scheduler import load_spec, make_plan
    from service.scheduler.views.render import render

    spec = load_spec(text)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    _log_notes(plan.notes, spec)
    return plan.model_dump_json() if format == "json" else render(spec, plan, format)


def _plan_job(
    expired: Callable[[], bool],
    job: Mapping[str, Any],
    costs: Mapping[str, Any],
    earlier: str | None,
    budget_s: float,
) -> str:
    from service.scheduler.job import JobCosts, answer_json, plan_job
    from worker.job import Job

    read = Job.from_json(job)
    found = plan_job(
        read,
        JobCosts.from_json(costs, read),
        kept_microbatches=None if earlier is None else json.loads(earlier)["spec"].get("microbatches"),
        budget_s=budget_s,
        expired=expired,
    )
    _log_notes(found.plan.notes, found.partition.spec)
    return json.dumps(answer_json(found), allow_nan=False)
