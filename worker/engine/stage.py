"""The compute actions of one stage: F, B, I and W of a microbatch, by autograd.

Takes tensors from the exchange and leaves tensors there. Must not know lanes, events or transports.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from worker.engine.backward import WeightBackward, backward, backward_input
from worker.engine.errors import PeerLostError, StageError
from worker.engine.exchange import Exchange
from worker.engine.loss_scaler import LossScaler
from worker.engine.random_state import RandomState, restart_at_operations
from worker.engine.recompute import Kept, UpdatedBuffers, keep
from worker.engine.routes import LocalInput, ModelInput, OutputWiring, RemoteInput, Route, StageWiring
from worker.engine.stage_run import Arguments, Source, StageRun, gather, run_forward
from worker.last_action import doing
from worker.nests import no_loss
from worker.seeding import seeded
from worker.turns import GENERATORS

LossValue = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor | float]]
"""The loss of a microbatch, alone or with metrics by name."""


class Observer(Protocol):
    """Who is told what the stages of a mesh take, give and have done; on CPU each tensor is as it is at that moment."""

    def made(self, stage: int, tensor: str, microbatch: int, value: torch.Tensor) -> None:
        """A stage's forward made an output."""

    def gave(self, route: Route, backward: bool, microbatch: int, tensor: torch.Tensor) -> None:
        """A stage left `tensor` to be sent."""

    def took(self, route: Route, backward: bool, microbatch: int, tensor: torch.Tensor) -> None:
        """A stage uses `tensor`, which was received."""

    def ended(self, action: str, stage: int, microbatch: int) -> None:
        """A stage's action is over."""


@dataclass
class _Saved:
    """What a forward leaves for the backward of its microbatch. `sources` name where each leaf came from.

    Of a recomputed stage `outputs` and `loss` are missing until the forward has run again, from `kept`.
    """

    leaves: list[torch.Tensor]
    sources: list[LocalInput | RemoteInput]
    outputs: dict[str, torch.Tensor]
    loss: torch.Tensor | None
    kept: Kept | None = None


@dataclass(frozen=True)
class ComputeSettings:
    """How the stages of a mesh compute. `transfer_dtype`: dtype of a route's tensor on the wire; `weights`: by a step's
    targets, what each microbatch's loss counts (1 on average), None where all count alike; `keeps_random`: RunOptions'."""

    device: torch.device
    training: bool
    microbatches: int
    loss: Callable[[torch.Tensor, torch.Tensor], LossValue]
    autocast_dtype: torch.dtype | None
    seed: int | None
    worker: int
    transfer_dtype: Callable[[Route], torch.dtype]
    is_pooled: Callable[[torch.Tensor], bool]
    weights: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None
    keeps_random: bool = False
    scaler: LossScaler | None = None


