"""Writes the metadata by which torch.distributed.checkpoint (DCP) reads a checkpoint without Slotline.

Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`: "model" has the model's own state_dict,
"optimizer" the state and the groups by fully qualified names, the settings of groups also as
`flatten_optimizer_state_dict` names them. Import it lazily: it loads much that workers do not need.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from fsspec import AbstractFileSystem
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from worker.checkpoint.blobs import Blob, BlobWriter, write_atomically
from worker.checkpoint.chunked import BlobPlace, Chunk, Entry, TensorEntry, TensorIndex
from worker.checkpoint.record import RECORD_SHARD, record_from_state
from worker.contract.checkpoint_files import shard_path
from worker.contract.tasks import DCP_METADATA
from worker.engine.optim.state_dict import (
    GROUP_NUMBER_KEY,
    PARAMS_KEY,
    settings_of,
    without_implementation_flags,
)

MODEL, OPTIMIZER, STATE, GROUPS = "model", "optimizer", "state", "param_groups"
_GROUPS_SHARD = "groups"
# How an optimizer that nobody asked for another implementation has these settings.
_PORTABLE_DEFAULTS = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}


def write_dcp_metadata(
    files: AbstractFileSystem, folder: str, index: TensorIndex, others: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[int, str]]:
    """Write DCP's metadata of the tensors in `index`, and the groups of the optimizer in a file; sizes and SHA-256 of
    both by name. `others` are the values of each shard that are not by name."""
    groups = merge_groups(
        [group for other in others.values() for group in other.get("optimizer_groups") or ()]
    )
    path, added = shard_path(folder, _GROUPS_SHARD), []

    def write(file: Any) -> None:
        writer = BlobWriter(file)
        for number, group in enumerate(groups):
            for key, value in group.items():
                entry = _value_entry(value, (_GROUPS_SHARD, writer.add(value)))
                added.append((number, key, entry, [] if key == PARAMS_KEY else group[PARAMS_KEY]))
        blobs[_GROUPS_SHARD] = writer.blobs

    blobs: dict[str, Sequence[Blob]] = dict(index.blobs)
    groups_sha256 = write_atomically(files, path, write)
    metadata = _MetadataBuilder(blobs)
    for name, tensor in _model_entries(index, others.get(RECORD_SHARD)).items():
        metadata.add((MODEL, name), tensor)
    for (part, name, key), entry in index.entries.items():
        if part == OPTIMIZER:
            metadata.add((OPTIMIZER, STATE, name, key), entry)
    for number, key, entry, names in added:
        metadata.add((OPTIMIZER, GROUPS, number, key), entry)
        for name in names:
            metadata.add((OPTIMIZER, GROUPS, name, key), entry, nested=False)
    content = pickle.dumps(metadata.build())
    sha256 = write_atomically(files, f"{folder}/{DCP_METADATA}", lambda file: file.write(content))
    size = sum(length for length, _ in blobs[_GROUPS_SHARD])
    return {path.rsplit("/", 1)[-1]: (size, groups_sha256), DCP_METADATA: (len(content), sha256)}


def _value_entry(value: Any, place: BlobPlace) -> Entry:
    if not isinstance(value, Tensor):
        return place
    shape = tuple(value.shape)
    return TensorEntry(shape, value.dtype, (Chunk((0,) * value.dim(), shape, place),))


def _model_entries(index: TensorIndex, record: Mapping[str, Any] | None) -> dict[str, Entry]:
    """The entries of the model's own state_dict; where the checkpoint does not say the model's names, those of all
    parameters and buffers."""
    tensors = {name: entry for (part, name, _), entry in index.entries.items() if part != OPTIMIZER}
    if record is None:
        return tensors
    entries = record_from_state(record).entries
    return {entry.name: tensors[entry.tensor] for entry in entries if entry.tensor in tensors}


class _MetadataBuilder:
    """Collects the metadata of values by the paths of their names, which DCP joins by dots."""

    def __init__(self, blobs: Mapping[str, Sequence[Blob]]):
        self._starts = {
            shard: [0, *accumulate(length for length, _ in lengths)] for shard, lengths in blobs.items()
        }
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._stored: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    def add(self, path: tuple[Any, ...], entry: Entry, *, nested: bool = True) -> None:
        """Add a value; not `nested`: only the joined name stands for it."""
        name = ".".join(map(str, path))
        self._paths[name] = path if nested else (name,)
        if not isinstance(entry, TensorEntry):
            self._described[name] = BytesStorageMetadata()
            self._stored[MetadataIndex(name)] = self._storage(entry)
            return
        self._described[name] = TensorStorageMetadata(
            TensorProperties(dtype=entry.dtype),
            torch.Size(entry.shape),
            [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks],
        )
        for number, chunk in enumerate(entry.chunks):
            self._stored[MetadataIndex(name, chunk.offsets, number)] = self._storage(chunk.place)

    def build(self) -> Metadata:
        return Metadata(self._described, self._paths, self._stored, StorageMeta())

    def _storage(self, place: BlobPlace) -> _StorageInfo:
        shard, number = place
        start, end = self._starts[shard][number : number + 2]
        return _StorageInfo(shard_path("", shard).lstrip("/"), start, end - start)


def merge_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of the plain optimizer: those of all meshes with the same settings are one."""
    merged: list[tuple[Mapping[str, Any], list[str]]] = []
    for group in sorted(groups, key=lambda one: one.get(GROUP_NUMBER_KEY) or 0):
        settings = settings_of(group)
        names = next((names for other, names in merged if _same_settings(other, settings)), None)
        if names is None:
            merged.append((settings, names := []))
        names += [name for name in group[PARAMS_KEY] if name not in names]  # a tied one is on several meshes
    return [{**_portable_settings(settings), "params": names} for settings, names in merged]


def _portable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as an optimizer has them that was made on any device, without our numbers."""
    (kept,) = without_implementation_flags([settings])
    left = {key: value for key, value in _PORTABLE_DEFAULTS.items() if key in settings}
    return {**{key: value for key, value in kept.items() if key != GROUP_NUMBER_KEY}, **left}


def _same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal_values(value, other[key]) for key, value in one.items())


def _equal_values(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other
