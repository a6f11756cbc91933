"""Submit, list, read, cancel and retry over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import urlsafe_b64encode

import pytest

from service.jobs.problems import ProblemCode
from service.spec.job import JobSpec
from service.spec.states import JobState
from service.store.database import utc_now
from service.store.transitions import lock_job, move_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.conftest import job_body, somebody_waits


def problem(response, status: int) -> dict:
    """The body of an error, checked for the form that every error has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status and body["title"] and body["detail"]
    assert body["code"] in {*ProblemCode}
    return body


async def test_a_job_is_submitted_and_read(api: Api):
    response = await api.client.post("/api/v1/jobs", json=job_body(priority=3))
    assert response.status_code == 201
    created = response.json()
    assert response.headers["location"] == f"/api/v1/jobs/{created['id']}"
    job = await api.job(created["id"])
    assert JobSpec.model_validate(job["spec"]) == JobSpec.model_validate(job_body(priority=3))
    nothing = dict.fromkeys(("loss", "step_s", "model_flops_per_s", "mfu", "left_s"))
    assert job["progress"] == {"step": 0, "steps": 10, "percent": 0, "metrics": {}, **nothing}
    assert job["created_at"].endswith("Z")


async def test_a_learning_rate_schedule_is_part_of_the_job_and_reaches_its_driver(api: Api):
    schedule = {"factory": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 100}}
    optimizer = {"factory": "torch.optim:AdamW", "args": {"lr": 0.1}, "schedule": schedule}
    job_id = await api.started(optimizer=optimizer)
    told = optimizer | {"groups": []}
    assert (await api.job(job_id))["spec"]["optimizer"] == told
    assert (await api.driver(job_id, "GET")).json()["job"]["optimizer"] == told
    assert (await api.job(await api.submit()))["spec"]["optimizer"]["schedule"] is None


async def test_a_job_stored_by_another_version_is_listed_read_run_and_ended(api: Api):
    """Its specification would be refused today: fields are gone, renamed and of other types."""
    job_id = await api.submit()
    old = {
        "name": "small",
        "training": {"step_count": 3},
        "resources": [],
        "retry": {"user": "often"},
        "x": 1,
    }
    async with api.service.database.write() as session:
        job = await lock_job(session, job_id)
        job.spec, job.steps_wanted = (
            old,
            0,
        )  # a version without this column, and the migration for it, leave 0
    with pytest.raises(ValueError):
        JobSpec.model_validate(old)
    (listed,) = (await api.client.get("/api/v1/jobs")).raise_for_status().json()["items"]
    assert listed["progress"]["steps"] == 0
    assert (await api.job(job_id))["spec"] == old
    problem(await api.client.patch(f"/api/v1/jobs/{job_id}", json={"meshes": 2}), 422)
    await api.rounds(job_id)
    assert (await api.client.get("/api/v1/cluster")).raise_for_status().json()["gangs"][0]["meshes"] == 4
    assert (await api.driver(job_id, "GET")).raise_for_status().json()["job"] == old
    ended = await api.report(job_id, 1, state="FAILED", reason="USER_CODE_RAISED", message="no")
    assert ended.status_code == 200 and (await api.job(job_id))["state"] == "FAILED"


async def test_the_same_key_and_body_submit_one_job_also_at_once(api: Api):
    headers = {"Idempotency-Key": "a-key"}
    responses = await asyncio.gather(
        *(api.client.post("/api/v1/jobs", json=job_body(), headers=headers) for _ in range(5))
    )
    assert [response.status_code for response in responses] == [201] * 5
    assert len({response.json()["id"] for response in responses}) == 1
    assert len((await api.client.get("/api/v1/jobs")).json()["items"]) == 1


async def test_a_key_answers_its_job_also_when_what_the_job_names_has_gone_since(
    make_api: ApiMaker, tmp_path
):
    headers = {"Idempotency-Key": "a-key"}
    async with make_api(queues={"default": None, "old": None}) as api:
        first = await api.client.post("/api/v1/jobs", json=job_body(queue="old"), headers=headers)
    async with make_api() as api:
        again = await api.client.post("/api/v1/jobs", json=job_body(queue="old"), headers=headers)
        assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
        problem(await api.client.post("/api/v1/jobs", json=job_body(queue="old")), 422)


