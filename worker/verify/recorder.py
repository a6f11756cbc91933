"""Records one pipeline step in a few numbers a slot: checksums of transfers, random projections of gradients.

A transfer keeps a checksum at both ends: of a tensor for a pair of workers, of tiles for a resharding. Of
gradients, after every backward, the products with random vectors are kept, which add up as gradients do.
Observers run on the threads of all workers: StepRecord takes a lock for every write.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from worker.contract.resharding import Box, ReshardingPlan
from worker.data.checksum import checksum
from worker.engine.routes import Route
from worker.parallel.tensor.shards import TensorParallelShards
from worker.transport.base import real_view

ReshardingPlans = Mapping[tuple[int, bool], ReshardingPlan]
"""By the first edge of a route, and whether it is the way back."""


@dataclass(frozen=True)
class RecordedTransfer:
    """One transfer of one microbatch: of the tensor of one worker of each mesh, or of a tile (`box` of the whole)."""

    index: int
    source: int
    tensor: str
    meshes: tuple[str, str]
    backward: bool
    microbatch: int
    worker: int | None
    box: Box = ()

    def __str__(self) -> str:
        ops, ends = ("SEND_F", "RECV_F"), self.meshes
        if self.backward:
            ops, ends = ("SEND_B", "RECV_B"), ends[::-1]
        what = "gradient of " if self.backward else ""
        box = "".join(f"[{begin}:{end}]" for begin, end in self.box)
        return (
            f"{ops[0]} on {ends[0]} to {ops[1]} on {ends[1]} of microbatch {self.microbatch} "
            f"({what}{self.tensor!r} of stage {self.source}{f', its part {box}' if box else ''})"
        )


@dataclass(frozen=True)
class TransferCheck:
    """A transfer to worker `taker`, and whether what was used is what was left to be sent."""

    transfer: RecordedTransfer
    taker: str
    intact: bool

    def __str__(self) -> str:
        return str(self.transfer) + (f" as {self.taker} has it" if self.transfer.box else "")


def transfer_checksums(
    mesh: str,
    worker: int,
    plans: ReshardingPlans,
    route: Route,
    backward: bool,
    microbatch: int,
    tensor: Tensor,
) -> Iterator[tuple[RecordedTransfer, str]]:
    """The transfers that `tensor` of a worker is an end of, with the checksums of what they move of it."""
    plan = plans.get((route.index, backward))
    ends = route.source_mesh, route.target_mesh
    what = (route.index, route.source, route.tensor, ends, backward, microbatch)
    if plan is None:
        yield RecordedTransfer(*what, worker), checksum(tensor)
        return
    name = f"{mesh}/{worker}"
    own = plan.box(name)
    for tile, box in enumerate(plan.tiles):
        if plan.holds(name, tile) or plan.needs(name, tile):
            part = tensor[tuple(slice(b - at, e - at) for (b, e), (at, _) in zip(box, own, strict=True))]
            yield RecordedTransfer(*what, None, box), checksum(part)


_PROBE_OFFSETS = (0, 17, 101, 997)


class Probes:
    """Products of tensors with vectors of random numbers: the root of the sum of their squares' mean is about a
    tensor's norm, and those of a difference are the difference of those."""

    def __init__(self) -> None:
        self._numbers = torch.empty(0)
        self._lock = threading.Lock()

    def of(self, tensor: Tensor | None) -> Tensor:
        """Zeros for None, which stands for no gradient."""
        if tensor is None:
            return torch.zeros(len(_PROBE_OFFSETS), dtype=torch.float64)
        flat = real_view(tensor.detach()).reshape(-1).float()
        numbers = self._enough(flat.numel() + _PROBE_OFFSETS[-1])
        return torch.stack(
            [flat @ numbers[start : start + flat.numel()] for start in _PROBE_OFFSETS]
        ).double()

    def _enough(self, count: int) -> Tensor:
        with self._lock:
            if self._numbers.numel() < count:
                self._numbers = torch.randn(2 * count, generator=torch.Generator().manual_seed(1))
            return self._numbers


def probe_norm(probe: Tensor) -> float:
    """About the norm of what was probed."""
    return float(probe.square().mean().sqrt())


@dataclass(frozen=True)
class BackwardSlot:
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


class RecordedStep:
    """One step of all workers."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._lock = threading.Lock()
        self._gave: dict[RecordedTransfer, set[str]] = {}
        self._took: dict[tuple[RecordedTransfer, str], str] = {}
        self._made: dict[tuple[int, int, int, str], Tensor] = {}
        self.added: dict[str, dict[BackwardSlot, Tensor]] = {}
        """What each slot added to a parameter's gradient, as probes, by name."""
        self.left_over: set[str] = set()
        """Parameters that had a gradient before the first backward."""

    def transfer_checks(self) -> list[TransferCheck]:
        """The transfers whose tensors were used, in that order."""
        with self._lock:
            return [
                TransferCheck(one, taker, used in self._gave.get(one, ()))
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

    def gave(self, sent: Iterable[tuple[RecordedTransfer, str]]) -> None:
        """Checksums of what a worker leaves to be sent; of a tile that several hold each has its own."""
        with self._lock:
            for one, value in sent:
                self._gave.setdefault(one, set()).add(value)

    def took(self, taker: str, received: Iterable[tuple[RecordedTransfer, str]]) -> None:
        with self._lock:
            for one, value in received:
                self._took[one, taker] = value

    def add(self, name: str, slot: BackwardSlot, probe: Tensor) -> None:
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
        share: TensorParallelShards | None = None,
        plans: ReshardingPlans | None = None,
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
        self._step: RecordedStep | None = None
        self._before: dict[str, Tensor] = {}

    def begin(self, step: RecordedStep) -> None:
        """The next step goes into `step`."""
        self._step, self._before = step, {}

    def on_output(self, stage: int, tensor: str, microbatch: int, value: Tensor) -> None:
        self._step.made(self._rows, stage, microbatch, tensor, value)

    def on_send(self, route: Route, backward: bool, microbatch: int, tensor: Tensor) -> None:
        self._step.gave(self._pieces(route, backward, microbatch, tensor))

    def on_receive(self, route: Route, backward: bool, microbatch: int, tensor: Tensor) -> None:
        found = self._pieces(route, backward, microbatch, tensor)
        self._step.took(f"{self._mesh}/{self._worker}", found)

    def _pieces(
        self, route: Route, backward: bool, microbatch: int, tensor: Tensor
    ) -> list[tuple[RecordedTransfer, str]]:
        return list(
            transfer_checksums(self._mesh, self._worker, self._plans, route, backward, microbatch, tensor)
        )

    def on_action_end(self, action: str, stage: int, microbatch: int) -> None:
        if not self._before:  # the first action of the step, a forward
            for parameters in self._parameters.values():
                for name, parameter in parameters.items():
                    self._before[name] = self._probe(name, parameter)
                    if parameter.grad is not None and bool(parameter.grad.any()):
                        self._step.left_over.add(name)
        if action not in ("B", "W"):
            return
        slot = BackwardSlot(stage, action, microbatch, self._mesh, self._worker, self._rows)
        for name, parameter in self._parameters[stage].items():
            now = self._probe(name, parameter)
            if self._share is None or self._share.counts(name):
                self._step.add(name, slot, now - self._before[name])
            self._before[name] = now

    def _probe(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The probe of a gradient; those of tensor-parallel parts add up to that of the whole."""
        gradient = parameter.grad
        if gradient is not None and self._share is not None:
            gradient = self._share.zero_padded(name, gradient)
        return self._probes.of(gradient)
