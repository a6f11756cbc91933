"""Whole attempts train as plain loops do, and tell what becomes of them: the driver's own way, its workers in threads."""

from __future__ import annotations

import json
import shutil
import threading
from collections import defaultdict

import pytest
import torch

from service.orchestrator.planning.work import RunningJob, shorter_plan
from service.scheduler.planner import compile_kernels
from service.store.measurements import SlotRecord
from tests.missing import needs_libraries
from tests.worker.actor.test_actor import job, plain
from tests.worker.driver import local_attempt
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.local_attempt import run_attempt
from tests.worker.driver.test_replanning import poor_answer
from tests.worker.unequal_texts import unequal_job
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.data.sampler import collate
from worker.driver.limits import Limits
from worker.engine import compile as stage_compile
from worker.examples.text import ByteWindows
from worker.model.factory import build_model


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory):
    """An attempt of five steps, checkpoints of the third and the fifth: (control plane, folder)."""
    folder = tmp_path_factory.mktemp("five_steps")
    spec = job("cosine", checkpoint={"uri": str(folder), "every_steps": 3, "keep": 2})
    spec["training"]["steps"] = 5
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    return plane, folder


@pytest.mark.slow
def test_an_attempt_on_fewer_meshes_goes_on_with_losses_and_learning_rates_of_the_plain_loop(
    five_steps, tmp_path
):
    first, folder = five_steps
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    place = {"checkpoint": {"uri": str(tmp_path), "every_steps": 3, "keep": 2}}
    losses, rates = plain(job("cosine"), range(1, 9))
    assert first.states == ["RUNNING", "SUCCEEDED"]
    network = first.plan_requests[0]["network"]
    assert network["contention"] in ("link", "full-duplex", "half-duplex")
    assert [(link["source"], link["target"]) for link in network["links"]] == [("m0", "m1"), ("m1", "m0")]
    assert all(link["bandwidth_bytes_per_s"] > 1e6 for link in network["links"])
    assert [report["checkpoint"]["step"] for report in first.reports if report["checkpoint"]][-1] == 5
    assert set(checkpoint_format.shard_names(checkpoint_format.step_uri(str(tmp_path), "job", 5))) == {
        "m0",
        "m1",
        "model",
    }
    spec = job("cosine", meshes=1, **place) | {"pipeline": {"stages": 2, "schedule": "auto"}}
    second, code = run_attempt(spec, number=2, recorded=first.steps)
    assert code == 0, second.reports[-1]
    assert [one["mesh"] for one in first.plan_requests[0]["memory"]] == ["m0", "m1"]
    assert all(one["memory_bytes"] > 1 << 20 for one in first.plan_requests[0]["memory"])
    assert all({*step["peak_memory_bytes"]} == {"m0", "m1"} for step in first.steps)
    assert first.plan_requests[0]["optimizer"] == {"bytes_per_parameter_byte": 2.0, "bytes_per_tensor": 4}
    network = second.plan_requests[0]["network"]
    assert (network["contention"], network["bandwidth_bytes_per_s"]) == ("link", None)
    found = first.steps + second.steps
    assert [step["step"] for step in found] == list(range(1, 9))
    assert [step["loss"] for step in found] == pytest.approx(losses, rel=1e-5)
    assert [step["learning_rate"] for step in found] == pytest.approx(rates)


@pytest.mark.slow
def test_a_job_that_begins_from_another_ones_checkpoint_goes_on_with_the_losses_of_the_plain_loop(
    five_steps, tmp_path
):
    """It is evaluated before its first step, which is the fourth."""
    _, folder = five_steps
    spec = job("cosine", stages=3, meshes=3, checkpoint={"uri": str(tmp_path), "every_steps": 50})
    losses, rates = plain(spec, range(1, 7))
    spec["training"]["steps"] = 6
    spec["evaluation"] = {"data": spec["data"], "every_steps": 50, "steps": 1, "at_start": True}
    source = {"uri": checkpoint_format.step_uri(str(folder), "job", 3), "job": "job", "step": 3}
    second, code = run_attempt(spec, job_id="second", resume_from=source)
    assert code == 0, second.reports[-1]
    assert [step["step"] for step in second.steps] == [4, 5, 6]
    assert [step["loss"] for step in second.steps] == pytest.approx(losses[3:], rel=1e-5)
    assert [step["learning_rate"] for step in second.steps] == pytest.approx(rates[3:])
    events = [event["message"] for report in second.reports for event in report["events"]]
    assert (
        "resumed from job job step 3: parameters, optimizer state, position in data (sample 24); training.steps 6 (was 5)"
        in events
    )
    assert [one["step"] for report in second.reports for one in report["evaluations"]] == [3, 6]


