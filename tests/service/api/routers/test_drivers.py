"""What drivers ask and report over HTTP: tokens, fencing, reports, and what users then see."""

from __future__ import annotations

import json
import math
import re
import sys
from datetime import datetime

import pytest

from service.orchestrator.attempts.outcome import Backoff
from service.spec.states import CheckState
from service.store.attempts import find_attempt
from service.store.plans import find_job_plan
from service.store.transitions import lock_job
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.serving import set_backoff
from tests.tiers import some_by_day
from worker.contract import reasons
from worker.contract.timeline import launch_message

SLOTS = [
    {
        "mesh": "m0",
        "lane": "compute",
        "action": "F",
        "stage": "s0",
        "microbatch": 0,
        "start_s": 0.0,
        "end_s": 0.5,
    },
    {
        "mesh": "m0",
        "lane": "send:m1",
        "action": "SEND_F",
        "stage": "s0",
        "peer_stage": "s1",
        "peer_mesh": "m1",
        "edge": 0,
        "microbatch": 0,
        "start_s": 0.5,
        "end_s": 0.75,
    },
    {"mesh": "m0", "lane": "compute", "action": "STEP", "start_s": 1.5, "end_s": 2.0},
]
FULL_SLOT = {"stage": None, "peer_stage": None, "peer_mesh": None, "edge": None, "microbatch": None}
STEP = {
    "step": 1,
    "loss": 2.5,
    "metrics": {"accuracy": 0.5, "bad": None},
    "step_s": 0.2,
    "makespan_s": 1.25,
    "bubble_ratio": 0.25,
    "exposed_transfer_s": 0.0,
    "overlap_ratio": 1.0,
    "grad_norm": 0.5,
    "learning_rate": 3e-4,
    "started_at": 1.75e9,
}


async def test_the_driver_reads_its_job_with_and_without_a_slash(api: Api):
    job_id = await api.started()
    for path in ("", "/"):
        given = (await api.driver(job_id, "GET", path)).json()
        assert (given["attempt_id"], given["job_id"], given["number"]) == (f"{job_id}-1", job_id, 1)
        assert given["job"] == (await api.job(job_id))["spec"]
        assert (given["device"], given["resume"]) == ("cpu", None)


async def test_wrong_tokens_are_refused_alike_for_known_and_unknown_attempts(api: Api):
    job_id = await api.started()
    for attempt in (f"{job_id}-1", "job-none-1", "%00", "%ED%A0%80"):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp4"}):
            problem(await api.client.get(f"/api/v1/attempts/{attempt}", headers=headers), 401)
    problem(await api.driver(job_id, "POST", "/reports", token="wrong", json={"sequence": 1}), 401)


