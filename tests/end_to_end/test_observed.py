"""A real Prometheus beside a real run: every query of the dashboards returns data."""

from __future__ import annotations

import pytest

from tests.dashboards.live import Server, prometheus, wait_for_data
from tests.end_to_end.conftest import TWO, job_spec
from tests.polling import until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NAME = "gpt-observed"
NOT_OF_THIS_RUN = {
    "GPU utilisation": "no GPU and no DCGM exporter here; test_dashboard.py has its names",
    "GPU memory in use": "the same",
    "GPU utilisation of workers": "no GPU here",
    "GPU memory of workers": "the same",
    "MFU": "nobody knows the peak of a processor",
    "Metrics of the loss": "this loss returns nothing beside itself; test_dashboard.py has some",
    "Metrics of the evaluation": "the same",
    "Interruptions": "nothing interrupts it",
}


def test_every_query_of_the_dashboards_has_data_of_a_training_job(server, ray_head, tmp_path):
    spec = job_spec(NAME, checkpoint={"uri": str(tmp_path / "kept"), "every_steps": 20}, resources=TWO)
    spec["pipeline"] = {"stages": 2, "schedule": "auto"}
    spec["evaluation"] = {"every_steps": 50, "steps": 1, "data": spec["data"]}
    spec["training"] |= {"steps": 100_000}
    with prometheus(tmp_path, server.url) as scraper:
        _wait_for_a_scrape(scraper)  # what grows from 0 must grow before its eyes
        job_id = server.submit(spec)
        server.wait(job_id, {"RUNNING"}, limit_s=300)
        try:
            results = wait_for_data(scraper, NAME, job_id, 300.0, without=NOT_OF_THIS_RUN)
            assert len(results) > 70 and all(results.values())
            (step,) = results["timeline: Step/A"]
            assert int(step["value"][1]) > 0
            (nodes,) = {s["metric"]["nodes"] for s in results["job: Nodes of meshes/A"]}
            assert nodes, "all meshes run on the one node there is"
        finally:
            server.client.post(f"/api/v1/jobs/{job_id}/cancel")
    assert server.wait(job_id)["state"] == "CANCELLED"
    ray_head.assert_nothing_held()


def _wait_for_a_scrape(scraper: Server) -> None:
    until(
        lambda: scraper.get("query", query="slotline_queue_wait_seconds_count")["result"],
        scraper.targets,
        limit_s=100,
        every_s=0.2,
    )
