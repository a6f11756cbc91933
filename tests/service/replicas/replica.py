"""One control plane as a process: `slotline serve` without a planner that warms up, and with two ways to go wrong.

After SIGUSR1 it stops itself, as SIGSTOP does, before it next writes down that a job starts: the worst moment, since
its decision is made. UNFENCED plants a defect: what a replaced one writes is taken.
"""

from __future__ import annotations

import contextlib
import os
import signal

import uvicorn

from service import control_plane
from service.control_plane import control_plane_app
from service.orchestrator import loop
from service.orchestrator.attempts.admit import Admission
from service.orchestrator.attempts.outcome import Backoff
from service.orchestrator.ray.jobs_api import RayCluster
from service.settings.settings import Settings
from service.store.leases import Lease
from worker.contract.logs import set_up_logging

UNFENCED = "UNFENCED"
LEASE_S = 1.5


def main() -> None:
    _freeze_before_a_start()
    loop.LEASE_S, loop.TICK_S, control_plane.CLUSTER_REFRESH_S = LEASE_S, 0.1, 0.3
    Backoff.__init__.__defaults__ = (0.2, 60.0)  # type: ignore[misc]
    if UNFENCED in os.environ:
        Lease.check = _taken  # type: ignore[method-assign]
    settings = Settings()
    set_up_logging(
        level="INFO",
        log_format="text",
        line_format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        time_format=None,
    )
    app = control_plane_app(settings, RayCluster(settings.ray_address or "", timeout_s=5.0))
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.run(app, port=settings.port, log_config=None, timeout_graceful_shutdown=1)


async def _taken(*_: object) -> None:
    pass


def _freeze_before_a_start() -> None:
    start, wanted = Admission._start, list[int]()
    signal.signal(signal.SIGUSR1, lambda number, _: wanted.append(number))

    async def frozen(self: Admission, *arguments: object) -> None:
        if wanted:
            wanted.clear()
            os.kill(os.getpid(), signal.SIGSTOP)
        await start(self, *arguments)

    Admission._start = frozen  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
