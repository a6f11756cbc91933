"""Jobs over REST on a real Ray: they learn what a plain loop learns, wait their turn, fail with a reason."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from service.client.client import Client
from tests.end_to_end.conftest import FINAL, TWO, job_spec
from tests.polling import until
from tests.reference import train
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.record import RECORD_SHARD, make_record, record_to_state
from worker.contract.logs import goes_on_line
from worker.data.sampler import BatchSampler, collate
from worker.model.factory import build_model, call_factory, resolve

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def post_mortem(server, job_id: str) -> dict[str, str]:
    """The files of what the last failed attempt left."""
    answer = server.client.get(f"/api/v1/jobs/{job_id}/postmortem")
    assert answer.status_code == 200, answer.text
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def plain_optimizer(spec: dict, parameters: list) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters, **spec["args"])
    if spec.get("schedule"):
        schedule = resolve(spec["schedule"]["factory"])(optimizer, **spec["schedule"]["args"])
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def plain_losses(spec: dict) -> list[float]:
    """The same job as a plain loop on the unsplit model, in this process."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"].get("args"), seed=training["seed"])
    dataset = call_factory(spec["data"]["factory"], spec["data"].get("args"))
    sampler = BatchSampler(
        len(dataset), training["global_batch"], training["microbatches"], seed=training["seed"]
    )

    def batch(step: int) -> list:
        count = training["microbatches"]
        return [collate([dataset[i] for i in sampler.indices(step, m)]) for m in range(count)]

    records = train(
        model,
        batch,
        steps=range(1, training["steps"] + 1),
        loss=resolve(spec["loss"]["factory"]),
        optimizer=lambda parameters: plain_optimizer(spec["optimizer"], parameters),
        clip_grad_norm=training.get("clip_grad_norm"),
    )
    return [record.loss for record in records]


@pytest.fixture(scope="module")
def two_jobs(server) -> tuple[dict[str, dict[str, Any]], dict[str, str], set[str]]:
    """Two jobs by name that were submitted at once and have ended: their specifications, their ids, and why the second
    one waited."""
    specs = {
        "gpt": job_spec(
            "gpt",
            pipeline={"stages": 3, "schedule": "eager-1f1b"},
            resources={"meshes": 3, "device": "cpu"},
        ),
        "unet": job_spec("unet", pipeline={"stages": 2, "schedule": "auto"}, resources=TWO),
    }
    ids = {name: server.submit(spec) for name, spec in specs.items()}
    reasons = set()
    while server.job(ids["gpt"])["state"] not in FINAL:
        second = server.job(ids["unet"])
        if second["state"] == "QUEUED" and second.get("message"):
            reasons.add(second["message"])
        time.sleep(0.2)
    for job_id in ids.values():
        server.wait(job_id)
    return specs, ids, reasons


@pytest.mark.slow
def test_two_jobs_at_once_take_turns_and_learn_what_a_plain_loop_learns(server, ray_head, two_jobs):
    """Three accelerators and two on a cluster of four: the second waits with a reason, then runs."""
    specs, ids, reasons = two_jobs
    for name, job_id in ids.items():
        job = server.job(job_id)
        assert job["state"] == "SUCCEEDED", job
        measured = [step["loss"] for step in server.steps(job_id)]
        assert measured == pytest.approx(plain_losses(specs[name]), rel=1e-5), name
    assert any("accelerator" in reason for reason in reasons), reasons
    ray_head.assert_nothing_held()


