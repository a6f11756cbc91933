"""The dashboards as code, and their queries against a real Prometheus that scraped real endpoints."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from sqlalchemy import update

from service.observability.instruments import PLANNING_SECONDS
from service.settings.settings import Settings
from service.spec.states import AttemptState, JobState
from service.store import transitions
from service.store.attempts import create_attempt
from service.store.database import Database, utc_now
from service.store.tables import JobPlanRow, JobRow
from tests.dashboards.live import BOARDS, ROOT, Server, dashboard_queries, prometheus, wait_for_data
from tests.polling import until
from tests.service.api.pages.seed import SLOWER, Site, job_spec, seeded_site
from tests.service.conftest import create_job
from worker.driver.metrics import DriverMetrics, ModelFlops
from worker.driver.step_measurement import StepUsage
from worker.machine.telemetry import GpuUsage


@dataclass
class Run:
    """Two jobs whose drivers' metrics a Prometheus scrapes, as the control plane's discovery told it.

    The control plane is there twice, as with several replicas. The driver of an earlier attempt of the job that is
    shown still answers, with the figures of its last step.
    """

    site: Site
    server: Server
    kept: dict[str, list[dict]] = field(default_factory=dict)

    def answers(self) -> dict[str, list[dict]]:
        """What each query was answered when all had data, by title."""
        if not self.kept:
            self.kept |= wait_for_data(self.server, "gpt", self.site.running, DATA_S)
        return self.kept


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
DATA_S = 200.0
"""Every query has data some twenty seconds after the first scrape."""
PERIOD_S = {SHOWN: 0.05, OTHER: 0.02}
LINK_BYTES = 1000
FLOPS = 10**12
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    made: dict[str, list[DriverMetrics]] = {}
    data = tmp_path_factory.mktemp("data")

    def serve_metrics(job: str) -> str:
        metrics = DriverMetrics(job)
        made.setdefault(job, []).append(metrics)
        return metrics.serve()

    stop = threading.Event()
    with seeded_site(data, serve_metrics=serve_metrics) as site:
        asyncio.run(_save_and_size(data, site))
        threads = [
            threading.Thread(target=_train, args=(made[job][-1], site, figures, stop))
            for job, figures in ((site.running, SHOWN), (site.failed, OTHER))
        ]
        threads.append(threading.Thread(target=_use, args=(data, stop)))
        earlier, _ = made[site.running]
        _tell(earlier, site, EARLIER, 5, timeline=True)
        gpus, gpu_thread = _gpus()
        again = site.url.replace("127.0.0.1", "localhost")
        exporter = f"127.0.0.1:{gpus.server_port}"
        try:
            with prometheus(tmp_path_factory.mktemp("prometheus"), site.url, again, gpus=exporter) as server:
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
            gpus.shutdown()
            gpus.server_close()
            gpu_thread.join()


def _gpus():
    """A DCGM exporter with two GPUs: its names and labels."""
    registry = CollectorRegistry()
    for name, text, value in (
        ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", 87),
        ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", 4096),
    ):
        gauge = Gauge(name, text, ("gpu", "UUID", "device", "modelName", "Hostname"), registry=registry)
        for gpu in ("0", "1"):
            gauge.labels(gpu, f"GPU-{gpu}", f"nvidia{gpu}", "NVIDIA H200", "node-a").set(value)
    return start_http_server(0, "127.0.0.1", registry)


async def _save_and_size(data: Path, site: Site) -> None:
    """The running job saves checkpoints, and its plan knows what its transfers carry."""
    database = Database(Settings(data_dir=data).sqlalchemy_url)
    async with database.write() as session:
        job = await session.get(JobRow, site.running)
        checkpoint = {"uri": "/runs", "every_steps": 50, "keep": 2}
        await session.execute(
            update(JobRow).where(JobRow.id == job.id).values(spec={**job.spec, "checkpoint": checkpoint})
        )
        plan = await session.get(JobPlanRow, site.running)
        body = json.loads(plan.body)
        for edge in body["spec"]["edges"]:
            edge |= {"forward_bytes": LINK_BYTES, "backward_bytes": LINK_BYTES}
        plan.body = json.dumps(body)
    await database.close()


def _use(data: Path, stop: threading.Event) -> None:
    """What makes histograms of the control plane grow: jobs that begin, and plans."""
    while not stop.wait(2.0):
        PLANNING_SECONDS.labels("planned").observe(0.2)
        asyncio.run(_start_a_job(data))


async def _start_a_job(data: Path) -> None:
    database = Database(Settings(data_dir=data).sqlalchemy_url)
    async with database.write() as session:
        job = await create_job(session, job_spec("short"), at=utc_now())
        attempt = await create_attempt(session, job, device="cpu", at=utc_now())
        transitions.move_attempt(attempt, AttemptState.CANCELLED, at=utc_now())
        transitions.move_job(session, job, JobState.CANCELLED, at=utc_now())
    await database.close()


def _train(metrics: DriverMetrics, site: Site, figures: Figures, stop: threading.Event) -> None:
    """Steps with slots of their plan, until told to stop."""
    metrics.add_launch_phase("plan", 2.5 * figures.slower / SHOWN.slower)
    step = figures.first_step
    while not stop.wait(PERIOD_S[figures]):
        step += 1
        profiled = step % 10 == 0 and (figures.copies == 1 or step == figures.first_step + 10)
        _tell(metrics, site, figures, step, timeline=profiled)


def _tell(metrics: DriverMetrics, site: Site, figures: Figures, step: int, *, timeline: bool) -> None:
    """One step of a driver."""
    plan = json.loads(site.plan.model_dump_json())
    promised = figures.slower / SHOWN.slower
    metrics.set_plan(
        {
            **plan,
            "makespan_s": promised * plan["makespan_s"],
            "bubble_ratio": promised * plan["bubble_ratio"],
            "slots": _scaled(plan["slots"], promised),
        },
        step_s=promised * plan["makespan_s"],
    )
    metrics.observe_gpus({("mesh0", 1): GpuUsage(figures.bubble_ratio, 5 << 30, 80 << 30)})
    metrics.set_planned_memory({"mesh0": 3 << 20})
    metrics.set_nodes("mesh0", ["10.0.0.1"])
    metrics.set_checkpoint("save", 4.0 * promised)
    idle = {"fill": figures.step_s, "waits": figures.step_s / 2}
    metrics.set_model_flops(ModelFlops(int(FLOPS * figures.step_s * figures.bubble_ratio), FLOPS))
    metrics.observe_evaluation({"loss": 2 * figures.loss, "metrics": {"accuracy": figures.loss / 2}})
    metrics.observe_usage(StepUsage(3 * figures.step_s, idle, samples=8, tokens=8 * 32))
    metrics.observe_step(
        {
            "step": step,
            "loss": figures.loss,
            "grad_norm": 3 * figures.loss,
            "learning_rate": figures.loss / 100,
            "step_s": figures.step_s,
            "makespan_s": plan["makespan_s"] * figures.slower,
            "bubble_ratio": figures.bubble_ratio,
            "exposed_transfer_s": figures.exposed_transfer_s,
            "overlap_ratio": figures.overlap_ratio,
            "peak_memory_bytes": {"mesh0": 2 << 20},
            "metrics": {"accuracy": figures.loss / 4},
        },
        {"trace_id": TRACE_ID, "span_id": f"{step:016x}", "step": str(step)},
    )
    if timeline:
        scaled = _scaled(plan["slots"], figures.slower)
        slots = [{**slot, "edge": copy} for copy in range(figures.copies) for slot in scaled]
        metrics.set_timeline({"step": step, "started_at": time.time(), "slots": slots})


def _scaled(slots: list[dict], factor: float) -> list[dict]:
    return [{**s, "start_s": factor * s["start_s"], "end_s": factor * s["end_s"]} for s in slots]


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


@pytest.mark.slow
def test_every_query_of_the_dashboards_has_data(run: Run):
    answers = run.answers()
    asked = dashboard_queries("gpt", "x", at=0)
    assert answers.keys() == {query.title for query in asked} and len(asked) > 70
    assert {query.board for query in asked} == set(BOARDS)
    # two control planes, the drivers of three attempts twice each, and the GPUs; a loaded machine misses a scrape
    until(lambda: run.server.healths() == ["up"] * 9, run.server.healths, limit_s=DATA_S, every_s=0.5)


@pytest.mark.slow
def test_the_step_time_leads_to_single_steps_and_their_traces(run: Run):
    """Prometheus asks for OpenMetrics, the driver answers with exemplars, and the panel's own query finds them."""
    panels = json.loads((ROOT / "dashboards" / "slotline-job.json").read_text())["panels"]
    targets = [t for panel in panels if panel["title"] == "Step time" for t in panel["targets"]]
    assert [t.get("exemplar") for t in targets] == [True, None, None]
    run.answers()
    now = time.time()
    expression = targets[0]["expr"].replace("$job", run.site.running).replace("$__rate_interval", "10s")
    series = run.server.get("query_exemplars", query=expression, start=now - 600, end=now)
    found = [one for s in series for one in s["exemplars"]]
    assert {s["seriesLabels"]["job"] for s in series} == {run.site.running} and found
    for one in found:
        assert one["labels"]["trace_id"] == TRACE_ID and float(one["value"]) in (SHOWN.step_s, EARLIER.step_s)
        assert int(one["labels"]["span_id"], 16) == int(one["labels"]["step"]) > 0


