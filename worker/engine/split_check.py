"""Whether an optimizer does the same to parts of a matrix, one a worker that shares it, as to the whole: by trying."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_SHAPE = (6, 4)
_STEPS = 3
_TOLERANCE = 1e-4

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Pick = Callable[[torch.Tensor], torch.Tensor]


def check_split(make: MakeOptimizer, device: str = "cpu") -> None:
    """Raise ValueError unless the optimizer of `make` updates halves of a matrix, by rows and by columns, as the whole; on
    `device`, since some know no other."""
    name, whole = _tried(make, torch.clone, device)
    least = _TOLERANCE * float(_moved(whole).max())
    for dim in range(2):
        for half in range(2):

            def pick(tensor: torch.Tensor, dim: int = dim, half: int = half) -> torch.Tensor:
                return tensor.chunk(2, dim)[half].clone()

            if float((_tried(make, pick, device)[1] - pick(whole)).abs().max()) > least:
                raise ValueError(
                    f"optimizer {name} updates a part of a matrix otherwise than it would as a part of the whole: workers "
                    "that share matrices would train another model; set tensor to 1 and share samples (data), or choose one "
                    "that updates each element by itself (torch's SGD, Adam, AdamW, ...)"
                )


def _started() -> torch.Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0))


def _moved(values: torch.Tensor) -> torch.Tensor:
    return (values - _started()).abs()


def _tried(make: MakeOptimizer, pick: Pick, device: str) -> tuple[str, torch.Tensor]:
    """The optimizer's name, and what `pick` takes of a matrix after a few steps on gradients that are always the same."""
    generator = torch.Generator().manual_seed(1)
    parameter, name = nn.Parameter(pick(_started()).to(device)), ""
    try:
        optimizer = make([parameter])
        name = f" {type(optimizer).__name__}"
        for _ in range(_STEPS):
            parameter.grad = pick(torch.randn(_SHAPE, generator=generator)).to(device)
            optimizer.step()
    except Exception as error:
        raise ValueError(
            f"optimizer{name} cannot update a part of a matrix ({type(error).__name__}: {error}): set tensor to 1 and "
            "share samples (data), or choose one that updates each element by itself (torch's SGD, Adam, AdamW, ...)"
        ) from error
    return name.strip(), parameter.detach().cpu()
