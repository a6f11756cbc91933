"""Trackers with their real libraries, offline, read back by the libraries' own readers; and trackers that fail or hang."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.missing import needs_libraries
from tests.polling import until
from tests.worker.actor.test_evaluation import spec_of
from tests.worker.driver.test_evaluation_loop import DATA
from tests.worker.driver.test_evaluation_loop import train as train_and_evaluate
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy, Evaluation, Job, TrackerSpec
from worker.contract.planned import PlannedJob
from worker.contract.reasons import Reason
from worker.driver import step_loop
from worker.driver.metrics import ModelFlops
from worker.driver.step_measurement import StepMeasurement, StepScaling, StepUsage
from worker.driver.tracking import run_tracking
from worker.driver.tracking.run_tracking import RunTracking, run_config, step_values
from worker.driver.tracking.trackers import make_tracker

LIMIT_S = 60.0
CONFIG = {
    "job": {
        "name": "gpt",
        "training": {"steps": 6, "tf32": None},
        "resources": {"tensor_plan": {"*.qkv": "colwise"}},
    },
    "plan": {"schedule": "1f1b", "stages": 2, "makespan_s": 0.25},
}


def measured(step, loss, *, step_s=2.0, tokens=640):
    report = {"step": step, "loss": loss, "metrics": {"accuracy": 0.25}, "step_s": step_s}
    report |= {"grad_norm": 1.5, "learning_rate": 3e-4, "peak_memory_bytes": {"m0": 1000, "m1": 3000}}
    return StepMeasurement(report, {}, StepUsage(step_s, {}, 16, tokens), StepScaling(None, False, False))


def evaluated(step, loss):
    return {"step": step, "loss": loss, "metrics": {"accuracy": 0.5}}


def attempt(specs, events, first, losses, *, outcome, evaluations=(), run_id="job-1"):
    """One attempt of a run: its steps from `first` on, evaluations behind their steps, and its end."""
    tracking = RunTracking(lambda kind, message: events.append((kind, message)))
    tracking.prepare(specs)
    tracking.start(run_id, "gpt", CONFIG, ModelFlops(500, 1000.0))
    for step, loss in enumerate(losses, first):
        tracking.step(measured(step, loss))
        if step in evaluations:
            tracking.evaluation(evaluated(step, 10 * loss))
    tracking.finish(outcome, limit_s=LIMIT_S)
    assert not tracking.abandoned
    return tracking


def two_attempts(spec):
    """An attempt that fails after step 5, and one that goes on from the checkpoint of step 3; their events.

    Losses of the first are step / 8, of the second step / 4, which float32 holds exactly.
    """
    events = []
    attempt([spec], events, 1, [s / 8 for s in range(1, 6)], outcome="FAILED", evaluations=(3, 5))
    attempt([spec], events, 4, [s / 4 for s in range(4, 7)], outcome="SUCCEEDED", evaluations=(5, 6))
    assert [message for kind, message in events if kind == "tracking_failed"] == []
    return events


NAMES = {
    *("train/loss", "train/grad_norm", "train/lr", "train/accuracy", "eval/loss", "eval/accuracy"),
    *("perf/step_s", "perf/samples_per_s", "perf/tokens_per_s", "perf/mfu"),
    *("memory/peak", "memory/peak_m0", "memory/peak_m1"),
}


def test_a_step_has_the_usual_names_and_rates_of_its_own_length():
    """Of 2 s: 16 samples, 640 tokens, and 500 FLOPs where 1000 a second are possible."""
    assert step_values(measured(7, 2.5), ModelFlops(500, 1000.0)) == {
        "train/loss": 2.5,
        "train/grad_norm": 1.5,
        "train/lr": 3e-4,
        "train/accuracy": 0.25,
        "perf/step_s": 2.0,
        "perf/samples_per_s": 8.0,
        "perf/tokens_per_s": 320.0,
        "perf/mfu": 0.25,
        "memory/peak": 3000.0,
        "memory/peak_m0": 1000.0,
        "memory/peak_m1": 3000.0,
    }
    unknown = step_values(measured(7, None, tokens=None), ModelFlops(500))
    assert unknown.keys().isdisjoint({"train/loss", "perf/tokens_per_s", "perf/mfu"})


def test_the_configuration_is_job_and_plan_without_the_values_of_its_environment():
    plan = {"chosen": "1f1b", "makespan_s": 0.5, "bubble_ratio": 0.25, "slots": [1, 2, 3]}
    stages = [{"name": "s0", "mesh": "m0"}, {"name": "s1", "mesh": "m1"}]
    planned = PlannedJob(("a", "b"), {"microbatches": 4, "stages": stages}, plan, update_s=0.25)
    job = {"name": "gpt", "training": {"steps": 3}, "env": {"KEY": "hidden"}, "secrets": ["WANDB_API_KEY"]}
    config = run_config(job, planned)
    assert config["job"] == {"name": "gpt", "training": {"steps": 3}}
    assert config["plan"] == {
        "schedule": "1f1b",
        "stages": 2,
        "stage_starts": ["a", "b"],
        "mesh_of_stage": ["m0", "m1"],
        "microbatches": 4,
        "makespan_s": 0.5,
        "bubble_ratio": 0.25,
        "step_s": 0.75,
    }


@needs_libraries("tensorboard")
def test_tensorboard_shows_one_curve_of_two_attempts_with_the_newer_values_of_repeated_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = two_attempts(TrackerSpec(to="tensorboard", dir=str(tmp_path)))
    folder = tmp_path / "gpt-job-1"
    assert events == [("tracking", f"tensorboard: {folder}")] * 2
    found = EventAccumulator(str(folder)).Reload()
    assert {*found.Tags()["scalars"]} == NAMES
    curve = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert curve == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 1.0), (5, 1.25), (6, 1.5)]
    assert [(event.step, event.value) for event in found.Scalars("eval/loss")] == [
        (3, 3.75),
        (5, 12.5),
        (6, 15.0),
    ]
    assert {event.value for event in found.Scalars("memory/peak")} == {3000.0}
    texts = found.Tensors("config/text_summary")
    assert [text.step for text in texts] == [1, 4]
    assert b'"schedule": "1f1b"' in texts[0].tensor_proto.string_val[0]


def wandb_records(path):
    """The records of a run file: blocks of 32 KiB as in LevelDB's log, of pieces with CRC, length and type, of Records."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow  # W&B starts a process for each attempt