# What Prometheus answers for steps that all take as long: a place within the bucket, from 0.025 to 0.05 s.
BUCKET_S = (0.025, 0.05)


@pytest.mark.slow
def test_every_panel_of_a_job_shows_its_own_figures_though_another_is_scraped(run: Run):
    answers = run.answers()
    low, high = BUCKET_S
    plan, job = run.site.plan, run.site.running
    saved_ms = 1000 * run.site.interrupted_at.timestamp()
    expected = {
        "Job": {("", "gpt", "default", "RUNNING", job, "2"): 1},
        "Length of the profiled step/A": round(1e6 * plan.makespan_s * 1.1),
        "Loss/A": 0.7,
        "Step time/A": low + 0.5 * (high - low),
        "Step time/B": low + 0.95 * (high - low),
        "Step time/C": plan.makespan_s,
        "Makespan: first plan, calibrated and measured/A": plan.makespan_s,
        "Makespan: first plan, calibrated and measured/B": plan.makespan_s * SLOWER,
        "Makespan: first plan, calibrated and measured/C": plan.makespan_s * 1.1,
        "Model FLOPs per second/A": 0.4 * FLOPS,
        "MFU/A": 0.4,
        "Metrics of the loss/A": {("accuracy",): 0.175},
        "Gradient norm/A": 2.1,
        "Learning rate/A": 0.007,
        "Evaluation loss/A": 1.4,
        "Evaluation loss/B": 0.7,
        "Metrics of the evaluation/A": {("accuracy",): 0.35},
        "Bubble: planned and measured/A": plan.bubble_ratio,
        "Bubble: planned and measured/B": 0.4,
        "Computing over plan/A": {(f"mesh{mesh}",): 1.25 for mesh in range(3)},
        "Exposed transfer time/A": 0.001,
        "Overlap/A": 0.75,
        "Link seconds over plan/A": dict.fromkeys(LINKS, 1.25),
        "Bandwidth of links: planned and measured/A": dict.fromkeys(LINKS, 4 * LINK_BYTES / 0.004),
        "Bandwidth of links: planned and measured/B": dict.fromkeys(LINKS, 4 * LINK_BYTES / 0.005),
        "Bytes of a step/A": dict.fromkeys(LINKS, 4 * LINK_BYTES),
        "Nodes of meshes/A": {("mesh0", "10.0.0.1"): 1},
        "Slots not shown/A": 0,
        "Start of the attempt/B": {("plan",): 2.5},
        "Age of the checkpoint/B": 50 * 0.05,
        "Duration of checkpoints/A": {("save",): 4.0},
        "Memory of meshes: planned and measured/A": {("mesh0",): 3 << 20},
        "Memory of meshes: planned and measured/B": {("mesh0",): 2 << 20},
        "GPU utilisation of workers/A": {("mesh0", "1"): 0.4},
        "GPU memory of workers/A": {("mesh0", "1"): 5 << 30},
        "GPU memory of workers/B": {("mesh0", "1"): 80 << 30},
        "Compute time of each mesh/A": {(mesh.name,): 1.1 * mesh.compute_s for mesh in plan.meshes},
        "Seconds per action/A": {(s.action, s.stage): 1.1 * (s.end_s - s.start_s) for s in plan.slots},
    }
    expected["Job/A"] = {tuple(sorted(key)): value for key, value in expected.pop("Job").items()}
    of_job = {title.removeprefix("job: ") for title in answers if title.startswith("job: ")}
    marks = {"Checkpoints/marks": {(job,): saved_ms}, "Interruptions/marks": {(job, "WORKER_LOST"): saved_ms}}
    assert of_job == expected.keys() | marks.keys() | GROWING, "a new query needs a figure that it must show"
    for title, value in expected.items():
        shown = _last(answers[f"job: {title}"])
        if title == "Job/A":
            shown = {tuple(sorted(("", *key))): number for key, number in shown.items()}
        if not isinstance(value, dict):
            (shown,) = shown.values()
        assert shown == pytest.approx(value, rel=1e-3, abs=2e-6), title
    for title, value in marks.items():
        assert _last(answers[f"job: {title}"]) == pytest.approx(value, abs=1), title
    (profiled,) = _last(answers["job: Profiled step/A"]).values()
    assert 0 < profiled < OTHER.first_step and profiled % 10 == 0
    (effective,) = _last(answers["job: Effective training time/A"]).values()
    assert 0 < effective < 1, "the two seconds of its steps in the time since"


