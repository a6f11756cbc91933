"""Measures a worker's memory (limit and peak), its GPU's utilisation by NVML, and the GPU's peak FLOP/s for MFU.

Memory is what torch allocated on CUDA, and the resident set of the process on CPU, where torch does not count. CPU
limits include the control groups (v1 and v2) around the process.
NVML comes from nvidia-ml-py; where the package, the library or a figure is missing (a MIG slice has no utilisation)
nothing is reported and nothing fails. Peaks are the dense TFLOPS of NVIDIA's data sheets, half of the figures with
sparsity; a device that is not listed has no MFU.
Must import without torch, which only functions that ask CUDA need: the driver's metrics know GpuUsage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

GPU_READ_INTERVAL_S = 5.0
"""NVML's own utilisation is over the last second or less; a look costs up to a millisecond."""


@dataclass(frozen=True)
class GpuUsage:
    """`busy_ratio` is the share of time in which a kernel ran."""

    busy_ratio: float
    used_bytes: int
    total_bytes: int


class GpuMeter:
    """Reads NVML at most every GPU_READ_INTERVAL_S; `identity` gives the UUID of the GPU once this worker has one."""

    def __init__(
        self,
        device: str,
        identity: Callable[[], str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = device == "cuda"
        self._identity, self._now = identity or _current_gpu_uuid, now
        self._nvml: Any = None
        self._handle: Any = None
        self._next_s = 0.0

    def read(self) -> GpuUsage | None:
        """NVML's figures; None where they are not due, or not available."""
        if not self._wanted or self._now() < self._next_s:
            return None
        self._next_s = self._now() + GPU_READ_INTERVAL_S
        try:
            if self._handle is None:
                self._nvml, self._handle = open_nvml(self._identity)
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except (
            Exception
        ) as error:  # no package, no library, no right, no such figure: it will not be there later either
            log.info("NVML has no figures of this GPU: %s", error)
            self._wanted = False
            return None
        return GpuUsage(busy.gpu / 100, memory.used, memory.total)


def open_nvml(identity: Callable[[], str] | None = None) -> tuple[Any, Any]:
    """The module of NVML, and its handle of the GPU with the UUID `identity`, or else of this thread's. Raises whatever
    tells that there is no such package, library, right or GPU."""
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID((identity or _current_gpu_uuid)())


def _current_gpu_uuid() -> str:
    """CUDA's and NVML's numbers of a GPU differ; its UUID does not."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def accelerator_name(device: str) -> str:
    """The accelerator of this worker and its node, in words, also where it no longer answers."""
    node = socket.gethostname()
    if device != "cuda":
        return f"the CPU of node {node}"
    try:
        return f"{_current_gpu_uuid()} of node {node}"
    except Exception:  # a GPU that has fallen off the bus
        return f"a GPU of node {node}"


# Part of what is free that no plan uses: transfers' and libraries' own buffers, fragments, temporaries.
MEMORY_MARGIN = 0.1


def memory_limit(device: str, sharing: int, root: Path = Path("/")) -> int | None:
    """Bytes that one worker may plan with: what is free now less MARGIN, divided by the `sharing` workers
    of this node (CPU) or GPU (CUDA). None where the system does not say."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()
        free: int | None = torch.cuda.mem_get_info()[0]
    else:
        free = available_bytes(root)
    return None if free is None else int(free * (1 - MEMORY_MARGIN)) // sharing


def bytes_open_to_torch(device: str) -> int:
    """Bytes of this worker's GPU that torch's allocator has or may get: all but contexts, kernels, NCCL's connections and
    other processes. 0 on CPU, where connections keep little."""
    if device != "cuda":
        return 0
    import torch

    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that processes of this node, or of this container, can still get; None where nothing says.

    `root` is where the system's files are. Limits of control groups, version 2 and 1, count beside the node's own.
    """
    known = [_meminfo(root), *_control_groups(root)]
    return min((free for free in known if free is not None), default=None)


def _meminfo(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> list[int]:
    """The free bytes of each control group around this process: its limit less memory that cannot be reclaimed."""
    groups = []
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups.append((root / "sys/fs/cgroup", path, "memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                place = root / "sys/fs/cgroup/memory"
                groups.append((place, path, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    found = []
    for place, path, limit_name, usage_name in groups:
        own = place / path.strip("/")
        for group in [own, *own.parents]:  # a container sees its own group as the topmost one
            if not group.is_relative_to(place):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
                limit, usage = (int((group / name).read_text()) for name in (limit_name, usage_name))
                found.append(max(0, limit - usage + _reclaimable(group)))
    return found


def _reclaimable(group: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


_TRIED_TO_ALLOCATE = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def requested_bytes(text: str) -> int:
    """The size of the tensor that could not be allocated, by torch's message; 0 where it has none."""
    found = _TRIED_TO_ALLOCATE.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class PeakMemory:
    """The peak memory since `begin`.

    On CUDA the bytes that torch allocated. On CPU the resident bytes beyond `set_baseline` (or the construction): torch
    does not count its tensors there, so other allocations of the process count too, and memory that it gave back since
    is missing. The peak is never less than the tensors of `set_baseline`, which are held all along.
    """

    def __init__(self, device: str):
        self._device = device
        self._before = 0 if device == "cuda" else _process_status_bytes("VmRSS")
        self._tensor_bytes = 0  # bytes
        self._excluded_bytes = 0

    def set_baseline(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on only the bytes of `tensors` count of the resident memory."""
        if self._device != "cuda":
            self._tensor_bytes = sum(tensor.nbytes for tensor in tensors)
            self._before = _process_status_bytes("VmRSS") - self._tensor_bytes
            self._excluded_bytes = 0

    def exclude_bytes(self, size: int) -> None:
        """From now on `size` bytes of the process, which are not the training's, do not count."""
        self._before += 0 if self._device == "cuda" else size - self._excluded_bytes
        self._excluded_bytes = size

    def begin(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):  # where it is not allowed the peak is that of the process's life
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        return max(self._tensor_bytes, _process_status_bytes("VmHWM") - self._before)


def _process_status_bytes(name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


_TERA = 1e12


@dataclass(frozen=True)
class PeakTflops:
    """TFLOPS of matrix products by what they multiply; `half` is FP16 and, unless it has none, BF16 on tensor cores."""

    half: float
    tf32: float | None
    fp32: float
    bf16: bool = True

    def flops(self, numbers: str) -> float | None:
        """Operations a second in `numbers`: bf16, fp16, tf32 or fp32."""
        known = {"fp16": self.half, "bf16": self.half if self.bf16 else None}
        known |= {"tf32": self.tf32, "fp32": self.fp32}
        value = known.get(numbers)
        return None if value is None else value * _TERA


# The name that CUDA tells, without "NVIDIA" or "Tesla", from the more special to the less.
_GPU_PEAK_TFLOPS: tuple[tuple[str, PeakTflops], ...] = (
    ("V100S", PeakTflops(130, None, 16.4, bf16=False)),  # Tesla V100 data sheet, 2020
    ("V100-PCIE", PeakTflops(112, None, 14.0, bf16=False)),
    ("V100", PeakTflops(125, None, 15.7, bf16=False)),
    ("T4", PeakTflops(65, None, 8.1, bf16=False)),  # T4 data sheet, 2019
    ("A100", PeakTflops(312, 156, 19.5)),  # A100 data sheet, 2021: the same for SXM and PCIe
    ("A30", PeakTflops(165, 82, 10.3)),  # A30 data sheet, 2022
    ("A40", PeakTflops(149.7, 74.8, 37.4)),  # A40 data sheet, 2022
    ("A10", PeakTflops(125, 62.5, 31.2)),  # A10 data sheet, 2021
    ("L40S", PeakTflops(362.05, 183, 91.6)),  # L40S data sheet, 2023
    ("L40", PeakTflops(181.05, 90.5, 90.5)),  # L40 data sheet, 2022
    ("L4", PeakTflops(121, 60, 30.3)),  # L4 data sheet, 2023
    ("H100 PCIe", PeakTflops(756, 378, 51)),  # H100 data sheets, 2023
    ("H100 NVL", PeakTflops(835, 417, 60)),
    ("H100", PeakTflops(989, 494, 67)),
    ("H200 NVL", PeakTflops(835, 417, 60)),  # H200 data sheet, 2024
    ("H200", PeakTflops(989, 494, 67)),
    ("GH200", PeakTflops(990, 494, 67)),  # GH200 data sheet, 2023
    ("B200", PeakTflops(2250, 1100, 75)),  # HGX B200, Blackwell data sheet, 2024
    ("GB200", PeakTflops(2500, 1250, 80)),
)


def peak_flops_by_name(device_name: str, numbers: str) -> float | None:
    """Operations a second of a whole device of this name (torch.cuda.get_device_name()); None: not known.

    A slice of one (MIG) has no figure of its own.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+Tesla\s+", "Tesla ", device_name.strip()))
    for begin, peak in _GPU_PEAK_TFLOPS:
        if re.match(rf"{re.escape(begin)}(?![A-Za-z0-9])", name):
            return peak.flops(numbers)
    return None


def gpu_peak_flops(precision: str) -> float | None:
    """The peak FLOP/s of this worker's GPU in `precision`; FP32 products count as TF32 where torch may use it."""
    import torch

    numbers = precision
    # knows what was set in the old way and in the new; torch.get_float32_matmul_precision() raises for the new
    if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        numbers = "tf32"
    return peak_flops_by_name(torch.cuda.get_device_name(), numbers)
