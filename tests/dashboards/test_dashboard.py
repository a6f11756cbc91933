"""The dashboard as code, and its queries against a real Prometheus that scraped real endpoints."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.dashboards.live import ROOT, Server, dashboard_queries, prometheus, wait_for_data
from tests.service.api.pages.seed import STAGES, Site, seeded_site
from worker.driver.metrics import JobMetrics


@dataclass
class Run:
    """A job whose driver's metrics a Prometheus scrapes, as the control plane's discovery told it."""

    site: Site
    server: Server
    metrics: JobMetrics


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made: list[JobMetrics] = []

    def serve_metrics(job: str) -> str:
        made.append(JobMetrics(job))
        return made[0].serve()

    stop = threading.Event()
    with seeded_site(tmp_path_factory.mktemp("data"), serve_metrics=serve_metrics) as site:
        thread = threading.Thread(target=_train, args=(made[0], site, stop))
        try:
            with prometheus(tmp_path_factory.mktemp("prometheus"), site.url) as server:
                thread.start()
                yield Run(site, server, made[0])
        finally:
            stop.set()
            if thread.ident is not None:
                thread.join()
            made[0].close()


def _train(metrics: JobMetrics, site: Site, stop: threading.Event) -> None:
    """Twenty steps a second with slots of their plan, until told to stop."""
    plan = json.loads(site.plan.model_dump_json())
    metrics.set_plan(plan)
    step = 0
    while not stop.wait(0.05):
        step += 1
        metrics.observe_step(
            {
                "step": step,
                "loss": 1 / step,
                "step_s": 0.05,
                "makespan_s": plan["makespan_s"] * 1.1,
                "bubble_ratio": 0.4,
                "exposed_transfer_s": 0.001,
                "overlap_ratio": 0.75,
            }
        )
        if step % 10 == 0:
            metrics.set_timeline({"step": step, "started_at": time.time(), "slots": plan["slots"]})


def test_the_committed_dashboards_are_what_the_code_builds():
    """Built by a fresh interpreter, so that nothing depends on this one's state."""
    program = (
        "import sys, json; sys.path.insert(0, 'dashboards'); import build; print(json.dumps(build.texts()))"
    )
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert built.returncode == 0, built.stderr
    texts = json.loads(built.stdout)
    committed = {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert texts == committed, "run python dashboards/build.py"


def test_every_query_of_the_dashboard_has_data(run: Run):
    answers = wait_for_data(run.server, run.site.running)
    names = {f"{query.panel}/{query.name}" for query in dashboard_queries("x", start=0, end=1)}
    assert answers.keys() == names and len(names) > 15
    assert set(run.server.targets().values()) == {"up"}


def test_the_panels_show_the_numbers_that_were_measured(run: Run):
    answers = wait_for_data(run.server, run.site.running)
    states = {series["metric"]["state"]: series["values"][-1][1] for series in answers["Jobs by state/A"]}
    assert {state: n for state, n in states.items() if n != "0"} == {
        "RUNNING": "1",
        "QUEUED": "1",
        "FAILED": "1",
    }
    causes = {series["metric"]["cause"] for series in answers["Attempts ended in the last hour/A"]}
    assert {"user", "infrastructure", "preemption"} <= causes
    assert _last(answers["Overlap/A"]) == 0.75
    planned, measured = (_last(answers[f"Makespan: planned and measured/{name}"]) for name in "AB")
    assert planned == pytest.approx(run.site.plan.makespan_s)
    assert measured / planned == pytest.approx(1.1)
    assert _last(answers["Length of the profiled step/A"]) == pytest.approx(planned, abs=2e-6)
    actions = {(s["metric"]["stage"], s["metric"]["action"]): s for s in answers["Seconds per action/A"]}
    assert len(actions) == 2 * STAGES + 4 * (STAGES - 1)
    assert _last([actions["stage0", "F"]]) == pytest.approx(0.002, rel=1e-3)


def test_the_state_timeline_joins_start_and_end_of_every_slot(run: Run):
    """The two tables have the same rows; lanes fill the range from its first to its last millisecond."""
    wait_for_data(run.server, run.site.running)
    now = time.time()
    start, end = now - 900, now
    tables = {
        query.name: {
            (series["metric"]["row"], series["metric"]["slot"]): float(series["value"][1])
            for series in run.server.ask(query, now)
        }
        for query in dashboard_queries(run.site.running, start=start, end=end)
        if query.panel.startswith("Slots of the last profiled step")
    }
    slots = run.site.plan.slots
    assert tables["start"].keys() == tables["end"].keys()
    assert tables["start"].keys() == {
        (f"{s.mesh} {s.lane}", f"{s.action}{s.microbatch} {s.stage}") for s in slots
    }
    assert min(tables["start"].values()) == pytest.approx(start * 1000, abs=2)
    assert max(tables["end"].values()) == pytest.approx(end * 1000, abs=50)
    scale = (end - start) * 1000 / run.site.plan.makespan_s
    for slot in slots:
        key = f"{slot.mesh} {slot.lane}", f"{slot.action}{slot.microbatch} {slot.stage}"
        assert tables["start"][key] == pytest.approx(start * 1000 + slot.start_s * scale, abs=2e-6 * scale)
        assert tables["end"][key] > tables["start"][key]
    for row in {row for row, _ in tables["start"]}:
        times = sorted((tables["start"][key], tables["end"][key]) for key in tables["start"] if key[0] == row)
        for (_, before), (after, _) in itertools.pairwise(times):
            assert before <= after, f"{row}: a block that ends late would blank the next one"


def test_transformations_name_the_columns_that_the_queries_give():
    """Grafana names a table's value column after its query, and its labels by their names.

    The order matters: excluding `Time` by name takes every field of type time along, so the
    conversion comes after it (tried with Grafana's own package of transformations, 12.4).
    """
    panel = json.loads((ROOT / "dashboards" / "slotline.json").read_text())["panels"][-1]
    columns = {"Time", "row", "slot", "edge"} | {f"Value #{target['refId']}" for target in panel["targets"]}
    order = [item["id"] for item in panel["transformations"]]
    assert order == ["merge", "sortBy", "organize", "convertFieldType", "partitionByValues"]
    options = {item["id"]: item["options"] for item in panel["transformations"]}
    organize = options["organize"]
    kept = columns - organize["excludeByName"].keys()
    assert kept == organize["indexByName"].keys()
    times = [conversion["targetField"] for conversion in options["convertFieldType"]["conversions"]]
    assert times == ["Value #start", "Value #end"], "the second time field is a block's end"
    assert organize["indexByName"][times[0]] < organize["indexByName"][times[1]]
    assert options["partitionByValues"]["fields"] == ["row"]
    assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])


def _last(result: list[dict]) -> float:
    (series,) = result
    return float(series["values"][-1][1] if "values" in series else series["value"][1])
