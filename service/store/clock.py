"""The database's clock, which all processes that share a database share too."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement


class clock(FunctionElement[float]):
    """Unix seconds by the database's clock, at the moment of the statement rather than of its transaction."""

    type = Double()
    inherit_cache = True


@compiles(clock)
def _of_postgresql(*_: Any, **__: Any) -> str:
    return "CAST(EXTRACT(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"


@compiles(clock, "sqlite")
def _of_sqlite(*_: Any, **__: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"
