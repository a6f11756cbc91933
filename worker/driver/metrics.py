"""Prometheus metrics of one job, served by its driver.

Values come as the JSON objects that the driver reports; this module must not know the
control plane, Ray, or how anything was measured. No state is shared between two objects.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import start_wsgi_server
from prometheus_client.registry import Collector

MAX_SLOTS = 4096
_SLOT_LABELS = ("mesh", "lane", "stage", "action", "microbatch")
_STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ACTION_BUCKETS = (
    1e-5,
    1e-4,
    2.5e-4,
    5e-4,
    1e-3,
    2.5e-3,
    5e-3,
    1e-2,
    2.5e-2,
    5e-2,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One slot as it is exposed: its labels, its start as Unix time, its length."""

    labels: Mapping[str, str]
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The slots of one profiled step; never changed, only replaced as a whole."""

    step: int
    slots: tuple[_Slot, ...]
    dropped: int


class JobMetrics:
    """Everything that Prometheus can know about one running job.

    `registry` is a fresh one unless given. All methods may be called from any thread, and
    while scrapes run.
    """

    def __init__(self, job: str, registry: CollectorRegistry | None = None) -> None:
        self.job = job
        self.registry = registry or CollectorRegistry()
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._closed = threading.Lock()
        self._slots = _SlotCollector(job)
        self.registry.register(self._slots)
        self._step_seconds = self._histogram("step_seconds", "Time of an optimizer step.", _STEP_BUCKETS)
        self._action_seconds = self._histogram(
            "action_seconds",
            "Time of a slot in the profiled steps.",
            _ACTION_BUCKETS,
            "stage",
            "action",
        )
        self._gauges: dict[str, Gauge] = {}
        self._gauge("step", "The last finished step.")
        self._gauge("train_loss", "Loss of the last finished step.")
        self._gauge("job_metric", "A metric that the loss returned in the last finished step.", "name")
        self._gauge("evaluation_loss", "Loss of the last evaluation.")
        self._gauge("evaluation_metric", "A metric that the loss returned in the last evaluation.", "name")
        self._gauge("grad_norm", "Global gradient norm of the last finished step, before clipping.")
        self._gauge("learning_rate", "Learning rate of the last finished step.")
        self._gauge("makespan_seconds", "Measured makespan of the last finished step.")
        self._gauge("bubble_ratio", "Measured bubble of the last finished step.")
        self._gauge(
            "exposed_transfer_seconds", "Transfer time that no computation hid in the last finished step."
        )
        self._gauge("overlap_ratio", "Share of transfer time that computation hid in the last finished step.")
        self._gauge("plan_makespan_seconds", "Makespan that the plan promises.")
        self._gauge("plan_step_seconds", "Step that the plan promises: its makespan, REDUCE and STEP.")
        self._gauge("plan_bubble_ratio", "Bubble that the plan promises.")
        self._gauge("planned_memory_bytes", "The most that a mesh holds by its plan.", "mesh")
        self._gauge(
            "peak_memory_bytes",
            "The most that a worker of a mesh held in the last finished step: allocated on CUDA, resident on CPU.",
            "mesh",
        )

    def observe_step(self, step: Mapping[str, Any]) -> None:
        """Take in one finished step, a `steps` item of a report; what is absent or null is skipped."""
        if (seconds := step.get("step_s")) is not None:
            self._step_seconds.labels(self.job).observe(seconds)
        self._set("step", step.get("step"))
        self._set("train_loss", step.get("loss"))
        self._set_labelled("job_metric", step.get("metrics") or {})
        self._set("grad_norm", step.get("grad_norm"))
        self._set("learning_rate", step.get("learning_rate"))
        self._set("makespan_seconds", step.get("makespan_s"))
        self._set("bubble_ratio", step.get("bubble_ratio"))
        self._set("exposed_transfer_seconds", step.get("exposed_transfer_s"))
        self._set("overlap_ratio", step.get("overlap_ratio"))
        self._set_labelled("peak_memory_bytes", step.get("peak_memory_bytes") or {})

    def observe_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Take in one evaluation, an `evaluations` item of a report."""
        self._set("evaluation_loss", evaluation.get("loss"))
        self._set_labelled("evaluation_metric", evaluation.get("metrics") or {})

    def set_plan(self, plan: Mapping[str, Any], *, step_s: float | None = None) -> None:
        """Take in the plan that the job now follows (the JSON of a Plan), and the planned length of its steps."""
        self._set("plan_step_seconds", step_s)
        self._set("plan_makespan_seconds", plan.get("makespan_s"))
        self._set("plan_bubble_ratio", plan.get("bubble_ratio"))

    def set_planned_memory(self, peaks: Mapping[str, int]) -> None:
        """Take in the most bytes that each mesh holds by the plan."""
        self._set_labelled("planned_memory_bytes", peaks)

    def set_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Take in a profiled step, a `timelines` item of a report: slots relative to `started_at`.

        Replaces the slots of the step before as a whole, and adds every slot to `action_seconds`.
        """
        slots = sorted(timeline["slots"], key=lambda slot: (slot["start_s"], slot["end_s"]))
        for slot in slots:
            labels = self.job, _text(slot.get("stage")), slot["action"]
            self._action_seconds.labels(*labels).observe(slot["end_s"] - slot["start_s"])
        self._slots.snapshot = _snapshot(timeline["step"], timeline["started_at"], slots)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve `/metrics` on `host` and return "host:port"; port 0 takes a free one.

        Raises OSError when the address cannot be bound, RuntimeError when served already.
        """
        if self._server is not None:
            raise RuntimeError(f"metrics of job {self.job} are served already: call serve() once")
        self._server, self._thread = start_wsgi_server(port, host, self.registry)
        bound = self._server.server_port
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def close(self, linger_s: float = 0.0) -> None:
        """Go on serving for `linger_s`, then stop serving and forget every series.

        Blocks for that time; a second call from another thread ends it at once. A scraper thus
        sees the last values once more before the target goes.
        """
        if linger_s > 0 and self._server is not None:
            self._closing.wait(linger_s)
        self._closing.set()
        with self._closed:
            if self._server is not None and self._thread is not None:
                self._server.shutdown()
                self._server.server_close()
                self._thread.join()
                self._server = self._thread = None
            self._slots.snapshot = None
            for metric in (*self._gauges.values(), self._step_seconds, self._action_seconds):
                metric.clear()

    def _gauge(self, name: str, text: str, *labels: str) -> None:
        self._gauges[name] = Gauge(f"slotline_{name}", text, ("job", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"slotline_{name}", text, ("job", *labels), registry=self.registry, buckets=buckets)

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._gauges[name].labels(self.job).set(value)

    def _set_labelled(self, name: str, values: Mapping[str, float | None]) -> None:
        for label, value in values.items():
            if value is not None:
                self._gauges[name].labels(self.job, label).set(value)


class _SlotCollector(Collector):
    """Emits the slots of the last profiled step; a scrape sees one snapshot or the next, never a mix."""

    def __init__(self, job: str) -> None:
        self._job = job
        self.snapshot: _Snapshot | None = None

    def describe(self) -> list[Metric]:
        return [Metric(f"slotline_{name}", text, "gauge", unit) for name, text, unit in _SLOT_METRICS]

    def collect(self) -> Iterator[Metric]:
        snapshot = self.snapshot
        if snapshot is None:
            return
        starts, durations, step, dropped = self.describe()
        job = {"job": self._job}
        for slot in snapshot.slots:
            labels = {**job, **slot.labels}
            starts.add_sample(starts.name, labels, slot.start_s)
            durations.add_sample(durations.name, labels, slot.duration_s)
        step.add_sample(step.name, job, snapshot.step)
        dropped.add_sample(dropped.name, job, snapshot.dropped)
        yield from (starts, durations, step, dropped)


_SLOT_METRICS = (
    ("slot_start_timestamp_seconds", "Start of a slot of the last profiled step, as Unix time.", "seconds"),
    ("slot_duration_seconds", "Length of a slot of the last profiled step.", "seconds"),
    ("profiled_step", "The last profiled step, to which the slots belong.", ""),
    (
        "profiled_slots_dropped",
        f"Slots of the last profiled step beyond the first {MAX_SLOTS}, not exposed.",
        "",
    ),
)


def _snapshot(step: int, started_at: float, slots: list[Mapping[str, Any]]) -> _Snapshot:
    """The first `MAX_SLOTS` of `slots` (in order of start), each with labels of its own.

    Two tensors that one stage sends to one mesh for one microbatch share the six labels; such
    slots carry their `edge` as one more, since Prometheus keeps one of two equal series.
    """
    kept = slots[:MAX_SLOTS]
    labels = [{name: _text(slot.get(name)) for name in _SLOT_LABELS} for slot in kept]
    times = Counter(tuple(label.values()) for label in labels)
    out = []
    for slot, label in zip(kept, labels, strict=True):
        if times[tuple(label.values())] > 1:
            label["edge"] = _text(slot.get("edge"))
        out.append(_Slot(label, started_at + slot["start_s"], slot["end_s"] - slot["start_s"]))
    return _Snapshot(step, tuple(out), len(slots) - len(kept))


def _text(value: Any) -> str:
    return "" if value is None else str(value)
