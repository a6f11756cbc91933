"""The lock of a SQLite file: a server that ends is waited for, one that stays is told of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service.store.database import Database, DatabaseInUseError, exclusive_sqlite_lock


@pytest.fixture
async def database(tmp_path: Path):
    made = Database(f"sqlite+aiosqlite:///{tmp_path / 'store.db'}")
    yield made
    await made.close()


async def test_one_that_is_ending_is_waited_for(database: Database):
    async def second() -> str:
        async with exclusive_sqlite_lock(database):
            return "has it"

    async with exclusive_sqlite_lock(database):
        waiting = asyncio.create_task(second())
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
    assert await waiting == "has it"


async def test_one_that_stays_is_told_of_by_the_file_that_it_serves(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.store.database._SQLITE_LOCK_WAIT_S", 0.2)
    async with exclusive_sqlite_lock(database):
        with pytest.raises(DatabaseInUseError, match=r"another Slotline serves .*store\.db"):
            async with exclusive_sqlite_lock(database):
                pass
