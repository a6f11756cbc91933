"""Forked processes beside new interpreters that run the same: arguments, environment, streams, ends; and refusals."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from service.orchestrator.ray.local_ray import _FORKED_WITH
from tests.polling import until
from worker.contract.forkserver import __main__ as forkserver
from worker.contract.forkserver import spawn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
SERVER = "from worker.contract.forkserver.__main__ import main; main()"
PRINT_ALL = """
import json, os, sys
import statistics
kept = [name for name in sys.path if name]
known = {name: os.environ[name] for name in ("GIVEN", "PATH") if name in os.environ}
print(json.dumps([sys.argv[1:], os.getcwd(), known, kept, __name__, sys.stdin.read(), sys.argv[0]]))
print("to standard error", file=sys.stderr)
"""
PARENT = "import os, sys; print(os.getppid(), 'statistics' in sys.modules, flush=True)"
SLEEP = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"asked to end\\n"), sys.exit(5)))
print(os.getpid(), flush=True)
time.sleep(600)
"""


class Server:
    """A fork server with few modules, and programs that are run through it, or by a new interpreter."""

    def __init__(self, folder: Path, more: str = ""):
        self.folder = folder
        name = f"slotline-test-{secrets.token_hex(8)}"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), spawn.SERVER_VARIABLE: name}
        self.environment["OMP_NUM_THREADS"] = "1"
        command = [sys.executable, "-c", f"{more}\n{SERVER}", "numpy", "statistics"]
        self.process = subprocess.Popen(command, env=self.environment)
        until(lambda: name in Path("/proc/net/unix").read_text())

    def program(self, text: str) -> str:
        path = self.folder / f"program-{secrets.token_hex(4)}.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    def start(self, *arguments: str, forks: bool = True, **options) -> subprocess.Popen[str]:
        through = ["-S", "-E", spawn.__file__] if forks else []
        options = {"env": self.environment, "cwd": self.folder} | options
        return subprocess.Popen(
            [sys.executable, *through, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *arguments: str, forks: bool = True, given: str = "", **options) -> tuple[int, str, str]:
        process = self.start(*arguments, forks=forks, **options)
        out, error = process.communicate(given, timeout=LIMIT_S)
        return process.returncode, out, error

    def forks(self, **options) -> bool:
        """True if a program is run by a process that the server forked."""
        code, out, error = self.run(self.program(PARENT), **options)
        assert code == 0, error
        parent, imported = out.split()
        assert (parent == str(self.process.pid)) == (imported == "True")
        return imported == "True"


@pytest.fixture
def server(tmp_path):
    made = Server(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()


def test_a_process_that_ends_at_once_is_known_with_its_end():
    """On a busy machine both lines of the server are there before the first is read: the end was lost, and its code 1."""
    server, spawned = socket.socketpair()
    with server, spawned:
        server.sendall(b'{"process": 7}\n{"code": 4, "signal": 0}\n')
        assert spawn._receive(spawned) == {"process": 7}
        assert spawn._receive(spawned) == {"code": 4, "signal": 0}
        server.close()
        assert spawn._receive(spawned) is None


def test_a_program_is_given_what_an_interpreter_gives_it(server):
    assert server.forks()
    path = server.program(PRINT_ALL)
    environment = {**server.environment, "GIVEN": "a value", "PYTHONPATH": f"{ROOT}{os.pathsep}/elsewhere"}
    for arguments in ([path, "one", "--two=2"], ["-u", path]):
        forked, plain = (
            server.run(*arguments, forks=forks, given="typed", env=environment) for forks in (True, False)
        )
        assert forked == plain
        argv, folder, known, path_entries, name, given, _ = json.loads(forked[1])
        assert (folder, name, given) == (str(server.folder), "__main__", "typed")
        assert known["GIVEN"] == "a value" and "/elsewhere" in path_entries
        assert argv == arguments[arguments.index(path) + 1 :]


def test_a_module_is_run_as_an_interpreter_runs_it(server):
    (server.folder / "mine.py").write_text(PRINT_ALL)
    forked, plain = (server.run("-u", "-m", "mine", "x", "-u", forks=forks) for forks in (True, False))
    assert forked == plain and json.loads(forked[1])[0] == ["x", "-u"]


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('no more')",
        "import os; os._exit(4)",
        "import atexit; atexit.register(print, 'at the end'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGABRT)",
    ],
)
def test_a_program_ends_as_it_does_by_itself(server, ending):
    path = server.program(ending)
    assert server.run(path) == server.run(path, forks=False)


