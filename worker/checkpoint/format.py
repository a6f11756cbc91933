"""Writes and reads Slotline checkpoints, which torch.distributed.checkpoint (DCP) reads too.

A checkpoint is a folder at any fsspec URI. Each worker that has some of the state writes a shard: a file of blobs with its
own chunks of tensors. What a mesh splits is in several shards: neither who writes nor who reads holds a whole tensor of
theirs. As tensors have the model's own names, any layout can resume from it. The index of all chunks, DCP's metadata and
the manifest are written when all shards are there, each file whole or not at all, the manifest last: without it a folder is
no checkpoint. Contents are checked by SHA-256, and loaded with weights_only. Older formats stay readable. Knows no stages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from worker.checkpoint.blobs import PARTIAL_SUFFIX, Blob, BlobWriter, write_atomically
from worker.checkpoint.chunked import (
    PARTS_BY_NAME,
    HeldParts,
    TensorIndex,
    Wanted,
    add_state,
    merge_entries,
    read_entries,
    read_rest,
)
from worker.checkpoint.whole_shards import read_other_values, read_whole_shards
from worker.contract.checkpoint_files import (
    CHECKPOINT_FORMAT,
    MANIFEST,
    TENSOR_INDEX,
    CheckpointError,
    DamagedCheckpointError,
    SaveSeconds,
    check_size,
    complete_checkpoints,
    file_content,
    file_sizes,
    inspect_checkpoints,
    read_manifest,
    shard_path,
    step_folders,
    step_uri,
)
from worker.contract.tasks import DCP_METADATA

__all__ = [
    "CheckpointError",
    "DamagedCheckpointError",
    "HeldParts",
    "check_writable",
    "complete_checkpoints",
    "finish_checkpoint",
    "index_shards",
    "inspect_checkpoints",
    "is_whole_checkpoint",
    "load_checkpoint",
    "load_parts",
    "load_shard_values",
    "rank_shard",
    "save_shard",
    "shard_description",
    "shard_names",
    "step_uri",
]

log = logging.getLogger(__name__)

_OPTIMIZER_GROUPS = "optimizer_groups"


def rank_shard(mesh: str, worker: int) -> str:
    """The name of the shard of one worker of a mesh; the first worker's has the mesh's own name."""
    return mesh if worker == 0 else f"{mesh}.rank{worker}"


def save_shard(
    uri: str,
    *,
    step: int,
    shard: str,
    state: Mapping[str, Any],
    held: HeldParts | None = None,
    beside: Sequence[str] = (),
) -> None:
    """Write one worker's part: `state` has parameters, buffers and optimizer by original name, of the tensors in `held` only
    these parts. The shards of the mesh's other workers are `beside` that of its first.

    A checkpoint that was complete at `uri` stops being one until `finish` is called again.
    """
    files, folder = fsspec.core.url_to_fs(uri)
    files.makedirs(folder, exist_ok=True)
    for name in (MANIFEST, DCP_METADATA):
        with suppress(FileNotFoundError):
            files.rm_file(f"{folder}/{name}")
    saved: list[TensorIndex] = []

    def write(file: Any) -> None:
        writer = BlobWriter(file)
        entries, rest = add_state(shard, state, held or HeldParts(), writer.add)
        saved.append(TensorIndex(entries, {shard: writer.blobs}, {} if rest is None else {shard: rest}))

    write_atomically(files, shard_path(folder, shard), write, summed=False)
    written = json.dumps(shard_description(step, state, beside, saved[0])).encode()
    write_atomically(files, _description_path(folder, shard), lambda file: file.write(written))


def shard_description(
    step: int, state: Mapping[str, Any], beside: Sequence[str], index: TensorIndex
) -> dict[str, Any]:
    """The description of a shard by its writer (JSON), from which manifest and index are made."""
    names = sorted({name for part in PARTS_BY_NAME for name in state.get(part) or ()})
    return {"step": step, "names": names, "beside": list(beside), "index": index.to_json()}


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

    Raises CheckpointError when a shard is missing or of another step, and when shards lack some of a tensor. Older ones that
    cannot be removed stay, with a warning.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}: keep at least 1 checkpoint")
    files, folder = fsspec.core.url_to_fs(uri)
    saved = [_saved_shards(files, folder, uri, step, shard) for shard in shards]
    index = _merged_index(uri, saved)
    content = json.dumps(index.to_json()).encode()
    sha256 = write_atomically(files, f"{folder}/{TENSOR_INDEX}", lambda file: file.write(content))
    beside = {TENSOR_INDEX: (len(content), sha256), **_write_dcp_metadata(files, folder, index)}
    manifest = _manifest(step, saved, beside, notes)
    if seconds is not None:
        manifest["seconds"] = asdict(seconds)
    written = json.dumps(manifest, indent=1).encode()
    write_atomically(files, f"{folder}/{MANIFEST}", lambda file: file.write(written))
    try:
        _remove_partial_files(files, folder)
        _remove_older_checkpoints(files, folder, step, keep, keep_also, keep_every)
    except Exception as error:  # the new checkpoint is whole: that is what matters
        log.warning("old checkpoints beside %s could not be removed: %s", uri, error)


def index_shards(
    uri: str,
    step: int,
    shards: Mapping[str, tuple[Mapping[str, Any], int]],
    notes: Mapping[str, Any] | None = None,
) -> dict[str, bytes]:
    """The files beside these shards (their descriptions and bytes) that make them a checkpoint which is not for DCP, the
    manifest last. CheckpointError as of `finish_checkpoint`."""
    others = {other for description, _ in shards.values() for other in description["beside"]}
    saved = []
    for first in [shard for shard in shards if shard not in others]:
        names = [first, *shards[first][0]["beside"]]
        if lacking := [name for name in names if name not in shards]:
            raise CheckpointError(f"{uri} lacks {', '.join(lacking[:4])} beside {first}")
        saved.append({name: _SavedShard.of(*shards[name]) for name in names})
    content = json.dumps(_merged_index(uri, saved).to_json()).encode()
    files = {TENSOR_INDEX: (len(content), hashlib.sha256(content).hexdigest())}
    return {
        TENSOR_INDEX: content,
        MANIFEST: json.dumps(_manifest(step, saved, files, notes)).encode(),
    }


def _manifest(
    step: int,
    saved: Sequence[Mapping[str, _SavedShard]],
    files: Mapping[str, tuple[int, str]],
    notes: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The manifest of the shards of each mesh, and of the `files` beside them: their bytes and SHA-256."""
    shards = {shard: one for group in saved for shard, one in group.items()}
    return {
        "format": CHECKPOINT_FORMAT,
        "step": step,
        "shards": {shard: one.bytes for shard, one in shards.items()},
        "files": {name: list(file) for name, file in files.items()},
        "notes": dict(notes or {}),
        "names": {shard: one.names for shard, one in shards.items()},
        "beside": {shard: one.beside for shard, one in shards.items()},
    }


