"""Live events and logs: in order, resumable, ended with the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from service.api import streams
from service.jobs import service as service_room
from service.jobs.service import JobFeed
from service.orchestrator.ray.driver_logs import LogWindow
from service.store.attempts import find_attempt
from tests.polling import until_async
from tests.service.api.conftest import Api
from tests.service.api.routers.test_jobs import problem
from tests.tiers import some_by_day

SSE = {"Accept": "text/event-stream"}
LIMIT_S = 30.0
"""Longer than any stream here takes on the busiest machine."""


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_EVENT_POLL_S", 0.01)
    monkeypatch.setattr(streams, "_LOG_POLL_S", 0.01)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._WINDOW_FRESH_S", 0.0)


def parse(text: str) -> list[dict[str, Any]]:
    """Events of a finished stream: field name -> value."""
    blocks = [block for block in text.replace("\r\n", "\n").split("\n\n") if block.strip()]
    events = [
        dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        for block in blocks
    ]
    return [event for event in events if event]


async def stream(api: Api, path: str, **headers: str) -> httpx.Response:
    """The whole stream: ASGITransport answers when it has ended."""
    async with asyncio.timeout(LIMIT_S):
        return await api.client.get(path, headers={**SSE, **headers})


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Callable[[int], Awaitable[None]]:
    """`await looks(n)` returns when the function was called n more times."""
    function, calls = getattr(module, name), 0

    def counted(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*arguments, **keywords)

    async def looks(number: int) -> None:
        wanted = calls + number
        await until_async(lambda: calls >= wanted, limit_s=LIMIT_S)

    monkeypatch.setattr(module, name, counted)
    return looks


async def test_a_stream_holds_what_was_and_what_comes_until_the_job_ends(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    job_id = await api.started()
    looks = count_calls(monkeypatch, JobFeed, "next")
    following = asyncio.create_task(stream(api, f"/api/v1/jobs/{job_id}/events"))
    await looks(2)
    await api.report(job_id, 1, state="RUNNING")
    await looks(2)
    await api.report(job_id, 2, state="SUCCEEDED")
    response = await following
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = parse(response.text)
    stored = (await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
    assert [json.loads(event["data"]) for event in events] == stored
    assert [event["id"] for event in events] == ["1", "2", "3", "4"]
    assert [event["event"] for event in events] == ["state"] * 4
    assert (end["event"], json.loads(end["data"])) == ("end", {"state": "SUCCEEDED"})


async def test_a_broken_stream_goes_on_after_the_last_event_seen(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, state="SUCCEEDED")
    path = f"/api/v1/jobs/{job_id}/events"
    events = parse((await stream(api, path, **{"Last-Event-ID": "2"})).text)
    assert [event.get("id") for event in events] == ["3", None]
    for odd in ("abc", "-1", "1e3", "99999999999999"):
        assert len(parse((await stream(api, path, **{"Last-Event-ID": odd})).text)) == 4


async def test_a_browser_that_has_seen_everything_is_told_not_to_come_back(api: Api):
    job_id = await api.submit()
    await api.client.post(f"/api/v1/jobs/{job_id}/cancel")
    response = await stream(api, f"/api/v1/jobs/{job_id}/events", **{"Last-Event-ID": "2"})
    assert (response.status_code, response.text) == (204, "")


async def test_logs_come_line_by_line_from_ray_then_from_the_store(api: Api, monkeypatch: pytest.MonkeyPatch):
    job_id = await api.started()
    path = f"/api/v1/jobs/{job_id}/logs"
    api.cluster.logs[f"{job_id}-1"] = "one\ntwo\n"
    page = (await api.client.get(path, params={"limit": 1})).json()
    assert page == {"items": [{"attempt": 1, "number": 1, "text": "one"}], "next_page_token": "1:1"}
    page = (await api.client.get(path, params={"page_token": "1:1"})).json()
    assert [line["text"] for line in page["items"]] == ["two"] and page["next_page_token"] is None

    looks = count_calls(monkeypatch, streams, "log_lines")
    following = asyncio.create_task(stream(api, path))
    await looks(2)
    api.cluster.logs[f"{job_id}-1"] += "three\n"
    await looks(2)
    await api.report(job_id, 1, state="SUCCEEDED")
    *lines, end = parse((await following).text)
    assert [json.loads(line["data"])["text"] for line in lines] == ["one", "two", "three"]
    assert [line["id"] for line in lines] == ["1:1", "1:2", "1:3"] and end["event"] == "end"

    await api.service.orchestrator.logs.keep_logs()
    api.cluster.away = True
    resumed = parse((await stream(api, path, **{"Last-Event-ID": "1:2"})).text)
    assert [event.get("id") for event in resumed] == ["1:3", None]


async def test_a_log_longer_than_one_look_is_sent_whole(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "_LINES_PER_POLL", 3)
    job_id = await api.started()
    api.cluster.logs[f"{job_id}-1"] = "".join(f"line {number}\n" for number in range(1, 8))
    await api.report(job_id, 1, state="SUCCEEDED")
    *lines, end = parse((await stream(api, f"/api/v1/jobs/{job_id}/logs")).text)
    assert [json.loads(line["data"])["text"] for line in lines] == [
        f"line {number}" for number in range(1, 8)
    ]
    assert end["event"] == "end"


@some_by_day("last", [0, 3, 5, 6, 9, 10], by_day=3)
async def test_a_log_whose_beginning_was_cut_off_goes_on_after_the_last_line_seen(api: Api, last: int):
    job_id = await api.started()
    path = f"/api/v1/jobs/{job_id}/logs"
    api.cluster.logs[f"{job_id}-1"] = "".join(f"line {number}\n" for number in range(1, 11))
    await api.report(job_id, 1, state="SUCCEEDED")
    await _keep(api, f"{job_id}-1", api.cluster.logs[f"{job_id}-1"], 40)
    expected = [(number, f"line {number}") for number in range(max(last + 1, 6), 11)]
    page = (await api.client.get(path, params={"page_token": f"1:{last}"})).json()
    assert [(line["number"], line["text"]) for line in page["items"]] == expected
    *lines, _ = parse((await stream(api, path, **{"Last-Event-ID": f"1:{last}"})).text)
    shown = [json.loads(line["data"]) for line in lines]
    assert [(line["number"], line["text"]) for line in shown] == expected


async def test_a_log_that_is_cut_off_while_it_is_followed_loses_and_repeats_no_line(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    job_id = await api.started()
    attempt_id = f"{job_id}-1"
    api.cluster.logs[attempt_id] = "".join(f"line {number}\n" for number in range(1, 9))
    looks = count_calls(monkeypatch, streams, "log_lines")
    following = asyncio.create_task(stream(api, f"/api/v1/jobs/{job_id}/logs"))
    await looks(2)
    whole = api.cluster.logs[attempt_id] + "line 9\nline 10\n"
    await _keep(api, attempt_id, whole, 40)
    await looks(2)
    await api.report(job_id, 1, state="SUCCEEDED")
    *lines, _ = parse((await following).text)
    assert [line["id"] for line in lines] == [f"1:{number}" for number in range(1, 11)]
    assert [json.loads(line["data"])["text"] for line in lines] == [f"line {n}" for n in range(1, 11)]


async def test_a_stream_of_more_events_than_one_look_reads_holds_them_all(api: Api):
    job_id = await api.started()
    notes = [{"at": 1.75e9, "kind": "note", "message": str(number)} for number in range(600)]
    for sequence in (1, 2):
        sent = await api.report(job_id, sequence, events=notes[300 * sequence - 300 : 300 * sequence])
        assert sent.status_code == 200
    await api.report(job_id, 3, state="SUCCEEDED")
    *events, end = parse((await stream(api, f"/api/v1/jobs/{job_id}/events")).text)
    assert [event["id"] for event in events] == [str(number) for number in range(1, 604)]
    assert end["event"] == "end"


async def test_a_stream_of_an_ended_job_waits_a_while_for_a_ray_that_is_away(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    job_id = await api.started()
    api.cluster.logs[f"{job_id}-1"] = "one\n"
    api.cluster.away = True
    await api.report(job_id, 1, state="SUCCEEDED")
    looks = count_calls(monkeypatch, streams, "log_lines")
    following = asyncio.create_task(stream(api, f"/api/v1/jobs/{job_id}/logs"))
    await looks(3)
    api.cluster.away = False
    assert [event.get("id") for event in parse((await following).text)] == ["1:1", None]
    api.cluster.away = True
    given_up = parse((await stream(api, f"/api/v1/jobs/{job_id}/logs")).text)
    assert [event["event"] for event in given_up] == ["end"]


async def test_a_line_is_shown_when_it_is_complete_or_the_driver_has_ended(api: Api):
    job_id = await api.started()
    path = f"/api/v1/jobs/{job_id}/logs"
    api.cluster.logs[f"{job_id}-1"] = "one\u2028still one\nhalf"

    async def shown() -> list[str]:
        return [line["text"] for line in (await api.client.get(path)).json()["items"]]

    assert await shown() == ["one\u2028still one"]
    await api.report(job_id, 1, state="SUCCEEDED")
    assert await shown() == ["one\u2028still one", "half"]


async def test_logs_of_a_cluster_that_is_away_are_a_problem_that_says_so(api: Api):
    job_id = await api.started()
    api.cluster.away = True
    response = await api.client.get(f"/api/v1/jobs/{job_id}/logs")
    assert "away" in problem(response, 503)["detail"] and response.headers["retry-after"]


async def test_logs_of_all_attempts_follow_each_other(api: Api):
    job_id = await api.started()
    api.cluster.logs.update({f"{job_id}-1": "first\n", f"{job_id}-2": "second\n"})
    await api.report(job_id, 1, state="FAILED", reason="WORKER_LOST", message="gone")
    await api.rounds(job_id, 2)
    path = f"/api/v1/jobs/{job_id}/logs"
    lines = (await api.client.get(path)).json()["items"]
    assert [(line["attempt"], line["text"]) for line in lines] == [(1, "first"), (2, "second")]
    only = (await api.client.get(path, params={"attempt": 2})).json()["items"]
    assert [line["text"] for line in only] == ["second"]


async def test_a_stream_sends_all_there_is_at_once_and_looks_no_more_often_than_it_is_told(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    job_id = await api.started()
    monkeypatch.setattr(streams, "_EVENT_POLL_S", 3600.0)
    looked, ask = [], service_room.events_of

    def counted(*arguments: Any, **keywords: Any) -> Any:
        looked.append(keywords["after"])
        return ask(*arguments, **keywords)

    monkeypatch.setattr(service_room, "events_of", counted)
    waits = count_calls(monkeypatch, JobFeed, "next")
    following = asyncio.create_task(stream(api, f"/api/v1/jobs/{job_id}/events"))
    await waits(1)
    following.cancel()
    assert looked == [0], "once for what there is, and then it waits"


async def test_all_that_follow_jobs_look_together(api: Api, monkeypatch: pytest.MonkeyPatch):
    job_ids = [await api.submit() for _ in range(3)]
    asked, ask = [], service_room.job_versions

    async def counted(session: Any, ids: list[str]) -> Any:
        asked.append(sorted(ids))
        return await ask(session, ids)

    monkeypatch.setattr(service_room, "job_versions", counted)
    feed = api.service.feed
    waiting = [asyncio.create_task(feed.next(job_ids[n % 3], within_s=0.05)) for n in range(30)]
    gone = asyncio.create_task(feed.next("job-0000000000", within_s=0.05))
    await asyncio.sleep(0)
    waiting.pop().cancel()  # takes nobody with it
    found = await asyncio.gather(*waiting)
    assert asked == [sorted([*job_ids, "job-0000000000"])]
    assert {one.state for one in found} == {"QUEUED"} and await gone is None


async def test_events_are_read_once_for_all_that_have_seen_as_much(api: Api, monkeypatch: pytest.MonkeyPatch):
    job_id = await api.submit()
    asked, ask = [], service_room.events_of

    async def counted(session: Any, of: str, *, after: int) -> Any:
        asked.append(after)
        return await ask(session, of, after=after)

    monkeypatch.setattr(service_room, "events_of", counted)
    reading = [asyncio.create_task(api.service.feed.events(job_id, after=n % 2)) for n in range(40)]
    await asyncio.sleep(0)
    reading.pop().cancel()
    found = await asyncio.gather(*reading)
    assert sorted(asked) == [0, 1] and [[e.number for e in one] for one in found[:2]] == [[1], []]
    await api.service.feed.events(job_id, after=0)
    assert len(asked) == 3, "what was read is not kept"


async def _keep(api: Api, attempt_id: str, log: str, limit_bytes: int) -> None:
    """What the store keeps of a log of which this many bytes may stay: from line 6 on."""
    window = LogWindow(limit_bytes)
    window.add(log.encode())
    assert window.first_line == 6
    async with api.service.database.write() as session:
        attempt = await find_attempt(session, attempt_id)
        attempt.log_first_line, attempt.log = window.first_line, window.text()