LINKS = [("mesh0", "mesh1"), ("mesh1", "mesh0"), ("mesh1", "mesh2"), ("mesh2", "mesh1")]
# Counters, ages and numbers that move while the test runs; their proportions are known, see below.
GROWING = {
    "Step/A",
    "Profiled step/A",
    "Samples per second/A",
    "Tokens per second/A",
    "Idle accelerators/A",
    "Idle accelerator-hours of the last hour/A",
    "Start of the attempt/A",
    "Age of the checkpoint/A",
    "Effective training time/A",
}


WITHIN = 0.2
"""A scrape may come between two counters of a step: some steps' difference, where a wrong sum is twice as much."""


@pytest.mark.slow
def test_rates_of_a_job_stand_in_the_proportions_of_its_steps(run: Run):
    """Counters of the driver that is gone do not move, and those of another job are not in it."""
    run.answers()
    now = time.time()
    found = {
        query.panel: _last(run.server.ask(query, now))
        for query in dashboard_queries("gpt", run.site.running, at=now, boards=("slotline-job",))
        if query.panel in ("Samples per second", "Tokens per second", "Idle accelerators")
    }
    (samples,), (tokens,) = found["Samples per second"].values(), found["Tokens per second"].values()
    assert tokens == pytest.approx(32 * samples, rel=WITHIN)
    idle = found["Idle accelerators"]
    assert idle["fill",] == pytest.approx(2 * idle["waits",], rel=WITHIN)
    assert idle["fill",] == pytest.approx(samples / 8 * SHOWN.step_s, rel=WITHIN)


