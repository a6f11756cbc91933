"""The pages in a real browser, served by the real application over a seeded store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest

from service.cli.job_file import spec_differences
from service.settings.settings import Settings
from tests.service.api.pages.seed import LAUNCH_S, MICROBATCHES, SLOWER, STAGES, STEPS, Site, seeded_site
from tests.service.conftest import job_body
from tests.service.serving import serve


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


@pytest.mark.slow
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
    rate = page.js("document.querySelector('#rate').getAttribute('aria-label')")
    assert rate == "rate: learning rate from 0.001 at step 1 to 0.04 at step 40"
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


@pytest.mark.slow
def test_the_page_says_how_long_the_first_step_was_waited_for_and_in_which_phases(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("!document.getElementById('launch').hidden")
    told = page.js("document.querySelector('#launch p').textContent")
    assert told == "First step after 67.8 s: queue 60 s, place 6 s, trace 1.5 s, first step 250 ms"
    shares = page.js(
        "[...document.querySelectorAll('#launch .bar span')].map((one) => one.getBoundingClientRect().width)"
    )
    lengths = [60.0, 0.0, 0.0, *LAUNCH_S.values()]
    assert shares == pytest.approx([sum(shares) * took / sum(lengths) for took in lengths], abs=0.1)
    page.open(f"{site.url}/jobs/{site.waiting}")
    page.wait("document.getElementById('state').textContent === 'QUEUED'")
    assert page.js("document.getElementById('launch').hidden"), "it has not begun to start"
    assert page.errors == []


def test_curves_are_zoomed_smoothed_and_logarithmic_as_a_reader_asks(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelector('#loss .curve')")
    shown = "(() => { const x = document.getElementById('loss').plot.scales.x; return [x.min, x.max]; })()"
    assert page.js(shown) == [0, STEPS], "an evaluation came before the first step"
    page.js("document.getElementById('loss').plot.setScale('x', {min: 10, max: 20})")
    page.js("dispatchEvent(new Event('resize'))")
    assert page.js(shown) == [10, 20], "what is read again keeps the steps that a reader chose"
    names = "[...document.querySelectorAll('#loss .u-series th')].map((one) => one.textContent)"
    assert page.js(names) == ["step", "loss", "loss, evaluated"]
    page.click("#smoothed")
    assert page.js(names) == ["step", "loss", "loss, evaluated", "loss, smoothed"]
    raw, smooth = page.js(
        "[1, 3].map((k) => document.getElementById('loss').plot.data[k].filter((y) => y !== null))"
    )
    total, weight, expected = 0.0, 0.0, []
    for value in raw:
        total, weight = 0.9 * total + 0.1 * value, 0.9 * weight + 0.1
        expected.append(total / weight)
    assert smooth == pytest.approx(expected)
    page.click("#logarithmic")
    assert page.js("document.getElementById('loss').plot.scales.y.distr") == 3
    assert page.js("document.querySelector('#norm .curve').dataset.points") == str(STEPS)
    page.screenshot(tmp_path / "curves.png")
    assert page.errors == []


def test_two_jobs_stand_beside_each_other_with_what_they_differ_in(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/compare?first={site.running}&second={site.waiting}")
    page.wait("document.querySelector('#differences tbody tr')")
    points = "[...document.querySelectorAll('#loss .curve')].map((one) => one.dataset.points)"
    assert page.js(points) == [str(STEPS), "0"]
    assert page.js(points.replace("#loss", "#rate")) == [str(STEPS), "0"]
    specs = [
        httpx.get(f"{site.url}/api/v1/jobs/{one}").json()["spec"] for one in (site.running, site.waiting)
    ]
    expected = [[path, first or "–", second or "–"] for path, first, second in spec_differences(*specs)]
    rows = page.js(
        "[...document.querySelectorAll('#differences tr')].slice(1).map(r => [...r.children].map(e => e.textContent))"
    )
    loose = [[cell.replace(" ", "") for cell in row] for row in rows]
    assert loose == [[cell.replace(" ", "") for cell in row] for row in expected] and rows
    page.click("[name=seconds]")
    page.wait("document.querySelector('#loss .u-legend th').textContent === 'training, s'")
    last_s = page.js("document.getElementById('loss').plot.data[0].at(-1)")
    steps = httpx.get(f"{site.url}/api/v1/jobs/{site.running}/steps?limit=1000").json()["items"]
    assert last_s == pytest.approx(sum(step["step_s"] for step in steps))
    page.screenshot(tmp_path / "compare.png")
    assert page.errors == []


def test_a_job_is_never_compared_with_itself(site: Site, page):
    page.open(f"{site.url}/compare")
    chosen = "['first', 'second'].map((name) => document.getElementById('pair').elements[name].value)"
    first, second = page.js(chosen)
    newest = [job["id"] for job in httpx.get(f"{site.url}/api/v1/jobs?limit=2").json()["items"]]
    assert [second, first] == newest
    page.open(f"{site.url}/compare?first={site.running}&second={site.running}")
    assert page.js("document.getElementById('note').textContent") == "Choose two different jobs."
    assert page.js("document.getElementById('both').hidden")
    assert page.errors == []


def test_one_job_alone_is_not_compared(tmp_path: Path, page):
    with serve(Settings(data_dir=tmp_path)) as served:
        httpx.post(f"{served.url}/api/v1/jobs", json=job_body()).raise_for_status()
        page.open(f"{served.url}/compare")
        assert page.js("document.getElementById('note').textContent") == "There are no two jobs to compare."
        assert page.js("[...document.forms.pair.elements.second.options].length") == 2
        assert page.js("document.forms.pair.elements.second.value") == ""
        assert page.js("document.getElementById('both').hidden") and page.errors == []


def test_the_page_has_the_specification_and_what_lies_in_storage(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.getElementById('spec').textContent")
    spec = json.loads(page.js("document.getElementById('spec').textContent"))
    assert spec == httpx.get(f"{site.url}/api/v1/jobs/{site.running}").json()["spec"]
    page.js("document.getElementById('files').open = true")
    page.wait("document.getElementById('files-note').textContent")
    assert "checkpoint" in page.js("document.getElementById('files-note').textContent")
    assert "samples/s" in page.js("document.getElementById('facts').textContent")


def test_an_address_where_nothing_is_answers_a_page_to_a_browser_and_a_problem_to_others(site: Site, page):
    page.open(f"{site.url}/nowhere<b>")
    told = page.js("document.querySelector('main').textContent")
    assert "There is no page at /nowhere" in told and "list of jobs" in told
    browser = {"Accept": "text/html,application/xhtml+xml"}
    assert httpx.get(f"{site.url}/nowhere", headers=browser).status_code == 404
    for path, headers in (("/nowhere", {}), ("/api/v1/nowhere", browser)):
        answer = httpx.get(f"{site.url}{path}", headers=headers)
        assert answer.status_code == 404 and answer.headers["content-type"] == "application/problem+json"


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
    planned_s = site.plan.makespan_s
    assert page.js("document.getElementById('makespans').textContent") == (
        f"Makespan: first plan {1e3 * planned_s:.3g} ms, calibrated {1e3 * SLOWER * planned_s:.3g} ms, "
        "measured 40 ms (costs of 1 profiled step)"
    )
    page.open(f"{site.url}/jobs/{site.waiting}")
    page.wait("document.getElementById('facts').textContent.includes('microbatches')")
    assert page.js("document.getElementById('makespans').hidden")
    assert "stages to be chosen" in page.js("document.getElementById('facts').textContent")
    assert page.errors == []


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_with_tokens_shows_its_pages_to_a_browser_that_signs_in(page, tmp_path: Path):
    """The browser sends the token as a password (HTTP Basic), with scripts and calls alike."""
    with seeded_site(tmp_path, api_token="letmein") as site:
        assert httpx.get(f"{site.url}/", timeout=60).status_code == 401
        signed_in = site.url.replace("http://", "http://me:letmein@")
        page.open(f"{signed_in}/jobs/{site.running}")
        page.wait("document.querySelector('svg[data-panel=measured] rect.slot')")
        page.download("#chrome", tmp_path, f"{site.running}-step-40.json")
        assert page.errors == []
