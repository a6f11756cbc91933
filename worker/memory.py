"""How much memory a worker may plan with, and how much it has used.

Bytes of the accelerator on CUDA (allocated by torch), of the process on CPU (resident). Knows no plan.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

# Part of what is free that no plan uses: transfers' and libraries' own buffers, fragments, temporaries.
MARGIN = 0.1


def memory_limit(device: str, sharing: int, root: Path = Path("/")) -> int | None:
    """Bytes that one worker may plan with: what is free now less MARGIN, divided by the `sharing` workers
    of this node (CPU) or GPU (CUDA). None where the system does not say."""
    if device == "cuda":
        torch.cuda.empty_cache()
        free: int | None = torch.cuda.mem_get_info()[0]
    else:
        free = available_bytes(root)
    return None if free is None else int(free * (1 - MARGIN)) // sharing


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
    """What each group that holds this process may still take: its limit less what it cannot give back."""
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


_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def tried_bytes(text: str) -> int:
    """The size of the tensor that found no place, as torch's message says it; 0 where it does not."""
    found = _TRIED.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


class PeakMemory:
    """The most bytes held since `begin`, the same way at each step.

    On CUDA what torch had allocated. On CPU what of the process was resident beyond `settle` (or the
    construction): torch does not count its tensors there, so whatever else the process got is in it too, and
    what it gave back since is missing. It is never less than the tensors of `settle`, which are held all along.
    """

    def __init__(self, device: str):
        self._device = device
        self._before = 0 if device == "cuda" else _status("VmRSS")
        self._held = 0  # bytes
        self._aside = 0

    def settle(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on, of all that is resident, only the bytes of `tensors` count."""
        if self._device != "cuda":
            self._held = sum(tensor.nbytes for tensor in tensors)
            self._before = _status("VmRSS") - self._held
            self._aside = 0

    def set_aside(self, size: int) -> None:
        """So many bytes of the process are none of the training's: they do not count from now on."""
        self._before += 0 if self._device == "cuda" else size - self._aside
        self._aside = size

    def begin(self) -> None:
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):  # where it is not allowed the peak is that of the process's life
            Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> int:
        """Bytes."""
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(self._held, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0
