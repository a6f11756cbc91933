"""A copy of a worker's state in host memory, so that training may change the state while the copy is written.

The memory is taken once and used again for the next copy. Knows no files and no threads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

Path = tuple[Any, ...]


class Snapshots:
    """Copies of one state, one after the other, in the same memory: the one before must not be in use any more.

    Tensors of CUDA go to pinned memory, on a stream beside those of the step. `cuda` is torch.cuda unless a test
    brings its own.
    """

    def __init__(self, device: str, cuda: Any = torch.cuda):
        self._cuda = cuda if device == "cuda" else None
        self._stream: Any = None
        self._held: dict[Path, torch.Tensor] = {}
        self._used: dict[Path, torch.Tensor] = {}

    @property
    def held_bytes(self) -> int:
        """What the copies take of the host's memory."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._held.values())

    def take(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with its tensors copied and all else its own; when this returns the copy is whole.

        Only tensors are copied side by side with what the device does: the wait at the end is for the copies.
        """
        self._used = {}
        if self._cuda is None:
            copied = self._copied(state, ())
        else:
            self._stream = self._stream or self._cuda.Stream()
            self._stream.wait_stream(self._cuda.current_stream())  # the step's last writes come first
            with self._cuda.stream(self._stream):
                copied = self._copied(state, ())
                event = self._cuda.Event()
                event.record(self._stream)
            event.synchronize()
        self._held, self._used = self._used, {}
        return copied

    def _copied(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, Mapping):
            return {key: self._copied(entry, (*path, key)) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            entries = [self._copied(entry, (*path, index)) for index, entry in enumerate(value)]
            return entries if isinstance(value, list) else tuple(entries)
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        there = self._held.get(path)
        if there is None or not _alike(there, tensor):
            there = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        there.copy_(tensor, non_blocking=tensor.is_cuda)
        self._used[path] = there
        return there


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()
