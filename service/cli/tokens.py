"""`slotline token`: users' API tokens, in the database that the settings name; with --server by a running one's API."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Annotated, TypeVar

import typer
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.people_schemas import NewToken, TokenView
from service.cli.environment import settings_or_fail
from service.cli.output import CliError, Json, checked
from service.client import Client
from service.jobspec import NAME_PATTERN
from service.principals import Role
from service.store.database import Database, utc_now
from service.store.tables import ApiToken
from service.store.tokens import delete_token, list_tokens, new_token, store_token, token_digest

TokenName = Annotated[str, typer.Argument(callback=checked(NAME_PATTERN, "a name"), help="Whose token it is")]
Server = Annotated[
    bool,
    typer.Option(
        "--server", help="Ask the server at SLOTLINE_URL, with an admin's token, instead of its database"
    ),
]
app = typer.Typer(help="API tokens, for SLOTLINE_REQUIRE_TOKEN=true.", no_args_is_help=True)
T = TypeVar("T")


@app.command("create")
def create_token(
    name: TokenName,
    role: Annotated[
        Role,
        typer.Option(help="Each may do what those before it may; submitters cancel and retry their own jobs"),
    ] = Role.SUBMITTER,
    days: Annotated[
        float | None, typer.Option(min=0, max=36500, help="So long it is valid; for ever when not given")
    ] = None,
    server: Server = False,
    as_json: Json = False,
) -> None:
    """Make a token and show it, this once; the store keeps only its digest."""
    made = Client().create_token(name, role=role, days=days) if server else _create_here(name, role, days)
    print(json.dumps(made.model_dump(mode="json")) if as_json else made.token)


@app.command("list")
def list_all_tokens(server: Server = False, as_json: Json = False) -> None:
    """Names and roles of the tokens, when they were made and until when they are valid."""
    found = Client().tokens() if server else [_view(token) for token in asyncio.run(_in_store(list_tokens))]
    if as_json:
        print(json.dumps([token.model_dump(mode="json") for token in found]))
        return
    for token in found:
        until = "it is revoked" if token.expires_at is None else token.expires_at.isoformat()
        print(token.name, token.role, token.created_at.isoformat(), f"until {until}")


@app.command("revoke")
def revoke_token(
    name: Annotated[str, typer.Argument(callback=checked(NAME_PATTERN, "a name"))],
    server: Server = False,
    as_json: Json = False,
) -> None:
    """Make a token invalid."""
    if server:
        Client().revoke_token(name)
    elif not asyncio.run(_in_store(lambda s: delete_token(s, name, by=_console(), at=utc_now()))):
        raise CliError(f"there is no token named {name}: `slotline token list` shows them")
    print(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


def _create_here(name: str, role: Role, days: float | None) -> NewToken:
    token, now = new_token(), utc_now()
    expires_at: datetime | None = None if days is None else now + timedelta(days=days)

    async def work(session: AsyncSession) -> ApiToken:
        return await store_token(
            session, name, role, token_digest(token), by=_console(), at=now, expires_at=expires_at
        )

    try:
        stored = asyncio.run(_in_store(work))
    except IntegrityError:
        raise CliError(f"there is a token named {name} already: choose another name, or revoke it") from None
    return NewToken(**_view(stored).model_dump(), token=token)


def _view(token: ApiToken) -> TokenView:
    return TokenView.model_validate(token, from_attributes=True)


def _console() -> str:
    """Who works on the database itself, for the audit list."""
    try:
        return f"console:{getpass.getuser()}"[:200]
    except (KeyError, OSError):  # an account without a name, in a container
        return "console:"


async def _in_store(work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Run `work` in a write session of the database that the settings name."""
    database = Database(settings_or_fail().sqlalchemy_url)
    try:
        await database.start()
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()