async def test_reports_show_in_the_job_its_steps_and_events(api: Api):
    job_id = await api.started()
    events = [{"at": 1.75e9, "kind": "placed", "message": "4 workers"}]
    answer = await api.report(job_id, 1, state="RUNNING", events=events, metrics_endpoint="127.0.0.1:9000")
    assert answer.json() == {"command": "continue"}
    await api.report(job_id, 2, steps=[STEP, {**STEP, "step": 2, "loss": 2.0}])
    job = await api.job(job_id)
    assert job["state"] == "RUNNING"
    assert job["progress"] == {
        "step": 2,
        "steps": 10,
        "loss": 2.0,
        "metrics": STEP["metrics"],
        "step_s": 0.2,
        "model_flops_per_s": None,
        "mfu": None,
        "percent": 20,
        "left_s": pytest.approx(8 * 0.2),
    }
    assert job["attempts"][0]["metrics_endpoint"] == "127.0.0.1:9000"
    steps = (await api.client.get(f"/api/v1/jobs/{job_id}/steps")).json()
    assert steps["items"][0] == {**STEP, "attempt": 1} and steps["next_page_token"] is None
    found = (await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
    placed = next(event for event in found if event["kind"] == "placed")
    assert datetime.fromisoformat(placed["at"]).timestamp() == 1.75e9
    targets = (await api.client.get("/api/v1/prometheus/targets")).json()
    assert targets[0]["targets"] == ["127.0.0.1:9000"]
    assert targets[0]["labels"]["__meta_slotline_job"] == job_id


async def test_an_attempt_has_the_phases_of_its_launch_in_order(api: Api):
    job_id = await api.started()
    (attempt,) = (await api.job(job_id))["attempts"]
    assert list(attempt["launch_s"]) == ["queue", "submit"], "its driver has not reported"
    async with api.service.database.read() as session:
        given = (await find_attempt(session, f"{job_id}-1")).submitted_at.timestamp()
    told = [("connect", 1.5, 4.0), ("trace", 2.0, 6.0), ("trace", 0.5, 6.5), ("first step", 0.25, 6.75)]
    events = [
        {"at": given + at, "kind": "launch", "message": launch_message(phase, seconds)}
        for phase, seconds, at in told
    ]
    await api.report(job_id, 1, events=[*events, {**events[0], "message": "took long"}])
    (attempt,) = (await api.job(job_id))["attempts"]
    driver = {name: attempt["launch_s"][name] for name in list(attempt["launch_s"])[2:]}
    assert driver == {"driver": pytest.approx(2.5), "connect": 1.5, "trace": 2.5, "first step": 0.25}
    assert list(driver) == ["driver", "connect", "trace", "first step"]
    assert all(seconds >= 0 for seconds in attempt["launch_s"].values())


async def test_after_a_recovery_steps_and_timelines_are_those_of_the_living_attempt(api: Api):
    job_id = await api.started()
    timeline = {"step": 4, "started_at": 1.75e9, "uncertainty_s": 1e-5, "slots": SLOTS}
    await api.report(job_id, 1, state="RUNNING", steps=[{**STEP, "step": n} for n in range(1, 6)])
    await api.report(job_id, 2, timelines=[timeline])
    await api.report(job_id, 3, state="FAILED", reason=reasons.Reason.DRIVER_LOST, message="gone")
    await api.rounds(job_id, 2)
    resumed = {"steps": [{**STEP, "step": 2, "loss": 7.0}], "timelines": [{**timeline, "step": 2}]}
    await api.report(job_id, 1, number=2, state="RUNNING", **resumed)
    place = f"/api/v1/jobs/{job_id}"
    steps = (await api.client.get(f"{place}/steps")).json()["items"]
    assert [(s["attempt"], s["step"]) for s in steps] == [(1, 1), (1, 3), (1, 4), (1, 5), (2, 2)]
    news = (await api.client.get(f"{place}/steps", params={"page_token": "1:5"})).json()["items"]
    assert [(s["attempt"], s["step"], s["loss"]) for s in news] == [(2, 2, 7.0)]
    assert (await api.client.get(f"{place}/timeline")).json()["step"] == 2
    told = (await api.client.get(f"/jobs/{job_id}/profiled-steps")).json()
    assert told == {"planned": None, "steps": [4, 2], "attempts": [1, 2]}
    problem(await api.client.get(f"{place}/steps", params={"page_token": "5"}), 422)


async def test_a_page_of_steps_goes_on_behind_its_last_step_also_where_an_attempt_ends_in_it(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, state="RUNNING", steps=[{**STEP, "step": n} for n in (1, 2)])
    await api.report(job_id, 2, state="FAILED", reason=reasons.Reason.DRIVER_LOST, message="gone")
    await api.rounds(job_id, 2)
    await api.report(job_id, 1, number=2, state="RUNNING", steps=[{**STEP, "step": n} for n in (3, 4)])
    place = f"/api/v1/jobs/{job_id}/steps"
    first = (await api.client.get(place, params={"limit": 3})).json()
    assert [(s["attempt"], s["step"]) for s in first["items"]] == [(1, 1), (1, 2), (2, 3)]
    assert first["next_page_token"] == "2:3"
    rest = (await api.client.get(place, params={"page_token": first["next_page_token"]})).json()
    assert [(s["attempt"], s["step"]) for s in rest["items"]] == [(2, 4)] and rest["next_page_token"] is None


async def test_the_peaks_of_an_attempts_memory_are_the_most_of_all_its_steps(api: Api):
    job_id = await api.started()
    assert (await api.job(job_id))["attempts"][0]["peak_memory_bytes"] is None
    await api.report(job_id, 1, steps=[{**STEP, "peak_memory_bytes": {"m0": 5, "m1": 2**40}}])
    more = [{**STEP, "step": number, "peak_memory_bytes": {"m0": 10 - number}} for number in (2, 3)]
    await api.report(job_id, 2, steps=[*more, {**STEP, "step": 4}])
    assert (await api.job(job_id))["attempts"][0]["peak_memory_bytes"] == {"m0": 8, "m1": 2**40}


@some_by_day("limit", [1, 2, 3, 7, 8], by_day=2)
@pytest.mark.parametrize(("what", "key"), [("steps", "step"), ("events", "number"), ("logs", "number")])
async def test_pages_hold_everything_once_and_in_order(make_api: ApiMaker, what: str, key: str, limit: int):
    async with make_api() as api:
        job_id = await api.started()
        events = [{"at": 1.75e9, "kind": "note", "message": str(number)} for number in range(3, 8)]
        await api.report(job_id, 1, steps=[{**STEP, "step": number} for number in range(1, 8)], events=events)
        api.cluster.logs[f"{job_id}-1"] = "".join(f"line {number}\n" for number in range(1, 8))
        pages, token = [], None
        while True:
            params = {"limit": limit} | ({"page_token": token} if token else {})
            page = (await api.client.get(f"/api/v1/jobs/{job_id}/{what}", params=params)).json()
            pages.append([item[key] for item in page["items"]])
            if (token := page["next_page_token"]) is None:
                break
    assert [number for page in pages for number in page] == [1, 2, 3, 4, 5, 6, 7]
    assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1), "every page but the last is full"
    assert pages[-1], "no token leads to an empty page"


