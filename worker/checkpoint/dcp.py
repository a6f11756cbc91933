"""torch.distributed.checkpoint (DCP) interop: StorageReader, writer, and a safe reader.

Names are those of `torch.distributed.checkpoint.state_dict.get_state_dict`: "model" has the model's own state_dict,
"optimizer" the state and the groups by fully qualified names. Knows no stages and no jobs. DCP pickles its
metadata, and unpickling runs whatever a file names: DcpFolder lets only DCP's descriptions through. Import it
lazily: it loads much that workers and other exports do not need.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
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

from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.dcp_metadata import GROUPS, MODEL, OPTIMIZER, STATE, merge_groups
from worker.checkpoint.record import RECORD_SHARD, record_from_state
from worker.contract.profile import ModelError
from worker.contract.tasks import DCP_METADATA


def load_dcp_state_dict(uri: str) -> tuple[dict[str, Any], int]:
    """The whole state of a Slotline checkpoint under DCP's names, and its step. Held once, on the CPU.

    Raises CheckpointError as `checkpoint.load` does.
    """
    state, step = checkpoint_format.load_checkpoint(uri)
    groups = merge_groups(state.get("optimizer_groups") or [])
    return {
        MODEL: _model_state_dict(uri, {**state.get("parameters", {}), **state.get("buffers", {})}),
        OPTIMIZER: {STATE: state.get("optimizer") or {}, GROUPS: groups},
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
        """The metadata of the checkpoint."""
        return Metadata(
            {name: _storage_metadata(value) for name, value in self._read().items()}, storage_data={}
        )

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
                planner.load_bytes(item, _pickle_value(value))
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
        """True if there is a whole Slotline checkpoint."""
        return bool(checkpoint_format.is_whole_checkpoint(str(checkpoint_id)))

    def _read(self) -> dict[str, Any]:
        if self._values is None:
            self._values = _flatten(load_dcp_state_dict(self._uri)[0])
        return self._values


def write_dcp(uri: str, folder: str) -> tuple[int, int]:
    """Write a Slotline checkpoint into a folder of this machine in DCP's format; its step and number of tensors."""
    if checkpoint_format.copy_dcp_files(uri, folder):
        described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.values()
        step = checkpoint_format.describe_checkpoint(uri).step
        return step, sum(isinstance(one, TensorStorageMetadata) for one in described)
    state, step = load_dcp_state_dict(uri)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return step, sum(isinstance(value, Tensor) for value in _flatten(state).values())


def _model_state_dict(uri: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own state_dict; a checkpoint that does not say the model's names has those of its parameters."""
    if RECORD_SHARD not in checkpoint_format.shard_names(uri):
        return dict(tensors)
    return {
        entry.name: tensors[entry.tensor]
        for entry in record_from_state(checkpoint_format.load_shard_values(uri, RECORD_SHARD)).entries
    }


def _flatten(state: Mapping[str, Any]) -> dict[str, Any]:
    """All values by DCP's names: of nested dictionaries and lists the path, joined by dots. The settings of groups under
    the names of `flatten_optimizer_state_dict` too."""
    flat: dict[str, Any] = {f"{MODEL}.{name}": tensor for name, tensor in state[MODEL].items()}
    optimizer = state[OPTIMIZER]
    for name, entry in optimizer[STATE].items():
        flat |= {f"{OPTIMIZER}.{STATE}.{name}.{key}": value for key, value in entry.items()}
    for number, group in enumerate(optimizer[GROUPS]):
        for key, value in group.items():
            flat[f"{OPTIMIZER}.{GROUPS}.{number}.{key}"] = value
            if key != "params":
                flat |= {f"{OPTIMIZER}.{GROUPS}.{name}.{key}": value for name in group["params"]}
    return flat


def _storage_metadata(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])


def _pickle_value(value: Any) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content


_ALLOWED_GLOBALS: dict[tuple[str, str], Any] = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        *(
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
        ),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    # where it was written, of whatever system
    **{
        (module, f"{kind}{system}Path"): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("", "Pure")
        for system in ("Posix", "Windows")
    },
}


class DcpFolder:
    """The tensors that `torch.distributed.checkpoint.save` wrote into a folder, by the path of their names in the saved
    dict. Chunks of several processes are joined when they are read."""

    def __init__(self, folder: Path):
        self._reader = _RestrictedReader(folder)
        try:
            found = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError, OSError, AttributeError, ValueError, TypeError) as error:
            raise ModelError(
                f"{folder / DCP_METADATA} cannot be read as torch.distributed.checkpoint's: {error}"
            ) from None
        self._described = {
            name: one
            for name, one in found.state_dict_metadata.items()
            if isinstance(one, metadata.TensorStorageMetadata)
        }
        self._folder = folder
        paths = found.planner_data if isinstance(found.planner_data, dict) else {}
        self.path_of: dict[str, tuple[str, ...]] = {
            name: tuple(map(str, paths.get(name, (name,)))) for name in self._described
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._described[name].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._described[name].properties.dtype

    def read(self, name: str) -> Tensor:
        """The values of one tensor; ModelError where its files lack them."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        state = {name: tensor}
        try:
            dcp.load(state, storage_reader=self._reader, no_dist=True)
        except (
            Exception,
            dcp.CheckpointException,
        ) as error:  # DCP's own is no Exception; its last line is the cause
            reason = (str(error).strip().splitlines() or [""])[-1]
            raise ModelError(
                f"{name!r} of {self._folder} cannot be read: {type(error).__name__}: {reason}"
            ) from None
        return state[name]


class _RestrictedReader(dcp.FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        found = _MetadataUnpickler(io.BytesIO((Path(self.path) / DCP_METADATA).read_bytes())).load()
        if not isinstance(found, metadata.Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        return found


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_GLOBALS:
            return _ALLOWED_GLOBALS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which no description of tensors needs and is not run"
        )
