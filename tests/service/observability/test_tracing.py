"""What happens to a job as spans of one trace, through OpenTelemetry's own exporter to an endpoint that reads them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from service.observability import tracing
from service.observability.tracing import (
    REQUEST_SPAN,
    Span,
    export_traces,
    exporting,
    record_request_span,
    record_span,
)
from tests.otlp import Received, Receiver, receiver
from tests.service.api.conftest import ApiMaker, make_api  # noqa: F401 (a fixture)
from tests.service.conftest import job_body
from worker.contract.logs import TraceParent
from worker.driver.reporter import Spans
from worker.driver.step_measurement import StepMeasurement, StepScaling, StepUsage

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch):
    with receiver() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setattr(
            "service.observability.tracing.FLUSH_LIMIT_S", 60.0
        )  # the end waits for all spans, however busy the machine is
        yield made


def one(spans: list[Received], name: str) -> Received:
    (found,) = [span for span in spans if span.name == name]
    return found


def a_step(number: int) -> StepMeasurement:
    slot = {"lane": "compute", "action": "F", "stage": "s0", "microbatch": 0, "start_s": 0.0, "end_s": 0.5}
    slots = [{**slot, "mesh": "m0"}, {**slot, "mesh": "m1", "start_s": 0.5, "end_s": 1.25}]
    slots.append({**slot, "mesh": "m1", "lane": "in", "action": "RECV_F", "start_s": 0.5, "end_s": 0.75})
    timeline = {"step": number, "started_at": time.time() - 2, "uncertainty_s": 0.0, "slots": slots}
    report = {"step": number, "loss": 2.5, "step_s": 1.5, "bubble_ratio": 0.25}
    return StepMeasurement(report, timeline, StepUsage(2.5, {}, 4), StepScaling(None, False, False))


async def test_a_job_is_one_trace_from_its_request_to_its_profiled_steps(
    make_api: ApiMaker,  # noqa: F811
    collector: Receiver,
    monkeypatch: pytest.MonkeyPatch,
):
    async with make_api() as api:
        answer = await api.client.post("/api/v1/jobs", json=job_body(), headers={"traceparent": CALLER})
        job = answer.json()["id"]
        await api.rounds(job)
        env = api.cluster.submissions[f"{job}-1"].env
        for name in ("SLOTLINE_TRACEPARENT", "SLOTLINE_SPANS"):
            monkeypatch.setenv(name, env[name])
        sent: list[dict] = []
        spans = Spans.from_environment(sent.append)
        spans.add_ended("launch: plan", 0.5)
        assert spans.step(a_step(1), profiled=False).keys() == {"trace_id", "step"}
        labels = spans.step(a_step(2), profiled=True)
        spans.add_ended("checkpoint: save", 0.25)
        trace = {"traceparent": env["SLOTLINE_TRACEPARENT"]}
        await api.driver(job, "GET", "/profile", params={"key": "k"}, headers=trace)
        for sequence, fields in enumerate(({"state": "RUNNING", "spans": sent}, {"state": "SUCCEEDED"}), 1):
            told = await api.driver(
                job, "POST", "/reports", headers=trace, json={"sequence": sequence} | fields
            )
            assert told.status_code == 200, told.text
        again = await api.driver(job, "POST", "/reports", json={"sequence": 2, "state": "SUCCEEDED"})
        assert again.status_code in (200, 409)
    found = collector.spans  # all of them: the end waits for them
    assert {span.trace_id for span in found} == {CALLER.split("-")[1]}
    request, whole, attempt = one(found, "POST /api/v1/jobs"), one(found, "job"), one(found, "attempt")
    step = one(found, "step")
    assert request.parent_id == CALLER.split("-")[2]
    assert request.attributes["http.response.status_code"] == 201
    assert whole.parent_id == request.span_id and attempt.parent_id == whole.span_id
    assert one(found, "wait in the queue").parent_id == whole.span_id
    below = [span for span in found if span.parent_id == attempt.span_id]
    profile = "GET /api/v1/attempts/{attempt_id}/profile"
    assert {span.name for span in below} == {
        *("submit to Ray", "launch: plan", "checkpoint: save", "step", profile)
    }
    assert labels == {"trace_id": step.trace_id, "span_id": step.span_id, "step": "2"}
    meshes = {span.name: span for span in found if span.parent_id == step.span_id}
    assert set(meshes) == {"step on m0", "step on m1"}
    assert meshes["step on m1"].attributes["slotline.compute_s"] == 0.75
    assert meshes["step on m1"].attributes["slotline.transfer_s"] == 0.25
    assert meshes["step on m0"].start_ns == step.start_ns and meshes["step on m1"].end_ns == step.end_ns
    assert (step.end_ns - step.start_ns) / 1e9 == pytest.approx(1.25, abs=1e-5)
    assert step.attributes["slotline.bubble_ratio"] == 0.25 and step.attributes["slotline.job"] == job
    assert "slotline.grad_norm" not in step.attributes
    assert (step.service, attempt.service) == ("slotline-driver", "slotline")
    assert all(span.error is None for span in found) and all(span.start_ns <= span.end_ns for span in found)


async def test_each_attempt_and_each_end_is_told_also_by_who_finds_a_driver_dead(
    make_api: ApiMaker,  # noqa: F811
    collector: Receiver,
):
    async with make_api() as api:
        job = await api.submit(retry={"infrastructure": 1})
        await api.rounds(job)
        failed = {"state": "FAILED", "reason": "DRIVER_LOST", "message": "gone"}
        assert (await api.report(job, 1, **failed)).status_code == 200
        await api.rounds(job, number=2)
        assert (await api.report(job, 1, number=2, **failed)).status_code == 200
        assert (await api.job(job))["state"] == "FAILED"
    first, second = sorted(
        (span for span in collector.spans if span.name == "attempt"), key=lambda span: span.start_ns
    )
    whole = one(collector.spans, "job")
    assert first.span_id != second.span_id and {first.parent_id, second.parent_id} == {whole.span_id}
    assert first.error == second.error == "gone" and "gone" in (whole.error or "")
    waits = [span for span in collector.spans if span.name == "wait in the queue"]
    assert [span.attributes["slotline.attempt"] for span in waits] == [1, 2]
    assert waits[1].start_ns >= first.end_ns - 1000, "the second wait began when the first attempt was over"


async def test_what_is_rolled_back_is_not_told(make_api: ApiMaker, collector: Receiver):  # noqa: F811
    async with make_api() as api:
        job = await api.submit()

        async def cancel(fails: bool) -> None:
            from service.store.database import utc_now
            from service.store.jobs import cancel_job

            async with api.service.database.write() as session:
                await cancel_job(session, job, at=utc_now())
                if fails:
                    raise RuntimeError("planted")

        with pytest.raises(RuntimeError, match="planted"):
            await cancel(True)
        assert (await api.job(job))["state"] == "QUEUED"
        await cancel(False)
    assert one(collector.spans, "job").attributes["slotline.state"] == "CANCELLED"


async def test_a_plan_is_a_span_of_the_request_that_asks_for_it(collector: Receiver):
    async with export_traces():
        request = TraceParent.new()
        REQUEST_SPAN.set(request)
        record_request_span("plan", 0.25)
        REQUEST_SPAN.set(None)
        record_request_span("plan of nobody", 0.25)
    (span,) = collector.spans
    assert (span.name, span.trace_id, span.parent_id) == ("plan", request.trace_id, request.span_id)
    assert (span.end_ns - span.start_ns) / 1e9 == pytest.approx(0.25, abs=1e-5)


async def test_neither_what_nobody_sampled_nor_polling_nor_reports_are_exported(
    make_api: ApiMaker,  # noqa: F811
    collector: Receiver,
):
    async with make_api() as api:
        await api.client.get("/api/v1/jobs")
        await api.client.get("/api/v1/jobs", headers={"traceparent": "nonsense"})
        unsampled = {"traceparent": CALLER[:-2] + "00"}
        job = (await api.client.post("/api/v1/jobs", json=job_body(), headers=unsampled)).json()["id"]
        await api.rounds(job)
        await api.report(job, 1, state="FAILED", reason="INTERNAL", message="no")
        await api.client.get("/api/v1/cluster", headers={"traceparent": CALLER})
    assert [span.name for span in collector.spans] == ["GET /api/v1/cluster"]


async def test_an_endpoint_that_never_answers_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """A server that takes connections and says nothing: recording does not wait, and the end has a limit."""
    monkeypatch.setattr("service.observability.tracing.FLUSH_LIMIT_S", 0.3)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with export_traces():
            made = tracing._exporter
            for number in range(2_000):
                record_span(Span(f"span {number}", TraceParent.new(), 1.0, 2.0))
            queued = made._queue._batch_processor._queue
            assert len(queued) <= 64, "the queue is bounded"
        assert not exporting()
        flush = [thread for thread in threading.enumerate() if thread.name == "slotline-last-spans"]
        assert flush, "OpenTelemetry itself still waits for the server, for 30 s"
    assert not [line for line in caplog.records if "was not exported" in line.message]
    threads = [thread for thread in threading.enumerate() if "Otel" in thread.name and not thread.daemon]
    assert not threads, "the process may end meanwhile"


async def test_a_job_ends_as_ever_where_nobody_listens_at_the_endpoint(
    make_api: ApiMaker,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("service.observability.tracing.FLUSH_LIMIT_S", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    async with make_api() as api:
        job = await api.started()
        assert exporting()
        spans = [{"name": "step", "span_id": "1" * 16, "started_at": 1.0, "ended_at": 2.0}]
        assert (await api.report(job, 1, state="RUNNING", spans=spans)).status_code == 200
        assert (await api.report(job, 2, state="SUCCEEDED")).status_code == 200
        assert (await api.job(job))["state"] == "SUCCEEDED"


async def test_a_broken_exporter_breaks_nothing(monkeypatch: pytest.MonkeyPatch, collector: Receiver):
    async with export_traces():

        def broken(*_: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(tracing._exporter, "take", broken)
        record_span(Span("lost", TraceParent.new(), 1.0, 2.0))
    assert not collector.spans


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "4318"),
    ],
)
async def test_nothing_is_exported_where_the_environment_does_not_want_it(
    variables: dict[str, str], told: str | None, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        async with export_traces(variables):
            assert not exporting()
    assert [told in line.message for line in caplog.records if told] == ([True] if told else [])


async def test_who_has_not_the_packages_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with caplog.at_level(logging.WARNING):
        async with export_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}):
            assert not exporting()
    assert "pip install 'slotline[otel]'" in caplog.text and "OTEL_EXPORTER_OTLP_ENDPOINT" in caplog.text


@pytest.mark.slow
def test_opentelemetry_is_not_loaded_where_no_endpoint_is_set():
    program = (
        "import sys, asyncio, service.control_plane, service.observability.tracing as t, worker.driver.reporter\n"
        "async def main():\n"
        "    async with t.export_traces({}): pass\n"
        "asyncio.run(main())\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print([m for m in sys.modules if m.startswith(heavy)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_driver_makes_no_spans_unless_they_go_somewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLOTLINE_TRACEPARENT", CALLER)
    monkeypatch.delenv("SLOTLINE_SPANS", raising=False)
    sent: list[dict] = []
    spans = Spans.from_environment(sent.append)
    spans.add_ended("launch: plan", 1.0)
    assert spans.step(a_step(3), profiled=True) == {"trace_id": CALLER.split("-")[1], "step": "3"}
    monkeypatch.delenv("SLOTLINE_TRACEPARENT")
    monkeypatch.setenv("SLOTLINE_SPANS", "1")
    spans = Spans.from_environment(sent.append)
    spans.add_ended("launch: plan", 1.0)
    assert spans.step(a_step(3), profiled=True) == {} and sent == []


async def test_a_second_control_plane_in_a_process_leaves_the_first_its_own(collector: Receiver):
    async with export_traces():
        async with export_traces({}):
            assert not exporting()
        assert exporting()
        await asyncio.sleep(0)
