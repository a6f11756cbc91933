"""The pages in a real browser, served by the real application over a seeded store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from tests.service.api.pages.seed import MICROBATCHES, SLOWER, STAGES, STEPS, Site, seeded_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with seeded_site(tmp_path_factory.mktemp("data")) as made:
        yield made


def test_the_list_shows_each_job_with_its_state_and_why_it_waits(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/")
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 3")
    page.wait(f"document.querySelector('tr[data-job={site.waiting}] td:nth-child(2) small')")
    states_shown = page.js("[...document.querySelectorAll('#jobs .state')].map(e => e.textContent)")
    assert states_shown == ["QUEUED", "RUNNING", "FAILED"], "newest first"
    text = page.js(f"document.querySelector('tr[data-job={site.failed}]').textContent")
    assert "MODEL_BUILD_FAILED: <b>no module named 'nope'</b>" in text, "text of a job is never markup"
    page.screenshot(tmp_path / "list.png")
    assert page.errors == []


def test_the_filter_asks_the_server_for_one_state(site: Site, page):
    page.open(f"{site.url}/")
    page.js(
        "(() => { const s = document.querySelector('#filter select'); s.value = 'FAILED';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 1")
    assert page.js("document.querySelector('#jobs .state').textContent") == "FAILED"
    assert page.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_job_page_draws_every_slot_planned_above_measured(site: Site, page, dark: bool, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.running}", dark=dark)
    page.wait("document.querySelector('svg[data-panel=measured] rect.slot')")
    count = "document.querySelectorAll('svg[data-panel={}] rect.slot').length"
    transfers = 2 * 2 * (STAGES - 1) * MICROBATCHES
    expected = 2 * STAGES * MICROBATCHES + transfers
    assert len(site.plan.slots) == expected
    assert page.js(count.format("planned")) == expected
    assert page.js(count.format("measured")) == expected + STAGES
    tops = page.js(
        "['planned', 'measured'].map(p => document.querySelector(`svg[data-panel=${p}]`).getBoundingClientRect().top)"
    )
    assert tops[0] < tops[1]
    bubble = f"bubble {100 * site.plan.bubble_ratio:.1f} %"
    notes = page.js("[...document.querySelectorAll('#timeline h3')].map(e => e.textContent)")
    assert bubble in notes[0], "the page's own sum agrees with the plan's"
    assert "step 40" in notes[1] and "clocks agree to 20 µs" in notes[1]
    assert page.js("document.getElementById('state').textContent") == "RUNNING"
    assert page.js("document.querySelector('#loss .curve').dataset.points") == str(STEPS)
    evaluated = page.js("[...document.querySelectorAll('.charts .second')].map((one) => one.dataset.points)")
    assert "3" in evaluated
    assert "loss 1.5 after step 20" in page.js("document.querySelector('#facts').textContent")
    told = page.js("document.querySelector('#facts').textContent")
    assert "3 TFLOP/s of the model" in told and "MFU37.5 %" in told
    assert page.js("document.querySelector('#metrics [data-metric=f1] .second').dataset.points") == "3"
    accuracy = "#metrics [data-metric=accuracy] .curve"
    assert page.js(f"document.querySelector('{accuracy}').dataset.points") == str(STEPS)
    page.screenshot(tmp_path / "job.png")
    assert page.errors == []


def test_both_timelines_share_one_scale_also_when_zoomed(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelector('svg[data-panel=measured] rect.slot')")
    width = (
        "[...document.querySelectorAll('svg[data-panel={} ] rect.slot-B')]"
        ".map(e => Number(e.getAttribute('width'))).sort((a, b) => a - b).at(-1) + 0.5"
    )
    whole = page.js(width.format("planned")), page.js(width.format("measured"))
    assert whole[1] / whole[0] == pytest.approx(SLOWER, rel=0.01)
    page.click("[data-zoom=in]")
    zoomed = page.js(width.format("planned")), page.js(width.format("measured"))
    assert zoomed[0] / whole[0] == pytest.approx(1.6, rel=0.02)
    assert zoomed[1] / zoomed[0] == pytest.approx(SLOWER, rel=0.01)
    page.js("document.getElementById('timeline').dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
    assert page.js(width.format("planned")) == pytest.approx(whole[0])
    assert page.errors == []


def test_gaps_carry_their_reason_and_hovering_tells_more(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelector('svg[data-panel=planned] rect.gap')")
    reasons = page.js(
        "[...new Set([...document.querySelectorAll('rect.gap')].map(e => e.dataset.reason))].sort()"
    )
    assert reasons == ["done", "exposed transfer", "waits downstream", "waits upstream"]
    page.hover("svg[data-panel=planned] rect.gap[data-reason='waits upstream']")
    tip = page.js("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
    assert tip.startswith(
        "waits upstream: 2 ms\nmesh1 idle from 0 s to 2 ms\nstage1 F0 needs stage0 F0 of mesh0"
    )
    page.hover("svg[data-panel=measured] rect.slot-SEND_F")
    tip = page.js("document.getElementById('tip').textContent")
    assert tip.startswith(
        "stage0 SEND_F0\nto stage1 on mesh1\nmesh0, lane send:mesh1\n2.5 ms to 3.75 ms: 1.25 ms"
    )
    ends = page.js("[...document.querySelectorAll('rect.marked')].map(e => e.getAttribute('class'))")
    assert ends == ["slot slot-SEND_F marked", "slot slot-RECV_F marked"], "both ends of the transfer"
    header = page.js("[...document.querySelectorAll('#gaps th[scope=col]')].map(e => e.textContent)")
    assert header == ["Mesh", "waits upstream", "waits downstream", "exposed transfer", "done"]
    assert page.errors == []


def test_planned_and_measured_peaks_of_memory_stand_beside_each_other(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelectorAll('#memory tbody tr').length === 3")
    rows = page.js(
        "[...document.querySelectorAll('#memory tbody tr')].map(r => [...r.children].map(e => e.textContent))"
    )
    planned = [f"{mesh.peak_activation_bytes} B" for mesh in site.plan.meshes]
    assert rows == [
        ["mesh0", planned[0], "3 MiB", "–", "–"],
        ["mesh1", planned[1], "1.5 KiB", "–", "stage1"],
        ["mesh2", planned[2], "–", "–", "–"],
    ]
    assert page.errors == []


def test_chosen_numbers_and_what_comes_behind_the_makespan_are_shown(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelectorAll('#update tbody tr').length === 3")
    rows = page.js(
        "[...document.querySelectorAll('#update tbody tr')].map(r => [...r.children].map(e => e.textContent))"
    )
    assert rows == [
        ["mesh0", "0 s", "–", "500 µs", "2 ms"],
        ["mesh1", "1 ms", "–", "500 µs", "2 ms"],
        ["mesh2", "2 ms", "–", "500 µs", "2 ms"],
    ]
    page.wait("document.getElementById('facts').textContent.includes('Planned step')")
    shown = page.js("document.getElementById('facts').textContent")
    assert f"{STAGES} stages (chosen), {STAGES} meshes, {MICROBATCHES} microbatches (chosen)" in shown
    page.open(f"{site.url}/jobs/{site.waiting}")
    page.wait("document.getElementById('facts').textContent.includes('microbatches')")
    assert "stages to be chosen" in page.js("document.getElementById('facts').textContent")
    assert page.errors == []


def test_a_profiled_step_can_be_chosen_and_downloaded(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelectorAll('#step option').length === 3")
    page.wait("document.querySelector('#timeline h3 + svg + h3')?.textContent.includes('step 40')")
    page.js(
        "(() => { const s = document.getElementById('step'); s.value = '20';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    page.wait("document.querySelector('#timeline h3 + svg + h3').textContent.includes('step 20')")
    trace = json.loads(page.download("#chrome", tmp_path, f"{site.running}-step-20.json"))
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) >= 2 * len(site.plan.slots)
    rows = page.download("#csv", tmp_path, f"{site.running}-step-20.csv").splitlines()
    assert rows[0].startswith("panel,mesh,lane,action")
    assert len(rows) == 1 + 2 * len(site.plan.slots) + STAGES
    steps = page.download("#steps-csv", tmp_path, f"{site.running}-steps.csv").splitlines()
    assert len(steps) == 1 + STEPS
    assert page.errors == []


def test_the_page_says_why_the_chosen_step_takes_as_long_as_it_does(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelectorAll('#step option').length === 3")
    page.js("document.getElementById('why-ask').click()")
    page.wait("document.querySelectorAll('#why-causes tbody tr').length > 0")
    verdict = page.js("document.getElementById('why-verdict').textContent")
    assert verdict.startswith("Step 40 of attempt") and "over its plan" in verdict
    kinds = page.js(
        "[...document.querySelectorAll('#why-causes tbody tr')].map(r => r.children[0].textContent)"
    )
    assert "slow computing" in kinds, "all meshes are slower alike"
    assert page.js("document.querySelectorAll('#why-changes tbody tr').length") > 0
    assert page.errors == []


def test_a_job_without_plan_or_steps_shows_its_state_and_no_error(site: Site, page):
    for job in (site.waiting, site.failed):
        page.open(f"{site.url}/jobs/{job}")
        assert page.js("document.querySelectorAll('rect.slot').length") == 0
        assert page.js("document.getElementById('timeline-note').hidden") is False
        shown = "[...document.querySelectorAll('.links a')].filter(a => getComputedStyle(a).visibility === 'visible')"
        assert page.js(f"{shown}.length") == 0, "nothing to download"
    assert page.js("document.getElementById('reason').textContent").startswith("MODEL_BUILD_FAILED")
    assert page.js("document.querySelectorAll('#attempts tbody tr').length") == 1
    assert page.errors == []


@pytest.mark.parametrize("job_id", ["job-nowhere", "no%20id%00", "%3Cb%3E"])
def test_a_job_that_does_not_exist_is_named_as_missing(site: Site, page, job_id: str):
    assert httpx.get(f"{site.url}/jobs/{job_id}", timeout=30).status_code == 404
    if "%00" in job_id:
        return  # no browser asks for it
    page.open(f"{site.url}/jobs/{job_id}")
    assert page.js("document.querySelector('h1').textContent") == "No such job"
    assert unquote(job_id) in page.js("document.querySelector('main p').textContent")
    assert page.js("document.querySelector('main p a').getAttribute('href')") == "/"


def test_pages_forbid_foreign_scripts_and_serve_only_their_own_files(site: Site):
    answer = httpx.get(f"{site.url}/", timeout=60)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("<!doctype", "").replace("http-equiv", ""), (
        "no address of another host"
    )
    assert httpx.get(f"{site.url}/static/style.css", timeout=60).status_code == 200
    for name in ("router.py", "..%2frouter.py", "nothing.js"):
        assert httpx.get(f"{site.url}/static/{name}", timeout=60).status_code == 404


def test_a_server_with_tokens_shows_its_pages_to_a_browser_that_signs_in(page, tmp_path: Path):
    """The browser sends the token as a password (HTTP Basic), with scripts and calls alike."""
    with seeded_site(tmp_path, api_token="letmein") as site:
        assert httpx.get(f"{site.url}/", timeout=60).status_code == 401
        signed_in = site.url.replace("http://", "http://me:letmein@")
        page.open(f"{signed_in}/jobs/{site.running}")
        page.wait("document.querySelector('svg[data-panel=measured] rect.slot')")
        page.download("#chrome", tmp_path, f"{site.running}-step-40.json")
        assert page.errors == []
