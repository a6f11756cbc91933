"""One of several processes has a role; what another has written since is refused, on SQLite as on PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from service.store import database as room
from service.store.database import Database, utc_now
from service.store.leases import FencedDatabase, Lease, LeaseLostError, read_lease_status
from service.store.tables import LeaseRow as Row
from service.store.tables import ProfileRow
from tests.polling import until_async

LONG_S = 600.0


@pytest.fixture
async def other(database: Database, database_url: str) -> AsyncIterator[Database]:
    """The same database, as another process sees it."""
    other = Database(database_url)
    yield other
    await other.close()


async def expire(database: Database) -> None:
    async with database.write() as session:
        await session.execute(update(Row).values(expires_at=0.0))


async def keys(database: Database) -> set[str]:
    async with database.read() as session:
        return set((await session.execute(select(ProfileRow.key))).scalars())


def profile(key: str) -> ProfileRow:
    return ProfileRow(key=key, created_at=utc_now(), body={})


async def test_one_of_two_has_it_until_it_lets_go(database: Database, other: Database):
    first = Lease(database, lease_s=LONG_S, holder="first")
    assert await first.acquire() and await first.acquire() and first.token == 1
    second = Lease(other, lease_s=LONG_S, holder="second")
    second._has_sqlite_alone = False  # SQLite's only process would take it at once
    assert not await second.acquire()
    seen = await read_lease_status(database)
    assert (seen.holder, seen.token) == ("first", 1) and LONG_S - 60 < seen.left_s <= LONG_S
    await first.release()
    assert first.token is None
    assert await second.acquire() and second.token == 2
    assert not await first.acquire()


async def test_a_lease_that_is_renewed_stays_and_one_that_is_not_expires(database: Database, other: Database):
    first = Lease(database, lease_s=LONG_S, holder="first")
    second = Lease(other, lease_s=LONG_S, holder="second")
    second._has_sqlite_alone = False
    assert await first.acquire()
    await expire(database)
    await first.renew()
    assert (await read_lease_status(database)).left_s > 0, "nobody took it meanwhile, so it goes on"
    first.lease_s = 1.0
    await first.renew()
    await until_async(second.acquire)
    assert (await read_lease_status(database)).holder == "second"


async def test_what_a_replaced_process_writes_is_refused_and_it_says_so_once(
    database: Database, other: Database, caplog: pytest.LogCaptureFixture
):
    first = Lease(database, lease_s=LONG_S, holder="first")
    fenced = FencedDatabase(database, first)
    assert await first.acquire()
    async with fenced.write() as session:
        session.add(profile("in time"))
    await expire(database)
    async with fenced.write() as session:
        session.add(profile("late, and nobody else has it"))
    await expire(database)
    second = Lease(other, lease_s=LONG_S, holder="second")
    assert await second.acquire()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with pytest.raises(LeaseLostError):
                async with fenced.write() as session:
                    session.add(profile("too late"))
        with pytest.raises(LeaseLostError):
            async with fenced.write():
                return_early = True
    assert return_early
    assert await keys(database) == {"in time", "late, and nobody else has it"}
    (told,) = caplog.records
    assert "second orchestrates (term 2)" in told.getMessage() and "steps down" in told.getMessage()
    assert first.token is None and not await first.acquire()


async def test_a_renewal_finds_out_that_the_role_is_gone(database: Database, other: Database):
    first = Lease(database, lease_s=LONG_S, holder="first")
    assert await first.acquire()
    await expire(database)
    second = Lease(other, lease_s=LONG_S, holder="second")
    assert await second.acquire()
    with pytest.raises(LeaseLostError, match="second orchestrates"):
        await first.renew()
    await first.release()
    assert (await read_lease_status(database)).left_s > 0, "only its own lease is given away"


async def test_nobody_takes_a_role_between_the_check_of_a_write_and_its_end(
    database: Database, other: Database
):
    """Else both would write: the old one after it was found to be the newest."""
    first = Lease(database, lease_s=LONG_S, holder="first")
    fenced = FencedDatabase(database, first)
    assert await first.acquire()
    await expire(database)
    second = Lease(other, lease_s=LONG_S, holder="second")
    async with database.write() as session:
        session.add(profile("a"))
        await first.check(session)
        taking = asyncio.create_task(second.acquire())
        await asyncio.sleep(0.3)
        assert not taking.done()
    assert await taking and await keys(other) == {"a"}
    with pytest.raises(LeaseLostError):
        async with fenced.write() as session:
            session.add(profile("b"))


@pytest.mark.slow
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_a_process_that_freezes_in_a_write_keeps_nobody_from_the_role(
    database_url: str, database: Database, monkeypatch: pytest.MonkeyPatch
):
    """Between its check and its end, with the lease's row locked: the server cuts it off before the lease expires."""
    monkeypatch.setitem(room._POSTGRES_SESSION_SETTINGS, "idle_in_transaction_session_timeout", "10min")
    freezing = Database(database_url)
    first = Lease(freezing, lease_s=2.0, holder="first")
    second = Lease(database, lease_s=LONG_S, holder="second")
    assert await first.acquire()
    connection = await freezing.engine.connect()
    session = AsyncSession(connection)
    await session.begin()
    await first.check(session)
    await until_async(second.acquire)
    with pytest.raises(DBAPIError):
        await session.execute(select(Row))
    await connection.invalidate()
    await connection.close()
    async with freezing.read() as reading:
        limit = (await reading.execute(text("SHOW idle_in_transaction_session_timeout"))).scalar_one()
    assert limit == "10min", "the shorter one was of that transaction alone"
    await freezing.close()


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_only_process_of_a_sqlite_file_does_not_wait_for_one_that_was_killed(
    database: Database, other: Database
):
    assert await Lease(database, lease_s=LONG_S, holder="killed").acquire()
    next_one = Lease(other, lease_s=LONG_S, holder="next")
    assert await next_one.acquire() and next_one.token == 2


async def test_of_many_that_want_it_at_once_one_gets_it(database: Database, other: Database):
    for round_ in range(1, 6):
        wanting = [Lease(one, lease_s=LONG_S, holder=str(n)) for n, one in enumerate([database, other] * 3)]
        for one in wanting:
            one._has_sqlite_alone = False
        got = await asyncio.gather(*(one.acquire() for one in wanting))
        assert sum(got) == 1 and (await read_lease_status(database)).token == round_
        await wanting[got.index(True)].release()


async def test_times_are_the_databases(database: Database, monkeypatch: pytest.MonkeyPatch):
    """A process whose clock is a day ahead takes nobody's lease, and one a day behind holds no longer than others."""
    first = Lease(database, lease_s=LONG_S, holder="first")
    assert await first.acquire()
    now = time.time()
    second = Lease(database, lease_s=LONG_S, holder="second")
    second._has_sqlite_alone = False
    for skew in (-86_400, 86_400):
        monkeypatch.setattr(time, "time", lambda skew=skew: now + skew)
        assert not await second.acquire()
        await first.renew()
        assert 0 < (await read_lease_status(database)).left_s <= LONG_S
