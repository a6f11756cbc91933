"""The tensors of the stages of one mesh by their names in the unsplit model. Must not know what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


def tie_local_parameters(stages: Mapping[int, nn.Module], tied: Mapping[str, Sequence[int]]) -> None:
    """Make a parameter that several stages of this mesh use one object, as in the unsplit model."""
    for name, holders in tied.items():
        first: nn.Parameter | None = None
        for stage in holders:
            if stage not in stages:
                continue
            module = stages[stage]
            for local, original in _original_names(module).items():
                if original != name:
                    continue
                owner, _, attribute = local.rpartition(".")
                holder = module.get_submodule(owner)
                if first is None:
                    first = holder._parameters[attribute]
                else:
                    holder._parameters[attribute] = first


def named_parameters(stages: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of some stages, each once, by original name."""
    found: dict[str, nn.Parameter] = {}
    for stage in sorted(stages):
        names = _original_names(stages[stage])
        for local, parameter in stages[stage].named_parameters():
            found.setdefault(names.get(local, f"stage{stage}.{local}"), parameter)
    return found


def named_buffers(stages: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers of some stages. A buffer without an original name is a constant of its stage and no state."""
    found: dict[str, torch.Tensor] = {}
    for stage in sorted(stages):
        names = _original_names(stages[stage])
        for local, buffer in stages[stage].named_buffers():
            if local in names:
                found.setdefault(names[local], buffer)
    return found


def _original_names(module: nn.Module) -> Mapping[str, str]:
    return getattr(module, "original_names", {})
