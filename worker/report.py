"""Reports of one attempt to the control plane, over HTTP with the attempt's token.

Reports are collected in order and sent by a thread of their own, so that training never waits
for the control plane; while it is away they wait here, and go out when it is back.
Knows nothing of training and nothing of Ray.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import tenacity

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
REQUEST_TIMEOUT_S = 30.0
PLAN_TIMEOUT_S = 180.0
MAX_STEPS_PER_REPORT = 2_000
MAX_EVENTS_PER_REPORT = 1_000
MAX_SLOTS_PER_REPORT = 20_000  # some 200 bytes each
MAX_WAITING_SLOTS = 200_000


class Refused(RuntimeError):
    """The control plane gave a final answer that is not yes; `status` is the HTTP status."""

    def __init__(self, status: int, detail: str):
        super().__init__(detail)
        self.status = status
        self.detail = detail

    @property
    def final(self) -> bool:
        """Whether the control plane wants no more of this attempt."""
        return self.status in (401, 409)


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
            trust_env=httpx.URL(url).host not in _THIS_MACHINE,  # a proxy is for what is elsewhere
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
        try:
            response = self._client.request(method, path, **kwargs)
        except ValueError:  # a number or a text that JSON has no word for
            if "json" not in kwargs:
                raise
            response = self._client.request(method, path, **{**kwargs, "json": _printable(kwargs["json"])})
        if not response.is_success and (not response.is_client_error or response.status_code in _TRY_AGAIN):
            response.raise_for_status()
        if response.is_error:
            raise Refused(response.status_code, _detail(response))
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise httpx.DecodingError(
                f"{response.url} answered {response.status_code} without JSON: is a proxy in between?",
                request=response.request,
            ) from None


_TRY_AGAIN = (408, 425, 429)
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
FINAL_STATES = ("SUCCEEDED", "FAILED", "CANCELLED")


@dataclass
class _Pending:
    steps: deque[dict[str, Any]] = field(default_factory=deque)
    timelines: deque[dict[str, Any]] = field(default_factory=deque)
    events: deque[dict[str, Any]] = field(default_factory=deque)
    states: deque[dict[str, Any]] = field(default_factory=deque)
    checkpoint: dict[str, Any] | None = None

    def anything(self) -> bool:
        return bool(self.steps or self.timelines or self.events or self.states or self.checkpoint)


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
        with self._lock:
            waiting = self._pending.timelines
            waiting.append(dict(timeline))
            while len(waiting) > 1 and _slots(waiting) > MAX_WAITING_SLOTS:
                waiting.popleft()

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
                if self._reduce(body, refused.detail):
                    continue
                return False
            except Exception as error:  # this thread must not end: a final state would never arrive
                log.exception("report %s could not be written", body["sequence"])
                if self._reduce(body, str(error)):
                    continue
                return False
            self._unsent = None
            if self._away_since is not None:
                log.info("control plane back after %.1f s", time.monotonic() - self._away_since)
                self._away_since = None
            if isinstance(answer, dict) and answer.get("command") == "cancel":
                self.cancelled.set()
            if body["state"] in FINAL_STATES:  # a report after the final one would be refused
                self._closing.set()
                self._idle.set()
                return True
            with self._lock:
                if not self._pending.anything():
                    self._idle.set()
                    return True

    def _reduce(self, body: dict[str, Any], why: str) -> bool:
        """Keep what is worth another try of a report that was refused: its least important part goes first,
        what is left of its state last. False when nothing is."""
        for part in ("timelines", "events", "steps", "metrics_endpoint", "checkpoint", "message"):
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
            timelines: list[dict[str, Any]] = []
            while p.timelines and (
                not timelines or _slots([*timelines, p.timelines[0]]) <= MAX_SLOTS_PER_REPORT
            ):
                timelines.append(p.timelines.popleft())
            before = p.steps or p.timelines or p.events
            change = p.states.popleft() if p.states and not before else {}
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


def _slots(timelines: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(timeline.get("slots", ())) for timeline in timelines)


def _printable(value: Any) -> Any:
    """The same with null for NaN and infinity, and marks for characters that UTF-8 cannot carry."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_printable(key): _printable(entry) for key, entry in value.items()}
    return [_printable(entry) for entry in value] if isinstance(value, list | tuple) else value


def _detail(response: httpx.Response) -> str:
    try:
        problem = response.json()
    except ValueError:
        return f"HTTP {response.status_code}: {response.text[:500]}"
    if not isinstance(problem, dict):
        return f"HTTP {response.status_code}: {problem}"
    return str(problem.get("detail") or problem.get("title") or problem)
