"""Cross-mesh sums of optimizers: norms and dot products over all parameters, which each rank has of its own ones only.

An optimizer that can have its sums completed says so by an attribute `sum_over_ranks`, which is None: training sets it to
a callable that sums a tensor over the ranks in place and returns it. Every rank calls it in every step as often, with
tensors of the same shapes; one that trains no parameter steps a single one of zeros (`zero_parameter`). Classes of
prodigyopt and dadaptation have a distributed branch (`fsdp_in_use`), which sums on CUDA by torch.distributed: their
step() runs here with the same code, other names for `torch` and `dist`, and sums in float64. The trials of `trials.py`
run ranks with these sums beside the library's own step, so that another release of it is refused where it differs.
Must not know groups of ranks, stages or transports.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn

from worker.engine.optim.state_dict import class_name

SumOverRanks = Callable[[torch.Tensor], torch.Tensor]
_ATTRIBUTE = "sum_over_ranks"


@dataclass(frozen=True)
class _Library:
    """Sums in the step of a library's class: the place of a denominator, and the setting (none: "") that keeps a sum over
    earlier steps, with its place."""

    denominator: int
    setting: str = ""
    place: int = 0


_LIBRARIES = {
    "prodigyopt.prodigy.Prodigy": _Library(denominator=1),
    "dadaptation.dadapt_adam.DAdaptAdam": _Library(1, "numerator_weighted", 0),
    "dadaptation.dadapt_sgd.DAdaptSGD": _Library(0, "numerator_weighted", 1),
}
# The gradient of a parameter that keeps a step of these from ending before its sum on a rank without gradients; what it
# adds is lost beside any other number. A denominator below `_NO_GRADIENT` is of it alone.
_TINY_GRADIENT, _NO_GRADIENT = 1e-100, 1e-90


def sums_over_ranks(optimizer: torch.optim.Optimizer) -> bool:
    """True where the sums of `optimizer` over its parameters can be completed over ranks."""
    return hasattr(optimizer, _ATTRIBUTE) or class_name(optimizer) in _LIBRARIES


def zero_parameter(device: torch.device | str = "cpu") -> nn.Parameter:
    """A parameter of one element with its gradient, both zero: nothing in a norm or a dot product."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def complete_sums(
    optimizer: torch.optim.Optimizer, total: SumOverRanks, *, leads: bool, device: torch.device | str = "cpu"
) -> None:
    """Have `optimizer` complete its sums by `total`; of all ranks one `leads`, whose earlier sums count."""
    if hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, total)
        return
    step = _LibraryStep(optimizer, total, leads, device)
    hooked = torch.optim.Optimizer.profile_hook_step(lambda self, closure=None: step(closure))
    optimizer.step = types.MethodType(hooked, optimizer)


class _NoGradientError(Exception):
    """No rank has a gradient: the library's step ends there."""


class _SumTensor(torch.Tensor):
    """A tensor that stays where it is when it is moved to CUDA."""

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


class _TorchInStep:
    """The module torch as the step of a library sees it: new zeros are of float64, as the numbers that are summed, and on
    `device`."""

    def __init__(self, device: torch.device | str):
        self._device = device

    def zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.float64, device=self._device).as_subclass(_SumTensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _LibraryStep:
    """The step() of a class in _LIBRARIES, with sums over ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total: SumOverRanks,
        leads: bool,
        device: torch.device | str,
    ):
        self._optimizer, self._total, self._leads = optimizer, total, leads
        self._library = _LIBRARIES[class_name(optimizer)]
        self._sum: float | None = None
        self._tiny = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=device))
        self._tiny_state: dict[str, Any] = {}
        function = inspect.unwrap(type(optimizer).step)
        names = {
            "torch": _TorchInStep(device),
            "dist": types.SimpleNamespace(
                all_reduce=self._all_reduce, ReduceOp=getattr(torch.distributed, "ReduceOp", None)
            ),
        }
        self._step = types.FunctionType(
            function.__code__,
            {**function.__globals__, **names},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )

    def __call__(self, closure: Callable[[], Any] | None) -> Any:
        optimizer, first = self._optimizer, self._optimizer.param_groups[0]
        tensors = [
            {key for key, value in group.items() if isinstance(value, torch.Tensor)}
            for group in optimizer.param_groups
        ]
        flag, parameters, setting = first["fsdp_in_use"], first["params"], self._library.setting
        earlier = first.get(setting)
        if setting and not self._leads:
            first[setting] = 0.0
        self._tiny.data.zero_()
        self._tiny.grad = torch.full_like(self._tiny, _TINY_GRADIENT)
        first.update(fsdp_in_use=True, params=[*parameters, self._tiny])
        optimizer.state[self._tiny] = self._tiny_state
        self._sum = None
        try:
            return self._step(optimizer, closure)
        except _NoGradientError:
            self._sum = None
            first.update({setting: earlier} if setting else {})
            return None
        finally:
            first.update(fsdp_in_use=flag, params=parameters)
            self._tiny_state = optimizer.state.pop(self._tiny)
            for group, before in zip(optimizer.param_groups, tensors, strict=True):
                if self._sum is not None:
                    group[setting] = self._sum
                group |= {
                    key: value.item()
                    for key, value in group.items()
                    if isinstance(value, torch.Tensor) and key not in before
                }

    def _all_reduce(self, tensor: torch.Tensor, **_: Any) -> None:
        self._total(tensor)
        library = self._library
        if float(tensor[library.denominator]) < _NO_GRADIENT:
            raise _NoGradientError
        if library.setting and tensor.numel() > library.place:
            self._sum = float(tensor[library.place])
