"""The dashboard of the control plane itself: API, orchestrator, planning, database, process, and what is scraped."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models import dashboard as models
from panels import board, curves, rows_of, with_rows

_RATE = "[$__rate_interval]"


def build() -> models.Dashboard:
    built = (
        board(
            "Slotline: control plane", "slotline-control-plane", "The control plane's own health, by process."
        )
        .refresh("30s")
        .time("now-3h", "now")
        .timezone("browser")
    )
    return with_rows(
        built,
        [
            ("API", _api()),
            ("Orchestrator and planning", _orchestrator()),
            ("Database and process", _process()),
            ("Scrapes", _scrapes()),
        ],
    )


def _quantile(share: float, name: str, *labels: str) -> str:
    by = ", ".join((*labels, "le"))
    return f"histogram_quantile({share}, sum by ({by}) (rate(slotline_{name}_bucket{_RATE})))"


def _per_second(name: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) (rate(slotline_{name}_count{_RATE}))"


def _api() -> list[Any]:
    return [
        curves(
            "Answers per second",
            "reqps",
            (_per_second("http_request_seconds", "status"), "{{status}}"),
            stacked=True,
            about="By status, of all processes together.",
        ),
        curves(
            "Time to answer, 95 %",
            "s",
            (_quantile(0.95, "http_request_seconds", "method", "route"), "{{method}} {{route}}"),
            about="Until the answer begins, by route; streams go on after it.",
            span=16,
        ),
    ]


def _orchestrator() -> list[Any]:
    return [
        curves(
            "Lag of the orchestrator",
            "s",
            ("max by (instance) (slotline_orchestrator_lag_seconds)", "{{instance}}"),
            about="Since it last came round: half a second while all is well.",
        ),
        curves(
            "Time of a round",
            "s",
            (_quantile(0.5, "orchestrator_round_seconds"), "median"),
            (_quantile(0.95, "orchestrator_round_seconds"), "95 %"),
            about="Of the process that leads.",
        ),
        curves(
            "Planning pool",
            "short",
            ("sum by (state) (slotline_planning_plans)", "{{state}}"),
            ("sum(slotline_planning_processes)", "processes"),
            about="Plans that are made and that wait, and how many can be made at once.",
            span=4,
        ),
        curves(
            "Time of a plan",
            "s",
            (_quantile(0.95, "planning_seconds", "outcome"), "95 % {{outcome}}"),
            about="With the wait for a process, by how it ended.",
            span=4,
        ),
        curves(
            "Who starts jobs",
            "short",
            ("max by (instance) (slotline_orchestrator_leads)", "{{instance}}"),
            about="1 for the process that has the lease; it changes where another one takes over.",
            span=12,
        ),
        curves(
            "Time left of the lease",
            "s",
            ("max(slotline_lease_left_seconds)", "seconds"),
            about="By the database's clock, as the processes last saw it. Below zero nobody starts jobs.",
            span=12,
            from_zero=False,
        ),
    ]


def _process() -> list[Any]:
    return [
        curves(
            "Time of a statement at the database, 95 %",
            "s",
            (_quantile(0.95, "database_seconds", "operation"), "{{operation}}"),
            about="As the control plane waits for it; BEGIN is the wait for SQLite's write lock.",
        ),
        curves(
            "Time at the database",
            "percentunit",
            (f"sum by (operation) (rate(slotline_database_seconds_sum{_RATE}))", "{{operation}}"),
            stacked=True,
            about="Seconds a second that statements take, of all processes together.",
        ),
        curves(
            "Processor",
            "percentunit",
            (f'rate(process_cpu_seconds_total{{job="slotline"}}{_RATE})', "{{instance}}"),
            about="Of each control plane; 100 % is one core.",
            span=4,
        ),
        curves(
            "Memory",
            "bytes",
            ('process_resident_memory_bytes{job="slotline"}', "{{instance}}"),
            about="Of each control plane, resident.",
            span=4,
        ),
        rows_of(
            "Version",
            "max by (instance, version, python) (slotline_build_info)",
            columns={"instance": "Process", "version": "Version", "python": "Python"},
            about="What each process runs.",
            height=5,
        ),
    ]


def _scrapes() -> list[Any]:
    scraped = '{job=~"slotline|slotline-jobs|slotline-slots"}'
    return [
        curves(
            "Targets that answer",
            "short",
            (f"sum by (job) (up{scraped})", "{{job}}"),
            about="Control planes, drivers, and drivers once more for their slots.",
        ),
        curves(
            "Time of a scrape",
            "s",
            (f"max by (job) (scrape_duration_seconds{scraped})", "{{job}}"),
            about="The longest of each kind.",
        ),
        curves(
            "Series of a scrape",
            "short",
            (f"max by (job) (scrape_samples_scraped{scraped})", "{{job}}"),
            about="The most of each kind: slots are thousands, and asked for seldom.",
        ),
    ]
