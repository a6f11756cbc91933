"""The control plane as `slotline serve` serves it, on a cluster in memory, in a process that others load.

`python -m tests.benchmarks.service.served DATABASE_URL DATA_DIR ACCELERATORS` prints its address. For each line on its
standard input it prints what happened since the line before: the longest time for which the event loop did not turn
(by the clock, and in the loop's own processor time, which other programs of the machine do not lengthen), and the
processor time and memory of the process. The end of the input ends it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import resource
import sys
import threading
import time
from pathlib import Path

import uvicorn

from service.control_plane import control_plane_app
from service.settings.settings import Settings
from tests.service.fake_cluster import FakeCluster

_TURN_S = 0.002


class Turns:
    """The longest time between two turns of the loop, beyond what was asked for."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    async def watch(self) -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TURN_S)
            self.wall_s = max(self.wall_s, time.perf_counter() - wall - _TURN_S)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu)

    def told(self) -> dict[str, float]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found = {
            "blocked_wall_s": self.wall_s,
            "blocked_cpu_s": self.cpu_s,
            "processor_s": usage.ru_utime + usage.ru_stime,
            "peak_bytes": usage.ru_maxrss * 1024,
        }
        self.wall_s = self.cpu_s = 0.0
        return found


async def _serve(settings: Settings, accelerators: int) -> None:
    app = control_plane_app(settings, FakeCluster(workers=accelerators))
    # as service/cli/serve.py
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=1,
        http="h11",
        h11_max_incomplete_event_size=65536,
    )
    server = uvicorn.Server(config)
    turns = Turns()
    watching = asyncio.create_task(turns.watch())
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the server did not start: its messages are above")
        await asyncio.sleep(0.01)
    gc.collect()
    gc.freeze()
    print(
        json.dumps({"url": f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"}), flush=True
    )
    loop = asyncio.get_running_loop()

    def answer() -> None:
        for _line in sys.stdin:
            print(json.dumps(turns.told()), flush=True)
        loop.call_soon_threadsafe(setattr, server, "should_exit", True)

    threading.Thread(target=answer, daemon=True).start()
    await serving
    watching.cancel()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    database_url, data_dir, accelerators = sys.argv[1:]
    settings = Settings(
        database_url=database_url,
        data_dir=Path(data_dir),
        plan_budget_s=0,
        queues={"default": None, "small": 4},
    )
    with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(_serve(settings, int(accelerators)))


if __name__ == "__main__":
    main()
