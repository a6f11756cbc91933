"""Copies of a job's state in host memory: a keeper holds a node's, and outlives the workers and drivers that write them.

A copy is a checkpoint of the format of worker/checkpoint/format.py whose files are in the memory of keepers: each worker's
shard at the keeper of its node and at that of the next one, the index and the manifest, which make it complete, at all of
them. It is read as any checkpoint, by CopyFiles, on any layout. At most the newest complete copy is held, and the one that
is being written. Keepers take nothing of an attempt that another has followed, and end when no attempt is heard of for a
while. Workers give values to keepers, which turn them into files at the lowest priority: training goes first.
"""

from __future__ import annotations

import io
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec import AbstractFileSystem

from worker.checkpoint.blobs import BLOB_BYTES, Blob, BlobWriter
from worker.checkpoint.chunked import HeldParts, TensorIndex, add_state
from worker.checkpoint.format import shard_description
from worker.contract.checkpoint_files import MANIFEST, shard_path, step_folder_name
from worker.machine.keepers import find_keepers, keeper_results
from worker.machine.telemetry import available_bytes

PROTOCOL = "slotline-copies"
LEASE_S = 600.0
"""Keepers of a job of which no driver is heard for this time end by themselves: pauses before retries are shorter."""
CALL_LIMIT_S = 120.0
"""The limit of one call of a keeper, which moves BLOB_BYTES at most."""
_ATTEMPT_PREFIX = "attempt-"
_LOWEST_PRIORITY = 19
_LEASE_POLL_S = 1.0


class StaleAttemptWriteError(RuntimeError):
    """A write of an attempt that another has followed."""


@dataclass(frozen=True, order=True)
class CopyKey:
    """The step after which a copy was taken, and the attempt that did; the newest is the greatest."""

    step: int
    attempt: int

    def uri(self, job: str) -> str:
        """The URI of the copy, as that of a checkpoint."""
        return f"{PROTOCOL}://{self.folder(job)}"

    def folder(self, job: str) -> str:
        return f"{job}/{_ATTEMPT_PREFIX}{self.attempt}/{step_folder_name(self.step)}"


