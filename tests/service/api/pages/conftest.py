"""Headless Chromium for tests of the pages, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect

from tests.missing import leave_out
from tests.polling import until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab: its errors, its DOM by JavaScript, its mouse, and screenshots."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=100))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(json.dumps(params["entry"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its script has filled it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.body?.dataset.ready === 'true'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        got = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def wait(self, expression: str, seconds: float = 60.0) -> None:
        until(
            lambda: self.js(f"Boolean({expression})"),
            lambda: f"never true: {expression}; errors: {self.errors}",
            limit_s=seconds,
            every_s=0.05,
        )

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        self._mouse("mousePressed", selector)
        self._mouse("mouseReleased", selector)

    def download(self, selector: str, folder: Path, name: str) -> str:
        """Click a link and return the text of the file `name` that it saves."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.click(selector)
        until(
            lambda: (folder / name).exists(),
            lambda: f"{selector} saved {list(folder.iterdir())}, not {name}",
            limit_s=100,
            every_s=0.05,
        )
        return (folder / name).read_text()

    def _mouse(self, kind: str, selector: str) -> None:
        middle = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=middle[0], y=middle[1], **button)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The whole page, or what the window shows, as a PNG."""
        self._wait_for_a_view()
        got = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(got["data"]))

    def _wait_for_a_view(self) -> None:
        """Return once the browser has given a page that it has just gone to its place in the window.

        Until its first frame is drawn, a page that was loaded by a form or a link may stand in a view of no width, of
        which Chromium takes no screenshot.
        """
        self.js("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


@contextlib.contextmanager
def headless_chromium(profile: Path) -> Iterator[str]:
    """The DevTools address of a Chromium that keeps its files in `profile`; missing, it fails on CI and skips elsewhere."""
    if CHROMIUM is None:
        leave_out("chromium is not installed (Debian package `chromium`): the pages are not looked at")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-port=0", "--disable-background-networking", f"--user-data-dir={profile}"]
    with (profile / "log").open("wb") as log:
        process = subprocess.Popen([CHROMIUM, *flags, "about:blank"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{_debugging_port(process, profile)}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def new_tab(chromium: str) -> Iterator[Page]:
    """A fresh tab of the browser at this DevTools address."""
    target = httpx.put(f"{chromium}/json/new?about:blank", timeout=60).raise_for_status().json()
    try:
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Page(socket)
    finally:
        httpx.get(f"{chromium}/json/close/{target['id']}", timeout=60)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with headless_chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
def page(chromium: str) -> Iterator[Page]:
    with new_tab(chromium) as tab:
        yield tab


def _debugging_port(process: subprocess.Popen, profile: Path) -> int:
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and (text := file.read_text().split()):
            return int(text[0])
        time.sleep(0.05)
    raise RuntimeError(f"chromium did not start: {(profile / 'log').read_text()[-2000:]}")