@pytest.mark.slow
def test_what_several_control_planes_tell_of_the_store_is_counted_once(run: Run):
    """Prometheus scrapes the same control plane under two names: sums over both would double."""
    answers = run.answers()
    twice, deadline = "count by (__name__) (slotline_jobs{state='RUNNING'})", time.monotonic() + DATA_S
    # a loaded machine misses a scrape of one of them
    while (there := [one["value"][1] for one in run.server.get("query", query=twice)["result"]]) != ["2"]:
        assert time.monotonic() < deadline, there
        time.sleep(0.5)
    states_shown = {key[0]: n for key, n in _last(answers["cluster: Jobs by state/A"]).items()}
    assert states_shown.pop("CANCELLED") >= 0, "those of the thread beside"
    assert {state: n for state, n in states_shown.items() if n} == {"RUNNING": 1, "QUEUED": 1, "FAILED": 1}
    assert _last(answers["cluster: Queue depth/A"]) == {("default",): 1}
    causes = _last(answers["cluster: Attempts ended in the last hour/A"])
    assert {("user",), ("infrastructure",), ("preemption",)} <= causes.keys()
    (attempts,) = (n for key, n in _last(answers["cluster: Attempts of a job/A"]).items() if "gpt" in key)
    assert attempts == 2
    assert len([k for k in _last(answers["cluster: Jobs that are not over/A"]) if "gpt" in k]) == 1
    pool, deadline = "control-plane: Planning pool/B", time.monotonic() + DATA_S
    # each process has its own pool, whose processes start behind everything else
    while _last(answers[pool]) != {(): 4}:
        assert time.monotonic() < deadline, answers[pool]
        time.sleep(1)
        answers = wait_for_data(run.server, "gpt", run.site.running, DATA_S)
    assert len(_last(answers["control-plane: Lag of the orchestrator/A"])) == 2


