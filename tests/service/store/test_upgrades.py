"""Tables of earlier migrations taken over, tables up and down with data in them, two versions on the same tables."""

from __future__ import annotations

import functools
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.spec.states import AttemptState
from service.store import database as store_database
from service.store.database import Database, NewerTablesError, NoSuchRevisionError, OlderTablesError
from service.store.events import events_of
from service.store.jobs import find_job
from service.store.leases import Lease
from service.store.tables import Base
from tests.service.conftest import job_body
from tests.service.orchestrator.test_loop import World
from tests.service.store.versions import CURRENT, NEWER, TAKEN_OVER, make_chain_database, newer_version

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def _value(column: sa.Column[Any], row: int) -> Any:
    """Something of the column's type, another one in each row."""
    if column.foreign_keys:
        return _value(next(iter(column.foreign_keys)).column, row)
    known = {"state": "SUCCEEDED", "device": "cpu", "spec": job_body()}
    if column.name in known:
        return known[column.name]
    if column.primary_key and column.table.name == "jobs":
        return f"job-{row}"
    kind = column.type
    if isinstance(kind, sa.JSON):
        return {"row": row, "text": "ä"}
    if isinstance(kind, sa.DateTime):
        return AT.replace(minute=row)
    if isinstance(kind, sa.Boolean):
        return row % 2 == 0
    if isinstance(kind, sa.Integer):
        return row + 1
    if isinstance(kind, sa.Float):
        return row + 0.5
    if isinstance(kind, sa.LargeBinary):
        return bytes([row, 0, 255])
    return f"{column.name}-{row}"[-(getattr(kind, "length", None) or 100) :]


def _tables(connection: sa.Connection) -> dict[str, sa.Table]:
    """As they are in the database, in the order in which they may be filled."""
    found = sa.MetaData()
    found.reflect(connection)
    return {table.name: table for table in found.sorted_tables if table.name != "alembic_version"}


def _fill(connection: sa.Connection) -> None:
    for name, table in _tables(connection).items():
        if name in ("compatibility", "leases"):
            continue
        for row in range(3):
            values = {c.name: _value(c, row) for c in table.columns}
            if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one() <= row:
                connection.execute(table.insert().values(values))


def _rows(connection: sa.Connection, only: dict[str, list[str]] | None = None) -> dict[str, list[Any]]:
    """Everything, or what is in these columns."""
    found = {}
    for name, table in _tables(connection).items():
        if only is None or name in only:
            columns = [table.c[column] for column in (table.c.keys() if only is None else only[name])]
            rows = connection.execute(sa.select(*columns).order_by(*table.primary_key.columns))
            found[name] = [tuple(map(_plain, row)) for row in rows]
    return found


def _plain(value: Any) -> Any:
    value = json.loads(value) if isinstance(value, str) and value[:1] == "{" else value
    return value.replace(tzinfo=UTC) if isinstance(value, datetime) and value.tzinfo is None else value


async def _run(database: Database, work: Any, *arguments: Any) -> Any:
    async with database.engine.connect() as connection:
        connection = await connection.execution_options(slotline_write=True)
        async with connection.begin():
            return await connection.run_sync(work, *arguments)


def _shape(connection: sa.Connection) -> dict[str, Any]:
    """Tables with their columns, keys and indexes by name; the order of columns is none of it."""
    found = {}
    inspector = sa.inspect(connection)
    for name in inspector.get_table_names():
        columns = {
            column["name"]: (
                column["type"].compile(connection.dialect),
                column["nullable"],
                column["default"],
                column.get("autoincrement"),
            )
            for column in inspector.get_columns(name)
        }
        by_name = {key["name"]: key for key in inspector.get_foreign_keys(name)}
        unique = {key["name"]: key["column_names"] for key in inspector.get_unique_constraints(name)}
        indexes = {key["name"]: (key["column_names"], key["unique"]) for key in inspector.get_indexes(name)}
        found[name] = (columns, inspector.get_pk_constraint(name), by_name, unique, indexes)
    return found