async def test_steps_and_events_are_read_from_after_a_number_on(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, steps=[{**STEP, "step": number} for number in range(5)])
    for what, key, after, expected in (
        ("steps", "step", 2, [3, 4]),
        ("steps", "step", 0, [1, 2, 3, 4]),
        ("steps", "step", None, [0, 1, 2, 3, 4]),
        ("events", "number", 1, [2]),
        ("events", "number", 0, [1, 2]),
    ):
        params = {} if after is None else {"after": after}
        page = (await api.client.get(f"/api/v1/jobs/{job_id}/{what}", params=params)).json()
        assert [item[key] for item in page["items"]] == expected, (what, after)


async def test_a_failed_attempt_is_followed_after_a_pause_that_grows(make_api: ApiMaker):
    async with make_api() as api:
        set_backoff(api.service, Backoff(30.0, 45.0))
        job_id = await api.started()
        for number, pause in ((1, 30), (2, 45), (3, 45)):
            failed = {"state": "FAILED", "reason": "NODE_LOST", "message": "gone"}
            await api.report(job_id, 1, number=number, **failed)
            async with api.service.database.write() as session:
                job = await lock_job(session, job_id)
                attempt = await find_attempt(session, f"{job_id}-{number}")
                assert (job.not_before - attempt.finished_at).total_seconds() == pause
                job.not_before = None
            await api.rounds(job_id, number + 1)


