"""Writes and reads Slotline checkpoints: one shard a mesh, keyed by original parameter names, and a manifest.

A checkpoint is a folder at any fsspec URI. Every file appears whole or not at all, the manifest last: without a
manifest a folder is no checkpoint. As tensors have the model's own names, any number of stages can resume from it.
Contents are checked by SHA-256, and loaded with weights_only. Older formats stay readable. Knows no stages.
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

from worker.contract.checkpoint_files import (
    CHECKPOINT_FORMAT,
    MANIFEST,
    CheckpointError,
    SaveSeconds,
    check_sha256,
    check_size,
    complete_checkpoints,
    inspect_checkpoints,
    read_manifest,
    shard_path,
    step_folders,
    step_uri,
)

__all__ = [
    "CheckpointError",
    "check_writable",
    "complete_checkpoints",
    "finish_checkpoint",
    "inspect_checkpoints",
    "is_whole_checkpoint",
    "load_checkpoint",
    "load_shard",
    "save_shard",
    "shard_names",
    "step_uri",
]

log = logging.getLogger(__name__)

# Parts of a state that are keyed by original name; a list of optimizer groups, each with the names of its
# parameters; the others are the same on every mesh.
_PARTS_BY_NAME = ("parameters", "buffers", "optimizer")
_OPTIMIZER_GROUPS = "optimizer_groups"
_PARTIAL_SUFFIX = ".partial"


def save_shard(uri: str, *, step: int, shard: str, state: Mapping[str, Any]) -> None:
    """Write one mesh's part: `state` has parameters, buffers and optimizer by original name.

    A checkpoint that was complete at `uri` stops being one until `finish` is called again.
    """
    files, folder = fsspec.core.url_to_fs(uri)
    files.makedirs(folder, exist_ok=True)
    with suppress(FileNotFoundError):
        files.rm_file(f"{folder}/{MANIFEST}")
    content = {"step": step, "shard": shard, "state": _without_shared_memory(dict(state))}
    sha256 = _write_atomically(files, shard_path(folder, shard), lambda file: torch.save(content, file))
    names = sorted({name for part in _PARTS_BY_NAME for name in state.get(part) or ()})
    content = json.dumps({"names": names, "sha256": sha256}).encode()
    _write_atomically(files, _names_path(folder, shard), lambda file: file.write(content))


def finish_checkpoint(
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
    manifest = {"format": CHECKPOINT_FORMAT, "step": step, "shards": sizes, "notes": dict(notes or {})}
    shard_contents = {shard: json.loads(files.cat_file(_names_path(folder, shard))) for shard in shards}
    manifest["names"] = {shard: said["names"] for shard, said in shard_contents.items()}
    manifest["sha256"] = {shard: said["sha256"] for shard, said in shard_contents.items()}
    if seconds is not None:
        manifest["seconds"] = asdict(seconds)
    written = json.dumps(manifest, indent=1).encode()
    _write_atomically(files, f"{folder}/{MANIFEST}", lambda file: file.write(written))
    try:
        _remove_partial_files(files, folder)
        _remove_older_checkpoints(files, folder, step, keep, keep_also, keep_every)
    except Exception as error:  # the new checkpoint is whole: that is what matters
        log.warning("old checkpoints beside %s could not be removed: %s", uri, error)


def checkpoint_notes(uri: str) -> dict[str, Any]:
    """The notes of a checkpoint; none in those of older versions."""
    files, folder = fsspec.core.url_to_fs(uri)
    return read_manifest(files, folder, uri).get("notes") or {}


def check_writable(uri: str) -> None:
    """Write and remove a small file below `uri`; raises CheckpointError naming the place and the cause."""
    try:
        files, folder = fsspec.core.url_to_fs(uri)
        path = f"{folder.rstrip('/')}/.writable-{uuid.uuid4().hex}"
        files.makedirs(folder, exist_ok=True)
        _write_atomically(files, path, lambda file: file.write(b""))
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


def is_whole_checkpoint(uri: str) -> bool:
    """True if a checkpoint of known format lies at `uri`, with all files in their sizes; contents are not read."""
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
    return _clone_tensors(content["state"])


def load_checkpoint(
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
            if part in _PARTS_BY_NAME:
                kept = {name: entry for name, entry in value.items() if names is None or name in names}
                whole.setdefault(part, {}).update(_clone_tensors(kept))
            elif part == _OPTIMIZER_GROUPS and manifest["format"] > 1:
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


def _write_atomically(files: AbstractFileSystem, path: str, write: Callable[[Any], Any]) -> str:
    """Write a file that appears at once: under another name first, then renamed. The SHA-256 of its content.

    The content is never held as a whole beside what it is made of.
    """
    partial = f"{path}.{uuid.uuid4().hex}{_PARTIAL_SUFFIX}"
    try:
        with files.open(partial, "wb") as file:
            summing = _HashingFile(file)
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


class _HashingFile:
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
                check_sha256(path, sha256, lambda: hashlib.file_digest(file, "sha256").hexdigest())
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        content = files.cat_file(path)
        check_sha256(path, sha256, lambda: hashlib.sha256(content).hexdigest())
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"shard {path} is missing") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"shard {path} cannot be read: {error}") from error


def _remove_older_checkpoints(
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


def _remove_partial_files(files: AbstractFileSystem, folder: str) -> None:
    """Remove files that killed writers left in the folder; nobody writes there any more."""
    for path in files.ls(folder, detail=False, refresh=True):
        if path.endswith(_PARTIAL_SUFFIX):
            with suppress(FileNotFoundError):
                files.rm_file(path)


def _without_shared_memory(value: Any) -> Any:
    """Tensors that share memory with larger ones would be saved with all of it: copy them."""
    return _map_tensors(value, lambda t: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t)


def _clone_tensors(value: Any) -> Any:
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