@pytest.mark.slow
def test_a_job_that_leaves_its_numbers_open_is_planned_without_training_and_then_trains(server, ray_head):
    """One worker measures it, a short Ray job; the attempt measures with its gang, and plans from that."""
    spec = job_spec(
        "gpt-open",
        training={"steps": 6, "global_batch": 16, "microbatches": "auto", "seed": 3, "clip_grad_norm": 1.0},
        pipeline={"stages": "auto", "schedule": "auto"},
        resources=TWO,
    )
    with Client(str(server.client.base_url)) as client:
        told = []
        alone = client.plan_job(spec, waiting=told.append)
        assert told and alone.measured_by == "one worker" and alone.step_s > alone.plan["makespan_s"]
        assert client.plan_job(spec, waiting=told.append).spec == alone.spec and len(told) == 1
        ray_head.assert_nothing_held()
        job = client.wait(client.submit(spec).id)
        assert job.state == "SUCCEEDED", job
        planned = client.plan(job.id)
        gang = client.plan_job(spec)
        steps = list(client.steps(job.id))
    assert gang.measured_by == "gang"
    assert all(one.step_s > 0 for one in planned.update)
    chosen = planned.spec["microbatches"]
    assert 16 % chosen == 0 and len(planned.begins) % 2 == 0
    spec["training"]["microbatches"] = chosen
    assert [step.loss for step in steps] == pytest.approx(plain_losses(spec), rel=1e-5)


@pytest.mark.slow
def test_a_finished_job_shows_plan_timeline_and_trace(server, two_jobs):
    job_id = two_jobs[1]["gpt"]
    answer = server.client.get(f"/api/v1/jobs/{job_id}/plan").json()
    plan, spec = answer["plan"], answer["spec"]
    assert spec["network"]["contention"] in ("link", "full-duplex", "half-duplex")
    neighbours = {(f"m{a}", f"m{b}") for i in range(2) for a, b in ((i, i + 1), (i + 1, i))}
    assert neighbours <= {(link["source"], link["target"]) for link in spec["network"]["links"]}
    assert all(mesh["memory_bytes"] > 1 << 20 for mesh in spec["meshes"])
    assert all(stage["static_bytes"] > 0 for stage in spec["stages"])
    shown = server.client.get(f"/jobs/{job_id}/memory").json()["meshes"]
    assert all(0 < one["planned_bytes"] <= one["limit_bytes"] and one["measured_bytes"] > 0 for one in shown)
    assert plan["schedule"] == "eager-1f1b" and plan["makespan_s"] > 0
    timeline = server.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"step": 12}).json()
    key = lambda s: (s["mesh"], s["lane"], s["action"], s["stage"], s["microbatch"])  # noqa: E731
    planned = {key(s) for s in timeline["planned"]["slots"]}
    measured = {key(s) for s in timeline["measured"]["slots"] if s["action"] not in ("REDUCE", "STEP")}
    assert planned == measured
    trace = server.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"format": "chrome"}).json()
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) >= 2 * len(planned)
    sent = sum(
        slot["action"].startswith("SEND")
        for side in ("planned", "measured")
        for slot in timeline[side]["slots"]
    )
    arrows = [e["ph"] for e in trace["traceEvents"] if e["ph"] in ("s", "f")]
    assert arrows.count("s") == arrows.count("f") == sent
    why = server.client.get(f"/api/v1/jobs/{job_id}/why", timeout=120).json()
    assert why["step"] == 12 and why["notes"] == [] and why["verdict"]
    for mesh in why["measured"]["meshes"]:
        covered_s = mesh["compute_s"] + sum(mesh["idle_s"].values())
        assert covered_s == pytest.approx(why["measured"]["makespan_s"], rel=1e-3)
    page = server.client.get(f"/jobs/{job_id}")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]


def test_two_workers_a_mesh_share_each_microbatch_follow_a_schedule_and_learn_the_same(server):
    """Two stages on two meshes of two workers: data parallel inside a mesh, pipeline parallel between."""
    schedule = {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2, "gamma": 0.3}}
    optimizer = {"factory": "torch.optim:AdamW", "args": {"lr": 1e-2}, "schedule": schedule}
    spec = job_spec(
        "gpt-wide",
        optimizer=optimizer,
        pipeline={"stages": 2, "schedule": "1f1b"},
        parallelism={"pp": 2, "dp": 2},
        resources={"device": "cpu"},
    )
    job_id = server.submit(spec)
    assert server.wait(job_id)["state"] == "SUCCEEDED"
    measured = [step["loss"] for step in server.steps(job_id)]
    assert measured == pytest.approx(plain_losses(spec), rel=1e-5)
    constant = plain_losses({**spec, "optimizer": {**optimizer, "schedule": None}})
    assert measured != pytest.approx(constant, rel=1e-3), "the schedule matters here"


