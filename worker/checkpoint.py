"""Checkpoints by original parameter names, so that any number of stages can go on from them.

A checkpoint is a folder (any fsspec URI) of one shard a mesh and a manifest. Every file appears
whole or not at all, the manifest last: without it a folder is no checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import fsspec
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from worker.checkpoint_files import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    SaveSeconds,
    check_size,
    check_sum,
    complete,
    look,
    read_manifest,
    shard_path,
    step_folders,
    step_uri,
)

__all__ = [
    "CheckpointError",
    "complete",
    "finish",
    "is_whole",
    "load",
    "load_shard",
    "look",
    "save_shard",
    "shard_names",
    "step_uri",
    "try_writing",
]

log = logging.getLogger(__name__)

# Parts of a state that are keyed by original name; a list of optimizer groups, each with the names of its
# parameters; the others are the same on every mesh.
_BY_NAME = ("parameters", "buffers", "optimizer")
_GROUPS = "optimizer_groups"
_PARTIAL = ".partial"


def save_shard(uri: str, *, step: int, shard: str, state: Mapping[str, Any]) -> None:
    """Write one mesh's part: `state` has parameters, buffers and optimizer by original name.

    A checkpoint that was complete at `uri` stops being one until `finish` is called again.
    """
    files, folder = fsspec.core.url_to_fs(uri)
    files.makedirs(folder, exist_ok=True)
    with suppress(FileNotFoundError):
        files.rm_file(f"{folder}/{MANIFEST}")
    content = {"step": step, "shard": shard, "state": _own_memory(dict(state))}
    sha256 = _write(files, shard_path(folder, shard), lambda file: torch.save(content, file))
    names = sorted({name for part in _BY_NAME for name in state.get(part) or ()})
    told = json.dumps({"names": names, "sha256": sha256}).encode()
    _write(files, _names_path(folder, shard), lambda file: file.write(told))


def finish(
    uri: str,
    *,
    step: int,
    shards: Sequence[str],
    keep: int,
    keep_also: int | None = None,
    keep_every: int | None = None,
    notes: Mapping[str, Any] | None = None,
    seconds: SaveSeconds | None = None,
) -> None:
    """Make the shards at `uri` a checkpoint, and remove all but the newest `keep` of the same job, that of step
    `keep_also`, and whole ones of every `keep_every`-th step. `notes` (JSON) come back from `noted`, `seconds` from `look`.

    Raises CheckpointError when a shard is missing. Older ones that cannot be removed stay, with a warning.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: keep at least 1 checkpoint")
    files, folder = fsspec.core.url_to_fs(uri)
    sizes = {}
    for shard in shards:
        try:
            sizes[shard] = files.size(shard_path(folder, shard))
        except FileNotFoundError:
            raise CheckpointError(
                f"checkpoint {uri} lacks the shard of mesh {shard!r}: save it before finish"
            ) from None
    manifest = {"format": FORMAT, "step": step, "shards": sizes, "notes": dict(notes or {})}
    told = {shard: json.loads(files.cat_file(_names_path(folder, shard))) for shard in shards}
    manifest["names"] = {shard: said["names"] for shard, said in told.items()}
    manifest["sha256"] = {shard: said["sha256"] for shard, said in told.items()}
    if seconds is not None:
        manifest["seconds"] = asdict(seconds)
    written = json.dumps(manifest, indent=1).encode()
    _write(files, f"{folder}/{MANIFEST}", lambda file: file.write(written))
    try:
        _remove_partial(files, folder)
        _remove_old(files, folder, step, keep, keep_also, keep_every)
    except Exception as error:  # the new checkpoint is whole: that is what matters
        log.warning("old checkpoints beside %s could not be removed: %s", uri, error)


def noted(uri: str) -> dict[str, Any]:
    """The notes of a checkpoint; none in those of older versions."""
    files, folder = fsspec.core.url_to_fs(uri)
    return read_manifest(files, folder, uri).get("notes") or {}


def try_writing(uri: str) -> None:
    """Write and remove a small file below `uri`; raises CheckpointError naming the place and the cause."""
    try:
        files, folder = fsspec.core.url_to_fs(uri)
        path = f"{folder.rstrip('/')}/.writable-{uuid.uuid4().hex}"
        files.makedirs(folder, exist_ok=True)
        _write(files, path, lambda file: file.write(b""))
        files.rm_file(path)
    except Exception as error:
        raise CheckpointError(
            f"cannot write below checkpoint.uri {uri!r}: {type(error).__name__}: {error}; "
            "name a place that every worker may write to"
        ) from error


def shard_names(uri: str) -> dict[str, list[str]]:
    """Of each shard the parameters and buffers that it holds. Raises CheckpointError for what is no checkpoint, and
    for one of an older version, which does not say."""
    files, folder = fsspec.core.url_to_fs(uri)
    names = read_manifest(files, folder, uri).get("names")
    if names is None:
        raise CheckpointError(
            f"{uri} was saved by an older version, which did not write down what shards hold"
        )
    return names


def is_whole(uri: str) -> bool:
    """Whether a checkpoint of known format lies at `uri`, with all its files in their sizes; contents are not read."""
    try:
        files, folder = fsspec.core.url_to_fs(uri)
        for shard, size in read_manifest(files, folder, uri)["shards"].items():
            check_size(files, shard_path(folder, shard), size)
    except CheckpointError:
        return False
    return True


