"""What people do on the pages: filter the list, see the cluster, cancel, retry and read logs, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.orchestrator.ray.jobs_api import RayNode, ResourceUse
from tests.service.api.pages import seed
from tests.service.api.pages.seed import Site, job_spec, seeded_site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A store of its own: these tests change jobs."""
    with seeded_site(tmp_path / "data") as made:
        yield made


def choose(page, field: str, value: str) -> None:
    """As a person does: write into a field of the form and leave it."""
    page.js(
        f"(() => {{ const e = document.querySelector('#filter').elements['{field}']; e.value = '{value}';"
        " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


@pytest.mark.slow
def test_projects_are_chosen_where_there_are_some(site: Site, page, tmp_path: Path):
    shown = "getComputedStyle(document.querySelector('#filter').elements.project.closest('label')).display !== 'none'"
    rows = "document.querySelectorAll('#jobs tbody tr').length"
    page.open(f"{site.url}/")
    page.wait(f"{rows} === 3")
    assert page.js(shown) is False and page.js("document.querySelector('.chooser.project')") is None
    member = {"principal": "alice", "role": "submitter"}
    httpx.put(f"{site.url}/api/v1/projects/nlp/members", json=member, timeout=60).raise_for_status()
    body = job_spec("in-nlp").model_dump(mode="json") | {"project": "nlp"}
    job_id = httpx.post(f"{site.url}/api/v1/jobs", json=body, timeout=60).raise_for_status().json()["id"]
    page.open(f"{site.url}/")
    page.wait(f"{rows} === 4")
    assert page.js(shown) is True
    page.screenshot(tmp_path / "projects.png")
    page.js("document.querySelector('#jobs a.chooser.project').click()")
    page.wait(f"{rows} === 1")
    assert page.js("document.querySelector('#jobs tbody tr').dataset.job") == job_id
    assert page.js("location.search") == "?project=nlp"
    choose(page, "project", "default")
    page.wait(f"{rows} === 3")


def state_of(site: Site, job_id: str) -> str:
    return httpx.get(f"{site.url}/api/v1/jobs/{job_id}", timeout=60).json()["state"]


@pytest.mark.slow
def test_the_list_is_filtered_by_queue_owner_and_label_and_its_address_says_so(
    site: Site, page, tmp_path: Path
):
    body = job_spec("labelled").model_dump(mode="json") | {"labels": {"team": "nlp"}}
    labelled = httpx.post(f"{site.url}/api/v1/jobs", json=body, timeout=60).raise_for_status().json()["id"]
    page.open(f"{site.url}/")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 4")
    rows = "document.querySelectorAll('#jobs tbody tr').length"
    page.screenshot(tmp_path / "list.png")
    choose(page, "label", "team=nlp")
    page.wait(f"{rows} === 1")
    assert page.js("document.querySelector('#jobs tbody tr').dataset.job") == labelled
    assert page.js("location.search") == "?label=team%3Dnlp"
    choose(page, "label", "")
    choose(page, "owner", "nobody-of-that-name")
    page.wait(f"{rows} === 0")
    page.open(f"{site.url}/?state=QUEUED&label=team")
    page.wait(f"{rows} === 1")
    assert page.js("document.querySelector('#filter').elements.state.value") == "QUEUED"
    page.click("#filter button[type=reset]")
    page.wait(f"{rows} === 4")
    page.js("document.querySelector('#jobs a.chooser.label').click()")
    page.wait(f"{rows} === 1")
    assert page.js("[...document.querySelectorAll('#jobs thead th')].map(e => e.textContent)")[5:7] == [
        "Owner",
        "Queue",
    ]
    assert page.errors == []


def test_a_filter_that_the_server_refuses_is_told(site: Site, page):
    page.open(f"{site.url}/")
    choose(page, "label", "=x")
    page.wait("document.getElementById('connection').textContent.includes('is no label')")
    choose(page, "label", "")
    page.wait("document.getElementById('connection').textContent === ''")


@pytest.mark.slow
def test_the_cluster_page_shows_queues_nodes_meshes_and_why_jobs_wait(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/cluster")
    page.wait("document.querySelector('#waiting tbody td small')")
    page.wait("document.querySelectorAll('#nodes tbody tr').length === 1")
    queue = page.js("document.querySelector('tr[data-queue=default]').innerText").split("\t")
    assert queue == ["default", "3, no quota", "1", "1"]
    waiting = page.js("document.querySelector('#waiting tbody tr').innerText")
    listed = httpx.get(f"{site.url}/api/v1/queues", timeout=60).json()["items"][0]["waiting"][0]
    assert "patient" in waiting and listed["message"] in waiting and listed["reason"] in waiting
    mesh = page.js("document.querySelector('#meshes tbody tr').innerText").split()
    assert mesh == ["gpt", site.running, "1", "default", "cpu", "3", "1"]
    assert "127.0.0.1" in page.js("document.querySelector('#nodes tbody tr').textContent")
    assert page.js("document.getElementById('away').textContent") == "The cluster has no accelerator."
    page.screenshot(tmp_path / "cluster.png")
    page.open(f"{site.url}/cluster", width=390, dark=True)
    page.wait("document.querySelector('#waiting tbody tr')")
    assert page.js("document.documentElement.scrollWidth <= innerWidth"), "tables scroll, the page does not"
    page.screenshot(tmp_path / "cluster-narrow.png")
    assert page.errors == []


@pytest.mark.slow
def test_of_a_long_queue_the_first_are_shown_and_all_are_counted(
    tmp_path: Path, page, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.jobs.clusters._LISTED_WAITING", 2)
    with seeded_site(tmp_path / "data") as site:
        for number in range(3):
            body = job_spec(f"more-{number}").model_dump(mode="json")
            httpx.post(f"{site.url}/api/v1/jobs", json=body, timeout=60).raise_for_status()
        page.open(f"{site.url}/cluster")
        page.wait("document.getElementById('more-wait').innerText.startsWith('and 2 more; in all: ')")
        assert page.js("document.querySelectorAll('#waiting tbody tr').length") == 2
        reasons = httpx.get(f"{site.url}/api/v1/queues", timeout=60).json()["items"][0]["reasons"]
        assert sum(one["jobs"] for one in reasons) == 4
        page.screenshot(tmp_path / "long-queue.png")
        assert page.errors == []


@pytest.mark.slow
def test_a_quota_and_what_is_free_are_shown_as_they_change(
    tmp_path: Path, page, monkeypatch: pytest.MonkeyPatch
):
    async def nodes(_: object) -> list[RayNode]:
        return [
            RayNode("node-1", "10.0.0.7", {"slotline_worker": 3.0, "memory": 2.0**31, "node:10.0.0.7": 1.0})
        ]

    async def resources_in_use(_: object) -> list[ResourceUse]:
        return []

    monkeypatch.setattr(seed.NoCluster, "nodes", nodes)
    monkeypatch.setattr(seed.NoCluster, "resources_in_use", resources_in_use)
    monkeypatch.setenv("SLOTLINE_QUEUES", '{"default": 8, "small": 0}')
    with seeded_site(tmp_path / "data") as site:
        page.open(f"{site.url}/cluster")
        page.wait("document.querySelector('[data-device=cpu]')")
        told = page.js("document.querySelector('[data-device=cpu]').innerText")
        assert "0 of 3 free, 3 in use here" in told
        assert "3 of 8" in page.js("document.querySelector('tr[data-queue=default]').innerText")
        assert page.js("document.querySelector('tr[data-queue=default] progress').position") == 3 / 8
        offers = page.js("document.querySelector('#nodes tbody tr').textContent")
        assert "3 slotline_worker" in offers and "2 GiB memory" in offers and "node:" not in offers
        httpx.post(f"{site.url}/api/v1/jobs/{site.waiting}/cancel", timeout=60).raise_for_status()
        page.wait("!document.getElementById('none-waits').hidden")
    assert [error for error in page.errors if "ERR_CONNECTION" not in error] == []


@pytest.mark.slow
def test_a_job_is_cancelled_after_a_second_click_and_retried(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.waiting}")
    page.wait("!document.getElementById('cancel').hidden")
    assert page.js("document.getElementById('retry').hidden")
    page.screenshot(tmp_path / "buttons.png", whole=False)
    page.click("#cancel")
    page.wait("document.getElementById('cancel').textContent === 'Really cancel it?'")
    assert state_of(site, site.waiting) != "CANCELLED", "one click asks"
    page.click("#cancel")
    page.wait("document.getElementById('state').textContent === 'CANCELLED'")
    assert state_of(site, site.waiting) == "CANCELLED" and page.js("document.getElementById('cancel').hidden")
    page.wait("!document.getElementById('retry').hidden")
    page.click("#retry")
    page.wait("document.getElementById('state').textContent === 'QUEUED'")
    assert state_of(site, site.waiting) == "QUEUED"
    assert page.errors == []


def test_a_refused_action_says_why(site: Site, page):
    page.open(f"{site.url}/jobs/{site.failed}")
    page.wait("!document.getElementById('retry').hidden")
    httpx.post(f"{site.url}/api/v1/jobs/{site.failed}/retry", timeout=60).raise_for_status()
    page.click("#retry")
    page.wait("document.getElementById('action-note').textContent.includes('cannot become QUEUED')")


def test_logs_are_shown_searched_and_never_read_as_markup(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.failed}")
    page.wait("document.getElementById('state').textContent === 'FAILED'")
    assert page.js("document.getElementById('logs').hidden")
    page.click("#show-logs")
    page.wait("document.getElementById('log-lines').textContent !== ''")
    shown = page.js("document.getElementById('log-lines').textContent")
    assert shown.split("\n") == ["building <i>nope</i>", "Traceback: no module"]
    page.screenshot(tmp_path / "logs.png", whole=False)
    page.js(
        "(() => { const f = document.getElementById('log-filter'); f.elements.search.value = 'TRACE';"
        " f.elements.search.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    page.wait("document.getElementById('log-lines').textContent === 'Traceback: no module'")
    page.click("#show-logs")
    page.wait("document.getElementById('logs').hidden")
    assert page.errors == []


@pytest.mark.slow
def test_actions_work_where_the_browser_signs_in_and_not_for_another_site(tmp_path: Path, page):
    with seeded_site(tmp_path / "data", api_token="letmein") as site:
        page.open(f"{site.url.replace('http://', 'http://me:letmein@')}/jobs/{site.waiting}")
        page.wait("!document.getElementById('cancel').hidden")
        page.click("#cancel")
        page.click("#cancel")
        page.wait("document.getElementById('state').textContent === 'CANCELLED'")
        assert page.errors == []
        # what another site's page would have the browser send: the password, and where it comes from
        path = f"{site.url}/api/v1/jobs/{site.running}/cancel"
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {}):
            refused = httpx.post(path, auth=("me", "letmein"), headers=headers, timeout=60)
            assert refused.status_code == 401, headers
