"""Plans over HTTP: in the pool, bounded, refused with the scheduler's own words; and uploaded code."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from service.orchestrator.planning.pool import PLAN_LIMIT_S, PlannerBusyError, PlannerPool, PlanTimeoutError
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from service.scheduler.programs.plan import Plan
from service.store.attempts import find_attempt
from service.store.database import utc_now
from service.store.files import read_package
from service.store.plans import record_job_plan
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from worker.contract.reasons import Reason

SPEC = {
    "microbatches": 4,
    "meshes": [{"name": "m0"}, {"name": "m1"}],
    "stages": [
        {"name": "s0", "mesh": "m0", "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0},
        {"name": "s1", "mesh": "m1", "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0},
    ],
    "edges": [{"source": "s0", "target": "s1", "forward_s": 0.5, "backward_s": 0.5}],
    "schedule": "1f1b",
}
PROFILE = {
    "layers": [
        {
            "name": f"layers.{index}",
            "forward_s": 0.1,
            "backward_input_s": 0.1,
            "backward_weight_s": 0.1,
            "activation_bytes": 8,
            "weight_stash_bytes": 0,
            "parameter_bytes": 8,
            "parameters": [f"layers.{index}.weight"],
        }
        for index in range(4)
    ],
    "edges": [
        {"source": index, "target": index + 1, "tensor": f"t{index}", "bytes": 8, "differentiable": True}
        for index in range(3)
    ],
    "device_type": "cpu",
    "microbatch": "8x8",
    "parameter_sizes": {f"layers.{index}.weight": 8 for index in range(4)},
}


async def test_a_plan_is_the_one_that_the_scheduler_makes(make_api: ApiMaker):
    async with make_api() as api:
        response = await api.client.post("/api/v1/plans", json=SPEC)
        assert response.status_code == 200, response.text
        assert Plan.model_validate(response.json()) == make_plan(PipelineSpec.model_validate(SPEC))
        for format, media in (("csv", "text/csv"), ("svg", "image/svg+xml"), ("chrome", "application/json")):
            answer = await api.client.post("/api/v1/plans", json=SPEC, params={"format": format})
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(media)
        wrong = {**SPEC, "stages": [{**SPEC["stages"][0], "mesh": "nowhere"}]}
        assert "nowhere" in problem(await api.client.post("/api/v1/plans", json=wrong), 422)["detail"]
        unknown = await api.client.post("/api/v1/plans", json={**SPEC, "colour": 1})
        assert "colour is not a field" in problem(unknown, 422)["detail"]
        negative = {**SPEC, "edges": [{**SPEC["edges"][0], "forward_s": -1}]}
        refused = await api.client.post("/api/v1/plans", json=negative)
        assert "edges.0.forward_s is -1" in problem(refused, 422)["detail"]
        problem(await api.client.post("/api/v1/plans", json={**SPEC, "microbatches": "x"}), 422)


async def test_a_spec_over_the_limit_is_refused_before_planning(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.api.routers.plans.ACTION_LIMIT", 12)
    async with make_api() as api:
        response = await api.client.post("/api/v1/plans", json={**SPEC, "microbatches": 5})
        assert "is 15, the limit is 12" in problem(response, 413)["detail"]


async def test_a_driver_gets_its_plan_and_the_user_reads_it(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started(pipeline={"stages": 4, "schedule": "1f1b"})
        body = {
            "profile": PROFILE,
            "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6},
            "workers": [],
        }
        answer = await api.driver(job_id, "POST", "/plan", json=body)
        assert answer.status_code == 200, answer.text
        planned = answer.json()
        assert planned["begins"] == [f"layers.{index}" for index in range(4)]
        spec = PipelineSpec.model_validate(planned["spec"])
        assert [stage.mesh for stage in spec.stages] == ["m0", "m1", "m2", "m3"]
        assert set(planned["plan"]["programs"]) == {"m0", "m1", "m2", "m3"}
        assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json() == planned
        timeline = (await api.client.get(f"/api/v1/jobs/{job_id}/timeline")).json()
        assert timeline["measured"] is None
        assert timeline["planned"]["makespan_s"] == planned["plan"]["makespan_s"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "planned"),
    [(None, "link"), ("none", "link"), ("link", "link"), ("half-duplex", "half-duplex")],
)
async def test_a_job_is_planned_with_the_sharing_and_the_links_that_were_measured_and_at_least_link(
    make_api: ApiMaker, sent: str | None, planned: str
):
    links = [{"source": "m1", "target": "m0", "bandwidth_bytes_per_s": 1.0, "latency_s": 0.5}]
    network = {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, "links": links}
    async with make_api() as api:
        job_id = await api.started(pipeline={"stages": 4, "schedule": "1f1b"})
        body = {"profile": PROFILE, "network": network | ({"contention": sent} if sent else {})}
        answer = (await api.driver(job_id, "POST", "/plan", json=body)).json()
    assert answer["spec"]["network"] == {
        **network,
        "contention": planned,
        "links": [links[0] | {"contention": None}],
    }
    size = answer["spec"]["edges"][0]["backward_bytes"]
    slow = [slot for slot in answer["plan"]["slots"] if slot["action"] == "SEND_B" and slot["mesh"] == "m1"]
    for slot in slow:
        assert slot["end_s"] - slot["start_s"] == pytest.approx(0.5 + size)


@pytest.mark.parametrize(("resources", "other"), [({}, None), ({"memory_per_worker": 10**10}, 10**10)])
async def test_a_job_is_planned_with_the_memory_of_its_meshes_and_the_state_of_its_optimizer(
    make_api: ApiMaker, resources: dict[str, int], other: int | None
):
    async with make_api() as api:
        job_id = await api.started(pipeline={"stages": 4, "schedule": "1f1b"}, resources=resources)
        body = {
            "profile": PROFILE,
            "memory": [{"mesh": "m1", "memory_bytes": 10**9}],
            "optimizer": {"bytes_per_parameter_byte": 2.0, "bytes_per_tensor": 4},
        }
        spec = (await api.driver(job_id, "POST", "/plan", json=body)).json()["spec"]
    assert [mesh["memory_bytes"] for mesh in spec["meshes"]] == [other, 10**9, other, other]
    assert spec["stages"][0]["static_bytes"] == PROFILE["parameter_sizes"]["layers.0.weight"] * 4 + 4


async def test_a_link_to_a_mesh_that_the_job_has_not_is_refused(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started(pipeline={"stages": 4, "schedule": "1f1b"})
        body = {"profile": PROFILE, "network": {"links": [{"source": "m0", "target": "m9"}]}}
        refused = await api.driver(job_id, "POST", "/plan", json=body)
        assert "m9" in problem(refused, 422)["detail"]


async def test_an_impossible_cut_is_refused_with_the_reason(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started(pipeline={"stages": 4, "schedule": "1f1b"})
        short = {**PROFILE, "layers": PROFILE["layers"][:2], "edges": PROFILE["edges"][:1]}
        refused = await api.driver(job_id, "POST", "/plan", json={"profile": short})
        assert "2" in problem(refused, 422)["detail"]
        for profile in ({}, {"layers": []}, {**PROFILE, "edges": [{"source": 9}]}):
            problem(await api.driver(job_id, "POST", "/plan", json={"profile": profile}), 422)


async def test_a_driver_whose_plan_takes_too_long_is_told_not_to_ask_again(make_api: ApiMaker, monkeypatch):
    async def too_long(*_arguments, **_options):
        raise PlanTimeoutError("planning took more than 1 s and was ended")

    async with make_api() as api:
        job_id = await api.started()
        given = (await api.driver(job_id, "GET", "")).json()
        assert given["plan_timeout_s"] > 2 * PLAN_LIMIT_S, "both tries end before"
        for name, path, body in (
            ("plan_job", "/plan", {"profile": PROFILE}),
            ("plan_forwards", "/forward-plan", {"stages": []}),
        ):
            monkeypatch.setattr(api.service.planner, name, too_long)
            refused = problem(await api.driver(job_id, "POST", path, json=body), 422)
            assert refused["code"] == Reason.PLANNING_TIMEOUT
            assert "named pipeline.schedule" in refused["detail"]


@pytest.mark.slow
async def test_a_full_line_is_refused_and_a_slow_plan_is_ended():
    planner = PlannerPool(processes=1, queue=1, timeout_s=0.5)
    planner._guard_s = 0.2
    try:
        slow = [asyncio.create_task(planner._run(_sleep, 60.0)) for _ in range(2)]
        await asyncio.sleep(0)  # both have taken their places
        with pytest.raises(PlannerBusyError, match="busy"):
            await planner._run(_sleep, 0.0)
        results = await asyncio.gather(*slow, return_exceptions=True)
        assert all(isinstance(result, PlanTimeoutError) for result in results)
        planner._timeout_s = 200.0
        assert await planner._run(_sleep, 0.0) == "slept"
    finally:
        planner.close()


@pytest.mark.slow
async def test_a_planning_process_that_dies_is_replaced():
    planner = PlannerPool(processes=1, queue=1, timeout_s=200)
    try:
        with pytest.raises(PlannerBusyError, match="ended before"):
            await planner._run(_die)
        assert await planner._run(_sleep, 0.0) == "slept"
    finally:
        planner.close()


def _die(_expired) -> str:
    os._exit(9)


def _sleep(_expired, seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


async def test_a_full_pool_answers_503_with_a_time_to_come_back(make_api: ApiMaker):
    async with make_api() as api:
        api.service.planner._free_requests["user"] = 0
        response = await api.client.post("/api/v1/plans", json=SPEC)
        problem(response, 503)
        assert int(response.headers["retry-after"]) > 0


@pytest.mark.slow
async def test_the_event_loop_serves_while_a_plan_is_made(make_api: ApiMaker, tmp_path):
    async with make_api() as api:
        planner, gate = api.service.planner, tmp_path / "go on"
        held = [asyncio.create_task(planner._run(_until_there, str(gate))) for _ in range(planner._processes)]
        await asyncio.sleep(0)  # the processes are taken: no plan is made before they are let go
        planning = asyncio.create_task(api.client.post("/api/v1/plans", json=SPEC))
        for _ in range(20):
            assert (await api.client.get("/healthz")).status_code == 200
        assert (await api.client.get("/api/v1/jobs")).status_code == 200
        assert not planning.done(), "the event loop made the plan by itself"
        gate.touch()
        assert (await planning).status_code == 200
        assert await asyncio.gather(*held) == ["there"] * len(held)


def _until_there(expired, path: str) -> str:
    while not expired() and not os.path.exists(path):
        time.sleep(0.01)
    return "there"


@pytest.mark.slow
def test_the_control_plane_imports_neither_torch_nor_ray():
    code = (
        "import sys, service.cli.main, service.control_plane;"
        "print([m for m in ('torch', 'ray', 'worker.driver') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# Packages


def zipped(files: dict[str, bytes], kind: int | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            if kind is not None:
                entry.external_attr = (kind | 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()


async def upload(api: Api, content: bytes):
    return await api.client.post(
        "/api/v1/packages", content=content, headers={"Content-Type": "application/zip"}
    )


async def test_code_is_stored_once_under_its_digest_and_named_by_a_job(api: Api):
    content = zipped({"mine/model.py": b"x = 1\n"})
    first, second = await upload(api, content), await upload(api, content)
    assert (first.status_code, second.status_code) == (201, 200)
    digest = hashlib.sha256(content).hexdigest()
    assert first.json() == second.json()
    assert first.json() == {"uri": f"package:{digest}", "digest": digest, "size_bytes": len(content)}
    job_id = await api.started(code={"working_dir": first.json()["uri"]})
    assert api.cluster.packages == {f"_ray_pkg_{digest[:32]}.zip": content}
    assert api.cluster.submissions[f"{job_id}-1"].working_dir == f"gcs://_ray_pkg_{digest[:32]}.zip"


async def test_code_lies_where_the_settings_say_and_reaches_the_cluster_from_there(
    make_api: ApiMaker, tmp_path: Path
):
    content = zipped({"mine/model.py": b"x = 1\n"})
    digest = hashlib.sha256(content).hexdigest()
    stored = tmp_path / "code" / f"{digest}.zip"
    async with make_api(packages_uri=str(stored.parent)) as api:
        uploads = [await upload(api, content) for _ in range(2)]
        assert [answer.status_code for answer in uploads] == [201, 200]
        assert stored.read_bytes() == content
        code = {"working_dir": uploads[0].json()["uri"]}
        stored.write_bytes(b"something else")
        refused = await api.submit(code=code, retry={"infrastructure": 0})
        for _ in range(3):
            await api.service.clusters.refresh()
            await api.service.orchestrator.round()
            await api.service.orchestrator.settle()
        job = await api.job(refused)
        assert (job["state"], job["reason"]) == ("FAILED", "START_REFUSED")
        assert f"{stored} is not what was uploaded: upload the package again" in job["message"]
        assert (await upload(api, content)).status_code == 200
        await api.started(code=code)
        assert api.cluster.packages == {f"_ray_pkg_{digest[:32]}.zip": content}
    async with make_api() as api:  # the setting is gone, the package is not
        assert (await api.client.post("/api/v1/jobs", json=job_body(code=code))).status_code == 201
        assert await read_package(api.service.database, digest) == content


async def test_a_place_of_code_that_takes_none_is_503_and_named(make_api: ApiMaker, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    async with make_api(packages_uri=str(tmp_path / "file")) as api:
        answer = await upload(api, zipped({"mine.py": b""}))
        assert "SLOTLINE_PACKAGES_URI" in problem(answer, 503)["detail"] and answer.headers["retry-after"]


@pytest.mark.parametrize("name", ["../up.py", "/etc/x", "a/../../x", "C:\\x", "..\\x"])
async def test_a_zip_that_would_leave_its_folder_is_refused(make_api: ApiMaker, name: str):
    async with make_api() as api:
        problem(await upload(api, zipped({name: b""})), 422)


async def test_links_broken_zips_and_bombs_are_refused(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.jobs.artifacts.UNPACKED_LIMIT_BYTES", 100_000)
    for room in ("jobs.artifacts", "api.app"):
        monkeypatch.setattr(f"service.{room}.PACKAGE_LIMIT_BYTES", 50_000)
    async with make_api() as api:
        assert "link" in problem(await upload(api, zipped({"link": b"/etc/passwd"}, 0o120000)), 422)["detail"]
        for content in (b"", b"PK", zipped({"a": b"b" * 100})[:-10]):
            problem(await upload(api, content), 422)
        bomb = zipped({"bomb": b"\0" * 200_000})
        assert len(bomb) < 1000 and "unpacks" in problem(await upload(api, bomb), 413)["detail"]
        problem(await upload(api, b"x" * 60_000), 413)
        problem(await upload(api, b"x" * 200_000), 413)


def test_a_folder_has_the_same_zip_whenever_it_is_made(tmp_path):
    from service.client.job_spec import zip_folder

    for name in ("one", "another"):
        folder = tmp_path / name
        (folder / "sub" / "__pycache__").mkdir(parents=True)
        (folder / "sub" / "a.py").write_text("a = 1\n")
        (folder / "sub" / "__pycache__" / "a.pyc").write_bytes(name.encode())
        (folder / "link").symlink_to(folder / "sub" / "a.py")
        os.utime(folder / "sub" / "a.py", (1e9 + len(name), 1e9 + len(name)))
    zips = [zip_folder(tmp_path / name) for name in ("one", "another")]
    assert zips[0] == zips[1]
    with zipfile.ZipFile(io.BytesIO(zips[0])) as archive:
        assert archive.namelist() == ["link", "sub/a.py"]


async def test_a_driver_gets_a_placement_by_what_meshes_exchange_in_the_plan_of_the_job(api: Api):
    job_id = await api.started()
    racks = ["r0", "r1", "r0", "r1"]
    api.cluster.node_names = ("n0", "n1", "n2", "n3")
    nodes = [{"name": f"n{i}", "free": 1, "total": 2, "rack": rack} for i, rack in enumerate(racks)]
    request = {"nodes": nodes, "meshes": [{"workers": 1}] * 4}
    answer = await api.driver(job_id, "POST", "/placement", json=request)
    assert answer.status_code == 200
    rack_of = dict(zip((node["name"] for node in nodes), racks, strict=True))
    placed = [rack_of[name] for (name,) in answer.json()["workers"]]
    assert placed[0] == placed[1] != placed[2] == placed[3], "without a plan the next are near"

    stages = [{"name": f"s{i}", "mesh": f"m{i}", "forward_s": 1.0} for i in range(4)]
    pairs = {(0, 1): 1, (1, 2): 1, (2, 3): 1, (0, 3): 9}
    edges = [
        {"source": f"s{a}", "target": f"s{b}", "forward_bytes": size, "backward_bytes": size}
        for (a, b), size in pairs.items()
    ]
    meshes = [{"name": f"m{i}"} for i in range(4)]
    spec = {"microbatches": 2, "meshes": meshes, "stages": stages, "edges": edges}
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps({"spec": spec}), at=utc_now())
    answer = await api.driver(job_id, "POST", "/placement", json=request)
    placed = [rack_of[name] for (name,) in answer.json()["workers"]]
    assert placed[0] == placed[3] != placed[1] == placed[2]

    async with api.service.database.write() as session:  # a plan of another Slotline
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps({"spec": {"stage": "?"}}), at=utc_now())
    answer = await api.driver(job_id, "POST", "/placement", json=request)
    placed = [rack_of[name] for (name,) in answer.json()["workers"]]
    assert placed[0] == placed[1] != placed[2] == placed[3]


async def test_a_placement_that_cannot_be_is_answered_with_its_reason(api: Api):
    job_id = await api.started()
    nodes = [{"name": name, "free": 1, "total": 2} for name in "ab"]
    api.cluster.node_names = ("a", "b")

    async def ask(**mesh: int) -> dict:
        request = {"nodes": nodes, "meshes": [mesh]}
        return (await api.driver(job_id, "POST", "/placement", json=request)).json()

    later = await ask(workers=3)
    assert later == {"workers": None, "refused": "3 accelerators are needed, 2 are free", "final": False}
    nodes.append({"name": "c", "free": 1, "total": 1})
    assert await ask(workers=3) == later | {
        "refused": f"{later['refused']}; Ray has not named 1 of the nodes yet"
    }
    assert (await ask(workers=2))["workers"] == [["a", "b"]], "c may be one that is excluded"
    never = await ask(workers=4, tensor=4)
    assert never["final"] and "no node can hold it" in never["refused"]
    wrong = {"nodes": nodes, "meshes": [{"workers": 3, "tensor": 2}]}
    problem(await api.driver(job_id, "POST", "/placement", json=wrong), 422)
    problem(await api.driver(job_id, "POST", "/placement", json={**wrong, "nodes": nodes * 2}), 422)
    problem(await api.driver(job_id, "POST", "/placement", token="wrong", json=wrong), 401)
