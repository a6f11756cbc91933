"""Planner: runs plan requests in a bounded pool of spawned processes, with one more kept for drivers.

A job's plan that runs out of time is made once more without a search. Never in the event loop, never more at once than
the machine holds; drivers go first. A request whose caller has gone is cancelled and its place freed; a process that
does not react, or runs out of time or memory, is killed with the pool.
Functions after the line "In the pool" run in the processes, and only they (and work.py's) import the scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.observability.instruments import PLANNING_SECONDS
from service.observability.tracing import record_request_span
from service.orchestrator.planning.work import (
    RunningJob,
    SavedPlanInput,
    StoredStep,
    explain_step,
    plan_from_saved,
    plan_key_json,
    shorter_plan,
    step_plans,
)
from worker.contract.tasks import kill_pool

if TYPE_CHECKING:
    from service.scheduler.problem.spec import PipelineSpec

logger = logging.getLogger(__name__)
_USER_QUEUE_LIMIT, _DRIVER_QUEUE_LIMIT = 4, 64
"""Plans that may wait for a process; beyond that 503 with Retry-After."""
PLAN_LIMIT_S = 120.0
"""Limit of one plan by the clock; a job's plan that exceeds it is made again without a search, within the same limit."""
_SEARCH_TIME_FRACTION = 0.8
"""Share of the time limit after which the search ends with its best plan, so that on a busy machine the rest of the work
(programs, proof) still ends before the process is killed."""
SERVER_BYTES = 1 << 30
"""Memory that a container keeps for the server beside its planning processes; the chart counts with it too."""
LEAST_PROCESS_BYTES, MOST_PROCESS_BYTES = 512 << 20, 8 << 30
"""Bounds of what a planning process gets where SLOTLINE_PLAN_MEMORY_BYTES is not set."""
NICENESS = 5
"""Niceness of planning processes above the server's: a search slows neither answers nor the training of a local Ray."""
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
    """No plan now: all processes are busy and the queue is full, or the process was lost."""


class PlanTimeoutError(Exception):
    """A plan took longer than `timeout_s`; its process was killed. The message names the limit and the ways out."""


_OUTCOMES = {
    PlanRefusedError: "refused",
    PlannerBusyError: "busy",
    PlanTimeoutError: "timeout",
    asyncio.CancelledError: "given up",
}


@dataclass(frozen=True)
class PlannerLoad:
    """Plans in progress, plans that wait, and planning processes."""

    running: int
    waiting: int
    processes: int


def container_memory_bytes(root: Path = Path("/")) -> int | None:
    """The least memory limit of this process's control groups (cgroup v2 and v1), None without one.

    A container sees its own group as the topmost one, so a group's path is looked up with and without its parents.
    """
    limits = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.strip("/")
            for group in (one for one in (own, *own.parents) if one.is_relative_to(top)):
                with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
                    name = "memory.limit_in_bytes" if controllers else "memory.max"
                    limits.append(int((group / name).read_text()))
    return min(limits, default=None)


def process_memory_bytes(given: int | None, users_processes: int, container_bytes: int | None) -> int:
    """The memory of one planning process: as given, or its part of the container's after SERVER_BYTES for the server.

    Kubernetes ends the whole container that exceeds its limit, so all processes together must fit: what does not is
    logged with the way out.
    """
    processes = users_processes + 1
    if container_bytes is None:
        return MOST_PROCESS_BYTES if given is None else given
    part = (container_bytes - SERVER_BYTES) // processes
    chosen = max(LEAST_PROCESS_BYTES, min(MOST_PROCESS_BYTES, part)) if given is None else given
    if chosen > part:
        logger.warning(
            "%d planning processes of %d MiB and %d MiB for the server exceed the container's limit of %d MiB, and a large "
            "plan would end the container: raise the limit, or lower SLOTLINE_PLAN_PROCESSES or SLOTLINE_PLAN_MEMORY_BYTES",
            processes,
            chosen >> 20,
            SERVER_BYTES >> 20,
            container_bytes >> 20,
        )
    return chosen


