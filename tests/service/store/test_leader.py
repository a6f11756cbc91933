"""One leader among control planes that share a PostgreSQL; a SQLite's only process leads."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from service.store.database import Database
from service.store.leader import Leadership


async def test_one_of_two_leads_until_it_lets_go(database: Database, database_url: str):
    other = Database(database_url)
    first, second = Leadership(database), Leadership(other)
    assert await first.held() and await first.held()
    assert await second.held() is database.is_sqlite
    await first.release()
    assert await second.held()
    assert await first.held() is database.is_sqlite
    for leadership in (first, second):
        await leadership.release()
    await other.close()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has no connection to lose
async def test_a_leader_that_loses_its_connection_no_longer_leads(database: Database, database_url: str):
    other = Database(database_url)
    first, second = Leadership(database), Leadership(other)
    assert await first.held()
    async with other.engine.connect() as connection:
        await connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        )
    async with asyncio.timeout(60):
        while not await second.held():  # the server ends the other's backend in its own time
            await asyncio.sleep(0.02)
    try:
        assert not await first.held()
    except Exception:  # the first look finds the connection gone
        assert not await first.held()
    await second.release()
    await other.close()