def test_a_program_logs_as_it_sets_up_and_masks_its_secrets(server):
    """As drivers do: a logger that had its handlers from the server would show what the program hides."""
    path = server.program(
        """
        import logging
        from worker.contract.logs import mask_output, set_up_logging
        mask = mask_output()
        set_up_logging(level="INFO", log_format="json")
        mask.hide(["hunter2-and-more"])
        logging.getLogger("a.driver").info("told hunter2-and-more")
        """
    )
    forked, plain = (json.loads(server.run(path, forks=forks)[2]) for forks in (True, False))
    assert forked["message"] == plain["message"] == "told ***"
    assert forked.keys() == plain.keys() and forked["logger"] == "a.driver"


def test_an_error_has_its_traceback(server):
    path = server.program("def broken():\n    raise ValueError('wrong')\nbroken()\n")
    code, out, error = server.run(path)
    assert (code, out) == (1, "") and error.endswith("ValueError: wrong\n") and f'"{path}", line 2' in error


def test_signals_are_handed_on_and_the_program_ends_with_who_asked_for_it(server):
    process = server.start(server.program(SLEEP))
    assert process.stdout.readline()
    process.terminate()
    assert (*process.communicate(timeout=LIMIT_S), process.returncode) == ("asked to end\n", "", 5)
    process = server.start(server.program(SLEEP))
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until(lambda: not Path(f"/proc/{child}").exists())
    assert server.forks()  # the server goes on


def test_a_program_that_ends_together_with_who_asked_for_it_ends_no_other(server):
    """The server, which waits for a request meanwhile, finds both ends at once."""
    other = server.start(server.program(SLEEP))
    assert other.stdout.readline()
    process = server.start(server.program(SLEEP))
    child = int(process.stdout.readline())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.connect("\0" + server.environment[spawn.SERVER_VARIABLE])
        socket.send_fds(asker, [struct.pack("!I", 10)], [0, 1, 2])  # ten bytes follow, which never come
        os.kill(child, signal.SIGKILL)
        until(lambda: Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        process.kill()
        process.communicate(timeout=LIMIT_S)
    assert server.forks()
    other.terminate()
    assert (*other.communicate(timeout=LIMIT_S), other.returncode) == ("asked to end\n", "", 5)


def test_programs_end_with_the_server_and_later_ones_have_an_interpreter_of_their_own(server):
    process = server.start(server.program(SLEEP))
    child = int(process.stdout.readline())
    server.process.kill()
    server.process.wait()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    until(lambda: not Path(f"/proc/{child}").exists())
    assert not server.forks()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OMP_NUM_THREADS", "2"),
        ("LD_LIBRARY_PATH", "/opt"),
        ("OMP_NUM_THREADS", None),
        ("PYTHONHASHSEED", "1"),
    ],
)
def test_a_variable_that_libraries_read_when_they_are_imported_takes_an_interpreter_of_its_own(
    server, variable, value
):
    environment = {name: text for name, text in server.environment.items() if name != variable}
    if value is not None:
        environment[variable] = value
    assert not server.forks(env=environment)
    assert server.forks(env={**server.environment, "CUDA_VISIBLE_DEVICES": "1", "ANYTHING": "else"})


