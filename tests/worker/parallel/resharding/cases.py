"""Tensors of every kind, cut by numpy's rules and not by the plan's boxes, and one worker's part of a trial."""

from __future__ import annotations

from typing import Any

import torch

from service.scheduler.resharding.layout import Layout
from tests.service.scheduler.resharding.cases import elements_of
from worker.contract.resharding import ReshardingPlan
from worker.parallel.resharding import Resharder

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16),
    *(torch.uint8, torch.int64, torch.bool, torch.complex64),
)


def whole_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, NaNs and denormals among them."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).to(torch.bool)
    size = torch.empty((), dtype=dtype).element_size()
    count = int(torch.tensor(shape).prod()) if shape else 1
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=draw).view(dtype).view(shape)


def part_of(whole: torch.Tensor, given: Layout, worker: int) -> torch.Tensor:
    """What a worker of the layout has of the tensor."""
    numbers = torch.from_numpy(elements_of(given, tuple(whole.shape))[worker].copy())
    return whole.reshape(-1)[numbers.reshape(-1)].reshape(numbers.shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a memory whose rows lie apart and backwards in dimension order."""
    wide = torch.zeros((*reversed(tensor.shape), 2), dtype=tensor.dtype)
    apart = wide[..., 1].permute(tuple(reversed(range(tensor.dim()))))
    apart.copy_(tensor)
    return apart


def bits(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    return bytes(copy.copy_(tensor).untyped_storage())


def trial(
    name: str, layouts: dict[str, Layout], plan: dict[str, Any], seed: int, transport, first_tag: int
) -> bool:
    """Run worker `name`'s end; whether its tensor has then exactly the bits that it must have."""
    side, _, worker = name.partition("/")
    read = ReshardingPlan.from_json(plan)
    whole = whole_tensor(read.shape, dtype_of(read.element_bytes, seed), seed)
    right = part_of(whole, layouts[side], int(worker))
    tensor = (
        right.clone()
        if side == "source"
        else part_of(whole_tensor(whole.shape, whole.dtype, seed + 1), layouts[side], int(worker))
    )
    if seed % 3 == 0 and tensor.numel():
        tensor = strided(tensor)
    Resharder(read, name, transport, limit_s=60.0).run(tensor, first_tag)
    return bits(tensor) == bits(right)


def dtype_of(element_bytes: int, seed: int) -> torch.dtype:
    fitting = [dtype for dtype in DTYPES if torch.empty((), dtype=dtype).element_size() == element_bytes]
    return fitting[seed % len(fitting)]