async def test_a_used_key_with_another_body_is_refused(api: Api):
    headers = {"Idempotency-Key": "a-key"}
    await api.client.post("/api/v1/jobs", json=job_body(), headers=headers)
    body = problem(await api.client.post("/api/v1/jobs", json=job_body(name="x"), headers=headers), 409)
    assert body["code"] == "IDEMPOTENCY_KEY_REUSED"
    assert "a-key" in body["detail"] and "new key" in body["detail"]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"training": {"global_batch": 10, "microbatches": 4}}, "training", "set microbatches to 2"),
        ({"stages": 4}, "stages", "unknown field"),
        (
            {"training": {"compile_limit_s": 9}},
            "training.compile_limit_s",
            "no field any more: a worker compiles",
        ),
        ({"data": {"factory": "a:b", "prefetch": -1}}, "data.prefetch", "greater than or equal to 0"),
        ({"pipeline": {"stage": 4}}, "pipeline.stage", "did you mean stages?"),
        ({"pipeline": {"stages": 0}}, "pipeline.stages", "write auto, or a whole number from 1"),
        ({"pipeline": {"stages": 2, "cut": ["a"]}}, "pipeline", "names 1 modules for 2 stages"),
        ({"pipeline": {"stages": 2, "schedule": "inference"}}, "pipeline", "use one of auto, gpipe"),
        ({"resources": {"meshes": 5}}, "body", "set resources.meshes to 4"),
        ({"parallelism": {"pp": 4, "dp": 3}}, "body", "choose a divisor of 2 for parallelism.dp"),
        (
            {"resources": {"workers_per_mesh": 3}},
            "body",
            "resources.workers_per_mesh is no field any more: write parallelism: {pp: 4, dp: 3, tp: 1}",
        ),
        ({"resources": {"meshes": 2, "workers": [2, 1]}}, "body", "or resources.meshes as a list"),
        *(
            (
                {"resources": {"memory_per_worker": wrong}},
                "resources.memory_per_worker",
                f"memory_per_worker is {wrong!r}: write auto, or a whole number of bytes from 1 to",
            )
            for wrong in ("8GB", 0, -1, 1.5, True, None, 2**53 + 1)
        ),
        ({"model": {"factory": "nothing"}}, "model.factory", "write package.module:attribute"),
        ({"model": None}, "model", "valid dictionary"),
        (
            {"loss": "cross_entropy"},
            "loss",
            "is the text 'cross_entropy': name what makes it by its import path, as "
            '{factory: "torch.nn.functional:cross_entropy", args: {}}',
        ),
        ({"optimizer": "torch.optim:SGD"}, "optimizer", '{factory: "torch.optim:SGD", args: {}}'),
        ({"optimizer": "adamw"}, "optimizer", '{factory: "torch.optim:AdamW", args: {}}'),
        (
            {"pipeline": {"schedule": "1F2B"}},
            "pipeline",
            "schedule '1f2b' cannot train a job: use one of auto",
        ),
        (
            {"optimizer": {"factory": "a:b", "schedule": {"factory": "b"}}},
            "optimizer.schedule.factory",
            ":attr",
        ),
        ({"optimizer": {"factory": "a:b", "schedul": None}}, "optimizer.schedul", "did you mean schedule?"),
        (
            {"optimizer": {"factory": "a:b", "schedule": {"factory": "a:b", "arg": {}}}},
            "optimizer.schedule.arg",
            "did you mean args?",
        ),
        ({"checkpoint": {"uri": "/c", "every": 5}}, "checkpoint.every", "did you mean every_steps?"),
        ({"name": "a b"}, "name", "letters, digits"),
        ({"checkpoint": {"uri": "runs"}}, "checkpoint.uri", "give an absolute path"),
        ({"checkpoint": {"uri": ""}}, "checkpoint.uri", "give an absolute path"),
        ({"queue": "nowhere"}, "queue", "use one of default"),
        ({"code": {"working_dir": "/home/me"}}, "code", "slotline submit"),
        ({"code": {"working_dir": "package:00"}}, "code.working_dir", "POST the zip"),
        ({"priority": 10**30}, "priority", "less than or equal"),
    ],
)
async def test_a_bad_job_is_refused_whole_with_field_value_and_way_out(api: Api, changes, field, says):
    body = problem(await api.client.post("/api/v1/jobs", json=job_body(**changes)), 422)
    (error,) = body["errors"]
    assert error["field"] == field and says in error["message"], error
    assert says in body["detail"]
    assert (await api.client.get("/api/v1/jobs")).json()["items"] == []