async def test_a_loss_that_is_no_number_is_stored_as_none(api: Api):
    job_id = await api.started()
    values = {"loss": math.nan, "grad_norm": math.inf, "metrics": {"a": math.nan}}
    text = json.dumps({"sequence": 1, "steps": [{**STEP, **values}]})
    response = await api.driver(
        job_id, "POST", "/reports", content=text, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200, response.text
    (step,) = (await api.client.get(f"/api/v1/jobs/{job_id}/steps")).json()["items"]
    assert (step["loss"], step["grad_norm"], step["metrics"]) == (None, None, {"a": None})


@pytest.mark.parametrize("metrics", [{"a b": 1.0}, {"x" * 65: 1.0}, {f"m{i}": 1.0 for i in range(33)}])
async def test_metrics_that_no_loss_may_return_are_refused(api: Api, metrics: dict):
    job_id = await api.started()
    body = {"sequence": 1, "steps": [{**STEP, "metrics": metrics}]}
    problem(await api.driver(job_id, "POST", "/reports", json=body), 422)


async def test_steps_of_older_drivers_have_no_metrics(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, steps=[{"step": 1, "loss": 2.5}])
    assert (await api.job(job_id))["progress"]["metrics"] == {}
    (step,) = (await api.client.get(f"/api/v1/jobs/{job_id}/steps")).json()["items"]
    assert step["metrics"] == {}


async def test_text_that_postgresql_cannot_hold_is_stored_all_the_same(api: Api, monkeypatch):
    monkeypatch.setattr(reasons, "strict", False)
    job_id = await api.started()
    slots = [{**SLOTS[0], "stage": "a\x00b"}]
    answer = await api.report(
        job_id,
        1,
        events=[{"at": 0, "kind": "k\x00", "message": "m\x00"}],
        timelines=[{"step": 1, "started_at": 0, "slots": slots}],
        checkpoint={"step": 1, "uri": "u\x00"},
        metrics_endpoint="e\x00",
        state="FAILED",
        reason="NAN_LOSS\x00",
        message="x\x00y",
    )
    assert answer.status_code == 200, answer.text
    assert (await api.job(job_id))["state"] in ("FAILED", "RECOVERING")


async def test_a_driver_is_told_that_its_job_was_checked_before(api: Api):
    job_id = await api.started()
    for state, checked in ((None, False), (CheckState.UNDECIDED, False), (CheckState.PASSED, True)):
        async with api.service.database.write() as session:
            (await lock_job(session, job_id)).check_state = state
        assert (await api.driver(job_id, "GET", "")).json()["checked"] is checked


async def test_a_driver_is_told_of_which_steps_and_evaluations_there_are_records(api: Api):
    job_id = await api.started()
    assert (await api.driver(job_id, "GET")).json()["recorded"] == {"steps": -1, "evaluations": -1}
    await api.report(job_id, 1, steps=[{**STEP, "step": 4}, {**STEP, "step": 3}], evaluations=[{"step": 2}])
    assert (await api.driver(job_id, "GET")).json()["recorded"] == {"steps": 4, "evaluations": 2}


async def test_a_timeline_shows_planned_beside_measured(api: Api):
    job_id = await api.started()
    plan = {"begins": ["a"], "spec": {}, "plan": {"makespan_s": 1.0, "slots": [{**FULL_SLOT, **SLOTS[0]}]}}
    await _store_plan(api, job_id, plan)
    timeline = {"step": 3, "started_at": 1.75e9, "uncertainty_s": 1e-4, "slots": SLOTS}
    await api.report(job_id, 1, timelines=[timeline, {**timeline, "step": 7}])
    assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json() == plan
    view = (await api.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"step": 3})).json()
    assert (view["step"], view["started_at"], view["uncertainty_s"]) == (3, 1.75e9, 1e-4)
    assert view["planned"] == {"makespan_s": 1.0, "slots": plan["plan"]["slots"]}
    assert view["measured"]["makespan_s"] == 0.75
    assert view["measured"]["slots"] == [{**FULL_SLOT, **slot} for slot in SLOTS]
    assert view["profiled_steps"] == [3, 7]
    assert (await api.client.get(f"/api/v1/jobs/{job_id}/timeline")).json()["step"] == 7
    missing = await api.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"step": 4})
    assert problem(missing, 404)["detail"].endswith("choose one of 3, 7")


