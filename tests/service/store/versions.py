"""Tables of other versions: those that the migrations 0001 to 0016 made, and those of a newer Slotline."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest
from sqlalchemy import make_url

from service.store import database as store_database
from service.store.database import Database

TAKEN_OVER = "0016"
"""What the sixteen migrations ended with, and the first of this version makes."""
CURRENT = store_database.known_revisions()[0]
_CHAIN = Path(__file__).parent / "migrations_0001_to_0016.sql"
_TYPES = {
    "sqlite": {"time": "DATETIME", "double": "DOUBLE", "bytes": "BLOB", "serial": "INTEGER"},
    "postgresql": {
        "time": "TIMESTAMP WITH TIME ZONE",
        "double": "DOUBLE PRECISION",
        "bytes": "BYTEA",
        "serial": "BIGSERIAL",
    },
}


def chain_statements(dialect: str, *, to: str = TAKEN_OVER) -> list[str]:
    """The statements of the sixteen migrations that one has replaced, up to revision `to`."""
    text = Template(_CHAIN.read_text()).substitute(_TYPES[dialect])
    statements = [statement.strip() for statement in text.split(";\n") if statement.strip()]
    (last,) = [
        number
        for number, statement in enumerate(statements)
        if f"version_num='{to}'" in statement or f"(version_num) VALUES ('{to}')" in statement
    ]
    return statements[: last + 1]


async def make_chain_database(url: str, *, to: str = TAKEN_OVER) -> Database:
    """A database at revision `to` as an older Slotline made it; this version has not migrated it yet."""
    database = Database(url)
    async with database.engine.connect() as connection:
        connection = await connection.execution_options(slotline_write=True)
        async with connection.begin():
            for statement in chain_statements(make_url(url).get_backend_name(), to=to):
                await connection.exec_driver_sql(statement)
    return database


NEWER = "9999"
_NEWER_MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "9999", "{current}"


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


@contextlib.contextmanager
def newer_version(folder: Path, *, oldest: str = "0008") -> Iterator[None]:
    """In this context whatever migrates is a newer Slotline, with one more migration (`folder` holds it): `oldest` is
    the revision of the oldest code that works with its tables."""
    migrations = folder / f"newer-{oldest}"
    if not migrations.exists():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(store_database.MIGRATIONS_DIR, migrations, ignore=ignored)
    (migrations / "versions" / "9999_newer.py").write_text(
        _NEWER_MIGRATION.format(oldest=oldest, current=CURRENT)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(store_database, "MIGRATIONS_DIR", migrations)
        yield
