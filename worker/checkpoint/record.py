"""ModelRecord: the model's own state_dict names, aliases, unused tensors and configuration.

Shards of meshes have the tensors that stages use, each under one name; with this record, saved as one more shard,
they become the model's whole state_dict again, without the user's code. Taken right after the factory built the
model. Knows no stages.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from worker.checkpoint.adapters import (
    Adapters,
    StateDictEntry,
    entries_from_rows,
    entries_to_rows,
    find_adapters,
)

RECORD_SHARD = "model"
"""The name of its shard in a checkpoint; meshes are named otherwise."""
_RECORD_KEY = "record"
WEIGHTS_STEM = "model"
_DIFFUSERS_WEIGHTS_STEM = "diffusion_pytorch_model"


@dataclass(frozen=True)
class ModelRecord:
    """`files` are what lies beside the weights (config.json), `stem` how files with weights are called; `others` are
    names of the state_dict that are no parameter and no buffer, which nobody can write for the model; `note` says why
    there is no configuration, where its library could not write it. `adapters` are those of a model of peft."""

    entries: tuple[StateDictEntry, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    stem: str = WEIGHTS_STEM
    others: tuple[str, ...] = ()
    note: str = ""
    adapters: Adapters | None = None


def make_record(model: nn.Module) -> ModelRecord:
    """The record of a model as its factory made it; call it before anything is changed in its configuration."""
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    entries, others = [], []
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) in names:
            entries.append(StateDictEntry(name, names[id(value)], tuple(value.shape), value.dtype))
        else:
            others.append(name)
    files, stem, note = {}, WEIGHTS_STEM, ""
    try:
        files, stem = _library_configuration(model)
    except Exception as error:  # a library's own code: no reason not to train
        note = f"{type(model).__name__} could not write its configuration ({type(error).__name__}: {error})"
    adapters = None
    try:
        adapters = find_adapters(model, tuple(entries))
    except Exception as error:
        note = f"the adapters of {type(model).__name__} cannot be written alone ({type(error).__name__}: {error})"
    return ModelRecord(tuple(entries), files, stem, tuple(others), note, adapters)


def record_to_state(record: ModelRecord, unused: Mapping[str, Tensor]) -> dict[str, Any]:
    """The content of the record's shard: the record, and the tensors that no stage uses."""
    return {
        "parameters": {name: t.detach() for name, t in unused.items() if isinstance(t, nn.Parameter)},
        "buffers": {name: t for name, t in unused.items() if not isinstance(t, nn.Parameter)},
        _RECORD_KEY: {
            "entries": entries_to_rows(record.entries),
            "files": dict(record.files),
            "stem": record.stem,
            "others": list(record.others),
            "note": record.note,
            "adapters": record.adapters and record.adapters.to_state(),
        },
    }


def record_from_state(state: Mapping[str, Any]) -> ModelRecord:
    """The record in what `record_to_state` made."""
    fields = state[_RECORD_KEY]
    return ModelRecord(
        entries_from_rows(fields["entries"]),
        fields["files"],
        fields["stem"],
        tuple(fields["others"]),
        fields["note"],
        Adapters.from_state(fields.get("adapters")),
    )


def unused_tensors(model: nn.Module, record: ModelRecord, used: Collection[str]) -> dict[str, Tensor]:
    """Copies of what is in the model's state_dict and in no stage, by the name under which a job would keep it."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = dict.fromkeys(entry.tensor for entry in record.entries if entry.tensor not in used)
    return {name: _detached_copy(own[name]) for name in missing}


def _detached_copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied


def _library_configuration(model: nn.Module) -> tuple[dict[str, str], str]:
    """The files that the model's library writes beside its weights (config.json), and how it calls the weights.

    Those of transformers have a `config` that saves itself, those of diffusers save it themselves.
    """
    config = getattr(model, "config", None)
    with tempfile.TemporaryDirectory() as folder:
        if callable(getattr(config, "save_pretrained", None)):
            own = copy.deepcopy(config)
            own.architectures = [type(model).__name__]
            own.save_pretrained(folder)
            generation = getattr(model, "generation_config", None)
            if callable(getattr(generation, "save_pretrained", None)):
                generation.save_pretrained(folder)
            return _read_texts(folder), WEIGHTS_STEM
        if callable(getattr(model, "save_config", None)):
            model.save_config(folder)
            return _read_texts(folder), _DIFFUSERS_WEIGHTS_STEM
    if callable(getattr(config, "to_json_string", None)):
        return {"config.json": config.to_json_string()}, WEIGHTS_STEM
    if callable(getattr(config, "to_json", None)):
        config_json = config.to_json()
        return {
            "config.json": config_json if isinstance(config_json, str) else json.dumps(config_json, indent=2)
        }, WEIGHTS_STEM
    return {}, WEIGHTS_STEM


def _read_texts(folder: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(Path(folder).iterdir()) if path.is_file()}
