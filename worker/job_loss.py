"""What a job's loss returns: one number, and with it, where the user wants, metrics by name.

Names and numbers are checked here, once, so that everybody behind takes them as they are. Knows torch; nothing of jobs,
stages or engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

MAX_METRICS = 32
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
Metrics = dict[str, torch.Tensor | float]


class JobLoss:
    """The loss of a job, called `path` in messages: `target` is what the user wrote, with its arguments bound."""

    def __init__(self, path: str, target: Callable[..., Any]):
        self._path, self.target = path, target
        self._names: tuple[str, ...] | None = None

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss alone."""
        return self.with_metrics(output, target)[0]

    def with_metrics(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        """The loss, and its metrics by name: the same names in every call.

        Raises TypeError for what is no number, ValueError for names that are none or that change.
        """
        value, metrics = self.target(output, target), {}
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
