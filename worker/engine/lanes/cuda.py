"""Lanes on CUDA: one stream a lane, CUDA events between them, and one host thread that only enqueues.

The host does not wait for the device between the first and the last instruction of a step; slot times come from
the events and are read after it. A communicator never meets two streams at a time: state is gathered on the
compute stream. Must not know what an action does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from worker.contract.program import COMPUTE_LANE, Program
from worker.engine.lanes.base import Action, LaneStatus
from worker.engine.results import StreamPriorities

_HOST_LANE = "host"


class CudaLanes:
    """All lanes of one mesh on the current device. `actions[i]` enqueues what instruction i of `program`
    says on the current stream. `cuda` is torch.cuda unless a test brings its own."""

    def __init__(
        self,
        program: Program,
        actions: Sequence[Action],
        priorities: StreamPriorities | None = None,
        cuda: Any = torch.cuda,
    ):
        priorities = priorities or StreamPriorities()
        self._program, self._actions, self._cuda = program, actions, cuda
        self._streams = {
            lane: cuda.Stream(priority=priorities.compute if lane == COMPUTE_LANE else priorities.transfer)
            for lane in dict.fromkeys(instruction.lane for instruction in program)
        }
        self._lane_of = [instruction.lane for instruction in program]
        self._begin = [cuda.Event(enable_timing=True) for _ in program]
        self._end = [cuda.Event(enable_timing=True) for _ in program]
        self._step_start_event = cuda.Event(enable_timing=True)
        self._waits = _event_waits(program)
        self._indices = {
            lane: [i for i, other in enumerate(self._lane_of) if other == lane] for lane in self._streams
        }
        self._finished = [cuda.Event(blocking=True) for _ in self._streams]
        self._step_start_s = 0.0
        self._enqueued = 0
        self._host_since_s = 0.0
        self._running = False
        self._stopped = False
        self._starts: queue.SimpleQueue = queue.SimpleQueue()
        self._ended: queue.SimpleQueue = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if cuda is torch.cuda else None
        self._thread = threading.Thread(target=self._host, name="slotline-host", daemon=True)
        self._thread.start()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context that enqueues on the stream of the compute lane, as a communicator must not meet two streams at a time;
        waits for the device at the end."""
        stream = self._streams[COMPUTE_LANE]
        with self._cuda.stream(stream):
            yield
        over = self._cuda.Event(blocking=True)
        over.record(stream)
        over.synchronize()

    def start(self) -> None:
        """Begin a step: the device is idle, so the clocks can be related here without disturbing it."""
        compute = self._streams.get(COMPUTE_LANE) or next(iter(self._streams.values()))
        self._step_start_event.record(compute)
        self._step_start_event.synchronize()
        self._step_start_s = self._host_since_s = time.monotonic()
        self._enqueued = 0
        self._running = True
        self._starts.put(True)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the device has done the step; False after `timeout_s`. Raises what an action raised."""
        if not self._running:
            return True
        try:
            error = self._ended.get(timeout=timeout_s)
        except queue.Empty:
            return False
        self._running = False
        if error is not None:
            raise error
        return True

    def statuses(self) -> list[LaneStatus]:
        """The status of every lane, from its events; the host itself is a lane while it enqueues."""
        if not self._running:
            return []
        enqueued = self._enqueued
        statuses = []
        if enqueued < len(self._program):
            statuses.append(
                LaneStatus(_HOST_LANE, enqueued, self._host_since_s, None, enqueued - 1 if enqueued else None)
            )
        for lane, indices in self._indices.items():
            last, current = None, None
            for index in indices:
                if index >= enqueued:
                    break
                if not self._end[index].query():
                    current = index
                    break
                last = index
            if current is not None:
                statuses.append(self._status(lane, current, last))
        return statuses

    def last_compute(self) -> int | None:
        """The last compute instruction that ended on the device."""
        last = None
        for index in self._indices.get(COMPUTE_LANE, ()):
            if index >= self._enqueued or not self._end[index].query():
                break
            last = index
        return last

    def stop(self) -> None:
        """Make the host enqueue nothing more. What waits on the device ends when its communicator does."""
        self._stopped = True

    def measured(self) -> list[tuple[float, float]]:
        """Start and end of every instruction of the finished step, monotonic seconds."""
        return [(self._at(b), self._at(e)) for b, e in zip(self._begin, self._end, strict=True)]

    def close(self, timeout_s: float) -> list[str]:
        """End the host thread; ["host"] if it is stuck."""
        self.stop()
        self._starts.put(False)
        self._thread.join(timeout_s)
        return [_HOST_LANE] if self._thread.is_alive() else []

    def _host(self) -> None:
        if self._device is not None:
            self._cuda.set_device(self._device)
        while self._starts.get():
            try:
                self._enqueue()
                for event, stream in zip(self._finished, self._streams.values(), strict=True):
                    event.record(stream)
                for event in self._finished:
                    event.synchronize()
                self._ended.put(None)
            except BaseException as error:
                self._ended.put(error)

    def _enqueue(self) -> None:
        cuda, streams, begin, end, waits = self._cuda, self._streams, self._begin, self._end, self._waits
        for index, action in enumerate(self._actions):
            if self._stopped:
                return
            stream = streams[self._lane_of[index]]
            for earlier in waits[index]:
                stream.wait_event(end[earlier])
            begin[index].record(stream)
            with cuda.stream(stream):
                action()
            end[index].record(stream)
            self._host_since_s = time.monotonic()
            self._enqueued = index + 1

    def _status(self, lane: str, current: int, last: int | None) -> LaneStatus:
        if self._begin[current].query():
            return LaneStatus(lane, current, self._at(self._begin[current]), None, last)
        waited = next((w for w in self._waits[current] if not self._end[w].query()), None)
        event = None if waited is None else self._program[waited].record
        since = self._step_start_s if last is None else self._at(self._end[last])
        return LaneStatus(lane, current, since, -1 if event is None else event, last)

    def _at(self, event: Any) -> float:
        return self._step_start_s + self._step_start_event.elapsed_time(event) / 1e3


def _event_waits(program: Program) -> list[list[int]]:
    """For each instruction, the instructions of other lanes whose end it waits for. ValueError for one that the host would
    enqueue later: a stream does not wait for an event before it is recorded, and takes the last step's for it."""
    recorder = {
        instruction.record: i for i, instruction in enumerate(program) if instruction.record is not None
    }
    waits = []
    for index, instruction in enumerate(program):
        waited = [recorder.get(event, index) for event in instruction.wait]
        if late := [event for event, at in zip(instruction.wait, waited, strict=True) if at >= index]:
            raise ValueError(
                f"{instruction} waits for event {late[0]}, which nothing before it in the program records: a stream "
                "would not wait for it; plan the job anew"
            )
        waits.append([at for at in waited if program[at].lane != instruction.lane])
    return waits
