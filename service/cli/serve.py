"""`slotline serve`, `migrate`, `backup` and `restore`, and LocalServer, which runs `serve` as a child process.

`serve` runs the control plane in this process until Ctrl-C; it binds the port first, so that no other server can
take it. `migrate` brings the database to this version's tables before control planes start (the chart's hook).
LocalServer is for the demo and the end-to-end tests: it knows the command and /readyz, nothing of the control
plane's inside. Settings that are wrong are named one by one; values of tokens, keys and URLs with a password are
not printed. What the client alone does not bring is imported inside functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError

from service.cli.extras import require_extras
from service.cli.output import CliError, JsonOption, out, print_message
from service.client.client import Client
from service.settings.settings import RetiredSettingError, Settings, load_settings, misspelt_settings
from worker.contract.logs import set_up_logging

if TYPE_CHECKING:
    from service.store.database import Database

_REQUEST_HEAD_LIMIT_BYTES = 65536
"""Limit of a request's line and headers together."""
_READY_LIMIT_S = 240.0
_STOP_LIMIT_S = 60.0
_THREAD_SWITCH_S = 5e-4
"""Time after which a thread that decides over thousands of jobs lets requests go on; ten times as much is Python's own."""
app = typer.Typer()


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (SLOTLINE_HOST)")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (SLOTLINE_PORT)")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the control plane; with no RAY_ADDRESS it starts a local Ray too. Ctrl-C ends both."""
    import uvicorn

    from service.control_plane import control_plane_app

    settings = settings_or_fail(host=host, port=port)
    if settings.ray_address is None and settings.has_default_cluster:
        require_extras("worker", otherwise=", for a local Ray, or set RAY_ADDRESS to a cluster's dashboard")
    set_up_logging(
        level=settings.log_level.upper(),
        log_format=settings.log_format,
        line_format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        time_format=None,
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
        # httptools, the default, takes a header without end, and copies what it has with every piece
        http="h11",
        h11_max_incomplete_event_size=_REQUEST_HEAD_LIMIT_BYTES,
    )
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_expected_traceback(record, app.state))
    listener = _bind_listener(settings)
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

    sys.setswitchinterval(_THREAD_SWITCH_S)
    server = Server(config)
    with contextlib.suppress(SystemExit):  # uvicorn's way to say that it did not start
        server.run(sockets=[listener])
    if not server.started:
        raise CliError(f"the server did not start: {_start_error_text(app.state)}")


def _is_expected_traceback(record: logging.LogRecord, state: Any) -> bool:
    """True for uvicorn's traceback of a failed start that `_start_error_text` says in one line."""
    from sqlalchemy.exc import OperationalError

    expected = isinstance(getattr(state, "start_error", None), OSError | RuntimeError | OperationalError)
    return expected and record.getMessage().startswith("Traceback")


def _start_error_text(state: Any) -> str:
    """The cause of a failed start, in one line."""
    error = getattr(state, "start_error", None)
    lines = str(getattr(error, "orig", None) or error or "its log above says why").strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bind_listener(settings: Settings) -> socket.socket:
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


@app.command()
def migrate(
    to: Annotated[
        str,
        typer.Option(
            metavar="REVISION",
            help="Another revision than this version's: an older one, before an older Slotline is started. "
            "Tables and columns that were added since are dropped",
        ),
    ] = "head",
    as_json: JsonOption = False,
) -> None:
    """Bring the database that the settings name to this version's tables; `slotline serve` does it, too."""
    from sqlalchemy.exc import SQLAlchemyError

    from service.store.database import Database, IncompatibleTablesError, NoSuchRevisionError

    database = Database(settings_or_fail().sqlalchemy_url)
    shown = database.url.render_as_string(hide_password=True)
    try:
        asyncio.run(_start_and_close(database, to))
    except (SQLAlchemyError, OSError, IncompatibleTablesError, NoSuchRevisionError) as error:
        why = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise CliError(f"{shown} was not migrated: {why[0] if why else type(error).__name__}") from None
    print(json.dumps({"migrated": shown}) if as_json else f"migrated {shown}")


def _database_and_key() -> tuple[Any, Path]:
    """The URL of the database that the settings name, and the file with the key of its secrets."""
    from sqlalchemy import make_url

    from service.store.secrets import KEY_FILE

    settings = settings_or_fail()
    return make_url(settings.sqlalchemy_url), settings.data_dir.expanduser() / KEY_FILE


