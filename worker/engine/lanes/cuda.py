"""Lanes on CUDA: one stream a lane, CUDA events between them, and one host thread that only enqueues.

The host runs ahead of the device by a bounded number of kernels (`RunAhead`): a stream takes about a thousand, and a
launch into a full one blocks, behind a peer that hangs for ever, and with it every query of an event. Slot times come
from the events and are read after the step. Every action is an NVTX range of its name, which profilers of kernels
show. A communicator never meets two streams at a time: state is gathered on
the compute stream. Must not know what an action does.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from worker.contract.program import COMPUTE_LANE, Program
from worker.engine.lanes.base import Action, LaneStatus
from worker.engine.results import StreamPriorities

_HOST_LANE = "host"
_MAX_LAUNCHES_AHEAD = 500
"""Kernels of unfinished compute actions, as counted in advance: about half of what a stream takes."""


class CudaLanes:
    """All lanes of one mesh on the current device. `actions[i]` enqueues what instruction i of `program`
    says on the current stream, about `launches[i]` kernels. `cuda` is torch.cuda unless a test brings its own."""

    def __init__(
        self,
        program: Program,
        actions: Sequence[Action],
        launches: Sequence[int],
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
        self._names = [str(instruction) for instruction in program]
        self._waits = _event_waits(program)
        self._ahead = RunAhead.of(program, self._waits, launches)
        waited_for = {index for waits in self._ahead.waits.values() for index in waits}
        self._begin = [cuda.Event(enable_timing=True) for _ in program]
        self._end = [cuda.Event(enable_timing=True, blocking=i in waited_for) for i in range(len(program))]
        self._step_start_event = cuda.Event(enable_timing=True)
        self._place = {index: place for place, index in enumerate(self._ahead.order)}
        self._indices = {
            lane: [i for i, other in enumerate(self._lane_of) if other == lane] for lane in self._streams
        }
        self._seen_ended = dict.fromkeys(self._indices, 0)
        self._finished = [cuda.Event(blocking=True) for _ in self._streams]
        self._step_start_s = 0.0
        self.host_s = 0.0
        """Processor seconds of the thread that enqueued the last step; autograd enqueues backwards in threads of its own."""
        self._enqueued = 0
        self._inside_since_s: float | None = None
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
        self._step_start_s = time.monotonic()
        self._enqueued, self._inside_since_s = 0, None
        self._seen_ended = dict.fromkeys(self._indices, 0)
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
        """The status of every lane, from its events; the host itself is a lane while it is inside an action."""
        if not self._running:
            return []
        enqueued, since_s = self._enqueued, self._inside_since_s
        statuses = []
        if enqueued < len(self._program) and since_s is not None:
            order = self._ahead.order
            last = order[enqueued - 1] if enqueued else None
            statuses.append(LaneStatus(_HOST_LANE, order[enqueued], since_s, None, last))
        for lane, indices in self._indices.items():
            ended = self._count_ended(lane, enqueued)
            if ended < len(indices) and self._place[indices[ended]] < enqueued:
                statuses.append(self._status(lane, indices[ended], indices[ended - 1] if ended else None))
        return statuses

    def last_compute(self) -> int | None:
        """The last compute instruction that ended on the device."""
        if COMPUTE_LANE not in self._indices:
            return None
        ended = self._count_ended(COMPUTE_LANE, self._enqueued)
        return self._indices[COMPUTE_LANE][ended - 1] if ended else None

    def _count_ended(self, lane: str, enqueued: int) -> int:
        """The number of instructions of a lane that have ended, of the first `enqueued` of all; asks only for those not seen
        yet."""
        indices, ended = self._indices[lane], self._seen_ended[lane]
        while ended < len(indices) and self._place[indices[ended]] < enqueued:
            if not self._end[indices[ended]].query():
                break
            ended += 1
        self._seen_ended[lane] = ended
        return ended

    def stop(self) -> None:
        """Make the host enqueue nothing more. What waits on the device ends when its communicator does."""
        self._stopped = True

    def slot_times(self) -> list[tuple[float, float]]:
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
                began_s = time.thread_time()
                self._enqueue()
                self.host_s = time.thread_time() - began_s
                for event, stream in zip(self._finished, self._streams.values(), strict=True):
                    event.record(stream)
                for event in self._finished:
                    event.synchronize()
                self._ended.put(None)
            except BaseException as error:
                self._ended.put(error)

    def _enqueue(self) -> None:
        cuda, streams, begin, end, waits = self._cuda, self._streams, self._begin, self._end, self._waits
        for index in self._ahead.order:
            for earlier in self._ahead.waits.get(index, ()):
                end[earlier].synchronize()  # without the GIL; an abort ends what it waits for
            if self._stopped:
                return
            self._inside_since_s = time.monotonic()
            stream = streams[self._lane_of[index]]
            for earlier in waits[index]:
                stream.wait_event(end[earlier])
            begin[index].record(stream)
            with cuda.nvtx.range(self._names[index]), cuda.stream(stream):
                self._actions[index]()
            end[index].record(stream)
            self._enqueued, self._inside_since_s = self._enqueued + 1, None

    def _status(self, lane: str, current: int, last: int | None) -> LaneStatus:
        if self._begin[current].query():
            return LaneStatus(lane, current, self._at(self._begin[current]), None, last)
        waited = next((w for w in self._waits[current] if not self._end[w].query()), None)
        event = None if waited is None else self._program[waited].record
        since = self._step_start_s if last is None else self._at(self._end[last])
        return LaneStatus(lane, current, since, -1 if event is None else event, last)

    def _at(self, event: Any) -> float:
        return self._step_start_s + self._step_start_event.elapsed_time(event) / 1e3


@dataclass(frozen=True)
class RunAhead:
    """The distance by which the host enqueues ahead of the device: the `order` in which it enqueues the instructions, and in
    `waits`, by instruction, those for whose end it waits before it does.

    Before a compute action it waits until the actions ahead of it, and it, have at most _MAX_LAUNCHES_AHEAD launches, or
    until one is left. Where two have more, one of them alone may fill the stream: it is enqueued when the device can run
    it, that is when what both wait for has ended. The transfers behind it do not wait for that with it.
    """

    order: tuple[int, ...]
    waits: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, program: Program, event_waits: Sequence[Sequence[int]], launches: Sequence[int]) -> RunAhead:
        """`event_waits[i]` are the instructions of other lanes for which instruction i waits on the device."""
        compute = [i for i, instruction in enumerate(program) if instruction.lane == COMPUTE_LANE]
        waits: dict[int, tuple[int, ...]] = {}
        for place, index in enumerate(compute):
            first, ahead = place, launches[index]
            while first and (
                place - first < 1 or ahead + launches[compute[first - 1]] <= _MAX_LAUNCHES_AHEAD
            ):
                first -= 1
                ahead += launches[compute[first]]
            waited = {compute[first - 1]} if first else set()
            if ahead > _MAX_LAUNCHES_AHEAD:
                waited |= {w for action in compute[first : place + 1] for w in event_waits[action]}
                if place and program[compute[place - 1]].op == "REDUCE":  # it waits for other meshes inside
                    waited.add(compute[place - 1])
            if waited:
                waits[index] = tuple(sorted(waited))
        return cls(_transfers_first(program, event_waits) if waits else tuple(range(len(program))), waits)


def _transfers_first(program: Program, event_waits: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The order of `program`, but that a transfer which stands behind one compute action, and needs neither that nor what
    is behind it, comes before it. Lanes keep their orders, and what is waited for stands before."""
    last_of_lane: dict[str, int] = {}
    needs: list[list[int]] = []
    for index, instruction in enumerate(program):
        same_lane = last_of_lane.get(instruction.lane)
        needs.append([*event_waits[index], *([] if same_lane is None else [same_lane])])
        last_of_lane[instruction.lane] = index
    compute = [i for i, instruction in enumerate(program) if instruction.lane == COMPUTE_LANE]
    order: dict[int, None] = {}
    waiting: list[int] = []
    seen = 0
    for action, behind in zip(compute, [*compute[1:], len(program)], strict=True):
        waiting += [i for i in range(seen, behind) if i != action]
        seen = behind
        for transfer in waiting:
            if all(need in order for need in needs[transfer]):
                order[transfer] = None
        waiting = [transfer for transfer in waiting if transfer not in order]
        order[action] = None
    order.update(dict.fromkeys(waiting))
    return tuple(order)


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