async def test_every_wrong_field_is_named_at_once(api: Api):
    body = problem(await api.client.post("/api/v1/jobs", json={"name": 3, "training": {"steps": 0}}), 422)
    assert {error["field"] for error in body["errors"]} == {"name", "model", "data", "training.steps"}
    assert next(error["value"] for error in body["errors"] if error["field"] == "training.steps") == 0


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"name": "\\ud800"}',
        b"[" * 100_000,
        b'{"model": {"factory": "a:b", "args": {"x": NaN}}}',
        b'{"model": {"factory": "a:b", "args": {"x": 1e999}}}',
    ],
)
async def test_a_body_that_is_no_job_is_a_problem_not_a_crash(api: Api, content: bytes):
    response = await api.client.post(
        "/api/v1/jobs", content=content, headers={"Content-Type": "application/json"}
    )
    problem(response, 422)


async def test_numbers_that_json_has_not_are_refused_in_arguments(api: Api):
    body = job_body()
    text = json.dumps(body).replace('"width": 32', '"width": [1, {"x": Infinity}]')
    refused = await api.client.post(
        "/api/v1/jobs", content=text, headers={"Content-Type": "application/json"}
    )
    assert "finite number" in problem(refused, 422)["detail"]
    text = json.dumps({**body, "training": {"clip_grad_norm": float("nan")}})
    refused = await api.client.post(
        "/api/v1/jobs", content=text, headers={"Content-Type": "application/json"}
    )
    assert problem(refused, 422)["errors"][0]["value"] == "nan"  # in JSON that strict parsers read
    assert "NaN" not in refused.text


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800"], ids=["NUL", "half a character"])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": {"factory": "a:b", "args": {"x": ["?"]}}}, "model.args.x"),
        ({"model": {"factory": "a:b", "args": {"?": 1}}}, "model.args"),
        ({"model": {"factory": "a:b", "args": {"x": {"?": 1}}}}, "model.args.x"),
        ({"checkpoint": {"uri": "/?"}}, "checkpoint.uri"),
        ({"code": {"pip": ["?"]}}, "code.pip.0"),
    ],
    ids=str,
)
async def test_text_that_no_database_stores_is_refused(api: Api, changes, field: str, text: str):
    content = json.dumps(job_body(**changes)).replace("?", text)
    response = await api.client.post(
        "/api/v1/jobs", content=content, headers={"Content-Type": "application/json"}
    )
    (error,) = problem(response, 422)["errors"]
    assert error["field"] == field


async def test_a_job_sent_as_something_else_than_json_is_told_the_content_type(api: Api):
    refused = await api.client.post("/api/v1/jobs", content=b"name: x", headers={"Content-Type": "text/yaml"})
    assert "Content-Type: application/json" in problem(refused, 422)["detail"]


