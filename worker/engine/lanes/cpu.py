"""Lanes on CPU: one compute thread, transfers that gloo moves by itself, and events between them.

A transfer is started by whichever thread ends the last thing it waits for, and then needs no thread. A compute
lane with nothing else to do waits for the transfer it needs; while it computes, a watcher thread of the lane
waits instead, so a receive's slot ends when the tensor is there. Sends are watched in bundles: nothing waits
for their ends, and the receiver's end is the transfer's. A thread a lane, woken for each transfer, cost 8.9
voluntary context switches an action of an empty stage with two neighbours, this way 5.2 (torch 2.13, four
workers on two cores; overhead.md). Must not know what an action does.

Three kinds of threads: the compute thread, a watcher per transfer lane, and the engine's. Invariants:

1. `_done[event]` only goes from 0 to 1 within a step, and is cleared before one, when no thread is inside a
   step.
2. Of a lane's `entries` the first `started` have been started, under `starting`, and the first `ended` were
   seen to end, under `claim`; `open` holds those between. So whoever holds `claim` is alone in waiting for the
   lane's transfers: gloo never returns to a second one. `ended` is counted up last, as the step may be over
   with it.
3. `signalled`: the lane's watcher has been signalled and has not looked yet. It is cleared before the watcher
   takes `claim` and looks at `open`, so what was opened before a `signal()` is always looked at after it.
4. Every open transfer whose end somebody needs has a thread that waits for it: the compute thread, by
   `_wait_for`, or the watcher, by a signal. A start has to signal by itself if nobody looks later:
   - `prompt` (fixed): another transfer lane waits for an event of this lane: every start signals.
   - `_busy`: the compute thread is inside an action or has looked already: a receive that starts signals. The
     flag is down only where the thread will look at all receives before it computes again.
   - `_draining`: nothing is left to compute, and the thread has looked for the last time: every start signals.
   - `_asleep_for`: the event for which the compute thread sleeps: the start of the transfer that records it
     signals.
   - Sends are not urgent: `_SENDS_PER_SIGNAL` open ones signal, or the end of the step, or
     `statuses`.
5. The flags of 4 work in pairs, each side *writing before it reads*: a start appends to `open` and then reads
   the flags; the compute thread raises its flag and then reads `open`. So at least one of the two sees the
   other. The same holds for `_done` and `_asleep_for`: `_record` writes the one and then reads the other,
   `_wait_for` the reverse.
6. `_stopped` is set once, before a wake-up is sent, and never cleared. A wake-up may be stale: a woken thread
   looks again at what it waits for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from worker.contract.program import COMPUTE_LANE, SEND_OPS, Instruction, Program
from worker.engine.lanes.base import Action, Finish, LaneStatus

# A lane of sends is watched when this many are on their way (each holds its tensor), or at the next look.
_SENDS_PER_SIGNAL = 4


class _StepStopped(Exception):
    """The step was aborted while this lane waited."""


@dataclass(frozen=True)
class _LaneEntry:
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
        self.entries: list[_LaneEntry] = []
        self.started = self.ended = 0
        self.starting = threading.Lock()
        self.open: deque[tuple[_LaneEntry, float, Finish | None]] = deque()
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
        done, clock, wanted = self.group._done, time.monotonic, False
        with self.starting:
            while self.started < len(self.entries):
                entry = self.entries[self.started]
                if not all(done[event] for event in entry.waits):
                    break
                started_s = clock()
                self.open.append((entry, started_s, entry.action()))
                self.started += 1
                wanted = wanted or (entry.record is not None and entry.record == self.group._asleep_for)
        unseen = len(self.open) >= _SENDS_PER_SIGNAL if self.sends else self.group._busy
        if self.open and (wanted or unseen or self.prompt or self.group._draining):
            self.signal()

    def finish_until(self, event: int | None) -> None:
        """Wait, in order, for the ends of started transfers, up to the one that records `event`, or (None)
        as long as there are any. The caller holds `claim`. An error ends the step."""
        try:
            self._finish_until(event)
        except BaseException as error:
            # Still under `claim`: gloo never returns to who waits a second time for one transfer.
            self.group._fail(error)

    def _finish_until(self, event: int | None) -> None:
        group, clock = self.group, time.monotonic
        while self.open and not group._stopped:
            entry, started_s, finish = self.open[0]
            if finish is not None:
                self.waiting = (entry.index, clock())
                finish()
            end = clock()
            # A send's end is seen late, so only a lane of receives can say when the next one had the link.
            group._slots[entry.index] = (started_s if self.sends else max(started_s, self.last_end_s), end)
            self.last, self.last_end_s, self.waiting = entry.index, end, None
            if entry.record is not None:
                group._record(entry.record)
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
            self.group._wake_at_end(self)


class CpuLanes:
    """All lanes of one mesh. `actions[i]` starts what instruction i of `program` says and returns what waits
    for its end; a compute action has ended when it returns."""

    def __init__(self, program: Program, actions: Sequence[Action]):
        events = 1 + max((i.record for i in program if i.record is not None), default=-1)
        self._done = bytearray(events)
        self._slots: list[tuple[float, float]] = [(0.0, 0.0)] * len(program)
        self._stopped = False
        self._compute: list[_LaneEntry] = []
        self._lanes: dict[str, _TransferLane] = {}
        self._lane_of_event: dict[int, _TransferLane] = {}
        for index, (instruction, action) in enumerate(zip(program, actions, strict=True)):
            self._add(_LaneEntry(index, tuple(instruction.wait), instruction.record, action), instruction)
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
        self._asleep_for: int | None = None
        self._draining = False
        self._busy = False
        self._running = False
        # The instruction, since when, and the event that it waits for: one value, so that none is of another.
        self._at: tuple[int, float, int | None] | None = None
        self._last: int | None = None
        self._thread = threading.Thread(target=self._run, name=f"slotline-{COMPUTE_LANE}", daemon=True)
        for thread in self._threads().values():
            thread.start()

    def _add(self, entry: _LaneEntry, instruction: Instruction) -> None:
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
        self._done[:] = bytes(len(self._done))
        while not self._wakeups.empty():
            self._wakeups.get_nowait()
        for lane in self._lanes.values():
            lane.begin()
        self._last, self._draining, self._running = None, False, True
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
        """The status of every lane that has not ended its step. A transfer that no thread waits for yet is
        watched from now on."""
        statuses = []
        at = self._at
        if at is not None:
            statuses.append(LaneStatus(COMPUTE_LANE, *at, self._last))
        for lane in self._lanes.values():
            waiting = lane.waiting
            if waiting is not None:
                statuses.append(LaneStatus(lane.name, *waiting, None, lane.last))
            elif lane.open:
                lane.signal()
        return statuses

    def computing(self) -> AbstractContextManager[Any]:
        """The calling thread computes as the compute lane does: on CPU there is nothing to set."""
        return nullcontext()

    def last_compute(self) -> int | None:
        """The last compute instruction that ended."""
        return self._last

    def stop(self) -> None:
        """Make lanes that wait for an event end. One that is inside an action ends after that action."""
        self._stopped = True
        self._wakeups.put(None)

    def slot_times(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, monotonic seconds."""
        return list(self._slots)

    def close(self, timeout_s: float) -> list[str]:
        """End the threads; returns the lanes that did not end in time, inside a user's code."""
        self.stop()
        self._starts.put(False)
        for lane in self._lanes.values():
            lane.signals.put(False)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads().values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return [name for name, thread in self._threads().items() if thread.is_alive()]

    # For the lanes

    def _record(self, event: int) -> None:
        """`event` has happened: start what waited for nothing else, wake the compute lane if it waits."""
        self._done[event] = 1
        for lane in self._waiters[event]:
            lane.start_ready()
        if self._asleep_for == event:
            self._wakeups.put(event)

    def _fail(self, error: BaseException) -> None:
        """End the step with `error`, which goes first: a lane that is stopped ends the step too."""
        self._ended.put(error)
        self.stop()

    def _wake_at_end(self, lane: _TransferLane) -> None:
        """The compute lane has nothing left to compute and waits for the last transfers."""
        if self._draining and lane.done():
            self._wakeups.put(None)

    # The compute lane

    def _run(self) -> None:
        while self._starts.get():
            try:
                self._run_once()
            except _StepStopped:
                pass
            except BaseException as error:
                self._fail(error)
            self._at = None
            self._ended.put(None)

    def _run_once(self) -> None:
        done, slots, clock = self._done, self._slots, time.monotonic
        for lane in self._lanes.values():
            lane.start_ready()
        for entry in self._compute:
            self._busy = True  # invariant 5
            for event in entry.waits:
                if not done[event]:
                    self._wait_for(event, entry.index)
            if self._stopped:
                raise _StepStopped
            for lane in self._receives:
                if lane.open:
                    lane.signal()
            start = clock()
            self._at = (entry.index, start, None)
            entry.action()
            slots[entry.index] = (start, clock())
            self._last = entry.index
            self._busy = False
            if entry.record is not None:
                self._record(entry.record)
        self._at = None
        self._drain()

    def _wait_for(self, event: int, index: int) -> None:
        self._at = (index, time.monotonic(), event)
        lane = self._lane_of_event[event]
        for other in self._receives:
            if other is not lane and other.open:
                other.signal()
        while not self._done[event]:
            if self._stopped:
                raise _StepStopped
            if lane.open and lane.claim.acquire(blocking=False):
                try:
                    lane.finish_until(event)
                finally:
                    lane.claim.release()
                continue
            # The lane's watcher waits for it already, or will when it has been started (invariant 5).
            self._asleep_for = event
            lane.signal()
            if not self._done[event] and not self._stopped:
                self._wakeups.get()
            self._asleep_for = None

    def _drain(self) -> None:
        """Wait for the ends of the transfers that no computation needed."""
        self._draining = True  # invariant 5
        for lane in self._lanes.values():
            if lane.open:
                lane.signal()
        for lane in self._lanes.values():
            while not lane.done():
                if self._stopped:
                    raise _StepStopped
                self._wakeups.get()

    def _threads(self) -> dict[str, threading.Thread]:
        return {COMPUTE_LANE: self._thread} | {name: lane.thread for name, lane in self._lanes.items()}
