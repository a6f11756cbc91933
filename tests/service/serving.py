"""The control plane on a real socket in a thread, with a cluster in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import uvicorn
from fastapi import FastAPI

from service.api.dependencies import service_of
from service.control_plane import ControlPlane, control_plane_app
from service.orchestrator.attempts.outcome import Backoff, DriverReport, apply_report
from service.settings.settings import Settings
from service.store.database import utc_now
from tests.polling import until
from tests.service.fake_cluster import FakeCluster

T = TypeVar("T")


def set_backoff(service: ControlPlane, backoff: Backoff) -> None:
    """Pauses between attempts, whoever saw the last one end."""
    service.backoff = service.orchestrator.attempts.backoff = backoff


@dataclass
class Served:
    url: str
    app: FastAPI
    cluster: FakeCluster
    loop: asyncio.AbstractEventLoop
    seen: list[str]
    """Paths of the requests, in order."""

    def requests(self, path: str) -> int:
        return self.seen.count(path)

    def run(self, work: Callable[[ControlPlane], Awaitable[T]]) -> T:
        """Await `work(service)` in the server's own event loop."""
        return asyncio.run_coroutine_threadsafe(work(service_of(self.app)), self.loop).result(60)


@contextmanager
def serve(settings: Settings, *, port: int = 0, cluster: FakeCluster | None = None) -> Iterator[Served]:
    """A served application with short rounds and no pauses between attempts, on a cluster of its own or the one given;
    ended with its thread."""
    with mock.patch("service.orchestrator.loop.TICK_S", 0.05):
        yield from _serve(settings, port, cluster or FakeCluster())


def _serve(settings: Settings, port: int, cluster: FakeCluster) -> Iterator[Served]:
    app = control_plane_app(settings, cluster)
    seen: list[str] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.append(scope["path"])
        await app(scope, receive, send)

    config = uvicorn.Config(noted, port=port, log_level="error", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive(), "the server")
        assert thread.is_alive(), "the server ended before it began"
        set_backoff(service_of(app), Backoff(0.0, 0.0))
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", app, cluster, loops[0], seen)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def report(served: Served, job_id: str, sequence: int, **fields: Any) -> None:
    """What the driver of the job's first attempt would say."""

    async def work(service: ControlPlane) -> None:
        async with service.database.write() as session:
            await apply_report(
                session,
                f"{job_id}-1",
                DriverReport(sequence, **fields),
                at=utc_now(),
                backoff=Backoff(),
                keep=5,
            )

    served.run(work)
