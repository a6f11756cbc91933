"""A fake of torch.cuda: streams that work when they may, not when the host says so, and a record of what was said.

Nothing runs while the host enqueues. When every host of a test waits for its device, the machine runs what is at
the head of some stream, then again, until all that was enqueued is done, or cannot go on; which one it takes is drawn
among all that the waits for events allow. Streams may be slow or quick for a whole step, so that what is not held
back by an event overtakes.

One simplification: an action of ours runs as a whole when its stream comes to it, its Python too. On a device
that Python has run long before, and a missing wait gives wrong numbers; here it may also raise KeyError.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from worker.contract.program import RECEIVE_OPS, SEND_OPS, Instruction

# How often a stream is chosen beside another.
_PACES = (0.01, 1.0, 100.0)


class Machine:
    """All devices of a test; one `seed` is one order. `at_once`: every action runs when it is enqueued."""

    def __init__(self, seed: int = 0, *, at_once: bool = False):
        self.at_once = at_once
        self.devices: list[FakeCuda] = []
        self.gathers = False  # STEP meets that of the other workers of its mesh
        self.order: list[str] = []
        """What ran, in order."""
        self._random = random.Random(seed)
        self._hosts = threading.Condition()
        self._waiting: dict[FakeCuda, Callable[[], bool]] = {}
        self._error: BaseException | None = None

    def device(self, mesh: str, worker: int = 0) -> FakeCuda:
        made = FakeCuda(self, mesh, worker)
        self.devices.append(made)
        return made

    def wait_for(self, device: FakeCuda, done: Callable[[], bool]) -> None:
        """The host of `device` waits. The last host to come does everybody's work."""
        with self._hosts:
            self._waiting[device] = done
            # One whose wait is over, but who has not woken yet, is still to come: it may enqueue more.
            over = [other for other in self._waiting.values() if other()]
            if not over and len(self._waiting) == len(self.devices):
                try:
                    self._run()
                except BaseException as error:
                    self._error = error
                self._hosts.notify_all()
            self._hosts.wait_for(lambda: done() or self._error is not None, 60)
            self._waiting.pop(device, None)
            if self._error is not None:
                raise self._error
            assert done(), "the other hosts did not come"

    def _run(self) -> None:
        streams = [
            s for device in sorted(self.devices, key=lambda d: (d.mesh, d.worker)) for s in device.streams
        ]
        paces = {id(stream): self._random.choice(_PACES) for stream in streams}
        while True:
            while any([stream.pass_events() for stream in streams]):
                pass
            heads = [stream for stream in streams if stream.pending]
            if not heads:
                return
            ready = list(self._ready(heads))
            if not ready and any(done() for done in self._waiting.values()):
                return  # a host that waits no more enqueues what the streams lack
            assert ready, f"the streams are stuck at {[stream.pending[0] for stream in heads]}"
            (chosen,) = self._random.choices(ready, [min(paces[id(s)] for s in group) for group in ready])
            self._run_together(chosen)

    def _ready(self, heads: Sequence[_Stream]):
        """Streams that may go on together: a computation, both halves of a transfer, REDUCE on all meshes, or that of
        a bucket on all workers of a mesh."""
        at = {stream: stream.pending[0] for stream in heads if isinstance(stream.pending[0], _Operation)}
        together: dict[str | None, list[_Stream]] = {}
        for stream, operation in at.items():
            if operation.instruction.op == "STEP" and self.gathers:
                together.setdefault(f"STEP {operation.mesh}", []).append(stream)
            if operation.instruction.op == "REDUCE":
                of_mesh = None if operation.instruction.stage is None else operation.mesh
                together.setdefault(of_mesh, []).append(stream)
        for mesh, streams in together.items():
            if len(streams) == len([d for d in self.devices if mesh in (None, d.mesh, f"STEP {d.mesh}")]):
                yield streams
        for stream, operation in at.items():
            op = operation.instruction.op
            if op in SEND_OPS:
                for other, received in at.items():
                    if operation.meets(received):
                        yield [stream, other]
            elif op not in RECEIVE_OPS and op != "REDUCE" and not (op == "STEP" and self.gathers):
                yield [stream]

    def _run_together(self, streams: Sequence[_Stream]) -> None:
        operations = [stream.pending.popleft() for stream in streams]
        self.order += [f"{operation.mesh} {operation.instruction}" for operation in operations]
        if operations[0].instruction.op not in ("REDUCE", "STEP"):
            for operation in operations:  # of a transfer: first what leaves, then where it arrives
                operation.action()
            return
        errors: list[BaseException] = []
        threads = [threading.Thread(target=_catch, args=(one.action, errors)) for one in operations]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class Ranges:
    """A fake of torch.cuda.nvtx."""

    def __init__(self):
        self.open: list[str] = []

    @contextlib.contextmanager
    def range(self, name: str):
        self.open.append(name)
        yield
        self.open.pop()


