"""Reads folders that torch.distributed.checkpoint (DCP) has written, safely.

DCP pickles its metadata, and unpickling runs whatever a file names: DcpFolder lets only DCP's descriptions through.
Knows no stages and no jobs. Import it lazily: it loads much that workers need for nothing else.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from worker.contract.profile import ModelError
from worker.contract.tasks import DCP_METADATA

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