@needs_libraries("wandb")
def test_wandb_has_one_run_with_the_id_of_the_job_in_both_attempts(tmp_path, monkeypatch):
    """Each attempt has a process and a folder of its own: W&B names folders by the second."""
    import wandb

    for name in ("exit", "excepthook"):  # wandb has its own
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    curves, evaluations, events = [], [], []
    spec = TrackerSpec(to="wandb", project="language")
    for first, losses, outcome in ((1, [0.5, 0.25], "FAILED"), (2, [0.25, 0.125], "SUCCEEDED")):
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / outcome))
        (tmp_path / outcome).mkdir()
        try:
            attempt([spec], events, first, losses, outcome=outcome, evaluations=(2,), run_id="job-7")
        finally:
            wandb.teardown()
        (path,) = tmp_path.glob(f"{outcome}/wandb/offline-run-*/*.wandb")
        records = list(wandb_records(path))
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == ("job-7", "language", "gpt")
        config = {update.key: json.loads(update.value_json) for update in run.config.update}
        assert config["job"] == CONFIG["job"] and config["plan"] == CONFIG["plan"]
        rows = [
            {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.HasField("history")
        ]
        curves.append([(row["_step"], row["train/loss"]) for row in rows])
        evaluations += [row["eval/loss"] for row in rows if "eval/loss" in row]
        assert {name for row in rows for name in row if not name.startswith("_")} == NAMES
        codes = [record.exit.exit_code for record in records if record.HasField("exit")]
        assert codes == [0 if outcome == "SUCCEEDED" else 1]
        assert b"k" * 40 not in path.read_bytes()
    assert events == []
    assert curves == [[(1, 0.5), (2, 0.25)], [(2, 0.25), (3, 0.125)]]
    assert evaluations == [2.5, 2.5]


def test_wandb_is_given_no_step_that_the_resumed_run_has(monkeypatch):
    logged = []
    run = SimpleNamespace(starting_step=3, offline=False, url="https://wandb.example/job-1")
    run.log = lambda values, step: logged.append((step, values))
    given = {}
    fake = SimpleNamespace(
        init=lambda **arguments: given.update(arguments) or run,
        Settings=type("Settings", (), {"model_fields": {}, "__init__": lambda self, **_: None}),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = make_tracker(TrackerSpec(to="wandb", project="language", entity="team"))
    assert tracker.start("job-1", "gpt", CONFIG) == "https://wandb.example/job-1"
    assert (given["id"], given["resume"], given["entity"]) == ("job-1", "allow", "team")
    for step in (1, 2, 3, 4):
        tracker.log(step, {"train/loss": float(step)})
    assert logged == [(3, {"train/loss": 3.0}), (4, {"train/loss": 4.0})]


@pytest.mark.slow  # MLflow makes a database
@needs_libraries("mlflow")
def test_mlflow_has_one_run_that_the_second_attempt_finds_again(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/runs.db"
    spec = TrackerSpec(to="mlflow", experiment="language", uri=uri)
    attempt([spec], [], 1, [1.0], outcome="SUCCEEDED", run_id="job-0")
    two_attempts(spec)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("language")
    runs = {run.data.tags["slotline.job"]: run for run in client.search_runs([experiment.experiment_id])}
    assert {*runs} == {"job-0", "job-1"}
    run = runs["job-1"]
    assert (run.info.run_name, run.info.status) == ("gpt", "FINISHED")
    assert run.data.metrics.keys() == NAMES
    curves = {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in ("train/loss", "eval/loss")
    }
    assert curves["train/loss"] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5), (5, 0.625), (6, 1.5)]
    assert curves["eval/loss"] == [(3, 3.75), (5, 6.25), (6, 15.0)]
    assert run.data.params == {
        "name": "gpt",
        "training.steps": "6",
        "training.tf32": "null",
        "resources.tensor_plan._.qkv": "colwise",
    }
    assert run.data.tags["slotline.plan.schedule"] == "1f1b"


@pytest.mark.slow  # Trackio makes a database
@needs_libraries("trackio")
def test_trackio_has_one_run_that_the_second_attempt_goes_on_with(tmp_path):
    """In a process of its own: the library reads TRACKIO_DIR once, when it is imported."""
    code = """
import json, sys, types
from tests.worker.driver.test_trackers import attempt, two_attempts
from worker.contract.job import TrackerSpec
spec = TrackerSpec(to="trackio", project="language")
attempt([spec], [], 1, [1.0], outcome="SUCCEEDED", run_id="job-0")
events = two_attempts(spec)
import trackio
(run,) = [run for run in trackio.Api().runs("language") if run.name == "gpt-job-1"]
runs = sorted(run.name for run in trackio.Api().runs("language"))
print("READ " + json.dumps([events, runs, run.config]))
"""
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, env=environment
    )
    assert done.returncode == 0, done.stderr
    (read,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    events, runs, config = json.loads(read.removeprefix("READ "))
    assert events == [["tracking", "trackio: run gpt-job-1 of project language"]] * 2
    assert runs == ["gpt-job-0", "gpt-job-1"]
    assert config["job"] == CONFIG["job"] and config["plan"] == CONFIG["plan"]
    read_metric = [sys.executable, "-m", "trackio.cli", "get", "metric", "--json"]
    read_metric += ["--project", "language", "--run", "gpt-job-1", "--metric"]
    curves = {}
    for name in ("train/loss", "eval/loss"):
        shown = subprocess.run(
            [*read_metric, name],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
        )
        assert shown.returncode == 0, shown.stderr
        curves[name] = [(row["step"], row["value"]) for row in json.loads(shown.stdout)["values"]]
    assert curves["train/loss"] == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5), (5, 0.625), (6, 1.5)]
    assert curves["eval/loss"] == [(3, 3.75), (5, 6.25), (6, 15.0)]


