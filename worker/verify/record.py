"""What the workers of a pipeline do in one step, kept in a few numbers a slot, so that a difference can be traced to
the slot that made it.

Of what travels a checksum is kept at both ends; of gradients, after every backward, their products with vectors of
random numbers, which add up as gradients do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.engine.routes import Route
from worker.engine.tensor_share import TensorShare
from worker.verify.transfers import Passage, Passed, Plans, pieces

_OFFSETS = (0, 17, 101, 997)


class Probes:
    """Products of tensors with vectors of random numbers: the root of the sum of their squares' mean is about a
    tensor's norm, and those of a difference are the difference of those."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)
        self._lock = threading.Lock()

    def of(self, tensor: Tensor | None) -> Tensor:
        """Zeros for None, which stands for no gradient."""
        if tensor is None:
            return torch.zeros(len(_OFFSETS), dtype=torch.float64)
        flat = tensor.detach().reshape(-1).float()
        numbers = self._enough(flat.numel() + _OFFSETS[-1])
        return torch.stack([flat @ numbers[start : start + flat.numel()] for start in _OFFSETS]).double()

    def _enough(self, count: int) -> Tensor:
        with self._lock:
            if self._numbers.numel() < count:
                self._numbers = torch.randn(2 * count, generator=torch.Generator().manual_seed(1))
            return self._numbers


def norm_of(probe: Tensor) -> float:
    """About the norm of what was probed."""
    return float(probe.square().mean().sqrt())


@dataclass(frozen=True)
class Slot:
    """A backward that added to gradients (B or W), of this part of the microbatch's rows."""

    stage: int
    action: str
    microbatch: int
    mesh: str
    worker: int
    rows: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.action}{self.microbatch} on {self.mesh}" + (
            f" (worker {self.worker})" if self.worker else ""
        )


class StepRecord:
    """One step of all workers."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._lock = threading.Lock()
        self._gave: dict[Passage, set[str]] = {}
        self._took: dict[tuple[Passage, str], str] = {}
        self._made: dict[tuple[int, int, int, str], Tensor] = {}
        self.added: dict[str, dict[Slot, Tensor]] = {}
        """What each slot added to a parameter's gradient, as probes, by name."""
        self.left_over: set[str] = set()
        """Parameters that had a gradient before the first backward."""

    def passed(self) -> list[Passed]:
        """The transfers whose tensors were used, in that order."""
        with self._lock:
            return [
                Passed(one, taker, used in self._gave.get(one, ()))
                for (one, taker), used in self._took.items()
            ]

    def made_by(self, worker: int, stage: int, microbatch: int) -> dict[str, Tensor]:
        """Probes of what a forward made, by the names of its outputs."""
        with self._lock:
            return {
                name: probe
                for (*at, name), probe in self._made.items()
                if tuple(at) == (worker, stage, microbatch)
            }

    def made(self, worker: int, stage: int, microbatch: int, name: str, value: Tensor) -> None:
        probe = self._probes.of(value)
        with self._lock:
            self._made[worker, stage, microbatch, name] = probe

    def gave(self, sent: Iterable[tuple[Passage, str]]) -> None:
        """Checksums of what a worker leaves to be sent; of a tile that several hold each has its own."""
        with self._lock:
            for one, value in sent:
                self._gave.setdefault(one, set()).add(value)

    def took(self, taker: str, received: Iterable[tuple[Passage, str]]) -> None:
        with self._lock:
            for one, value in received:
                self._took[one, taker] = value

    def add(self, name: str, slot: Slot, probe: Tensor) -> None:
        with self._lock:
            self.added.setdefault(name, {})[slot] = probe


class Recorder:
    """The observer of one worker's stages; writes into the record of the step that runs."""

    def __init__(
        self,
        mesh: str,
        worker: int,
        stages: Mapping[int, nn.Module],
        probes: Probes,
        *,
        rows: int | None = None,
        share: TensorShare | None = None,
        plans: Plans | None = None,
    ) -> None:
        """`plans` are the transfers that are resharded."""
        self._plans = plans or {}
        self._mesh, self._worker, self._share = mesh, worker, share
        self._rows = worker if rows is None else rows
        self._parameters = {
            stage: {
                module.original_names[local]: parameter
                for local, parameter in module.named_parameters()
                if parameter.requires_grad
            }
            for stage, module in stages.items()
        }
        self._probes = probes
        self._step: StepRecord | None = None
        self._before: dict[str, Tensor] = {}

    def begin(self, step: StepRecord) -> None:
        """The next step goes into `step`."""
        self._step, self._before = step, {}

    def made(self, stage: int, tensor: str, microbatch: int, value: Tensor) -> None:
        self._step.made(self._rows, stage, microbatch, tensor, value)

    def gave(self, route: Route, backward: bool, microbatch: int, tensor: Tensor) -> None:
        self._step.gave(self._pieces(route, backward, microbatch, tensor))

    def took(self, route: Route, backward: bool, microbatch: int, tensor: Tensor) -> None:
        found = self._pieces(route, backward, microbatch, tensor)
        self._step.took(f"{self._mesh}/{self._worker}", found)

    def _pieces(
        self, route: Route, backward: bool, microbatch: int, tensor: Tensor
    ) -> list[tuple[Passage, str]]:
        return list(pieces(self._mesh, self._worker, self._plans, route, backward, microbatch, tensor))

    def ended(self, action: str, stage: int, microbatch: int) -> None:
        if not self._before:  # the first action of the step, a forward
            for parameters in self._parameters.values():
                for name, parameter in parameters.items():
                    self._before[name] = self._probe(name, parameter)
                    if parameter.grad is not None and bool(parameter.grad.any()):
                        self._step.left_over.add(name)
        if action not in ("B", "W"):
            return
        slot = Slot(stage, action, microbatch, self._mesh, self._worker, self._rows)
        for name, parameter in self._parameters[stage].items():
            now = self._probe(name, parameter)
            if self._share is None or self._share.counts(name):
                self._step.add(name, slot, now - self._before[name])
            self._before[name] = now

    def _probe(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Of workers that share a parameter those of their parts, which add up to that of the whole."""
        gradient = parameter.grad
        if gradient is not None and self._share is not None:
            gradient = self._share.placed(name, gradient)
        return self._probes.of(gradient)
