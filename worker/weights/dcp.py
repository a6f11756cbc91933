"""A checkpoint as torch.distributed.checkpoint (DCP) sees one: read by DCP where it lies, or written in DCP's own format.

The names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`: "model" has the model's own state_dict,
"optimizer" the state and the groups by fully qualified names. Knows no stages and no jobs.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from worker import checkpoint
from worker.engine.optimizer_state import NAMES, NUMBER, settings_of, without_implementation
from worker.weights.record import SHARD, from_state

MODEL, OPTIMIZER = "model", "optimizer"
_STATE, _GROUPS = "state", "param_groups"
# How an optimizer that nobody asked for another implementation has these settings.
_PLAIN = {"fused": None, "foreach": None, "capturable": False, "differentiable": False}


def state_dict_of(uri: str) -> tuple[dict[str, Any], int]:
    """The whole state of a Slotline checkpoint under DCP's names, and its step. Held once, on the CPU.

    Raises CheckpointError as `checkpoint.load` does.
    """
    state, step = checkpoint.load(uri)
    groups = _merged(state.get("optimizer_groups") or [])
    return {
        MODEL: _model(uri, {**state.get("parameters", {}), **state.get("buffers", {})}),
        OPTIMIZER: {_STATE: state.get("optimizer") or {}, _GROUPS: groups},
    }, step


class SlotlineReader(StorageReader):
    """Has `torch.distributed.checkpoint.load` read the Slotline checkpoint at a URI, where it lies.

    `dcp.load(state_dict, storage_reader=SlotlineReader(uri))`, with the state_dict of `get_state_dict(model, optimizer)`,
    flattened optimizer state or not. Each process that reads holds the checkpoint once while it does.
    """

    def __init__(self, uri: str):
        self._uri = uri
        self._values: dict[str, Any] | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Forget what was read; from now on read `checkpoint_id`, if given."""
        self._uri, self._values = str(checkpoint_id or self._uri), None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the checkpoint holds."""
        return Metadata({name: _described(value) for name, value in self._read().items()}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Give the planner what it wants of the checkpoint."""
        values = self._read()
        for item in plan.items:
            value = values[item.storage_index.fqn]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pickled(value))
                continue
            part = value
            for dimension, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dimension, offset, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        self._values = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Whether there is a whole Slotline checkpoint."""
        return bool(checkpoint.is_whole(str(checkpoint_id)))

    def _read(self) -> dict[str, Any]:
        if self._values is None:
            self._values = _flat(state_dict_of(self._uri)[0])
        return self._values


def write_dcp(uri: str, folder: str) -> tuple[int, int]:
    """Write a Slotline checkpoint into a folder of this machine in DCP's format; its step and number of tensors."""
    state, step = state_dict_of(uri)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return step, sum(isinstance(value, Tensor) for value in _flat(state).values())


def _model(uri: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own state_dict; a checkpoint that does not say the model's names has those of its parameters."""
    if SHARD not in checkpoint.shard_names(uri):
        return dict(tensors)
    return {
        entry.name: tensors[entry.tensor] for entry in from_state(checkpoint.load_shard(uri, SHARD)).entries
    }


def _merged(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of the plain optimizer: those of all meshes with the same settings are one."""
    merged: list[tuple[Mapping[str, Any], list[str]]] = []
    for group in sorted(groups, key=lambda one: one.get(NUMBER) or 0):
        settings = settings_of(group)
        names = next((names for other, names in merged if _same(other, settings)), None)
        if names is None:
            merged.append((settings, names := []))
        names += [name for name in group[NAMES] if name not in names]  # a tied one is on several meshes
    return [{**_plain(settings), "params": names} for settings, names in merged]


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as an optimizer has them that was made on any device, without our numbers."""
    (kept,) = without_implementation([settings])
    left = {key: value for key, value in _PLAIN.items() if key in settings}
    return {**{key: value for key, value in kept.items() if key != NUMBER}, **left}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """All values by DCP's names: of nested dictionaries and lists the path, joined by dots. The settings of groups under
    the names of `flatten_optimizer_state_dict` too."""
    flat: dict[str, Any] = {f"{MODEL}.{name}": tensor for name, tensor in state[MODEL].items()}
    optimizer = state[OPTIMIZER]
    for name, entry in optimizer[_STATE].items():
        flat |= {f"{OPTIMIZER}.{_STATE}.{name}.{key}": value for key, value in entry.items()}
    for number, group in enumerate(optimizer[_GROUPS]):
        for key, value in group.items():
            flat[f"{OPTIMIZER}.{_GROUPS}.{number}.{key}"] = value
            if key != "params":
                flat |= {f"{OPTIMIZER}.{_GROUPS}.{name}.{key}": value for name in group["params"]}
    return flat


def _described(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])


def _pickled(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content