class Recorder:
    """A user's tracker: its calls, by `key`, in order."""

    calls: dict = {}  # noqa: RUF012 (the tests empty it)

    def __init__(self, key="all"):
        self._calls = self.calls.setdefault(key, [])

    def start(self, run_id, name, config):
        self._calls.append(("start", run_id, name, config))

    def log(self, step, values):
        self._calls.append((step, values))

    def finish(self, outcome):
        self._calls.append(("finish", outcome))


class RaisesAt(Recorder):
    """Raises in one of its methods."""

    def __init__(self, method):
        def fail(*_):
            raise ConnectionError(f"no route in {method}")

        super().__init__(method)
        setattr(self, method, fail)


class Blocked(Recorder):
    """Does not return from its first step until `release` is set."""

    release = threading.Event()
    entered = threading.Event()

    def __init__(self):
        super().__init__("blocked")
        # those of its own test: its thread may outlive it
        self.release, self.entered = Blocked.release, Blocked.entered

    def log(self, step, values):
        self.entered.set()
        self.release.wait(LIMIT_S)
        super().log(step, values)


@pytest.fixture(autouse=True)
def no_calls(monkeypatch):
    monkeypatch.setattr(Recorder, "calls", {})
    monkeypatch.setattr(Blocked, "release", threading.Event())
    monkeypatch.setattr(Blocked, "entered", threading.Event())
    yield
    Blocked.release.set()