class CopyKeeper:
    """Holds the files of copies of `job`, for its own node and the one before.

    `end` is called when no call has come for `lease_s` seconds; None: this process is the keeper's own, and ends.
    """

    def __init__(self, job: str, lease_s: float = LEASE_S, end: Callable[[], None] | None = None):
        self._job = job
        self._attempt = 0
        self._copies: dict[CopyKey, dict[str, io.BytesIO]] = {}
        self._written: dict[tuple[CopyKey, str], tuple[io.BytesIO, BlobWriter]] = {}
        self._called_at = time.monotonic()
        if end is None:
            os.nice(_LOWEST_PRIORITY)
            torch.set_num_threads(1)
        if lease_s < math.inf:
            arguments = lease_s, end or (lambda: os._exit(0))
            threading.Thread(
                target=self._end_unheard, args=arguments, name="slotline-lease", daemon=True
            ).start()

    def renew(self) -> None:
        """A driver of the job is there."""
        self._called_at = time.monotonic()

    def begin_attempt(self, attempt: int) -> dict[CopyKey, dict[str, int]]:
        """Take nothing of earlier attempts from now on; the files that are held, with their bytes, by copies."""
        self._check_attempt(attempt)
        self._attempt = attempt
        self._written.clear()
        return self.sizes()

    def sizes(self) -> dict[CopyKey, dict[str, int]]:
        """The bytes of the files of each copy that is held."""
        return {
            key: {name: file.getbuffer().nbytes for name, file in files.items()}
            for key, files in self._copies.items()
        }

    def free_bytes(self) -> int | None:
        """The bytes of memory that this node, or container, has for copies: what is free, and what they hold now."""
        free = available_bytes()
        held = sum(sum(files.values()) for files in self.sizes().values())
        return None if free is None else free + held

    def add(self, key: CopyKey, shard: str, number: int, values: Sequence[Any]) -> None:
        """Write values, as `pack_value` gives them, behind the first `number` of a shard."""
        self._check_attempt(key.attempt)
        if number == 0:
            file = io.BytesIO()
            self._written[key, shard] = file, BlobWriter(file)
        _, writer = self._written[key, shard]
        if len(writer.blobs) != number:
            raise ValueError(
                f"shard {shard!r} has {len(writer.blobs)} values, and number {number} was to follow"
            )
        for value in values:
            writer.add(unpack_value(value))

    def finish(self, key: CopyKey, shard: str) -> list[Blob]:
        """Hold the shard, all of whose values were added; its blobs."""
        self._check_attempt(key.attempt)
        file, writer = self._written.pop((key, shard))
        self._copies.setdefault(key, {})[shard_file(shard)] = file
        return writer.blobs

    def put(self, key: CopyKey, name: str, begin: int, content: bytes) -> None:
        """Write a part of a file that begins at the byte `begin`."""
        self._check_attempt(key.attempt)
        files = self._copies.setdefault(key, {})
        if begin == 0:
            files[name] = io.BytesIO()
        files[name].seek(begin)
        files[name].write(content)

    def keep_only(self, attempt: int, key: CopyKey | None) -> None:
        """Drop all copies but this one."""
        self._check_attempt(attempt)
        self._copies = {one: files for one, files in self._copies.items() if one == key}
        self._written = {place: file for place, file in self._written.items() if place[0] == key}

    def read(self, key: CopyKey, name: str, begin: int, end: int) -> bytes:
        """The bytes of a file from `begin` to `end`. FileNotFoundError where it is not held."""
        self.renew()
        try:
            file = self._copies[key][name]
        except KeyError:
            raise FileNotFoundError(f"{key.folder(self._job)}/{name}") from None
        return bytes(file.getbuffer()[begin:end])

    def _check_attempt(self, attempt: int) -> None:
        if attempt < self._attempt:
            raise StaleAttemptWriteError(
                f"attempt {attempt} of job {self._job} writes a copy, and attempt {self._attempt} has followed it"
            )
        self.renew()

    def _end_unheard(self, lease_s: float, end: Callable[[], None]) -> None:
        while time.monotonic() - self._called_at < lease_s:
            time.sleep(min(_LEASE_POLL_S, lease_s / 2))
        end()


def shard_file(shard: str) -> str:
    """The name of the file of a shard."""
    return shard_path("", shard).removeprefix("/")


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bytes, which travel without being copied, with its dtype (a name of torch) and shape."""

    content: np.ndarray
    dtype: str
    shape: tuple[int, ...]


def pack_value(value: Any) -> Any:
    """The value as it is given to a keeper: a tensor as its bytes, all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    flat = value.detach().contiguous().reshape(-1)
    return PackedTensor(
        flat.view(torch.uint8).numpy(), str(flat.dtype).removeprefix("torch."), tuple(value.shape)
    )


def unpack_value(value: Any) -> Any:
    """Inverse of `pack_value`."""
    if not isinstance(value, PackedTensor):
        return value
    tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype))
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = value.content
    return tensor


@dataclass(frozen=True)
class CopiedShard:
    """A shard that is held by keepers, as `index_shards` takes it."""

    shard: str
    description: Mapping[str, Any]
    bytes: int


