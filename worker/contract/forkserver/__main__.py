"""Serves processes: `python -m worker.contract.forkserver MODULES` imports the modules and forks for requests of spawn.py.

It has one thread, no device and no job: what it forks has its modules and nothing else in common with another process.
A request whose environment differs in what libraries read while they are imported is refused, and so are other users.
Processes end with the server, and with the spawn.py that asked for them.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from worker.contract.forkserver.spawn import SERVER_VARIABLE

log = logging.getLogger("worker.contract.forkserver")

READ_AT_IMPORT = (
    *("PYTHON", "LD_", "GLIBC_", "MALLOC_", "TORCH", "PYTORCH_", "NPY_", "CUDA", "NVIDIA_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "FSSPEC_", "PROMETHEUS_", "TQDM_"),
    *("PROTOCOL_BUFFERS_", "HTTPX_"),
)
"""Beginnings of names of variables that the interpreter and libraries read when they start."""
_READ_LATER = ("PYTHONPATH", "PYTHONBREAKPOINT", "CUDA_VISIBLE_DEVICES")
"""Of these, what `Request.become` sets up itself, or what is read when a device is first used."""
_REQUEST_LIMIT_S = 10.0
_REQUEST_LIMIT_BYTES = 8 << 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Request:
    """The process that is asked for: an interpreter's arguments, its environment and folder, and three open streams."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    streams: tuple[int, ...]

    def refusal(self, own: Mapping[str, str]) -> str | None:
        """Why a process forked from one with the environment `own` would not be what an interpreter is; None: it is."""
        for name in sorted({*own, *self.environment}):
            read = name.startswith(READ_AT_IMPORT) and name not in _READ_LATER
            # what imports set here, forked processes hand on to their own
            values = own.get(name), os.environ.get(name)
            if read and self.environment.get(name) not in values:
                return f"{name} is read when libraries are imported"
        program = self._program
        if not program or (program[0].startswith("-") and program[0] != "-m") or program == ("-m",):
            return f"arguments {self.arguments[:2]} are not understood"
        own_path = own.get("PYTHONPATH", "").split(os.pathsep)
        for folder in (self.folder, *self.environment.get("PYTHONPATH", "").split(os.pathsep)):
            if folder and folder not in own_path and (name := _imported_from_elsewhere(folder)):
                return f"{folder} has a module {name}, and another one was imported"
        return None

    def become(self, own: Mapping[str, str]) -> None:
        """Make this process, just forked from one that began with the environment `own`, what a new interpreter would be
        after the same imports."""
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)
            os.close(stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        set_by_imports = {name: value for name, value in os.environ.items() if name not in own}
        own_path = own.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(set_by_imports)
        os.environ.update(self.environment)
        os.chdir(self.folder)
        rest = [path for path in sys.path[1:] if path not in own_path]
        sys.path[:] = [*filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep)), *rest]
        sys.path_importer_cache.clear()
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def run(self) -> None:
        """Run the arguments as the interpreter's main program."""
        program = self._program
        if program[0] == "-m":
            sys.argv = [*program[1:]]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*program]
            sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
            runpy.run_path(program[0], run_name="__main__")

    @property
    def _program(self) -> tuple[str, ...]:
        """The arguments without a -u before them: lines are written as they come in any case."""
        return self.arguments[1:] if self.arguments[:1] == ("-u",) else self.arguments


