"""The reporter against a real HTTP server that goes away, comes back, refuses and cancels."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import tenacity

from tests.polling import until
from worker.contract.reasons import Reason
from worker.driver.control_plane_client import ControlPlaneClient, Refused
from worker.driver.reporter import Reporter

LIMIT_S = 30.0
"""Longer than anything here takes on the busiest machine."""


class Plane:
    """A control plane that keeps what it hears; `answer(body) -> (status, json)` decides."""

    def __init__(self, port: int = 0):
        self.reports: list[dict] = []
        self.tokens: set[str] = set()
        self.answer = lambda body: (200, {"command": "continue"})
        plane = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                plane.tokens.add(self.headers["Authorization"])
                status, answer = plane.answer(body)
                if status == 200 and isinstance(answer, dict):
                    plane.reports.append(body)
                payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def plane():
    plane = Plane()
    yield plane
    plane.stop()


def unstarted(port: int) -> Reporter:
    control = ControlPlaneClient(f"http://127.0.0.1:{port}", "a1", "secret", patience_s=5.0)
    return Reporter(control, heartbeat_s=0.05)


def reporter_for(port: int) -> Reporter:
    return unstarted(port).start()


def flushed_soon(reporter: Reporter, timeout_s: float = 3600.0) -> bool:
    """What a flush answers, by default one with all the time in the world, which it must do soon."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(reporter.flush(timeout_s)), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert answers, "it waits for what will not come"
    return answers[0]


def test_steps_arrive_once_and_in_order_before_the_state_that_follows_them(plane):
    reporter = reporter_for(plane.port)
    for step in range(1, 51):
        reporter.step({"step": step})
    reporter.state("SUCCEEDED")
    assert reporter.flush(LIMIT_S)
    assert [s["step"] for r in plane.reports for s in r["steps"]] == list(range(1, 51))
    assert [r["sequence"] for r in plane.reports] == sorted({r["sequence"] for r in plane.reports})
    final = next(i for i, r in enumerate(plane.reports) if r["state"] == "SUCCEEDED")
    assert not any(r["steps"] for r in plane.reports[final + 1 :])
    assert plane.tokens == {"Bearer secret"}
    assert not reporter.cancelled.is_set() and not reporter.fenced.is_set()
    reporter.close()


def test_the_first_step_is_reported_at_once_and_later_ones_with_the_next_heartbeat(plane):
    reporter = unstarted(plane.port)
    reporter.step({"step": 1})
    assert reporter._wake.is_set()
    reporter._wake.clear()
    reporter.step({"step": 2})
    assert not reporter._wake.is_set()


def test_the_checkpoints_that_other_jobs_wait_for_are_those_of_the_last_answer(plane):
    answers = [{"command": "continue", "wanted_checkpoints": [2, 6]}, {"command": "continue"}]
    plane.answer = lambda body: (200, answers[0])
    reporter = reporter_for(plane.port)
    until(lambda: reporter.wanted_checkpoints == {2, 6})
    answers.pop(0)
    until(lambda: reporter.wanted_checkpoints == frozenset())
    reporter.close()


def test_while_the_control_plane_is_away_reports_wait_and_arrive_afterwards():
    first = Plane()
    port = first.port
    reporter = reporter_for(port)
    reporter.step({"step": 1})
    assert reporter.flush(LIMIT_S)
    first.stop()
    for step in (2, 3, 4):
        reporter.step({"step": step})
        time.sleep(0.1)
    assert not flushed_soon(reporter, 0.2)
    second = Plane(port)
    assert reporter.flush(LIMIT_S)
    assert [s["step"] for r in second.reports for s in r["steps"]] == [2, 3, 4]
    reporter.close()
    second.stop()


def test_a_server_error_is_tried_again_with_the_same_sequence_number(plane):
    tries = []
    plane.answer = lambda body: (
        (tries.append(body["sequence"]), (503, {}))[1] if len(tries) < 2 else (200, {"command": "continue"})
    )
    reporter = reporter_for(plane.port)
    reporter.step({"step": 7})
    assert reporter.flush(LIMIT_S)
    assert len(set(tries)) == 1 and plane.reports[0]["sequence"] == tries[0]
    reporter.close()


def test_a_heartbeat_goes_out_with_nothing_to_say_and_hears_cancel(plane):
    plane.answer = lambda body: (200, {"command": "cancel"})
    reporter = reporter_for(plane.port)
    until(reporter.cancelled.is_set)
    assert plane.reports[0]["steps"] == []
    reporter.close()


