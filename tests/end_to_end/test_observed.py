"""A real Prometheus beside a real run: every query of the dashboard returns data."""

from __future__ import annotations

import pytest

from tests.dashboards.live import prometheus, wait_for_data
from tests.end_to_end.conftest import job_spec

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]


def test_every_query_of_the_dashboard_has_data_of_a_training_job(server, ray_head, tmp_path):
    spec = job_spec("unet-observed")
    spec["training"] |= {"steps": 100_000}
    job_id = server.submit(spec)
    server.wait(job_id, {"RUNNING"})
    try:
        with prometheus(tmp_path, server.url) as scraper:
            results = wait_for_data(scraper, job_id)
        assert results and all(results.values())
    finally:
        server.client.post(f"/api/v1/jobs/{job_id}/cancel")
    assert server.wait(job_id)["state"] == "CANCELLED"
    ray_head.assert_nothing_held()
