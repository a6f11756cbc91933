"""StepState and StageTensors: the tensors of the step in flight, and what passes in and out of each stage.

Every entry of the step state is made by one action and taken by one that the program orders after it, so no
lock is needed; keys end with the microbatch; received tensors lie in pooled buffers. Gradients of one output
are summed over its users in a fixed order. An observer may watch what stages take, give and have done.
Must not know how a stage runs, lanes or transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from worker.engine.autograd import Root
from worker.engine.forward import InputSource
from worker.engine.optim.grad_scaler import PipelineGradScaler
from worker.engine.recomputation.inputs import RecomputeInputs
from worker.engine.routes import LocalInput, ModelInput, OutputWiring, RemoteInput, Route, StageWiring

LossValue = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]
"""The loss of a microbatch, alone or with metrics by name."""


@dataclass(frozen=True)
class ComputeSettings:
    """Settings of the stages of a mesh.

    `transfer_dtype` gives the dtype of a route's tensor on the wire, `is_pooled` whether a tensor lies in a receive buffer.
    `weights` gives the weight of each microbatch's loss (1 on average) from a step's targets; None: all weigh 1.
    `keeps_random` is that of RunOptions.
    """

    device: torch.device
    training: bool
    microbatches: int
    loss: Callable[[torch.Tensor, torch.Tensor], LossValue]
    autocast_dtype: torch.dtype | None
    seed: int | None
    worker: int
    transfer_dtype: Callable[[Route], torch.dtype]
    is_pooled: Callable[[torch.Tensor], bool]
    weights: Callable[[Sequence[torch.Tensor]], list[float]] | None = None
    keeps_random: bool = False
    scaler: PipelineGradScaler | None = None


@dataclass
class StepState:
    """The tensors of the step in flight, which the actions of one mesh hand to each other.

    Keys end with the microbatch. Every entry is made by one action and taken by one that the program
    orders after it, so no lock is needed. Tensors of `received*` lie in pooled buffers. `shapes` has for each microbatch
    0, or the number (from 1) of the smaller stages that run it; empty: all run the same ones.
    """

    step: int = 0
    inputs: Sequence[tuple[torch.Tensor, ...]] = ()
    targets: Sequence[torch.Tensor] | None = None
    received: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    received_gradients: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    to_send: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    gradients_to_send: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    local: dict[tuple[int, str, int], torch.Tensor] = field(default_factory=dict)
    local_gradients: dict[tuple[int, str, int, int], torch.Tensor | None] = field(default_factory=dict)
    gradient_parts: dict[tuple[int, int], dict[int, torch.Tensor | None]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    weights: list[float] | None = None
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    shapes: Sequence[int] = ()

    def begin(
        self,
        step: int,
        inputs: Sequence[tuple[torch.Tensor, ...]],
        targets: Sequence[torch.Tensor] | None,
        shapes: Sequence[int] = (),
    ) -> None:
        """Forget the last step and take the batch of this one."""
        self.step, self.inputs, self.targets, self.weights = step, inputs, targets, None
        self.shapes = shapes
        for left in (
            self.received,
            self.received_gradients,
            self.to_send,
            self.gradients_to_send,
            self.local,
            self.local_gradients,
            self.gradient_parts,
            self.losses,
            self.metrics,
            self.outputs,
        ):
            left.clear()

    def shape_of(self, microbatch: int) -> int:
        """The number of the stages that run a microbatch: 0 are the largest."""
        return self.shapes[microbatch] if self.shapes else 0

    def losses_in_order(self) -> list[float]:
        """The losses by microbatch; on CUDA the host waits, once for all."""
        return torch.stack([self.losses[m] for m in sorted(self.losses)]).tolist() if self.losses else []

    def outputs_in_order(self) -> list[torch.Tensor]:
        """The model outputs by microbatch."""
        return [self.outputs[m] for m in sorted(self.outputs)]

    def metrics_by_name(self) -> dict[str, list[float]]:
        """The metrics of the losses by name, each a number per microbatch, 0 of one that was left out; on CUDA the host
        waits, once for all."""
        known = next(filter(None, self.metrics.values()), None)
        if known is None:
            return {}
        names, nothing = list(known), torch.zeros_like(next(iter(known.values())))
        rows = torch.stack(
            [
                torch.stack([self.metrics[m].get(name, nothing) for name in names])
                for m in sorted(self.metrics)
            ]
        )
        return dict(zip(names, rows.T.tolist(), strict=True))


class StageObserver(Protocol):
    """Watches what the stages of a mesh receive, make, send and do; on CPU each tensor has its value of that moment."""

    def on_output(self, stage: int, tensor: str, microbatch: int, value: torch.Tensor) -> None:
        """A stage's forward made an output."""

    def on_send(self, route: Route, backward: bool, microbatch: int, tensor: torch.Tensor) -> None:
        """A stage left `tensor` to be sent."""

    def on_receive(self, route: Route, backward: bool, microbatch: int, tensor: torch.Tensor) -> None:
        """A stage uses `tensor`, which was received."""

    def on_action_end(self, action: str, stage: int, microbatch: int) -> None:
        """A stage's action is over."""


@dataclass(frozen=True)
class BackwardRoot:
    """The start of an output's backward (None: it takes no gradient), and the dtype of its gradient."""

    start: Root | None
    dtype: torch.dtype

    @classmethod
    def behind(cls, output: torch.Tensor) -> BackwardRoot:
        """The root of an output whose value nobody here needs any more: its memory is free once it has been sent, unless
        an operation keeps it for its backward. An input that is handed through stays itself."""
        if not output.requires_grad:
            return cls(None, output.dtype)
        return cls(output if output.is_leaf else get_gradient_edge(output), output.dtype)


