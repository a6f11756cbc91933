"""Prometheus metrics of one job, served by its driver at /metrics and, for single slots, at /metrics/slots.

Values come as the JSON objects that the driver reports. The port is taken from SLOTLINE_METRICS_PORTS (first-last),
the range that a firewall opens for Prometheus; any free port without one.
MFU is model FLOP/s over peak FLOP/s (Chowdhery et al. 2022, PaLM); recomputation is no work of the model, so that it
lowers MFU.
Must not know the control plane, Ray, or how anything was measured. No state is shared between two DriverMetrics.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    make_wsgi_app,
)
from prometheus_client.exposition import start_wsgi_server

from worker.contract.profile import LayerProfile
from worker.contract.program import COMPUTE_LANE
from worker.driver.slot_metrics import MAX_SLOTS, SlotPage, row_names, slot_snapshot, text
from worker.driver.step_measurement import StepScaling, StepUsage
from worker.machine.telemetry import GpuUsage

log = logging.getLogger(__name__)


SLOTS_PATH = "/metrics/slots"

_COUNTERS: tuple[tuple[str, ...], ...] = (
    ("samples", "Samples that were trained on."),
    ("tokens", "Tokens that were trained on, where samples are sequences of tokens."),
    ("accelerator_seconds", "Seconds of all accelerators of the job, within its steps."),
    ("idle_accelerator_seconds", "Seconds in which accelerators of the job computed nothing.", "reason"),
    ("skipped_steps", "Steps that left out their update, as numbers were not finite.", "reason"),
)
"""Name, help text, and labels beside the job."""

_GAUGES: tuple[tuple[str, ...], ...] = (
    ("loss_scale", "Loss scale of the last finished step, in precision fp16."),
    ("step", "The last finished step."),
    ("train_loss", "Loss of the last finished step."),
    ("job_metric", "A metric that the loss returned in the last finished step.", "name"),
    ("evaluation_loss", "Loss of the last evaluation."),
    ("evaluation_metric", "A metric that the loss returned in the last evaluation.", "name"),
    ("grad_norm", "Global gradient norm of the last finished step, before clipping."),
    ("learning_rate", "Learning rate of the last finished step."),
    (
        "model_flops_per_second",
        "Floating point operations of the model a second in the last finished step; recomputation is none.",
    ),
    ("peak_flops_per_second", "What the accelerators of the job could do, by their vendor."),
    ("mfu", "Share of that which the model got in the last finished step, where both are known."),
    ("makespan_seconds", "Measured makespan of the last finished step."),
    ("bubble_ratio", "Measured bubble of the last finished step."),
    ("exposed_transfer_seconds", "Transfer time that no computation hid in the last finished step."),
    ("overlap_ratio", "Share of transfer time that computation hid in the last finished step."),
    ("plan_makespan_seconds", "Makespan that the plan promises."),
    ("plan_step_seconds", "Step that the plan promises: its makespan, REDUCE and STEP."),
    ("plan_bubble_ratio", "Bubble that the plan promises."),
    ("planned_memory_bytes", "The most that a mesh holds by its plan.", "mesh"),
    (
        "peak_memory_bytes",
        "The most that a worker of a mesh held in the last finished step: allocated on CUDA, resident on CPU.",
        "mesh",
    ),
    (
        "gpu_utilisation_ratio",
        "Share of time in which a kernel ran on a worker's GPU, by NVML.",
        "mesh",
        "worker",
    ),
    (
        "gpu_memory_used_bytes",
        "Memory in use on a worker's GPU, of all processes, by NVML.",
        "mesh",
        "worker",
    ),
    ("gpu_memory_total_bytes", "Memory of a worker's GPU, by NVML.", "mesh", "worker"),
    ("mesh_info", "1 for each mesh, with the nodes that its workers run on.", "mesh", "nodes"),
    (
        "launch_phase_seconds",
        "How long a phase between the driver's start and the end of the first step took.",
        "phase",
    ),
    (
        "checkpoint_duration_seconds",
        "How long the last one took; operation: restore, save, of which training stood still for block, and the "
        "slowest worker wrote for write.",
        "operation",
    ),
    ("profiled_step", "The last profiled step."),
    ("profiled_step_seconds", "Length of the last profiled step, from its first slot to its last."),
    ("profiled_compute_seconds", "Computing of a mesh in the last profiled step.", "mesh"),
    (
        "profiled_action_seconds",
        "Mean length of the slots of a stage and an action in the last profiled step.",
        "stage",
        "action",
    ),
    (
        "profiled_slots_dropped",
        f"Slots of the last profiled step beyond the first {MAX_SLOTS}, not exposed one by one.",
    ),
    ("plan_slots_dropped", f"Slots of the plan beyond the first {MAX_SLOTS}, not exposed one by one."),
)
"""Name, help text, and labels beside the job."""

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


class DriverMetrics:
    """The Prometheus metrics of one running job.

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
        self._slots = SlotPage(job)
        self.profiled_registry = CollectorRegistry()
        self._rows: dict[str, str] = {}
        self._step_seconds = Histogram(
            "slotline_step_seconds",
            "Time of an optimizer step.",
            ("job",),
            registry=self.registry,
            buckets=_STEP_BUCKETS,
        )
        self._action_seconds = Histogram(
            "slotline_action_seconds",
            "Time of a slot in the profiled steps.",
            ("job", "stage", "action"),
            registry=self.profiled_registry,  # hundreds of series that change with a profiled step only
            buckets=_ACTION_BUCKETS,
        )
        self._model_flops: ModelFlops | None = None
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        for name, about, *labels in _COUNTERS:
            self._counters[name] = Counter(
                f"slotline_{name}", about, ("job", *labels), registry=self.registry
            )
        for name, about, *labels in _GAUGES:
            self._gauges[name] = Gauge(f"slotline_{name}", about, ("job", *labels), registry=self.registry)

    def observe_step(self, step: Mapping[str, Any], exemplar: Mapping[str, str] | None = None) -> None:
        """Take in one finished step, a `steps` item of a report; absent or null values are skipped.

        `exemplar` has the labels that find the step: its trace, its span, its number.
        """
        if (seconds := step.get("step_s")) is not None:
            self._step_seconds.labels(self.job).observe(seconds, dict(exemplar) if exemplar else None)
            self._observe_flops(seconds)
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

    def _observe_flops(self, step_s: float) -> None:
        if (flops := self._model_flops) is None or step_s <= 0:
            return
        per_s = flops.step / step_s
        self._set("model_flops_per_second", per_s)
        if flops.peak_per_s is not None:
            self._set("mfu", per_s / flops.peak_per_s)

    def set_model_flops(self, flops: ModelFlops | None) -> None:
        """Take in the FLOPs of a step and the peak of its accelerators; None: not known."""
        self._model_flops = flops
        self._set("peak_flops_per_second", None if flops is None else flops.peak_per_s)

    def observe_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Take in one evaluation, an `evaluations` item of a report."""
        self._set("evaluation_loss", evaluation.get("loss"))
        self._set_labelled("evaluation_metric", evaluation.get("metrics") or {})

    def set_plan(self, plan: Mapping[str, Any], *, step_s: float | None = None) -> None:
        """Take in the plan that the job now follows (the JSON of a Plan), and the planned length of its steps."""
        self._set("plan_step_seconds", step_s)
        self._set("plan_makespan_seconds", plan.get("makespan_s"))
        self._set("plan_bubble_ratio", plan.get("bubble_ratio"))
        if slots := _sorted_by_start(plan.get("slots", ())):
            self._rows = row_names([mesh["name"] for mesh in plan["meshes"]])
            self._slots.planned = slot_snapshot(slots, self._rows)
            self._set("plan_slots_dropped", self._slots.planned.dropped)

    def observe_usage(self, usage: StepUsage) -> None:
        """Take in the accelerator seconds, samples and tokens of a finished step."""
        self._counters["accelerator_seconds"].labels(self.job).inc(usage.accelerator_s)
        for reason, seconds in usage.idle_s.items():
            self._counters["idle_accelerator_seconds"].labels(self.job, reason).inc(seconds)
        self._counters["samples"].labels(self.job).inc(usage.samples)
        if usage.tokens is not None:
            self._counters["tokens"].labels(self.job).inc(usage.tokens)

    def observe_scaling(self, scaling: StepScaling) -> None:
        """Take in the loss scale of a finished step, and whether it left out its update."""
        self._set("loss_scale", scaling.loss_scale)
        for reason, skipped in (("overflow", scaling.overflowed), ("not_finite", scaling.not_finite)):
            self._counters["skipped_steps"].labels(self.job, reason).inc(skipped)

    def observe_gpus(self, gpus: Mapping[tuple[str, int], GpuUsage]) -> None:
        """Take in NVML's figures of the GPUs of workers, by mesh and worker."""
        for (mesh, worker), usage in gpus.items():
            for name, value in (
                ("gpu_utilisation_ratio", usage.busy_ratio),
                ("gpu_memory_used_bytes", usage.used_bytes),
                ("gpu_memory_total_bytes", usage.total_bytes),
            ):
                self._gauges[name].labels(self.job, mesh, str(worker)).set(value)

    def set_nodes(self, mesh: str, nodes: Iterable[str]) -> None:
        """Take in the nodes on which the workers of a mesh run."""
        self._gauges["mesh_info"].labels(self.job, mesh, ", ".join(dict.fromkeys(nodes))).set(1)

    def add_launch_phase(self, phase: str, seconds: float) -> None:
        """Take in the seconds of a phase of the launch, or of a part of one."""
        self._gauges["launch_phase_seconds"].labels(self.job, phase).inc(seconds)

    def set_checkpoint(self, operation: str, seconds: float) -> None:
        """Take in the seconds of a checkpoint's `save` (of it `block` and `write`) or `restore`."""
        self._gauges["checkpoint_duration_seconds"].labels(self.job, operation).set(seconds)

    def set_planned_memory(self, peaks: Mapping[str, int]) -> None:
        """Take in the most bytes that each mesh holds by the plan."""
        self._set_labelled("planned_memory_bytes", peaks)

    def set_timeline(self, timeline: Mapping[str, Any]) -> None:
        """Take in a profiled step, a `timelines` item of a report: slots relative to `started_at`.

        Replaces the slots of the step before as a whole, and adds every slot to `slotline_action_seconds`. Lengths and sums
        are of all slots, also beyond the limit of exposed ones.
        """
        slots = _sorted_by_start(timeline["slots"])
        actions: dict[tuple[str, str], list[float]] = defaultdict(list)
        compute: dict[str, float] = defaultdict(float)
        for slot in slots:
            seconds = slot["end_s"] - slot["start_s"]
            actions[text(slot.get("stage")), slot["action"]].append(seconds)
            if slot["lane"] == COMPUTE_LANE:
                compute[slot["mesh"]] += seconds
        for labels, lengths in actions.items():
            histogram = self._action_seconds.labels(self.job, *labels)
            for seconds in lengths:
                histogram.observe(seconds)
            self._gauges["profiled_action_seconds"].labels(self.job, *labels).set(sum(lengths) / len(lengths))
        self._set_labelled("profiled_compute_seconds", compute)
        if slots:
            self._set("profiled_step_seconds", max(slot["end_s"] for slot in slots) - slots[0]["start_s"])
        self._set("profiled_step", timeline["step"])
        rows = self._rows or row_names(sorted(compute))
        shown = slot_snapshot(slots, rows, step=timeline["step"], started_at=timeline["started_at"])
        self._set("profiled_slots_dropped", shown.dropped)
        self._slots.measured = shown

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve `/metrics` and `/metrics/slots` on `host` and return "host:port"; port 0 takes a free one.

        Raises OSError when the address cannot be bound, RuntimeError when served already.
        """
        if self._server is not None:
            raise RuntimeError(f"metrics of job {self.job} are served already: call serve() once")
        self._server, self._thread = start_wsgi_server(port, host, self.registry)
        self._server.set_app(self._wsgi_app(make_wsgi_app(self.registry)))
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
            self._slots.measured = self._slots.planned = None
            histograms = self._step_seconds, self._action_seconds
            for metric in (*self._gauges.values(), *self._counters.values(), *histograms):
                metric.clear()

    def _wsgi_app(self, rest: Callable[..., Any]) -> Callable[..., Any]:
        """The application that answers `SLOTS_PATH` with the page of single slots, and any other path as `rest`."""

        def answer(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
            if environ["PATH_INFO"] != SLOTS_PATH or environ["REQUEST_METHOD"] != "GET":
                return rest(environ, start_response)
            body = self._slots.text() + generate_latest(self.profiled_registry)
            start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [body]

        return answer

    def _set(self, name: str, value: float | None) -> None:
        if value is not None:
            self._gauges[name].labels(self.job).set(value)

    def _set_labelled(self, name: str, values: Mapping[str, float | None]) -> None:
        for label, value in values.items():
            if value is not None:
                self._gauges[name].labels(self.job, label).set(value)


def _sorted_by_start(slots: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(slots, key=lambda slot: (slot["start_s"], slot["end_s"]))


def port_range(text: str) -> range:
    """The ports of "first-last"; none for an empty text."""
    if not text:
        return range(0)
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(
            f"SLOTLINE_METRICS_PORTS is {text!r}: give the first and the last port, e.g. 9400-9499"
        )
    return ports


def serve_in_range(metrics: DriverMetrics, host: str, text: str) -> str:
    """Serve at the first free port of the range and return "host:port".

    Where all are taken it is any free port: training goes on, and Prometheus may be kept out; the log says so.
    """
    ports = port_range(text)
    for port in ports:
        try:
            return metrics.serve(host=host, port=port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    endpoint = metrics.serve(host=host, port=0)
    if ports:
        log.warning(
            "all ports of SLOTLINE_METRICS_PORTS=%s are taken here: metrics are at %s, where a NetworkPolicy may keep "
            "Prometheus out; widen the range (monitoring.jobs.ports of the chart)",
            text,
            endpoint,
        )
    return endpoint


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of a step on all workers, and their peak FLOP/s together; None: not known."""

    step: int
    peak_per_s: float | None = None


def step_flops(
    workers: Sequence[tuple[str, LayerProfile | None]],
    *,
    stage_starts: Sequence[str],
    mesh_of_stage: Sequence[str],
    microbatches: int,
) -> int | None:
    """The FLOPs of a whole step; `workers` has the mesh of each worker and its layer profile for this plan.

    None where a layer's operations were not counted.
    """
    total = 0
    for mesh, profile in workers:
        if profile is None:
            return None
        names = [layer.name for layer in profile.layers]
        borders = [*(names.index(start) for start in stage_starts), len(names)]
        for stage, other in enumerate(mesh_of_stage):
            for layer in profile.layers[borders[stage] : borders[stage + 1]] if other == mesh else ():
                if layer.flops is None:
                    return None
                total += layer.flops
    return total * microbatches


def total_peak_flops(peaks: Sequence[float | None], workers_per_gpu: int) -> float | None:
    """The peak FLOP/s of all workers together, `workers_per_gpu` on each GPU; None where one is not known."""
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / workers_per_gpu if known and len(known) == len(peaks) else None