async def test_the_one_migration_makes_the_tables_that_sixteen_made(empty_database_url: str):
    database = await make_chain_database(empty_database_url)
    by_chain = await _run(database, _shape)
    await _run(database, lambda connection: _drop_all(connection, list(by_chain)))
    await database.start(to=TAKEN_OVER)
    assert await _run(database, _shape) == by_chain
    assert len(by_chain) == 25, "with alembic_version and compatibility"
    assert await _revision(database) == TAKEN_OVER
    await database.close()


def _drop_all(connection: sa.Connection, names: list[str]) -> None:
    metadata = sa.MetaData()
    metadata.reflect(connection, only=names)
    metadata.drop_all(connection)


@pytest.mark.slow
async def test_what_an_older_version_stored_survives_taking_over_and_a_newer_version_up_down_and_up_again(
    empty_database_url: str, tmp_path: Path
):
    database = await make_chain_database(empty_database_url)
    await _run(database, _fill)
    first = await _run(database, _rows)
    assert sum(len(rows) for rows in first.values()) == 3 * 22 + 1, "22 tables, and compatibility"
    columns = await _run(database, lambda c: {n: t.c.keys() for n, t in _tables(c).items()})
    for _ in range(2):
        await database.start()
        assert await _run(database, _rows, columns) == first and await _revision(database) == CURRENT
        async with database.read() as session:
            job = await find_job(session, "job-1")
            assert (job.state, job.steps_wanted, job.spec["name"]) == ("SUCCEEDED", 2, "small")
            assert [event.kind for event in await events_of(session, "job-1")] == ["kind-1"]
        with newer_version(tmp_path):
            await database.start()
            assert await _revision(database) == NEWER
            assert await _run(database, _rows, columns) == first
            await _run(database, _fill)  # what is new has rows, too
            await database.start(to=CURRENT)
        assert await _run(database, _rows, columns) == first
    await database.close()


