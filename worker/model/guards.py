"""Guards against infinities in a model's forward: `if not torch.isfinite(x).all(): x = clamp(x)`.

What they ask depends on values, which no graph holds; the answer of a training that goes well is traced. Where values
are infinite after all they stay so, and the loss and the gradient's norm tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ASK = {
    **dict.fromkeys((torch.isfinite, Tensor.isfinite), True),
    **dict.fromkeys((torch.isinf, Tensor.isinf, torch.isnan, Tensor.isnan), False),
}
_JOIN = {**dict.fromkeys((torch.all, Tensor.all), True), **dict.fromkeys((torch.any, Tensor.any), False)}
_ANSWER = (Tensor.__bool__, Tensor.item)


class FiniteAssumed(TorchFunctionMode):
    """While a model is traced: all of a tensor is finite, where its forward asks for that; `asked` says how often."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self._known: dict[
            int, tuple[Tensor, bool, bool]
        ] = {}  # by id: what keeps it, its answer, whether one value

    def notes(self) -> list[str]:
        """What to tell of it."""
        if not self.asked:
            return []
        return [
            f"forward asks {self.asked} times whether a tensor is finite, and is traced as if it always were: infinite "
            "values are not clamped, they show in the loss"
        ]

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = self._known.get(id(args[0])) if args else None
        if known is not None and known[2] and function in _ANSWER:
            self.asked += 1
            return known[1]
        result = function(*args, **(kwargs or {}))
        if function in _ASK:
            self._known[id(result)] = (result, _ASK[function], False)
        elif known is not None and _JOIN.get(function) is known[1] and len(args) == 1 and not kwargs:
            self._known[id(result)] = (result, known[1], True)
        return result
