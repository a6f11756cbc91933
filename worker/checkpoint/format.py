"""Writes and reads Slotline checkpoints: a shard for each mesh and tensor-parallel rank, and a manifest.

A checkpoint is a folder at any fsspec URI. Every file appears whole or not at all, the manifest last: without a
manifest a folder is no checkpoint. As tensors have the model's own names, any number of stages can resume from it.
Of a tensor that a mesh splits each rank's shard has its slice; the manifest says which, and a reader in any layout
takes from each shard what it has in common with its own slice: neither side ever holds the whole tensor.
Contents are checked by SHA-256, and loaded with weights_only. Older formats stay readable. Knows no stages.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from worker.contract.checkpoint_files import (
    CHECKPOINT_FORMAT,
    MANIFEST,
    SLICED_FORMAT,
    CheckpointError,
    DamagedCheckpointError,
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
from worker.parallel.shard_spec import ShardSpec, copy_common

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "check_writable",
    "complete_checkpoints",
    "finish_checkpoint",
    "inspect_checkpoints",
    "is_whole_checkpoint",
    "load_checkpoint",
    "load_shard",
    "load_slices",
    "rank_shard",
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


def rank_shard(mesh: str, rank: int) -> str:
    """The name of the shard of one tensor-parallel rank of a mesh; the first rank's has the mesh's own name."""
    return mesh if rank == 0 else f"{mesh}.tp{rank}"


def save_shard(
    uri: str,
    *,
    step: int,
    shard: str,
    state: Mapping[str, Any],
    slices: Mapping[str, ShardSpec] | None = None,
    beside: Sequence[str] = (),
) -> None:
    """Write one mesh's part: `state` has parameters, buffers and optimizer by original name.

    Of the tensors in `slices` it has only these; the shards of the mesh's other ranks are `beside` that of its first.
    A checkpoint that was complete at `uri` stops being one until `finish` is called again.
    """
    files, folder = fsspec.core.url_to_fs(uri)
    files.makedirs(folder, exist_ok=True)
    with suppress(FileNotFoundError):
        files.rm_file(f"{folder}/{MANIFEST}")
    content = {"step": step, "shard": shard, "state": _without_shared_memory(dict(state))}
    sha256 = _write_atomically(files, shard_path(folder, shard), lambda file: torch.save(content, file))
    names = sorted({name for part in _PARTS_BY_NAME for name in state.get(part) or ()})
    description: dict[str, Any] = {"names": names, "sha256": sha256, "beside": list(beside)}
    description["slices"] = {
        name: [spec.dim, list(spec.parts), spec.worker, spec.workers] for name, spec in (slices or {}).items()
    }
    written = json.dumps(description).encode()
    _write_atomically(files, _names_path(folder, shard), lambda file: file.write(written))


def finish_checkpoint(
    uri: str,
    *,
    step: int,
    shards: Sequence[str],
    keep: int,
    keep_also: Collection[int] = (),
    keep_every: int | None = None,
    notes: Mapping[str, Any] | None = None,
    seconds: SaveSeconds | None = None,
) -> None:
    """Make the `shards` at `uri`, and those beside them, a checkpoint, and remove all but the newest `keep` of the same
    job, those of the steps `keep_also`, and whole ones of every `keep_every`-th step. `notes` (JSON) come back from
    `checkpoint_notes`, `seconds` from `inspect_checkpoints`.

    Raises CheckpointError when a shard is missing. Older ones that cannot be removed stay, with a warning.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: keep at least 1 checkpoint")
    files, folder = fsspec.core.url_to_fs(uri)
    descriptions, sizes = {}, {}
    waiting = list(shards)
    while waiting:
        shard = waiting.pop(0)
        try:
            descriptions[shard] = json.loads(files.cat_file(_names_path(folder, shard)))
            sizes[shard] = files.size(shard_path(folder, shard))
        except FileNotFoundError:
            raise CheckpointError(
                f"checkpoint {uri} lacks the shard of mesh {shard!r}: save it before finish"
            ) from None
        waiting += descriptions[shard]["beside"]
    manifest: dict[str, Any] = {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "shards": sizes,
        "notes": dict(notes or {}),
        "names": {shard: description["names"] for shard, description in descriptions.items()},
        "sha256": {shard: description["sha256"] for shard, description in descriptions.items()},
    }
    if any(description["slices"] for description in descriptions.values()):
        manifest |= {
            "format": SLICED_FORMAT,
            "slices": {shard: description["slices"] for shard, description in descriptions.items()},
            "beside": {shard: description["beside"] for shard, description in descriptions.items()},
        }
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


