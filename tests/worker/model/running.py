"""Runs a cut model as a pipeline would: every stage alone, tensors detached at the borders."""

import torch
from torch import Tensor, nn

from worker.model.stages import StageGraph


def step(graph: StageGraph, inputs: tuple[Tensor, ...], seed: int = 0) -> Tensor:
    """Forward and backward of the sum of squares of the output; gradients stay in the stages.

    Only tensors named by an edge travel from stage to stage, and only differentiable ones get a
    gradient back.
    """
    torch.manual_seed(seed)
    made: dict[str, Tensor] = {}
    received: dict[tuple[int, str], Tensor] = {}
    edges = {(edge.target, edge.tensor): edge for edge in graph.edges}
    outputs = []
    for index, stage in enumerate(graph.stages):
        arguments = []
        for name in stage.inputs:
            if name.startswith("input:"):
                arguments.append(inputs[int(name.removeprefix("input:"))])
                continue
            edge = edges[index, name]
            assert tuple(made[name].shape) == edge.shape
            assert made[name].dtype == edge.dtype
            wire = made[name].detach().clone(memory_format=torch.contiguous_format)  # as it travels
            received[index, name] = wire.requires_grad_(edge.differentiable)
            arguments.append(received[index, name])
        results = dict(zip(stage.outputs, stage(*arguments), strict=True))
        made |= results
        outputs.append(results)
    (outputs[-1]["output"] ** 2).sum().backward()
    for index in reversed(range(len(graph.stages) - 1)):
        roots, gradients = [], []
        for edge in graph.edges:
            if edge.source == index and edge.differentiable:
                gradient = received[edge.target, edge.tensor].grad
                roots.append(made[edge.tensor])
                gradients.append(torch.zeros(edge.shape, dtype=edge.dtype) if gradient is None else gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
    return outputs[-1]["output"].detach()


def plain_step(model: nn.Module, inputs: tuple[Tensor, ...], seed: int = 0) -> Tensor:
    """The same on the unsplit model."""
    torch.manual_seed(seed)
    output = model(*inputs)
    (output**2).sum().backward()
    return output.detach()


def gradients(graph: StageGraph) -> dict[str, Tensor]:
    """Gradients by original name, summed over the stages of a tied parameter."""
    total: dict[str, Tensor] = {}
    for stage in graph.stages:
        for local, parameter in stage.named_parameters():
            if parameter.grad is not None:
                name = stage.original_names[local]
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
    return total


def buffers(graph: StageGraph) -> dict[str, Tensor]:
    """Persistent buffers by original name."""
    return {
        stage.original_names[local]: buffer
        for stage in graph.stages
        for local, buffer in stage.named_buffers()
        if local in stage.original_names
    }
