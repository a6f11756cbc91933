"""Runs the plain model of a job on one worker: no graph, stages or transfers, one microbatch at a time.

Uses torch, the job's own factories, and the contract of which samples and random numbers a step has; nothing of
the engine. Each data-parallel rank has buffers of its own, since its statistics are of its own rows.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from worker.actor.loss import takes_inputs
from worker.actor.model_host import build_job_model
from worker.actor.optimizer import (
    IGNORED_TARGET,
    ignored_target,
    make_loss,
    make_optimizer,
    make_schedule,
    target_counter,
)
from worker.checkpoint.format import load_checkpoint
from worker.checkpoint.sources import fill_model
from worker.checks.loss_reduction import (
    TOLERANCE,
    Loss,
    Rows,
    batch_of,
    in_float32,
    is_loss_of_batch,
    loss_of_rows,
)
from worker.contract.checkpoint_files import CheckpointError
from worker.contract.failures import leave_breadcrumb
from worker.contract.job import AUTO, AUTOCAST_DTYPES, FP16, Job, LossScaling, Training
from worker.data.dataset import SampleOrder
from worker.data.microbatches import BatchSlice, Microbatches, MicrobatchTensors
from worker.model.checkpoint_regions import mark_checkpoint_regions
from worker.model.eval_mode import in_eval_mode
from worker.model.interface import adapt_model
from worker.model.parity import tolerance_for
from worker.model.pytree import Target, target_tensors, zero_loss
from worker.model.rng import derive_seed, seeded
from worker.model.rng_ops import RngKey, RngOp, replay_rng
from worker.model.side_effects.eager import BufferSnapshot
from worker.model.side_effects.python_state import PythonState
from worker.transport.base import real_view
from worker.verify.recorder import Probes
from worker.verify.rng_replay import HeterogeneousDraws, MeshRngOp

_MOST_BATCH_BYTES = 2**31
"""Of a model's outputs for a whole batch: with copies they take five times as much."""