class PlannerPool:
    """Plans in `processes` processes at once, each plan within `timeout_s`; `queue` more requests may wait.

    One process more is reserved for drivers. A plan whose caller has gone is cancelled, and its place is free again.
    """

    def __init__(
        self,
        *,
        processes: int,
        timeout_s: float = PLAN_LIMIT_S,
        memory_bytes: int | None = None,
        queue: int = _USER_QUEUE_LIMIT,
    ) -> None:
        self._processes, self._timeout_s, self._memory_bytes = processes, timeout_s, memory_bytes
        self._guard_s = 5.0  # the scheduler looks at its deadline now and then
        self._free_requests = {"user": processes + queue, "driver": _DRIVER_QUEUE_LIMIT}
        self._queue = WaitQueue(processes)
        self._given_up = multiprocessing.get_context("spawn").RawArray("b", processes + 1)
        self._task_of_attempt: dict[str, asyncio.Task[str]] = {}
        self._working: set[asyncio.Task[Any]] = set()
        self._pool: ProcessPoolExecutor | None = None

    @property
    def longest_answer_s(self) -> float:
        """The seconds in which a job's plan is made or fails once it has a process, both tries together."""
        return 2 * (self._timeout_s + self._guard_s)

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

        `costs` are measured costs, as a driver sends them (PlanRequest); `earlier` is the plan of an earlier attempt,
        whose number of microbatches stays where the job leaves it open. `attempt` is the id of the attempt whose driver
        asks.
        """

        async def planned(search_s: float, notes: tuple[str, ...]) -> str:
            return await self._run(_plan_job, job, costs, earlier, search_s, notes, attempt=attempt)

        return await self._with_smaller_search(planned, budget_s)

    async def plan_from_saved(
        self,
        job: Mapping[str, Any],
        costs: Mapping[str, Any],
        saved: SavedPlanInput,
        *,
        attempt: str | None = None,
    ) -> str:
        """Fit a saved plan to a job with these costs: JSON as of `plan_job`. Raises PlanRefusedError where it does not."""
        return await self._run(plan_from_saved, job, costs, saved, attempt=attempt)

    async def made_for(self, job: Mapping[str, Any], costs: Mapping[str, Any], plan: str) -> str:
        """JSON of the PlanKey of a plan that was made for a job with these costs."""
        return await self._run(plan_key_json, job, costs, plan)

    async def plan_spec(self, spec: str, *, budget_s: float, format: str, attempt: str | None = None) -> str:
        """Schedule a PipelineSpec (JSON text) and render the plan in one of PLAN_FORMATS; `attempt` as in `plan_job`."""
        return await self._run(_plan_spec, spec, budget_s, format, attempt=attempt)

    async def plan_forwards(self, request: Mapping[str, Any], *, budget_s: float, attempt: str) -> str:
        """Schedule an evaluation (`plan_forwards` of service/scheduler/job/forwards.py): the plan's JSON, with
        planning_notes."""

        async def planned(search_s: float, notes: tuple[str, ...]) -> str:
            return await self._run(_plan_forwards, request, search_s, notes, attempt=attempt)

        return await self._with_smaller_search(planned, budget_s)

    async def replan(self, running: RunningJob, *, budget_s: float, attempt: str) -> str:
        """A clearly shorter order of a running job: JSON of a ReplanView."""
        return await self._run(shorter_plan, running, budget_s, attempt=attempt)

    async def plan_steps(self, running: RunningJob, steps: Sequence[Sequence[int]], *, attempt: str) -> str:
        """The plans of single steps of a running job: JSON of a StepPlansView."""
        return await self._run(step_plans, running, steps, attempt=attempt)

    async def explain(self, stored: StoredStep) -> str:
        """Explain the length of a stored step and the changes that would shorten it: JSON of an Explanation."""
        return await self._run(explain_step, stored)

    @property
    def load(self) -> PlannerLoad:
        """Plans in progress and waiting now."""
        return self._queue.load

    def warm(self) -> None:
        """Let the processes import the scheduler before a caller waits for it."""
        for _ in range(self._processes):
            self._processes_pool().submit(_import_scheduler)

    def close(self) -> None:
        """Kill the processes, whatever they do."""
        self._end_processes()

    async def _with_smaller_search(
        self, planned: Callable[[float, tuple[str, ...]], Awaitable[str]], budget_s: float
    ) -> str:
        """`planned(budget_s, notes)`, and once more without a search where that takes longer than a plan may."""
        if budget_s <= 0:
            return await planned(0.0, ())
        try:
            return await planned(budget_s, ())
        except PlanTimeoutError as error:
            logger.warning("%s: planning once more without a search", error)
            return await planned(
                0.0, (f"made without a search: planning with one took more than {self._timeout_s:g} s",)
            )

    async def _run(self, function: Callable[..., str], *arguments: Any, attempt: str | None = None) -> str:
        """Call `function` in a process; a driver's newer request replaces the earlier one of the same `attempt`."""
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
        if (earlier := self._task_of_attempt.get(attempt)) is not None:
            earlier.cancel()  # its driver asks anew and no longer waits for that answer
        task = asyncio.create_task(self._admitted(function, arguments, driver=True))
        self._task_of_attempt[attempt] = task
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and self._task_of_attempt.get(attempt) is not task:
                raise PlannerBusyError("the same attempt has asked for another plan since") from None
            task.cancel()
            raise
        finally:
            if self._task_of_attempt.get(attempt) is task:
                del self._task_of_attempt[attempt]

    async def _admitted(
        self, function: Callable[..., str], arguments: tuple[Any, ...], *, driver: bool = False
    ) -> str:
        caller = "driver" if driver else "user"
        if self._free_requests[caller] <= 0:
            raise PlannerBusyError(f"all {self._processes} planning processes are busy and the queue is full")
        self._free_requests[caller] -= 1
        try:
            place = await self._queue.take(driver=driver)
            return await self._in_process(place, function, arguments)
        finally:
            self._free_requests[caller] += 1

    async def _in_process(self, place: int, function: Callable[..., str], arguments: tuple[Any, ...]) -> str:
        """Call `function` in a process and leave the place when it has ended, even where the caller has gone before."""
        self._given_up[place] = 0
        caller_gone = False
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
            caller_gone = True
            self._given_up[place] = 1
            ending = asyncio.create_task(self._until_given_up(work, place))
            self._working.add(ending)
            ending.add_done_callback(self._working.discard)
            raise
        except TimeoutError:
            self._end_processes()
            raise PlanTimeoutError(
                f"planning took more than {self._timeout_s:g} s and was ended; the control plane's machine may be busy"
            ) from None
        except BrokenProcessPool:  # out of memory, or killed together with another plan
            self._end_processes()
            raise PlannerBusyError("the planning process ended before the plan was made") from None
        finally:
            if not caller_gone:
                self._queue.leave(place)
        if refused:
            raise PlanRefusedError(text)
        return text

    async def _until_given_up(self, work: asyncio.Future[Any], place: int) -> None:
        """Wait for a process whose caller has gone; kill it where it does not react."""
        try:
            await asyncio.wait_for(work, self._guard_s)
        except TimeoutError:
            self._end_processes()
        except Exception as error:
            logger.info("a plan that was given up ended with %r", error)
        finally:
            self._queue.leave(place)

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
        if self._pool is not None:
            pool, self._pool = self._pool, None
            kill_pool(pool)


