"""Calls the job's loss on output, target and optionally inputs, and validates its value and metrics.

A loss returns one number, alone or as (loss, {name: metric}). Names and numbers are validated here, once, so that
later code takes them as they are; the names must be the same in every call, as metrics are averaged over
microbatches.
Must not know stages or engines.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from worker.contract.job import Factory
from worker.model.factory import resolve
from worker.model.pytree import Target, Targets, TreeSpec

MAX_METRICS = 32
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
Metrics = dict[str, torch.Tensor | float]
ModelOutput = torch.Tensor | tuple[torch.Tensor, ...]


def takes_inputs(spec: Factory | None) -> bool:
    """True where a job's loss has a parameter `inputs` beside the output and the target, which are its first two.

    Errors of the loss itself are raised where it is made.
    """
    try:
        target = resolve(spec.factory) if spec is not None else None
        if isinstance(target, type):
            target = target.forward if issubclass(target, nn.Module) else target.__call__
            own = 3  # and itself
        else:
            own = 2
        parameters = list(inspect.signature(target).parameters.values()) if target is not None else []
    except Exception:
        return False
    bound = {} if own == 3 or spec is None else spec.args
    return any(
        parameter.name == "inputs"
        and parameter.name not in bound
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and (parameter.kind is parameter.KEYWORD_ONLY or position >= own)
        for position, parameter in enumerate(parameters)
    )


class JobLoss:
    """The loss of a job, called `path` in messages: `target` is what the user wrote, with its arguments bound."""

    def __init__(self, path: str, target: Callable[..., Any]):
        self._path, self.target = path, target
        self._names: tuple[str, ...] | None = None
        self._form: TreeSpec | None = None

    def with_output_spec(self, form: TreeSpec | None) -> JobLoss:
        """This loss for outputs that are the leaves of a pytree of this spec."""
        other = copy.copy(self)
        other._form = form
        return other

    def __call__(self, output: ModelOutput, target: Target) -> torch.Tensor:
        """The loss alone."""
        return self.with_metrics(output, target)[0]

    def with_metrics(self, output: ModelOutput, target: Target) -> tuple[torch.Tensor, Metrics]:
        """The loss, and its metrics by name: the same names in every call.

        Raises TypeError for a value that is not one number, ValueError for metric names that are invalid or change.
        """
        value, metrics = self._called(output, target), {}
        if isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], Mapping):
            value, metrics = value[0], self._checked(value[1])
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            self._check_same(tuple(sorted(metrics)))
            return value, metrics
        found = (
            f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        )
        raise TypeError(
            f"loss {self._path!r} returned {found}, not one number: return the mean over the samples, alone or as "
            "(loss, {name: metric})"
        )

    def _called(self, output: ModelOutput, target: Target) -> Any:
        several = isinstance(target, Targets)
        taken = {"inputs": target.inputs} if several and target.inputs is not None else {}
        wanted = target.target if several else target
        if self._form is None:
            return self.target(output, wanted, **taken)
        tensors = output if isinstance(output, tuple) else (output,)
        try:
            return self.target(self._form.unflatten(tensors), wanted, **taken)
        except (TypeError, AttributeError) as error:  # as of a loss that wants a tensor
            raise TypeError(
                f"loss {self._path!r} raised {type(error).__name__}: {error}. It was called with what the model returns, "
                f"{self._form.describe(tensors)}: have it take that, or name what it takes in model.output"
                + (", or leave out `loss`, since the model returns its own" if self._own_loss else "")
            ) from error

    @property
    def _own_loss(self) -> bool:
        return "loss" in self._form.names

    def _checked(self, metrics: Mapping[Any, Any]) -> Metrics:
        if len(metrics) > MAX_METRICS:
            raise ValueError(
                f"loss {self._path!r} returned {len(metrics)} metrics, the limit is {MAX_METRICS}: return fewer"
            )
        found: Metrics = {}
        for name, value in metrics.items():
            if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name == "loss":
                raise ValueError(
                    f"loss {self._path!r} returned a metric named {str(name)[:100]!r}: a name has up to 64 letters, "
                    "digits and _.- and begins with a letter or _; `loss` is the loss itself"
                )
            if isinstance(value, torch.Tensor):
                if value.dim() or value.is_complex():
                    raise TypeError(
                        f"loss {self._path!r}: metric {name!r} has shape {tuple(value.shape)} and type {value.dtype}, "
                        "but is to be one real number: return its mean"
                    )
                value = value.detach()
            elif not isinstance(value, int | float):
                raise TypeError(
                    f"loss {self._path!r}: metric {name!r} is a {type(value).__name__}, not one number or a tensor of one"
                )
            found[name] = value
        return found

    def _check_same(self, names: tuple[str, ...]) -> None:
        """A mean over microbatches is one over all of them."""
        if self._names is None:
            self._names = names
        if names != self._names:
            raise ValueError(
                f"loss {self._path!r} returned the metrics {', '.join(names) or 'none'}, and before "
                f"{', '.join(self._names) or 'none'}: return the same names every time"
            )
