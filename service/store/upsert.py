"""Rows that replace those of the same primary key, on SQLite as on PostgreSQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from service.store.tables import Base


async def upsert(session: AsyncSession, table: type[Base], rows: list[dict[str, Any]]) -> None:
    """Insert `rows` (all with the same columns), or update those whose key is there."""
    if not rows:
        return
    statement, key = _insert(session, table)
    others = {name: statement.excluded[name] for name in rows[0] if name not in key}
    if not others:
        await session.execute(statement.on_conflict_do_nothing(index_elements=key), rows)
        return
    await session.execute(statement.on_conflict_do_update(index_elements=key, set_=others), rows)


async def insert_missing(session: AsyncSession, table: type[Base], row: dict[str, Any]) -> None:
    """Insert `row` unless one of the same primary key is there."""
    statement, key = _insert(session, table)
    await session.execute(statement.on_conflict_do_nothing(index_elements=key), row)


def _insert(session: AsyncSession, table: type[Base]) -> tuple[sqlite.Insert | postgresql.Insert, list[str]]:
    """An insert of the session's kind of database, and the columns of the primary key."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    return dialect.insert(table), [column.name for column in table.__table__.primary_key]
