"""A job starts from weights in files: names and shapes are compared first, then each stage reads what it has.

The model itself is never filled as a whole, except where somebody wants just that (`fill_model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from worker.model.errors import ModelError
from worker.model.tracing import aliases_of
from worker.weights.adapters import base_name
from worker.weights.entry import Entry
from worker.weights.record import ModelRecord
from worker.weights.source import WeightFiles, open_weights

_SHOWN = 8
_WAY_OUT = (
    "give the weights of this very model (its arguments make its shapes), or have model.factory name a function of your "
    "own that loads what fits, with load_state_dict(strict=False)"
)


def check_weights(path: str, record: ModelRecord) -> None:
    """ModelError with the names that the weights lack, have beyond the model's, or have in another shape."""
    with open_weights(path) as files:
        _check(path, record, files)


def fill_stages(path: str, stages: Iterable[nn.Module], aliases: Mapping[str, Sequence[str]]) -> None:
    """Give the parameters and persistent buffers of some stages (cut for training) their values from the files.

    Only these are read. `aliases` are all names in the model of a tensor that has several.
    """
    with open_weights(path) as files:
        for stage in stages:
            for local, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
                if (name := stage.original_names.get(local)) is not None:
                    _fill(path, files, name, tensor, aliases)


def fill_tensors(path: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, Sequence[str]]) -> None:
    """Give tensors by original name their values from the files."""
    with open_weights(path) as files:
        for name, tensor in tensors.items():
            _fill(path, files, name, tensor, aliases)


def fill_model(path: str, model: nn.Module, record: ModelRecord) -> None:
    """Give a whole model its values, as load_state_dict(strict=True) would; ModelError where that would fail."""
    check_weights(path, record)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fill_tensors(path, {entry.tensor: own[entry.tensor] for entry in record.entries}, aliases_of(model))


def _check(path: str, record: ModelRecord, files: WeightFiles) -> None:
    entries = _wanted(record, files)
    of_tensor: dict[str, list[Entry]] = {}
    for entry in entries:
        of_tensor.setdefault(entry.tensor, []).append(entry)
    missing = [
        " or ".join(entry.name for entry in entries)
        for entries in of_tensor.values()
        if not any(entry.name in files.shapes for entry in entries)
    ]
    known = {entry.name: entry for entry in entries}
    unexpected = [name for name in files.shapes if name not in known]
    shapes, kinds = [], []
    for name, found in files.shapes.items():
        if (entry := known.get(name)) is None:
            continue
        if found.shape != entry.shape:
            shapes.append(f"{name} {list(found.shape)} (the model's is {list(entry.shape)})")
        elif found.floating != (entry.dtype.is_floating_point or entry.dtype.is_complex):
            kinds.append(f"{name} (the model's is {entry.dtype})")
    told = [
        f"{what}: {_few(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of another kind of number", kinds),
        )
        if names
    ]
    if told:
        way_out = _hint(missing, unexpected) + _WAY_OUT
        raise ModelError(f"model.weights {path!r} do not fit the model: {'; '.join(told)}. {way_out}")


def _wanted(record: ModelRecord, files: WeightFiles) -> Sequence[Entry]:
    """What the files are to have: the whole state_dict, or of a model of peft that of the model below, whose adapters
    begin as their factory makes them."""
    if record.adapters is None or any(entry.name in files.shapes for entry in record.entries):
        return record.entries
    return record.adapters.base


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """A prefix that all names in the file have and those of the model have not, or the other way round."""
    for theirs in unexpected:
        for ours in missing:
            if theirs.endswith(f".{ours}"):
                return f"The names in the file begin with {theirs.removesuffix(ours)!r}, the model's do not. "
            if ours.endswith(f".{theirs}"):
                return (
                    f"The model's names begin with {ours.removesuffix(theirs)!r}, those in the file do not. "
                )
    return ""


@torch.no_grad()
def _fill(
    path: str, files: WeightFiles, name: str, tensor: Tensor, aliases: Mapping[str, Sequence[str]]
) -> None:
    names = aliases.get(name, (name,))
    there = [one for one in names if one in files.shapes]
    if not there and (below := base_name(name)) is not None:
        there = list(dict.fromkeys(base for one in names if (base := base_name(one)) in files.shapes))
        if not there and below not in files.shapes and not any(map(base_name, files.shapes)):
            return  # an adapter of its own: `check_weights` has seen that nothing else is missing
    if not there:
        raise ModelError(f"model.weights {path!r} lack {name!r}: have they changed since the job began?")
    value = files.read(there[0])
    for other in there[1:]:
        if not torch.equal(value, files.read(other)):
            raise ModelError(
                f"model.weights {path!r} have different values for {there[0]!r} and {other!r}, which are one parameter in "
                "the model: remove one from the file, or build the model without tying them"
            )
    if value.shape != tensor.shape:
        raise ModelError(
            f"model.weights {path!r}: {there[0]} has shape {list(value.shape)}, not {list(tensor.shape)}"
        )
    tensor.copy_(value)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
