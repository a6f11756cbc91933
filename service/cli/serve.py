"""`slotline serve`: the control plane in this process, until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import socket
from typing import Annotated, Any

import typer
from sqlalchemy.exc import OperationalError

from service.cli.environment import settings_or_fail
from service.cli.output import CliError, Json, out
from service.settings import Settings, misspelt_settings
from worker.logs import set_up

_HEAD_LIMIT_BYTES = 65536
"""Of a request's line and headers together."""

app = typer.Typer()


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
    set_up(
        level=settings.log_level.upper(),
        form=settings.log_format,
        text="%(asctime)s %(levelname)s %(name)s: %(message)s",
        clock=None,
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
        h11_max_incomplete_event_size=_HEAD_LIMIT_BYTES,
    )
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_expected_traceback(record, app.state))
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


def _is_expected_traceback(record: logging.LogRecord, state: Any) -> bool:
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