@dataclass(frozen=True)
class _SavedShard:
    """A shard as its writer described it: its parameters and buffers, the shards beside it, its own index, its bytes."""

    names: Sequence[str]
    beside: Sequence[str]
    index: TensorIndex
    bytes: int

    @classmethod
    def of(cls, description: Mapping[str, Any], size: int) -> _SavedShard:
        index = TensorIndex.from_json(description["index"])
        return cls(description["names"], description["beside"], index, size)


def _saved_shards(
    files: AbstractFileSystem, folder: str, uri: str, step: int, shard: str
) -> dict[str, _SavedShard]:
    """A mesh's shard, and those beside it."""
    found: dict[str, _SavedShard] = {}
    waiting = [shard]
    while waiting:
        shard = waiting.pop(0)
        try:
            description = json.loads(files.cat_file(_description_path(folder, shard)))
            size = files.size(shard_path(folder, shard))
        except FileNotFoundError:
            raise CheckpointError(
                f"checkpoint {uri} lacks the shard of mesh {shard!r}: save it before finish"
            ) from None
        if description["step"] != step:
            raise CheckpointError(
                f"shard {shard!r} of {uri} is of step {description['step']}, the checkpoint of step {step}: save it again"
            )
        found[shard] = _SavedShard.of(description, size)
        waiting += description["beside"]
    return found


def _merged_index(uri: str, saved: Sequence[Mapping[str, _SavedShard]]) -> TensorIndex:
    try:
        entries = merge_entries([[one.index.entries for one in group.values()] for group in saved])
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {uri} is not whole: {error}") from None
    blobs: dict[str, Sequence[Blob]] = {}
    rest: dict[str, int] = {}
    for group in saved:
        for one in group.values():
            blobs |= one.index.blobs
            rest |= one.index.rest
    return TensorIndex(entries, blobs, rest)


