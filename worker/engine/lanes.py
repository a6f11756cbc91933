"""Lanes on CPU: one thread computes, transfers progress by themselves, and events join them.

A transfer starts where the last thing that it waits for ends, on the thread that ended it, and then needs no
thread: gloo moves the bytes. It takes one to see it end. A compute lane that has nothing else to do waits for the
transfer that it needs by itself; while it computes, a watcher thread of the lane waits instead, so that a
received tensor's slot ends when the tensor is there. Sends are watched in bundles: nothing waits
for their ends, and the receiver's end is the transfer's (worker/driver/timing.py).

Why so: a thread a lane, woken for each transfer, cost 8.9 voluntary context switches an action of an empty stage
on a mesh with two neighbours, this way 5.2; torch's runtime, which has no lanes, 2.4 (torch 2.13, four workers on two
cores). What that is in time: tests/benchmarks/results/overhead.md.
Must not know what an action does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.program import COMPUTE_LANE, SEND_OPS, Instruction, Program

# What is left of an action after it was started: blocks until it has ended. None: it has.
Finish = Callable[[], None]
Action = Callable[[], Finish | None]

# A lane of sends is watched when this many are on their way (each holds its tensor), or at the next look.
_SENDS_AT_ONCE = 4


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


@dataclass(frozen=True)
class _Entry:
    index: int
    waits: tuple[int, ...]
    record: int | None
    action: Action


class _TransferLane:
    """The transfers of one lane: `entries` in order, of which the first `started` have been started and the
    first `ended` seen to end; `open`: those between. Whoever waits for their ends holds `claim`."""

    def __init__(self, name: str, group: CpuLanes):
        self.name = name
        self.group = group
        self.sends = False
        self.prompt = False
        self.entries: list[_Entry] = []
        self.started = self.ended = 0
        self.starting = threading.Lock()
        self.open: deque[tuple[_Entry, float, Finish | None]] = deque()
        self.claim = threading.Lock()
        self.signals: queue.SimpleQueue = queue.SimpleQueue()
        self.signalled = False
        self.last: int | None = None
        self.last_end_s = 0.0
        self.waiting: tuple[int, float] | None = None
        self.thread = threading.Thread(target=self._watch, name=f"slotline-{name}", daemon=True)

    def begin(self) -> None:
        self.started = self.ended = 0
        self.open.clear()
        self.last = self.waiting = None
        self.last_end_s = 0.0

    def start_ready(self) -> None:
        """Start, in order, all transfers that wait for nothing any more."""
        done, clock, wanted = self.group.done, time.monotonic, False
        with self.starting:
            while self.started < len(self.entries):
                entry = self.entries[self.started]
                if not all(done[event] for event in entry.waits):
                    break
                started_s = clock()
                self.open.append((entry, started_s, entry.action()))
                self.started += 1
                wanted = wanted or (entry.record is not None and entry.record == self.group.asleep_for)
        unseen = len(self.open) >= _SENDS_AT_ONCE if self.sends else self.group.busy
        if self.open and (wanted or unseen or self.prompt or self.group.draining):
            self.signal()

    def finish_until(self, event: int | None) -> None:
        """Wait, in order, for the ends of started transfers, up to the one that records `event`, or (None)
        as long as there are any. The caller holds `claim`. An error ends the step."""
        try:
            self._finish_until(event)
        except BaseException as error:
            # Still under `claim`: gloo never returns to who waits a second time for one transfer.
            self.group.fail(error)

    def _finish_until(self, event: int | None) -> None:
        group, clock = self.group, time.monotonic
        while self.open and not group.stopped:
            entry, started_s, finish = self.open[0]
            if finish is not None:
                self.waiting = (entry.index, clock())
                finish()
            end = clock()
            # A send's end is seen late, so only a lane of receives can say when the next one had the link.
            group.slots[entry.index] = (started_s if self.sends else max(started_s, self.last_end_s), end)
            self.last, self.last_end_s, self.waiting = entry.index, end, None
            if entry.record is not None:
                group.record(entry.record)
            self.open.popleft()
            self.ended += 1  # last: the step may end now, and events begin anew with the next one
            if entry.record is not None and entry.record == event:
                return

    def signal(self) -> None:
        """Have the lane's thread wait for the ends of what was started."""
        if not self.signalled:
            self.signalled = True
            self.signals.put(True)

    def done(self) -> bool:
        return self.ended == len(self.entries)

    def _watch(self) -> None:
        while self.signals.get():
            self.signalled = False
            with self.claim:
                self.finish_until(None)
            self.group.wake_at_end(self)