def test_a_heartbeat_hears_that_the_attempt_is_to_save_and_end(plane):
    plane.answer = lambda body: (200, {"command": "stop"})
    reporter = reporter_for(plane.port)
    until(reporter.stop_requested.is_set)
    assert not reporter.cancelled.is_set()
    reporter.close()


def test_a_fenced_attempt_stops_reporting_and_does_not_wait_for_ever(plane):
    plane.answer = lambda body: (409, {"detail": "attempt 2 is the current one"})
    reporter = reporter_for(plane.port)
    until(reporter.fenced.is_set)
    reporter.step({"step": 1})
    assert not flushed_soon(reporter)
    reporter.close()
    assert plane.reports == []


def test_a_part_that_is_refused_is_dropped_and_the_rest_of_its_report_arrives(plane):
    """As when a timeline makes a report too long: the final state in it must not be lost with it."""
    plane.answer = lambda body: (
        (413, {"detail": "too long"}) if body["timelines"] else (200, {"command": "continue"})
    )
    reporter = unstarted(plane.port)
    reporter.timeline({"step": 1, "slots": [{}]})
    reporter.step({"step": 1})
    reporter.checkpoint(1, "here")
    reporter.state("FAILED", reason="NAN_LOSS", message="it exploded")
    reporter.start()
    assert reporter.flush(LIMIT_S)
    reporter.close()
    assert [s["step"] for r in plane.reports for s in r["steps"]] == [1]
    assert {"step": 1, "uri": "here"} in [r["checkpoint"] for r in plane.reports]
    assert [r["reason"] for r in plane.reports if r["state"] == "FAILED"] == ["NAN_LOSS"]


def test_a_bad_step_does_not_take_the_next_one_with_it(plane):
    plane.answer = lambda body: (
        (422, {"detail": "no"})
        if any(s["step"] == 1 for s in body["steps"])
        else (200, {"command": "continue"})
    )
    reporter = reporter_for(plane.port)
    reporter.step({"step": 1})
    assert reporter.flush(LIMIT_S)
    reporter.step({"step": 2})
    assert reporter.flush(LIMIT_S)
    assert [s["step"] for r in plane.reports for s in r["steps"]] == [2]
    reporter.close()


def test_a_final_state_that_nobody_takes_ends_the_wait(plane):
    plane.answer = lambda body: (422, {"detail": "no"}) if body["state"] else (200, {"command": "continue"})
    reporter = reporter_for(plane.port)
    reporter.state("SUCCEEDED", message="done")
    assert not flushed_soon(reporter)
    reporter.close()