async def test_a_long_timeline_costs_the_event_loop_few_calls_a_slot(make_api: ApiMaker):
    """Counted, not timed: Python functions called in the event loop's thread between two sizes of a report."""

    async def calls(api: Api, sequence: int, slots: int) -> int:
        number = 0

        def count(_frame, event: str, _argument) -> None:
            nonlocal number
            number += event == "call"

        timeline = {"step": sequence, "started_at": 1.0, "slots": [SLOTS[1]] * slots}
        sys.setprofile(count)
        try:
            answer = await api.report(job_id, sequence, timelines=[timeline])
        finally:
            sys.setprofile(None)
        assert answer.status_code == 200
        return number

    async with make_api() as api:
        job_id = await api.started()
        await calls(api, 1, 10)
        assert await calls(api, 2, 2010) - await calls(api, 3, 10) < 4 * 2000
        view = (await api.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"step": 2})).json()
        assert len(view["measured"]["slots"]) == 2010


async def test_a_trace_holds_every_slot_on_its_lane_in_microseconds(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, timelines=[{"step": 3, "started_at": 1.75e9, "slots": SLOTS}])
    response = await api.client.get(f"/api/v1/jobs/{job_id}/timeline", params={"format": "chrome"})
    events = response.json()["traceEvents"]
    slots = [event for event in events if event["ph"] == "X"]
    assert [(s["name"], s["ts"], s["dur"]) for s in slots] == [
        ("F s0/0", 0.0, 0.5e6),
        ("SEND_F s0/0", 0.5e6, 0.25e6),
        ("STEP", 1.5e6, 0.5e6),
    ]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [lanes[s["pid"], s["tid"]] for s in slots] == ["compute", "send:m1", "compute"]


async def test_what_is_not_there_yet_is_not_found(api: Api):
    job_id = await api.submit()
    for path in ("plan", "timeline"):
        assert "yet" in problem(await api.client.get(f"/api/v1/jobs/{job_id}/{path}"), 404)["detail"]
    for path in ("plan", "timeline", "steps", "events", "logs"):
        problem(await api.client.get(f"/api/v1/jobs/job-none/{path}"), 404)


async def test_profiles_are_shared_between_attempts(api: Api):
    job_id = await api.started()
    key = {"key": "gpt/8x128/cpu"}
    problem(await api.driver(job_id, "GET", "/profile", params=key), 404)
    for profile in ({"layers": [1]}, {"layers": [{"forward_s": 0.5}]}):
        assert (await api.driver(job_id, "PUT", "/profile", params=key, json=profile)).status_code == 204
    assert (await api.driver(job_id, "GET", "/profile", params=key)).json() == {
        "layers": [{"forward_s": 0.5}]
    }


async def test_a_replaced_driver_is_refused_everywhere(api: Api):
    job_id = await api.started()
    await api.report(job_id, 1, state="RUNNING", checkpoint={"step": 5, "uri": "file:///c/5"})
    await api.report(job_id, 2, state="FAILED", reason="WORKER_LOST", message="a worker died")
    assert (await api.job(job_id))["state"] == "RECOVERING"
    await api.rounds(job_id, 2)
    assert (await api.driver(job_id, "GET", number=2)).json()["resume"] == {"step": 5, "uri": "file:///c/5"}
    for method, path, body in (
        ("GET", "", None),
        ("PUT", "/profile?key=k", {}),
        ("POST", "/plan", {"profile": {}}),
        ("POST", "/reports", {"sequence": 9}),
    ):
        refused = await api.driver(job_id, method, path, json=body)
        assert "replaced by attempt 2" in problem(refused, 409)["detail"]
    assert (await api.report(job_id, 1, number=2)).status_code == 200


async def test_a_reason_of_a_newer_driver_is_internal_and_stays_in_the_message(api: Api, monkeypatch):
    monkeypatch.setattr(reasons, "strict", False)
    job_id = await api.started()
    await api.report(job_id, 1, state="FAILED", reason="GPU_ON_FIRE", message="call help")
    attempt = (await api.job(job_id))["attempts"][0]
    assert (attempt["reason"], attempt["message"]) == ("INTERNAL", "GPU_ON_FIRE: call help")


