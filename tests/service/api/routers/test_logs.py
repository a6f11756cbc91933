"""Logs: capped, read once for all who follow, in pieces; the last lines, those since a time, those with a text."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from service.api import streams
from service.orchestrator.ray import driver_logs
from service.orchestrator.ray.driver_logs import LOG_LIMIT_BYTES, LogWindow
from service.store.attempts import LogLocation
from service.store.database import utc_now
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_streams import parse, stream

LINE = "x" * 66  # with its number 74 bytes
LINES = 1_000_000


async def _longest_pause(until: asyncio.Task) -> float:
    """The longest time that the event loop kept somebody waiting who wanted to go on at once; seconds in which this
    process computed, those that other processes had are not its fault."""
    longest = 0.0
    while not until.done():
        before = time.process_time()
        await asyncio.sleep(0.001)
        longest = max(longest, time.process_time() - before)
    return longest


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_LOG_POLL_S", 0.05)


@pytest.mark.slow
async def test_followers_of_a_log_of_74_mb_share_one_reader_and_hold_up_nobody(
    make_api: ApiMaker, look_often: None
):
    async with make_api() as api:
        job_id = await api.started()
        attempt_id = f"{job_id}-1"
        api.cluster.logs[attempt_id] = "".join(f"{n:07} {LINE[:65]}\n" for n in range(1, LINES + 1))
        gc.freeze()  # what the test itself made is no work of the server's
        assert len(api.cluster.logs[attempt_id]) == 74_000_000
        path = f"/api/v1/jobs/{job_id}/logs"
        following = asyncio.gather(*(stream(api, path) for _ in range(5)))

        async def life() -> None:
            limit = 2 * 74_000_000  # once whole, and once to get to its end again, where the reader stays
            while api.cluster.log_bytes_read < limit:
                assert not following.done()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            api.cluster.logs[attempt_id] += "the end\n"
            await asyncio.sleep(0.5)
            await api.report(job_id, 1, state="SUCCEEDED")

        living = asyncio.create_task(life())
        pause = await _longest_pause(asyncio.ensure_future(asyncio.gather(living, following)))
        for response in await following:
            *lines, end = parse(response.text)
            assert end["event"] == "end"
            numbers = [int(line["id"].removeprefix("1:")) for line in lines]
            assert numbers == list(range(numbers[0], LINES + 2)), "none is lost, none comes twice"
            assert len(numbers) * 74 <= LOG_LIMIT_BYTES + 10_000
        assert api.cluster.log_readers[attempt_id] <= 4, (
            "five followers, one reader (and one look at the end)"
        )
        gc.unfreeze()
        assert pause < 0.3, f"the event loop stood still for {pause:.2f} s"


async def test_the_last_lines_those_with_a_text_and_those_since_a_time(api: Api):
    job_id = await api.started()
    path = f"/api/v1/jobs/{job_id}/logs"
    api.cluster.logs[f"{job_id}-1"] = (
        "before any time\n"
        "2026-11-22T08:00:00.000Z INFO first: begins\n"
        "2026-11-22T08:00:01.500Z WARNING second: Slow disk\n"
        "  a line of the warning\n"
        "2026-11-22T08:00:02.000Z INFO third: goes on\n"
    )

    async def numbers(**wanted: object) -> list[int]:
        response = (await api.client.get(path, params=wanted)).raise_for_status()
        return [line["number"] for line in response.json()["items"]]

    assert await numbers() == [1, 2, 3, 4, 5]
    assert await numbers(tail=2) == [4, 5]
    assert await numbers(search="slow DISK") == [3]
    assert await numbers(since="2026-11-22T08:00:01Z") == [1, 3, 4, 5], "1 is as old as its attempt"
    assert await numbers(since="2026-11-22T09:00:01.500+01:00", search="line") == [4]
    assert await numbers(search="o", tail=1) == [5]
    assert (
        "since" in problem(await api.client.get(path, params={"since": "2026-11-22T08:00:00"}), 422)["detail"]
    )
    await api.report(job_id, 1, state="SUCCEEDED")
    shown = [event.get("id") for event in parse((await stream(api, f"{path}?tail=2")).text)]
    assert shown == ["1:4", "1:5", None]
    again = parse((await stream(api, f"{path}?tail=2", **{"Last-Event-ID": "1:1"})).text)
    assert [event.get("id") for event in again] == ["1:2", "1:3", "1:4", "1:5", None], (
        "it goes on where it broke"
    )


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_window_holds_the_last_whole_lines_however_it_is_filled(size: int):
    text = "".join(f"line {n} \u00e4\u4e16\n" for n in range(1, 51)) + "half"
    window, content = LogWindow(120), text.encode()
    for begin in range(0, len(content), size):
        window.add(content[begin : begin + size])
    lines = text.split("\n")
    kept = list(window.lines(0, ended=True))
    assert kept == [(n, lines[n - 1]) for n in range(window.first_line, 52)]
    assert 90 < len(window.text().encode()) <= 124
    assert window.text() == "\n".join(lines[window.first_line - 1 :])
    assert [n for n, _ in window.lines(49, ended=False)] == [50]
    assert list(window.lines(51, ended=True)) == [] and window.read_bytes == len(content)


def test_a_line_without_an_end_stays_within_the_limit():
    window = LogWindow(1000)
    for _ in range(100):
        window.add(b"-progress" * 10)
    assert len(window.text()) == 1000


def test_what_a_job_prints_is_shown_and_obeyed_by_no_terminal():
    window = LogWindow(1000)
    window.add(
        b"\x1b[1;32mgreen\x1b[0m\tand \x07bell\r\n\x1b]0;title\x07\x9b2J \xc2\x9b2J\n 1%\r50%\r\r99%\n"
    )
    assert [text for _, text in window.lines(0, ended=True)] == [
        r"green	and \x07bell",
        "\\x1b]0;title\\x07\N{REPLACEMENT CHARACTER}2J \\x9b2J",
        "99%",
    ]
    assert window.text().startswith("green\tand ")


async def test_who_asks_just_as_a_reader_that_nobody_asked_ends_gets_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
):
    class Silent:
        async def read_log(self, attempt_id: str, *, follow: bool = False) -> AsyncIterator[bytes]:
            yield b"first\n"
            if follow:
                await asyncio.Event().wait()

    monkeypatch.setattr(driver_logs, "_FOLLOW_UNUSED_S", 0.0)
    location = LogLocation("job-1", 1, utc_now(), ended=False, submitted=True, stored=False)
    reader = driver_logs._AttemptLogReader(cast(Any, Silent()), location, 100)
    for _ in range(20):  # among these are turns in which time is up and the task has not heard of it
        window = await reader.window(follow=True)
        assert list(window.lines(0, ended=False)) == [(1, "first")]
        await asyncio.sleep(0)
    reader.stop()
