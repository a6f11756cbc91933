"""From the page of a job to its dashboards in Grafana."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import parse_qs, urlsplit

import pytest

from service.api.pages.router import _templates, dashboard_links
from service.settings.settings import Settings
from service.store.tables import JobRow


def links(job: JobRow) -> dict[str, str]:
    return dashboard_links("https://grafana.example.org/g", job, at=1_790_000_000.4)


def test_without_grafana_there_are_no_links():
    assert dashboard_links(None, JobRow(id="job-1", name="gpt"), at=0.0) == {}
    page = _templates.get_template("job.html").render(job_id="job-1", dashboards={})
    assert "Grafana" not in page


@pytest.mark.parametrize(("step_s", "axis_ms"), [(0.025, 25_000), (None, 60_000), (720.0, 720_000_000)])
def test_the_timeline_opens_at_now_and_on_the_whole_step(step_s: float | None, axis_ms: int):
    """A millisecond of the axis is a microsecond; Grafana takes 24 characters for nothing else than a time."""
    address = urlsplit(links(JobRow(id="job-1", name="a & b", step_s=step_s))["Timeline in Grafana"])
    assert address.path == "/g/d/slotline-timeline"
    asked = {name: values[0] for name, values in parse_qs(address.query).items()}
    assert (asked["var-name"], asked["var-job"], asked["var-at"]) == ("a & b", "job-1", "1790000000")
    assert len(asked["from"]) == len(asked["to"]) == 24
    begin, end = (datetime.fromisoformat(asked[edge]).timestamp() for edge in ("from", "to"))
    assert (begin, end) == (0, axis_ms / 1000)


def test_the_page_has_the_links_and_names_are_no_markup():
    found = links(JobRow(id="job-1", name="<b>"))
    page = _templates.get_template("job.html").render(job_id="job-1", dashboards=found)
    assert 'href="https://grafana.example.org/g/d/slotline-job?var-name=%3Cb%3E&amp;var-job=job-1"' in page


def test_the_address_of_grafana_is_an_address():
    assert Settings(grafana_url="https://g.example.org/").grafana_url == "https://g.example.org"
    with pytest.raises(ValueError, match="http"):
        Settings(grafana_url="g.example.org")