def test_a_job_whose_worker_is_killed_goes_on_from_its_checkpoint_and_learns_the_same(
    server, ray_head, tmp_path
):
    spec = job_spec("gpt-wounded", retry={"infrastructure": 1}, resources=TWO)
    spec["training"] |= {"steps": 90}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together
    spec["checkpoint"] = {"uri": str(tmp_path), "every_steps": 5, "keep": 2}
    job_id = server.submit(spec)
    until(lambda: len(server.steps(job_id)) > 10, every_s=0.1)
    left, victim = ray_head.worker_pids()
    os.kill(victim, signal.SIGKILL)
    reached = server.job(job_id)["progress"]["step"]
    until(lambda: server.job(job_id)["progress"]["step"] > reached + 10, every_s=0.1)
    assert left in ray_head.worker_pids() and victim not in ray_head.worker_pids()
    job = server.wait(job_id, limit_s=400)
    assert job["state"] == "SUCCEEDED", job
    assert [attempt["reason"] for attempt in job["attempts"]] == ["WORKER_LOST", None]
    events = server.client.get(f"/api/v1/jobs/{job_id}/events").json()["items"]
    assert [(e["attempt"], e["kind"]) for e in events if e["kind"] in ("handed_over", "started_anew")] == [
        (2, "handed_over")
    ]
    first, second = (
        server.client.get(f"/api/v1/jobs/{job_id}/logs", params={"attempt": number}).text for number in (1, 2)
    )
    assert "WORKER_LOST" in first and goes_on_line(f"{job_id}-2") not in first and "SUCCEEDED" not in first
    assert goes_on_line(f"{job_id}-2") in second and "SUCCEEDED" in second and "WORKER_LOST" not in second
    steps = server.steps(job_id)
    assert [step["step"] for step in steps] == list(range(1, 91))
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)
    ray_head.assert_nothing_held()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"pipeline": {"stages": 64}}, None, "64"),
        (
            {"model": {"factory": "tests.end_to_end.broken:raises_in_forward"}},
            "USER_CODE_RAISED",
            "told to fail",
        ),
    ],
    ids=["more stages than modules", "raises in forward"],
)
def test_a_bad_job_fails_and_names_the_cause(server, ray_head, changes, reason, says):
    alone = {"pipeline": {"stages": 1}, "resources": {"meshes": 1, "device": "cpu"}}
    job_id = server.submit(job_spec("gpt-bad", **(alone | changes)))
    job = server.wait(job_id)
    assert job["state"] == "FAILED"
    assert says in job["message"]
    assert reason is None or job["reason"] == reason
    files = post_mortem(server, job_id)
    assert says in files["waits.txt"] and files["log.txt"].count("\n") > 3
    assert "torch" in files["versions.json"]
    assert "programs.json is not here" in files["README.txt"], "all of them fail before they have a plan"
    ray_head.assert_nothing_held()


@pytest.mark.slow
def test_a_job_with_a_typo_ends_while_another_one_holds_every_accelerator(server, ray_head):
    spec = job_spec("gpt-long")
    spec["training"] |= {"steps": 100_000}
    running = server.submit(spec)
    server.wait(running, {"STARTING", "RUNNING"})
    wrong = server.submit(job_spec("gpt-typo", model={"factory": "worker.examples.gpt:biuld"}))
    job = server.wait(wrong)
    assert (job["state"], job["reason"], job["attempts"]) == ("FAILED", "MODEL_BUILD_FAILED", [])
    assert "did you mean build?" in job["message"]
    assert server.job(running)["state"] in ("STARTING", "RUNNING")
    events = server.client.get(f"/api/v1/jobs/{running}/events").json()["items"]
    (checked,) = [event["message"] for event in events if event["kind"] == "checked"]
    assert checked.startswith("data: ") and "model: " in checked
    server.client.post(f"/api/v1/jobs/{running}/cancel").raise_for_status()
    server.wait(running)
    ray_head.assert_nothing_held()


