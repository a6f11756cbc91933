"""PEFT adapters: which tensors of a state_dict are adapters, and their names for peft.

Found once, where the model is built, and saved in the checkpoint's model record: an export needs neither peft nor
the model. Also StateDictEntry, one name of a state_dict with the name under which a job keeps its tensor.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class StateDictEntry:
    """One name of the model's state_dict, and the name under which a job keeps its tensor."""

    name: str
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def entries_to_rows(entries: Iterable[StateDictEntry]) -> list[list[Any]]:
    """For a checkpoint; `entries_from_rows` is its inverse."""
    return [[one.name, one.tensor, list(one.shape), one.dtype] for one in entries]


def entries_from_rows(rows: Sequence[Sequence[Any]]) -> tuple[StateDictEntry, ...]:
    """Inverse of `entries_to_rows`."""
    return tuple(StateDictEntry(name, tensor, tuple(shape), dtype) for name, tensor, shape, dtype in rows)


ADAPTER_STEM = "adapter_model"
_ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
_TRAINED_COPY = re.compile(r"\.modules_to_save\.[^.]+")
_WRAPPED_LAYER = re.compile(r"\.(base_layer|original_module)(?=\.)")
# Fields that older versions read: those merge adapters themselves, unless a reason stands here.
_OF_OLDER_READERS = {
    "base_files": {},
    "base_stem": "model",
    "deltas": {},
    "unmergeable": "the checkpoint is of a newer version",
}


@dataclass(frozen=True)
class Adapters:
    """`entries` and `files` are those of the adapters alone, `base` the entries of the model that they are in."""

    entries: tuple[StateDictEntry, ...]
    files: Mapping[str, str]
    base: tuple[StateDictEntry, ...]

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint; `from_state` is its inverse."""
        return {
            "entries": entries_to_rows(self.entries),
            "files": dict(self.files),
            "base": entries_to_rows(self.base),
        } | _OF_OLDER_READERS

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Adapters | None:
        """Inverse of `to_state`; None for a model without adapters."""
        if state is None:
            return None
        return cls(entries_from_rows(state["entries"]), state["files"], entries_from_rows(state["base"]))


def base_model_name(name: str) -> str | None:
    """The name in the base model of a tensor of a peft model; None where it has none."""
    if not name.startswith(_PEFT_PREFIX):
        return None
    return _WRAPPED_LAYER.sub("", _TRAINED_COPY.sub("", name.removeprefix(_PEFT_PREFIX)))


def find_adapters(model: nn.Module, entries: tuple[StateDictEntry, ...]) -> Adapters | None:
    """The adapters of `model`, whose state_dict has `entries`; None where it is no model of peft.

    Raises ValueError for adapters that are not parameters of the model (prompts, which peft computes).
    """
    if not any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
        return None
    from peft import get_peft_model_state_dict

    active = model.active_adapter
    config = copy.deepcopy(model.peft_config[active])
    config.inference_mode = True  # as peft saves it: whoever loads it says whether it is trained
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        files = {_ADAPTER_CONFIG: (Path(folder) / _ADAPTER_CONFIG).read_text()}
    state = model.state_dict(keep_vars=True)
    # never with embeddings of the model below, for which peft may ask the network whether they were changed
    own = get_peft_model_state_dict(model, state, adapter_name=active, save_embedding_layers=False)
    known = {id(state[entry.name]): entry for entry in entries}
    if lost := [name for name, value in own.items() if id(value) not in known]:
        raise ValueError(f"the adapters' {', '.join(lost[:4])} is no parameter of the model")
    own_entries = tuple(
        StateDictEntry(name, known[id(value)].tensor, tuple(value.shape), value.dtype)
        for name, value in own.items()
    )
    base = _base_entries(
        entries, {one.tensor for one in own_entries}, getattr(model.base_model, "prefix", "lora_")
    )
    return Adapters(own_entries, files, base)


def _base_entries(
    entries: tuple[StateDictEntry, ...], adapters: set[str], prefix: str
) -> tuple[StateDictEntry, ...]:
    """The entries of the model below; of a module that is trained as a whole, the trained copy."""
    found: dict[str, StateDictEntry] = {}
    for entry in entries:
        name, copied = base_model_name(entry.name), _TRAINED_COPY.search(entry.name)
        if name is None or (prefix in entry.name and not copied):
            continue
        if name in found and (not copied or entry.tensor not in adapters):
            continue
        found[name] = StateDictEntry(name, entry.tensor, entry.shape, entry.dtype)
    return tuple(found.values())
