"""A job that really runs, in one trace: from its request to its profiled steps, as a collector receives it."""

from __future__ import annotations

import pytest

from tests.end_to_end.conftest import Server, job_spec
from tests.otlp import receiver

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_jobs_spans_arrive_in_one_trace_with_the_right_parents(ray_head, tmp_path):
    spec = job_spec("gpt-traced", checkpoint={"uri": str(tmp_path / "kept"), "every_steps": 2})
    spec["training"] |= {"steps": 3}
    spec["pipeline"] = {"stages": 2, "schedule": "auto"}
    spec["resources"] |= {"meshes": 2}
    with receiver() as collector:
        environment = ray_head.environment | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "SLOTLINE_PROFILE_EVERY_S": "0",
        }
        (tmp_path / "server").mkdir()
        with Server(tmp_path / "server", environment) as server:
            answer = server.client.post("/api/v1/jobs", json=spec, headers={"traceparent": TRACE})
            job_id = answer.raise_for_status().json()["id"]
            assert server.wait(job_id)["state"] == "SUCCEEDED"
            spans = collector.wait(_all_there, 120.0)
    ours = {span.span_id: span for span in spans if span.attributes.get("slotline.job") in (None, job_id)}
    assert {span.trace_id for span in ours.values()} == {TRACE.split("-")[1]}
    path = {span.name: _path(span, ours) for span in ours.values()}
    root = ["POST /api/v1/jobs", "job"]
    assert path["wait in the queue"] == root
    assert path["attempt"] == root
    assert path["submit to Ray"] == path["checkpoint: save"] == path["step"] == [*root, "attempt"]
    assert path["plan"] == [*root, "attempt", "POST /api/v1/attempts/{attempt_id}/plan"]
    assert path["step on m1"] == [*root, "attempt", "step"]
    phases = {name for name in path if name.startswith("launch: ")}
    told = ("place", "trace", "profile", "plan", "load", "restore", "warm up", "first step")
    assert {f"launch: {name}" for name in told} <= phases
    attempt = next(span for span in ours.values() if span.name == "attempt")
    steps = [span for span in ours.values() if span.name == "step"]
    assert [span.attributes["slotline.step"] for span in sorted(steps, key=lambda s: s.start_ns)] == [1, 2, 3]
    assert all(attempt.start_ns <= s.start_ns < s.end_ns <= attempt.end_ns + 1e6 for s in steps)


def _all_there(spans):
    """Spans of one report may come in two batches."""
    names = [span.name for span in spans]
    return {"job", "attempt", "checkpoint: save"} <= {*names} and names.count("step on m1") == 3


def _path(span, spans):
    above = []
    while (span := spans.get(span.parent_id)) is not None:
        above.insert(0, span.name)
    return above