def test_numbers_and_texts_that_json_has_no_word_for_are_reported_as_well_as_can_be(plane):
    reporter = reporter_for(plane.port)
    reporter.step({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    reporter.state("FAILED", reason="USER_CODE_RAISED", message="no file \udcff.txt")
    assert reporter.flush(LIMIT_S)
    reporter.close()
    assert [s for r in plane.reports for s in r["steps"]] == [{"step": 1, "loss": None, "grad_norm": None}]
    assert [r["message"] for r in plane.reports if r["state"] == "FAILED"] == ["no file ?.txt"]


def test_an_answer_that_is_no_json_is_an_absence_of_the_control_plane(plane):
    """A proxy's own page, say."""
    answers = iter([(200, b"<html>"), (302, b"elsewhere")])
    plane.answer = lambda body: next(answers, (200, {"command": "continue"}))
    reporter = reporter_for(plane.port)
    reporter.step({"step": 1})
    reporter.state("SUCCEEDED")
    assert reporter.flush(LIMIT_S)
    reporter.close()
    assert plane.reports[-1]["state"] == "SUCCEEDED"


def test_after_a_long_absence_reports_go_out_in_parts_that_the_control_plane_takes(plane):
    reporter = unstarted(plane.port)
    for number in range(2_500):
        reporter.step({"step": number})
        reporter.event("checkpoint", f"after step {number}")
    for step in range(30):
        reporter.timeline({"step": step, "slots": [{}] * 9_000})
    reporter.state("SUCCEEDED")
    reporter.start()
    assert reporter.flush(LIMIT_S)
    reporter.close()
    assert [s["step"] for r in plane.reports for s in r["steps"]] == list(range(2_500))
    assert [e["message"] for r in plane.reports for e in r["events"]] == [
        f"after step {number}" for number in range(2_500)
    ]
    timelines = [[t["step"] for t in r["timelines"]] for r in plane.reports]
    assert [step for steps in timelines for step in steps] == list(
        range(8, 30)
    )  # the newest 22 have 198,000 slots
    assert max(map(len, timelines)) == 1
    assert max(len(r["steps"]) for r in plane.reports) == 2_000
    assert max(len(r["events"]) for r in plane.reports) == 1_000
    assert [r["state"] for r in plane.reports if r["state"]] == ["SUCCEEDED"]
    assert plane.reports[-1]["state"] == "SUCCEEDED"


@pytest.mark.parametrize("kind", ["steps", "events", "timelines", "states", "checkpoint"])
def test_a_flush_waits_for_all_there_is_of_a_kind_and_reports_count_from_one(plane, kind):
    """Whatever else waits or not: what is left over from a full report is not forgotten."""
    reporter = unstarted(plane.port)
    numbers = {"steps": 4_500, "events": 2_500, "timelines": 5, "states": 3, "checkpoint": 1}[kind]
    for number in range(numbers):
        if kind == "steps":
            reporter.step({"step": number})
        elif kind == "events":
            reporter.event("note", str(number))
        elif kind == "timelines":
            reporter.timeline({"step": number, "slots": [{}] * 15_000})
        elif kind == "states":
            reporter.state("RUNNING", message=str(number))
        else:
            reporter.checkpoint(7, "here")
    reporter.start()
    assert reporter.flush(LIMIT_S)
    found = list(plane.reports)
    reporter.close()
    assert [r["sequence"] for r in found] == list(range(1, len(found) + 1))
    if kind == "states":
        told = [r["message"] for r in found if r["state"]]  # on a busy machine a heartbeat comes between
        assert told == ["0", "1", "2"]
    elif kind == "checkpoint":
        assert [r["checkpoint"] for r in found if r["checkpoint"]] == [{"step": 7, "uri": "here"}]
    else:
        told = [int(one.get("step", one.get("message"))) for r in found for one in r[kind]]
        assert told == list(range(numbers))
        assert len([r for r in found if r[kind]]) == {"steps": 3, "events": 3, "timelines": 5}[kind]


def test_a_report_has_one_timeline_at_most(plane):
    """Each is thousands of rows that the control plane writes in the transaction of the report."""
    reporter = unstarted(plane.port)
    for step in range(4):
        reporter.timeline({"step": step, "slots": [{}]})
    reporter.start()
    assert reporter.flush(LIMIT_S)
    reporter.close()
    told = [[t["step"] for t in r["timelines"]] for r in plane.reports if r["timelines"]]
    assert told == [[0], [1], [2], [3]]


class Waits(threading.Event):
    """Notes how long somebody would wait, and is quick about it."""

    def __init__(self):
        super().__init__()
        self.asked: list[float] = []

    def wait(self, timeout=None):
        self.asked.append(timeout)
        return super().wait(0.001)


@pytest.mark.parametrize(
    ("answer", "pauses"),
    [
        (None, [2.0] * 5),
        (httpx.ConnectError("away"), [2.0, 4.0, 8.0, 10.0, 10.0]),
        (RuntimeError("no words for it"), [2.0, 4.0, 8.0, 10.0, 10.0]),
        (Refused(422, "no"), [2.0, 4.0, 8.0, 10.0, 10.0]),
    ],
    ids=["taken", "away", "unwritable", "refused"],
)
def test_a_control_plane_that_takes_nothing_is_asked_less_and_less_often(answer, pauses):
    class Control:
        def report(self, body):
            if answer is not None:
                raise answer
            return {"command": "continue"}

    reporter = Reporter(Control(), heartbeat_s=2.0)
    reporter._wake = waits = Waits()
    reporter.start()
    until(lambda: len(waits.asked) >= 5)
    reporter.close()
    assert waits.asked[:5] == pauses


def test_the_first_step_and_the_first_that_the_record_has_not_are_reported_soon():
    reporter, soon = Reporter(types.SimpleNamespace(), recorded_step=7), []
    for step in range(5, 11):
        reporter.step({"step": step})
        if reporter._wake.is_set():
            soon.append(step)
            reporter._wake.clear()
    assert soon == [5, 8]


def test_what_has_no_words_is_dropped_and_the_rest_goes_out_at_once():
    """Not a heartbeat later: the driver that reports its end waits for it."""
    taken, waits = [], Waits()

    class Control:
        def report(self, body):
            if body["steps"] or body["events"]:
                raise TypeError("no words for it")
            taken.append((body, len(waits.asked)))
            return {"command": "continue"}

    reporter = Reporter(Control(), heartbeat_s=3600.0)
    reporter._wake = waits
    reporter.step({"step": 1})
    reporter.event("note", "lost")
    reporter.checkpoint(1, "here")
    reporter.state("FAILED", reason="NAN_LOSS")
    reporter.start()
    until(lambda: taken)
    reporter.close()
    ((body, waited),) = taken
    assert (body["checkpoint"], body["state"]) == ({"step": 1, "uri": "here"}, "FAILED")
    assert waited == 1, "it paused before it sent what was left"


def test_while_the_control_plane_is_away_the_newest_timelines_are_kept_and_always_one(plane):
    def left(*slots: int) -> list[int]:
        reporter = unstarted(plane.port)
        for number, length in enumerate(slots):
            reporter.timeline({"step": number, "slots": [{}] * length})
        return [timeline["step"] for timeline in reporter._pending.timelines]

    assert left(300_000) == [0], "one is kept however long it is"
    assert left(120_000, 120_000) == [1]
    assert left(100_000, 100_000) == [0, 1] and left(1, 100_000, 100_000) == [1, 2]


def test_an_absence_is_told_once_and_its_end_with_its_length(plane, caplog, monkeypatch):
    absent, refused, ahead_s = [True], [], [0.0]

    def answer(body):
        refused.append(body["sequence"])
        return (503, {}) if absent[0] else (200, {"command": "continue"})

    plane.answer = answer
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0], time=time.time)
    monkeypatch.setattr("worker.driver.reporter.time", clock)
    with caplog.at_level(logging.INFO, logger="worker.driver.reporter"):
        reporter = reporter_for(plane.port)
        until(lambda: "control plane away" in caplog.text)
        until(lambda: len(refused) >= 3)
        ahead_s[0] = 1000.0
        absent[0] = False
        assert reporter.flush(LIMIT_S)
        until(lambda: "control plane back" in caplog.text)
        reporter.close()
    assert caplog.text.count("control plane away") == caplog.text.count("control plane back") == 1
    seconds = float(re.search(r"control plane back after ([0-9.]+) s", caplog.text).group(1))
    assert 1000.0 <= seconds <= 1000.0 + 2 * LIMIT_S