async def test_a_final_report_ends_the_attempt_and_its_repetition_is_acknowledged(api: Api):
    job_id = await api.started()
    for _ in range(2):
        assert (await api.report(job_id, 1, state="SUCCEEDED")).json() == {"command": "continue"}
    problem(await api.report(job_id, 2), 409)
    job = await api.job(job_id)
    assert job["state"] == "SUCCEEDED" and job["finished_at"] is not None
    assert job["attempts"][0]["state"] == "SUCCEEDED"
    problem(await api.client.post(f"/api/v1/jobs/{job_id}/cancel"), 409)


async def test_a_cancelled_job_tells_its_driver(api: Api):
    job_id = await api.started()
    await api.client.post(f"/api/v1/jobs/{job_id}/cancel")
    assert (await api.report(job_id, 1)).json() == {"command": "cancel"}
    await api.report(job_id, 2, state="CANCELLED")
    assert (await api.job(job_id))["state"] == "CANCELLED"


async def test_fields_of_a_newer_driver_are_ignored_and_broken_reports_refused(api: Api):
    job_id = await api.started()
    assert (await api.report(job_id, 1, colour="blue", steps=[{**STEP, "colour": 1}])).status_code == 200
    for body in ({}, {"sequence": 0}, {"sequence": 2**64}, {"sequence": 2, "state": "QUEUED"}):
        problem(await api.driver(job_id, "POST", "/reports", json=body), 422)
    step = {**STEP, "step": 2**40}
    problem(await api.report(job_id, 2, steps=[step]), 422)