@dataclass(frozen=True)
class CheckpointDescription:
    """The content of a manifest: the step, the notes, and of each shard the parameters and buffers that it holds (None:
    saved by an older version)."""

    step: int
    notes: Mapping[str, Any]
    names: Mapping[str, Sequence[str]] | None


def describe_checkpoint(uri: str) -> CheckpointDescription:
    """The description in the manifest at `uri`. Raises CheckpointError where there is none that can be read."""
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = read_manifest(files, folder, uri)
    return CheckpointDescription(manifest["step"], manifest.get("notes") or {}, manifest.get("names"))


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
    """The parameters and buffers that each shard holds. Raises CheckpointError for what is no checkpoint, and for one of
    an older version, which does not say."""
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
    Raises CheckpointError for a folder without a manifest, and DamagedCheckpointError for a missing shard, one that is
    not, bit for bit, what was saved, or shards of another step.
    """
    loading = _Loading(uri, names, parts)
    return loading.read(), loading.step


@dataclass(frozen=True)
class LoadedSlices:
    """One worker's part of a checkpoint, on the CPU: its `state`, the `step` after which it was taken, and the shapes of the
    whole parameters and buffers that the checkpoint has of those asked for."""

    state: dict[str, Any]
    step: int
    shapes: Mapping[str, tuple[int, ...]]


def load_slices(uri: str, specs: Mapping[str, ShardSpec]) -> LoadedSlices:
    """Load one slice of each tensor in `specs`, copied from the shards that have some of it, however it was split when it
    was saved; errors as of `load_checkpoint`. A tensor that cannot be split so is left out."""
    loading = _Loading(uri, specs.keys(), None, specs)
    return LoadedSlices(loading.read(), loading.step, loading.shapes)


class _Loading:
    """Reads a checkpoint shard by shard. `specs` are the slices that are wanted; of other tensors all is."""

    def __init__(
        self,
        uri: str,
        names: Collection[str] | None,
        parts: Collection[str] | None,
        specs: Mapping[str, ShardSpec] | None = None,
    ):
        self._uri, self._names, self._parts, self._specs = uri, names, parts, specs or {}
        self._files, self._folder = fsspec.core.url_to_fs(uri)
        self._manifest = read_manifest(self._files, self._folder, uri)
        self.step: int = self._manifest["step"]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        manifest = self._manifest
        for shard, size in manifest["shards"].items():
            # of all: it is whole for every worker or for none
            check_size(self._files, shard_path(self._folder, shard), size)
        for shard in self._needed_shards():
            path, sha256 = shard_path(self._folder, shard), manifest.get("sha256", {}).get(shard)
            content = _read_shard(self._files, path, manifest["shards"][shard], sha256)
            if content["step"] != self.step:
                raise DamagedCheckpointError(
                    f"shard {shard!r} of {self._uri} is of step {content['step']}, the manifest of step {self.step}"
                )
            self._take(content["state"], self._slices_in(shard))
        return self._state

    def _take(self, saved: Mapping[str, Any], slices: Mapping[str, ShardSpec]) -> None:
        """Take what is wanted of one shard's state."""
        for part, value in saved.items():
            if self._parts is not None and part not in self._parts:
                continue
            if part in _PARTS_BY_NAME:
                taken = self._state.setdefault(part, {})
                for name, entry in value.items():
                    if self._names is None or name in self._names:
                        self._take_entry(taken, part, name, entry, saved, slices.get(name, ShardSpec(name)))
            elif part == _OPTIMIZER_GROUPS and self._manifest["format"] > 1:
                self._state.setdefault(part, []).extend(value)
            elif not self._state.get(part):  # a mesh without trained parameters has none
                self._state[part] = value

    def _take_entry(
        self,
        taken: dict[str, Any],
        part: str,
        name: str,
        entry: Any,
        saved: Mapping[str, Any],
        source: ShardSpec,
    ) -> None:
        """Add what a shard has of one name to `taken`; `source` is its slice of the parameter or buffer."""
        if part != "optimizer":
            self.shapes[name] = source.whole_shape(entry.shape)
            self._copy(taken, name, entry, source)
            return
        values = taken.setdefault(name, {})
        parameter = saved.get("parameters", {}).get(name)
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and parameter is not None and value.shape == parameter.shape:
                self._copy(values, key, value, source)
            else:  # one for the whole parameter, as the number of its steps
                values[key] = _clone_tensors(value)

    def _copy(self, taken: dict[str, Any], key: str, saved: torch.Tensor, source: ShardSpec) -> None:
        """Copy what the slice `saved` has in common with the wanted slice into `taken[key]`."""
        target = self._specs.get(source.name, ShardSpec(source.name))
        if source == target:
            taken[key] = saved.clone()
            return
        shape = target.local_shape(source.whole_shape(saved.shape))
        if shape is None:
            return
        if key not in taken:
            taken[key] = torch.empty(shape, dtype=saved.dtype)
        copy_common(source, saved, target, taken[key])

    def _needed_shards(self) -> list[str]:
        """The shards that hold some of what is wanted, with the first of their meshes and at least one for what is the same
        in all. A checkpoint of an older version does not say what they hold."""
        shards, held = list(self._manifest["shards"]), self._manifest.get("names")
        if self._names is None or held is None:
            return shards
        needed = {shard for shard in shards if self._holds_some(held[shard], self._slices_in(shard))}
        beside = self._manifest.get("beside", {})
        needed |= {shard for shard, others in beside.items() if not needed.isdisjoint(others)}
        return [shard for shard in shards if shard in needed] or shards[:1]

    def _holds_some(self, held: Collection[str], slices: Mapping[str, ShardSpec]) -> bool:
        for name in set(self._names).intersection(held):
            source = slices.get(name, ShardSpec(name))
            target = self._specs.get(name, ShardSpec(name))
            if source.layout_key != target.layout_key or source.worker == target.worker:
                return True
        return False

    def _slices_in(self, shard: str) -> dict[str, ShardSpec]:
        slices = self._manifest.get("slices", {}).get(shard, {})
        return {
            name: ShardSpec(name, dim, tuple(parts), worker, workers)
            for name, (dim, parts, worker, workers) in slices.items()
        }


