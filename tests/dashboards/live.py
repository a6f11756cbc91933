"""A real Prometheus with the configuration of deploy/, and the dashboards' queries asked of it.

For any test that has a control plane running: `with prometheus(folder, url) as server: ...`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from service.orchestrator.ray.local_ray import free_ports
from tests.missing import leave_out

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")
BOARDS = ("slotline-cluster", "slotline-job", "slotline-timeline", "slotline-control-plane")


@dataclass(frozen=True)
class Query:
    """One query of one panel, or of a variable, as Grafana would ask it."""

    board: str
    panel: str
    name: str
    expression: str
    instant: bool

    @property
    def title(self) -> str:
        return f"{self.board.removeprefix('slotline-')}: {self.panel}/{self.name}"


@dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    url: str

    def get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    def ask(self, query: Query, at: float) -> list[dict[str, Any]]:
        """The series of a query: at `at`, or over the minute before it. The timeline's axis ends in January 1970."""
        if query.instant:
            evaluated = 60.0 if query.board == "slotline-timeline" else at
            return self.get("query", query=query.expression, time=evaluated)["result"]
        return self.get("query_range", query=query.expression, start=at - 60, end=at, step=1)["result"]

    def healths(self) -> list[str]:
        """Health of every scraped target."""
        return [t["health"] for t in self.get("targets")["activeTargets"]]

    def targets(self) -> dict[str, str]:
        """Health of every scraped target, and its last error, by its scrape pool."""
        targets = self.get("targets")["activeTargets"]
        return {t["scrapePool"]: f"{t['health']} {t['lastError']}".strip() for t in targets}


@contextlib.contextmanager
def prometheus(folder: Path, *control_planes: str, gpus: str | None = None) -> Iterator[Server]:
    """Prometheus as deploy/prometheus.yml sets it up, but scraping `control_planes` (URLs) each second.

    The first one names the drivers; `gpus` (host:port) is a DCGM exporter.

    Without the Debian package `prometheus` the test fails on CI and is skipped elsewhere.
    """
    if PROMETHEUS is None:
        leave_out("prometheus is not installed (Debian package `prometheus`): no query was asked")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "dashboards" / "rules.yml")]
    plane, *drivers = config["scrape_configs"]
    del plane["authorization"]
    plane["static_configs"] = [{"targets": [url.removeprefix("http://") for url in control_planes]}]
    for scrape in drivers:
        scrape.pop("scrape_interval", None)
        discovery = scrape["http_sd_configs"][0]
        del discovery["authorization"]
        discovery |= {"url": f"{control_planes[0]}/api/v1/prometheus/targets", "refresh_interval": "1s"}
    if gpus is not None:
        config["scrape_configs"].append({"job_name": "dcgm", "static_configs": [{"targets": [gpus]}]})
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    flags += ["--enable-feature=exemplar-storage"]  # as deploy/compose.yaml has it
    flags += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([PROMETHEUS, *flags], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, folder / "log")
        yield Server(url)
    finally:
        process.terminate()
        process.wait(timeout=60)


def dashboard_queries(
    name: str, job: str, *, at: float, interval: str = "10s", boards: tuple[str, ...] = BOARDS
) -> list[Query]:
    """Every query of the built dashboards for one job, their variables replaced as Grafana does."""
    values = {
        "$name": name,
        "$job": job,
        "$at": f"{at:.3f}",
        "$lanes": ".+",
        "$__rate_interval": interval,
    }
    found = []
    for board in boards:
        built = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())
        asked = [
            (panel["title"], target["refId"], target["expr"], target["instant"])
            for panel in built["panels"]
            for target in panel.get("targets", [])
        ]
        for mark in built["annotations"].get("list", []):
            asked.append((mark["name"], "marks", mark["expr"], False))
        for variable in built["templating"]["list"]:
            if match := re.fullmatch(r"query_result\((.*)\)", str(variable.get("query"))):
                asked.append(("variable", variable["name"], match[1], True))
        for panel, ref, expression, instant in asked:
            for variable, value in values.items():
                expression = expression.replace(variable, value)
            rest = re.sub(r'"\$1[^"]*"', "", expression)  # what label_replace takes for a group
            assert "$" not in rest, f"{panel}: a variable nobody replaces in {expression}"
            found.append(Query(board, panel, ref, expression, instant))
    return found


def wait_for_data(
    server: Server,
    name: str,
    job: str,
    seconds: float = 200.0,
    *,
    without: Collection[str] = (),
) -> dict[str, list[dict[str, Any]]]:
    """Ask every query of the dashboards until each has data; fails with the titles of those that have none.

    Returns the answers by the queries' titles. Panels of `without` are not asked.
    """
    deadline = time.monotonic() + seconds
    answers: dict[str, list[dict[str, Any]]] = {}
    while True:
        now = time.time()
        for query in dashboard_queries(name, job, at=now):
            if query.panel not in without and not answers.get(query.title):
                answers[query.title] = server.ask(query, now)
        empty = [title for title, result in answers.items() if not _has_numbers(result)]
        if not empty:
            return answers
        for title in empty:
            answers[title] = []
        assert time.monotonic() < deadline, f"no data for {empty}; targets: {server.targets()}"
        time.sleep(1.0)


def _has_numbers(result: list[dict[str, Any]]) -> bool:
    points = [p for series in result for p in series.get("values", [series.get("value")])]
    return any(point is not None and point[1] != "NaN" for point in points)


def _wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready", timeout=30).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"prometheus did not start: {log.read_text()[-2000:]}")