class WaitQueue:
    """A queue for `places` that any caller may take and one more for drivers, who go first; places count from 0."""

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
        for waiting, reserved in ((self._drivers, 0), (self._others, 1)):
            while waiting and len(self._free) > reserved:
                turn = waiting.popleft()
                if not turn.done():
                    turn.set_result(self._free.pop())


# In the pool


def _init_process(given_up: Any, memory_bytes: int | None) -> None:
    """Limit the memory, let server and training go first, leave Ctrl-C to the server, and die with it even where it is
    killed."""
    global _given_up
    _given_up = given_up
    os.nice(NICENESS)
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
"""By place, 1 where the caller of the plan has gone. Shared with the server."""


def _run_guarded(
    function: Callable[..., str], place: int, deadline: float, *arguments: Any
) -> tuple[bool, str]:
    """(refused, text); text instead of an exception, since classes of the scheduler may not unpickle in the server."""
    try:
        return False, function(lambda: bool(_given_up[place]) or time.time() > deadline, *arguments)
    except MemoryError:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        return True, (
            f"planning it needs more memory than the {limit} bytes of a planning process: make it smaller, "
            "or raise SLOTLINE_PLAN_MEMORY_BYTES (and the container's memory with it)"
        )
    except ValueError as error:
        return True, _validation_message(error)


def _log_notes(notes: Sequence[str], spec: PipelineSpec) -> None:
    """Log failures while planning, which are our defects, with the spec that reproduces them."""
    for note in notes:
        logger.error("planning: %s; the spec: %s", note, spec.model_dump_json())


def _validation_message(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    parts = (f"{'.'.join(map(str, detail['loc'])) or 'spec'}: {detail['msg']}" for detail in error.errors())
    return "; ".join(part.replace("Value error, ", "") for part in parts)


def _plan_spec(expired: Callable[[], bool], text: str, budget_s: float, format: str) -> str:
    from service.scheduler.planner import make_plan
    from service.scheduler.problem.spec_checks import load_spec
    from service.scheduler.views.render import render

    spec = load_spec(text)
    plan = make_plan(spec, budget_s=budget_s, expired=expired)
    _log_notes(plan.notes, spec)
    return plan.model_dump_json() if format == "json" else render(spec, plan, format)


def _plan_forwards(
    expired: Callable[[], bool], request: Mapping[str, Any], budget_s: float, notes: tuple[str, ...]
) -> str:
    from service.scheduler.job.forwards import plan_forwards

    planned = plan_forwards(request, budget_s=budget_s, expired=expired)
    _log_notes(planned.plan.notes, planned.spec)
    return json.dumps({**planned.to_json(), "planning_notes": list(notes)}, allow_nan=False)


def _plan_job(
    expired: Callable[[], bool],
    job: Mapping[str, Any],
    costs: Mapping[str, Any],
    earlier: str | None,
    budget_s: float,
    notes: tuple[str, ...],
) -> str:
    from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_for_training
    from worker.contract.job import Job

    parsed_job = Job.from_json(job)
    planned = plan_for_training(
        parsed_job,
        JobCosts.from_json(costs, parsed_job),
        earlier_microbatches=None if earlier is None else json.loads(earlier)["spec"].get("microbatches"),
        budget_s=budget_s,
        expired=expired,
    )
    _log_notes(planned.plan.notes, planned.partition.spec)
    answer = job_plan_json(planned)
    answer["planning_notes"] = [*notes, *answer["planning_notes"]]
    return json.dumps(answer, allow_nan=False)
