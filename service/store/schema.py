"""The tables' revisions: brought to this version's, and what a version does that meets another one's tables.

Expand, then contract: a release's migrations only add (tables, columns that may be null or have a default, indexes), so
that the release before goes on beside it, and can be started again. What nothing uses any more is removed by a later
release, which writes into `compatibility` the oldest revision whose code may still work with what is left.
"""

from __future__ import annotations

import logging
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, inspect, text

logger = logging.getLogger(__name__)
MIGRATIONS = Path(__file__).parent / "migrations"


class NewerTablesError(RuntimeError):
    """The tables are a newer Slotline's, which have no room for this one."""


class NoSuchRevisionError(ValueError):
    """There is no such state of the tables in this version, or no way to it."""


def migrate(connection: Connection, to: str = "head") -> None:
    """Bring the tables to a revision, up or down; newer tables that this code works with stay as they are."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    known = [script.revision for script in scripts.walk_revisions()]  # from the newest to the first
    present = MigrationContext.configure(connection).get_current_revision()
    if present is not None and present not in known:
        _check_newer(connection, present, known)
        return
    wanted = known[0] if to == "head" else to
    if wanted not in known:
        raise NoSuchRevisionError(
            f"there is no revision {to} of the tables: this Slotline knows {', '.join(reversed(known))}"
        )
    if present == wanted:
        return
    try:
        if present is not None and known.index(wanted) > known.index(present):
            command.downgrade(config, wanted)
        else:
            command.upgrade(config, wanted)
    except CommandError as error:
        raise NoSuchRevisionError(f"the tables cannot go from {present} to {wanted}: {error}") from error
    if present is not None:
        logger.info(
            "the database's tables were those of revision %s and are now those of %s", present, wanted
        )


def _check_newer(connection: Connection, present: str, known: list[str]) -> None:
    """Say that the tables are newer. Raises NewerTablesError where what this code uses may be gone."""
    oldest = None
    if inspect(connection).has_table("compatibility"):
        oldest = connection.execute(text("SELECT oldest_code FROM compatibility")).scalar_one_or_none()
    if oldest is None or oldest not in known:
        raise NewerTablesError(
            f"the database has the tables of a newer Slotline (revision {present}, for code from {oldest or present} on), "
            f"and this one knows them up to {known[0]}: start the newer version, or go back with its "
            f"`slotline migrate --to {known[0]}`, which drops what was added since"
        )
    logger.warning(
        "the database has the tables of a newer Slotline (revision %s); this one, of %s, works with them: "
        "an upgrade is under way, or start the newer version",
        present,
        known[0],
    )