def own(kind, **args):
    return TrackerSpec(factory=f"{__name__}:{kind.__name__}", args=args)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("start", "cannot start: ConnectionError: no route in start; training goes on without it"),
        ("log", "failed at step 1: ConnectionError: no route in log; training goes on"),
        ("finish", "cannot end its run: ConnectionError: no route in finish"),
    ],
)
def test_a_tracker_that_raises_is_told_once_by_name_and_another_has_every_value(method, message):
    events = []
    attempt([own(RaisesAt, method=method), own(Recorder)], events, 1, [3.0, 2.0, 1.0], outcome="SUCCEEDED")
    name = f"{__name__}:RaisesAt"
    lost = [("tracking_failed", f"{name}: 3 steps or evaluations are not written")] if method == "log" else []
    assert events == [("tracking_failed", f"{name}: {message}"), *lost]
    (start, *rows, end) = Recorder.calls["all"]
    assert start == ("start", "job-1", "gpt", CONFIG) and end == ("finish", "SUCCEEDED")
    assert [(step, values["train/loss"]) for step, values in rows] == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_tracker_that_blocks_holds_up_nothing_and_is_told_once_with_what_is_lost():
    """With room for 4: the one that it blocks in, 4 that wait and 3 for which there is no room. Time is the test's own."""
    events, clock = [], [0.0]
    tracking = RunTracking(
        lambda kind, message: events.append((kind, message)),
        max_waiting=4,
        slow_after_s=60.0,
        now=lambda: clock[0],
    )
    tracking.prepare([own(Blocked), own(Recorder)])
    tracking.start("job-1", "gpt", CONFIG)
    tracking.step(measured(1, 0.5))
    assert Blocked.entered.wait(LIMIT_S)
    for step in range(2, 9):
        clock[0] += 20.0
        tracking.step(measured(step, 0.5))
        until(lambda step=step: len(Recorder.calls["all"]) > step)  # the other one has room
    name = f"{__name__}:Blocked"
    slow = f"{name}: has not answered for 60 s: training goes on, and its values wait"
    assert events == [("tracking_failed", slow)]
    tracking.finish("FAILED", limit_s=0.2)
    assert tracking.abandoned
    lost = f"{name}: has not ended within 0.2 s: 8 steps or evaluations are not written"
    assert events == [("tracking_failed", slow), ("tracking_failed", lost)]
    assert Recorder.calls["all"][-1] == ("finish", "FAILED")


def test_rows_that_found_no_room_are_counted_where_the_tracker_goes_on():
    events = []
    tracking = RunTracking(lambda kind, message: events.append((kind, message)), max_waiting=2)
    tracking.prepare([own(Blocked)])
    tracking.start("job-1", "gpt", CONFIG)
    tracking.step(measured(1, 0.5))
    assert Blocked.entered.wait(LIMIT_S)
    for step in range(2, 7):
        tracking.step(measured(step, 0.5))
    Blocked.release.set()
    tracking.finish("SUCCEEDED", limit_s=LIMIT_S)
    assert [call[0] for call in Recorder.calls["blocked"]] == ["start", 1, 2, 3, "finish"]
    assert events == [("tracking_failed", f"{__name__}:Blocked: 3 steps or evaluations are not written")]


def test_a_tracker_that_changes_what_it_is_given_changes_nothing_for_another(monkeypatch):
    class Careless(Recorder):
        def start(self, run_id, name, config):
            config["job"].clear()

        def log(self, step, values):
            values.clear()

    monkeypatch.setitem(globals(), "Careless", Careless)
    attempt([own(Careless), own(Recorder, key="careful")], [], 1, [0.5], outcome="SUCCEEDED")
    start, (_, values), _ = Recorder.calls["careful"]
    assert start[3] == CONFIG and values["train/loss"] == 0.5


def test_values_that_wait_are_flushed_together(monkeypatch):
    """As MLflow sends them; one batch that cannot be sent is lost as a whole, and the next is tried."""
    monkeypatch.setattr(run_tracking, "_ROWS_AT_ONCE", 3)
    flushed = []

    def flush(tracker):
        flushed.append([call[0] for call in Recorder.calls["all"] if call[0] != "start"])
        if len(flushed) == 1:
            raise TimeoutError("no answer")

    monkeypatch.setattr(Recorder, "flush", flush, raising=False)
    gate = threading.Event()
    monkeypatch.setattr(Recorder, "start", lambda *_: gate.wait(LIMIT_S))
    events = []
    tracking = RunTracking(lambda kind, message: events.append(message))
    tracking.prepare([own(Recorder)])
    tracking.start("job-1", "gpt", CONFIG)
    for step in range(1, 6):
        tracking.step(measured(step, 0.5))
    gate.set()
    tracking.finish("SUCCEEDED", limit_s=LIMIT_S)
    assert flushed == [[1, 2, 3], [1, 2, 3, 4, 5]]
    assert events == [
        f"{__name__}:Recorder: failed at step 3: TimeoutError: no answer; training goes on",
        f"{__name__}:Recorder: 3 steps or evaluations are not written",
    ]