async def test_metrics_targets_go_when_the_linger_is_over(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.jobs.clusters.METRICS_LINGER_S", 0.0)
    async with make_api() as api:
        job_id = await api.started()
        await api.report(job_id, 1, metrics_endpoint="127.0.0.1:9000")
        assert len((await api.client.get("/api/v1/prometheus/targets")).json()) == 1
        await api.report(job_id, 2, state="SUCCEEDED")
        assert (await api.client.get("/api/v1/prometheus/targets")).json() == []


@some_by_day(
    "endpoint",
    [
        "10.9.9.9:80",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1",
        "127.0.0.1:9000/x?",
        "127.0.0.1:9000@10.9.9.9:80",
        "u@127.0.0.1:9000",
        "127.0.0.1:٩٠",
        "[127.0.0.1:80",
        "169.254.169.254:80#127.0.0.1:80",
    ],
    by_day=3,
)
async def test_prometheus_is_sent_to_ports_of_nodes_only(make_api: ApiMaker, endpoint: str):
    async with make_api() as api:
        job_id = await api.started()
        assert (await api.report(job_id, 1, metrics_endpoint=endpoint)).status_code == 200
        assert (await api.client.get("/api/v1/prometheus/targets")).json() == []
        await api.report(job_id, 2, metrics_endpoint="127.0.0.1:9000")
        assert len((await api.client.get("/api/v1/prometheus/targets")).json()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["end", "e\nnd", "\rend", "End", "state", "waiting", "error", "message", ""])
async def test_a_drivers_event_neither_ends_a_stream_nor_speaks_for_the_control_plane(
    make_api: ApiMaker, kind: str
):
    async with make_api() as api:
        job_id = await api.started()
        forged = {"at": 1.75e9, "kind": kind, "message": "SUCCEEDED"}
        await api.report(job_id, 1, state="RUNNING", events=[forged, {**forged, "kind": "placed"}])
        await api.report(job_id, 2, state="SUCCEEDED")
        found = (await api.client.get(f"/api/v1/jobs/{job_id}/events")).json()["items"]
        place = next(number for number, event in enumerate(found) if event["message"] == "SUCCEEDED")
        assert re.fullmatch(r"driver\.\w+|e_nd|_end|event", found[place]["kind"])
        assert found[place + 1]["kind"] == "placed", "others keep their names"
        stream = {"Accept": "text/event-stream"}
        text = (await api.client.get(f"/api/v1/jobs/{job_id}/events", headers=stream)).text
        names = re.findall(r"^event: (.*)\r?$", text.replace("\r", ""), re.MULTILINE)
        assert names == [*(event["kind"] for event in found), "end"], "the last one is the server's"


async def _store_plan(api: Api, job_id: str, plan: dict) -> None:
    from service.store.database import utc_now
    from service.store.plans import record_job_plan

    async with api.service.database.write() as session:
        attempt = await find_attempt(session, f"{job_id}-1")
        await record_job_plan(session, attempt, json.dumps(plan), at=utc_now())
    async with api.service.database.read() as session:
        assert (await find_job_plan(session, job_id)) is not None


async def test_a_job_shows_what_share_of_its_accelerators_the_model_gets(api: Api):
    job_id = await api.started()
    assert (await api.job(job_id))["progress"]["mfu"] is None
    known = {"step": 2e12, "peak_per_s": 4e13}
    await api.report(job_id, 1, steps=[STEP], model_flops=known)
    progress = (await api.job(job_id))["progress"]
    assert progress["model_flops_per_s"] == pytest.approx(2e12 / STEP["step_s"])
    assert progress["mfu"] == pytest.approx(2e12 / STEP["step_s"] / 4e13) == 0.25
    (listed,) = (await api.client.get("/api/v1/jobs")).json()["items"]
    assert listed["progress"] == progress
    await api.report(job_id, 2, model_flops={"step": 2e12, "peak_per_s": None})
    progress = (await api.job(job_id))["progress"]
    assert progress["mfu"] is None and progress["model_flops_per_s"] == pytest.approx(1e13), (
        "no vendor says more"
    )


async def test_the_answer_to_the_last_report_has_the_next_attempt_for_a_driver_that_takes_it(api: Api):
    job_id = await api.started(retry={"infrastructure": 2})
    meshes = [{"workers": 1}] * 2
    nodes = [{"name": "node-1", "free": 4, "total": 4}]
    await api.driver(job_id, "POST", "/placement", json={"nodes": nodes, "meshes": meshes})
    await api.report(job_id, 1, state="RUNNING")
    lost = {"state": "FAILED", "reason": "WORKER_LOST", "message": "m1 is gone"}
    async with api.service.database.read() as session:
        old_token = (await find_attempt(session, f"{job_id}-1")).token
    answer = (await api.report(job_id, 2, **lost, takes_next=True)).json()
    following = answer["next"]
    assert following["attempt_id"] == f"{job_id}-2" and following["token"] != old_token
    again = (await api.report(job_id, 2, **lost, takes_next=True)).json()
    assert again["next"] == following, "the first answer may be lost"
    refused = await api.driver(job_id, "POST", "/reports", number=2, token=old_token, json={"sequence": 1})
    assert refused.status_code == 401
    begun = await api.driver(
        job_id,
        "POST",
        "/reports",
        number=2,
        token=following["token"],
        json={"sequence": 1, "state": "RUNNING"},
    )
    assert begun.json() == {"command": "continue"}
    assert (await api.report(job_id, 3, steps=[STEP])).status_code == 409, "what the old one says late"
    assert (await api.job(job_id))["state"] == "RUNNING"


async def test_a_driver_that_does_not_say_that_it_takes_the_next_attempt_is_given_none(api: Api):
    """It may be older than we are."""
    job_id = await api.started(retry={"infrastructure": 2})
    nodes = [{"name": "node-1", "free": 4, "total": 4}]
    await api.driver(job_id, "POST", "/placement", json={"nodes": nodes, "meshes": [{"workers": 1}] * 2})
    await api.report(job_id, 1, state="RUNNING")
    answer = await api.report(job_id, 2, state="FAILED", reason="WORKER_LOST", message="m1 is gone")
    assert answer.json() == {"command": "continue"}
    assert (await api.job(job_id))["state"] == "RECOVERING"