def _names_path(folder: str, shard: str) -> str:
    return f"{folder}/{shard}.names.json"


def _write_atomically(files: AbstractFileSystem, path: str, write: Callable[[Any], Any]) -> str:
    """Write a file that appears at once: under another name first, then renamed. The SHA-256 of its content.

    The content is never held as a whole beside what it is made of. Raises CheckpointError where no space is left.
    """
    partial = f"{path}.{uuid.uuid4().hex}{_PARTIAL_SUFFIX}"
    summing = None
    try:
        with files.open(partial, "wb") as file:
            summing = _HashingFile(file)
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


class _HashingFile:
    """A file to write to that also computes the checksum of what goes into it."""

    def __init__(self, file: Any):
        self._file = file
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None
        """The first error of a write."""

    def write(self, content: bytes | memoryview) -> int:
        self.sha256.update(content)
        try:
            self._file.write(content)
        except OSError as error:
            self.error = self.error or error
            raise
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
        raise DamagedCheckpointError(f"shard {path} is missing") from None
    except (RuntimeError, EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        kind = CheckpointError if isinstance(error, OSError) else DamagedCheckpointError
        raise kind(f"shard {path} cannot be read: {error}") from error


def _remove_older_checkpoints(
    files: AbstractFileSystem,
    folder: str,
    step: int,
    keep: int,
    keep_also: Collection[int],
    keep_every: int | None = None,
) -> None:
    older = [(other, path) for other, path in step_folders(files, folder.rsplit("/", 1)[0]) if other < step]
    complete = [path for _, path in older if files.exists(f"{path}/{MANIFEST}")]
    kept = complete[-(keep - 1) :] if keep > 1 else []
    for number, path in older:
        for_ever = keep_every is not None and number % keep_every == 0 and path in complete
        if path not in kept and number not in keep_also and not for_ever:
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
