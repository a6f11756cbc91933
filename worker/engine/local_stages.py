"""LocalStages: the stages of one mesh within the model's graph, and their parameters by original name.

`edges`, `mesh_of_stage` and `tied` describe the whole graph and are equal on every worker. Must not know programs,
transports or optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from worker.engine.routes import Edge
from worker.model.stages import BucketStages
from worker.parallel.tensor.shards import TensorParallelShards


@dataclass(frozen=True)
class LocalStages:
    """The `modules` of one mesh by the number of their stage.

    `tied` has the stages that use each tied parameter, by its original name; `tensor` is this worker's shards of the
    parameters that tensor parallelism splits. `smaller` are the same stages for microbatches of other shapes, on the same
    parameters, with edges in the same order.
    """

    modules: Mapping[int, nn.Module]
    mesh_of_stage: Sequence[str]
    edges: Sequence[Edge] = ()
    tied: Mapping[str, Sequence[int]] = field(default_factory=dict)
    tensor: TensorParallelShards | None = None
    smaller: Sequence[BucketStages] = ()

    @property
    def have_output(self) -> bool:
        """True where one of the stages makes the model's output."""
        return any("output" in module.outputs for module in self.modules.values())


def tie_local_parameters(modules: Mapping[int, nn.Module], tied: Mapping[str, Sequence[int]]) -> None:
    """Make a parameter that several stages of this mesh use one object, as in the unsplit model."""
    for name, holders in tied.items():
        first: nn.Parameter | None = None
        for stage in holders:
            if stage not in modules:
                continue
            module = modules[stage]
            for local, original in _original_names(module).items():
                if original != name:
                    continue
                owner, _, attribute = local.rpartition(".")
                holder = module.get_submodule(owner)
                if first is None:
                    first = holder._parameters[attribute]
                else:
                    holder._parameters[attribute] = first


def named_parameters(modules: Mapping[int, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of some stages, each once, by original name."""
    parameters: dict[str, nn.Parameter] = {}
    for stage in sorted(modules):
        names = _original_names(modules[stage])
        for local, parameter in modules[stage].named_parameters():
            parameters.setdefault(names.get(local, f"stage{stage}.{local}"), parameter)
    return parameters


def named_buffers(modules: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    """The buffers of some stages. A buffer without an original name is a constant of its stage and no state."""
    buffers: dict[str, torch.Tensor] = {}
    for stage in sorted(modules):
        names = _original_names(modules[stage])
        for local, buffer in modules[stage].named_buffers():
            if local in names:
                buffers.setdefault(names[local], buffer)
    return buffers


def _original_names(module: nn.Module) -> Mapping[str, str]:
    return getattr(module, "original_names", {})