@pytest.mark.slow
def test_an_attempt_with_microbatches_of_unequal_lengths_trains_and_tells_their_padding(tmp_path):
    spec = unequal_job(stages=3, buckets="auto", checkpoint={"uri": str(tmp_path), "every_steps": 2})
    spec["training"]["steps"] = 4
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    with Workers(spec) as run:
        assert [step["loss"] for step in plane.steps] == pytest.approx(run.losses(range(1, 5)), rel=1e-5)
    events = [event["message"] for report in plane.reports for event in report["events"]]
    assert any("microbatches are padded to" in message for message in events)
    assert any("of its tokens are padding, with microbatches of" in message for message in events)
    assert any("pipeline.schedule is 1f1b, whose order stays" in message for message in events)


@pytest.mark.slow
def test_an_attempt_on_meshes_of_unlike_sizes_has_the_losses_of_the_plain_loop(tmp_path):
    """It is evaluated before its first step, keeps its best checkpoint and ends when it gets no better."""
    no_rate_after_3 = {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3, "gamma": 0.0}}
    spec = job(no_rate_after_3, checkpoint={"uri": str(tmp_path), "every_steps": 50, "keep": 1})
    losses, _ = plain(spec, range(1, 7))
    spec["evaluation"] = {"data": spec["data"], "every_steps": 3, "steps": 3, "at_start": True}
    spec["evaluation"] |= {"patience": 1, "keep_best": True}
    spec["resources"] = {"meshes": 2, "workers_per_mesh": 2, "workers": [2, 1]}
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    assert [step["loss"] for step in plane.steps] == pytest.approx(losses, rel=1e-5)
    assert all({*step["peak_memory_bytes"]} == {"m0", "m1"} for step in plane.steps)
    found = [one for report in plane.reports for one in report["evaluations"]]
    assert [(one["step"], one["samples"]) for one in found] == [(0, 24), (3, 24), (6, 24)]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=spec["training"]["seed"])
    data = ByteWindows(**spec["data"]["args"])
    (tokens,), targets = collate([data[index] for index in range(24)])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model.eval()(tokens), targets)
    assert found[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert found[0]["loss"] > found[1]["loss"] == found[2]["loss"]
    assert plane.reports[-1]["reason"] == "STOPPED_EARLY"
    best = [report["best_checkpoint"] for report in plane.reports if report.get("best_checkpoint")]
    assert best[-1]["step"] == 3
    (asked,), (answer,) = plane.plan_requests, plane.plan_answers
    assert [(one["microbatches"], one["workers"]) for one in asked["mesh_profiles"]] == [(2, 1), (2, 2)]
    assert asked["update"]["alone"] == ["m1"]
    slots = {
        (one["action"], one["edge"]): one["end_s"] - one["start_s"]
        for one in answer["plan"]["slots"]
        if one.get("edge") is not None
    }
    for one in answer["reshardings"]:
        action = "SEND_B" if one["backward"] else "SEND_F"
        assert slots[action, one["edge"]] == pytest.approx(one["plan"]["makespan_s"])


@pytest.mark.slow
def test_an_attempt_whose_compiler_gets_no_time_trains_as_traced_and_says_which_stage_does(monkeypatch):
    monkeypatch.setattr(stage_compile, "COMPILE_LIMIT_S", 0.01)
    spec = job(stages=1, meshes=1)
    losses, _ = plain(spec, range(1, 3))
    spec["training"] |= {"steps": 2, "compile": True}
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    assert [step["loss"] for step in plane.steps] == pytest.approx(losses, rel=1e-5)
    events = [event for report in plane.reports for event in report["events"]]
    (told,) = [event["message"] for event in events if event["kind"] == "compiled"]
    assert told.startswith("mesh m0, worker 0: training.compile: ")
    assert "runs as traced: " in told
    (profiled,) = [event["message"] for event in events if event["kind"] == "profiled"]
    assert profiled.endswith("the batch in 2 microbatches; 0 of them compiled")


class WantsItToEnd(ControlPlane):
    """Once it has heard of a step."""

    def command(self):
        return "stop" if self.steps else "continue"


@pytest.mark.slow
def test_an_attempt_that_gives_way_saves_and_the_next_goes_on_with_the_losses_of_the_plain_loop(tmp_path):
    spec = job(checkpoint={"uri": str(tmp_path), "every_steps": 1_000_000, "keep": 2})
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together for hundreds of steps
    spec["training"]["steps"] = 1_000_000
    first, code = run_attempt(spec, control=WantsItToEnd)
    assert code == 1, first.reports[-1]
    assert first.states == ["RUNNING", "FAILED"]
    last = first.reports[-1]
    done = first.steps[-1]["step"]
    assert (last["reason"], last["message"]) == (
        "PREEMPTED",
        f"asked to end: stopped after step {done}, which is saved",
    )
    (saved,) = [report["checkpoint"] for report in first.reports if report["checkpoint"]]
    assert saved["step"] == done
    spec["training"]["steps"] = done + 3
    second, code = run_attempt(spec, number=2, resume=saved, recorded=first.steps)
    assert code == 0, second.reports[-1]
    assert [step["step"] for step in first.steps + second.steps] == list(range(1, done + 4))
    losses, _ = plain(spec, range(1, done + 4))
    assert [step["loss"] for step in second.steps] == pytest.approx(losses[-3:], rel=1e-4)


@pytest.mark.slow
def test_an_attempt_that_runs_out_of_memory_says_so_and_the_next_one_plans_with_more():
    loss = {"factory": "tests.worker.workers:TooLargeAfter", "args": {"calls": 40}}
    spec, profiles = job(loss=loss), {}
    spec["training"]["steps"] = 1000
    first, code = run_attempt(spec, profiles=profiles)
    assert code == 1, first.reports[-1]
    assert first.states == ["RUNNING", "FAILED"]
    last = first.reports[-1]
    assert last["reason"] == "OUT_OF_MEMORY"
    assert "mesh m1 was planned with" in last["message"] and "can't allocate memory" in last["message"]
    assert "memory_corrected" in [event["kind"] for report in first.reports for event in report["events"]]
    assert first.plan_requests[0]["profile"]["activation_factor"] == 1.0
    second, _ = run_attempt(spec, number=2, profiles=profiles)
    assert second.steps
    assert second.plan_requests[0]["profile"]["activation_factor"] >= 1.25
    more, less = (
        sum(stage["activation_bytes"] for stage in plane.plan_answers[0]["spec"]["stages"])
        for plane in (second, first)
    )
    assert more >= 1.25 * less


@pytest.mark.slow
def test_an_attempt_whose_workers_read_different_data_ends_before_its_first_step():
    data = {"factory": "tests.worker.odd_jobs:ShuffledOnce", "args": {"length": 8, "unseeded": True}}
    plane, code = run_attempt(job(data=data))
    assert code == 1, plane.reports[-1]
    assert plane.states == ["FAILED"] and plane.steps == []
    last = plane.reports[-1]
    assert last["reason"] == "DATA_FAILED"
    assert (
        "different first samples" in last["message"]
        and "m0/0" in last["message"]
        and "m1/0" in last["message"]
    )


@pytest.mark.slow
def test_a_job_that_leaves_its_numbers_open_trains_with_the_chosen_ones_as_a_plain_loop():
    spec, profiles = job("cosine", workers_per_mesh=2), {}
    spec["training"] |= {"steps": 4, "microbatches": "auto"}
    spec["pipeline"] = {"stages": "auto", "schedule": "auto"}
    first, code = run_attempt(spec, profiles=profiles)
    assert code == 0, first.reports[-1]
    assert first.states == ["RUNNING", "SUCCEEDED"]
    phases = ("placed", "traced", "profiled", "links_measured", "planned", "connected")
    kinds = [event["kind"] for report in first.reports for event in report["events"]]
    assert tuple(dict.fromkeys(kind for kind in kinds if kind in phases)) == phases
    (request,), (answer,) = first.plan_requests, first.plan_answers
    assert [one["microbatches"] for one in request["profiles"]] == [1, 2, 4] == request["tried"]
    layers = [key for key in profiles if "+of+" not in key]
    assert len(layers) == 3, "each number has a profile of its own, kept for later attempts"
    assert sum("links" in key for key in profiles) == 1, "and the links between the nodes"
    assert 0.0 < request["action_s"] < 0.1
    links = {(link["source"], link["target"]) for link in request["network"]["links"]}
    assert links == {("m0", "m1"), ("m1", "m0")}
    assert request["update"]["step"]["per_tensor_s"] + request["update"]["step"]["fixed_s"] > 0
    assert all(one["reduce_s"] > 0 and one["step_s"] > 0 for one in answer["update"])
    chosen = answer["spec"]["microbatches"]
    spec["training"]["microbatches"] = chosen
    losses, _ = plain(spec, range(1, 5))
    assert [step["loss"] for step in first.steps] == pytest.approx(losses, rel=1e-5)
    assert answer["step_s"] == pytest.approx(answer["plan"]["makespan_s"] + answer["update_s"])
    measured = {slot["microbatch"] for slot in last_timeline(first)["slots"] if slot["action"] == "F"}
    assert measured == set(range(chosen)), "as many microbatches ran as were planned"
    again, code = run_attempt(spec, number=2, profiles=profiles)
    assert code == 0, again.reports[-1]
    kinds = [event["kind"] for report in again.reports for event in report["events"]]
    assert "planned" in kinds and "links_known" in kinds
    assert not {"profiled", "links_measured"} & set(kinds)
    assert again.plan_requests[0]["microbatches"] == chosen


def last_timeline(plane):
    return [timeline for report in plane.reports for timeline in report["timelines"]][-1]


@pytest.mark.slow
def test_an_attempt_whose_evaluations_get_no_better_succeeds_early_and_says_so(tmp_path):
    spec = job(checkpoint={"uri": str(tmp_path), "every_steps": 50, "keep": 1})
    spec["optimizer"]["args"]["lr"] = 0.0
    data = {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}}
    spec["evaluation"] = {"data": data, "every_steps": 2, "steps": 3, "at_start": True, "patience": 1}
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    last = plane.reports[-1]
    assert (last["state"], last["reason"]) == ("SUCCEEDED", "STOPPED_EARLY"), last
    assert "loss was no better in 1 evaluations" in last["message"]
    found = [one for report in plane.reports for one in report["evaluations"]]
    assert [(one["step"], one["samples"]) for one in found] == [(0, 24), (2, 24)]
    assert found[0]["loss"] == found[1]["loss"]
    assert [step["step"] for step in plane.steps] == [1, 2]
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["step-0000000002"]


