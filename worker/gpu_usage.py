"""How busy this worker's GPU is and how much of its memory is in use, all processes together, as NVML tells.

NVML is nvidia-ml-py (in the extras cuda12 and cuda13). Where it, its library or an answer is missing (a MIG slice has no
utilisation), nothing is told, and nothing fails. Light: torch is asked only for a GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""NVML's own utilisation is over the last second or less; a look costs up to a millisecond."""


@dataclass(frozen=True)
class GpuUsage:
    """`busy_ratio` is the share of time in which a kernel ran."""

    busy_ratio: float
    used_bytes: int
    total_bytes: int


class GpuMeter:
    """Reads at most every `EVERY_S`; `identity` says which GPU, as NVML names it, once this worker has one."""

    def __init__(
        self,
        device: str,
        identity: Callable[[], str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = device == "cuda"
        self._identity, self._now = identity or _own_identity, now
        self._nvml: Any = None
        self._handle: Any = None
        self._next_s = 0.0

    def read(self) -> GpuUsage | None:
        """What NVML says now; None where it is not time to ask, or it does not say."""
        if not self._wanted or self._now() < self._next_s:
            return None
        self._next_s = self._now() + EVERY_S
        try:
            if self._handle is None:
                self._open()
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except (
            Exception
        ) as error:  # no package, no library, no right, no such figure: it will not be there later either
            log.info("NVML does not tell of this GPU: %s", error)
            self._wanted = False
            return None
        return GpuUsage(busy.gpu / 100, memory.used, memory.total)

    def _open(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(self._identity())


def _own_identity() -> str:
    """CUDA's and NVML's numbers of a GPU differ; its UUID does not."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
