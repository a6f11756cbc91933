"""What of a body is read, from whom, and how much of it; nothing that one request can stop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.api import middleware
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from tests.tiers import some_by_day
from tests.work import Work

WITH_BODIES = [
    ("POST", "/api/v1/jobs"),
    ("POST", "/api/v1/plans"),
    ("POST", "/api/v1/plans/job"),
    ("POST", "/api/v1/packages"),
    ("POST", "/api/v1/attempts/job-none-1/reports"),
    ("POST", "/api/v1/attempts/job-none-1/plan"),
    ("PUT", "/api/v1/attempts/job-none-1/profile?key=k"),
]
JSON = {"Content-Type": "application/json"}


class Untouched(httpx.AsyncByteStream):
    """A body that notes that somebody read of it."""

    read = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.read = True
        yield b"{}"


def values(count: int) -> bytes:
    """A job whose arguments hold `count` small values."""
    return json.dumps(job_body(model={"factory": "a:b", "args": {"x": [[]] * count}})).encode()


def plan_of(stages: bytes) -> bytes:
    return b'{"microbatches": 1, "meshes": [{}], "stages": ' + stages + b"}"


@pytest.mark.parametrize(("method", "path"), WITH_BODIES)
async def test_a_body_of_somebody_without_a_token_is_not_even_read(
    make_api: ApiMaker, method: str, path: str
):
    async with make_api(api_token="secret") as api:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            body = Untouched()
            request = api.client.build_request(method, path, headers={**JSON, **headers}, content=body)
            answer = await api.client.send(request)
            problem(answer, 401)
            assert not body.read, "an unknown caller's body is left where it is"
            assert answer.headers["connection"] == "close"


async def test_a_told_length_over_the_limit_tells_a_stranger_nothing(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        headers = {**JSON, "Content-Length": str(2**40)}
        problem(await api.client.post("/api/v1/jobs", headers=headers, content=Untouched()), 401)
        headers["Authorization"] = "Bearer secret"
        body = Untouched()
        answer = await api.client.post("/api/v1/jobs", headers=headers, content=body)
        problem(answer, 413)
        assert not body.read and answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("path", "limit"), [("/api/v1/jobs", 2**18), ("/api/v1/plans/job", 2**18), ("/api/v1/plans", 2**20)]
)
async def test_jobs_and_plans_have_short_limits_of_their_own(make_api: ApiMaker, path: str, limit: int):
    async with make_api() as api:
        text = json.dumps({"x": ""})
        longest = text.replace('""', '"' + "y" * (limit - len(text)) + '"')
        assert (await api.client.post(path, headers=JSON, content=longest)).status_code == 422
        body = problem(await api.client.post(path, headers=JSON, content=longest + " "), 413)
        assert str(limit) in body["detail"]


async def test_json_of_too_many_values_or_too_deep_is_refused_whatever_its_length(make_api: ApiMaker):
    async with make_api() as api:
        assert (await api.client.post("/api/v1/jobs", headers=JSON, content=values(9_900))).is_success
        body = problem(await api.client.post("/api/v1/jobs", headers=JSON, content=values(10_001)), 413)
        assert "10000 values" in body["detail"]
        for depth, status in ((50, 201), (100, 422), (5_000, 422)):
            deep: object = 1
            text = json.dumps(job_body(model={"factory": "a:b", "args": {"x": "?"}}))
            deep = "[" * depth + "]" * depth
            answer = await api.client.post("/api/v1/jobs", headers=JSON, content=text.replace('"?"', deep))
            assert answer.status_code == status, answer.text
            if status == 422:
                assert "flatten" in answer.json()["detail"]


async def test_a_zip_that_calls_itself_json_is_not_parsed_beyond_the_limit_of_json(make_api: ApiMaker):
    async with make_api() as api:
        body = b"[" + b"1," * 2**20 + b"1]"
        problem(await api.client.post("/api/v1/packages", headers=JSON, content=body), 413)


async def test_a_body_that_does_not_end_is_closed(make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch):
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    monkeypatch.setattr(middleware, "_BODY_TIMEOUT_S", 0.2)
    async with make_api() as api, asyncio.timeout(10):
        answer = await api.client.post("/api/v1/jobs", headers=JSON, content=never())
        problem(answer, 408)
        assert answer.headers["connection"] == "close"


@some_by_day("path", ["/api/v1/jobs", "/api/v1/plans/job", "/api/v1/plans"], by_day=1)
@pytest.mark.parametrize(
    "body",
    [
        json.dumps({f"f{number}": 1 for number in range(9_900)}).encode(),
        json.dumps({f"steps{number}": 1 for number in range(9_900)}).encode(),
        values(9_900),
        json.dumps(
            job_body(model={"factory": "a:b", "args": {f"{n}": float("nan") for n in range(9_000)}})
        ).encode(),
        plan_of(b"[" + b"1," * 49_000 + b"1]"),
        plan_of(json.dumps([{f"n{number}": float("nan") for number in range(49_000)}]).encode()),
        b"[" * 2**17 + b"]" * 2**17,
        b"[" + b"[]," * 87_000 + b"1]",
        json.dumps(job_body(code={"pip": [f"\0{number}" for number in range(9_900)]})).encode(),
    ],
    ids=[
        "unknown fields",
        "near fields",
        "many values",
        "no arguments",
        "no stages",
        "no numbers",
        "deep",
        "wide",
        "wrong texts",
    ],
)
async def test_no_body_holds_up_the_event_loop(make_api: ApiMaker, path: str, body: bytes):
    """Nothing else gets a turn while a few hundred thousand calls are made at most (135,000 for a job of 9,900 values);
    seconds are measured by `make bench-service`."""
    async with make_api() as api:
        await api.client.post(path, headers=JSON, content=b"{}")  # what is done once is done
        assert await longest_turn(api, path, body) < 400_000


async def longest_turn(api: Api, path: str, body: bytes) -> int:
    """The most calls that the thread of the event loop makes without a turn for others, while the body is answered."""
    longest, done = 0, asyncio.Event()

    async def others() -> None:
        nonlocal longest
        while not done.is_set():
            before = work.calls
            await asyncio.sleep(0)
            longest = max(longest, work.calls - before)

    with Work() as work:
        async with asyncio.TaskGroup() as group:
            group.create_task(others())
            await asyncio.sleep(0)
            await api.client.post(path, headers=JSON, content=body)
            done.set()
    assert longest > 100, "the calls of the loop were counted"
    return longest


@pytest.mark.parametrize("beyond", [False, True])
async def test_a_long_body_is_parsed_beside_the_event_loop(
    make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch, beyond: bool
):
    threads = []
    parse = middleware.read_json

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*arguments)

    monkeypatch.setattr(middleware, "read_json", noted)
    async with make_api() as api:
        body = b"[" + b" " * (middleware._PARSE_IN_THREAD_BYTES - (1 - beyond) - 1) + b"]"
        await api.client.post("/api/v1/jobs", headers=JSON, content=body)
    assert [thread != threading.get_ident() for thread in threads] == [beyond]
