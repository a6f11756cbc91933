"""One control plane as a process: `slotline serve` without a planner that warms up, and with two ways to go wrong.

After SIGUSR1 it stops itself, as SIGSTOP does, before it next writes down that a job starts: the worst moment, since
its decision is made. UNFENCED plants a defect: what a replaced one writes is taken.
"""

from __future__ import annotations

import contextlib
import os
import signal

import uvicorn

from service.control_plane import control_plane_app
from service.orchestrator.attempts.admit import Admission
from service.orchestrator.ray.jobs_api import RayCluster
from service.settings.settings import Settings
from service.store.leases import Lease
from worker.contract.logs import set_up_logging

UNFENCED = "UNFENCED"


def main() -> None:
    _freeze_before_a_start()
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