class FakeCuda:
    """One device: hand it to CudaLanes as `cuda`."""

    def __init__(self, machine: Machine, mesh: str, worker: int = 0):
        self.machine, self.mesh, self.worker = machine, mesh, worker
        self.streams: list[_Stream] = []
        self.calls: list[str] = []
        self.current: _Stream | None = None
        self.nvtx = Ranges()

    def Stream(self, priority=0):
        stream = _Stream(priority)
        self.streams.append(stream)
        return stream

    def Event(self, enable_timing=False, blocking=False):
        return _Event(self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def operation(self, label: int, instruction: Instruction, action: Callable[[], Any]) -> None:
        """Enqueue on the current stream what an action does."""
        self.calls.append("operation")
        self.current.said.append(("operation", label))
        if self.machine.at_once:
            action()
        else:
            self.current.pending.append(_Operation(self.mesh, self.worker, instruction, action))

    def finished_before(self):
        """For each operation, the set of operations that are surely over when it starts, by streams and
        events alone: computed by propagating sets until nothing changes."""
        known_at_event, result = {}, {}
        for _ in range(2 + sum(len(s.said) for s in self.streams)):
            changed = False
            for stream in self.streams:
                known = frozenset()
                for kind, what in stream.said:
                    if kind == "wait":
                        known |= known_at_event.get(what, frozenset())
                    elif kind == "record":
                        if known_at_event.get(what) != known:
                            known_at_event[what] = known
                            changed = True
                    else:
                        result[what] = known
                        known |= {what}
            if not changed:
                return result
        raise AssertionError("the record has a cycle")


@dataclass(frozen=True)
class _Operation:
    mesh: str
    worker: int
    instruction: Instruction
    action: Callable[[], Any]

    def meets(self, other: _Operation) -> bool:
        """Whether this send is the other half of that receive."""
        mine, theirs = self.instruction, other.instruction
        return (
            theirs.op == mine.op.replace("SEND", "RECV")
            and (theirs.edge, theirs.microbatch) == (mine.edge, mine.microbatch)
            and (mine.peer, theirs.peer) == (other.mesh, self.mesh)
            and self.worker == other.worker
        )


@dataclass(frozen=True)
class _Record:
    event: _Event
    number: int


@dataclass(frozen=True)
class _Wait:
    event: _Event
    number: int


class _Stream:
    """`said` is all that was ever enqueued, `pending` what has not run yet."""

    def __init__(self, priority):
        self.priority = priority
        self.said: list[tuple[str, Any]] = []
        self.pending: deque[_Operation | _Record | _Wait] = deque()
        self.cuda_stream = id(self)

    def wait_event(self, event):
        assert event.recorded, "a wait for an event that is not recorded yet waits for nothing"
        self.said.append(("wait", event.key))
        self.pending.append(_Wait(event, event.recorded))
        self.pass_events()

    def pass_events(self) -> bool:
        """Record, and pass, what is at the head; whether there was any."""
        passed = False
        while self.pending:
            head = self.pending[0]
            if isinstance(head, _Record):
                head.event.happened, head.event.at = head.number, time.monotonic()
            elif not (isinstance(head, _Wait) and head.event.happened >= head.number):
                break
            self.pending.popleft()
            passed = True
        return passed


class _Event:
    count = 0

    def __init__(self, cuda):
        self.cuda = cuda
        self.recorded = self.happened = 0
        self.at = 0.0
        _Event.count += 1
        self.number = _Event.count

    @property
    def key(self):
        return self.number, self.recorded

    def record(self, stream):
        self.recorded += 1
        stream.said.append(("record", self.key))
        stream.pending.append(_Record(self, self.recorded))
        stream.pass_events()
        self.cuda.calls.append("record")

    def query(self):
        return 0 < self.recorded == self.happened

    def synchronize(self):
        self.cuda.calls.append("synchronize")
        if not self.query():
            self.cuda.machine.wait_for(self.cuda, self.query)

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def _catch(action: Callable[[], Any], errors: list[BaseException]) -> None:
    try:
        action()
    except BaseException as error:
        errors.append(error)
