"""Lanes on CPU: one thread a lane, and events between them.

Runs actions in the program's order and measures their slots. Must not know what an action does.

Why threads: gloo's isend/irecv need no thread to start, but nothing tells when they end except a wait
(no callback, no poll), and a lane must go on to its next transfer while compute is busy. Measured with
torch 2.13 on two cores, 1F1B of empty stages, microseconds an action: two workers 47 with asynchronous
work and 139 with a thread a lane (1 MB tensors: 311 and 442); four workers 895 and 866 (1520 and 1366).
So threads cost about 0.1 ms an action where cores are idle and nothing where they are not, and they alone
give each transfer its true end.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.program import COMPUTE_LANE, Program

Action = Callable[[], None]


@dataclass(frozen=True)
class LaneStatus:
    """Where a lane stands: the instruction that it runs or (`waits_for` set) is about to, since when, and
    the one that it ran last."""

    lane: str
    current: int | None
    since_s: float
    waits_for: int | None
    last: int | None


class _Stopped(Exception):
    """The step was aborted while this lane waited."""


class _Lane(threading.Thread):
    def __init__(self, name: str, group: CpuLanes):
        super().__init__(name=f"slotline-{name}", daemon=True)
        self.lane = name
        self.group = group
        self.instructions: list[tuple[int, tuple[int, ...], int | None, Action]] = []
        self.wakeups: queue.SimpleQueue = queue.SimpleQueue()
        self.starts: queue.SimpleQueue = queue.SimpleQueue()
        self.waiting_for: int | None = None
        self.current: int | None = None
        self.last: int | None = None
        self.since_s = time.monotonic()

    def run(self) -> None:
        while self.starts.get():
            try:
                self._run_once()
                self.group.ended.put((self.lane, None))
            except _Stopped:
                self.group.ended.put((self.lane, None))
            except BaseException as error:
                self.group.ended.put((self.lane, error))

    def _run_once(self) -> None:
        group = self.group
        done, waiters, slots, clock = group.done, group.waiters, group.slots, time.monotonic
        wait_for = self._wait_for
        self.last = None
        for index, waits, record, action in self.instructions:
            self.since_s = clock()
            self.current = index
            for event in waits:
                if not done[event]:
                    wait_for(event)
            if group.stopped:
                raise _Stopped
            start = self.since_s = clock()
            action()
            slots[index] = (start, clock())
            self.last = index
            if record is not None:
                done[record] = 1
                for lane in waiters[record]:
                    if lane.waiting_for == record:
                        lane.wakeups.put(record)
        self.current = None

    def _wait_for(self, event: int) -> None:
        # The recorder sets `done` before it looks at `waiting_for`; this side does the opposite.
        self.since_s = time.monotonic()
        self.waiting_for = event
        while not self.group.done[event]:
            if self.group.stopped:
                raise _Stopped
            self.wakeups.get()
        self.since_s = time.monotonic()  # before the next line: the watcher reads both
        self.waiting_for = None


class CpuLanes:
    """All lanes of one mesh. `actions[i]` does what instruction i of `program` says."""

    def __init__(self, program: Program, actions: Sequence[Action]):
        events = 1 + max((i.record for i in program if i.record is not None), default=-1)
        self.done = bytearray(events)
        self.slots: list[tuple[float, float]] = [(0.0, 0.0)] * len(program)
        self.ended: queue.SimpleQueue = queue.SimpleQueue()
        self.stopped = False
        self._lanes: dict[str, _Lane] = {}
        for index, (instruction, action) in enumerate(zip(program, actions, strict=True)):
            if instruction.lane not in self._lanes:
                self._lanes[instruction.lane] = _Lane(instruction.lane, self)
            entry = (index, instruction.wait, instruction.record, action)
            self._lanes[instruction.lane].instructions.append(entry)
        self.waiters: list[list[_Lane]] = [
            [lane for lane in self._lanes.values() if any(event in i[1] for i in lane.instructions)]
            for event in range(events)
        ]
        self._running: set[str] = set()
        for lane in self._lanes.values():
            lane.start()

    def start(self) -> None:
        """Begin a step on all lanes."""
        self.done[:] = bytes(len(self.done))
        self._running = set(self._lanes)
        for lane in self._lanes.values():
            while not lane.wakeups.empty():
                lane.wakeups.get_nowait()
            lane.starts.put(True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all lanes have ended; False after `timeout_s`. Raises what a lane raised, first come."""
        deadline = time.monotonic() + timeout_s
        while self._running:
            try:
                lane, error = self.ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return False
            self._running.discard(lane)
            if error is not None:
                raise error
        return True

    def statuses(self) -> list[LaneStatus]:
        """Where every lane stands that has not ended its step."""
        return [
            LaneStatus(name, lane.current, lane.since_s, lane.waiting_for, lane.last)
            for name, lane in self._lanes.items()
            if name in self._running
        ]

    def last_compute(self) -> int | None:
        """The last compute instruction that ended."""
        lane = self._lanes.get(COMPUTE_LANE)
        return None if lane is None else lane.last

    def stop(self) -> None:
        """Make lanes that wait for an event end. One that is inside an action ends after that action."""
        self.stopped = True
        for lane in self._lanes.values():
            lane.wakeups.put(None)

    def measured(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, monotonic seconds."""
        return list(self.slots)

    def close(self, timeout_s: float) -> list[str]:
        """End the threads; the lanes that did not end in time (they are inside a user's code)."""
        self.stop()
        for lane in self._lanes.values():
            lane.starts.put(False)
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.join(max(0.0, deadline - time.monotonic()))
        return [name for name, lane in self._lanes.items() if lane.is_alive()]
