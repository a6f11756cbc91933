"""`slotline migrate`: the tables of this version, made before its control planes start (the chart's hook)."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from sqlalchemy.exc import SQLAlchemyError

from service.cli.environment import settings_or_fail
from service.cli.output import CliError, Json
from service.store.database import Database
from service.store.schema import NewerTablesError, NoSuchRevisionError

app = typer.Typer()


@app.command()
def migrate(
    to: Annotated[
        str,
        typer.Option(
            metavar="REVISION",
            help="Another revision than this version's: an older one, before an older Slotline is started. "
            "What was added since is dropped",
        ),
    ] = "head",
    as_json: Json = False,
) -> None:
    """Bring the database that the settings name to this version's tables; `slotline serve` does it, too."""
    database = Database(settings_or_fail().sqlalchemy_url)
    shown = database.url.render_as_string(hide_password=True)
    try:
        asyncio.run(_migrate(database, to))
    except (SQLAlchemyError, OSError, NewerTablesError, NoSuchRevisionError) as error:
        why = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise CliError(f"{shown} was not migrated: {why[0] if why else type(error).__name__}") from None
    print(json.dumps({"migrated": shown}) if as_json else f"migrated {shown}")


async def _migrate(database: Database, to: str) -> None:
    try:
        await database.start(to=to)
    finally:
        await database.close()
