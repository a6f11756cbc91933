"""Blobs: the values in a shard's file, each written by torch.save behind the one before, and read by its place alone.

Such is the layout of the files of torch.distributed.checkpoint. Each blob has a SHA-256 of its own, so that a reader of
some checks these and reads nothing else. Files appear whole or not at all. Contents are loaded with weights_only.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from worker.contract.checkpoint_files import CheckpointError, DamagedCheckpointError, check_sha256

PARTIAL_SUFFIX = ".partial"
BLOB_BYTES = 64 << 20
"""About the most bytes of a tensor in one blob, and of blobs that are read at a time."""

Blob = tuple[int, str]
"""The length of a blob in bytes, and its SHA-256."""


def write_atomically(
    files: AbstractFileSystem, path: str, write: Callable[[Any], Any], *, summed: bool = True
) -> str:
    """Write a file that appears at once: under another name first, then renamed. The SHA-256 of its content, if `summed`.

    The content is never held as a whole beside what it is made of. Raises CheckpointError where no space is left.
    """
    partial = f"{path}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    summing = None
    try:
        with files.open(partial, "wb") as file:
            summing = _HashingFile(file, summed)
            write(summing)
            if isinstance(files, LocalFileSystem):
                file.flush()
                os.fsync(file.fileno())
        files.mv(partial, path)
        return summing.sha256.hexdigest()
    except BaseException as error:
        with suppress(Exception):
            files.rm_file(partial)
        # torch.save ends its file behind an error of a write, which hides that error
        cause = (summing and summing.error) or error
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"no space is left for {path} ({cause.strerror}): free some, keep fewer (checkpoint.keep), or name another "
                "place in checkpoint.uri"
            ) from cause
        if cause is error:
            raise
        raise cause from error


class BlobWriter:
    """Adds blobs to a file that is being written."""

    def __init__(self, file: Any):
        self._file = file
        self.blobs: list[Blob] = []

    def add(self, value: Any) -> int:
        """Write a value; the number of its blob."""
        part = _HashingFile(self._file)
        torch.save(value, part)
        self.blobs.append((part.size, part.sha256.hexdigest()))
        return len(self.blobs) - 1


def read_blobs(
    files: AbstractFileSystem, path: str, blobs: Sequence[Blob], numbers: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """The values of the blobs with these ascending `numbers`, one after the other; neighbours are read at a time, up to
    BLOB_BYTES. DamagedCheckpointError for one that is not what was written."""
    starts = [0, *accumulate(length for length, _ in blobs)]
    at = 0
    while at < len(numbers):
        end = at + 1
        while (
            end < len(numbers)
            and numbers[end] == numbers[end - 1] + 1
            and starts[numbers[end] + 1] - starts[numbers[at]] <= BLOB_BYTES
        ):
            end += 1
        span, begin = numbers[at:end], starts[numbers[at]]
        content = memoryview(_read_range(files, path, begin, starts[span[-1] + 1]))
        for number in span:
            length, sha256 = blobs[number]
            blob = content[starts[number] - begin :][:length]
            check_sha256(path, sha256, lambda blob=blob: hashlib.sha256(blob).hexdigest())
            yield number, load_value(path, io.BytesIO(blob))
        at = end


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same of mappings (as dicts), lists and tuples, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        changed = [map_tensors(entry, change) for entry in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value


def load_value(path: str, file: Any, **options: Any) -> Any:
    """The value that torch.save wrote; DamagedCheckpointError naming `path` where it cannot be read."""
    with naming_shard(path):
        return torch.load(file, map_location="cpu", weights_only=True, **options)


@contextmanager
def naming_shard(path: str) -> Iterator[None]:
    """Turns errors of reading a shard's file into CheckpointError, or DamagedCheckpointError, with its path."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpointError(f"shard {path} is missing") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        kind = CheckpointError if isinstance(error, OSError) else DamagedCheckpointError
        raise kind(f"shard {path} cannot be read: {error}") from error


def _read_range(files: AbstractFileSystem, path: str, begin: int, end: int) -> bytes:
    with naming_shard(path):
        if isinstance(files, LocalFileSystem):
            with open(path, "rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        return files.cat_file(path, start=begin, end=end)


class _HashingFile:
    """A file to write to that also counts what goes into it, and sums it where it is `summed`."""

    def __init__(self, file: Any, summed: bool = True):
        self._file, self._summed = file, summed
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None
        """The first error of a write."""

    def write(self, content: bytes | memoryview) -> int:
        if self._summed:
            self.sha256.update(content)
        self.size += len(content)
        try:
            self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
        return len(content)

    def flush(self) -> None:
        """Its file is flushed when all is written."""