class StageRunner:
    """One stage of this mesh. With `recompute` F keeps the stage's inputs only, and B (or I) runs it again."""

    def __init__(
        self,
        wiring: StageWiring,
        module: nn.Module,
        exchange: Exchange,
        settings: ComputeSettings,
        *,
        recompute: bool = False,
    ):
        self._stage = wiring.stage
        self._wiring = wiring
        self._module = module
        self._exchange = exchange
        self._settings = settings
        self._saved: dict[int, _Saved] = {}
        self._weights: dict[int, tuple[WeightBackward, Kept | None]] = {}
        self._recompute = recompute and settings.training
        self._buffers = UpdatedBuffers(module)
        self.observer: Observer | None = None
        self._random: RandomState | None = None
        keeps = settings.keeps_random
        if settings.seed is not None and (settings.training or keeps):
            random = RandomState(settings.seed, settings.worker, settings.device, keeps=keeps)
            operations = restart_at_operations(module, random)
            # a traced stage shows its random operations: without one it needs no state
            self._random = random if operations != 0 or (keeps and self._has_loss) else None

    def reset(self) -> None:
        """Forget the microbatches of the last step."""
        self._saved.clear()
        self._weights.clear()

    @property
    def with_gradients(self) -> tuple[bool, ...]:
        """Whether forwards run with gradients; a recomputed stage's run without, and then with them."""
        if not self._settings.training:
            return (False,)
        return (False, True) if self._recompute else (True,)

    def rehearse(
        self, values: Sequence[torch.Tensor], *, training: bool, target: Any = None
    ) -> list[torch.Tensor]:
        """One forward of the module on `values`, with the loss where a `target` is given, as if it had not been; what a
        backward would start from."""
        given, settings = iter(values), self._settings
        arguments = gather(self._wiring.inputs, lambda _: next(given), training=training)
        places = self._wiring.model_outputs if target is not None else ()
        # random operations start again for themselves
        with GENERATORS, seeded(0), self._buffers.as_of(keep(arguments, self._buffers)):
            run = run_forward(
                self._module,
                arguments.values,
                device_type=settings.device.type,
                training=training,
                autocast_dtype=settings.autocast_dtype,
                loss_of=places,
                loss=lambda output: (
                    value[0] if isinstance(value := settings.loss(output, target), tuple) else value
                ),
            )
        return run.roots(places)

    def forward(self, microbatch: int) -> None:
        """F: run the module, check its outputs, hand them on; the loss if the model's output is here."""
        with self._reported("F", microbatch):
            settings = self._settings
            arguments = gather(
                self._wiring.inputs,
                functools.partial(self._fetch, microbatch=microbatch),
                training=settings.training,
            )
            kept = keep(arguments, self._buffers) if self._recompute else None
            run = self._run(arguments, microbatch, training=settings.training, again=kept is not None)
            if kept is not None:
                kept.check_unchanged()
            saved = _Saved(arguments.leaves, arguments.sources, {}, run.loss, kept)
            for wiring, output in zip(self._wiring.outputs, run.outputs, strict=True):
                self._hand_on(wiring, output, microbatch, saved)
            if settings.training:
                self._saved[microbatch] = saved

    def backward(self, microbatch: int) -> None:
        """B: gradients of inputs and parameters."""
        with self._reported("B", microbatch):
            saved = self._saved.pop(microbatch)
            with self._as_of(saved.kept):
                self._run_again(saved, microbatch)
                roots, gradients = self._roots(saved, microbatch)
                self._pass_back(saved, backward(roots, gradients, saved.leaves), microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I: gradients of inputs. The activations stay until W."""
        with self._reported("I", microbatch):
            saved = self._saved.pop(microbatch)
            with self._as_of(saved.kept):
                self._run_again(saved, microbatch)
                roots, gradients = self._roots(saved, microbatch)
                found, weights = backward_input(roots, gradients, saved.leaves)
                self._weights[microbatch] = weights, saved.kept
                self._pass_back(saved, found, microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W: gradients of parameters."""
        with self._reported("W", microbatch):
            weights, kept = self._weights.pop(microbatch)
            with self._as_of(kept):
                weights.run()

    def _run(self, arguments: Arguments, microbatch: int, *, training: bool, again: bool = False) -> StageRun:
        """Run the module, and the loss where the model's output is. What will be run `again` for its backward
        keeps nothing, and leaves the loss, which may count its calls, to that run."""
        exchange, settings = self._exchange, self._settings
        loss = None
        if exchange.targets is not None and not again:
            loss = functools.partial(self._loss, microbatch=microbatch)
            if settings.weights is not None and exchange.weights is None and self._has_loss:
                # workers may sum here: not while this one has the generators, for which others may wait
                exchange.weights = settings.weights(exchange.targets)
        with self._random_state(microbatch):
            run = run_forward(
                self._module,
                arguments.values,
                device_type=settings.device.type,
                training=training and not again,
                autocast_dtype=settings.autocast_dtype,
                accept=self._accept,
                loss_of=self._wiring.model_outputs,
                loss=loss,
            )
        if run.loss is not None:
            exchange.losses[microbatch] = run.loss.detach()
        return run

    @property
    def _has_loss(self) -> bool:
        return bool(self._wiring.model_outputs)

    def _run_again(self, saved: _Saved, microbatch: int) -> None:
        """Of a recomputed stage: the forward once more, with gradients now."""
        if saved.kept is None:
            return
        run = self._run(saved.kept.take_arguments(), microbatch, training=True)
        saved.loss = run.loss
        for wiring, output in zip(self._wiring.outputs, run.outputs, strict=True):
            if wiring.local_consumers or wiring.routes:
                saved.outputs[wiring.tensor] = output

    def _as_of(self, kept: Kept | None) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if kept is None else self._buffers.as_of(kept)

    def _fetch(self, source: Source, microbatch: int) -> torch.Tensor:
        exchange = self._exchange
        if isinstance(source, ModelInput):
            return exchange.inputs[microbatch][source.position]
        if isinstance(source, LocalInput):
            return exchange.local[source.source, source.tensor, microbatch]
        received = exchange.received[source.route.index, microbatch]
        if self.observer is not None:
            self.observer.took(source.route, False, microbatch, received)
        return received.to(source.route.dtype)

    def _accept(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs as they may be handed on. ValueError for another shape than the traced one."""
        outputs = []
        for wiring, result in zip(self._wiring.outputs, results, strict=True):
            if wiring.shape is not None and tuple(result.shape) != wiring.shape:
                raise ValueError(
                    f"output {wiring.tensor!r} has shape {tuple(result.shape)}, traced as {wiring.shape}: "
                    "every microbatch must have the shape of the traced one"
                )
            # An input handed through: its buffer may be taken again while others still use this output.
            outputs.append(result.clone() if self._settings.is_pooled(result) else result)
        return outputs

    def _loss(self, output: torch.Tensor | tuple[torch.Tensor, ...], microbatch: int) -> torch.Tensor:
        exchange = self._exchange
        value = self._settings.loss(output, exchange.targets[microbatch])
        loss, metrics = value if isinstance(value, tuple) else (value, {})
        found = {name: _number(metric, loss.device) for name, metric in metrics.items()}
        if exchange.weights is None:
            exchange.metrics[microbatch] = found
            return loss
        weight = exchange.weights[microbatch]  # 0: a mean of nothing is no number
        exchange.metrics[microbatch] = {
            name: torch.where(weight > 0, metric * weight, 0.0) for name, metric in found.items()
        }
        weight = weight.to(loss.dtype)
        return torch.where(weight > 0, loss * weight, no_loss(output))

    def _hand_on(self, wiring: OutputWiring, output: torch.Tensor, microbatch: int, saved: _Saved) -> None:
        exchange, settings = self._exchange, self._settings
        if self.observer is not None:
            self.observer.made(self._stage, wiring.tensor, microbatch, output)
        if wiring.is_model_output and exchange.targets is None:
            made = output.detach()
            several = len(self._wiring.model_outputs) > 1
            exchange.outputs[microbatch] = (*exchange.outputs.get(microbatch, ()), made) if several else made
        if wiring.local_consumers:
            exchange.local[self._stage, wiring.tensor, microbatch] = output
        for route in wiring.routes:
            wire = output.detach()
            if wire.dtype != route.dtype and settings.autocast_dtype is None:
                raise ValueError(f"output {wiring.tensor!r} has dtype {wire.dtype}, traced as {route.dtype}")
            wire = wire.to(settings.transfer_dtype(route)).contiguous().resolve_conj().resolve_neg()
            exchange.to_send[route.index, microbatch] = wire
            if self.observer is not None:
                self.observer.gave(route, False, microbatch, wire)
        if (wiring.local_consumers or wiring.routes) and saved.kept is None:
            saved.outputs[wiring.tensor] = output

    def _roots(self, saved: _Saved, microbatch: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that backward starts from and their gradients, summed over users in a fixed order."""
        exchange = self._exchange
        roots, gradients = [], []
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            gradients.append(self._loss_gradient(saved.loss))
        for wiring in self._wiring.outputs:
            if wiring.tensor not in saved.outputs:
                continue
            parts = [
                exchange.local_gradients.pop((self._stage, wiring.tensor, user, microbatch), None)
                for user in wiring.local_consumers
            ]
            parts += [
                self._received_gradient(route, microbatch) for route in wiring.routes if route.differentiable
            ]
            output = saved.outputs[wiring.tensor]
            gradient = _sum([part for part in parts if part is not None], output.dtype)
            if gradient is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
            exchange.local.pop((self._stage, wiring.tensor, microbatch), None)
        return roots, gradients

    def _loss_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        scaler, microbatches = self._settings.scaler, self._settings.microbatches
        if scaler is None:
            return torch.full_like(loss, 1.0 / microbatches)
        return scaler.gradient(loss) / microbatches

    def _received_gradient(self, route: Route, microbatch: int) -> torch.Tensor:
        received = self._exchange.received_gradients.pop((route.index, microbatch))
        if self.observer is not None:
            self.observer.took(route, True, microbatch, received)
        return received

    def _pass_back(self, saved: _Saved, found: Sequence[torch.Tensor | None], microbatch: int) -> None:
        """Leave the gradients of the inputs for the stages that made them."""
        exchange = self._exchange
        for source, gradient in zip(saved.sources, found, strict=True):
            if gradient is not None and self._settings.is_pooled(gradient):
                gradient = gradient.clone()
            if isinstance(source, LocalInput):
                exchange.local_gradients[source.source, source.tensor, self._stage, microbatch] = gradient
                continue
            route = source.route
            parts = exchange.gradient_parts.setdefault((route.index, microbatch), {})
            parts[self._stage] = gradient
            if len(parts) == len(route.consumers):
                del exchange.gradient_parts[route.index, microbatch]
                self._send_back(route, parts, microbatch)

    def _send_back(self, route: Route, parts: dict[int, torch.Tensor | None], microbatch: int) -> None:
        dtype = self._settings.transfer_dtype(route)
        total = _sum([parts[user] for user in route.consumers if parts[user] is not None], dtype)
        if total is None:
            total = torch.zeros(route.shape, dtype=dtype, device=self._settings.device)
        total = total.contiguous().resolve_conj().resolve_neg()
        self._exchange.gradients_to_send[route.index, microbatch] = total
        if self.observer is not None:
            self.observer.gave(route, True, microbatch, total)

    def _random_state(self, microbatch: int) -> contextlib.AbstractContextManager:
        if self._random is None:
            # No operation of the stage draws, but a user's loss may.
            with_loss = self._has_loss and self._exchange.targets is not None
            return GENERATORS if with_loss else contextlib.nullcontext()
        return self._random.forward(self._exchange.step, microbatch, self._stage)

    @contextlib.contextmanager
    def _reported(self, action: str, microbatch: int):
        doing(f"{self._stage}{action}{microbatch} of step {self._exchange.step}")
        try:
            yield
            if self.observer is not None:
                self.observer.ended(action, self._stage, microbatch)
            doing("")
        except PeerLostError as error:  # in a sum inside the stage: no fault of the user's code
            raise PeerLostError(f"{self._stage}{action}{microbatch}: {error}", error.peer) from error
        except Exception as error:
            raise StageError(
                f"{self._stage}{action}{microbatch} raised {type(error).__name__}: {error}",
                action,
                self._stage,
                microbatch,
                "".join(traceback.format_exception(error)),
            ) from error


def _number(metric: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """On `device`, where no number of the host's makes it wait."""
    if isinstance(metric, torch.Tensor):
        return metric.detach().to(device, torch.float64)
    return torch.full((), float(metric), dtype=torch.float64, device=device)


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total if total.dtype == dtype else total.to(dtype)
