"""`slotline serve`, `token` and `demo`: the verbs that run something on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from service.client import CliError, Json, checked, err, out
from service.jobspec import NAME_PATTERN
from service.settings import Settings, load_settings, misspelt_settings
from service.store.database import Database, utc_now
from service.store.tokens import delete_token, list_tokens, store_token

TokenName = Annotated[str, typer.Argument(callback=checked(NAME_PATTERN, "a name"), help="Whose token it is")]
tokens = typer.Typer(help="API tokens, for SLOTLINE_REQUIRE_TOKEN=true.", no_args_is_help=True)
T = TypeVar("T")
app = typer.Typer()
app.add_typer(tokens, name="token")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (SLOTLINE_HOST)")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (SLOTLINE_PORT)")] = None,
    as_json: Json = False,
) -> None:
    """Run the control plane; with no RAY_ADDRESS it starts a local Ray too. Ctrl-C ends both."""
    import uvicorn

    from service.control_plane import control_plane_app

    settings = settings_or_fail(host=host, port=port)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name, meant in misspelt_settings(os.environ).items():
        logging.warning("%s is no setting: did you mean %s?", name, meant)
    for noisy in ("httpx", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    app = control_plane_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level.lower(),
        access_log=settings.log_level.lower() == "debug",
        timeout_graceful_shutdown=3,
        log_config=None,
    )
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _tells_expected(record, app.state))
    listener = _listen(settings)
    if settings.port == 0:
        settings.port = listener.getsockname()[1]

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                gc.collect()
                gc.freeze()  # else a report of thousands of slots sets off walks over all that was imported
                text = json.dumps({"url": settings.url}) if as_json else f"Slotline at {settings.url}"
                out.print(text, soft_wrap=True)

    server = Server(config)
    with contextlib.suppress(SystemExit):  # uvicorn's way to say that it did not start
        server.run(sockets=[listener])
    if not server.started:
        raise CliError(f"the server did not start: {_why(app.state)}")


def settings_or_fail(**values: object) -> Settings:
    """Settings from the environment and `values`; CliError names each wrong variable."""
    try:
        return load_settings(**values)
    except ValidationError as error:
        raise CliError("; ".join(_setting_error(one) for one in error.errors())) from None
    except SettingsError as error:
        raise CliError(f"{error}: give JSON in it, as in SLOTLINE_QUEUES='{{\"default\": null}}'") from None


@tokens.command("create")
def create_token(name: TokenName, as_json: Json = False) -> None:
    """Make a token and show it, this once; the store keeps only its digest."""
    from service.api.auth import new_token, token_digest

    token = new_token()

    async def work(session: AsyncSession) -> None:
        store_token(session, name, token_digest(token), at=utc_now())

    try:
        asyncio.run(_in_store(work))
    except IntegrityError:
        raise CliError(f"there is a token named {name} already: choose another name, or revoke it") from None
    print(json.dumps({"name": name, "token": token}) if as_json else token)


@tokens.command("list")
def list_all_tokens(as_json: Json = False) -> None:
    """Names of the tokens that are valid."""
    found = asyncio.run(_in_store(list_tokens))
    rows = [{"name": token.name, "created_at": token.created_at.isoformat()} for token in found]
    if as_json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(row["name"], row["created_at"])


@tokens.command("revoke")
def revoke_token(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Make a token invalid."""
    if not asyncio.run(_in_store(lambda session: delete_token(session, name))):
        raise CliError(f"there is no token named {name}: `slotline token list` shows them")
    print(json.dumps({"revoked": name}) if as_json else f"revoked {name}")


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where data, log and traces go")] = Path(".slotline"),
    as_json: Json = False,
) -> None:
    """Train two small models on this machine and show where the time went."""
    from service.cli.demo import DemoFailed, run_demo
    from service.cli.local_server import ServerFailed

    try:
        rows = run_demo(directory=directory, console=err if as_json else out)
    except (DemoFailed, ServerFailed) as failure:
        raise CliError(str(failure)) from None
    if as_json:
        print(json.dumps(rows))


async def _in_store(work: Callable[[AsyncSession], Awaitable[T]]) -> T:
    """Run `work` in a write session of the database that the settings name."""
    database = Database(settings_or_fail().sqlalchemy_url)
    try:
        await database.start()
        async with database.write() as session:
            return await work(session)
    finally:
        await database.close()


def _setting_error(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    name = ".".join(str(part) for part in error["loc"])
    if not name:
        return message
    value = str(error["input"])
    shown = repr(value) if "@" not in value else "..."  # the password of a database's URL
    return f"SLOTLINE_{name.removeprefix('SLOTLINE_').upper()}={shown}: {message}"


def _tells_expected(record: logging.LogRecord, state: Any) -> bool:
    """Whether uvicorn shows the traceback of a failed start that `_why` tells in one line."""
    expected = isinstance(getattr(state, "start_error", None), OSError | RuntimeError | OperationalError)
    return expected and record.getMessage().startswith("Traceback")


def _why(state: Any) -> str:
    """What stopped the start, in one line."""
    error = getattr(state, "start_error", None)
    lines = str(getattr(error, "orig", None) or error or "its log above says why").strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen()  # at once: until then another server could take the same port
    except OSError as error:
        listener.close()
        where = f"cannot listen on {settings.host}:{settings.port} ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            raise CliError(f"{where}: another server runs there; end it or give --port") from None
        raise CliError(f"{where}: give --host and --port of this machine that you may use") from None
    return listener