async def test_a_body_over_the_limit_is_refused_told_or_not(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.api.app.JOB_LIMIT_BYTES", 2000)
    async with make_api() as api:
        long = job_body(model={"factory": "a:b", "args": {"x": "y" * 3000}})
        problem(await api.client.post("/api/v1/jobs", json=long), 413)

        async def pieces():
            for _ in range(30):
                yield b" " * 100

        headers = {"Content-Type": "application/json"}
        problem(await api.client.post("/api/v1/jobs", content=pieces(), headers=headers), 413)
        await api.submit()


async def test_unknown_places_and_methods_say_what_there_is(api: Api):
    assert "GET /api/v1/jobs does" in problem(await api.client.get("/api/v1/jobs/job-none"), 404)["detail"]
    problem(await api.client.get("/api/v1/nothing"), 404)
    response = await api.client.put("/api/v1/jobs")
    assert problem(response, 405)["detail"].endswith("use GET, POST")
    assert response.headers["allow"] == "GET, POST"
    problem(await api.client.get("/api/v1/jobs", params={"limit": "many"}), 422)
    made_up = [
        ["2026-01-01T00:00:00", "\x00"],
        ["2026-01-01T00:00:00", "\ud800"],
        ["0001-01-01T00:00:00+14:00", "x"],
        ["2026-01-01", None],
    ]
    tokens = [urlsafe_b64encode(json.dumps(value).encode()).decode() for value in made_up]
    for token in ("x", "e30=", "WzEsMl0=", "WyJ4IiwgImpvYiJd", "\ud7ff", *tokens):
        problem(await api.client.get("/api/v1/jobs", params={"page_token": token}), 422)


async def test_pages_lead_through_all_jobs(api: Api):
    made = [await api.submit(name=f"job-{index}") for index in range(5)]
    seen, token = [], None
    while True:
        params = {"limit": 2} | ({"page_token": token} if token else {})
        page = (await api.client.get("/api/v1/jobs", params=params)).json()
        seen += [job["id"] for job in page["items"]]
        if (token := page["next_page_token"]) is None:
            break
    assert seen == made[::-1]


async def test_a_waiting_job_is_cancelled_and_retried(api: Api):
    job_id = await api.submit()
    response = await api.client.post(f"/api/v1/jobs/{job_id}/cancel")
    assert (response.status_code, response.json()["state"]) == (202, "CANCELLED")
    assert (await api.client.post(f"/api/v1/jobs/{job_id}/cancel")).status_code == 202
    response = await api.client.post(f"/api/v1/jobs/{job_id}/retry")
    assert (response.status_code, response.json()["state"]) == (202, "QUEUED")
    assert "is QUEUED" in problem(await api.client.post(f"/api/v1/jobs/{job_id}/retry"), 409)["detail"]
    for verb in ("cancel", "retry"):
        problem(await api.client.post(f"/api/v1/jobs/job-none/{verb}"), 404)


async def test_a_job_that_succeeded_is_neither_retried_nor_cancelled(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, state="SUCCEEDED")
    for verb in ("retry", "cancel"):
        refused = problem(await api.client.post(f"/api/v1/jobs/{job_id}/{verb}"), 409)
        assert f"job {job_id} is SUCCEEDED" in refused["detail"]
    job = await api.job(job_id)
    assert (job["state"], len(job["attempts"])) == ("SUCCEEDED", 1)


@pytest.mark.parametrize("verb", ["cancel", "retry"])
async def test_a_user_who_comes_as_the_driver_reports_success_hears_so(api: Api, verb: str):
    job_id = await api.started()
    async with api.service.database.write() as session:
        job = await lock_job(session, job_id)
        move_job(session, job, JobState.SUCCEEDED, at=utc_now())
        await session.flush()
        asked = asyncio.create_task(api.client.post(f"/api/v1/jobs/{job_id}/{verb}"))
        await somebody_waits(api.service.database, [asked])
    assert "is SUCCEEDED" in problem(await asked, 409)["detail"]
    assert (await api.job(job_id))["state"] == "SUCCEEDED"


async def test_health_readiness_and_version_are_told(api: Api):
    assert (await api.client.get("/healthz")).json() == {"status": "ok"}
    await api.service.cluster.refresh()
    assert (await api.client.get("/readyz")).json() == {"status": "ok"}
    assert (await api.client.get("/api/v1/version")).json()["api"] == "v1"
    api.cluster.away = True
    await api.service.cluster.refresh()
    assert "away" in problem(await api.client.get("/readyz"), 503)["detail"]
    assert (await api.client.get("/healthz")).status_code == 200


async def test_a_database_that_is_away_is_a_problem_to_come_back_from(make_api: ApiMaker, tmp_path):
    async with make_api() as api:
        await api.service.database.close()
        (tmp_path / "slotline.db").rename(tmp_path / "away.db")
        (tmp_path / "slotline.db").mkdir()
        response = await api.client.get("/api/v1/jobs")
        problem(response, 503)
        assert response.headers["retry-after"]
        problem(await api.client.get("/readyz"), 503)
        (tmp_path / "slotline.db").rmdir()
        (tmp_path / "away.db").rename(tmp_path / "slotline.db")
        assert (await api.client.get("/api/v1/jobs")).status_code == 200


async def test_cluster_and_queues_tell_who_uses_what_and_why_jobs_wait(make_api: ApiMaker):
    async with make_api(queues={"default": None, "small": 2}) as api:
        first = await api.started()
        second, third = await api.submit(priority=1), await api.submit(queue="small")
        await api.service.orchestrator.round()
        cluster = (await api.client.get("/api/v1/cluster")).json()
        assert cluster["available"] and cluster["accelerators"][0] == {
            "device": "cpu",
            "resource": "slotline_worker",
            "total": 4,
            "used": 4,
            "free": 0,
            "left_out": 0,
            "cluster": "default",
        }
        assert [gang["job_id"] for gang in cluster["gangs"]] == [first]
        default, small = (await api.client.get("/api/v1/queues")).json()["items"]
        assert (default["used"], default["depth"], default["waiting"][0]["id"]) == (4, 1, second)
        assert "0 of 4 free" in default["waiting"][0]["message"]
        assert (small["quota"], small["waiting"][0]["id"]) == (2, third)
        assert small["waiting"][0]["reason"] == "WAITS_FOR_QUOTA"


async def test_tokens_are_asked_for_when_set_and_never_for_health(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}):
            refused = await api.client.get("/api/v1/jobs", headers=headers)
            problem(refused, 401)
            assert "www-authenticate" in refused.headers
        good = {"Authorization": "Bearer secret"}
        assert (await api.client.get("/api/v1/jobs", headers=good)).status_code == 200
        assert (await api.client.get("/healthz")).status_code == 200
        browser = {"auth": ("me", "secret")}
        assert (await api.client.get("/api/v1/jobs", **browser)).status_code == 200
        problem(await api.client.post("/api/v1/jobs", json=job_body(), **browser), 401)
        own = {"Sec-Fetch-Site": "same-origin"}
        assert (
            await api.client.post("/api/v1/jobs", json=job_body(), headers=own, **browser)
        ).status_code == 201


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "[::1]:80", "me.localhost", "slotline.lab:80", "drivers.lab"]
)
async def test_a_server_without_tokens_answers_to_its_own_names(make_api: ApiMaker, host: str):
    async with make_api(public_url="http://slotline.lab", driver_url="http://drivers.lab:80") as api:
        assert (await api.client.get("/api/v1/jobs", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "[::2]", "", "xlocalhost"),
        *("[::1].evil", "[::1].evil:8000", "[::1]evil", "[::1", "127.0.0.1:80:evil", "localhost:evil"),
    ],
)
async def test_a_server_without_tokens_answers_to_no_name_that_a_foreign_page_could_have(
    make_api: ApiMaker, host: str
):
    """DNS rebinding: the page's own name resolves to this machine, and the browser takes us for its server."""
    async with make_api() as api:
        refused = await api.client.get("/api/v1/jobs", headers={"Host": host})
        assert "SLOTLINE_PUBLIC_URL" in problem(refused, 403)["detail"]
    async with make_api(api_token="secret") as api:
        asked = await api.client.get("/api/v1/jobs", headers={"Host": host, "Authorization": "Bearer secret"})
        assert asked.status_code == 200, "who has a token may come from anywhere"


