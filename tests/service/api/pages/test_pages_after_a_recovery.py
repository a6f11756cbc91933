"""The page of a job whose attempt died and that goes on from an earlier step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.spec.states import AttemptState, JobState
from service.store import transitions
from service.store.attempts import create_attempt, find_attempt
from service.store.database import Database, utc_now
from service.store.measurements import record_steps, record_timeline
from tests.service.api.pages.seed import STEPS, Site, measured, seeded_site, step

RESUMED_AT = 30


async def recover(url: str, site: Site) -> None:
    """The running attempt is lost, and another repeats a few of its steps, one of them profiled again."""
    database = Database(url)
    now = utc_now()
    async with database.write() as session:
        job = await transitions.lock_job(session, site.running)
        lost = await find_attempt(session, job.current_attempt)
        transitions.move_attempt(lost, AttemptState.FAILED, at=now, reason="DRIVER_LOST")
        transitions.move_job(session, job, JobState.RECOVERING, at=now)
        attempt = await create_attempt(session, job, device="cpu", at=now)
        attempt.submitted_at = now
        transitions.move_attempt(attempt, AttemptState.RUNNING, at=now)
        transitions.move_job(session, job, JobState.RUNNING, at=now)
        await record_steps(session, attempt, [step(n) for n in range(RESUMED_AT, RESUMED_AT + 3)])
        slots = measured(site.plan)
        await record_timeline(
            session, attempt, step=RESUMED_AT, started_at=1.8e9, uncertainty_s=None, slots=slots, keep=9
        )
    await database.close()


@pytest.mark.slow
def test_an_open_page_shows_the_resumed_attempt_when_it_starts(page, tmp_path: Path):
    with seeded_site(tmp_path) as site:
        page.open(f"{site.url}/jobs/{site.running}")
        points = "document.querySelector('#loss .curve')?.dataset.points"
        page.wait(f"{points} === '{STEPS}'")
        asyncio.run(recover(f"sqlite+aiosqlite:///{tmp_path / 'slotline.db'}", site))
        page.wait(f"{points} === '{RESUMED_AT + 2}'")
        page.wait(
            "[...document.querySelectorAll('#timeline h3')].some("
            f"e => e.textContent.includes('step {RESUMED_AT}'))"
        )
        offered = page.js("[...document.getElementById('step').options].slice(1).map(o => Number(o.value))")
        assert offered == [RESUMED_AT, 40, 20], "the living attempt's first"
        assert page.errors == []
