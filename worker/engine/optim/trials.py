"""Trials of a job's optimizer before training: it must update parts of parameters as it updates whole ones.

ZeRO-1 hands it flat partitions, tensor parallelism halves of a matrix. What differs is refused by name, with ways out. A
trial takes a few steps on random parameters and gradients with fixed seeds, and changes nothing of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from worker.engine.optim.zero1 import FlatPartition, local_partitions, partition_optimizer

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
TakePart = Callable[[torch.Tensor], torch.Tensor]
_TRIAL_SHAPES = ((6, 4), (5,), ())
_TRIAL_STEPS = 3
_TRIAL_TOLERANCE = 1e-4
_MATRIX_SHAPE = (6, 4)


def check_zero1_optimizer(make: MakeOptimizer, device: str = "cpu") -> None:
    """Raise ValueError unless the optimizer of `make` does the same to parameters in two parts as to whole ones; on
    `device`, since some know no other."""
    whole, *halves = (
        _run_flat_trial(make, parts, device) for parts in (None, FlatPartition(0, 2), FlatPartition(1, 2))
    )
    name = whole.name
    for halved in halves:
        parts = halved.parts
        wanted = [parts.of(value.reshape(-1)) for value in whole.values]
        moved = max(float(move) for move in whole.moved)
        if any(
            float((a - b).abs().max()) > _TRIAL_TOLERANCE * moved
            for a, b in zip(halved.values, wanted, strict=True)
            if b.numel()
        ):
            raise ValueError(
                f"optimizer {name} updates a part of a parameter otherwise than it would as a part of the whole: its "
                "state cannot be shared over the workers of a mesh; set shard to none, or choose one that updates each "
                "element by itself (torch's SGD, Adam, AdamW, ...)"
            )


@dataclass(frozen=True)
class _FlatTrial:
    name: str
    parts: FlatPartition
    values: Sequence[torch.Tensor]
    moved: Sequence[torch.Tensor]


def _run_flat_trial(make: MakeOptimizer, parts: FlatPartition | None, device: str) -> _FlatTrial:
    """Parameters after a few steps on gradients that are always the same; of `parts` of them, or of whole ones."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(_random_tensor(shape, generator, device)) for shape in _TRIAL_SHAPES]
    gradients = [
        [_random_tensor(shape, generator, device) for shape in _TRIAL_SHAPES] for _ in range(_TRIAL_STEPS)
    ]
    started = [parameter.detach().clone() for parameter in parameters]
    name = ""
    try:
        optimizer = make(parameters)
        name = f" {type(optimizer).__name__}"
        updated = parameters
        if parts is not None:
            own = local_partitions({str(number): one for number, one in enumerate(parameters)}, parts)
            updated = list(own.values())
            partition_optimizer(optimizer, dict(zip(parameters, updated, strict=True)), parts)
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
    return _FlatTrial(
        type(optimizer).__name__,
        parts or FlatPartition(0, 1),
        [parameter.detach() for parameter in updated],
        [(a.detach() - b).abs().max() for a, b in zip(parameters, started, strict=True)],
    )


def _random_tensor(shape: Sequence[int], generator: torch.Generator, device: str) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device)


def check_tensor_parallel_optimizer(make: MakeOptimizer, device: str = "cpu") -> None:
    """Raise ValueError unless the optimizer of `make` updates halves of a matrix, by rows and by columns, as the whole; on
    `device`, since some know no other."""
    name, whole = _run_matrix_trial(make, torch.clone, device)
    least = _TRIAL_TOLERANCE * float(_distance_moved(whole).max())
    for dim in range(2):
        for half in range(2):

            def pick(tensor: torch.Tensor, dim: int = dim, half: int = half) -> torch.Tensor:
                return tensor.chunk(2, dim)[half].clone()

            if float((_run_matrix_trial(make, pick, device)[1] - pick(whole)).abs().max()) > least:
                raise ValueError(
                    f"optimizer {name} updates a part of a matrix otherwise than it would as a part of the whole: workers "
                    "that share matrices would train another model; set tensor to 1 and share samples (data), or choose one "
                    "that updates each element by itself (torch's SGD, Adam, AdamW, ...)"
                )


def _initial_matrix() -> torch.Tensor:
    return torch.randn(_MATRIX_SHAPE, generator=torch.Generator().manual_seed(0))


def _distance_moved(values: torch.Tensor) -> torch.Tensor:
    return (values - _initial_matrix()).abs()


def _run_matrix_trial(make: MakeOptimizer, pick: TakePart, device: str) -> tuple[str, torch.Tensor]:
    """The optimizer's name, and what `pick` takes of a matrix after a few steps on gradients that are always the same."""
    generator = torch.Generator().manual_seed(1)
    parameter, name = nn.Parameter(pick(_initial_matrix()).to(device)), ""
    try:
        optimizer = make([parameter])
        name = f" {type(optimizer).__name__}"
        for _ in range(_TRIAL_STEPS):
            parameter.grad = pick(torch.randn(_MATRIX_SHAPE, generator=generator)).to(device)
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"optimizer{name} cannot update a part of a matrix ({type(error).__name__}: {error}): set tensor to 1 and "
            "share samples (data), or choose one that updates each element by itself (torch's SGD, Adam, AdamW, ...)"
        ) from error
    return name.strip(), parameter.detach().cpu()
