"""The dashboard as code, and its queries against a real Prometheus that scraped real endpoints."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.dashboards.live import ROOT, Server, dashboard_queries, prometheus, wait_for_data
from tests.service.api.pages.seed import Site, seeded_site
from worker.driver.metrics import JobMetrics


@dataclass
class Run:
    """Two jobs whose drivers' metrics a Prometheus scrapes, as the control plane's discovery told it.

    The driver of an earlier attempt of the one that is shown still answers, with the figures of its last step.
    """

    site: Site
    server: Server


@dataclass(frozen=True)
class Figures:
    """What every step of a job measures: on no border of a bucket, and of no two jobs alike."""

    first_step: int
    loss: float
    step_s: float
    slower: float
    bubble_ratio: float
    exposed_transfer_s: float
    overlap_ratio: float
    copies: int = 1
    """How often its slots come: more than are shown, for one of the jobs."""


SHOWN = Figures(0, 0.7, 0.04, 1.1, 0.4, 0.001, 0.75)
OTHER = Figures(5000, 0.2, 1.5, 3.0, 0.9, 0.25, 0.125, copies=200)
EARLIER = Figures(0, 0.1, 0.01, 0.5, 0.1, 0.0005, 0.25, copies=2)
DATA_S = 45.0
"""Every query has data some ten seconds after the first scrape."""
PERIOD_S = {SHOWN: 0.05, OTHER: 0.02}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made: dict[str, list[JobMetrics]] = {}

    def serve_metrics(job: str) -> str:
        metrics = JobMetrics(job)
        made.setdefault(job, []).append(metrics)
        return metrics.serve()

    stop = threading.Event()
    with seeded_site(tmp_path_factory.mktemp("data"), serve_metrics=serve_metrics) as site:
        threads = [
            threading.Thread(target=_train, args=(made[job][-1], site, figures, stop))
            for job, figures in ((site.running, SHOWN), (site.failed, OTHER))
        ]
        earlier, _ = made[site.running]
        _tell(earlier, site, EARLIER, 5, timeline=True)
        try:
            with prometheus(tmp_path_factory.mktemp("prometheus"), site.url) as server:
                for thread in threads:
                    thread.start()
                yield Run(site, server)
        finally:
            stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for metrics in itertools.chain(*made.values()):
                metrics.close()


def _train(metrics: JobMetrics, site: Site, figures: Figures, stop: threading.Event) -> None:
    """Steps with slots of their plan, until told to stop."""
    step = figures.first_step
    while not stop.wait(PERIOD_S[figures]):
        step += 1
        profiled = step % 10 == 0 and (figures.copies == 1 or step == figures.first_step + 10)
        _tell(metrics, site, figures, step, timeline=profiled)


def _tell(metrics: JobMetrics, site: Site, figures: Figures, step: int, *, timeline: bool) -> None:
    """One step of a driver."""
    plan = json.loads(site.plan.model_dump_json())
    promised = figures.slower / SHOWN.slower
    metrics.set_plan(
        {"makespan_s": promised * plan["makespan_s"], "bubble_ratio": promised * plan["bubble_ratio"]}
    )
    metrics.observe_step(
        {
            "step": step,
            "loss": figures.loss,
            "step_s": figures.step_s,
            "makespan_s": plan["makespan_s"] * figures.slower,
            "bubble_ratio": figures.bubble_ratio,
            "exposed_transfer_s": figures.exposed_transfer_s,
            "overlap_ratio": figures.overlap_ratio,
        }
    )
    if timeline:
        slots = [
            {**slot, "start_s": promised * slot["start_s"], "end_s": promised * slot["end_s"], "edge": copy}
            for copy in range(figures.copies)
            for slot in plan["slots"]
        ]
        metrics.set_timeline({"step": step, "started_at": time.time(), "slots": slots})


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
    answers = wait_for_data(run.server, run.site.running, DATA_S)
    names = {f"{query.panel}/{query.name}" for query in dashboard_queries("x", start=0, end=1)}
    assert answers.keys() == names and len(names) > 15
    assert run.server.healths() == ["up"] * 4, "the control plane and the drivers of three attempts"


# What Prometheus answers for steps that all take as long: a place within the bucket, from 0.025 to 0.05 s.
BUCKET_S = (0.025, 0.05)
# Shown elsewhere: as a table, and as series of the control plane that no job is named in.
NOT_OF_ONE_JOB = {
    "Jobs by state/A",
    "Queue depth/A",
    "Attempts ended in the last hour/A",
    "Slots of the last profiled step, stretched over the time range/start",
    "Slots of the last profiled step, stretched over the time range/end",
    "Seconds per action/A",
    "Compute time of each mesh/mesh",
    "Profiled step/A",
}


def test_every_panel_of_a_job_shows_its_own_figures_though_another_is_scraped(run: Run):
    answers = wait_for_data(run.server, run.site.running, DATA_S)
    low, high = BUCKET_S
    plan = run.site.plan
    expected = {
        "Loss/A": 0.7,
        "Step time/A": low + 0.5 * (high - low),
        "Step time/B": low + 0.95 * (high - low),
        "Makespan: planned and measured/A": plan.makespan_s,
        "Makespan: planned and measured/B": plan.makespan_s * 1.1,
        "Bubble: planned and measured/A": plan.bubble_ratio,
        "Bubble: planned and measured/B": 0.4,
        "Exposed transfer time/A": 0.001,
        "Overlap/A": 0.75,
        "Length of the profiled step/A": plan.makespan_s,
        "Slots not shown/A": 0,
    }
    assert answers.keys() == expected.keys() | NOT_OF_ONE_JOB, "a new query needs a figure that it must show"
    shown = {name: _last(answers[name]) for name in expected}
    assert shown == pytest.approx(expected, rel=1e-3, abs=2e-6)
    profiled = _last(answers["Profiled step/A"])
    assert 0 < profiled < OTHER.first_step and profiled % 10 == 0
    actions = {(s["metric"]["stage"], s["metric"]["action"]): s for s in answers["Seconds per action/A"]}
    assert {key: _last([series]) for key, series in actions.items()} == pytest.approx(
        {(s.stage, s.action): s.end_s - s.start_s for s in plan.slots}, rel=1e-3
    )
    seconds = {s["metric"]["mesh"]: _last([s]) for s in answers["Compute time of each mesh/mesh"]}
    assert seconds == pytest.approx({mesh.name: mesh.compute_s for mesh in plan.meshes}, rel=1e-3)


def test_a_rate_is_of_the_interval_that_grafana_chooses_and_what_is_of_an_hour_says_so():
    windows: dict[str, set[str]] = {}
    for query in dashboard_queries("x", start=0, end=1, interval="chosen"):
        if found := re.findall(r"\[(.+?)\]", query.expression):
            windows.setdefault(query.panel, set()).update(found)
    assert windows == {
        "Step time": {"chosen"},
        "Seconds per action": {"chosen"},
        "Attempts ended in the last hour": {"1h"},
    }


def test_every_panel_of_seconds_says_seconds():
    panels = json.loads((ROOT / "dashboards" / "slotline.json").read_text())["panels"]
    units = {
        p["title"]: p["fieldConfig"]["defaults"]["unit"]
        for p in panels
        if p["type"] != "row" and "unit" in p["fieldConfig"]["defaults"]
    }
    assert units == {
        "Jobs by state": "short",
        "Queue depth": "short",
        "Attempts ended in the last hour": "short",
        "Loss": "short",
        "Step time": "s",
        "Makespan: planned and measured": "s",
        "Seconds per action": "s",
        "Bubble: planned and measured": "percentunit",
        "Exposed transfer time": "s",
        "Overlap": "percentunit",
        "Profiled step": "none",
        "Length of the profiled step": "s",
        "Slots not shown": "none",
        "Compute time of each mesh": "s",
    }


def test_the_panels_of_all_jobs_show_the_store(run: Run):
    answers = wait_for_data(run.server, run.site.running, DATA_S)
    states = {series["metric"]["state"]: series["values"][-1][1] for series in answers["Jobs by state/A"]}
    assert {state: n for state, n in states.items() if n != "0"} == {
        "RUNNING": "1",
        "QUEUED": "1",
        "FAILED": "1",
    }
    (depth,) = answers["Queue depth/A"]
    assert (depth["metric"]["queue"], depth["values"][-1][1]) == ("default", "1")
    causes = {series["metric"]["cause"] for series in answers["Attempts ended in the last hour/A"]}
    assert {"user", "infrastructure", "preemption"} <= causes


def test_the_state_timeline_joins_start_and_end_of_every_slot(run: Run):
    """The two tables have the same rows; lanes fill the range from its first to its last millisecond."""
    wait_for_data(run.server, run.site.running, DATA_S)
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
