"""Reporter: sends an attempt's steps, events, timelines, spans and states to the control plane from a thread.

Training never waits for the control plane: while it is unreachable reports queue here, in order, and go out when it
is back; of timelines and spans only the newest are kept. A report that is refused loses its least important part
first and its state last.
Spans go with the reports and are exported by the control plane: a driver needs no collector, credentials or packages
for that. Knows nothing of training, Ray or OpenTelemetry.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from worker.contract.logs import TraceParent
from worker.contract.program import COMPUTE_LANE
from worker.contract.reasons import Reason
from worker.driver.control_plane_client import REQUEST_TIMEOUT_S, ControlPlaneClient, Refused
from worker.driver.step_measurement import StepMeasurement

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MAX_STEPS_PER_REPORT = 2_000
MAX_EVENTS_PER_REPORT = 1_000
MAX_CARRIED_STEPS = 10_000
MAX_WAITING_SLOTS = 200_000
MAX_WAITING_SPANS = 1_000


FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass
class _PendingReport:
    steps: deque[dict[str, Any]] = field(default_factory=deque)
    evaluations: deque[dict[str, Any]] = field(default_factory=deque)
    timelines: deque[dict[str, Any]] = field(default_factory=deque)
    events: deque[dict[str, Any]] = field(default_factory=deque)
    states: deque[dict[str, Any]] = field(default_factory=deque)
    spans: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING_SPANS))
    checkpoint: dict[str, Any] | None = None
    best_checkpoint: dict[str, Any] | None = None
    model_flops: dict[str, Any] | None = None
    draining: list[dict[str, Any]] | None = None
    running_plan: dict[str, Any] | None = None

    def has_any(self) -> bool:
        return any(vars(self).values())


class Reporter:
    """Sends what is added, in order, at least every `heartbeat_s`; hears `cancel` and `stop`. The control plane has the
    steps up to `recorded_step`.

    `cancelled` is set when the control plane wants the attempt to end, `stop_requested` when it may save a checkpoint
    before, `fenced` when this attempt is no longer the job's current one, so that its reports are refused.
    """

    def __init__(
        self, control: ControlPlaneClient, *, heartbeat_s: float = HEARTBEAT_S, recorded_step: int = -1
    ):
        self.cancelled = threading.Event()
        self.stop_requested = threading.Event()
        self.fenced = threading.Event()
        self.next: Mapping[str, Any] | None = None
        """The job's next attempt (`attempt_id`, `token`, `traceparent`), where this driver is to run it."""
        self.wanted_checkpoints: frozenset[int] = frozenset()
        """The steps whose checkpoints other jobs wait for, as the control plane last said."""
        self._control = control
        self._heartbeat_s = heartbeat_s
        self._pending = _PendingReport()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._closing = threading.Event()
        self._sequence = 0
        self._unsent: dict[str, Any] | None = None
        self._metrics_endpoint: str | None = None
        self._away_since: float | None = None
        self._stepped, self._recorded_step = False, recorded_step
        self._thread = threading.Thread(target=self._run, name="slotline-reporter", daemon=True)

    def start(self) -> Reporter:
        self._thread.start()
        return self

    def state(
        self,
        state: str,
        *,
        reason: Reason | None = None,
        message: str | None = None,
        failed_nodes: Sequence[str] = (),
        takes_next: bool = False,
    ) -> None:
        """Report a change of the attempt's state, soon; `failed_nodes` are the Ray ids of nodes that a failure is due to.
        `takes_next`: this driver could run the job's next attempt, too, which is `next` once a final state is delivered."""
        change = {"state": state, "reason": reason, "message": message, "failed_nodes": list(failed_nodes)}
        self._add("states", change | ({"takes_next": True} if takes_next else {}))
        self._wake.set()

    def draining(self, nodes: Mapping[str, float]) -> None:
        """Report, soon, the Ray ids of all nodes that Ray drains now, each with the Unix time of its end."""
        with self._lock:
            self._pending.draining = [
                {"node": node_id, "until": at if math.isfinite(at) else None} for node_id, at in nodes.items()
            ]
        self._wake.set()

    def running_plan(self, since_step: int, plan: Mapping[str, Any]) -> None:
        """Report the plan that runs from a step on, as the control plane answered it."""
        with self._lock:
            self._pending.running_plan = {"since_step": since_step, "plan": dict(plan)}

    def step(self, step: Mapping[str, Any]) -> None:
        """Report a step: the first one, and the first that is new, soon, as somebody waits for them."""
        self._add("steps", dict(step))
        if not self._stepped or step["step"] == self._recorded_step + 1:
            self._stepped = True
            self._wake.set()

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Report an evaluation, and log it."""
        metrics = "".join(f"  {name} {value:.5g}" for name, value in evaluation["metrics"].items())
        log.info("evaluation after step %d: loss %.5g%s", evaluation["step"], evaluation["loss"], metrics)
        self._add("evaluations", dict(evaluation))

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Report a measured timeline; while the control plane is away only the newest are kept."""
        with self._lock:
            waiting = self._pending.timelines
            waiting.append(dict(timeline))
            while len(waiting) > 1 and _slot_count(waiting) > MAX_WAITING_SLOTS:
                waiting.popleft()

    def event(self, kind: str, message: str) -> None:
        """Report an event, and log it."""
        log.info("%s: %s", kind, message)
        self._add("events", {"at": time.time(), "kind": kind, "message": message})

    def span(self, span: Mapping[str, Any]) -> None:
        """Report a span; while the control plane is away only the newest are kept."""
        self._add("spans", dict(span))

    def checkpoint(self, step: int, uri: str, stored_bytes: int | None = None) -> None:
        """Report a checkpoint, and the bytes of all checkpoints of the job."""
        with self._lock:
            size = {} if stored_bytes is None else {"stored_bytes": stored_bytes}
            self._pending.checkpoint = {"step": step, "uri": uri, **size}

    def best_checkpoint(self, best: Mapping[str, Any]) -> None:
        """Report the checkpoint that is kept for being the best: `step`, `uri`, `metric` and `value`."""
        with self._lock:
            self._pending.best_checkpoint = dict(best)

    def undelivered(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """The records of `steps` and `evaluations` up to `step` of which the control plane has not said that it has them;
        of the steps the newest MAX_CARRIED_STEPS."""
        with self._lock:
            sent = self._unsent or {}
            found = {
                kind: [
                    item
                    for item in (*sent.get(kind, ()), *getattr(self._pending, kind))
                    if item["step"] <= step
                ]
                for kind in ("steps", "evaluations")
            }
        found["steps"] = found["steps"][-MAX_CARRIED_STEPS:]
        return found

    def deliver_again(
        self, records: Mapping[str, Iterable[Mapping[str, Any]]], recorded: Mapping[str, int]
    ) -> None:
        """Report records that `undelivered` gave to an earlier attempt, but those up to the step that is `recorded` of
        their kind: they arrived after all."""
        for kind in ("steps", "evaluations"):
            for item in records.get(kind) or ():
                if item["step"] > recorded.get(kind, -1):
                    self._add(kind, dict(item))

    def model_flops(self, step: int | None, peak_per_s: float | None) -> None:
        """Report the FLOPs of a step and the peak FLOP/s of all accelerators, each where it is known."""
        with self._lock:
            self._pending.model_flops = {"step": step, "peak_per_s": peak_per_s}

    def metrics_endpoint(self, endpoint: str) -> None:
        with self._lock:
            self._metrics_endpoint = endpoint

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything added so far was delivered; False when it was not, or when fenced."""
        self._idle.clear()
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while not self._idle.wait(0.05) and not self._closing.is_set():
            if self.fenced.is_set() or time.monotonic() > deadline or not self._thread.is_alive():
                return False
        return not self.fenced.is_set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout=REQUEST_TIMEOUT_S)

    def _add(self, kind: str, item: dict[str, Any]) -> None:
        with self._lock:
            getattr(self._pending, kind).append(item)

    def _run(self) -> None:
        pause_s = self._heartbeat_s
        while not self._closing.is_set() and not self.fenced.is_set():
            self._wake.wait(pause_s)
            self._wake.clear()
            pause_s = self._heartbeat_s if self._send_all() else min(2 * pause_s, 10.0)

    def _send_all(self) -> bool:
        """Send until nothing waits; False when the control plane could not be reached."""
        while True:
            body = self._unsent or self._take()
            try:
                answer = self._control.report(body)
            except httpx.HTTPError as error:
                self._unsent = body
                if self._away_since is None:
                    self._away_since = time.monotonic()
                    log.warning("control plane away (%s): training goes on, reports wait", error)
                return False
            except Refused as refused:
                if refused.final or refused.status == 404:
                    log.error("the control plane refused this attempt: %s", refused.detail)
                    self.fenced.set()
                    self._idle.set()
                    return True
                if self._drop_least_important(body, refused.detail):
                    continue
                return False
            except Exception as error:  # this thread must not end: a final state would never arrive
                log.exception("report %s could not be written", body["sequence"])
                if self._drop_least_important(body, str(error)):
                    continue
                return False
            self._unsent = None
            if self._away_since is not None:
                log.info("control plane back after %.1f s", time.monotonic() - self._away_since)
                self._away_since = None
            command = answer.get("command") if isinstance(answer, dict) else None
            if isinstance(answer, dict):
                self.wanted_checkpoints = frozenset(answer.get("wanted_checkpoints") or ())
            if command == "cancel":
                self.cancelled.set()
            elif command == "stop":
                self.stop_requested.set()
            if body.get("takes_next") and isinstance(answer, dict):
                self.next = answer.get("next")
            if body["state"] in FINAL_STATES:  # a report after the final one would be refused
                self._closing.set()
                self._idle.set()
                return True
            with self._lock:
                if not self._pending.has_any():
                    self._idle.set()
                    return True

    def _drop_least_important(self, body: dict[str, Any], why: str) -> bool:
        """Drop the least important part of a report that was refused, its state last; False when nothing is left."""
        for part in (
            *("spans", "timelines", "events", "steps", "evaluations", "draining", "failed_nodes"),
            *("running_plan", "model_flops", "metrics_endpoint", "best_checkpoint", "checkpoint", "message"),
        ):
            if body[part]:
                log.error("report %s was refused (%s): its %s are dropped", body["sequence"], why, part)
                self._unsent = {**body, part: [] if isinstance(body[part], list) else None}
                return True
        log.error("report %s was refused and is dropped: %s", body["sequence"], why)
        self._unsent = None
        if body["state"] in FINAL_STATES:
            self.fenced.set()
            self._idle.set()
        return False

    def _take(self) -> dict[str, Any]:
        """The next report: one change of state a report, after all that was added before it."""
        with self._lock:
            p = self._pending
            steps = [p.steps.popleft() for _ in range(min(len(p.steps), MAX_STEPS_PER_REPORT))]
            events = [p.events.popleft() for _ in range(min(len(p.events), MAX_EVENTS_PER_REPORT))]
            timelines = [p.timelines.popleft()] if p.timelines else []  # each is thousands of rows to write
            evaluations = [
                p.evaluations.popleft() for _ in range(min(len(p.evaluations), MAX_EVENTS_PER_REPORT))
            ]
            before = p.steps or p.evaluations or p.timelines or p.events
            change = p.states.popleft() if p.states and not before else {}
            spans, p.spans = list(p.spans), _PendingReport().spans
            checkpoint, p.checkpoint = p.checkpoint, None
            best, p.best_checkpoint = p.best_checkpoint, None
            flops, p.model_flops = p.model_flops, None
            draining, p.draining = p.draining, None
            running_plan, p.running_plan = p.running_plan, None
            self._sequence += 1
            self._unsent = {
                "sequence": self._sequence,
                "state": change.get("state"),
                "reason": change.get("reason"),
                "message": change.get("message"),
                "failed_nodes": change.get("failed_nodes", []),
                **({"takes_next": True} if change.get("takes_next") else {}),
                "draining": draining,
                "steps": steps,
                "evaluations": evaluations,
                "timelines": timelines,
                "events": events,
                "metrics_endpoint": self._metrics_endpoint,
                "checkpoint": checkpoint,
                "best_checkpoint": best,
                "model_flops": flops,
                "spans": spans,
                "running_plan": running_plan,
            }
            return self._unsent


def _slot_count(timelines: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(timeline.get("slots", ())) for timeline in timelines)


_SPAN_ATTRIBUTES = (
    *("loss", "step_s", "makespan_s", "bubble_ratio", "exposed_transfer_s", "overlap_ratio"),
    *("grad_norm", "learning_rate"),
)


class Spans:
    """The spans of an attempt, sent as items of reports; none without `send`."""

    def __init__(
        self, trace: TraceParent | None, send: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._trace, self._send = trace, send

    @classmethod
    def from_environment(cls, send: Callable[[dict[str, Any]], None]) -> Spans:
        """SLOTLINE_TRACEPARENT is the attempt's span; with SLOTLINE_SPANS the control plane exports them."""
        wanted = os.environ.get("SLOTLINE_SPANS") == "1"
        return cls(TraceParent.read(os.environ.get("SLOTLINE_TRACEPARENT")), send if wanted else None)

    def add_ended(self, name: str, seconds: float) -> None:
        """Send a span that ends now and took `seconds`."""
        if self._trace is not None and self._send is not None:
            now = time.time()
            self._send(_span_item(self._trace.child().span_id, name, now - seconds, now, {}))

    def step(self, record: StepMeasurement, *, profiled: bool) -> dict[str, str]:
        """Send the span of a finished step where it is profiled; the labels of the exemplar that finds it from a metric."""
        if self._trace is None:
            return {}
        labels = {"trace_id": self._trace.trace_id, "step": str(record.report["step"])}
        if not profiled or self._send is None:
            return labels
        step = self._trace.child().span_id
        began = record.timeline["started_at"]
        ends = began + max(slot["end_s"] for slot in record.timeline["slots"])
        shown = {name: record.report.get(name) for name in _SPAN_ATTRIBUTES}
        self._send(_span_item(step, "step", began, ends, {"step": record.report["step"]} | shown))
        for mesh, slots in _slots_by_mesh(record.timeline).items():
            lengths: dict[str, float] = defaultdict(float)
            for slot in slots:
                lane = "compute_s" if slot["lane"] == COMPUTE_LANE else "transfer_s"
                lengths[lane] += slot["end_s"] - slot["start_s"]
            first, last = min(slot["start_s"] for slot in slots), max(slot["end_s"] for slot in slots)
            about = {"step": record.report["step"], "mesh": mesh, "slots": len(slots)} | lengths
            own = self._trace.child().span_id
            self._send(_span_item(own, f"step on {mesh}", began + first, began + last, about, parent=step))
        return labels | {"span_id": step}


def _slots_by_mesh(timeline: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    slots: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for slot in timeline["slots"]:
        slots[slot["mesh"]].append(slot)
    return dict(slots)


def _span_item(
    span_id: str,
    name: str,
    started_at: float,
    ended_at: float,
    attributes: Mapping[str, Any],
    *,
    parent: str | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        "span_id": span_id,
        "parent_id": parent,
        "started_at": started_at,
        "ended_at": ended_at,
        "attributes": {f"slotline.{name}": value for name, value in attributes.items()},
    }


class LaunchPhases:
    """The phases between the driver's start and the end of the first step: they follow each other without a gap, the first
    one begins now. `report` is called with the name and the seconds of each, of one that has several parts with each part.
    """

    def __init__(
        self, report: Callable[[str, float], None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._now = report, now
        self._since = now()

    def end_phase(self, name: str) -> None:
        """The current phase, called `name`, is over, and the next one begins."""
        since, self._since = self._since, self._now()
        self._report(name, self._since - since)

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase of its own within the current one, which does not count its time."""
        began = self._now()
        try:
            yield
        finally:
            seconds = self._now() - began
            self._since += seconds
            self._report(name, seconds)
