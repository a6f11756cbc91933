"""PEFT adapters: which tensors of a state_dict are adapters, their names for peft, and LoRA merging.

Found once, where the model is built, and saved in the checkpoint's model record: an export needs neither peft nor
the model. Also StateDictEntry, one name of a state_dict with the name under which a job keeps its tensor.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


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
# Layers of peft.tuners.lora.layer, and whether what they add is turned whatever their setting says.
_MERGEABLE_LAYERS = {"Linear": False, "Embedding": True}


@dataclass(frozen=True)
class LoraDelta:
    """The product that adapters add to a tensor: scale * b @ a, or its transpose; `a` and `b` name tensors."""

    a: str
    b: str
    scale: float
    transposed: bool

    def applied_to(self, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor with it, in its own type; the product is made in fp32."""
        product = tensors[self.b].float() @ tensors[self.a].float()
        return (tensor.float() + self.scale * (product.T if self.transposed else product)).to(tensor.dtype)


@dataclass(frozen=True)
class Adapters:
    """`entries` and `files` are those of the adapters alone; `base`, `base_files` and `base_stem` of the model that they
    are in, merged by `deltas`, by tensor. `unmergeable` says why that is not possible, if so."""

    entries: tuple[StateDictEntry, ...]
    files: Mapping[str, str]
    base: tuple[StateDictEntry, ...]
    base_files: Mapping[str, str] = field(default_factory=dict)
    base_stem: str = "model"
    deltas: Mapping[str, LoraDelta] = field(default_factory=dict)
    unmergeable: str = ""

    def to_state(self) -> dict[str, Any]:
        """For a checkpoint; `from_state` is its inverse."""
        return {
            "entries": entries_to_rows(self.entries),
            "files": dict(self.files),
            "base": entries_to_rows(self.base),
            "base_files": dict(self.base_files),
            "base_stem": self.base_stem,
            "deltas": {name: [d.a, d.b, d.scale, d.transposed] for name, d in self.deltas.items()},
            "unmergeable": self.unmergeable,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Adapters | None:
        """Inverse of `to_state`; None for a model without adapters."""
        if state is None:
            return None
        return cls(
            entries_from_rows(state["entries"]),
            state["files"],
            entries_from_rows(state["base"]),
            state["base_files"],
            state["base_stem"],
            {name: LoraDelta(*parts) for name, parts in state["deltas"].items()},
            state["unmergeable"],
        )


def base_model_name(name: str) -> str | None:
    """The name in the base model of a tensor of a peft model; None where it has none."""
    if not name.startswith(_PEFT_PREFIX):
        return None
    return _WRAPPED_LAYER.sub("", _TRAINED_COPY.sub("", name.removeprefix(_PEFT_PREFIX)))


def find_adapters(
    model: nn.Module,
    entries: tuple[StateDictEntry, ...],
    configuration: Callable[[nn.Module], tuple[dict[str, str], str]],
) -> Adapters | None:
    """The adapters of `model`, whose state_dict has `entries`; None where it is no model of peft.

    `configuration` gives the files that lie beside a model's weights. Raises ValueError for adapters that are not
    parameters of the model (prompts, which peft computes).
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
    base_files, stem = configuration(model.get_base_model())
    deltas, unmergeable = _lora_deltas(model, active)
    base = _base_entries(
        entries, {one.tensor for one in own_entries}, getattr(model.base_model, "prefix", "lora_")
    )
    for tensor in deltas:  # its other users do not see the adapters, and would
        names = [one.name for one in base if one.tensor == tensor]
        if len(names) > 1:
            unmergeable = f"{' and '.join(names)} are one tensor, and the adapters are added where it is used as one of them"
    return Adapters(own_entries, files, base, base_files, stem, deltas, unmergeable)


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


def _lora_deltas(model: nn.Module, active: str) -> tuple[dict[str, LoraDelta], str]:
    """The deltas of LoRA by tensor; and the reason for which the adapters cannot be merged, if there is one."""
    if type(model.base_model).__name__ != "LoraModel":
        return {}, f"its adapters are of {type(model.base_model).__name__}, not LoRA"
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, LoraDelta] = {}
    for place, module in model.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "scaling"):
            continue
        turned = _MERGEABLE_LAYERS.get(type(module).__name__)
        embedded = active in module.lora_embedding_A
        if not embedded and active not in module.lora_A:
            continue
        if (
            turned is None
            or module.use_dora.get(active)
            or module.lora_variant
            or module.lora_bias.get(active)
        ):
            return {}, f"{place} is a {type(module).__name__} with more than a product added to its weight"
        if module.merged:
            return {}, f"{place} has its adapters merged already"
        a, b = (
            (module.lora_embedding_A, module.lora_embedding_B) if embedded else (module.lora_A, module.lora_B)
        )
        pair = [one[active] if isinstance(one[active], Tensor) else one[active].weight for one in (a, b)]
        weight = names[id(module.get_base_layer().weight)]
        if weight in found:
            return {}, f"{weight} has several adapters"
        transposed = turned or bool(getattr(module, "fan_in_fan_out", False))
        found[weight] = LoraDelta(
            names[id(pair[0])], names[id(pair[1])], float(module.scaling[active]), transposed
        )
    return found, ""
