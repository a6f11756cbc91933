"""Tables up and down between the first release and this one, with data in them; two versions on the same tables."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from service.spec.states import AttemptState
from service.store import database as store_database
from service.store.database import Database, NewerTablesError, NoSuchRevisionError
from service.store.events import events_of
from service.store.jobs import find_job
from service.store.leases import Lease
from service.store.tables import Base
from tests.service.conftest import job_body
from tests.service.orchestrator.test_loop import World

FIRST = "0001"
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


async def test_what_the_first_release_stored_survives_up_down_and_up_again(database_url: str):
    database = Database(database_url)
    await database.start(to=FIRST)
    await _run(database, _fill)
    first = await _run(database, _rows)
    assert sum(len(rows) for rows in first.values()) == 3 * 10, "ten tables"
    columns = await _run(database, lambda c: {n: t.c.keys() for n, t in _tables(c).items()})
    for _ in range(2):
        await database.start()
        assert await _run(database, _rows, columns) == first
        async with database.read() as session:
            job = await find_job(session, "job-1")
            assert (job.state, job.steps_wanted, job.spec["name"]) == ("SUCCEEDED", 10, "small")
            assert [event.kind for event in await events_of(session, "job-1")] == ["kind-1"]
        await _run(database, _fill)  # what is new has rows, too, that point to the old ones
        await database.start(to=FIRST)
        assert await _run(database, _rows) == first
    await database.close()


async def test_each_revision_goes_down_to_what_was_before_it_and_up_again(database_url: str):
    database = Database(database_url)
    revisions = [script.revision for script in _scripts().walk_revisions()][::-1]

    def shape(connection: sa.Connection) -> dict[str, set[str]]:
        return {name: set(table.c.keys()) for name, table in _tables(connection).items()}

    seen = []
    for revision in revisions:
        await database.start(to=revision)
        seen.append(await _run(database, shape))
    assert seen[-1] == {name: set(table.c.keys()) for name, table in Base.metadata.tables.items()} | {
        "compatibility": {"oldest_code"}
    }
    for revision, was in list(zip(revisions, seen, strict=True))[-2::-1]:
        await database.start(to=revision)
        assert await _run(database, shape) == was, revision
    await database.close()


async def test_a_revision_that_there_is_not_is_refused_with_those_that_there_are(database_url: str):
    database = Database(database_url)
    with pytest.raises(NoSuchRevisionError, match=r"no revision 7 .* 0001, 0002"):
        await database.start(to="7")
    await database.close()


def _scripts():
    config = store_database.Config()
    config.set_main_option("script_location", str(store_database.MIGRATIONS_DIR))
    return store_database.ScriptDirectory.from_config(config)


NEWER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{head}"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("mood", sa.String(10), nullable=False, server_default="calm"))
    op.add_column("attempts", sa.Column("weather", sa.Text(), nullable=True))
    op.create_table("moods", sa.Column("name", sa.String(10), primary_key=True))
    op.execute("UPDATE compatibility SET oldest_code = '{oldest}'")


def downgrade() -> None:
    op.drop_table("moods")
    op.drop_column("attempts", "weather")
    op.drop_column("jobs", "mood")
    op.execute("UPDATE compatibility SET oldest_code = '0008'")
"""


@pytest.fixture
def newer(tmp_path: Path):
    """While in its context whatever migrates is a newer Slotline, with a migration more: `oldest` is the code that may
    go on beside it."""
    head = _scripts().get_current_head()

    @contextlib.contextmanager
    def become(oldest: str = "0008") -> Iterator[None]:
        folder = tmp_path / f"newer-{oldest}"
        if not folder.exists():
            shutil.copytree(
                store_database.MIGRATIONS_DIR, folder, ignore=shutil.ignore_patterns("__pycache__")
            )
        (folder / "versions" / "9999_newer.py").write_text(NEWER.format(head=head, oldest=oldest))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(store_database, "MIGRATIONS_DIR", folder)
            yield

    return become


async def test_an_older_version_goes_on_beside_a_newer_one_and_may_start_again(
    database_url: str, newer, caplog: pytest.LogCaptureFixture
):
    """As in a rolling upgrade: the hook migrates, old pods go on, one of them is even replaced by its like."""
    old = Database(database_url)
    await old.start()
    world = World(old)
    before = await world.start(pipeline={"stages": 2})
    hook = Database(database_url)
    with newer():
        await hook.start()
    await hook.close()
    await world.report(f"{before}-1", 2, state=AttemptState.SUCCEEDED)
    assert (await world.job(before)).state == "SUCCEEDED"
    again = Database(database_url)
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
        await old.start(to="0008")  # the newer one's way back
    await again.start()
    assert (await world.job(after)).state == "SUCCEEDED"
    for one in (old, again):
        await one.close()


async def test_a_version_that_the_tables_have_no_room_for_says_so_and_the_way_out(database_url: str, newer):
    head = _scripts().get_current_head()
    database = Database(database_url)
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


async def test_tables_that_were_made_newer_without_a_word_on_older_code_are_not_touched(database_url: str):
    """By a Slotline of another branch, say."""
    database = Database(database_url)
    await database.start()
    await _run(database, lambda c: c.execute(sa.text("UPDATE alembic_version SET version_num = 'xyz'")))
    await _run(database, lambda c: c.execute(sa.text("DELETE FROM compatibility")))
    with pytest.raises(NewerTablesError, match="revision xyz"):
        await database.start()
    await database.close()
