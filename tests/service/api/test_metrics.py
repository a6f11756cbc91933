"""`/metrics` of the control plane, read back with Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.api.metrics import exposition
from service.job_states import JobState
from service.store.counts import Counts
from tests.service.api.pages.seed import seeded_site


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Response]:
    with seeded_site(tmp_path_factory.mktemp("data")) as site:
        yield httpx.get(f"{site.url}/metrics", timeout=30).raise_for_status()


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
    counts = Counts(jobs_by_state={"RUNNING": 2}, queue_depth={"default": 0}, attempts_by_cause={"user": 5})
    for _ in range(2):
        found = samples(exposition(counts).decode())
        assert found["slotline_jobs", "RUNNING"] == 2
        assert found["slotline_attempts_total", "user"] == 5
