"""The same job in double precision, where rounding is a billion times smaller and what is wrong is as wrong as before."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.benchmarks.models.entry import HOUSE


def in_double(spec: dict[str, Any]) -> dict[str, Any]:
    """`spec` with its model and samples converted."""
    model, data = spec["model"], spec["data"]
    inner = {"factory": model["factory"], "args": model["args"]}
    return spec | {
        "model": model | {"factory": f"{HOUSE}.doubled:converted", "args": {"model": inner}},
        "data": {"factory": f"{HOUSE}.doubled:Samples", "args": {"data": data}},
    }


def converted(model: nn.Module) -> nn.Module:
    return model.double()


class Samples:
    """Those of another data set."""

    def __init__(self, data: Any):
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return _double(self._data[index])


def _double(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, dict):
        return {key: _double(part) for key, part in value.items()}
    return tuple(_double(part) for part in value) if isinstance(value, tuple) else value