def test_a_reporter_whose_thread_is_gone_keeps_nobody_waiting(plane):
    reporter = unstarted(plane.port)
    reporter.state("SUCCEEDED")
    assert not flushed_soon(reporter)


def test_a_refusal_carries_the_detail_of_the_problem(plane):
    plane.answer = lambda body: (422, {"title": "bad", "detail": "stages: 9 is more than 4 layers"})
    control = ControlPlaneClient(f"http://127.0.0.1:{plane.port}", "a1", "secret", patience_s=5.0)
    with pytest.raises(Refused, match="9 is more than 4 layers") as caught:
        control.plan({})
    assert caught.value.status == 422
    control.close()


def test_an_absent_control_plane_is_given_up_after_the_stated_patience(monkeypatch):
    plane = Plane()
    port = plane.port
    plane.stop()
    now, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    clock = types.SimpleNamespace(sleep=sleep, monotonic=lambda: now[0])
    monkeypatch.setattr(tenacity, "time", clock)
    monkeypatch.setattr(tenacity.nap, "time", clock)
    control = ControlPlaneClient(f"http://127.0.0.1:{port}", "a1", "secret", patience_s=40.0)
    with pytest.raises(httpx.HTTPError):
        control.attempt()
    assert now[0] >= 40.0 > sum(pauses[:-1])
    assert max(pauses) <= 10.0
    control.close()


def test_nothing_follows_the_final_report(plane):
    over = threading.Event()

    def answer(body):
        if over.is_set():
            return 409, {"detail": "the attempt is over"}
        if body["state"] == "SUCCEEDED":
            over.set()
        return 200, {"command": "continue"}

    plane.answer = answer
    reporter = reporter_for(plane.port)
    reporter.state("SUCCEEDED")
    assert over.wait(LIMIT_S)
    time.sleep(0.2)
    assert reporter.flush(LIMIT_S) and not reporter.fenced.is_set()
    reporter.close()
    assert plane.reports[-1]["state"] == "SUCCEEDED"


