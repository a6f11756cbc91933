"""Reports of one attempt to the control plane, over HTTP with the attempt's token.

Reports are collected in order and sent by a thread of their own, so that training never waits
for the control plane; while it is away they wait here, and go out when it is back.
Knows nothing of training and nothing of Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import tenacity

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
REQUEST_TIMEOUT_S = 30.0
PLAN_TIMEOUT_S = 180.0
MAX_STEPS_PER_REPORT = 2_000
MAX_WAITING_TIMELINES = 64


class Refused(RuntimeError):
    """The control plane gave a final answer that is not yes; `status` is the HTTP status."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status
        self.detail = detail


class ControlPlane:
    """The routes of one attempt.

    Every call is tried again with growing pauses while the control plane cannot be reached or
    answers 5xx, for `patience_s`; a 4xx raises Refused with the problem's detail.
    """

    def __init__(self, url: str, attempt_id: str, token: str, *, patience_s: float = 600.0):
        self._client = httpx.Client(
            base_url=f"{url.rstrip('/')}/api/v1/attempts/{attempt_id}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=REQUEST_TIMEOUT_S,
        )
        self._patience_s = patience_s

    def attempt(self) -> dict[str, Any]:
        """The attempt with its job: `attempt_id`, `job_id`, `number`, `job`, `device`."""
        return self._patiently("GET", "")

    def cached_profile(self, key: str) -> dict[str, Any] | None:
        """The layer profile stored under `key`, or None."""
        try:
            return self._patiently("GET", "/profile", params={"key": key})
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def store_profile(self, key: str, profile: Mapping[str, Any]) -> None:
        self._patiently("PUT", "/profile", params={"key": key}, json=profile)

    def plan(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`begins`, `spec` and `plan` for a profile, the measured network and the placed workers."""
        return self._patiently("POST", "/plan", json=request, timeout=PLAN_TIMEOUT_S)

    def report(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one report, one try. Raises httpx.HTTPError when it should be sent again, else Refused."""
        return self._once("POST", "/reports", json=body)

    def close(self) -> None:
        self._client.close()

    def _patiently(self, method: str, path: str, **kwargs: Any) -> Any:
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.HTTPError),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            stop=tenacity.stop_after_delay(self._patience_s),
            before_sleep=tenacity.before_sleep_log(log, logging.WARNING),
            reraise=True,
        )
        return retry(self._once, method, path, **kwargs)

    def _once(self, method: str, path: str, **kwargs: Any) -> Any:
        response = self._client.request(method, path, **kwargs)
        if response.status_code == 429 or response.status_code >= 500:
            response.raise_for_status()
        if response.is_error:
            raise Refused(response.status_code, _detail(response))
        return response.json() if response.content else None


FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass
class _Pending:
    steps: deque[dict[str, Any]] = field(default_factory=deque)
    timelines: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_WAITING_TIMELINES))
    events: deque[dict[str, Any]] = field(default_factory=deque)
    states: deque[dict[str, Any]] = field(default_factory=deque)
    checkpoint: dict[str, Any] | None = None


class Reporter:
    """Sends what is added, in order, at least every `heartbeat_s`; hears `cancel`.

    `cancelled` is set when the control plane asks to stop, `fenced` when it says that this
    attempt is no longer the job's current one (then nobody wants its results any more).
    """

    def __init__(self, control: ControlPlane, *, heartbeat_s: float = HEARTBEAT_S):
        self.cancelled = threading.Event()
        self.fenced = threading.Event()
        self._control = control
        self._heartbeat_s = heartbeat_s
        self._pending = _Pending()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._idle = threading.Event()
        self._closing = threading.Event()
        self._sequence = 0
        self._unsent: dict[str, Any] | None = None
        self._metrics_endpoint: str | None = None
        self._away_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="slotline-reporter", daemon=True)

    def start(self) -> Reporter:
        self._thread.start()
        return self

    def state(self, state: str, *, reason: str | None = None, message: str | None = None) -> None:
        """Report a change of the attempt's state, soon."""
        self._add("states", {"state": state, "reason": reason, "message": message})
        self._wake.set()

    def step(self, step: Mapping[str, Any]) -> None:
        self._add("steps", dict(step))

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """Report a measured timeline; while the control plane is away only the newest are kept."""
        self._add("timelines", dict(timeline))

    def event(self, kind: str, message: str) -> None:
        self._add("events", {"at": time.time(), "kind": kind, "message": message})

    def checkpoint(self, step: int, uri: str) -> None:
        with self._lock:
            self._pending.checkpoint = {"step": step, "uri": uri}

    def metrics_endpoint(self, endpoint: str) -> None:
        with self._lock:
            self._metrics_endpoint = endpoint

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything added so far was delivered; False when it was not, or when fenced."""
        self._idle.clear()
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while not self._idle.wait(0.05) and not self._closing.is_set():
            if self.fenced.is_set() or time.monotonic() > deadline:
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
                if refused.status in (401, 404, 409):
                    log.error("the control plane refused this attempt: %s", refused.detail)
                    self.fenced.set()
                    self._idle.set()
                    return True
                log.error("report %s was refused and is dropped: %s", body["sequence"], refused.detail)
                self._unsent = None
                continue
            self._unsent = None
            if self._away_since is not None:
                log.info("control plane back after %.1f s", time.monotonic() - self._away_since)
                self._away_since = None
            if (answer or {}).get("command") == "cancel":
                self.cancelled.set()
            if body["state"] in FINAL_STATES:  # a report after the final one would be refused
                self._closing.set()
                self._idle.set()
                return True
            with self._lock:
                p = self._pending
                if not (p.steps or p.timelines or p.events or p.states or p.checkpoint):
                    self._idle.set()
                    return True

    def _take(self) -> dict[str, Any]:
        """The next report: one change of state a report, after the steps that came before it."""
        with self._lock:
            p = self._pending
            steps = [p.steps.popleft() for _ in range(min(len(p.steps), MAX_STEPS_PER_REPORT))]
            timelines, events = list(p.timelines), list(p.events)
            p.timelines.clear()
            p.events.clear()
            change = p.states.popleft() if p.states and not p.steps else {}
            checkpoint, p.checkpoint = p.checkpoint, None
            self._sequence += 1
            return {
                "sequence": self._sequence,
                "state": change.get("state"),
                "reason": change.get("reason"),
                "message": change.get("message"),
                "steps": steps,
                "timelines": timelines,
                "events": events,
                "metrics_endpoint": self._metrics_endpoint,
                "checkpoint": checkpoint,
            }


def _detail(response: httpx.Response) -> str:
    try:
        problem = response.json()
    except ValueError:
        return f"HTTP {response.status_code}: {response.text[:500]}"
    if not isinstance(problem, dict):
        return f"HTTP {response.status_code}: {problem}"
    return str(problem.get("detail") or problem.get("title") or problem)