def _write_dcp_metadata(
    files: AbstractFileSystem, folder: str, index: TensorIndex
) -> dict[str, tuple[int, str]]:
    """Write what torch.distributed.checkpoint needs beside the shards; sizes and checksums of these files by name."""
    from worker.checkpoint import dcp_metadata  # it loads much that workers do not need

    rest = {shard: read_rest(files, folder, index, shard) for shard in index.rest}
    return dcp_metadata.write_dcp_metadata(files, folder, index, rest)


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
        write_atomically(files, path, lambda file: file.write(b""))
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
        for path, size in file_sizes(folder, read_manifest(files, folder, uri)).items():
            check_size(files, path, size)
    except CheckpointError:
        return False
    return True


def load_shard_values(uri: str, shard: str) -> dict[str, Any]:
    """The values of a shard beside parameters, buffers and optimizer state; CheckpointError as of `load`, and where
    there is none of that name."""
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = read_manifest(files, folder, uri)
    if shard not in manifest["shards"]:
        raise CheckpointError(f"{uri} has no shard {shard!r}")
    if manifest["format"] < CHECKPOINT_FORMAT:
        return read_other_values(files, folder, manifest, shard)
    return read_rest(files, folder, _read_index(files, folder, manifest), shard)


def load_checkpoint(
    uri: str, names: Collection[str] | None = None, *, parts: Collection[str] | None = None
) -> tuple[dict[str, Any], int]:
    """The state of all meshes in one, on the CPU, and the step after which it was taken.

    With `names` only these parameters and buffers are read, with `parts` only these parts of the state.
    Raises CheckpointError for a folder without a manifest, and DamagedCheckpointError for a missing shard, one that is
    not, bit for bit, what was saved, or shards of another step.
    """
    loaded = _load(uri, Wanted(names, parts))
    return loaded.state, loaded.step


@dataclass(frozen=True)
class LoadedParts:
    """One worker's part of a checkpoint, on the CPU: its `state`, the `step` after which it was taken, and the shapes of the
    whole parameters and buffers that the checkpoint has of those asked for."""

    state: dict[str, Any]
    step: int
    shapes: Mapping[str, tuple[int, ...]]


def load_parts(uri: str, names: Collection[str], held: HeldParts) -> LoadedParts:
    """Load the tensors in `names`, of those in `held` these parts, from the chunks that have some of it, however they were
    split when they were saved; errors as of `load_checkpoint`. A tensor that cannot be split so is left out."""
    return _load(uri, Wanted(names, None, held))


def _load(uri: str, wanted: Wanted) -> LoadedParts:
    files, folder = fsspec.core.url_to_fs(uri)
    manifest = read_manifest(files, folder, uri)
    for path, size in file_sizes(folder, manifest).items():
        check_size(files, path, size)  # of all: it is whole for every worker or for none
    if manifest["format"] < CHECKPOINT_FORMAT:
        state, shapes = read_whole_shards(files, folder, manifest, wanted)
        return LoadedParts(state, manifest["step"], shapes)
    index = _read_index(files, folder, manifest)
    state, shapes = read_entries(files, folder, index, wanted)
    for shard in _shards_with_names(manifest, wanted.names):
        for part, value in read_rest(files, folder, index, shard).items():
            if wanted.parts is not None and part not in wanted.parts:
                continue
            if part == _OPTIMIZER_GROUPS:
                state.setdefault(part, []).extend(value)
            elif not state.get(part):  # a mesh without trained parameters has none
                state[part] = value
    return LoadedParts(state, manifest["step"], shapes)


def _read_index(files: AbstractFileSystem, folder: str, manifest: dict[str, Any]) -> TensorIndex:
    return TensorIndex.from_json(json.loads(file_content(files, folder, manifest, TENSOR_INDEX)))


def _shards_with_names(manifest: Mapping[str, Any], names: Collection[str] | None) -> list[str]:
    """The shards with some of these names, with the first of their meshes and at least one for what is the same in all."""
    shards = list(manifest["shards"])
    if names is None:
        return shards
    needed = {shard for shard in shards if not set(names).isdisjoint(manifest["names"][shard])}
    needed |= {shard for shard, others in manifest["beside"].items() if not needed.isdisjoint(others)}
    return [shard for shard in shards if shard in needed] or shards[:1]


def _description_path(folder: str, shard: str) -> str:
    return f"{folder}/{shard}.index.json"


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
        if path.endswith(PARTIAL_SUFFIX):
            with suppress(FileNotFoundError):
                files.rm_file(path)