@dataclass
class SavedForward:
    """The things that a forward leaves for the backward of its microbatch; leaf k came from `sources[k]`.

    Of a recomputed stage `roots` and `loss` are missing until the forward has run again, from `recompute_inputs`.
    """

    leaves: list[torch.Tensor]
    sources: list[LocalInput | RemoteInput]
    roots: dict[str, BackwardRoot]
    loss: torch.Tensor | None
    recompute_inputs: RecomputeInputs | None = None


class StageTensors:
    """The inputs, outputs and gradients of the stage of `wiring`."""

    def __init__(self, wiring: StageWiring, state: StepState, settings: ComputeSettings):
        self._stage = wiring.stage
        self._wiring = wiring
        self._state = state
        self._settings = settings
        self.observer: StageObserver | None = None

    def fetch(self, source: InputSource, microbatch: int) -> torch.Tensor:
        """The stage's argument from `source`, in the dtype in which it was made."""
        state = self._state
        if isinstance(source, ModelInput):
            return state.inputs[microbatch][source.position]
        if isinstance(source, LocalInput):
            return state.local[source.source, source.tensor, microbatch]
        received = state.received[source.route.index, microbatch]
        if self.observer is not None:
            self.observer.on_receive(source.route, False, microbatch, received)
        return received.to(source.route.dtype)

    def observe_outputs(self, outputs: Sequence[torch.Tensor], microbatch: int) -> None:
        """Show the observer what the module made, before a loss may change it."""
        if self.observer is not None:
            for wiring, output in zip(self._wiring.outputs, outputs, strict=True):
                self.observer.on_output(self._stage, wiring.tensor, microbatch, output)

    def hand_on(
        self, wiring: OutputWiring, output: torch.Tensor, microbatch: int, saved: SavedForward
    ) -> None:
        """Leave an output for its consumers on this mesh, for its transfers, and in `saved` for the backward."""
        state, settings = self._state, self._settings
        if wiring.is_model_output and state.targets is None:
            made = output.detach()
            several = len(self._wiring.model_outputs) > 1
            state.outputs[microbatch] = (*state.outputs.get(microbatch, ()), made) if several else made
        if wiring.local_consumers:
            state.local[self._stage, wiring.tensor, microbatch] = output
        for route in wiring.routes:
            wire = output.detach()
            if wire.dtype != route.dtype and settings.autocast_dtype is None:
                raise ValueError(f"output {wiring.tensor!r} has dtype {wire.dtype}, traced as {route.dtype}")
            wire = wire.to(settings.transfer_dtype(route)).contiguous().resolve_conj().resolve_neg()
            state.to_send[route.index, microbatch] = wire
            if self.observer is not None:
                self.observer.on_send(route, False, microbatch, wire)
        if (wiring.local_consumers or wiring.routes) and saved.recompute_inputs is None:
            saved.roots[wiring.tensor] = BackwardRoot.behind(output)

    def roots(self, saved: SavedForward, microbatch: int) -> tuple[list[Root], list[torch.Tensor]]:
        """The starts of the backward and the gradients there, summed over users in a fixed order."""
        state = self._state
        roots, gradients = [], []
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            gradients.append(self._loss_gradient(saved.loss))
        for wiring in self._wiring.outputs:
            if (root := saved.roots.get(wiring.tensor)) is None:
                continue
            parts = [
                state.local_gradients.pop((self._stage, wiring.tensor, user, microbatch), None)
                for user in wiring.local_consumers
            ]
            parts += [
                self._received_gradient(route, microbatch) for route in wiring.routes if route.differentiable
            ]
            gradient = _sum_gradients([part for part in parts if part is not None], root.dtype)
            if gradient is not None and root.start is not None:
                roots.append(root.start)
                gradients.append(gradient)
            state.local.pop((self._stage, wiring.tensor, microbatch), None)
        return roots, gradients

    def _loss_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        scaler, microbatches = self._settings.scaler, self._settings.microbatches
        if scaler is None:
            return torch.full_like(loss, 1.0 / microbatches)
        return scaler.gradient(loss) / microbatches

    def _received_gradient(self, route: Route, microbatch: int) -> torch.Tensor:
        received = self._state.received_gradients.pop((route.index, microbatch))
        if self.observer is not None:
            self.observer.on_receive(route, True, microbatch, received)
        return received

    def pass_back(
        self, saved: SavedForward, gradients: Sequence[torch.Tensor | None], microbatch: int
    ) -> None:
        """Leave the gradients of the inputs for the stages that made them."""
        state = self._state
        for source, gradient in zip(saved.sources, gradients, strict=True):
            if gradient is not None and self._settings.is_pooled(gradient):
                gradient = gradient.clone()
            if isinstance(source, LocalInput):
                state.local_gradients[source.source, source.tensor, self._stage, microbatch] = gradient
                continue
            route = source.route
            parts = state.gradient_parts.setdefault((route.index, microbatch), {})
            parts[self._stage] = gradient
            if len(parts) == len(route.consumers):
                del state.gradient_parts[route.index, microbatch]
                self._send_back(route, parts, microbatch)

    def _send_back(self, route: Route, parts: dict[int, torch.Tensor | None], microbatch: int) -> None:
        dtype = self._settings.transfer_dtype(route)
        total = _sum_gradients([parts[user] for user in route.consumers if parts[user] is not None], dtype)
        if total is None:
            total = torch.zeros(route.shape, dtype=dtype, device=self._settings.device)
        total = total.contiguous().resolve_conj().resolve_neg()
        self._state.gradients_to_send[route.index, microbatch] = total
        if self.observer is not None:
            self.observer.on_send(route, True, microbatch, total)


def _sum_gradients(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if total.dtype == dtype else total.to(dtype)