@pytest.mark.parametrize("folder", [False, True])
def test_a_library_that_is_missing_is_named_with_the_ways_out_before_anything_starts(
    tmp_path, monkeypatch, folder
):
    """Also where a folder has its name: W&B writes offline runs to one."""
    if folder:
        (tmp_path / "wandb").mkdir()
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(AttemptFailure) as failed:
        RunTracking().prepare([TrackerSpec(to="wandb", project="language")])
    assert failed.value.reason is Reason.CODE_SETUP_FAILED
    assert failed.value.message == (
        "tracking names wandb, and the driver's environment has no package wandb: add it to the job "
        "(code: {pip: [wandb]}), install slotline[wandb] on the Ray nodes, or leave the tracker out"
    )


def test_a_factory_that_is_missing_or_makes_no_tracker_is_named():
    with pytest.raises(
        AttemptFailure, match=r"tracking: factory 'nowhere:make': there is no module 'nowhere'"
    ) as failed:
        RunTracking().prepare([TrackerSpec(factory="nowhere:make")])
    assert failed.value.reason is Reason.CODE_SETUP_FAILED
    events = []
    attempt(
        [TrackerSpec(factory="types:SimpleNamespace", args={"log": 1})], events, 1, [0.5], outcome="SUCCEEDED"
    )
    ((_, message),) = events
    assert (
        "made a SimpleNamespace without start, log, finish: a tracker has start(run_id, name, config)"
        in message
    )


@pytest.mark.slow
def test_a_whole_job_logs_its_steps_and_evaluations_in_order_over_two_attempts(tmp_path, monkeypatch):
    """Real workers; the second attempt goes on from the checkpoint of step 4, as the loop trains no step twice."""
    monkeypatch.setattr(step_loop, "own_node_address", lambda: "127.0.0.1")
    spec = spec_of(16)
    spec["tracking"] = [{"factory": f"{__name__}:Recorder"}]
    evaluation = Evaluation(DATA, every_steps=2, at_start=True)
    policy = CheckpointPolicy(str(tmp_path), every_steps=2)
    heard = []
    for steps in (4, 6):
        tracking = RunTracking()
        tracking.prepare(Job.from_json(spec).tracking)
        tracking.start("job", "name", {})
        heard.append(train_and_evaluate(spec, steps, evaluation, policy=policy, tracking=tracking))
        tracking.finish("SUCCEEDED", limit_s=LIMIT_S)
    rows = [call for call in Recorder.calls["all"] if isinstance(call[0], int)]
    kinds = [(step, "eval" if "eval/loss" in values else "train") for step, values in rows]
    assert kinds == [
        *((0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval")),
        *((5, "train"), (6, "train"), (6, "eval")),
    ]
    reports = [report for run in heard for report in run.steps]
    trained = [values for _, values in rows if "train/loss" in values]
    for report, values in zip(reports, trained, strict=True):
        assert values["train/loss"] == report["loss"] and values["train/lr"] == report["learning_rate"]
        assert values["perf/samples_per_s"] == pytest.approx(8 / report["step_s"])
        assert values["memory/peak"] == max(report["peak_memory_bytes"].values())
    losses = [(values["eval/loss"], values["eval/accuracy"]) for _, values in rows if "eval/loss" in values]
    assert losses == [(one["loss"], one["metrics"]["accuracy"]) for run in heard for one in run.evaluations]


@pytest.mark.slow  # imports Ray in a process of its own
def test_a_driver_ends_at_once_though_a_tracker_and_an_exit_hook_of_its_library_hang():
    code = """
import atexit, sys, threading
from worker.contract.job import TrackerSpec
from worker.driver.__main__ import end_process_now
from worker.driver.tracking.run_tracking import RunTracking
atexit.register(threading.Event().wait)
tracking = RunTracking()
tracking.prepare([TrackerSpec(factory="tests.worker.driver.test_trackers:Blocked")])
tracking.start("job", "name", {})
tracking.evaluation({"step": 1, "loss": 1.0, "metrics": {}})
tracking.finish("FAILED", limit_s=0.1)
print("ended", tracking.abandoned)
end_process_now(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (7, "ended True\n"), done.stderr