def load_shard(uri: str, shard: str) -> dict[str, Any]:
    """The state that was saved as this shard; CheckpointError as of `load`, and where there is none of that name."""
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = read_manifest(files, folder, uri)
    if shard not in manifest["shards"]:
        raise CheckpointError(f"{uri} has no shard {shard!r}")
    sha256 = manifest.get("sha256", {}).get(shard)
    content = _read_shard(files, shard_path(folder, shard), manifest["shards"][shard], sha256)
    return _copied(content["state"])


def load(
    uri: str, names: Collection[str] | None = None, *, parts: Collection[str] | None = None
) -> tuple[dict[str, Any], int]:
    """The state of all meshes in one, on the CPU, and the step after which it was taken.

    With `names` only these parameters and buffers are kept, and only the shards that have some are read; with `parts`
    only these parts of the state.
    Raises CheckpointError for a folder without a manifest, a missing shard, one that is not, bit for bit, what was
    saved, or shards of another step.
    """
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = read_manifest(files, folder, uri)
    for shard, size in manifest["shards"].items():
        check_size(files, shard_path(folder, shard), size)  # of all: it is whole for every worker or for none
    whole: dict[str, Any] = {}
    for shard in _needed_shards(manifest, names):
        size = manifest["shards"][shard]
        content = _read_shard(files, shard_path(folder, shard), size, manifest.get("sha256", {}).get(shard))
        if content["step"] != manifest["step"]:
            raise CheckpointError(
                f"shard {shard!r} of {uri} is of step {content['step']}, the manifest of step {manifest['step']}"
            )
        for part, value in content["state"].items():
            if parts is not None and part not in parts:
                continue
            if part in _BY_NAME:
                kept = {name: entry for name, entry in value.items() if names is None or name in names}
                whole.setdefault(part, {}).update(_copied(kept))
            elif part == _GROUPS and manifest["format"] > 1:
                whole.setdefault(part, []).extend(value)
            elif not whole.get(part):  # a mesh without trained parameters has none
                whole[part] = value
    return whole, manifest["step"]


def _needed_shards(manifest: Mapping[str, Any], names: Collection[str] | None) -> list[str]:
    """The shards that hold any of `names`, and at least one for what is the same in all. A checkpoint of an older
    version does not say what they hold."""
    shards, held = list(manifest["shards"]), manifest.get("names")
    if names is None or held is None:
        return shards
    return [shard for shard in shards if not set(names).isdisjoint(held[shard])] or shards[:1]


def _names_path(folder: str, shard: str) -> str:
    return f"{folder}/{shard}.names.json"


def _write(files: AbstractFileSystem, path: str, write: Callable[[Any], Any]) -> str:
    """Write a file that appears at once: under another name first, then renamed. The SHA-256 of its content.

    The content is never held as a whole beside what it is made of.
    """
    partial = f"{path}.{uuid.uuid4().hex}{_PARTIAL}"
    try:
        with files.open(partial, "wb") as file:
            summing = _Summing(file)
            write(summing)
            if isinstance(files, LocalFileSystem):
                file.flush()
                os.fsync(file.fileno())
        files.mv(partial, path)
        return summing.sha256.hexdigest()
    except BaseException:
        with suppress(Exception):
            files.rm_file(partial)
        raise


class _Summing:
    """A file to write to that also computes the checksum of what goes into it."""

    def __init__(self, file: Any):
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        self.sha256.update(content)
        self._file.write(content)
        return len(content)

    def flush(self) -> None:
        """Its file is flushed when all is written."""


def _read_shard(files: AbstractFileSystem, path: str, size: int, sha256: str | None) -> dict[str, Any]:
    """The content of a shard of `size` bytes; `sha256` is None where an older version saved it."""
    try:
        check_size(files, path, size)
        if isinstance(files, LocalFileSystem):
            with open(path, "rb") as file:
                check_sum(path, sha256, lambda: hashlib.file_digest(file, "sha256").hexdigest())
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        content = files.cat_file(path)
        check_sum(path, sha256, lambda: hashlib.sha256(content).hexdigest())
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"shard {path} is missing") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"shard {path} cannot be read: {error}") from error


def _remove_old(
    files: AbstractFileSystem,
    folder: str,
    step: int,
    keep: int,
    keep_also: int | None,
    keep_every: int | None = None,
) -> None:
    older = [(other, path) for other, path in step_folders(files, folder.rsplit("/", 1)[0]) if other < step]
    complete = [path for _, path in older if files.exists(f"{path}/{MANIFEST}")]
    kept = complete[-(keep - 1) :] if keep > 1 else []
    for number, path in older:
        for_ever = keep_every is not None and number % keep_every == 0 and path in complete
        if path not in kept and number != keep_also and not for_ever:
            with suppress(FileNotFoundError):
                files.rm_file(f"{path}/{MANIFEST}")  # first, so that nobody takes what is left for whole
            files.rm(path, recursive=True)


def _remove_partial(files: AbstractFileSystem, folder: str) -> None:
    """What writers that were killed left in the folder; nobody writes there any more."""
    for path in files.ls(folder, detail=False, refresh=True):
        if path.endswith(_PARTIAL):
            with suppress(FileNotFoundError):
                files.rm_file(path)


def _own_memory(value: Any) -> Any:
    """Tensors that share memory with larger ones would be saved with all of it: copy them."""
    return _map_tensors(value, lambda t: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t)


def _copied(value: Any) -> Any:
    """Copies, as tensors of a mapped file must not outlive it."""
    return _map_tensors(value, torch.clone)


def _map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        changed = [_map_tensors(entry, change) for entry in value]
        return changed if isinstance(value, list) else tuple(changed)
    return value
