"""A real Prometheus with the configuration of deploy/, and the dashboard's queries asked of it.

For any test that has a control plane running: `with prometheus(folder, url) as server: ...`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from service.ports import free_ports
from tests.missing import leave_out

ROOT = Path(__file__).parents[2]
PROMETHEUS = shutil.which("prometheus")


@dataclass(frozen=True)
class Query:
    """One query of one panel, as Grafana would ask it."""

    panel: str
    name: str
    expression: str
    instant: bool


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
        """The series of a query: at `at`, or over the minute before it."""
        if query.instant:
            return self.get("query", query=query.expression, time=at)["result"]
        return self.get("query_range", query=query.expression, start=at - 60, end=at, step=1)["result"]

    def healths(self) -> list[str]:
        """Health of every scraped target."""
        return [t["health"] for t in self.get("targets")["activeTargets"]]

    def targets(self) -> dict[str, str]:
        """Health of every scraped target, by its scrape pool."""
        return {t["scrapePool"]: t["health"] for t in self.get("targets")["activeTargets"]}


@contextlib.contextmanager
def prometheus(folder: Path, control_plane: str) -> Iterator[Server]:
    """Prometheus as deploy/prometheus.yml sets it up, but scraping `control_plane` (a URL) each second.

    Without the Debian package `prometheus` the test fails on CI and is skipped elsewhere.
    """
    if PROMETHEUS is None:
        leave_out("prometheus is not installed (Debian package `prometheus`): no query was asked")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "dashboards" / "rules.yml")]
    plane, jobs = config["scrape_configs"]
    plane["static_configs"] = [{"targets": [control_plane.removeprefix("http://")]}]
    discovery = jobs["http_sd_configs"][0]
    del discovery["authorization"]
    discovery |= {"url": f"{control_plane}/api/v1/prometheus/targets", "refresh_interval": "1s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
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


def dashboard_queries(job: str, *, start: float, end: float, interval: str = "10s") -> list[Query]:
    """Every query of the built dashboard for one job, its variables replaced as Grafana does."""
    values = {
        "$job": job,
        "$__rate_interval": interval,
        "$__from": str(int(start * 1000)),
        "$__to": str(int(end * 1000)),
    }
    board = json.loads((ROOT / "dashboards" / "slotline.json").read_text())
    found = []
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in values.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression, f"{panel['title']}: a variable nobody replaces in {expression}"
            found.append(Query(panel["title"], target["refId"], expression, target["instant"]))
    return found


def wait_for_data(server: Server, job: str, seconds: float = 200.0) -> dict[str, list[dict[str, Any]]]:
    """Ask every query of the dashboard until each has data; fails with the names of those that have none.

    Returns the answers by "panel/query".
    """
    deadline = time.monotonic() + seconds
    answers: dict[str, list[dict[str, Any]]] = {}
    while True:
        now = time.time()
        for query in dashboard_queries(job, start=now - 900, end=now):
            name = f"{query.panel}/{query.name}"
            if not answers.get(name):
                answers[name] = server.ask(query, now)
        empty = [name for name, result in answers.items() if not _has_numbers(result)]
        if not empty:
            return answers
        for name in empty:
            answers[name] = []
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
