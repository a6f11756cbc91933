"""Copies of a job's state in host memory: a keeper holds a node's, and outlives the workers and drivers that write them.

Each worker gives the values of its shard to the keeper of its node and to that of the next one; the record, which makes a
copy complete, is at all of them. Keepers hold the newest complete copy, and the one that is being written. Files of the
format of worker/checkpoint/format.py are made of a copy when an attempt is to go on from it: it is read as any checkpoint,
by CopyFiles, on any layout, and training has not paid for that. Keepers take nothing of an attempt that another has
followed, and end when no attempt is heard of for a while.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec import AbstractFileSystem

from worker.checkpoint.blobs import BLOB_BYTES, Blob, BlobWriter
from worker.checkpoint.chunked import HeldParts, TensorIndex, add_state
from worker.checkpoint.format import index_shards, shard_description
from worker.contract.checkpoint_files import CheckpointError, shard_path, step_folder_name
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


@dataclass
class _HeldShard:
    """The values of a shard as they came, and the SHA-256 of their tensors' bytes."""

    values: list[Any] = field(default_factory=list)
    sha256: Any = field(default_factory=hashlib.sha256)

    def add(self, value: Any) -> None:
        if isinstance(value, PackedTensor):
            self.sha256.update(value.content)
        self.values.append(value)

    @property
    def bytes(self) -> int:
        return sum(value.content.nbytes for value in self.values if isinstance(value, PackedTensor))

    def write(self, file: Any) -> list[Blob] | None:
        """Write the shard's file, and drop the values; its blobs. None where the values are not what came."""
        summed, writer = hashlib.sha256(), BlobWriter(file)
        for position, value in enumerate(self.values):
            if isinstance(value, PackedTensor):
                summed.update(value.content)
            writer.add(unpack_value(value))
            self.values[position] = None
        return writer.blobs if summed.digest() == self.sha256.digest() else None


@dataclass
class _HeldCopy:
    """The shards of a copy, its record once it is complete, and its files once it is to be read."""

    shards: dict[str, _HeldShard] = field(default_factory=dict)
    record: bytes | None = None
    files: dict[str, io.BytesIO] = field(default_factory=dict)
    blobs: dict[str, list[Blob]] = field(default_factory=dict)


class CopyKeeper:
    """Holds shards of copies of `job`, for its own node and the one before.

    `end` is called when no call has come for `lease_s` seconds; None: this process is the keeper's own, and ends.
    """

    def __init__(self, job: str, lease_s: float = LEASE_S, end: Callable[[], None] | None = None):
        self._job = job
        self._attempt = 0
        self._copies: dict[CopyKey, _HeldCopy] = {}
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

    def begin_attempt(self, attempt: int) -> dict[CopyKey, bytes]:
        """Take nothing of earlier attempts from now on; the records of the complete copies that are held."""
        self._check_attempt(attempt)
        self._attempt = attempt
        return {key: copy.record for key, copy in self._copies.items() if copy.record is not None}

    def add(self, key: CopyKey, shard: str, number: int, values: Sequence[Any]) -> None:
        """Hold values, as `pack_value` gives them, behind the first `number` of a shard."""
        self._check_attempt(key.attempt)
        shards = self._copies.setdefault(key, _HeldCopy()).shards
        if number == 0:
            shards[shard] = _HeldShard()
        held = shards[shard]
        if len(held.values) != number:
            raise ValueError(
                f"shard {shard!r} has {len(held.values)} values, and number {number} was to follow"
            )
        for value in values:
            held.add(_owned(value))

    def complete(self, key: CopyKey, record: bytes) -> None:
        """All shards of a copy are held, by this keeper or others: drop all other copies."""
        self._check_attempt(key.attempt)
        self._copies.setdefault(key, _HeldCopy()).record = record
        self.keep_only(key.attempt, key)

    def keep_only(self, attempt: int, key: CopyKey | None) -> None:
        """Drop all copies but this one."""
        self._check_attempt(attempt)
        self._copies = {one: copy for one, copy in self._copies.items() if one == key}

    def write_files(self, key: CopyKey) -> dict[str, list[Blob]]:
        """Make files of the shards of a copy that are held, to be read; their blobs. A damaged shard is left out."""
        self.renew()
        if (copy := self._copies.get(key)) is None:
            return {}
        while copy.shards:
            shard, held = copy.shards.popitem()
            file = io.BytesIO()
            if (blobs := held.write(file)) is not None:
                copy.files[shard_file(shard)], copy.blobs[shard] = file, blobs
        return copy.blobs

    def put(self, attempt: int, key: CopyKey, files: Mapping[str, bytes]) -> None:
        """Hold files beside those of the shards of a copy."""
        self._check_attempt(attempt)
        if key in self._copies:
            self._copies[key].files |= {name: io.BytesIO(content) for name, content in files.items()}

    def sizes(self) -> dict[CopyKey, dict[str, int]]:
        """The bytes of the files of each copy."""
        return {
            key: {name: file.getbuffer().nbytes for name, file in copy.files.items()}
            for key, copy in self._copies.items()
        }

    def held(self) -> dict[CopyKey, int]:
        """The bytes of the copies that are held."""
        sizes = self.sizes()
        return {
            key: sum(sizes[key].values()) + sum(shard.bytes for shard in copy.shards.values())
            for key, copy in self._copies.items()
        }

    def free_bytes(self) -> int | None:
        """The bytes of memory that this node, or container, has for copies: what is free, and what they hold now."""
        free = available_bytes()
        return None if free is None else free + sum(self.held().values())

    def read(self, key: CopyKey, name: str, begin: int, end: int) -> bytes:
        """The bytes of a file from `begin` to `end`. FileNotFoundError where it is not held."""
        self.renew()
        try:
            file = self._copies[key].files[name]
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


