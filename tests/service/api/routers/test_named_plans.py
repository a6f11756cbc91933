"""Plans that are kept under names, and jobs that are trained with exactly these."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from service.spec.principals import Role
from service.store.database import utc_now
from service.store.files import RetentionPolicy, apply_retention
from service.store.jobs import find_job
from service.store.plans import saved_plan_by_id
from service.store.tables import SavedPlanRow
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_job_plans import OPEN, answers, costs, fails, measuring, profile_of
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import token
from tests.service.conftest import job_body

PLANS = "/api/v1/plans"


async def kept(api: Api, name: str = "mine", measured: dict[str, Any] | None = None, **changes: Any) -> dict:
    """The plan of a job, kept under a name, after one worker has measured it."""
    spec = job_body(**{**OPEN, **changes})
    await api.service.cluster.refresh()
    run_id = await measuring(api, **changes)
    answers(api, run_id, {"costs": measured or costs()})
    for _ in range(2000):
        found = await api.client.post(f"{PLANS}/job", params={"name": name, "budget_s": 0.5}, json=spec)
        if found.status_code != 202:
            break
    assert found.status_code == 200, found.text
    return found.json()


def orders(plan: dict[str, Any]) -> Any:
    """All that a plan decides: who runs what, in which order, waiting for what, and what is recomputed."""
    return (
        plan["begins"],
        [stage["mesh"] for stage in plan["spec"]["stages"]],
        plan["spec"]["microbatches"],
        plan["plan"]["programs"],
        plan["plan"]["stages"],
        plan["plan"]["slots"],
    )


async def test_a_job_is_planned_as_its_named_plan_has_it_whatever_was_measured_since(api: Api):
    plan = await kept(api)
    assert plan["named"] == {"id": plan["named"]["id"], "owner": "", "name": "mine"}
    slower = costs(profiles=[{"microbatches": n, "profile": profile_of(n, 0.5 / n)} for n in (1, 2, 4, 8)])
    other = await api.started(**OPEN)
    own = (await api.driver(other, "POST", "/plan", json=slower)).json()
    assert orders(own) != orders(plan) and own.get("named") is None, "the measurements matter"
    job_id = await api.started(**OPEN, plan="mine", name="second")
    answer = await api.driver(job_id, "POST", "/plan", json=slower)
    assert answer.status_code == 200, answer.text
    given = answer.json()
    assert orders(given) == orders(plan) and given["named"] == plan["named"]
    assert given["made_for"]["forms"]["1"]["layers"][0]["name"] == "layers.0", "for the driver to compare"
    shown = (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()
    assert shown["named"] == plan["named"] and "made_for" not in shown
    assert orders(shown) == orders(plan)
    await fails(api, job_id, 1)
    again = (await api.driver(job_id, "POST", "/plan", number=2, json=slower)).json()
    assert orders(again) == orders(plan), "a later attempt keeps it"


async def test_plans_are_listed_shown_and_deleted_and_jobs_keep_theirs(api: Api):
    plan = await kept(api)
    (one,) = (await api.client.get(f"{PLANS}/named")).json()["items"]
    assert (one["name"], one["microbatches"], one["meshes"], one["workers"]) == (
        "mine",
        plan["spec"]["microbatches"],
        2,
        [1, 1],
    )
    assert one["expires_at"] > one["used_at"] and one["begins"] == plan["begins"] and one["size_bytes"] > 500
    whole = (await api.client.get(f"{PLANS}/named/mine")).json()
    assert whole["plan"].pop("nodes") == {}, "it was made for no attempt"
    assert whole["plan"].pop("calibrated") is None, "nor measured by one"
    assert whole["plan"].items() <= plan.items() and orders(whole["plan"]) == orders(plan)
    assert whole["job"]["name"] == "small"
    job_id = await api.started(**OPEN, plan="mine")
    for _ in range(2):
        found = await api.client.delete(f"{PLANS}/named/mine")
        assert found.status_code == (404 if _ else 204), found.text
    assert (await api.client.get(f"{PLANS}/named")).json()["items"] == []
    problem(await api.client.get(f"{PLANS}/named/mine"), 404)
    gone = problem(await api.client.post("/api/v1/jobs", json=job_body(**OPEN, plan="mine")), 422)
    assert gone["errors"][0]["field"] == "plan" and "slotline plans list" in gone["detail"]
    answer = await api.driver(job_id, "POST", "/plan", json=costs())
    assert orders(answer.json()) == orders(plan) and answer.json()["named"]["name"] == "mine"
    audit = (await api.client.get("/api/v1/audit")).json()["items"]
    assert [one["action"] for one in audit if one["action"].startswith("plan.")] == [
        "plan.remove",
        "plan.keep",
    ]


async def test_the_same_job_under_the_same_name_is_answered_with_the_kept_plan(api: Api):
    plan = await kept(api)
    again = await api.client.post(f"{PLANS}/job", params={"name": "mine"}, json=job_body(**OPEN))
    assert again.status_code == 200 and again.json() == plan, "not planned anew"
    other = job_body(**OPEN, name="another")
    taken = problem(await api.client.post(f"{PLANS}/job", params={"name": "mine"}, json=other), 409)
    assert taken["code"] == "PLAN_NAME_TAKEN"
    both = job_body(**OPEN, plan="mine")
    problem(await api.client.post(f"{PLANS}/job", params={"name": "copy"}, json=both), 422)
    dry = await api.client.post(f"{PLANS}/job", json=both)
    assert dry.status_code == 200 and orders(dry.json()) == orders(plan), "a dry run with the named plan"


MISMATCHES = [
    ({"model": {"factory": "worker.examples.unet:build"}}, "model.factory"),
    ({"model": {**job_body()["model"], "args": {"layers": 5, "width": 32}}}, "model.args"),
    ({"resources": {"meshes": 1}}, "resources.meshes"),
    ({"resources": {}, "parallelism": {"pp": 2, "dp": 2}}, "parallelism.dp"),
    ({"resources": {"meshes": 2, "device": "cuda"}}, "resources.device"),
    ({"training": {**OPEN["training"], "microbatches": 4}}, "training.microbatches"),
    ({"training": {**OPEN["training"], "global_batch": 16}}, "training.global_batch"),
    ({"training": {**OPEN["training"], "precision": "bf16"}}, "training.precision"),
    ({"training": {**OPEN["training"], "transfers": "bf16"}}, "training.transfers"),
    ({"optimizer": {"factory": "torch.optim:SGD"}}, "optimizer.factory"),
    ({"loss": {"factory": "torch.nn.functional:mse_loss"}}, "loss.factory"),
    ({"pipeline": {"stages": "auto", "schedule": "gpipe"}}, "pipeline.schedule"),
    ({"pipeline": {"stages": 4}}, "pipeline.stages"),
    ({"pipeline": {"stages": "auto", "recompute": "all"}}, "pipeline.recompute"),
    ({"pipeline": {"stages": "auto", "overlap": False}}, "pipeline.overlap"),
    ({"pipeline": {"cut": ["layers.0", "layers.1"], "stages": 2}}, "pipeline.cut"),
]


@pytest.mark.slow
async def test_a_plan_that_was_made_for_another_job_is_refused_by_name(make_api: ApiMaker):
    async with make_api() as api:
        fixed = {
            "training": {**OPEN["training"], "microbatches": 2},
            "pipeline": {"stages": 2, "cut": "auto"},
        }
        where = [{"mesh": f"m{i}", "worker": 0, "device": "cpu"} for i in range(2)]
        plan = await kept(api, measured=costs((2,), workers=where), **fixed)
        assert plan["begins"] != ["layers.0", "layers.1"]
        for changes, field in MISMATCHES:
            body = job_body(**{**OPEN, **changes}, plan="mine")
            refused = problem(await api.client.post("/api/v1/jobs", json=body), 409)
            assert refused["code"] == "PLAN_MISMATCH", refused
            assert field in [one["field"] for one in refused["errors"]], (changes, refused)
            assert f"{field} is " in refused["detail"]
        assert (await api.client.get("/api/v1/jobs")).json()["items"] == []
        agreed = {
            "training": fixed["training"] | {"steps": 7, "seed": 3},
            "pipeline": {"cut": plan["begins"], "stages": 2},
        }
        assert await api.submit(**{**OPEN, **agreed}, plan="mine", priority=3)
        lr = {"factory": "torch.optim:AdamW", "args": {"lr": 0.5}}
        assert await api.submit(**OPEN, optimizer=lr, plan="mine")


def changed(body: dict[str, Any], change: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(body))  # nothing is shared any more
    for one in found["profiles"]:
        change(one["profile"])
    return found


DIFFERENCES = [
    (
        lambda profile: profile["layers"][2].update(name="layers.two"),
        "layer 2 is layers.two, and not layers.2",
    ),
    (lambda profile: profile["edges"][1].update(bytes=24), "and not"),
    (
        lambda profile: profile["parameter_sizes"].update({"layers.1.weight": 12}),
        "layers.1.weight (12 bytes)",
    ),
    (lambda profile: profile["layers"][0].update(parameters=[]), "layer layers.0 has no parameters"),
    (lambda profile: profile["edges"].pop(), "2 tensors travel between layers, and not 3"),
    (lambda profile: (profile["layers"].pop(), profile["edges"].pop()), "the model has 3 layers, and not 4"),
]


async def test_other_layers_than_those_it_was_made_for_refuse_a_plan(make_api: ApiMaker):
    async with make_api() as api:
        await kept(api)
        job_id = await api.started(**OPEN, plan="mine")
        for change, says in DIFFERENCES:
            refused = problem(await api.driver(job_id, "POST", "/plan", json=changed(costs(), change)), 422)
            assert "'mine' cannot be used: it was made for other layers" in refused["detail"]
            assert says in refused["detail"], refused["detail"]
        missing = problem(await api.driver(job_id, "POST", "/plan", json=costs((1,))), 422)
        assert "nothing was measured with its" in missing["detail"]
        assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).status_code == 404, "none was recorded"


@pytest.mark.slow
async def test_memory_that_no_longer_suffices_refuses_a_plan_and_what_is_held_now_is_told(make_api: ApiMaker):
    async with make_api() as api:
        plan = await kept(api)
        peaks = {mesh["name"]: mesh["peak_memory_bytes"] for mesh in plan["plan"]["meshes"]}
        job_id = await api.started(**OPEN, plan="mine")

        def limited(spare: int) -> list[dict[str, Any]]:
            return [{"mesh": mesh, "memory_bytes": peak + spare} for mesh, peak in peaks.items()]

        fits = await api.driver(job_id, "POST", "/plan", json=costs(memory=limited(0)))
        assert fits.status_code == 200, fits.text
        refused = problem(await api.driver(job_id, "POST", "/plan", json=costs(memory=limited(-1))), 422)
        assert "it no longer fits: mesh" in refused["detail"] and "over its memory_bytes" in refused["detail"]
        state = {"optimizer": {"bytes_per_parameter_byte": 2.0, "bytes_per_tensor": 4}}
        more = (await api.driver(job_id, "POST", "/plan", json=costs(**state))).json()
        for mesh in more["plan"]["meshes"]:
            held = sum(
                after["static_bytes"] - before["static_bytes"]
                for before, after in zip(plan["spec"]["stages"], more["spec"]["stages"], strict=True)
                if before["mesh"] == mesh["name"]
            )
            assert mesh["peak_memory_bytes"] == peaks[mesh["name"]] + held > peaks[mesh["name"]]
        assert orders(more) == orders(plan)


@pytest.mark.slow
async def test_a_plan_of_another_device_is_refused_where_the_workers_are(make_api: ApiMaker):
    async with make_api() as api:
        on = lambda device: [{"mesh": f"m{i}", "worker": 0, "device": device} for i in range(2)]  # noqa: E731
        await kept(api, measured=costs(workers=on("cuda")))
        job_id = await api.started(**OPEN, plan="mine")
        refused = problem(await api.driver(job_id, "POST", "/plan", json=costs(workers=on("cpu"))), 422)
        assert "it was made for cuda, and the workers are on cpu" in refused["detail"]


async def test_plans_belong_to_who_kept_them(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        headers = {name: await token(api, name, role) for name, role in PEOPLE.items()}
        as_ = headers.__getitem__
        api.client.headers.update(as_("ann"))
        await kept(api)
        assert (await api.client.get(f"{PLANS}/named/mine")).json()["owner"] == "ann"
        body = job_body(**OPEN, plan="mine")
        problem(await api.client.post("/api/v1/jobs", json=body, headers=as_("bob")), 422)
        problem(await api.client.delete(f"{PLANS}/named/mine", headers=as_("bob")), 404)
        problem(await api.client.delete(f"{PLANS}/named/mine?owner=ann", headers=as_("bob")), 403)
        problem(await api.client.delete(f"{PLANS}/named/mine?owner=ann", headers=as_("vic")), 403)
        seen = await api.client.get(f"{PLANS}/named/mine?owner=ann", headers=as_("vic"))
        assert seen.status_code == 200 and seen.json()["owner"] == "ann"
        assert (await api.client.get(f"{PLANS}/named?owner=bob", headers=as_("vic"))).json()["items"] == []
        removed = await api.client.delete(f"{PLANS}/named/mine?owner=ann", headers=as_("opa"))
        assert removed.status_code == 204


PEOPLE = {"ann": Role.SUBMITTER, "bob": Role.SUBMITTER, "vic": Role.VIEWER, "opa": Role.OPERATOR}


@pytest.mark.slow
async def test_an_owner_keeps_so_many_plans_of_such_a_size(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.jobs.saved_plans.PLANS_OF_ONE_OWNER", 1)
    async with make_api() as api:
        await kept(api)
        spec = job_body(**OPEN, name="two")
        full = problem(await api.client.post(f"{PLANS}/job", params={"name": "two"}, json=spec), 409)
        assert full["code"] == "TOO_MANY_PLANS" and "slotline plans remove" in full["detail"]
        await api.client.delete(f"{PLANS}/named/mine")
        assert (await api.client.post(f"{PLANS}/job", params={"name": "two"}, json=spec)).status_code == 200
    monkeypatch.setattr("service.jobs.saved_plans.PLAN_SIZE_LIMIT_BYTES", 1024)
    async with make_api() as api:
        long = await api.client.post(f"{PLANS}/job", params={"name": "long"}, json=job_body(**OPEN))
        assert "fewer microbatches" in problem(long, 413)["detail"]


@pytest.mark.slow
async def test_plans_go_when_no_job_wants_them(api: Api):
    keep = RetentionPolicy(timelines_days=-1, history_days=10, packages_days=-1, plans_days=5)
    plan_id = (await kept(api))["named"]["id"]
    job_id = await api.started(**OPEN, plan="mine")

    async def there(days: float) -> bool:
        await apply_retention(api.service.database, keep, now=utc_now() + timedelta(days=days))
        async with api.service.database.read() as session:
            return await saved_plan_by_id(session, plan_id) is not None

    assert await there(4)
    assert await there(100), "its job runs"
    await api.report(job_id, 1, state="FAILED", reason="NAN_LOSS", message="no number")
    assert await there(9), "the job may be retried"
    await api.client.delete(f"{PLANS}/named/mine")
    assert await there(9)
    assert not await there(11)
    async with api.service.database.write() as session:
        job = await lock_job(session, job_id)
        assert job.saved_plan_id == plan_id
    assert (await api.client.post(f"/api/v1/jobs/{job_id}/retry")).status_code == 202
    await api.rounds(job_id, 2)
    gone = problem(await api.driver(job_id, "POST", "/plan", number=2, json=costs()), 422)
    assert "'mine'" in gone["detail"] and "deleted long ago" in gone["detail"]


@pytest.mark.slow
async def test_lists_of_plans_have_pages_and_no_bodies(api: Api):
    await kept(api)
    for name in ("b", "c"):
        spec = job_body(**OPEN, name=name)
        found = await api.client.post(f"{PLANS}/job", params={"name": name}, json=spec)
        assert found.status_code == 200, found.text
    seen, token = [], None
    while True:
        page = (
            await api.client.get(
                f"{PLANS}/named", params={"limit": 1} | ({"page_token": token} if token else {})
            )
        ).json()
        seen += [one["name"] for one in page["items"]]
        if (token := page["next_page_token"]) is None:
            break
    assert sorted(seen) == ["b", "c", "mine"]
    assert "programs" not in json.dumps(page)
    async with api.service.database.read() as session:
        assert (await find_job(session, "job-none")) is None
        rows = await session.execute(SavedPlanRow.__table__.select())
        assert {row.owner for row in rows} == {""}
