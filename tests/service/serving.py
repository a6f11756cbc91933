"""The control plane on a real socket in a thread, with a cluster in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import uvicorn
from fastapi import FastAPI

from service.api.app import create_app
from service.api.context import Service, service_of
from service.settings import Settings
from tests.service.fake_cluster import FakeCluster

T = TypeVar("T")


@dataclass
class Served:
    url: str
    app: FastAPI
    cluster: FakeCluster
    loop: asyncio.AbstractEventLoop

    def run(self, work: Callable[[Service], Awaitable[T]]) -> T:
        """Await `work(service)` in the server's own event loop."""
        return asyncio.run_coroutine_threadsafe(work(service_of(self.app)), self.loop).result(20)


@contextmanager
def serve(settings: Settings) -> Iterator[Served]:
    """A served application; ended with its thread."""
    cluster = FakeCluster()
    app = create_app(settings, cluster)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", log_config=None))
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it began"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Served(f"http://127.0.0.1:{port}", app, cluster, loops[0])
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