def _owned(value: Any) -> Any:
    """The packed value with bytes of its own: those that came by Ray are in its store."""
    return replace(value, content=value.content.copy()) if isinstance(value, PackedTensor) else value


class ShardUpload:
    """Gives the shard of one worker to its `keepers`, in parts of about BLOB_BYTES."""

    def __init__(self, keepers: Sequence[Any], key: CopyKey, shard: str):
        self._keepers, self._key, self._shard = keepers, key, shard
        self._waiting: list[Any] = []
        self._waiting_bytes = self._added = 0
        self._adding: list[Any] = []

    def write(self, state: Mapping[str, Any], held: HeldParts, beside: Sequence[str]) -> dict[str, Any]:
        """Give `state` to the keepers; its description, whose blobs are known when files are made of it. Raises what a
        keeper raises, RayActorError where one is gone."""
        entries, rest = add_state(self._shard, state, held, self._add)
        self._flush()
        self._wait()
        index = TensorIndex(entries, {self._shard: []}, {} if rest is None else {self._shard: rest})
        return shard_description(self._key.step, state, beside, index)

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
            part = _stored(self._waiting) if len(self._keepers) > 1 else self._waiting
            self._adding = [
                keeper.add.remote(self._key, self._shard, self._added, part) for keeper in self._keepers
            ]
            self._added += len(self._waiting)
            self._waiting, self._waiting_bytes = [], 0

    def _wait(self) -> None:
        adding, self._adding = self._adding, []
        for ref in adding:
            _result(ref)


def copy_record(descriptions: Mapping[str, Mapping[str, Any]], notes: Mapping[str, Any]) -> bytes:
    """The record of a complete copy: the descriptions of its shards, and the notes of a checkpoint."""
    return json.dumps({"shards": dict(descriptions), "notes": dict(notes)}).encode()


def indexed_copy(
    uri: str, key: CopyKey, record: bytes, blobs: Mapping[str, Sequence[Blob]]
) -> dict[str, bytes]:
    """The index and the manifest of a complete copy, of whose shards files were made with these blobs. CheckpointError where
    some are not held any more."""
    known = json.loads(record)
    if lost := sorted(known["shards"].keys() - blobs.keys()):
        raise CheckpointError(f"{', '.join(lost[:4])} of {uri} is held by no keeper any more, or is damaged")
    shards = {}
    for shard, description in known["shards"].items():
        description["index"]["blobs"] = {shard: blobs[shard]}
        shards[shard] = description, sum(length for length, _ in blobs[shard])
    return index_shards(uri, key.step, shards, known["notes"])


def _stored(values: Sequence[Any]) -> Any:
    """Values that several keepers take from Ray's store."""
    import ray

    return ray.put(values)


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