class CpuLanes:
    """All lanes of one mesh. `actions[i]` starts what instruction i of `program` says and returns what waits
    for its end; a compute action has ended when it returns."""

    def __init__(self, program: Program, actions: Sequence[Action]):
        events = 1 + max((i.record for i in program if i.record is not None), default=-1)
        self.done = bytearray(events)
        self.slots: list[tuple[float, float]] = [(0.0, 0.0)] * len(program)
        self.stopped = False
        self._compute: list[_Entry] = []
        self._lanes: dict[str, _TransferLane] = {}
        self._lane_of_event: dict[int, _TransferLane] = {}
        for index, (instruction, action) in enumerate(zip(program, actions, strict=True)):
            self._add(_Entry(index, tuple(instruction.wait), instruction.record, action), instruction)
        self._waiters = [
            [lane for lane in self._lanes.values() if any(event in e.waits for e in lane.entries)]
            for event in range(events)
        ]
        for event, lane in self._lane_of_event.items():
            lane.prompt = lane.prompt or bool(self._waiters[event])
        self._receives = [lane for lane in self._lanes.values() if not lane.sends]
        self._starts: queue.SimpleQueue = queue.SimpleQueue()
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        self._wakeups: queue.SimpleQueue = queue.SimpleQueue()
        self.asleep_for: int | None = None
        self.draining = False
        # Computing or waiting: a receive that starts meanwhile needs a thread to see it end.
        self.busy = False
        self._running = False
        # The instruction, since when, and the event that it waits for: one value, so that none is of another.
        self._at: tuple[int, float, int | None] | None = None
        self._last: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"slotline-{COMPUTE_LANE}", daemon=True)
        for thread in self._threads().values():
            thread.start()

    def _add(self, entry: _Entry, instruction: Instruction) -> None:
        if instruction.lane == COMPUTE_LANE:
            self._compute.append(entry)
            return
        lane = self._lanes.setdefault(instruction.lane, _TransferLane(instruction.lane, self))
        lane.sends = instruction.op in SEND_OPS
        lane.entries.append(entry)
        if entry.record is not None:
            self._lane_of_event[entry.record] = lane

    # For the engine's thread

    def start(self) -> None:
        """Begin a step on all lanes."""
        self.done[:] = bytes(len(self.done))
        while not self._wakeups.empty():
            self._wakeups.get_nowait()
        for lane in self._lanes.values():
            lane.begin()
        self._last, self.draining, self._running = None, False, True
        self._starts.put(True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until all lanes have ended; False after `timeout_s`. Raises what lanes raised, first
        come; the end comes after that."""
        if not self._running:
            return True
        try:
            error = self._ended.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return False
        if error is not None:
            raise error
        self._running = False
        return True

    def statuses(self) -> list[LaneStatus]:
        """Where every lane stands that has not ended its step. A transfer that nobody waits for yet is
        watched from now on."""
        found = []
        at = self._at
        if at is not None:
            found.append(LaneStatus(COMPUTE_LANE, *at, self._last))
        for lane in self._lanes.values():
            waiting = lane.waiting
            if waiting is not None:
                found.append(LaneStatus(lane.name, *waiting, None, lane.last))
            elif lane.open:
                lane.signal()
        return found

    def last_compute(self) -> int | None:
        """The last compute instruction that ended."""
        return self._last

    def stop(self) -> None:
        """Make lanes that wait for an event end. One that is inside an action ends after that action."""
        self.stopped = True
        self._wakeups.put(None)

    def measured(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, monotonic seconds."""
        return list(self.slots)

    def close(self, timeout_s: float) -> list[str]:
        """End the threads; the lanes that did not end in time (they are inside a user's code)."""
        self.stop()
        self._starts.put(False)
        for lane in self._lanes.values():
            lane.signals.put(False)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads().values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [name for name, thread in self._threads().items() if thread.is_alive()]

    # For the lanes

    def record(self, event: int) -> None:
        """`event` has happened: start what waited for nothing else, wake the compute lane if it waits."""
        self.done[event] = 1
        for lane in self._waiters[event]:
            lane.start_ready()
        if self.asleep_for == event:
            self._wakeups.put(event)

    def fail(self, error: BaseException) -> None:
        """End the step with `error`, which goes first: a lane that is stopped ends the step too."""
        self._ended.put(error)
        self.stop()

    def wake_at_end(self, lane: _TransferLane) -> None:
        """The compute lane has nothing left to compute and waits for the last transfers."""
        if self.draining and lane.done():
            self._wakeups.put(None)

    # The compute lane

    def _run(self) -> None:
        while self._starts.get():
            try:
                self._run_once()
            except _Stopped:
                pass
            except BaseException as error:
                self.fail(error)
            self._at = None
            self._ended.put(None)

    def _run_once(self) -> None:
        done, slots, clock = self.done, self.slots, time.monotonic
        for lane in self._lanes.values():
            lane.start_ready()
        for entry in self._compute:
            self.busy = True  # before the looks at what is open: a later start looks at this
            for event in entry.waits:
                if not done[event]:
                    self._wait_for(event, entry.index)
            if self.stopped:
                raise _Stopped
            for lane in self._receives:
                if lane.open:
                    lane.signal()
            start = clock()
            self._at = (entry.index, start, None)
            entry.action()
            slots[entry.index] = (start, clock())
            self._last = entry.index
            self.busy = False
            if entry.record is not None:
                self.record(entry.record)
        self._at = None
        self._drain()

    def _wait_for(self, event: int, index: int) -> None:
        self._at = (index, time.monotonic(), event)
        lane = self._lane_of_event[event]
        for other in self._receives:
            if other is not lane and other.open:
                other.signal()
        while not self.done[event]:
            if self.stopped:
                raise _Stopped
            if lane.open and lane.claim.acquire(blocking=False):
                try:
                    lane.finish_until(event)
                finally:
                    lane.claim.release()
                continue
            # The lane's thread waits for it already, or will when it has been started. Whoever starts or records
            # sets `open` or `done` before it looks at `asleep_for`; this side does the opposite.
            self.asleep_for = event
            lane.signal()
            if not self.done[event] and not self.stopped:
                self._wakeups.get()
            self.asleep_for = None

    def _drain(self) -> None:
        """Wait for the ends of the transfers that no computation needed."""
        self.draining = True  # before the looks, as `busy`
        for lane in self._lanes.values():
            if lane.open:
                lane.signal()
        for lane in self._lanes.values():
            while not lane.done():
                if self.stopped:
                    raise _Stopped
                self._wakeups.get()

    def _threads(self) -> dict[str, threading.Thread]:
        return {COMPUTE_LANE: self._thread} | {name: lane.thread for name, lane in self._lanes.items()}