@dataclass(frozen=True)
class PlainStep:
    """One step before its update: of each worker and microbatch the loss, the probes of the model's outputs and those of
    what it added to each gradient (in fp16 that of the scaled loss); the gradients, averaged over workers and not
    clipped; their norm; the learning rate; the model's parameters in `order`; in fp16 the loss scale."""

    losses: Mapping[tuple[int, int], float]
    outputs: Mapping[tuple[int, int], Sequence[Tensor]]
    added: Mapping[tuple[int, int], Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    norm: float
    learning_rate: float
    order: Sequence[str]
    loss_scale: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and all(math.isfinite(loss) for loss in self.losses.values())


@dataclass(frozen=True)
class BatchLoss:
    """The loss of a whole batch at once, and what the losses of its microbatches make, as the job weighs them."""

    together: float
    apart: float
    parts: tuple[float, ...]
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return is_loss_of_batch(self.apart, self.together, self.parts, self.tolerance)


InputShapes = tuple[tuple[int, ...], ...]


def input_shapes(inputs: Sequence[Tensor]) -> InputShapes:
    """The shapes of a microbatch's inputs, by which traces for other lengths are known."""
    return tuple(tuple(tensor.shape) for tensor in inputs)


class NotComparableError(Exception):
    """The loss of a batch cannot be compared with those of its microbatches, for the reason that it says."""


@dataclass(frozen=True)
class TriedUpdate:
    """A parameter's value after a trial of the optimizer, and the settings of its group then."""

    value: Tensor
    settings: Mapping[str, Any]
    optimizer: str


class PlainModel:
    """`forward_and_backward` of a step, then `update`."""

    def __init__(
        self,
        job: Job,
        microbatches: int,
        calls: Sequence[RngOp],
        probes: Probes,
        *,
        workers: int | None = None,
        of_meshes: Sequence[MeshRngOp] = (),
        calls_of_shapes: Mapping[InputShapes, Sequence[RngOp]] = MappingProxyType({}),
    ) -> None:
        """`workers`: how many share a microbatch where the loss is; `of_meshes` are the calls where meshes have different
        sizes, `calls_of_shapes` those for inputs of other lengths."""
        training = job.training
        self._job, self._calls, self._probes = job, calls, probes
        self._of_meshes, self._calls_of_shapes = of_meshes, calls_of_shapes
        self._microbatches, self._workers = microbatches, workers or job.max_dp_size
        own_loss = job.loss is None
        ignored = IGNORED_TARGET if own_loss else ignored_target(job.loss)
        order = SampleOrder(
            job.data,
            training.seed,
            training.global_batch,
            microbatches,
            ignored_target=ignored,
            row_multiple=None if training.microbatches == AUTO else self._workers,
        )
        self._data = Microbatches(order, own_loss=own_loss, with_inputs=takes_inputs(job.loss))
        built = build_job_model(job)
        self.model = built.model
        if job.model.train == "called":  # said here once more: a proof shares no mistake of build_job_model
            self.model.train()
        if job.model.weights:
            fill_model(job.model.weights, self.model, built.record)
        self._whole: tuple[int, list[MicrobatchTensors]] | None = None
        names = self._data.read(0, 0, BatchSlice(0, 1)).names
        self._interface = adapt_model(self.model, names, output=job.model.output, own_loss=own_loss)
        self._loss = make_loss(job.loss)
        self.parameters = dict(self.model.named_parameters())
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = make_optimizer(job.optimizer, list(self.trained.values()), list(self.trained))
        schedule = job.optimizer.schedule
        self._schedule = make_schedule(schedule, self.optimizer) if schedule else None
        self._scaler = _make_grad_scaler(training)
        self.buffers = [
            {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            for _ in range(self._workers)
        ]
        """Of each worker: a data-parallel worker's statistics are of its own rows."""
        self._outputs: dict[tuple[int, int], tuple[Tensor, ...]] | None = {}  # of the step just made
        self.loss_changes_target = False
        """True once a call of the loss has changed its target in place."""

    @torch.no_grad()
    def restore(self, uri: str) -> int:
        """Go on from a checkpoint of the job's model, by torch's own optimizer and schedule; its step is returned.

        Raises CheckpointError for a checkpoint that cannot be read, or has no value of a tensor of the model.
        """
        saved, step = load_checkpoint(uri)
        for kind, tensors in (("parameters", self.parameters), ("buffers", dict(self.model.named_buffers()))):
            for name, tensor in tensors.items():
                if name in saved[kind]:
                    tensor.copy_(saved[kind][name])
                elif name in self.parameters:
                    raise CheckpointError(f"{uri} has no parameter {name!r}, which the model has")
        self.buffers = [
            {name: buffer.clone() for name, buffer in self.model.named_buffers()} for _ in self.buffers
        ]
        for name, parameter in self.trained.items():
            if (entry := saved["optimizer"].get(name)) is not None:
                self.optimizer.state[parameter] = {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()
                }
        if self._schedule is not None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                for _ in range((saved.get("lr_schedule") or {}).get("last_epoch", step)):
                    self._schedule.step()
        if self._scaler.is_enabled() and saved.get("loss_scale"):
            scale = saved["loss_scale"]
            own = {"scale": scale["scale"], "_growth_tracker": scale["growth_tracker"]}
            self._scaler.load_state_dict(self._scaler.state_dict() | own)
        self._data.source.go_to(step + 1, saved.get("data"))
        return step

    @property
    def seed(self) -> int:
        return self._job.training.seed

    @property
    def autocast(self) -> torch.dtype | None:
        name = AUTOCAST_DTYPES[self._job.training.precision]
        return None if name is None else getattr(torch, name)

    def forward_and_backward(self, step: int) -> PlainStep:
        """Losses and gradients of a step; parameters stay, buffers are updated."""
        leave_breadcrumb(f"step {step} of the plain model")
        for parameter in self.trained.values():
            parameter.grad = None
        losses, outputs, added = {}, {}, {}
        self._outputs = {}
        rows = {
            (worker, microbatch): self.rows(step, worker, microbatch)
            for worker in range(self._workers)
            for microbatch in range(self._microbatches)
        }
        scale = self._scaler.get_scale() if self._scaler.is_enabled() else None
        shares = self._shares({at: target for at, (_, target) in rows.items()})
        before = dict.fromkeys(self.trained, self._probes.of(None))
        for worker in range(self._workers):
            self._use_buffers(worker)
            for microbatch in range(self._microbatches):
                at = (worker, microbatch)
                loss, outputs[at] = self._run(step, at, *rows[at], shares[at])
                if loss.requires_grad:
                    self._scaler.scale(loss / self._microbatches).backward()
                losses[at] = float(loss.detach())
                now = {name: self._probes.of(p.grad) for name, p in self.trained.items()}
                added[at] = {name: now[name] - before[name] for name in now}
                before = now
            self.buffers[worker] = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._scaler.unscale_(self.optimizer)
        self._scaler.update()
        gradients = {
            name: p.grad.detach() / self._workers for name, p in self.trained.items() if p.grad is not None
        }
        norms = [torch.linalg.vector_norm(real_view(g), dtype=torch.float64) for g in gradients.values()]
        norm = float(torch.stack(norms).square().sum().sqrt()) if norms else 0.0
        leave_breadcrumb("")
        rate = float(self.optimizer.param_groups[0]["lr"])
        return PlainStep(losses, outputs, added, gradients, norm, rate, tuple(self.parameters), scale)

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """The optimizer's step, and its schedule's, by these gradients, which are clipped already."""
        for name, parameter in self.trained.items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone()
        self.optimizer.step()
        if self._schedule is not None:
            self._schedule.step()

    def try_updates(
        self,
        names: Sequence[str],
        before: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        steps: int,
        seed: int = 0,
    ) -> dict[str, TriedUpdate]:
        """The parameters `names` after `steps` updates from `before` by an optimizer of these parameters alone: by the
        gradients, and then by random multiples of their elements. Changes nothing of this model."""
        parameters = {name: nn.Parameter(before[name].detach().clone()) for name in names}
        with seeded(seed):
            optimizer = make_optimizer(self._job.optimizer, list(parameters.values()), list(names))
            for step in range(steps):
                for name, parameter in parameters.items():
                    gradient = gradients.get(name)
                    parameter.grad = None if gradient is None else gradient * _multiples(gradient, name, step)
                optimizer.step()
        settings = {p: group for group in optimizer.param_groups for p in group["params"]}
        return {
            name: TriedUpdate(p.detach(), settings.get(p, {}), type(optimizer).__name__)
            for name, p in parameters.items()
        }

    def _shares(self, targets: Mapping[tuple[int, int], Target]) -> dict[tuple[int, int], float]:
        """The weight of each microbatch: 1, or relative to the mean where tokens count alike."""
        count = target_counter(self._job, self._loss)
        if count is None:
            return dict.fromkeys(targets, 1.0)
        tokens = {at: float(count(target)) for at, target in targets.items()}
        total = sum(tokens.values())
        return {at: number * len(tokens) / total if total > 0 else 0.0 for at, number in tokens.items()}

    def _run(
        self, step: int, at: tuple[int, int], inputs: tuple[Tensor, ...], target: Target, share: float
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the probes of the outputs before it, which may change them."""
        worker, microbatch = at
        key = RngKey(self._job.training.seed, worker, step, microbatch)
        # for what draws outside of the graph, so that a proof repeats
        with seeded(derive_seed(self.seed, "plain", worker, step, microbatch)), mark_checkpoint_regions():
            calls = self._calls_of_shapes.get(input_shapes(inputs), self._calls)
            with self._autocast(), replay_rng(self.model, calls, key, shared=self._shared_draws(key)):
                output = self.model(*inputs)
            returned = output if isinstance(output, tuple) else (output,)
            made = [self._probes.of(one) for one in returned]
            self._keep_outputs(at, returned)
            versions = [one._version for one in target_tensors(target)]
            loss = self._call_loss(output, target, share)
        self.loss_changes_target |= versions != [one._version for one in target_tensors(target)]
        return loss, made

    def _keep_outputs(self, at: tuple[int, int], outputs: tuple[Tensor, ...]) -> None:
        """Until the next step, for the loss of the whole batch, unless those of all microbatches are too much."""
        microbatches = self._workers * self._microbatches
        if microbatches * sum(one.nbytes for one in outputs) > _MOST_BATCH_BYTES:
            self._outputs = None
        elif self._outputs is not None:
            self._outputs[at] = tuple(one.detach().clone() for one in outputs)

    def losses_again(
        self, step: int, at: tuple[int, int], outputs: Sequence[Tensor], times: int
    ) -> list[float]:
        """Losses of these outputs of the model, each with other random numbers, where the loss changes no target."""
        rows = {
            (worker, microbatch): self.rows(step, worker, microbatch)[1]
            for worker in range(self._workers)
            for microbatch in range(self._microbatches)
        }
        share, losses = self._shares(rows)[at], []
        for seed in range(times):
            own = tuple(output.detach().clone() for output in outputs)
            with seeded(seed):
                loss = self._call_loss(own[0] if len(own) == 1 else own, rows[at], share)
            losses.append(float(loss.detach()))
        return losses

    def batch_loss(self, step: int) -> BatchLoss:
        """The loss of all rows of the step just made at once, beside those of its microbatches, from the same outputs.

        A model that returns its own loss is run again, in eval mode. Changes nothing of this model. Raises
        NotComparableError."""
        rows = {
            (worker, microbatch): self.rows(step, worker, microbatch)
            for worker in range(self._workers)
            for microbatch in range(self._microbatches)
        }
        shares = self._shares({at: target for at, (_, target) in rows.items()})
        if not any(shares.values()):
            raise NotComparableError(f"step {step} has no target")
        leave_breadcrumb(f"step {step}, the loss of its whole batch")
        try:
            if self._job.loss is None:
                with self._in_eval_mode():
                    return self._batch_loss(self._model_loss, list(rows.values()), shares)
            if self._outputs is None:
                raise NotComparableError(f"the outputs of a batch have more than {_MOST_BATCH_BYTES:,} bytes")
            # one of its own: a loss may count its calls
            loss = make_loss(self._job.loss).with_output_spec(self._interface.tree_spec)
            seen = in_float32([(self._outputs[at], target) for at, (_, target) in rows.items()])
            return self._batch_loss(loss, seen, shares)
        except NotComparableError:
            raise
        except Exception as error:
            raise NotComparableError(f"of all rows it raises {type(error).__name__}: {error}") from error
        finally:
            leave_breadcrumb("")

    @torch.no_grad()
    def _batch_loss(self, loss: Loss, seen: Sequence[Rows], shares: Mapping[Any, float]) -> BatchLoss:
        """`seen` are the rows of each microbatch, weighed by `shares`."""
        batch = batch_of(seen)
        if batch is None:
            raise NotComparableError("outputs, or targets, have no rows of samples")
        together = loss_of_rows(loss, batch)
        if not math.isfinite(together):
            raise NotComparableError("it is not finite")
        if loss_of_rows(loss, batch, seed=1) != together:
            raise NotComparableError("it draws random numbers")
        pairs = [
            (loss_of_rows(loss, own), share)
            for own, share in zip(seen, shares.values(), strict=True)
            if share
        ]
        apart = sum(part * share for part, share in pairs) / len(shares)
        tolerance = max(TOLERANCE, tolerance_for(self.model, None, "cpu").values)
        return BatchLoss(together, apart, tuple(part for part, _ in pairs), tolerance)

    @contextlib.contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """The model in eval mode in the body; afterwards its Python state and its buffers are what they were."""
        state, buffers = PythonState(self.model), BufferSnapshot(self.model)
        try:
            with in_eval_mode(self.model):
                yield
        finally:
            state.restore()
            buffers.restore()

    def _model_loss(self, inputs: Tensor | tuple[Tensor, ...], _: Target) -> Tensor:
        return self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)

    def _call_loss(self, output: Tensor | tuple[Tensor, ...], target: Target, share: float) -> Tensor:
        with self._autocast():
            loss = self._loss.with_output_spec(self._interface.tree_spec)
            return loss(output, target) * share if share else zero_loss(output)

    def _autocast(self) -> contextlib.AbstractContextManager:
        return (
            contextlib.nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast)
        )

    def _shared_draws(self, key: RngKey) -> HeterogeneousDraws | None:
        return HeterogeneousDraws(self._of_meshes, key, workers=self._workers) if self._of_meshes else None

    def rows(
        self, step: int, worker: int, microbatch: int, workers: int | None = None
    ) -> tuple[tuple[Tensor, ...], Target]:
        """The rows of one of `size` workers: a block of the rows of the microbatch."""
        if self._whole is None or self._whole[0] != step:
            read = [self._data.read(step, m, BatchSlice(0, 1)).rows for m in range(self._microbatches)]
            self._whole = step, read
        inputs, targets = self._whole[1][microbatch]
        share = len(targets) // (workers or self._workers)
        own = slice(worker * share, (worker + 1) * share)
        return tuple(tensor[own] for tensor in inputs), targets[own]

    @torch.no_grad()
    def _use_buffers(self, worker: int) -> None:
        own = self.buffers[worker]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(own[name])


def _multiples(gradient: Tensor, name: str, step: int) -> Tensor:
    """The factors by which a trial multiplies a gradient: 1 in its first step, then random numbers."""
    if step == 0:
        return torch.ones_like(gradient)
    generator = torch.Generator().manual_seed(derive_seed(name, step))
    return torch.randn(gradient.shape, generator=generator).to(gradient)


def _make_grad_scaler(training: Training) -> torch.amp.GradScaler:
    """torch's own; one that does nothing where losses are not scaled."""
    init_scale = (training.loss_scaling or LossScaling()).init_scale
    return torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=training.precision == FP16)
