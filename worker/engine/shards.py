"""Parameters in parts, one a worker of a mesh, and an optimizer that updates a worker's own parts only.

A part is a run of a parameter's elements in memory order: equal ones, of which the last workers' may be shorter, or
empty. Must not know transports, meshes or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# The state of torch's optimizers that is one number for a whole parameter, also for one that is a single number.
_OF_WHOLE = "step"
_SHAPES = ((6, 4), (5,), ())
_STEPS = 3
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Parts:
    """Which part of every parameter worker `worker` of `workers` has."""

    worker: int
    workers: int

    def length(self, elements: int) -> int:
        """Of every part of so many elements, with what fills up the last ones."""
        return -(-elements // self.workers)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This worker's part of a vector: a view."""
        length = self.length(flat.numel())
        return flat[min(self.worker * length, flat.numel()) : min((self.worker + 1) * length, flat.numel())]

    def all_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """All parts of a tensor, one a row, filled up with zeros."""
        flat = tensor.reshape(-1)
        length = self.length(flat.numel())
        return functional.pad(flat, (0, self.workers * length - flat.numel())).view(self.workers, length)

    def filled(self, part: torch.Tensor, elements: int) -> torch.Tensor:
        """This worker's `part` of so many elements as long as all others."""
        return functional.pad(part, (0, self.length(elements) - part.numel()))


def own_parts(parameters: Mapping[str, nn.Parameter], parts: Parts) -> dict[str, nn.Parameter]:
    """This worker's part of each parameter that is trained: an update of it is one of the parameter."""
    found = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        if not parameter.is_contiguous():  # its elements must lie in memory as all workers count them
            parameter.data = parameter.data.contiguous()
        found[name] = nn.Parameter(parts.of(parameter.detach().view(-1)))
    return found


def adopt(optimizer: torch.optim.Optimizer, own: Mapping[nn.Parameter, nn.Parameter], parts: Parts) -> None:
    """Have `optimizer`, made for whole parameters, which it may have grouped by their shapes, update their parts."""
    for group in optimizer.param_groups:
        group["params"] = [own[parameter] for parameter in group["params"]]
    for parameter, entry in list(optimizer.state.items()):
        del optimizer.state[parameter]
        optimizer.state[own[parameter]] = part_of_entry(entry, parameter, parts)


def part_of_entry(entry: Mapping[str, Any], whole: torch.Tensor, parts: Parts) -> dict[str, Any]:
    """What a worker keeps of the optimizer's state of a parameter; copies, so that the rest can go."""
    return {
        key: parts.of(value.reshape(-1)).clone() if _of_elements(key, value, whole) else value
        for key, value in entry.items()
    }


def keys_of_elements(entry: Mapping[str, Any], own: torch.Tensor) -> list[str]:
    """What of the state of a part is one number for each of its elements."""
    return [key for key, value in entry.items() if _of_elements(key, value, own)]


def _of_elements(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return key != _OF_WHOLE and isinstance(value, torch.Tensor) and value.shape == parameter.shape


def check_elementwise(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str = "cpu"
) -> None:
    """Raise ValueError unless the optimizer of `make` does the same to parameters in two parts as to whole ones; on
    `device`, since some know no other."""
    whole, *halves = (_tried(make, parts, device) for parts in (None, Parts(0, 2), Parts(1, 2)))
    name = whole.name
    for halved in halves:
        parts = halved.parts
        wanted = [parts.of(value.reshape(-1)) for value in whole.values]
        moved = max(float(move) for move in whole.moved)
        if any(
            float((a - b).abs().max()) > _TOLERANCE * moved
            for a, b in zip(halved.values, wanted, strict=True)
            if b.numel()
        ):
            raise ValueError(
                f"optimizer {name} updates a part of a parameter otherwise than it would as a part of the whole: its "
                "state cannot be shared over the workers of a mesh; set shard to none, or choose one that updates each "
                "element by itself (torch's SGD, Adam, AdamW, ...)"
            )


@dataclass(frozen=True)
class _Tried:
    name: str
    parts: Parts
    values: Sequence[torch.Tensor]
    moved: Sequence[torch.Tensor]


def _tried(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], parts: Parts | None, device: str
) -> _Tried:
    """Parameters after a few steps on gradients that are always the same; of `parts` of them, or of whole ones."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(_drawn(shape, generator, device)) for shape in _SHAPES]
    gradients = [[_drawn(shape, generator, device) for shape in _SHAPES] for _ in range(_STEPS)]
    started = [parameter.detach().clone() for parameter in parameters]
    name = ""
    try:
        optimizer = make(parameters)
        name = f" {type(optimizer).__name__}"
        updated = parameters
        if parts is not None:
            own = own_parts({str(number): one for number, one in enumerate(parameters)}, parts)
            updated = list(own.values())
            adopt(optimizer, dict(zip(parameters, updated, strict=True)), parts)
        for of_step in gradients:
            for parameter, gradient in zip(updated, of_step, strict=True):
                parameter.grad = gradient.clone() if parts is None else parts.of(gradient.reshape(-1)).clone()
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"optimizer{name} cannot update parameters in parts ({type(error).__name__}: {error}): its state cannot be "
            "shared over the workers of a mesh; set shard to none, or choose one that updates each element by itself "
            "(torch's SGD, Adam, AdamW, ...)"
        ) from error
    return _Tried(
        type(optimizer).__name__,
        parts or Parts(0, 1),
        [parameter.detach() for parameter in updated],
        [(a.detach() - b).abs().max() for a, b in zip(parameters, started, strict=True)],
    )


def _drawn(shape: Sequence[int], generator: torch.Generator, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device)