async def test_a_database_of_an_older_version_goes_on(empty_database_url: str):
    database = await make_chain_database(empty_database_url)
    await database.start()
    world = World(database)
    job = await world.start(pipeline={"stages": 2})
    await world.report(f"{job}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(job)).state == "SUCCEEDED"
    await database.close()


async def test_jobs_and_plans_of_before_there_were_projects_are_in_the_one_that_everybody_is_in(
    empty_database_url: str,
):
    database = Database(empty_database_url)
    await database.start(to="0025")
    await _run(database, _fill)
    before = await _run(database, _rows, {"jobs": ["id", "name"], "named_plans": ["id", "name"]})
    await database.start()
    after = await _run(
        database, _rows, {"jobs": ["id", "name", "project"], "named_plans": ["id", "name", "project"]}
    )
    assert before["jobs"] and before["named_plans"]
    for table, rows in before.items():
        assert after[table] == [(*row, "default") for row in rows]
    await database.close()


@pytest.mark.parametrize("revision", ["0001", "0009", "0015"])
async def test_older_tables_are_refused_with_the_version_to_upgrade_through(
    empty_database_url: str, revision: str
):
    database = await make_chain_database(empty_database_url, to=revision)
    before = await _run(database, _shape)
    for to in ("head", CURRENT, revision):
        with pytest.raises(OlderTablesError) as refused:
            await database.start(to=to)
        message = str(refused.value)
        assert f"tables of revision {revision}" in message and "takes over those of 0016 or newer" in message
        assert "`slotline migrate` of the version that still has the migrations 0001 to 0016" in message
    assert await _run(database, _shape) == before and await _revision(database) == revision
    await database.close()


@pytest.mark.slow
async def test_each_revision_goes_down_to_what_was_before_it_and_up_again(
    empty_database_url: str, tmp_path: Path
):
    database = Database(empty_database_url)

    def shape(connection: sa.Connection) -> dict[str, set[str]]:
        return {name: set(table.c.keys()) for name, table in _tables(connection).items()}

    ours = {name: set(table.c.keys()) for name, table in Base.metadata.tables.items()} | {
        "compatibility": {"oldest_code"}
    }
    with newer_version(tmp_path):
        revisions = [script.revision for script in _scripts().walk_revisions()][::-1]
        assert revisions[0] == TAKEN_OVER and revisions[-2:] == [CURRENT, NEWER]
        seen = []
        for revision in revisions:
            await database.start(to=revision)
            seen.append(await _run(database, shape))
        assert seen[-2] == ours != seen[-1]
        for revision, was in list(zip(revisions, seen, strict=True))[-2::-1]:
            await database.start(to=revision)
            assert await _run(database, shape) == was, revision
        await database.start()
        assert await _run(database, shape) == seen[-1]
    await database.close()


async def _revision(database: Database) -> str:
    query = sa.text("SELECT version_num FROM alembic_version")
    return await _run(database, lambda connection: connection.execute(query).scalar_one())


async def test_a_revision_that_there_is_not_is_refused_with_those_that_there_are(empty_database_url: str):
    database = Database(empty_database_url)
    with pytest.raises(NoSuchRevisionError, match=r"no revision 7 .* knows 0016"):
        await database.start(to="7")
    await database.close()


def _scripts():
    config = store_database.Config()
    config.set_main_option("script_location", str(store_database.MIGRATIONS_DIR))
    return store_database.ScriptDirectory.from_config(config)


@pytest.fixture
def newer(tmp_path: Path):
    """While in its context whatever migrates is a newer Slotline."""
    return functools.partial(newer_version, tmp_path)


async def test_an_older_version_goes_on_beside_a_newer_one_and_may_start_again(
    empty_database_url: str, newer, caplog: pytest.LogCaptureFixture
):
    """As in a rolling upgrade: the hook migrates, old pods go on, one of them is even replaced by its like."""
    old = Database(empty_database_url)
    await old.start()
    world = World(old)
    before = await world.start(pipeline={"stages": 2})
    hook = Database(empty_database_url)
    with newer():
        await hook.start()
    await hook.close()
    await world.report(f"{before}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(before)).state == "SUCCEEDED"
    again = Database(empty_database_url)
    with caplog.at_level(logging.WARNING):
        await again.start()
    (told,) = caplog.records
    assert "tables of a newer Slotline (revision 9999)" in told.getMessage()
    await world.orchestrator.lease.release()
    world = World(again)
    after = await world.start(pipeline={"stages": 2})
    await world.report(f"{after}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(after)).state == "SUCCEEDED"
    moods = await _run(again, lambda c: c.execute(sa.text("SELECT DISTINCT mood FROM jobs")).scalars().all())
    assert moods == ["calm"]
    with newer():
        await old.start(to=CURRENT)  # the newer one's way back
    await again.start()
    assert (await world.job(after)).state == "SUCCEEDED"
    for one in (old, again):
        await one.close()


async def test_a_version_that_the_tables_have_no_room_for_says_so_and_the_way_out(
    empty_database_url: str, newer
):
    head = _scripts().get_current_head()
    database = Database(empty_database_url)
    with newer(oldest="9999"):
        await database.start()
    with pytest.raises(NewerTablesError) as refused:
        await database.start()
    said = str(refused.value)
    assert "revision 9999, for code from 9999 on" in said and "start the newer version" in said
    assert f"slotline migrate --to {head}" in said
    with newer(oldest="9999"):
        await database.start(to=head)
    await database.start()
    assert await Lease(database, lease_s=10, holder="me").acquire()
    await database.close()


async def test_tables_that_were_made_newer_without_a_word_on_older_code_are_not_touched(
    empty_database_url: str,
):
    """By a Slotline of another branch, say."""
    database = Database(empty_database_url)
    await database.start()
    await _run(database, lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = 'xyz'")))
    await _run(database, lambda c: c.execute(sa.text("DELETE FROM compatibility")))
    with pytest.raises(NewerTablesError, match="revision xyz"):
        await database.start()
    await database.close()