@pytest.mark.slow
def test_accelerator_hours_of_the_cluster_are_computing_and_idle_time_together(run: Run):
    run.answers()
    now = time.time()
    asked = dashboard_queries("gpt", run.site.running, at=now, boards=("slotline-cluster",))
    computing, idle = (
        _last(run.server.ask(query, now)) for query in asked if query.panel.startswith("Accelerator-hours")
    )
    assert idle["fill",] == pytest.approx(2 * idle["waits",], rel=WITHIN)
    assert computing[()] == pytest.approx(idle["fill",] * 1.5, rel=WITHIN), (
        "of three parts, one and a half are idle"
    )


def test_a_rate_is_of_the_interval_that_grafana_chooses_and_what_is_of_an_hour_says_so():
    windows: dict[str, set[str]] = {}
    for query in dashboard_queries("x", "y", at=0, interval="chosen"):
        if found := re.findall(r"\[(.+?)\]", query.expression):
            windows.setdefault(query.panel, set()).update(found)
    of_an_hour = {
        "Wait for the first attempt",
        "Attempts ended in the last hour",
        "Accelerator-hours of the last hour",
        "Idle accelerator-hours of the last hour",
    }
    assert {panel for panel, found in windows.items() if found == {"1h"}} == of_an_hour
    assert all(found == {"chosen"} for panel, found in windows.items() if panel not in of_an_hour)


def _timeline(run: Run) -> dict[str, dict[tuple[str, str], float]]:
    """Start and end of each block by (row, text), in microseconds, as Grafana gets them."""
    run.answers()
    now = time.time()
    return {
        query.name: {
            (series["metric"]["line"], series["metric"]["slot"]): float(series["value"][1])
            for series in run.server.ask(query, now)
        }
        for query in dashboard_queries("gpt", run.site.running, at=now, boards=("slotline-timeline",))
        if query.panel.startswith("Slots, ")
    }


@pytest.mark.slow
def test_the_timeline_has_every_slot_at_its_microsecond_planned_and_measured(run: Run):
    """Asked at January 1970, which is what the axis shows: the origin is the start of the step, at any zoom."""
    tables = _timeline(run)
    expected = {}
    for s in run.site.plan.slots:
        row, text = f"{s.mesh.replace('mesh', 'mesh0')} {s.lane}", f"{s.action}{s.microbatch} {s.stage}"
        for kind, slower in (("plan", 1.0), ("run", SHOWN.slower)):
            expected[f"{row} {kind}", text] = (1e6 * slower * s.start_s, 1e6 * slower * s.end_s)
    assert tables["start"].keys() == tables["end"].keys() == expected.keys()
    for key, (start, end) in expected.items():
        assert tables["start"][key] == pytest.approx(start, abs=1)
        assert tables["end"][key] == pytest.approx(end - 1, abs=1)
        assert tables["start"][key] == round(tables["start"][key]), (
            "Grafana has whole milliseconds, which these are"
        )
    for row in {row for row, _ in tables["start"]}:
        times = sorted((tables["start"][key], tables["end"][key]) for key in tables["start"] if key[0] == row)
        for (_, before), (after, _) in itertools.pairwise(times):
            assert before <= after, f"{row}: a block that ends late would blank the next one"


