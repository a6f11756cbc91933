"""Planner: runs plan requests in a bounded pool of spawned processes, with one more kept for drivers.

Never in the event loop, never more at once than the machine holds; drivers go first. A request whose caller has gone
is given up and its place freed; a process that does not react, or runs out of time or memory, is killed with the
pool.
Functions after the line "In the pool" run in the processes, and only they (and work.py's) import the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import multiprocessing
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from service.observability.instruments import PLANNING_SECONDS
from service.observability.tracing import record_request_span
from service.orchestrator.planning.work import (
    SavedPlanInput,
    StoredStep,
    explain_step,
    plan_from_saved,
    plan_key_json,
)

if TYPE_CHECKING:
    from service.scheduler.problem.spec import PipelineSpec


@dataclass(frozen=True)
class PlannerLoad:
    """Plans that are made and that wait now, and how many processes there are to make them."""

    running: int
    waiting: int
    processes: int


class WaitQueue:
    """`places` for anybody and one more for drivers, who go first; a place is a number from 0 on."""

    def __init__(self, places: int) -> None:
        self._places = places + 1
        self._free = list(range(self._places))
        self._drivers: deque[asyncio.Future[int]] = deque()
        self._others: deque[asyncio.Future[int]] = deque()

    async def take(self, *, driver: bool) -> int:
        """Wait for a place. A cancelled wait takes none."""
        turn = asyncio.get_running_loop().create_future()
        (self._drivers if driver else self._others).append(turn)
        self._give()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(turn.result())
            raise

    @property
    def load(self) -> PlannerLoad:
        waiting = sum(not turn.done() for turn in (*self._drivers, *self._others))
        return PlannerLoad(self._places - len(self._free), waiting, self._places)

    def leave(self, place: int) -> None:
        self._free.append(place)
        self._give()

    def _give(self) -> None:
        for waiting, kept in ((self._drivers, 0), (self._others, 1)):
            while waiting and len(self._free) > kept:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(self._free.pop())


logger = logging.getLogger(__name__)

_DRIVER_QUEUE_LIMIT = 64
_SEARCH_TIME_FRACTION = 0.8
"""Of the time that a plan may take: then the search ends with what it has, and on a busy machine the rest of the work
(programs, proof) still comes before the process is ended."""

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


_OUTCOMES = {
    PlanRefusedError: "refused",
    PlannerBusyError: "busy",
    PlanTimeoutError: "timeout",
    asyncio.CancelledError: "given up",
}


class Planner:
    """`processes` plan at once, `queue` more requests may wait, none longer than `timeout_s`.

    One process more is kept for drivers. A plan whose caller has gone is given up, and its place is free again.
    """

    def __init__(
        self, *, processes: int, queue: int, timeout_s: float, memory_bytes: int | None = None
    ) -> None:
        self._processes, self._timeout_s, self._memory_bytes = processes, timeout_s, memory_bytes
        self._guard_s = 5.0  # the scheduler looks at its deadline now and then
        self._places = processes + queue
        self._driver_places = _DRIVER_QUEUE_LIMIT
        self._line = WaitQueue(processes)
        self._given_up = multiprocessing.get_context("spawn").RawArray("b", processes + 1)
        self._of_attempt: dict[str, asyncio.Task[str]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._pool: ProcessPoolExecutor | None = None

    async def plan_job(
        self,
        job: Mapping[str, Any],
        costs: Mapping[str, Any],
        *,
        earlier: str | None = None,
        budget_s: float,
        attempt: str | None = None,
    ) -> str:
        """Partition and schedule a job (a JobSpec's JSON): JSON with begins, spec, plan and step_s.

        `costs` is what was measured, as a driver sends it (PlanRequest); `earlier` the plan of an earlier attempt,
        whose number of microbatches is kept where the job leaves it open. `attempt` is the one whose driver asks.
        """
        return await self._run(_plan_job, job, costs, earlier, budget_s, attempt=attempt)

    async def plan_from_saved(
        self,
        job: Mapping[str, Any],
        costs: Mapping[str, Any],
        given: SavedPlanInput,
        *,
        attempt: str | None = None,
    ) -> str:
        """`given` for a job with these costs, as `plan_job` answers; PlanRefusedError says what does not fit."""
        return await self._run(plan_from_saved, job, costs, given, attempt=attempt)

    async def made_for(self, job: Mapping[str, Any], costs: Mapping[str, Any], plan: str) -> str:
        """What the plan of a job with these costs was made for, as GivenPlan has it."""
        return await self._run(plan_key_json, job, costs, plan)

    async def plan_spec(self, spec: str, *, budget_s: float, format: str, attempt: str | None = None) -> str:
        """Schedule a PipelineSpec (JSON text) and render the plan in one of PLAN_FORMATS; `attempt` as in `plan_job`."""
        return await self._run(_plan_spec, spec, budget_s, format, attempt=attempt)

    async def plan_forwards(self, request: Mapping[str, Any], *, budget_s: float, attempt: str) -> str:
        """Schedule an evaluation (`plan_forwards` of service/scheduler/job/forwards.py): the plan's JSON."""
        return await self._run(_plan_forwards, request, budget_s, attempt=attempt)

    async def explain(self, stored: StoredStep) -> str:
        """Why a step takes as long as it does, and what would shorten it: the Explanation as JSON."""
        return await self._run(explain_step, stored)

    @property
    def load(self) -> PlannerLoad:
        """How many plans are made and wait now, of how many that may be made at once."""
        return self._line.load

    def warm(self) -> None:
        """Have the processes import the scheduler before somebody waits for it."""
        for _ in range(self._processes):
            self._processes_pool().submit(_import_scheduler)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._end_processes()

    async def _run(self, function: Callable[..., str], *arguments: Any, attempt: str | None = None) -> str:
        """Call `function` in a process; for the driver of `attempt` in its own place, and once at a time."""
        began, outcome = time.perf_counter(), "failed"
        try:
            text = await self._run_latest_of_attempt(function, arguments, attempt)
            outcome = "planned"
            return text
        except (PlanRefusedError, PlannerBusyError, PlanTimeoutError, asyncio.CancelledError) as error:
            outcome = _OUTCOMES[type(error)]
            raise
        finally:
            seconds = time.perf_counter() - began
            PLANNING_SECONDS.labels(outcome).observe(seconds)
            record_request_span("plan", seconds, error=None if outcome == "planned" else outcome)

    async def _run_latest_of_attempt(
        self, function: Callable[..., str], arguments: tuple[Any, ...], attempt: str | None
    ) -> str:
        if attempt is None:
            return await self._admitted(function, arguments)
        if (earlier := self._of_attempt.get(attempt)) is not None:
            earlier.cancel()  # its driver asks anew: it waits for that answer no more
        task = asyncio.create_task(self._admitted(function, arguments, driver=True))
        self._of_attempt[attempt] = task
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and self._of_attempt.get(attempt) is not task:
                raise PlannerBusyError("the same attempt has asked for another plan since") from None
            task.cancel()
            raise
        finally:
            if self._of_attempt.get(attempt) is task:
                del self._of_attempt[attempt]

    async def _admitted(
        self, function: Callable[..., str], arguments: tuple[Any, ...], *, driver: bool = False
    ) -> str:
        places = "_driver_places" if driver else "_places"
        if getattr(self, places) <= 0:
            raise PlannerBusyError(f"all {self._processes} planning processes are busy and the line is full")
        setattr(self, places, getattr(self, places) - 1)
        try:
            place = await self._line.take(driver=driver)
            return await self._in_process(place, function, arguments)
        finally:
            setattr(self, places, getattr(self, places) + 1)

    async def _in_process(self, place: int, function: Callable[..., str], arguments: tuple[Any, ...]) -> str:
        """The place is left when the process has done with it, which may be after a caller that has gone."""
        self._given_up[place] = 0
        gone = False
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._processes_pool(),
                _run_guarded,
                function,
                place,
                time.time() + _SEARCH_TIME_FRACTION * self._timeout_s,
                *arguments,
            )
            refused, text = await asyncio.wait_for(asyncio.shield(work), self._timeout_s + self._guard_s)
        except asyncio.CancelledError:
            gone = True
            self._given_up[place] = 1
            ending = asyncio.create_task(self._until_given_up(work, place))
            self._working.add(ending)
            ending.add_done_callback(self._working.discard)
            raise
        except TimeoutError:
            self._end_processes()
            raise PlanTimeoutError(f"planning took more than {self._timeout_s:g} s and was ended") from None
        except (
            BrokenProcessPool
        ):  # out of memory, or ended together with another plan; at once where it was idle
            self._end_processes()
            raise PlannerBusyError("the planning process ended before the plan was made") from None
        finally:
            if not gone:
                self._line.leave(place)
        if refused:
            raise PlanRefusedError(text)
        return text

    async def _until_given_up(self, work: asyncio.Future[Any], place: int) -> None:
        """A process that does not hear that its plan is wanted no more is ended."""
        try:
            await asyncio.wait_for(work, self._guard_s)
        except TimeoutError:
            self._end_processes()
        except Exception as error:
            logger.info("a plan that was given up ended with %r", error)
        finally:
            self._line.leave(place)

    def _processes_pool(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._processes + 1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_init_process,
                initargs=(self._given_up, self._memory_bytes),
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


def _init_process(given_up: Any, memory_bytes: int | None) -> None:
    """Ctrl-C is for the server, which then ends us; and a server that is killed takes us with it."""
    global _given_up
    _given_up = given_up
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _import_scheduler() -> None:
    import service.scheduler.job.joint
    import service.scheduler.views.render  # noqa: F401
    from service.scheduler.planner import compile_kernels

    compile_kernels()


_given_up: Any = None
"""By place: whether the plan that is made there is wanted no more. Shared with the server."""


def _run_guarded(
    function: Callable[..., str], place: int, deadline: float, *arguments: Any
) -> tuple[bool, str]:
    """(refused, text): an exception of the scheduler's or the worker's own classes may not unpickle."""
    try:
        return False, function(lambda: bool(_given_up[place]) or time.time() > deadline, *arguments)
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return True, (
            f"planning it needs more memory than the {limit} bytes of a planning process: make it smaller, "
            "or raise SLOTLINE_PLAN_MEMORY_BYTES"
        )
    except ValueError as error:
        return True, _validation_message(error)


def _log_notes(notes: Sequence[str], spec: PipelineSpec) -> None:
    """What went wrong while planning is a defect of ours: it is told with all that is needed to see it again."""
    for note in notes:
        logger.error("planning: %s; the spec: %s", note, spec.model_dump_json())


def _validation_message(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    parts = (f"{'.'.join(map(str, one['loc'])) or 'spec'}: {one['msg']}" for one in error.errors())
    return "; ".join(part.replace("Value error, ", "") for part in parts)


def _plan_spec(expired: Callable[[], bool], text: str, budget_s: float, format: str) -> str:
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec import load_spec
    from service.scheduler.views.render import render

    spec = load_spec(text)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    _log_notes(plan.notes, spec)
    return plan.model_dump_json() if format == "json" else render(spec, plan, format)


def _plan_forwards(expired: Callable[[], bool], request: Mapping[str, Any], budget_s: float) -> str:
    from service.scheduler.job.forwards import plan_forwards

    found = plan_forwards(request, budget_s=budget_s, expired=expired)
    _log_notes(found.plan.notes, found.spec)
    return json.dumps(found.to_json(), allow_nan=False)


def _plan_job(
    expired: Callable[[], bool],
    job: Mapping[str, Any],
    costs: Mapping[str, Any],
    earlier: str | None,
    budget_s: float,
) -> str:
    from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
    from worker.contract.job import Job

    read = Job.from_json(job)
    found = plan_job(
        read,
        JobCosts.from_json(costs, read),
        kept_microbatches=None if earlier is None else json.loads(earlier)["spec"].get("microbatches"),
        budget_s=budget_s,
        expired=expired,
    )
    _log_notes(found.plan.notes, found.partition.spec)
    return json.dumps(job_plan_json(found), allow_nan=False)
