"""What this process measures of itself for Prometheus: database, API, planning, rounds. Other rooms observe; nobody asks.

Process-wide, as processor time and memory are: with several control planes each has its own, and they are summed.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

REGISTRY = CollectorRegistry()
_QUICK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SLOW_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

DATABASE_SECONDS = Histogram(
    "slotline_database_seconds",
    "Time of a statement at the database, as this process waits for it.",
    ("operation",),
    registry=REGISTRY,
    buckets=_QUICK_S,
)
REQUEST_SECONDS = Histogram(
    "slotline_http_request_seconds",
    "Time until an answer begins; streams go on after it.",
    ("method", "route", "status"),
    registry=REGISTRY,
    buckets=_QUICK_S,
)
PLANNING_SECONDS = Histogram(
    "slotline_planning_seconds",
    "Time of a plan, with the wait for a process; outcome: planned, refused, busy, timeout, given up or failed.",
    ("outcome",),
    registry=REGISTRY,
    buckets=_SLOW_S,
)
for _outcome in ("planned", "refused", "busy", "timeout", "given up", "failed"):
    PLANNING_SECONDS.labels(_outcome)  # there from the start, so that the first of its kind is an increase

ROUND_SECONDS = Histogram(
    "slotline_orchestrator_round_seconds",
    "Time of a round of the orchestrator.",
    registry=REGISTRY,
    buckets=_QUICK_S,
)