@pytest.mark.slow
def test_rows_of_the_timeline_sort_as_the_pipeline_with_the_plan_above_the_measurement(run: Run):
    rows = sorted({row for row, _ in _timeline(run)["start"]})
    assert rows[:4] == [
        "mesh00 compute plan",
        "mesh00 compute run",
        "mesh00 recv:mesh1 plan",
        "mesh00 recv:mesh1 run",
    ]
    assert [row for row in rows if row.endswith("compute run")] == [f"mesh0{i} compute run" for i in range(3)]


def test_transformations_name_the_columns_that_the_queries_give():
    """Grafana names a table's value column after its query, and its labels by their names.

    The order matters: excluding `Time` by name takes every field of type time along, so the
    conversion comes after it (tried with Grafana's own package of transformations, 12.4).
    """
    board = json.loads((ROOT / "dashboards" / "slotline-timeline.json").read_text())
    (panel,) = (panel for panel in board["panels"] if panel["type"] == "state-timeline")
    columns = {"Time", "line", "slot", "edge"} | {f"Value #{target['refId']}" for target in panel["targets"]}
    order = [item["id"] for item in panel["transformations"]]
    assert order == ["merge", "sortBy", "organize", "convertFieldType", "partitionByValues"]
    options = {item["id"]: item["options"] for item in panel["transformations"]}
    organize = options["organize"]
    kept = columns - organize["excludeByName"].keys()
    assert kept == organize["indexByName"].keys()
    times = [conversion["targetField"] for conversion in options["convertFieldType"]["conversions"]]
    assert times == ["Value #start", "Value #end"], "the second time field is a block's end"
    assert organize["indexByName"][times[0]] < organize["indexByName"][times[1]]
    assert organize["renameByName"] == {"slot": "Value", "line": "row"}
    assert options["partitionByValues"]["fields"] == ["row"]
    assert all(target["format"] == "table" and target["instant"] for target in panel["targets"])
    units = [p["properties"] for p in panel["fieldConfig"]["overrides"] if p["matcher"]["options"] == "time"]
    assert units == [[{"id": "unit", "value": "time:x [µs]"}]], (
        "the axis says microseconds, and no time of day"
    )


def test_each_row_of_the_timeline_is_as_high_as_on_the_page_of_the_job():
    """Grafana's unit of height is 30 pixels and 8 between panels; title, axis and rims take some 80."""
    for board in ("slotline-timeline", "slotline-steps"):
        built = json.loads((ROOT / "dashboards" / f"{board}.json").read_text())
        (panel,) = (panel for panel in built["panels"] if panel["type"] == "state-timeline")
        pixels = 38 * panel["gridPos"]["h"] - 8 - 80
        script = (ROOT / "service" / "api" / "pages" / "static" / "timeline.js").read_text()
        assert pixels / panel["options"]["perPage"] >= int(re.search(r"const COMPUTE = (\d+);", script)[1])


def _last(result: list[dict]) -> dict[tuple[str, ...], float]:
    """The last value of each series by the values of its labels, in the order of their names."""
    found = {}
    for series in result:
        labels = {name: value for name, value in series["metric"].items() if name != "__name__"}
        value = series["values"][-1][1] if "values" in series else series["value"][1]
        key = tuple(labels[name] for name in sorted(labels))
        assert key not in found, f"{labels} twice"
        found[key] = float(value)
    return found