class ShardUpload:
    """Gives the shard of one worker to the first of its `keepers`, and the file that this makes of it to the others."""

    def __init__(self, keepers: Sequence[Any], key: CopyKey, shard: str):
        (self._keeper, *self._others), self._key, self._shard = keepers, key, shard
        self._waiting: list[Any] = []
        self._waiting_bytes = self._added = 0
        self._adding: Any = None

    def write(self, state: Mapping[str, Any], held: HeldParts, beside: Sequence[str]) -> CopiedShard:
        """Write `state`, as `save_shard` does. Raises what a keeper raises, RayActorError where one is gone."""
        entries, rest = add_state(self._shard, state, held, self._add)
        self._flush()
        self._wait()
        blobs: list[Blob] = _result(self._keeper.finish.remote(self._key, self._shard))
        index = TensorIndex(entries, {self._shard: blobs}, {} if rest is None else {self._shard: rest})
        size = sum(length for length, _ in blobs)
        for other in self._others:
            self._hand_on(other, size)
        return CopiedShard(self._shard, shard_description(self._key.step, state, beside, index), size)

    def _add(self, value: Any) -> int:
        packed = pack_value(value)
        size = packed.content.nbytes if isinstance(packed, PackedTensor) else 0
        if self._waiting and self._waiting_bytes + size > BLOB_BYTES:
            self._flush()
        self._waiting.append(packed)
        self._waiting_bytes += size
        return self._added + len(self._waiting) - 1

    def _flush(self) -> None:
        self._wait()  # one part is on its way at a time: what Ray holds meanwhile is bounded
        if self._waiting:
            self._adding = self._keeper.add.remote(self._key, self._shard, self._added, self._waiting)
            self._added += len(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def _wait(self) -> None:
        adding, self._adding = self._adding, None
        if adding is not None:
            _result(adding)

    def _hand_on(self, other: Any, size: int) -> None:
        """Have another keeper hold the file too: its parts go from one to the other."""
        name = shard_file(self._shard)
        for begin in range(0, size, BLOB_BYTES):
            part = self._keeper.read.remote(self._key, name, begin, min(size, begin + BLOB_BYTES))
            _result(other.put.remote(self._key, name, begin, part))


def _result(ref: Any) -> Any:
    import ray

    try:
        return ray.get(ref, timeout=CALL_LIMIT_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


class CopyFiles(AbstractFileSystem):
    """The files of a job's copies, for reading: each is at one keeper or at several."""

    protocol = PROTOCOL
    cachable = False

    def __init__(self, job: str, **options: Any):
        super().__init__(**options)
        self._keepers = find_keepers(job)
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, list[tuple[str, CopyKey]]] = {}
        listings = keeper_results(
            {node: keeper.sizes.remote() for node, keeper in self._keepers.items()}, CALL_LIMIT_S
        )
        for node, copies in listings.items():
            for key, files in copies.items():
                for name, size in files.items():
                    self._add(f"{key.folder(job)}/{name}", node, key, size)

    def _add(self, path: str, node: str, key: CopyKey, size: int) -> None:
        if size > self._sizes.get(path, -1):  # a shorter one was not handed on to its end
            self._sizes[path], self._holders[path] = size, []
        if size == self._sizes[path]:
            self._holders[path].append((node, key))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"job": path.removeprefix(f"{PROTOCOL}://").partition("/")[0]}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The entries of a folder, as fsspec has them."""
        below = f"{self._strip_protocol(path).rstrip('/')}/"
        names = sorted(
            {
                below + known[len(below) :].partition("/")[0]
                for known in self._sizes
                if known.startswith(below)
            }
        )
        if not names:
            raise FileNotFoundError(path)
        return [self.info(name) for name in names] if detail else names

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """The size and kind of a file or folder. FileNotFoundError where no keeper holds it."""
        path = self._strip_protocol(path).rstrip("/")
        if path in self._sizes:
            return {"name": path, "size": self._sizes[path], "type": "file"}
        if any(known.startswith(f"{path}/") for known in self._sizes):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes of a file from `start` to `end`, of the first keeper that answers. FileNotFoundError where none does."""
        path = self._strip_protocol(path)
        begin, end = start or 0, self.info(path)["size"] if end is None else end
        parts = []
        while begin < end or not parts:
            stop = min(end, begin + BLOB_BYTES)
            parts.append(self._part(path, begin, stop))
            begin = stop
        return b"".join(parts)

    def _part(self, path: str, begin: int, end: int) -> bytes:
        name = path.rpartition("/")[2]
        for node, key in self._holders[path]:
            calls = {node: self._keepers[node].read.remote(key, name, begin, end)}
            with suppress(FileNotFoundError):
                for content in keeper_results(calls, CALL_LIMIT_S).values():
                    return content
        raise FileNotFoundError(path)


fsspec.register_implementation(PROTOCOL, CopyFiles, clobber=True)


def complete_copies(listings: Mapping[str, Mapping[CopyKey, Mapping[str, int]]]) -> list[CopyKey]:
    """The copies of which a keeper has the manifest, the newest first; `listings` are what keepers hold, by node."""
    return sorted(
        {key for copies in listings.values() for key, files in copies.items() if MANIFEST in files},
        reverse=True,
    )
