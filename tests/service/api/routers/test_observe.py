"""What happened in a job, where a page or a stream goes on: arguments as they are told, and the pure parts."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from service.api import streams
from service.control_plane import control_plane_app
from service.jobs import timelines
from service.orchestrator.ray.driver_logs import LogWindow
from service.schemas.activity import SlotView
from service.settings.settings import Settings
from service.spec.states import JobState
from tests.service.api.conftest import Api
from tests.service.api.routers.test_jobs import problem
from tests.service.fake_cluster import FakeCluster
from tests.tiers import some_by_day

LIMIT = {"minimum": 1, "maximum": 5000}
NUMBER = {"minimum": 0, "exclusiveMaximum": 2**31}
PAIR = {"pattern": r"^\d{1,9}:\d{1,9}$"}


@functools.cache
def description() -> dict[str, Any]:
    return control_plane_app(Settings(), FakeCluster()).openapi()


def limits_of(path: str) -> dict[str, dict]:
    """By argument of a route in the description: its default and what bounds it."""
    found = {}
    for parameter in description()["paths"][f"/api/v1/jobs/{{job_id}}/{path}"]["get"]["parameters"]:
        schema = parameter["schema"]
        known = {**schema, **next((s for s in schema.get("anyOf", []) if s.get("type") != "null"), {})}
        names = ("default", "minimum", "maximum", "exclusiveMaximum", "pattern", "enum")
        found[parameter["name"]] = {name: known[name] for name in names if name in known}
    return {name: limits for name, limits in found.items() if name not in ("job_id", "last-event-id")}


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        (
            "events",
            {
                "after": NUMBER,
                "limit": {"default": 500, **LIMIT},
                "page_token": {"pattern": r"^\d{1,9}$"},
            },
        ),
        (
            "logs",
            {
                "attempt": {"minimum": 1, "exclusiveMaximum": 2**31},
                "limit": {"default": 1000, **LIMIT},
                "page_token": PAIR,
                "tail": {"minimum": 1, "maximum": 5000},
                "since": {},
                "search": {},
            },
        ),
        ("steps", {"after": NUMBER, "limit": {"default": 1000, **LIMIT}, "page_token": PAIR}),
        ("timeline", {"step": NUMBER, "format": {"default": "json", "enum": ["json", "chrome", "svg"]}}),
    ],
)
def test_arguments_are_bounded_as_the_description_says(path: str, limits: dict):
    found = limits_of(path)
    found = {name: found[name] for name in found if not name.lower().startswith("last")}
    assert found == limits


@some_by_day(
    ("path", "also"),
    [("events", set()), ("logs", {"503"}), ("steps", set()), ("plan", set()), ("timeline", set())],
    by_day=2,
)
def test_the_description_says_what_else_is_answered(path: str, also: set[str]):
    described = description()["paths"][f"/api/v1/jobs/{{job_id}}/{path}"]["get"]
    assert set(described["responses"]) == {"200", "401", "403", "404", "422"} | also
    assert described["tags"] == ["jobs"]


def slot(action: str, start_s: float, end_s: float) -> SlotView:
    return SlotView(mesh="m0", lane="compute", action=action, start_s=start_s, end_s=end_s)


def test_a_steps_length_is_what_its_driver_said_or_from_first_to_last_of_its_slots():
    slots = [slot("F", 1.0, 2.0), slot("B", 2.5, 4.0), slot("REDUCE", 4.0, 9.0), slot("STEP", 0.0, 9.5)]
    assert timelines.makespan_s(slots, SimpleNamespace(makespan_s=7.0)) == 7.0
    assert timelines.makespan_s(slots, SimpleNamespace(makespan_s=None)) == 3.0
    assert timelines.makespan_s(slots, None) == 3.0
    assert timelines.makespan_s(slots[2:], None) == 0.0


def test_who_asks_for_a_step_without_a_timeline_is_told_which_have_one():
    assert timelines.profiled_steps_hint([]) == "no step was yet"
    assert timelines.profiled_steps_hint([10, 20]) == "choose one of 10, 20"
    twenty = ", ".join(map(str, range(20)))
    assert timelines.profiled_steps_hint(range(20)) == f"choose one of {twenty}"
    assert timelines.profiled_steps_hint(range(21)) == f"choose one of {twenty}, ..."


def test_a_plan_that_is_missing_is_still_to_come_or_never_will():
    def told(state: JobState) -> str:
        return timelines.why_no_plan(SimpleNamespace(job_state=state))

    assert told(JobState.RUNNING).startswith(" yet:") and told(JobState.FAILED).startswith(
        ": it ended before"
    )


async def test_what_is_missing_is_told_with_the_job_and_the_step(api: Api):
    job = await api.submit()
    nothing = (
        f"job {job} has neither a plan nor a profiled step yet: it is planned after its layers are profiled"
    )
    assert (await missing(api, f"/api/v1/jobs/{job}/timeline")) == nothing
    assert (await missing(api, f"/api/v1/jobs/{job}/plan")).startswith(f"job {job} has no plan yet")
    step = await missing(api, f"/api/v1/jobs/{job}/timeline?step=7")
    assert step == f"step 7 of job {job} was not profiled: no step was yet"


async def missing(api: Api, path: str) -> str:
    answer = await api.client.get(path)
    problem(answer, 404)
    return answer.json()["detail"]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (None, None),
        ("", None),
        ("0", 0),
        ("17", 17),
        ("999999999", 999_999_999),
        ("1000000000", None),
        ("-1", None),
        ("x", None),
    ],
)
def test_a_last_event_id_is_a_number_of_ours_or_none(text: str | None, number: int | None):
    assert streams.parse_event_id(text) == number


@pytest.mark.parametrize(
    ("text", "place"),
    [(None, (0, 0)), ("3:14", (3, 14)), ("3", (3, 0)), (":5", (0, 5)), ("x:y", (0, 0)), ("2:1:7", (2, 0))],
)
def test_a_place_in_a_log_is_attempt_and_line_and_the_beginning_when_it_is_not_ours(text, place):
    assert streams.parse_line_place(text) == place


@pytest.mark.parametrize("pieces", [[b"a\nb\nc"], [b"a", b"\nb", b"\n", b"c"]], ids=["at once", "in pieces"])
def test_the_last_line_of_a_log_is_one_when_it_is_complete_or_nothing_follows(pieces: list[bytes]):
    window = LogWindow(100)
    for piece in pieces:
        window.add(piece)
    assert list(window.lines(0, ended=False)) == [(1, "a"), (2, "b")]
    assert list(window.lines(0, ended=True)) == [(1, "a"), (2, "b"), (3, "c")]
    assert list(window.lines(2, ended=True)) == [(3, "c")] and not list(window.lines(3, ended=True))
    window.add(b"\n")
    assert list(window.lines(0, ended=True)) == list(window.lines(0, ended=False))
    assert list(LogWindow(100).lines(0, ended=True)) == []


def test_a_stream_ends_with_the_state_of_its_job():
    ends = [streams._end_message(None), streams._end_message(SimpleNamespace(state="FAILED"))]
    assert [(e.event, json.loads(e.data)) for e in ends] == [
        ("end", {"state": None}),
        ("end", {"state": "FAILED"}),
    ]


def test_a_stream_is_what_the_caller_wants_who_accepts_it():
    def asked(**headers: str) -> bool:
        return streams.wants_stream(SimpleNamespace(headers=headers))

    assert asked(accept="text/event-stream") and asked(accept="text/html, text/event-stream;q=1")
    assert not asked(accept="application/json") and not asked()
