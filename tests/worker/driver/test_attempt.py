"""Whole attempts as processes of their own on a local Ray."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

from tests.worker.actor.test_actor import job, plain
from tests.worker.driver.control_plane import ControlPlane
from worker.checkpoint import format as checkpoint_format
from worker.data.sampler import collate
from worker.examples.text import ByteWindows
from worker.model.factory import build_model


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(
        address="local",
        num_cpus=1,
        resources={"slotline_worker": 3},
        include_dashboard=False,
        log_to_driver=False,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def attempt(cluster):
    """Starts an attempt of a job; (control plane, process of the driver)."""
    started = []

    def start(spec, number=1, resume=None, profiles=None):
        plane = ControlPlane(
            {"job_id": "job", "number": number, "job": spec, "device": "cpu", "resume": resume}, profiles
        )
        environment = {
            **os.environ,
            "SLOTLINE_CONTROL_URL": plane.url,
            "SLOTLINE_ATTEMPT_ID": f"job-{number}",
            "SLOTLINE_ATTEMPT_TOKEN": "secret",
            "SLOTLINE_DRIVER_RAY_ADDRESS": cluster,
            "SLOTLINE_METRICS_LINGER_S": "0",
        }
        process = subprocess.Popen([sys.executable, "-m", "worker.driver"], env=environment)
        started.append((plane, process))
        return plane, process

    yield start
    for plane, process in started:
        process.kill()
        process.wait(60)
        plane.close()


def assert_nothing_held():
    deadline = time.monotonic() + 60
    while ray.available_resources().get("slotline_worker") != 3.0:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_on_fewer_meshes_goes_on_with_losses_and_learning_rates_of_the_plain_loop(
    attempt, tmp_path
):
    place = {"checkpoint": {"uri": str(tmp_path), "every_steps": 3, "keep": 2}}
    spec = job("cosine", **place)
    losses, rates = plain(spec, range(1, 9))
    spec["training"]["steps"] = 5
    first, process = attempt(spec)
    assert process.wait(120) == 0
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
    second, process = attempt(spec, number=2)
    assert process.wait(120) == 0
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
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_on_meshes_of_unlike_sizes_has_the_losses_of_the_plain_loop(attempt, tmp_path):
    """It is evaluated before its first step, keeps its best checkpoint and ends when it gets no better."""
    no_rate_after_3 = {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 3, "gamma": 0.0}}
    spec = job(no_rate_after_3, checkpoint={"uri": str(tmp_path), "every_steps": 50, "keep": 1})
    losses, _ = plain(spec, range(1, 7))
    spec["evaluation"] = {"data": spec["data"], "every_steps": 3, "steps": 3, "at_start": True}
    spec["evaluation"] |= {"patience": 1, "keep_best": True}
    spec["resources"] = {"meshes": 2, "workers_per_mesh": 2, "workers": [2, 1]}
    plane, process = attempt(spec)
    assert process.wait(300) == 0
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
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_whose_compiler_gets_no_time_trains_as_traced_and_says_which_stage_does(attempt):
    spec = job(stages=1, meshes=1)
    losses, _ = plain(spec, range(1, 3))
    spec["training"] |= {"steps": 2, "compile": True, "compile_limit_s": 0.01}
    plane, process = attempt(spec)
    assert process.wait(200) == 0
    assert [step["loss"] for step in plane.steps] == pytest.approx(losses, rel=1e-5)
    events = [event for report in plane.reports for event in report["events"]]
    (told,) = [event["message"] for event in events if event["kind"] == "compiled"]
    assert told.startswith("mesh m0, worker 0: training.compile: ")
    assert "runs as traced: " in told
    (profiled,) = [event["message"] for event in events if event["kind"] == "profiled"]
    assert profiled.endswith("the batch in 2 microbatches; 0 of them compiled")
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_driver_that_is_told_to_end_says_so_and_gives_everything_back(attempt):
    spec = job()
    spec["training"]["steps"] = 1_000_000
    plane, process = attempt(spec)
    plane.wait_for_steps(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert plane.states == ["RUNNING", "CANCELLED"]
    assert "SIGTERM" in plane.reports[-1]["message"]
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_that_gives_way_saves_and_the_next_goes_on_with_the_losses_of_the_plain_loop(
    attempt, tmp_path
):
    spec = job(checkpoint={"uri": str(tmp_path), "every_steps": 1_000_000, "keep": 2})
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together for hundreds of steps
    spec["training"]["steps"] = 1_000_000
    first, process = attempt(spec)
    first.wait_for_steps(1)
    first.command = "stop"
    assert process.wait(300) == 1
    assert first.states == ["RUNNING", "FAILED"]
    last = first.reports[-1]
    done = first.steps[-1]["step"]
    assert (last["reason"], last["message"]) == (
        "PREEMPTED",
        f"asked to end: stopped after step {done}, which is saved",
    )
    (saved,) = [report["checkpoint"] for report in first.reports if report["checkpoint"]]
    assert saved["step"] == done
    assert_nothing_held()
    spec["training"]["steps"] = done + 3
    second, process = attempt(spec, number=2, resume=saved)
    assert process.wait(300) == 0
    assert [step["step"] for step in first.steps + second.steps] == list(range(1, done + 4))
    losses, _ = plain(spec, range(1, done + 4))
    assert [step["loss"] for step in second.steps] == pytest.approx(losses[-3:], rel=1e-4)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_that_runs_out_of_memory_says_so_and_the_next_one_plans_with_more(attempt):
    loss = {"factory": "tests.worker.workers:TooLargeAfter", "args": {"calls": 40}}
    spec, profiles = job(loss=loss), {}
    spec["training"]["steps"] = 1000
    first, process = attempt(spec, profiles=profiles)
    assert process.wait(120) == 1
    assert first.states == ["RUNNING", "FAILED"]
    last = first.reports[-1]
    assert last["reason"] == "OUT_OF_MEMORY"
    assert "mesh m1 was planned with" in last["message"] and "can't allocate memory" in last["message"]
    assert "memory_corrected" in [event["kind"] for report in first.reports for event in report["events"]]
    assert first.plan_requests[0]["profile"]["activation_factor"] == 1.0
    second, process = attempt(spec, number=2, profiles=profiles)
    second.wait_for_steps(1)
    assert second.plan_requests[0]["profile"]["activation_factor"] >= 1.25
    more, less = (
        sum(stage["activation_bytes"] for stage in plane.plan_answers[0]["spec"]["stages"])
        for plane in (second, first)
    )
    assert more >= 1.25 * less


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_whose_workers_read_different_data_ends_before_its_first_step(attempt):
    data = {"factory": "tests.worker.odd_jobs:ShuffledOnce", "args": {"length": 8, "unseeded": True}}
    plane, process = attempt(job(data=data))
    assert process.wait(120) == 1
    assert plane.states == ["FAILED"] and plane.steps == []
    last = plane.reports[-1]
    assert last["reason"] == "DATA_FAILED"
    assert (
        "different first samples" in last["message"]
        and "m0/0" in last["message"]
        and "m1/0" in last["message"]
    )
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_worker_that_dies_in_native_code_is_told_as_that_with_its_action_and_leaves_no_file(attempt):
    spec = job(loss={"factory": "tests.worker.workers:DiesAfter", "args": {"calls": 40}})
    spec["training"]["steps"] = 1000
    left_before = set(Path(tempfile.gettempdir()).glob("slotline-*.doing"))
    plane, process = attempt(spec)
    assert process.wait(120) == 1
    last = plane.reports[-1]
    assert last["reason"] == "WORKER_LOST"
    assert re.search(
        r"step (\d+): worker 0 of mesh m1 is gone.* native code \(Segmentation fault\) in 1F[01] of step (\d+)",
        last["message"],
    ), last["message"]
    assert set(Path(tempfile.gettempdir()).glob("slotline-*.doing")) <= left_before
    assert_nothing_held()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_job_that_leaves_its_numbers_open_trains_with_the_chosen_ones_as_a_plain_loop(attempt):
    spec, profiles = job("cosine"), {}
    spec["training"] |= {"steps": 4, "microbatches": "auto"}
    spec["pipeline"] = {"stages": "auto", "schedule": "auto"}
    first, process = attempt(spec, profiles=profiles)
    assert process.wait(120) == 0
    assert first.states == ["RUNNING", "SUCCEEDED"]
    (request,), (answer,) = first.plan_requests, first.plan_answers
    assert [one["microbatches"] for one in request["profiles"]] == [1, 2, 4, 8] == request["tried"]
    layers = [key for key in profiles if "links" not in key]
    assert len(layers) == 4, "each number has a profile of its own, kept for later attempts"
    assert len(profiles) == 5, "and the links between the nodes"
    assert 0.0 < request["action_s"] < 0.1
    links = {(link["source"], link["target"]) for link in request["network"]["links"]}
    assert links == {("m0", "m1"), ("m1", "m0")}
    assert request["update"]["step"]["per_tensor_s"] + request["update"]["step"]["fixed_s"] > 0
    chosen = answer["spec"]["microbatches"]
    spec["training"]["microbatches"] = chosen
    losses, _ = plain(spec, range(1, 5))
    assert [step["loss"] for step in first.steps] == pytest.approx(losses, rel=1e-5)
    assert answer["step_s"] == pytest.approx(answer["plan"]["makespan_s"] + answer["update_s"])
    measured = {slot["microbatch"] for slot in last_timeline(first)["slots"] if slot["action"] == "F"}
    assert measured == set(range(chosen)), "as many microbatches ran as were planned"
    again, process = attempt(spec, number=2, profiles=profiles)
    again.wait_for_steps(1)
    kinds = [event["kind"] for report in again.reports for event in report["events"]]
    assert "planned" in kinds and "links_known" in kinds
    assert not {"profiled", "links_measured"} & set(kinds)
    assert again.plan_requests[0]["microbatches"] == chosen


def last_timeline(plane):
    return [timeline for report in plane.reports for timeline in report["timelines"]][-1]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_an_attempt_whose_evaluations_get_no_better_succeeds_early_and_says_so(attempt, tmp_path):
    spec = job(checkpoint={"uri": str(tmp_path), "every_steps": 50, "keep": 1})
    spec["optimizer"]["args"]["lr"] = 0.0
    data = {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}}
    spec["evaluation"] = {"data": data, "every_steps": 2, "steps": 3, "at_start": True, "patience": 1}
    plane, process = attempt(spec)
    assert process.wait(300) == 0
    last = plane.reports[-1]
    assert (last["state"], last["reason"]) == ("SUCCEEDED", "STOPPED_EARLY"), last
    assert "loss was no better in 1 evaluations" in last["message"]
    found = [one for report in plane.reports for one in report["evaluations"]]
    assert [(one["step"], one["samples"]) for one in found] == [(0, 24), (2, 24)]
    assert found[0]["loss"] == found[1]["loss"]
    assert [step["step"] for step in plane.steps] == [1, 2]
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["step-0000000002"]
    assert_nothing_held()
