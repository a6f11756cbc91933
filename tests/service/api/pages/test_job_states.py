"""The page of a job as it starts, trains and has ended: events, time left, axes, marks of evaluations, files in storage."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from service.settings.settings import Settings
from tests.benchmarks.screenshots import take_pictures
from tests.service.api.pages.seed import EVALUATIONS, PAGES, STARTING, STEPS, Site, seed_states, seeded_site
from tests.tiers import some_by_day


@dataclass
class States:
    site: Site
    starting: str
    done: str


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[States]:
    folder = tmp_path_factory.mktemp("data")
    with seeded_site(folder) as site:
        seeding = seed_states(Settings(data_dir=folder).sqlalchemy_url, folder / "runs")
        yield States(site, *asyncio.run(seeding))


def open_job(page, states: States, job: str) -> None:
    page.open(f"{states.site.url}/jobs/{job}")
    page.wait("document.querySelector('#events tbody tr')")


def _facts(page) -> dict[str, str]:
    return page.js(
        "Object.fromEntries([...document.querySelectorAll('#facts div')].map((one) => [...one.children].map("
        "(part) => part.textContent)))"
    )


@pytest.mark.slow
def test_events_stand_on_top_while_a_job_starts_and_at_the_end_once_it_trains(states: States, page):
    top = "document.getElementById('events').getBoundingClientRect().top"
    below = f"{top} - document.getElementById('timeline-section').getBoundingClientRect().top"
    open_job(page, states, states.starting)
    assert page.js("document.getElementById('state').textContent") == "STARTING"
    told = page.js("[...document.querySelectorAll('#events td:last-child')].map((one) => one.textContent)")
    assert [one for one in told if one in STARTING] == [*reversed(STARTING)], "newest first"
    assert page.js(below) < 0
    assert 0 < page.js(top) < 900, "in the first window"
    assert page.js("document.querySelector('.charts').getBoundingClientRect().height") == 0, "no empty boxes"
    assert page.js("document.getElementById('why-ask').getBoundingClientRect().height") == 0
    for trained in (states.site.running, states.done):
        open_job(page, states, trained)
        assert page.js(below) > 0
    assert page.errors == []


def test_a_job_that_failed_before_its_first_step_is_not_said_to_start(states: States, page):
    open_job(page, states, states.site.failed)
    assert page.js("document.querySelector('#launch p').textContent").startswith(
        "Waited and started for 2 min"
    )
    open_job(page, states, states.starting)
    assert page.js("document.querySelector('#launch p').textContent").startswith("Starting, ")


@pytest.mark.slow
def test_a_job_that_trains_says_how_long_the_steps_that_are_left_take(states: States, page):
    open_job(page, states, states.site.running)
    job = httpx.get(f"{states.site.url}/api/v1/jobs/{states.site.running}").json()
    left_s = (job["spec"]["training"]["steps"] - STEPS) * job["progress"]["step_s"]
    assert left_s == pytest.approx(3.0) and _facts(page)["Left"] == "3 s"
    open_job(page, states, states.done)
    assert "Left" not in _facts(page) and _facts(page)["Throughput"] == "160 samples/s"


@pytest.mark.slow
def test_axes_have_titles(states: States, page):
    open_job(page, states, states.site.running)
    titles = "[...document.querySelectorAll('.chart')].map((box) => box.plot?.axes.map((axis) => axis.label))"
    assert page.js(titles) == [["step", what] for what in ("loss", "time", "norm", "rate", "accuracy", "f1")]
    drawn = page.js(
        "(() => { const plot = document.getElementById('loss').plot;"
        " return plot.axes.map((axis) => axis.show && axis.labelSize > 0); })()"
    )
    assert drawn == [True, True]


def test_each_evaluation_has_its_mark_however_many_there_are(states: States, page):
    """Looked for beside the line, which is 1.6 pixels wide and level here: at a step with an evaluation, and between two."""
    open_job(page, states, states.done)
    page.wait("document.querySelector('#loss .second')")
    assert len(EVALUATIONS) > 30
    opacity = (
        "(() => { const plot = document.getElementById('loss').plot;"
        " const x = plot.valToPos({step}, 'x', true), y = plot.valToPos(3, 'y', true) - 2 * devicePixelRatio;"
        " return plot.ctx.getImageData(Math.round(x), Math.round(y), 1, 1).data[3]; })()"
    )
    page.js("document.getElementById('loss').plot.setScale('x', {min: 28, max: 38})")
    marks = [page.js(opacity.replace("{step}", str(number))) for number in range(30, 37)]
    between = [page.js(opacity.replace("{step}", str(number + 0.5))) for number in range(30, 37)]
    assert min(marks) > 128 and set(between) == {0}


@some_by_day("name", PAGES, by_day=3)
def test_no_page_scrolls_sideways_on_a_phone(states: States, page, name: str):
    path, drawn = PAGES[name]
    site = states.site
    jobs = {"running": site.running, "failed": site.failed, "starting": states.starting, "done": states.done}
    page.open(f"{site.url}{path.format(**jobs)}", width=400, height=800)
    page.wait(f"document.querySelector({drawn!r})")
    assert page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


@pytest.mark.slow
def test_pictures_are_taken_of_every_page_at_both_widths(tmp_path: Path):
    assert take_pictures(tmp_path) == []
    sizes = {one.name: struct.unpack(">II", one.read_bytes()[16:24]) for one in tmp_path.glob("*.png")}
    assert set(sizes) == {f"{name}-{width}.png" for name in PAGES for width in (1440, 400)}
    for name, (width, height) in sizes.items():
        asked = int(name.removesuffix(".png").rsplit("-", 1)[1])
        assert asked - 20 <= width <= asked and height >= 800, "what a scroll bar takes is missing"