async def test_a_page_of_another_site_changes_nothing_on_a_server_without_tokens(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.submit()
        foreign = {"Sec-Fetch-Site": "cross-site"}
        problem(await api.client.post(f"/api/v1/jobs/{job_id}/cancel", headers=foreign), 403)
        assert (await api.job(job_id))["state"] == "QUEUED"
        assert (await api.client.get("/", headers=foreign)).status_code == 200, "a link to us is fine"
        own = {"Sec-Fetch-Site": "same-origin"}
        assert (await api.client.post(f"/api/v1/jobs/{job_id}/cancel", headers=own)).status_code == 202


@pytest.mark.parametrize(
    "foreign",
    [
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine: somebody else's server
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ],
)
@pytest.mark.parametrize(
    "path", ["/api/v1/jobs", "/api/v1/jobs/nobody/cancel", "/api/v1/plans", "/api/v1/none"]
)
async def test_a_page_of_another_origin_is_refused_before_anything_is_looked_at(
    make_api: ApiMaker, foreign: dict[str, str], path: str
):
    async with make_api() as api:
        problem(await api.client.post(path, headers=foreign, content=b"{"), 403)


async def test_programs_and_our_own_pages_are_no_other_origin(make_api: ApiMaker):
    async with make_api() as api:
        own = str(api.client.base_url).rstrip("/")
        for headers in ({}, {"Origin": own}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}):
            answer = await api.client.post("/api/v1/jobs/nobody/cancel", headers=headers)
            assert answer.status_code == 404


async def test_a_token_made_by_the_command_is_good_until_it_is_revoked(make_api: ApiMaker):
    from service.spec.principals import Role
    from service.store.secrets import delete_token, generate_token, store_token, token_digest

    async with make_api(require_token=True) as api:
        token = generate_token()
        async with api.service.database.write() as session:
            await store_token(session, "me", Role.VIEWER, token_digest(token), by="", at=utc_now())
        headers = {"Authorization": f"Bearer {token}"}
        assert (await api.client.get("/api/v1/jobs", headers=headers)).status_code == 200
        async with api.service.database.write() as session:
            assert await delete_token(session, "me", by="", at=utc_now())
        problem(await api.client.get("/api/v1/jobs", headers=headers), 401)


async def test_a_request_that_finds_no_connection_free_is_told_to_come_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    pool = api.service.database.engine.pool
    monkeypatch.setattr(pool, "_timeout", 0.1)
    async with contextlib.AsyncExitStack() as held:
        for _ in range(pool.size() + pool._max_overflow):
            await held.enter_async_context(api.service.database.engine.connect())
        answer = await api.client.get("/api/v1/jobs")
        assert "in use: try again" in problem(answer, 503)["detail"]
        assert int(answer.headers["retry-after"]) > 0
    assert (await api.client.get("/api/v1/jobs")).status_code == 200