BackupLimitOption = Annotated[
    float, typer.Option("--limit-s", min=1.0, help="Limit of PostgreSQL's program, in seconds")
]


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The tar file to write; - is standard output")],
    limit_s: BackupLimitOption = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Write the database that the settings name, with the key of secrets beside SQLite, to a file; jobs and server go on."""
    from service.cli.backup import BackupError, write_backup

    url, key = _database_and_key()
    try:
        if str(file) == "-":
            about = write_backup(url, key, sys.stdout.buffer, limit_s=limit_s)
        else:
            about = _write_whole(file, lambda target: write_backup(url, key, target, limit_s=limit_s))
    except (BackupError, OSError) as error:
        raise CliError(str(error)) from None
    if as_json and str(file) != "-":
        print(json.dumps(about))
    else:
        print_message(f"{about['kind']} with tables of {about['revision']} as of {about['made_at']}: {file}")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="What `slotline backup` wrote; - is standard input")],
    replace: Annotated[bool, typer.Option("--replace", help="Also where the database has tables")] = False,
    limit_s: BackupLimitOption = 3600.0,
    as_json: JsonOption = False,
) -> None:
    """Bring the database that the settings name to what a backup holds; no control plane may serve it meanwhile."""
    from service.cli.backup import BackupError, restore_backup
    from service.store.database import DatabaseInUseError

    url, key = _database_and_key()
    try:
        with contextlib.ExitStack() as stack:
            source = sys.stdin.buffer if str(file) == "-" else stack.enter_context(open(file, "rb"))
            about = restore_backup(url, key, source, replace=replace, limit_s=limit_s)
    except (BackupError, DatabaseInUseError, OSError) as error:
        raise CliError(str(error)) from None
    if as_json:
        print(json.dumps(about))
    else:
        print_message(f"restored {about['kind']} with tables of {about['revision']} as of {about['made_at']}")


def _write_whole(file: Path, write: Callable[[BinaryIO], dict[str, Any]]) -> dict[str, Any]:
    """Write a new file that only its owner reads, or none: it may hold the key of secrets."""
    new = file.with_name(f".{file.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:
            about = write(target)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
    return about


async def _start_and_close(database: Database, to: str) -> None:
    try:
        await database.start(to=to)
    finally:
        await database.close()


def settings_or_fail(**values: object) -> Settings:
    """Settings from the environment and `values`; CliError names each wrong variable."""
    try:
        return load_settings(**values)
    except ValidationError as error:
        raise CliError("; ".join(map(_setting_error_text, error.errors()))) from None
    except RetiredSettingError as error:
        raise CliError(str(error)) from None
    except SettingsError as error:
        raise CliError(f"{error}: give JSON in it, as in SLOTLINE_QUEUES='{{\"default\": null}}'") from None


def _setting_error_text(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    name = ".".join(str(part) for part in error["loc"])
    if not name:
        return message
    value = str(error["input"])
    secret = (
        "@" in value or name.startswith("clusters") or name.upper().endswith(("TOKEN", "KEY"))
    )  # with @: the password of a database's URL
    shown = "..." if secret else repr(value)
    return f"SLOTLINE_{name.removeprefix('SLOTLINE_').upper()}={shown}: {message}"


class ServerFailedError(RuntimeError):
    """The server ended or never became ready; the message holds the end of its log."""


class LocalServer:
    """A server on 127.0.0.1 at `port`, with its data in `directory`, in a process session of its own.

    A context that starts and ends it. Port and data stay the same when it is started again.
    """

    def __init__(
        self, *, directory: Path, port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._environment = {
            **os.environ,
            "SLOTLINE_HOST": "127.0.0.1",
            "SLOTLINE_PORT": str(port),
            "SLOTLINE_DATA_DIR": str(directory),
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it is ready; ServerFailedError where it is not."""
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "serve"],
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def check(self) -> None:
        """Raise ServerFailedError when it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ServerFailedError(
                f"`slotline serve` ended with code {code}; the end of its log:\n{self.tail()}"
            )

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End it in order; by force when that takes too long."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it by SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_LIMIT_S
        with Client(self.url, timeout_s=5.0) as client:
            while time.monotonic() < deadline:
                self.check()
                if client.ready():
                    return
                time.sleep(0.2)
        raise ServerFailedError(
            f"no answer from {self.url}/readyz in {_READY_LIMIT_S:.0f} s; its log:\n{self.tail()}"
        )