@dataclass
class Forkserver:
    """Answers requests at an abstract socket until it is killed; `serve` returns in the processes that it forks."""

    listener: socket.socket
    environment: Mapping[str, str]
    """That with which the server began."""
    _askers: dict[int, socket.socket] = field(default_factory=dict)

    def serve(self) -> Request:
        """Fork for each request; returns, in the new process, its request."""
        selector = selectors.DefaultSelector()
        wake, woken = socket.socketpair()
        for end in (wake, woken, self.listener):
            end.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(self.listener, selectors.EVENT_READ, "request")
        selector.register(wake, selectors.EVENT_READ, "ended")
        while True:
            for key, _ in selector.select():
                if key.data == "ended":
                    with contextlib.suppress(BlockingIOError):
                        wake.recv(4096)
                    self._report_ended(selector)
                elif key.data == "request":
                    request = self._answer(selector)
                    if request is not None:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for end in (wake, woken, self.listener, *self._askers.values()):
                            end.close()
                        selector.close()
                        return request
                elif (
                    self._askers.pop(key.data, None) is not None
                ):  # who asked is gone, and the process had not ended
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    for kill in (os.killpg, os.kill):  # it may not have begun its group yet
                        with contextlib.suppress(ProcessLookupError):
                            kill(key.data, signal.SIGKILL)

    def _answer(self, selector: selectors.BaseSelector) -> Request | None:
        """Take one request; the request itself in the process that was forked for it, None here."""
        try:
            asker, _ = self.listener.accept()
        except OSError:
            return None
        try:
            asker.settimeout(_REQUEST_LIMIT_S)
            request = _read_request(asker)
        except (OSError, ValueError, KeyError) as error:
            log.warning("a request could not be read: %r", error)
            asker.close()
            return None
        refusal = request.refusal(self.environment) or _forking_is_unsafe()
        if refusal:
            log.info("%s: %s; a new interpreter runs it", " ".join(request.arguments[:3]), refusal)
            self._close(request, asker)
            return None
        server = os.getpid()
        try:
            process = os.fork()
        except OSError as error:
            log.warning("%s: %s; a new interpreter may run it", " ".join(request.arguments[:3]), error)
            self._close(request, asker)
            return None
        if process == 0:
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            os.setsid()
            asker.close()
            return request
        for stream in request.streams:
            os.close(stream)
        with contextlib.suppress(OSError):
            asker.sendall(json.dumps({"process": process}).encode() + b"\n")
        self._askers[process] = asker
        selector.register(asker, selectors.EVENT_READ, process)
        return None

    def _close(self, request: Request, asker: socket.socket) -> None:
        for stream in request.streams:
            os.close(stream)
        asker.close()

    def _report_ended(self, selector: selectors.BaseSelector) -> None:
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            asker = self._askers.pop(process, None)
            if asker is None:
                continue
            selector.unregister(asker)
            code = os.waitstatus_to_exitcode(status)
            end = {"code": max(code, 0), "signal": max(-code, 0)}
            with contextlib.suppress(OSError):
                asker.sendall(json.dumps(end).encode() + b"\n")
            asker.close()


def _read_request(asker: socket.socket) -> Request:
    """The request of a process of this user. Raises ValueError for another user's, OSError where it does not come."""
    _, user, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        raise ValueError(f"it came from user {user}")
    streams = array.array("i")
    head, ancillary, _, _ = asker.recvmsg(4, socket.CMSG_LEN(3 * streams.itemsize))
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
    try:
        (length,) = struct.unpack("!I", head)
        if length > _REQUEST_LIMIT_BYTES or len(streams) != 3:
            raise ValueError(f"it has {length} bytes and {len(streams)} streams")
        body = b""
        while len(body) < length:
            piece = asker.recv(length - len(body))
            if not piece:
                raise ValueError("it ends before its end")
            body += piece
        read: dict[str, Any] = json.loads(body)
        return Request(tuple(read["arguments"]), read["environment"], read["folder"], tuple(streams))
    except (struct.error, ValueError, KeyError, TypeError, OSError) as error:
        for stream in streams:
            os.close(stream)
        raise ValueError(str(error)) from error


def _imported_from_elsewhere(folder: str) -> str | None:
    """A module of this folder in whose place this process has imported another one of its name; None where there is none."""
    try:
        entries = os.listdir(folder)
    except OSError:
        return None
    for entry in entries:
        name, _, ending = entry.partition(".")
        module = sys.modules.get(name)
        path = os.path.join(folder, entry)
        if module is None or not (ending == "py" or os.path.exists(os.path.join(path, "__init__.py"))):
            continue
        file = getattr(module, "__file__", None) or ""
        if not os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), "")):
            return name
    return None


def _forking_is_unsafe() -> str | None:
    """Why a fork could not be relied on: another thread's locks would stay locked for ever."""
    threads = len(os.listdir("/proc/self/task"))
    return None if threads == 1 else f"this process has {threads} threads"


def _exit_code(request: Request) -> int:
    """Run the request to its end, and return what the interpreter would exit with."""
    try:
        request.run()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End this process as an interpreter does, but for its modules, which would be copied to be taken apart."""
    threading._shutdown()  # waits for threads, as multiprocessing has its processes do
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _log_to_stderr() -> None:
    """Log the server's own lines. The root logger stays as it is: what a process finds there it keeps, where it would log
    in its own format and have its secrets masked."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def main() -> NoReturn:
    """Serve at the abstract socket that SLOTLINE_FORKSERVER names; in a forked process, run its request.

    The modules of the command line must keep nothing of the environment that differs from process to process: Ray does.
    """
    _log_to_stderr()
    own = dict(os.environ)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + own[SERVER_VARIABLE])
    listener.listen(1024)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is shared stays shared
    request = Forkserver(listener, own).serve()
    request.become(own)
    _end(_exit_code(request))


if __name__ == "__main__":
    main()
