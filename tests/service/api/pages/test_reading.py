"""What a reader would misread on the pages: an ended job's choices, meshes of a list, bars in the dark, long reasons."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import AttemptState, JobState
from service.store import transitions
from service.store.attempts import attempts_of
from service.store.database import Database, utc_now
from service.store.jobs import find_job
from tests.service.api.pages.seed import Site, seeded_site

WORD = "Ünlesbar-" * 30 + "<img src=x onerror=alert(1)> مرحبا \u202eABC 😀 "
REASON = f"MODEL_BUILD_FAILED {WORD * 6}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The seeded jobs, of which one has ended since: on two meshes, with a message that is long and hostile."""
    folder = tmp_path_factory.mktemp("data")
    with seeded_site(folder) as made:
        asyncio.run(_end(Settings(data_dir=folder).sqlalchemy_url, made.running))
        yield made


async def _end(url: str, job_id: str) -> None:
    database = Database(url)
    try:
        async with database.write() as session:
            job = await find_job(session, job_id)
            given = job.spec | {"resources": {"meshes": [{"workers": 2}, {"workers": 1}, {"workers": 1}]}}
            job.spec = JobSpec.model_validate(given).model_dump(mode="json")
            (attempt, *_) = await attempts_of(session, job_id)
            why = {"reason": "MODEL_BUILD_FAILED", "message": REASON}
            transitions.move_attempt(attempt, AttemptState.FAILED, at=utc_now(), **why)
            transitions.move_job(session, job, JobState.FAILED, at=utc_now(), **why)
    finally:
        await database.close()


@pytest.mark.slow
def test_the_page_of_an_ended_job_says_what_its_plan_chose(site: Site, page):
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelector('#events tbody tr')")
    told = page.js("document.querySelector('#facts').textContent")
    assert "3 stages (chosen)" in told and "Planned step" in told
    assert "3 meshes of 2, 1, 1 workers" in told
    assert page.errors == []


def test_an_empty_bar_looks_empty_in_the_dark(site: Site, page):
    """A browser's own track is white there, as if all steps were done."""
    page.open(f"{site.url}/", dark=True)
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 3")
    empty = _colour(page, f"tr[data-job={site.failed}] progress")
    done = _colour(page, f"tr[data-job={site.running}] progress")
    assert sum(empty) < 0.5 * 3 * 255, empty
    assert empty != done


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_reason_leaves_the_list_a_list(site: Site, page, width: int):
    page.open(f"{site.url}/", width=width)
    page.wait("document.querySelectorAll('#jobs tbody tr').length === 3")
    row = f"tr[data-job={site.running}]"
    assert page.js(f"document.querySelector('{row}').getBoundingClientRect().height") < 160
    assert "<img src=x" in page.js(f"document.querySelector('{row} small.why').title")
    page.open(f"{site.url}/jobs/{site.running}", width=width)
    page.wait("document.querySelector('#events tbody tr')")
    assert page.js("document.querySelector('#reason').textContent") == f"MODEL_BUILD_FAILED: {REASON}"
    assert page.js("document.querySelector('img[src=x]')") is None
    assert page.js("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert page.errors == []


@pytest.mark.slow
def test_of_a_job_without_a_plan_no_empty_tables_are_shown(site: Site, page, tmp_path: Path):
    page.open(f"{site.url}/jobs/{site.waiting}")
    page.wait("document.querySelector('#events tbody tr')")
    shown = "document.getElementById('{}').getBoundingClientRect().height > 0"
    assert [page.js(shown.format(one)) for one in ("gaps", "memory", "update", "attempts")] == [False] * 4
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("document.querySelector('#events tbody tr')")
    assert [page.js(shown.format(one)) for one in ("gaps", "memory", "update", "attempts")] == [True] * 4


def _colour(page, selector: str) -> tuple[int, ...]:
    """Red, green and blue of a pixel near the beginning of an element."""
    x, y = page.js(
        f"(() => {{ const r = document.querySelector('{selector}').getBoundingClientRect();"
        " return [r.x + r.width / 10, r.y + r.height / 2]; })()"
    )
    clip = {"x": int(x), "y": int(y), "width": 1, "height": 1, "scale": 1}
    image = base64.b64decode(page.call("Page.captureScreenshot", clip=clip)["data"])
    at, data = 8, b""
    while at < len(image):
        length, kind = struct.unpack(">I4s", image[at : at + 8])
        data += image[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    return tuple(zlib.decompress(data)[1:4])  # one row: how it is filtered, then its one pixel
