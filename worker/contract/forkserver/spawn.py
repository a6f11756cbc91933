"""Stands in for a Python interpreter: `python -S -E spawn.py ARGUMENTS` runs what `python ARGUMENTS` would.

Where the server that SLOTLINE_FORKSERVER names is there, a process forked from it runs the arguments, with this one's
environment, folder and standard streams; this one waits for it, hands on signals, and ends as it does. Where it is not,
or refuses, this process becomes the interpreter itself. Imports only what starts at once: no site packages, no torch.
"""

import array
import contextlib
import json
import os
import shlex
import signal
import socket
import struct
import sys

SERVER_VARIABLE = "SLOTLINE_FORKSERVER"
_ANSWER_LIMIT_S = 60.0
"""For the server to say that it forked; it may still be importing, as a new interpreter would be."""
_HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run the arguments by the server, or by the interpreter in this process's place."""
    server = _server()
    child = server and _fork(server)
    if child is None:
        if server is not None:
            server.close()
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    for number in _HANDED_ON:
        signal.signal(number, lambda number, _: _kill(child, number))
    status = _receive(server)
    if status is None:  # the server is gone, and its processes with it
        sys.exit(1)
    if status["signal"]:
        if status["signal"] != signal.SIGKILL:
            signal.signal(status["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), status["signal"])
    os._exit(status["code"])


def forking_interpreter() -> str | None:
    """The words of a shell that run this process's Python through the server; None where its environment names none."""
    return through_server(sys.executable) if SERVER_VARIABLE in os.environ else None


def through_server(python: str) -> str:
    """The words of a shell that run `python` through the server that the environment there names, if it does."""
    return f"{shlex.quote(python)} -S -E {shlex.quote(os.path.abspath(__file__))}"


def _server() -> socket.socket | None:
    name = os.environ.get(SERVER_VARIABLE)
    if not name:
        return None
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.connect("\0" + name)
    except OSError:
        server.close()
        return None
    return server


def _fork(server: socket.socket) -> int | None:
    """The process that runs the arguments; None where there is none."""
    request = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}
    body = json.dumps(request).encode()
    streams = array.array("i", [0, 1, 2])
    try:
        server.settimeout(_ANSWER_LIMIT_S)
        server.sendmsg([struct.pack("!I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        server.sendall(body)
        answer = _receive(server)
        server.settimeout(None)
    except OSError:
        return None
    return None if answer is None else answer["process"]


def _receive(server: socket.socket) -> dict | None:
    """One line of JSON, without what came with it of the next; None where the other end is gone."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            piece = server.recv(1)
        except ConnectionError:
            piece = b""
        if not piece:
            return None
        line += piece
    return json.loads(line)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


if __name__ == "__main__":
    main()
