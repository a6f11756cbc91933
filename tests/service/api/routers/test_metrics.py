"""`/metrics` of the control plane, read back with Prometheus's own parser."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.api import metrics
from service.api.metrics import exposition
from service.jobs.service import SharedReads
from service.settings.settings import Settings
from service.spec.states import JobState
from service.store.queues import ControlPlaneCounts
from tests.polling import until
from tests.service.api.pages.seed import seeded_site


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Response]:
    with seeded_site(tmp_path_factory.mktemp("data")) as site:

        def of_a_leader() -> httpx.Response | None:
            answer = httpx.get(f"{site.url}/metrics", timeout=30).raise_for_status()
            return answer if samples(answer.text)["slotline_orchestrator_leads", ""] else None

        yield until(of_a_leader, "the control plane takes the lead after its start", every_s=0.1)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Values by (name, the only label's value or "")."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert not {"step", "microbatch"} & sample.labels.keys(), f"{sample}: neither belongs here"
            assert "job" not in sample.labels or family.type == "gauge", f"{sample} would go, but not add up"
            if len(sample.labels) < 2:
                found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def test_jobs_are_counted_by_state_and_every_state_is_there(scraped: httpx.Response):
    found = samples(scraped.text)
    counted = {state: found["slotline_jobs", state] for state in JobState}
    assert {state for state, number in counted.items() if number} == {"RUNNING", "QUEUED", "FAILED"}
    assert sum(counted.values()) == 3


def test_the_queue_and_the_ended_attempts_are_counted(scraped: httpx.Response):
    found = samples(scraped.text)
    assert found["slotline_queue_depth", "default"] == 1
    assert found["slotline_attempts_total", "user"] == 1
    assert found["slotline_attempts_total", "infrastructure"] == 0


def test_the_process_shows_its_own_memory(scraped: httpx.Response):
    assert samples(scraped.text)["process_resident_memory_bytes", ""] > 1e6
    assert scraped.headers["content-type"].startswith("text/plain")


def test_two_scrapes_of_one_process_do_not_add_up():
    counts = ControlPlaneCounts(
        jobs_by_state={"RUNNING": 2}, queue_depth={"default": 0}, attempts_by_cause={"user": 5}
    )
    for _ in range(2):
        found = samples(exposition(counts).decode())
        assert found["slotline_jobs", "RUNNING"] == 2
        assert found["slotline_attempts_total", "user"] == 5


def test_the_process_tells_its_address_its_lag_and_its_planning_pool(scraped: httpx.Response):
    found = samples(scraped.text)
    assert found["slotline_control_plane_info", Settings(port=0).url] == 1
    assert 0 <= found["slotline_orchestrator_lag_seconds", ""] < 60
    assert found["slotline_orchestrator_leads", ""] == 1
    assert found["slotline_lease_left_seconds", ""] <= 10
    assert (found["slotline_planning_plans", "running"], found["slotline_planning_plans", "waiting"]) == (
        0,
        0,
    )
    assert found["slotline_planning_processes", ""] == 2, "one, and one more for drivers"
    assert found["slotline_orchestrator_round_seconds_count", ""] > 0


def test_statements_are_timed_by_what_they_do(scraped: httpx.Response):
    found = samples(scraped.text)
    for operation in ("SELECT", "INSERT", "BEGIN"):
        assert found["slotline_database_seconds_count", operation] > 0
    assert found["slotline_database_seconds_sum", "SELECT"] > 0


@pytest.mark.slow
def test_answers_are_timed_by_the_template_of_their_route(tmp_path):
    with seeded_site(tmp_path) as site:
        before = answered(site.url)
        for path in (f"/api/v1/jobs/{site.running}", f"/api/v1/jobs/{site.failed}", "/nowhere", "/nowhere/2"):
            httpx.get(f"{site.url}{path}", timeout=30)
        httpx.post(f"{site.url}/api/v1/jobs", json={"name": "nothing"}, timeout=30)
        after = answered(site.url)
    new = {key: number - before.get(key, 0) for key, number in after.items() if number > before.get(key, 0)}
    new.pop(("GET", "/metrics", "2xx"))
    assert new == {
        ("GET", "/api/v1/jobs/{job_id}", "2xx"): 2,
        ("GET", "none", "4xx"): 2,
        ("POST", "/api/v1/jobs", "4xx"): 1,
    }


def answered(url: str) -> dict[tuple[str, str, str], float]:
    """How many answers began, by method, route and status."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        (s.labels["method"], s.labels["route"], s.labels["status"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.name == "slotline_http_request_seconds_count"
    }


async def test_scrapes_share_their_text_until_something_changes(monkeypatch):
    now, changes, made = [0.0], [0], []

    async def make(service, *, whole):
        made.append(now[0])
        return b"%s text %d" % (b"whole" if whole else b"open", len(made))

    async def for_ever(seconds):
        await asyncio.Event().wait()

    monkeypatch.setattr(metrics, "_scrape", make)
    reads = SharedReads(changes=lambda: changes[0], clock=lambda: now[0], sleep=for_ever)
    service = SimpleNamespace(shared_reads=reads)
    assert [await metrics.scrape(service, whole=True) for _ in range(3)] == [b"whole text 1"] * 3
    changes[0] += 1
    assert await metrics.scrape(service, whole=True) == b"whole text 2"
    now[0] += 10.0
    assert await metrics.scrape(service, whole=True) == b"whole text 3"
    assert await metrics.scrape(service, whole=False) == b"open text 4", "nobody gets another's"
    await reads.close()
