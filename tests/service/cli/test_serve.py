"""The server as a command: what stops its start is told with its name, in one line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.settings.settings import misspelt_settings
from tests.service.cli.conftest import Run
from tests.service.serving import Served


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SLOTLINE_PORT": "70000"}, "SLOTLINE_PORT='70000'"),
        ({"SLOTLINE_HOST": "0.0.0.0"}, "SLOTLINE_API_TOKEN"),
        ({"RAY_ADDRESS": "ray://head:10001"}, "http://head:8265"),
        ({"SLOTLINE_LOG_LEVEL": "loud"}, "SLOTLINE_LOG_LEVEL='loud'"),
        ({"SLOTLINE_QUEUES": "default"}, "JSON"),
        ({"SLOTLINE_QUEUES": '{"a b": 1}'}, "SLOTLINE_QUEUES"),
        ({"SLOTLINE_PUBLIC_URL": "slotline.internal"}, "write http://"),
        ({"SLOTLINE_DATABASE_URL": "mysql://me:secret@host/x"}, "write postgresql://"),
        ({"SLOTLINE_KEEP_HISTORY_DAYS": "-0.5"}, "-1 for ever"),
        ({"SLOTLINE_HOST": "203.0.113.7", "SLOTLINE_API_TOKEN": "x"}, "203.0.113.7"),
        ({"SLOTLINE_DRIVER_PYTHON": "python3"}, "SLOTLINE_CLUSTERS, with driver_python"),
        (
            {"SLOTLINE_TICK_S": "1"},
            "SLOTLINE_TICK_S is no setting any more: its value is fixed now. Remove it",
        ),
    ],
)
def test_wrong_settings_stop_the_server_with_their_names(
    run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = run("serve")
    assert result.code == 1 and says in result.err.replace("\n", " ")
    assert "secret" not in result.err and "Traceback" not in result.err


def test_a_setting_with_a_typing_mistake_is_told():
    of_others = ["SLOTLINE_URL", "SLOTLINE_METRICS_HOST", "SLOTLINE_ATTEMPT_TOKEN", "SLOTLINE_IMAGE", "HOME"]
    assert misspelt_settings(["SLOTLINE_QUEUE", "SLOTLINE_QUEUES", *of_others]) == {
        "SLOTLINE_QUEUE": "SLOTLINE_QUEUES"
    }


def test_a_second_server_on_the_same_data_is_refused_and_says_so(
    run: Run, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    monkeypatch.setattr("service.store.database._SQLITE_LOCK_WAIT_S", 0.0)
    result = run("serve", "--port", 0)
    assert result.code == 1 and "another Slotline serves" in result.err.replace("\n", " ")


@pytest.mark.slow
def test_a_start_that_fails_as_it_may_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    for setting in (
        f"SLOTLINE_DATA_DIR={tmp_path / 'file'}",
        "SLOTLINE_DATABASE_URL=postgresql://127.0.0.1:9/x",
    ):
        name, _, value = setting.partition("=")
        environment = {**os.environ, name: value, "RAY_ADDRESS": "http://127.0.0.1:9"}
        command = [sys.executable, "-m", "service.cli", "serve", "--port", "0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 1 and "error: the server did not start: " in done.stderr
        assert "Traceback" not in done.stderr + done.stdout


def test_a_port_in_use_is_named_before_anything_starts(run: Run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--port", port)
        assert result.code == 1 and str(port) in result.err


@contextlib.contextmanager
def serving(tmp_path: Path, **settings: str) -> Iterator[httpx.URL]:
    """The command as a process, without a cluster."""
    environment = {**os.environ, "SLOTLINE_DATA_DIR": str(tmp_path), "RAY_ADDRESS": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0", "--json"]
    process = subprocess.Popen(command, env=environment | settings, stdout=subprocess.PIPE, text=True)
    try:
        yield httpx.URL(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", [b"x" * 4096, b"name: " + b"y" * 4088 + b"\r\n"], ids=["one header", "many headers"]
)
def test_headers_without_end_are_cut_off(tmp_path: Path, piece: bytes):
    with serving(tmp_path) as url:
        with socket.create_connection((url.host, url.port), timeout=20) as caller:
            begin = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            caller.sendall(begin if b":" in piece else begin + b"name: ")
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < 2**23 and not select.select([caller], [], [], 0)[0]:
                    caller.sendall(piece)
                    sent += len(piece)
            assert sent < 2**22, "the server reads on and on"
        long = {"name": "y" * 30_000}
        assert httpx.get(f"{url}/healthz", headers=long, trust_env=False).status_code == 200, (
            "long is not endless"
        )


@pytest.mark.slow
def test_a_stranger_is_told_at_once_and_the_connection_closed_before_the_body_came(tmp_path: Path):
    with (
        serving(tmp_path, SLOTLINE_API_TOKEN="secret") as url,
        socket.create_connection((url.host, url.port), timeout=20) as caller,
    ):
        head = "POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        caller.sendall(f"{head}Content-Length: 30000000\r\n\r\n".encode() + b'{"name":')
        answer = b""
        while part := caller.recv(65536):  # to the end: the server's side is closed
            answer += part
        assert answer.startswith(b"HTTP/1.1 401 ")
