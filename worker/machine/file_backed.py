"""Builds models that are larger than the host's memory: large tensors lie in files once half of what was free is taken.

One worker builds the whole model of a job, also where each stage alone has room. The memory of a tensor is then a mapped
file, whose pages the system writes to the disk where memory runs short. The same operations draw the same numbers into
it, so that no factory and no generator behaves otherwise. Must not know jobs or stages.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from worker.machine.telemetry import available_bytes

log = logging.getLogger(__name__)

SHARE_IN_MEMORY = 0.5
"""Of the bytes that are free when a model is built; the rest is for its trace, its layers' profiles and its first stage."""
LARGE_BYTES = 1 << 20
"""A smaller tensor stays in memory: a file is rounded up to pages, and a process may map some 65,000 of them."""
_IN_MEMORY = ("tmpfs", "ramfs")
_UNINITIALIZED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class FileBackedTensors(TorchDispatchMode):
    """Within it, large tensors that operations make on the CPU lie in files of `folder` once those in memory take their
    share of `free_bytes`, which is None where the system does not say: then all stay in memory.

    A file has no name, and goes with its tensor or its process. A tensor stays in memory where the disk has no room,
    and where torch did not make it (an array of numpy, a mapped file of weights).
    """

    def __init__(self, free_bytes: int | None, folder: Path | None):
        super().__init__()
        self._limit = None if free_bytes is None or folder is None else int(free_bytes * SHARE_IN_MEMORY)
        self._folder = folder
        self._in_memory: list[tuple[StorageWeakRef, int]] = []
        self._counted = 0  # at least the bytes of those that still live
        self._in_files: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._limit is None or any(returned.alias_info for returned in func._schema.returns):
            return made  # in place, or a view
        has_values = func._schema.name.removeprefix("aten::") not in _UNINITIALIZED
        return tree_map_only(Tensor, lambda tensor: self._placed(tensor, has_values), made)

    @property
    def file_bytes(self) -> int:
        """The bytes of the tensors in files that still live."""
        return sum(size for ref, size in self._in_files if not ref.expired())

    def note(self) -> str:
        """Tell a user what of it lies in files; empty where nothing does."""
        if not (size := self.file_bytes):
            return ""
        return (
            "the model takes more than half of the memory that was free where it was built: until every worker has its "
            f"stages, {size:,} bytes of it lie in files of {self._folder}"
        )

    def _placed(self, tensor: Tensor, has_values: bool) -> Tensor:
        """`tensor` itself, or one like it in a file, with its values where it has any."""
        if type(tensor) is not Tensor or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if (size := storage.nbytes()) < LARGE_BYTES or tensor.is_quantized or tensor.is_pinned():
            return tensor
        if self._has_room(size) or (file := self._file(size)) is None:
            self._in_memory.append((StorageWeakRef(storage), size))
            self._counted += size
            return tensor
        self._in_files.append((StorageWeakRef(file), size))
        moved = torch.empty(0, dtype=tensor.dtype)
        moved.set_(file, tensor.storage_offset(), tensor.shape, tensor.stride())
        return moved.copy_(tensor) if has_values else moved

    def _has_room(self, size: int) -> bool:
        if self._counted + size > self._limit:
            self._in_memory = [(ref, size) for ref, size in self._in_memory if not ref.expired()]
            self._counted = sum(size for _, size in self._in_memory)
        return self._counted + size <= self._limit

    def _file(self, size: int) -> torch.UntypedStorage | None:
        """The memory of a new file of `size` bytes; None where the disk has no room for it."""
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # now, as a hole that cannot be filled later ends the process
                os.posix_fallocate(file.fileno(), 0, size)
                opened = f"/proc/self/fd/{file.fileno()}"
                return torch.UntypedStorage.from_file(opened, shared=True, nbytes=size)
        except (OSError, RuntimeError) as error:  # torch has no mapping any more, say
            log.warning("a tensor of %s bytes stays in memory: %s", f"{size:,}", error)
            return None


def file_backed_tensors(available: Callable[[], int | None] = available_bytes) -> FileBackedTensors:
    """The mode for this host: what is free on it, and its folder for temporary files that is on a disk."""
    folders = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    return FileBackedTensors(available(), next(filter(_is_on_disk, folders), None))


def _is_on_disk(folder: Path) -> bool:
    """False for a folder that is not there or lies in memory itself, and where the system does not say."""
    try:
        number = folder.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(number)}:{os.minor(number)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in mounts if line.split()[2] == device]
    return bool(kinds) and kinds[0] not in _IN_MEMORY
