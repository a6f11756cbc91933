"""Short runs by their keys: which process has one, whether that still lives, and what came of it.

The holder of a run beats; one that has not for SILENT_S, by the database's clock, has died or is cut off, and whoever
asks next takes the run and begins it again. What came of it is told once, by whichever process is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.clock import clock
from service.store.database import Sessions
from service.store.tables import ShortRun
from service.store.upsert import insert_missing

SILENT_S = 30.0
_NOT_ASKED_FOR_S = 3600.0


@dataclass(frozen=True)
class RunEnd:
    """What came of a run: its answer, or why there is none."""

    answer: str | None = None
    failure: str | None = None


async def run_goes_on(database: Sessions, key: str) -> bool:
    """Whether a living process has this run, and it has not ended."""
    query = select(ShortRun.key).where(ShortRun.key == key, ~_silent(), ~ShortRun.ended)
    async with database.read() as session:
        return (await session.execute(query)).first() is not None


async def take_end(session: AsyncSession, key: str) -> RunEnd | None:
    """What came of the run, which is forgotten with that; None where it has not ended."""
    told = delete(ShortRun).where(ShortRun.key == key, ShortRun.ended)
    found = (await session.execute(told.returning(ShortRun.answer, ShortRun.failure))).one_or_none()
    return None if found is None else RunEnd(*found)


async def take_run(session: AsyncSession, key: str, holder: str) -> bool:
    """Whether `holder` has the run now, to begin it: nobody had it, or who had it is silent."""
    first = {"key": key, "holder": "", "beat_at": 0.0, "ended": False, "answer": None, "failure": None}
    await insert_missing(session, ShortRun, first)
    taken = update(ShortRun).where(ShortRun.key == key, ~ShortRun.ended, _silent())
    taken = taken.values(holder=holder, beat_at=clock())
    return (await session.execute(taken.returning(ShortRun.key))).first() is not None


async def beat(session: AsyncSession, holder: str, keys: list[str]) -> set[str]:
    """Say that `holder` goes on with its runs; those of `keys` that it still has."""
    beating = update(ShortRun).where(ShortRun.holder == holder, ShortRun.key.in_(keys))
    beating = beating.values(beat_at=clock()).returning(ShortRun.key)
    return set((await session.execute(beating)).scalars())


async def end_run(session: AsyncSession, key: str, holder: str, end: RunEnd | None) -> None:
    """Keep what came of a run, or nothing of it; a run that another process has taken is left to it."""
    mine = ShortRun.key == key, ShortRun.holder == holder
    if end is None:
        await session.execute(delete(ShortRun).where(*mine))
    else:
        ended = update(ShortRun).where(*mine)
        await session.execute(ended.values(ended=True, answer=end.answer, failure=end.failure))


async def forget_runs(session: AsyncSession) -> None:
    """Those that nobody has asked for in an hour."""
    await session.execute(delete(ShortRun).where(ShortRun.beat_at < clock() - _NOT_ASKED_FOR_S))


def _silent() -> ColumnElement[bool]:
    return ShortRun.beat_at < clock() - SILENT_S