@pytest.mark.parametrize("name", ["statistics.py", "numpy/__init__.py"])
@pytest.mark.parametrize("by_path", [False, True])
def test_a_module_of_the_users_own_that_has_the_name_of_an_imported_one_is_what_is_imported(
    server, tmp_path, name, by_path
):
    code = f"import {name.partition('.')[0].partition('/')[0]} as module; print(module.own)"
    (server.folder / "mine.py").write_text(code)
    folder = tmp_path / "elsewhere" if by_path else server.folder
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("own = 'of the user'")
    environment = server.environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}" if by_path else str(ROOT)}
    assert server.run("-m", "mine", env=environment) == (0, "of the user\n", "")


def test_folders_without_modules_of_those_names_take_no_interpreter(server):
    (server.folder / "statistics").mkdir()
    (server.folder / "numpy.txt").write_text("")
    (server.folder / "mine.py").write_text("")
    assert server.forks()


def test_random_numbers_differ_from_process_to_process(server):
    path = server.program("import random, numpy; print(random.random(), numpy.random.rand())")
    numbers = [number for _ in range(3) for number in server.run(path)[1].split()]
    assert len({*numbers}) == 6


def test_a_server_with_another_thread_forks_nothing(tmp_path):
    more = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    server = Server(tmp_path, more)
    try:
        assert not server.forks()
    finally:
        server.process.kill()
        server.process.wait()


def test_requests_that_are_none_are_closed_and_the_server_goes_on(server):
    for sent in (b"", b"\0\0\0\4null", struct.pack("!I", 1 << 30)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
            asker.connect("\0" + server.environment[spawn.SERVER_VARIABLE])
            asker.sendall(sent)
            asker.shutdown(socket.SHUT_WR)
            asker.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionResetError):  # it was closed with a part unread
                assert asker.recv(100) == b""
    assert server.forks()


def test_what_an_interpreter_understands_and_a_fork_does_not_is_refused():
    def refusal(*arguments: str) -> str | None:
        return forkserver.Request(arguments, {}, "/", ()).refusal({})

    assert refusal("-c", "pass") == "arguments ('-c', 'pass') are not understood"
    assert refusal("-u", "-c", "pass") is not None and refusal("-u") is not None
    assert refusal() is not None
    assert refusal("-m", "worker.driver") is None and refusal("default_worker.py", "--x") is None


def test_what_imports_set_a_forked_process_may_hand_on(monkeypatch):
    """As torch sets the folder of its compiler's cache: processes of a forked one come with it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/cache")

    def refusal(environment: dict[str, str], own: dict[str, str]) -> str | None:
        return forkserver.Request(("-m", "worker.driver"), environment, "/", ()).refusal(own)

    set_here = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/cache"}
    assert refusal(set_here, {}) is None and refusal({}, {}) is None
    assert "TORCHINDUCTOR_CACHE_DIR is read" in refusal({"TORCHINDUCTOR_CACHE_DIR": "/tmp/other"}, {})
    assert "TORCHINDUCTOR_CACHE_DIR is read" in refusal({}, {"TORCHINDUCTOR_CACHE_DIR": "/tmp/mine"})


def test_what_ray_imports_is_there_before_a_process_is_forked():
    """Four fifths of the time of importing Ray, in each of its processes, were other packages."""
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED, *_FORKED_WITH],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    threads, *packages = found.stdout.split()
    assert threads == "1", "a server with another thread forks nothing"
    assert not {"requests", "google", "jsonschema", "yaml", "msgpack", "httpx", "torch"} & {*packages}
    assert "ray" in packages


IMPORTED = """
import importlib, os, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(os.listdir("/proc/self/task")))
before = {*sys.modules}
import worker.driver.__main__
print(*({name.split(".")[0] for name in sys.modules} - {name.split(".")[0] for name in before}))
"""


def test_only_an_environment_that_names_a_server_has_a_forking_interpreter(monkeypatch):
    monkeypatch.delenv(spawn.SERVER_VARIABLE, raising=False)
    assert spawn.forking_interpreter() is None
    monkeypatch.setenv(spawn.SERVER_VARIABLE, "some")
    words = spawn.forking_interpreter()
    assert words.split() == [sys.executable, "-S", "-E", spawn.__file__]
