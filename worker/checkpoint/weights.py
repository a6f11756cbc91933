"""Exports a checkpoint as safetensors with the model's own names and config.json.

Needs no user code: the checkpoint's model record (worker/checkpoint/record.py) has the names. Holds only the
tensors of the file that is being written. A folder with files of another model is refused; every file appears whole
or not at all.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save, save_file
from torch import Tensor

from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.adapters import ADAPTER_STEM as ADAPTERS
from worker.checkpoint.adapters import StateDictEntry
from worker.checkpoint.record import RECORD_SHARD, ModelRecord, record_from_state
from worker.contract.checkpoint_files import CheckpointError, job_uri, step_folder_name
from worker.contract.tasks import MERGED_MESSAGE, SAFETENSORS, ExportRequest

MAX_FILE_BYTES = 5_000_000_000
"""So much goes into one file at most, as transformers has it; a larger tensor is a file of its own."""
_SAFETENSORS_METADATA = {"format": "pt"}  # without it transformers does not read them
_SAFETENSORS_SUFFIX = ".safetensors"
_PARTIAL_SUFFIX = ".partial"


class ExportTargetError(ValueError):
    """The folder cannot take the weights; the message says why."""


@dataclass(frozen=True)
class WrittenFile:
    name: str
    bytes: int


@dataclass(frozen=True)
class ExportResult:
    """The files of an export, the step that they are from, and notes for people."""

    step: int
    uri: str
    files: tuple[WrittenFile, ...]
    tensors: int
    notes: tuple[str, ...] = ()


def export_safetensors(uri: str, target: str, *, file_bytes: int = MAX_FILE_BYTES) -> ExportResult:
    """Write the weights of the checkpoint at `uri` into the folder `target` (both any fsspec URI).

    Of a model of peft these are the adapters. Files of the same names are replaced; with other files in it the folder is
    refused. Raises CheckpointError for a checkpoint that is damaged, or too old to say what its model's names are, and
    ExportTargetError.
    """
    held = checkpoint_format.shard_names(uri)
    if RECORD_SHARD not in held:
        raise CheckpointError(
            f"{uri} was saved by an older version, which did not write down the model's own names: let the job save once "
            "more with this one (raise training.steps and submit it again), or read the shards' parameters yourself"
        )
    record = record_from_state(checkpoint_format.load_shard_values(uri, RECORD_SHARD))
    _check_exportable(uri, record, {name for names in held.values() for name in names})
    entries, texts, stem = record.entries, record.files, record.stem
    if record.adapters is not None:  # in one file, which is all that peft reads
        entries, texts, stem, file_bytes = (
            record.adapters.entries,
            record.adapters.files,
            ADAPTERS,
            sys.maxsize,
        )
    parts = _split_into_files(entries, file_bytes)
    names = _file_names(stem, len(parts))
    index = f"{stem}{_SAFETENSORS_SUFFIX}.index.json"
    beside = dict(texts)
    if len(parts) > 1:
        beside[index] = _safetensors_index(parts, names)
    files, folder = fsspec.core.url_to_fs(target)
    _prepare_folder(files, folder, target, {*names, *beside})
    for name, text in beside.items():
        _write_atomically(files, f"{folder}/{name}", text.encode())
    step = 0
    for name, part in zip(names, parts, strict=True):
        state, step = checkpoint_format.load_checkpoint(
            uri, names={entry.tensor for entry in part}, parts=("parameters", "buffers")
        )
        tensors = {**state.get("parameters", {}), **state.get("buffers", {})}
        taken: set[str] = set()
        made = {entry.name: _owned_tensor(tensors, entry, taken) for entry in part}
        _write_atomically(files, f"{folder}/{name}", made)
    written = tuple(WrittenFile(name, files.size(f"{folder}/{name}")) for name in [*names, *beside])
    return ExportResult(step, target, written, len(entries), _export_notes(record))


def export_job(request: ExportRequest) -> ExportResult:
    """Write the weights of the checkpoint that is asked for, or of the newest that is whole; notes tell of newer ones
    that are damaged. Raises CheckpointError where there is none, ExportTargetError."""
    if request.format != SAFETENSORS:
        raise ExportTargetError(
            f"format is {request.format!r}: weights are written as safetensors, and torch.distributed.checkpoint reads "
            "checkpoints as they lie"
        )
    if request.merged:
        raise ExportTargetError(MERGED_MESSAGE)
    found = checkpoint_format.inspect_checkpoints(request.uri, request.job)
    if request.step is not None:
        steps = ", ".join(str(one.step) for one in found) or "none"
        found = [one for one in found if one.step == request.step]
        if not found:
            raise CheckpointError(
                f"{request.job} has no checkpoint of step {request.step} below {request.uri}: there are {steps}"
            )
    damages = []
    for one in found:
        beside = f"{job_uri(request.uri, request.job)}/export-{step_folder_name(one.step)}"
        try:
            if one.damage is not None:
                raise CheckpointError(one.damage)
            where = request.target or beside
            exported = export_safetensors(one.uri, where)
            return replace(exported, notes=(*(f"passed over: {d}" for d in damages), *exported.notes))
        except CheckpointError as error:
            damages.append(str(error))
    reasons = f": {'; '.join(damages[:3])}" if damages else ""
    raise CheckpointError(f"{request.job} has no whole checkpoint below {request.uri}{reasons}")


def _check_exportable(uri: str, record: ModelRecord, held: set[str]) -> None:
    if record.others:
        raise CheckpointError(
            f"the model's state_dict has {', '.join(record.others[:6])}, no parameters or buffers of it, which no "
            "file of tensors can give back: write such a model with a script of your own"
        )
    if lost := [entry.tensor for entry in record.entries if entry.tensor not in held]:
        raise CheckpointError(f"{uri} lacks {', '.join(lost[:6])} of the model")


def _split_into_files(entries: Sequence[StateDictEntry], limit: int) -> list[list[StateDictEntry]]:
    """Entries in order, in files of `limit` bytes at most (or of a single entry)."""
    parts: list[list[StateDictEntry]] = []
    size = limit
    for entry in entries:
        if size + entry.bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += entry.bytes
    return parts or [[]]


def _file_names(stem: str, count: int) -> list[str]:
    if count == 1:
        return [f"{stem}{_SAFETENSORS_SUFFIX}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{_SAFETENSORS_SUFFIX}" for number in range(1, count + 1)]


def _safetensors_index(parts: Sequence[Sequence[StateDictEntry]], names: Sequence[str]) -> str:
    total = sum(entry.bytes for entries in parts for entry in entries)
    places = {entry.name: name for name, entries in zip(names, parts, strict=True) for entry in entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)


def _prepare_folder(files: AbstractFileSystem, folder: str, target: str, ours: set[str]) -> None:
    """Make the folder; refuse it where files of another model would be read with the new weights."""
    if files.isfile(folder):
        raise ExportTargetError(f"{target} is a file: name a folder")
    try:
        there = [path.rstrip("/").rsplit("/", 1)[-1] for path in files.ls(folder, detail=False, refresh=True)]
    except FileNotFoundError:
        there = []
    cut_short = {name for name in there if name.endswith(_PARTIAL_SUFFIX) and name.startswith(tuple(ours))}
    if other := sorted({*there} - ours - cut_short):
        raise ExportTargetError(f"{target} holds other files ({', '.join(other[:4])}): name an empty folder")
    for name in cut_short:  # of an export that was killed
        files.rm_file(f"{folder}/{name}")
    files.makedirs(folder, exist_ok=True)


def _owned_tensor(tensors: dict[str, Tensor], entry: StateDictEntry, taken: set[str]) -> Tensor:
    """A tensor in one piece, of its own for every name, since the format has no aliases."""
    tensor = tensors[entry.tensor].contiguous()
    if entry.tensor in taken:
        tensor = tensor.clone()
    taken.add(entry.tensor)
    return tensor


def _export_notes(record: ModelRecord) -> tuple[str, ...]:
    return (f"{record.note}: write config.json yourself, if it is needed",) if record.note else ()


def _write_atomically(files: AbstractFileSystem, path: str, content: bytes | dict[str, Tensor]) -> None:
    """A file that appears at once, as those of checkpoints do."""
    partial = f"{path}.{uuid.uuid4().hex}{_PARTIAL_SUFFIX}"
    try:
        if isinstance(files, LocalFileSystem) and isinstance(content, dict):
            save_file(content, partial, metadata=_SAFETENSORS_METADATA)
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        else:
            with files.open(partial, "wb") as file:
                file.write(
                    save(content, metadata=_SAFETENSORS_METADATA) if isinstance(content, dict) else content
                )
        files.mv(partial, path)
    except BaseException:
        with suppress(Exception):
            files.rm_file(partial)
        raise
