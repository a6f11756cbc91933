"""A recording fake of torch.cuda: streams and events that remember what was enqueued, in order."""

from __future__ import annotations

import contextlib
import time


class FakeCuda:
    """Hand it to CudaLanes as `cuda`. Work is done when it is enqueued; the record tells what may run when."""

    def __init__(self):
        self.streams = []
        self.calls = []
        self.current = None

    def Stream(self, priority=0):
        stream = _Stream(self, priority)
        self.streams.append(stream)
        return stream

    def Event(self, enable_timing=False, blocking=False):
        return _Event(self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def operation(self, label):
        """What an action enqueues on the current stream."""
        self.current.queue.append(("operation", label))
        self.calls.append("operation")

    def finished_before(self):
        """For each operation, the set of operations that are surely over when it starts, by streams and
        events alone: computed by propagating sets until nothing changes."""
        known_at_event, result = {}, {}
        for _ in range(2 + sum(len(s.queue) for s in self.streams)):
            changed = False
            for stream in self.streams:
                known = frozenset()
                for kind, what in stream.queue:
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


class _Stream:
    def __init__(self, cuda, priority):
        self.cuda, self.priority = cuda, priority
        self.queue = []
        self.cuda_stream = id(self)

    def wait_event(self, event):
        assert event.recorded, "a wait for an event that is not recorded yet waits for nothing"
        self.queue.append(("wait", event.key))


class _Event:
    count = 0

    def __init__(self, cuda):
        self.cuda = cuda
        self.recorded = 0
        self.at = 0.0
        _Event.count += 1
        self.number = _Event.count

    @property
    def key(self):
        return self.number, self.recorded

    def record(self, stream):
        self.recorded += 1
        self.at = time.monotonic()
        stream.queue.append(("record", self.key))
        self.cuda.calls.append("record")

    def query(self):
        return bool(self.recorded)

    def synchronize(self):
        self.cuda.calls.append("synchronize")

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3
