"""Prometheus histograms of this process (database, API, planning, rounds), and the log of outages.

Process-wide, as processor time and memory are: with several control planes each has its own, and they are summed.
Other packages observe into them; only `/metrics` reads them. `Outage` logs one line when something stops answering
and one when it is back, however often it fails in between.
"""

from __future__ import annotations

import logging
import time

from prometheus_client import CollectorRegistry, Counter, Histogram

REGISTRY = CollectorRegistry()
_SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

DATABASE_SECONDS = Histogram(
    "slotline_database_seconds",
    "Time of a statement at the database, as this process waits for it.",
    ("operation",),
    registry=REGISTRY,
    buckets=_SHORT_BUCKETS_S,
)
REQUEST_SECONDS = Histogram(
    "slotline_http_request_seconds",
    "Time until an answer begins; streams go on after it.",
    ("method", "route", "status"),
    registry=REGISTRY,
    buckets=_SHORT_BUCKETS_S,
)
PLANNING_SECONDS = Histogram(
    "slotline_planning_seconds",
    "Time of a plan, with the wait for a process; outcome: planned, refused, busy, timeout, given up or failed.",
    ("outcome",),
    registry=REGISTRY,
    buckets=_LONG_BUCKETS_S,
)
for _outcome in ("planned", "refused", "busy", "timeout", "given up", "failed"):
    PLANNING_SECONDS.labels(_outcome)  # there from the start, so that the first of its kind is an increase

ROUND_SECONDS = Histogram(
    "slotline_orchestrator_round_seconds",
    "Time of a round of the orchestrator.",
    registry=REGISTRY,
    buckets=_SHORT_BUCKETS_S,
)

AUTOSCALER_REQUESTS = Counter(
    "slotline_autoscaler_requests",
    "Requests to the autoscaler of a cluster; outcome: accepted, partly, refused, withdrawn, no autoscaler or failed.",
    ("cluster", "outcome"),
    registry=REGISTRY,
)


class Outage:
    """`away` at every failure, `back` at every success; `what` is the thing, as the log names it."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._what, self._logger = what, logger
        self._since: float | None = None

    def away(self, error: BaseException | str) -> None:
        if self._since is None:
            self._since = time.monotonic()
            message = " ".join(str(error).split())[:300] or type(error).__name__
            self._logger.error("%s does not answer: %s", self._what, message)

    def back(self) -> None:
        if self._since is not None:
            self._logger.info("%s is back after %.1f s", self._what, time.monotonic() - self._since)
            self._since = None