@pytest.mark.slow
@needs_libraries("tensorboard")
def test_a_tracker_has_the_curve_that_is_reported_and_one_that_fails_is_an_event(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = job("cosine")
    spec["training"]["steps"] = 3
    spec["evaluation"] = {"data": spec["data"], "every_steps": 2, "steps": 1}
    failing = {"factory": "tests.worker.driver.test_trackers:RaisesAt", "args": {"method": "log"}}
    spec["tracking"] = [{"to": "tensorboard", "dir": str(tmp_path)}, failing]
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    assert plane.states == ["RUNNING", "SUCCEEDED"]
    curves = EventAccumulator(str(tmp_path / "job-job")).Reload()
    for name, of in {"train/loss": "loss", "train/lr": "learning_rate", "perf/step_s": "step_s"}.items():
        expected = [(step["step"], pytest.approx(step[of], rel=1e-6)) for step in plane.steps]
        assert [(one.step, one.value) for one in curves.Scalars(name)] == expected
    evaluations = [one for report in plane.reports for one in report["evaluations"]]
    assert [(one.step, one.value) for one in curves.Scalars("eval/loss")] == [
        (one["step"], pytest.approx(one["loss"], rel=1e-6)) for one in evaluations
    ]
    (text,) = curves.Tensors("config/text_summary")
    assert b'"makespan_s"' in text.tensor_proto.string_val[0]
    events = [event for report in plane.reports for event in report["events"]]
    assert [event["message"] for event in events if event["kind"] == "tracking_failed"] == [
        f"{failing['factory']}: failed at step 1: ConnectionError: no route in log; training goes on",
        f"{failing['factory']}: 5 steps or evaluations are not written",
    ]


class BytesBehindASearch(ByteWindows):
    """Bytes that are read when nobody looks for a shorter plan any more: one that is found is there before the last step."""

    def __getitem__(self, index):
        for thread in threading.enumerate():
            if thread.name == "slotline-replan" and thread.is_alive():  # not while it is being started
                thread.join(120.0)
        return super().__getitem__(index)


class BeginsPoorly(ControlPlane):
    """Its first plan has one microbatch in flight; a shorter one it makes as the served control plane does."""

    def plan(self, costs):
        return poor_answer(super().plan(costs))

    def replan(self, request):
        # steps exactly as planned: of measured ones it depends on the machine whether an order is clearly shorter
        planned = self.plan_answers[0]["plan"]["slots"]
        slots = [[SlotRecord(*(slot.get(name) for name in SlotRecord._fields)) for slot in planned]] * 3
        running = RunningJob(
            self.given["job"], json.dumps(self.plan_answers[0]), self.plan_requests[0], slots
        )
        return json.loads(shorter_plan(lambda: False, running, 0.2))


@pytest.mark.slow
def test_an_attempt_that_begins_with_a_poor_order_swaps_it_and_has_the_losses_of_the_plain_loop():
    compile_kernels()  # not while the driver waits
    spec = job("cosine") | {"pipeline": {"stages": 2, "schedule": "auto"}}
    spec["training"] |= {"steps": 40, "microbatches": 4}
    losses, _ = plain(spec, range(1, 41))
    spec["data"]["factory"] = f"{__name__}:BytesBehindASearch"
    plane, code = run_attempt(spec, control=BeginsPoorly, limits=Limits(linger_s=0.0, profile_every_s=0.0))
    assert code == 0, plane.reports[-1]
    assert plane.states == ["RUNNING", "SUCCEEDED"]
    swapped = [report["running_plan"] for report in plane.reports if report["running_plan"]]
    told = [
        event
        for report in plane.reports
        for event in report["events"]
        if event["kind"] in ("plan_swapped", "plan_undone")
    ]
    assert told[0]["kind"] == "plan_swapped"
    assert f"from step {swapped[-1]['since_step']} on" in told[-1]["message"]
    undone = told[-1]["kind"] == "plan_undone"  # on a busy machine it may not bring what was promised
    poor = plane.plan_answers[0]["plan"]
    assert (swapped[-1]["plan"]["plan"]["programs"] == poor["programs"]) == undone
    assert [step["step"] for step in plane.steps] == list(range(1, 41))
    assert [step["loss"] for step in plane.steps] == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("where", ["RunTracking.finish", "DriverMetrics.close"])
def test_a_driver_that_is_asked_to_end_after_training_still_says_that_it_succeeded(monkeypatch, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"worker.driver.__main__.{where}", interrupted)
    plane, code = run_attempt(job("cosine", meshes=1, stages=1))
    assert (code, plane.states[-1]) == (0, "SUCCEEDED")


def test_weights_of_a_mesh_are_packed_once_the_last_mesh_but_one_has_its_own(monkeypatch):
    """Of five meshes of two workers the first worker has all weights."""
    waits_for, taken = {}, defaultdict(set)

    def call(actor, method, *given, make=local_attempt.LocalActor._call, **named):
        future = make(actor, method, *given, **named)
        if method == "weights":
            waits_for[f"m{given[1][0]}"] = set(given[2:])
        if method == "take_weights":
            taken[actor.worker._arguments["mesh"]].add(future)
        return future

    monkeypatch.setattr(local_attempt.LocalActor, "_call", call)
    spec = job(stages=5, meshes=5, workers_per_mesh=2)
    spec["pipeline"] |= {"cut": ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]}
    spec["training"]["steps"] = 2
    losses, _ = plain(spec, range(1, 3))
    plane, code = run_attempt(spec)
    assert code == 0, plane.reports[-1]
    assert [step["loss"] for step in plane.steps] == pytest.approx(losses, rel=1e-5)
    assert list(waits_for) == [f"m{k}" for k in range(5)] and waits_for["m0"] == waits_for["m1"] == set()
    for k in range(2, 5):
        assert waits_for[f"m{k}"] == taken[f"m{k - 2}"] and len(waits_for[f"m{k}"]) == 2
