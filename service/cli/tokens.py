"""`slotline token`: users' API tokens, in the database that the settings name; needs no server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, TypeVar

import typer
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.cli.environment import settings_or_fail
from service.cli.output import CliError, Json, checked
from service.jobspec import NAME_PATTERN
from service.store.database import Database, utc_now
from service.store.tokens import delete_token, list_tokens, new_token, store_token, token_digest

TokenName = Annotated[str, typer.Argument(callback=checked(NAME_PATTERN, "a name"), help="Whose token it is")]
app = typer.Typer(help="API tokens, for SLOTLINE_REQUIRE_TOKEN=true.", no_args_is_help=True)
T = TypeVar("T")


@app.command("create")
def create_token(
    name: TokenName,
    days: Annotated[
        float | None, typer.Option(min=0, max=36500, help="So long it is valid; for ever when not given")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a token and show it, this once; the store keeps only its digest."""
    token = new_token()
    expires_at = None if days is None else utc_now() + timedelta(days=days)

    async def work(session: AsyncSession) -> None:
        store_token(session, name, token_digest(token), at=utc_now(), expires_at=expires_at)

    try:
        asyncio.run(_in_store(work))
    except IntegrityError:
        raise CliError(f"there is a token named {name} already: choose another name, or revoke it") from None
    shown = {"name": name, "token": token, "expires_at": expires_at and expires_at.isoformat()}
    print(json.dumps(shown) if as_json else token)


@app.command("list")
def list_all_tokens(as_json: Json = False) -> None:
    """Names of the tokens, when they were made and until when they are valid."""
    found = asyncio.run(_in_store(list_tokens))
    rows = [
        {
            "name": token.name,
            "created_at": token.created_at.isoformat(),
            "expires_at": token.expires_at and token.expires_at.isoformat(),
        }
        for token in found
    ]
    if as_json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(row["name"], row["created_at"], f"until {row['expires_at'] or 'it is revoked'}")


@app.command("revoke")
def revoke_token(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Make a token invalid."""
    if not asyncio.run(_in_store(lambda session: delete_token(session, name))):
        raise CliError(f"there is no token named {name}: `slotline token list` shows them")
    print(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


async def _in_store(work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Run `work` in a write session of the database that the settings name."""
    database = Database(settings_or_fail().sqlalchemy_url)
    try:
        await database.start()
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()