def test_a_proxy_of_the_environment_is_not_asked_for_a_control_plane_on_this_machine(plane, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    control = ControlPlaneClient(f"http://127.0.0.1:{plane.port}", "a1", "secret", patience_s=5.0)
    control.report({"sequence": 1})
    control.close()
    assert [report["sequence"] for report in plane.reports] == [1]


def test_what_a_model_computes_is_told_once_and_waits_with_the_others(plane):
    reporter = unstarted(plane.port)
    reporter.model_flops(10**12, None)
    reporter.start()
    assert reporter.flush(LIMIT_S)
    told = [r["model_flops"] for r in plane.reports if r["model_flops"] is not None]
    assert told == [{"step": 10**12, "peak_per_s": None}]
    reporter.checkpoint(4, "/runs/4", 123)
    assert reporter.flush(LIMIT_S)
    assert [r["checkpoint"] for r in plane.reports if r["checkpoint"]] == [
        {"step": 4, "uri": "/runs/4", "stored_bytes": 123}
    ]
    reporter.close()


def test_nodes_that_ray_drains_are_told_once_and_those_at_fault_with_the_failure(plane):
    reporter = reporter_for(plane.port)
    reporter.draining({"id-1": 1700000000.0, "id-2": math.inf})
    assert reporter.flush(LIMIT_S)
    told = [report["draining"] for report in plane.reports if report["draining"] is not None]
    assert told == [[{"node": "id-1", "until": 1700000000.0}, {"node": "id-2", "until": None}]]
    reporter.state("FAILED", reason=Reason.NODE_LOST, message="gone", failed_nodes=("id-1",))
    assert reporter.flush(LIMIT_S)
    reporter.close()
    assert (plane.reports[-1]["reason"], plane.reports[-1]["failed_nodes"]) == ("NODE_LOST", ["id-1"])


def test_a_record_is_undelivered_until_the_control_plane_has_answered(plane):
    """Also while its report is on its way: only the answer says that it arrived."""
    arrived, answered = threading.Event(), threading.Event()

    def answer(body):
        arrived.set()
        assert answered.wait(LIMIT_S)
        return 200, {"command": "continue"}

    plane.answer = answer
    reporter = unstarted(plane.port)
    reporter.step({"step": 1})
    reporter.evaluation({"step": 1, "loss": 0.5, "metrics": {}})
    reporter.start()
    assert arrived.wait(LIMIT_S)
    reporter.step({"step": 2})
    reporter.step({"step": 3})
    waiting = reporter.undelivered(2)
    assert [step["step"] for step in waiting["steps"]] == [1, 2]
    assert waiting["evaluations"] == [{"step": 1, "loss": 0.5, "metrics": {}}]
    answered.set()
    assert reporter.flush(LIMIT_S)
    assert reporter.undelivered(3) == {"steps": [], "evaluations": []}
    reporter.deliver_again(waiting, {"steps": 1, "evaluations": 1})
    assert reporter.flush(LIMIT_S)
    assert [s["step"] for r in plane.reports for s in r["steps"]] == [1, 2, 3, 2], "step 1 is recorded"
    assert sum(len(r["evaluations"]) for r in plane.reports) == 1
    reporter.close()


def test_a_driver_that_takes_the_next_attempt_hears_of_it_with_the_answer_to_its_last_report(plane):
    following = {"attempt_id": "a2", "token": "another"}

    def answer(body):
        final = body["state"] == "FAILED"
        return 200, {"command": "continue"} | (
            {"next": following} if final and body.get("takes_next") else {}
        )

    plane.answer = answer
    reporter = reporter_for(plane.port)
    reporter.state("RUNNING")
    reporter.step({"step": 1})
    assert flushed_soon(reporter) and reporter.next is None
    reporter.state("FAILED", reason=Reason.WORKER_LOST, message="m1 is gone", takes_next=True)
    assert flushed_soon(reporter) and reporter.next == following
    assert ["takes_next" in report for report in plane.reports if report["state"]] == [False, True]


@pytest.mark.parametrize("answer", [{"command": "continue"}, {"command": "continue", "next": None}])
def test_a_control_plane_that_hands_nothing_over_leaves_the_driver_without_a_next_attempt(plane, answer):
    plane.answer = lambda body: (200, answer)
    reporter = reporter_for(plane.port)
    reporter.state("FAILED", reason=Reason.WORKER_LOST, message="m1 is gone", takes_next=True)
    assert flushed_soon(reporter) and reporter.next is None