def test_a_batch_that_microbatches_do_not_divide_is_refused_before_anything_is_written(server):
    before = len(server.client.get("/api/v1/jobs").json()["items"])
    spec = job_spec("gpt", training={"steps": 1, "global_batch": 10, "microbatches": 4})
    response = server.client.post("/api/v1/jobs", json=spec)
    assert response.status_code == 422
    assert response.headers["content-type"].startswith("application/problem+json")
    assert "10" in response.text and "4" in response.text
    assert len(server.client.get("/api/v1/jobs").json()["items"]) == before


@pytest.mark.slow
def test_a_running_job_survives_a_crash_of_the_control_plane_then_a_killed_worker_and_gives_all_back_when_cancelled(
    server, ray_head, tmp_path
):
    """The same attempt is heard again; the one after it goes on from the last checkpoint."""
    spec = job_spec("gpt-phoenix", retry={"infrastructure": 2}, resources=TWO)
    spec["training"] |= {"steps": 100_000}
    spec["optimizer"]["args"]["lr"] = 1e-4  # no chaos: both loops stay together for hundreds of steps
    spec["checkpoint"] = {"uri": str(tmp_path / "checkpoints"), "every_steps": 10, "keep": 2}
    job_id = server.submit(spec)
    until(lambda: server.steps(job_id))
    server.kill()
    server.start()
    job = server.job(job_id)
    assert (job["state"], len(job["attempts"])) == ("RUNNING", 1)
    until(lambda: server.job(job_id)["progress"]["step"] > job["progress"]["step"] + 15)
    victims = ray_head.worker_pids()
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    until(lambda: len(server.job(job_id)["attempts"]) == 2)
    before = server.job(job_id)["progress"]["step"]
    until(lambda: server.job(job_id)["progress"]["step"] > before + 5)
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    job = server.wait(job_id)
    assert job["state"] == "CANCELLED"
    lost, _ = job["attempts"]
    assert lost["reason"] == "WORKER_LOST"
    files = post_mortem(server, job_id)
    assert {"plan.json", "programs.json"} <= set(files) and len(json.loads(files["slots.json"])) > 50
    steps = server.steps(job_id)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1)), (
        "also those without a control plane"
    )
    spec["training"]["steps"] = len(steps)
    assert [step["loss"] for step in steps] == pytest.approx(plain_losses(spec), rel=1e-4)
    ray_head.assert_nothing_held()


@pytest.mark.slow
def test_weights_are_written_by_a_process_of_the_cluster_beside_the_checkpoints(server, ray_head, tmp_path):
    spec = job_spec("gpt-exported")
    spec["pipeline"] |= {"stages": 5}
    spec["resources"] = {"meshes": 5}  # one more than there are: it waits, and what it saved is laid there
    spec["checkpoint"] = {"uri": str(tmp_path)}
    job_id = server.submit(spec)
    model = torch.nn.Linear(3, 2)
    uri = checkpoint_format.step_uri(str(tmp_path), job_id, 4)
    state = {"parameters": {name: p.detach() for name, p in model.named_parameters()}}
    checkpoint_format.save_shard(uri, step=4, shard="m0", state=state)
    checkpoint_format.save_shard(
        uri, step=4, shard=RECORD_SHARD, state=record_to_state(make_record(model), {})
    )
    checkpoint_format.finish_checkpoint(uri, step=4, shards=["m0", RECORD_SHARD], keep=1)
    with Client(server.url) as client:
        (listed,) = client.checkpoints(job_id, sums=True).items
        assert (listed.step, listed.state, listed.checked) == (4, "complete", "checksums")
        written = client.export(job_id, limit_s=200)
    assert written.step == 4 and written.uri == f"{tmp_path}/{job_id}/export-step-0000000004"
    found = load_file(Path(written.uri, "model.safetensors"))
    assert torch.equal(found["weight"], model.weight) and found.keys() == model.state_dict().keys()
    server.client.post(f"/api/v1/jobs/{job_id}/cancel").raise_for_status()
    ray_head.assert_nothing_held()
