"""No wait for a database is without end; on PostgreSQL, where there is a network."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from service.store import database as room
from service.store.database import Database

postgresql = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.mark.slow
@postgresql
async def test_a_session_of_postgresql_has_limits_at_the_server(database: Database):
    async with database.read() as session:
        shown = {
            name: (await session.execute(text(f"SHOW {name}"))).scalar_one()
            for name in ("statement_timeout", "idle_in_transaction_session_timeout")
        }
    assert shown == {"statement_timeout": "30s", "idle_in_transaction_session_timeout": "15s"}


@postgresql
async def test_a_statement_that_hangs_is_given_up(database_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(room._POSTGRES_SESSION_SETTINGS, "statement_timeout", "200ms")
    database = Database(database_url)
    with pytest.raises(OperationalError, match="statement timeout"):
        async with asyncio.timeout(20), database.read() as session:
            await session.execute(text("SELECT pg_sleep(60)"))
    await database.close()


@pytest.mark.slow
async def test_a_server_that_swallows_connections_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(room._LIBPQ_OPTIONS, "connect_timeout", 2)  # the shortest that libpq takes

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    database = Database(f"postgresql+psycopg://me@127.0.0.1:{port}/x")
    with pytest.raises(OperationalError):  # not the TimeoutError of a connection that waits for longer
        async with asyncio.timeout(60), database.read() as session:
            await session.execute(text("SELECT 1"))
    await database.close()
    server.close()


async def test_what_the_url_says_of_a_connection_goes_before_ours():
    url = "postgresql+psycopg://me@h/x?connect_timeout=77&options=-csearch_path%3Da"
    database = Database(url)
    _, given = database.engine.dialect.create_connect_args(database.url)
    assert given["connect_timeout"] == 77 or given["connect_timeout"] == "77"
    ours = room._postgres_arguments(url)
    assert "connect_timeout" not in ours and "options" not in ours and ours["keepalives_idle"] == 10
    await database.close()
