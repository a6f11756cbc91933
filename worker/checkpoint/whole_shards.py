"""Reads checkpoints of formats 1 to 3: a shard is one pickled state, with whole tensors or a rank's slices of them.

Of formats 2 and 3 a manifest says what each shard holds; 3 also which slices. A shard is read whole. Written by older
versions; worker/checkpoint/format.py writes and reads others.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Mapping
from typing import Any

import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from worker.checkpoint.blobs import load_value, map_tensors, naming_shard
from worker.checkpoint.chunked import PARTS_BY_NAME, Wanted
from worker.contract.checkpoint_files import DamagedCheckpointError, check_sha256, check_size, shard_path
from worker.parallel.chunks import STEP_KEY
from worker.parallel.shard_spec import ShardSpec, copy_common

_OPTIMIZER_GROUPS = "optimizer_groups"


def read_whole_shards(
    files: AbstractFileSystem, folder: str, manifest: Mapping[str, Any], wanted: Wanted
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """The state of all meshes in one, as it is wanted, and the shapes of the whole parameters and buffers.

    DamagedCheckpointError for a shard that is not, bit for bit, what was saved, or of another step.
    """
    reading = _Reading(files, folder, manifest, wanted)
    state = reading.read()
    for name, run in wanted.held.runs.items():
        for key, value in state.get("optimizer", {}).get(name, {}).items():
            if key != STEP_KEY and isinstance(value, torch.Tensor) and value.shape == run.shape:
                state["optimizer"][name][key] = run.of(value).clone()
    return state, reading.shapes


def read_other_values(
    files: AbstractFileSystem, folder: str, manifest: Mapping[str, Any], shard: str
) -> dict[str, Any]:
    """The values of a shard that are not by name."""
    state = _read_shard(files, folder, manifest, shard)["state"]
    return _clone_tensors({part: value for part, value in state.items() if part not in PARTS_BY_NAME})


class _Reading:
    """Reads a checkpoint shard by shard."""

    def __init__(self, files: AbstractFileSystem, folder: str, manifest: Mapping[str, Any], wanted: Wanted):
        self._files, self._folder, self._manifest = files, folder, manifest
        self._wanted, self._names = wanted, wanted.names
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._state: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        step = self._manifest["step"]
        for shard in self._needed_shards():
            content = _read_shard(self._files, self._folder, self._manifest, shard)
            if content["step"] != step:
                raise DamagedCheckpointError(
                    f"shard {shard!r} of {self._folder} is of step {content['step']}, the manifest of step {step}"
                )
            self._take(content["state"], self._slices_in(shard))
        return self._state

    def _take(self, saved: Mapping[str, Any], slices: Mapping[str, ShardSpec]) -> None:
        """Take what is wanted of one shard's state."""
        for part, value in saved.items():
            if self._wanted.parts is not None and part not in self._wanted.parts:
                continue
            if part in PARTS_BY_NAME:
                taken = self._state.setdefault(part, {})
                for name, entry in value.items():
                    if self._wanted.has(part, name):
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
        target = self._wanted.held.spec(source.name)
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
            target = self._wanted.held.spec(name)
            if source.layout_key != target.layout_key or source.worker == target.worker:
                return True
        return False

    def _slices_in(self, shard: str) -> dict[str, ShardSpec]:
        slices = self._manifest.get("slices", {}).get(shard, {})
        return {
            name: ShardSpec(name, dim, tuple(parts), worker, workers)
            for name, (dim, parts, worker, workers) in slices.items()
        }


def _read_shard(
    files: AbstractFileSystem, folder: str, manifest: Mapping[str, Any], shard: str
) -> dict[str, Any]:
    path, sha256 = shard_path(folder, shard, manifest["format"]), manifest.get("sha256", {}).get(shard)
    with naming_shard(path):
        check_size(files, path, manifest["shards"][shard])
        if isinstance(files, LocalFileSystem):
            with open(path, "rb") as file:
                check_sha256(path, sha256, lambda: hashlib.file_digest(file, "sha256").hexdigest())
            return load_value(path, path, mmap=True)
        content = files.cat_file(path)
    check_sha256(path, sha256, lambda: hashlib.sha256(content).hexdigest())
    return load_value(path, io.BytesIO(content))


def _clone_tensors(value: Any) -> Any:
    """Copies, as tensors of a mapped file must not outlive it."""
    return map_tensors(value, torch.clone)
