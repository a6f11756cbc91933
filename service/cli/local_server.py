"""`slotline serve` as a child process: started, waited for, ended; for the demo and the end-to-end tests.

Knows a command and its /readyz, nothing of the inside of the control plane.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from service.client import Client

_READY_LIMIT_S = 240.0
_STOP_LIMIT_S = 60.0


class ServerFailed(RuntimeError):
    """The server ended or never became ready; the message holds the end of its log."""


class LocalServer:
    """On 127.0.0.1 at `port`, with its data in `directory`, in a session of its own; a context that ends it.

    Port and data stay the same when it is started again.
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
        """Returns when it is ready. Raises ServerFailed."""
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
        """Raise ServerFailed when it has ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ServerFailed(f"`slotline serve` ended with code {code}; the end of its log:\n{self.tail()}")

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
        """As a crash would: no goodbye."""
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
        raise ServerFailed(
            f"no answer from {self.url}/readyz in {_READY_LIMIT_S:.0f} s; its log:\n{self.tail()}"
        )
