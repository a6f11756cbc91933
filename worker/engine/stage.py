"""Runs the compute actions of one stage with autograd: F, B, I and W of a microbatch.

The tensors that they take from the step state and leave there are in stage_io.py. The user's code raises here: its errors
become StageError with action, stage and microbatch. Token weights are summed over workers before the RNG lock
is taken, as others may wait for it. Must not know lanes, events or transports.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from worker.contract.failures import leave_breadcrumb
from worker.contract.planned import RecomputeMethod
from worker.engine.autograd import WeightBackward, backward_input
from worker.engine.forward import (
    ForwardResult,
    StageArguments,
    gather_arguments,
    is_compiled,
    keeping_no_tensors,
    run_forward,
)
from worker.engine.recomputation.blocks import Backward, StageBlocks
from worker.engine.recomputation.inputs import RecomputeInputs, UpdatedBuffers, save_recompute_inputs
from worker.engine.recomputation.products import KeptProducts, StageProducts
from worker.engine.results import StageError
from worker.engine.routes import StageWiring
from worker.engine.spot_check import ForwardCheck, Spot
from worker.engine.stage_io import (
    BackwardRoot,
    ComputeSettings,
    SavedForward,
    StageObserver,
    StageTensors,
    StepState,
)
from worker.model.opaque.call import opaque_calls
from worker.model.pytree import zero_loss
from worker.model.rng import RNG_LOCK, RandomState, reseed_at_random_ops, seeded
from worker.transport.base import PeerLostError

# Of a stage in which modules run as they are: how many operations those have cannot be seen.
_LAUNCHES_OF_OPAQUE = 1000


class StageRunner:
    """One stage of this mesh. With `recompute` F keeps the stage's inputs only, and B (or I) runs it again: with the results
    of products that F kept besides ("selective"), or block after block, from what F kept of their inputs ("by_block")."""

    def __init__(
        self,
        wiring: StageWiring,
        module: nn.Module,
        state: StepState,
        settings: ComputeSettings,
        *,
        recompute: RecomputeMethod | None = None,
    ):
        self._stage = wiring.stage
        self._tensors = StageTensors(wiring, state, settings)
        self.wiring = wiring
        self._module = module
        self._state = state
        self._settings = settings
        self._saved: dict[int, SavedForward] = {}
        self._weights: dict[int, tuple[WeightBackward, RecomputeInputs | None]] = {}
        self._recompute = recompute is not None and settings.training
        self._selective = self._recompute and recompute == "selective"
        self._buffers = UpdatedBuffers(module)
        self._whole_backward = bool(opaque_calls(module))
        self._check: ForwardCheck | None = None
        self._products = StageProducts()
        self._random: RandomState | None = None
        keeps = settings.keeps_random
        if settings.seed is not None and (settings.training or keeps):
            random = RandomState(settings.seed, settings.worker, settings.device, keeps=keeps)
            operations = reseed_at_random_ops(module, random)
            # a traced stage shows its random operations: without one it needs no state
            self._random = random if operations != 0 or (keeps and self._has_loss) else None
        # where nothing changes the graph any more
        if self._selective:
            self._products.find(module)
        self._blocks = _blocks_of(module) if self._recompute and recompute == "by_block" else None

    def observe(self, observer: StageObserver | None) -> None:
        """Report to `observer` from now on what this stage does."""
        self._tensors.observer = observer

    def check_forward(self, spot: Spot) -> ForwardCheck:
        """Compute the forward of `spot` again in the step that comes."""
        names = [wiring.tensor for wiring in self.wiring.outputs]
        settings = self._settings
        self._check = ForwardCheck(
            spot, self._module, names, autocast=settings.autocast_dtype, device=settings.device
        )
        return self._check

    def reset(self) -> None:
        """Forget the microbatches of the last step."""
        self._check = None
        self._saved.clear()
        self._weights.clear()

    @property
    def with_gradients(self) -> tuple[bool, ...]:
        """Flags of the forwards of a microbatch: with gradients or not. A recomputed stage has (False, True)."""
        if not self._settings.training:
            return (False,)
        return (False, True) if self._recompute else (True,)

    @property
    def runs_by_block(self) -> bool:
        """True where the backward runs the stage's blocks again, one at a time."""
        return self._blocks is not None

    def launches(self, op: str) -> int:
        """About how many kernels F, B, I or W of a microbatch enqueues: one for each operation of the graph, twice as many
        in a backward, one for each parameter in W; of modules that run as they are as many as a stream takes."""
        if opaque_calls(self._module):
            return _LAUNCHES_OF_OPAQUE
        if op == "W":
            return sum(1 for _ in self._module.parameters())
        forward = sum(
            sum(node.op.startswith("call_") for node in part.graph.nodes)
            if isinstance(part, fx.GraphModule)
            else 1
            for part in self._module.modules()
        )
        return forward if op == "F" else (3 if self._recompute else 2) * forward

    def forward(self, microbatch: int) -> None:
        """F: run the module, check its outputs, hand them on; the loss if the model's output is here."""
        with self._reported("F", microbatch):
            settings = self._settings
            arguments = gather_arguments(
                self.wiring.inputs,
                functools.partial(self._tensors.fetch, microbatch=microbatch),
                training=settings.training,
            )
            recompute_inputs = None
            if self._recompute:
                recompute_inputs = save_recompute_inputs(
                    arguments, self._buffers, selective=self._selective, by_block=self._blocks is not None
                )
            if check := self._check_of(microbatch):
                check.begin(arguments, self._buffers)

            def accept(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                outputs = self._accept(results)
                self._tensors.observe_outputs(outputs, microbatch)
                if check:
                    # the loss may change what the model returned
                    check.keep([output.clone() for output in outputs] if self._has_loss else outputs)
                return outputs

            run = self._run(
                arguments.values,
                microbatch,
                training=settings.training,
                again=recompute_inputs,
                accept=accept,
            )
            if recompute_inputs is not None:
                recompute_inputs.check_unchanged()
            saved = SavedForward(arguments.leaves, arguments.sources, {}, run.loss, recompute_inputs)
            for wiring, output in zip(self.wiring.outputs, run.outputs, strict=True):
                self._tensors.hand_on(wiring, output, microbatch, saved)
            if settings.training:
                self._saved[microbatch] = saved

    def backward(self, microbatch: int) -> None:
        """B: gradients of inputs and parameters."""
        with self._reported("B", microbatch):
            self._check_again(microbatch)
            saved = self._saved.pop(microbatch)
            with self._restored_to(saved.recompute_inputs):
                step = self._run_again(saved, microbatch, whole=True)
                roots, gradients = self._tensors.roots(saved, microbatch)
                found, _ = step(roots, gradients, saved.leaves)
                self._tensors.pass_back(saved, found, microbatch)

    def backward_input(self, microbatch: int) -> None:
        """I: gradients of inputs. The activations stay until W."""
        with self._reported("I", microbatch):
            self._check_again(microbatch)
            saved = self._saved.pop(microbatch)
            with self._restored_to(saved.recompute_inputs):
                step = self._run_again(saved, microbatch, whole=self._whole_backward)
                roots, gradients = self._tensors.roots(saved, microbatch)
                input_gradients, weights = step(roots, gradients, saved.leaves)
                self._weights[microbatch] = weights, saved.recompute_inputs
                self._tensors.pass_back(saved, input_gradients, microbatch)

    def backward_weight(self, microbatch: int) -> None:
        """W: gradients of parameters."""
        with self._reported("W", microbatch):
            weights, recompute_inputs = self._weights.pop(microbatch)
            with self._restored_to(recompute_inputs):
                weights.run()

    def _run(
        self,
        values: Sequence[torch.Tensor],
        microbatch: int,
        *,
        training: bool,
        module: nn.Module | None = None,
        again: RecomputeInputs | None = None,
        taking: KeptProducts | None = None,
        before_loss: torch.Tensor | None = None,
        accept: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> ForwardResult:
        """Run the stage (or `module` for it), and the loss where the model's output is, `taking` what an earlier run has
        kept. What will be run `again` for its backward keeps its products or the inputs of its blocks at most, and leaves
        the loss, which may count its calls, to that run."""
        state, settings = self._state, self._settings
        loss = None
        if state.targets is not None and again is None:
            loss = functools.partial(self._loss, microbatch=microbatch)
            if before_loss is not None:
                loss = functools.partial(self._draw_from, before_loss, loss)
            if settings.weights is not None and state.weights is None and self._has_loss:
                # workers may sum here: not while this one has the generators, for which others may wait
                state.weights = settings.weights(state.targets)
        run_module, records = module or self._module, training  # a graph
        products = contextlib.nullcontext() if taking is None else self._products.taking(taking)
        if again is not None and again.products is not None:
            products = self._products.keeping(again.products)
        elif again is not None and again.blocks is not None:
            # a graph of it tells which inputs of blocks take a gradient
            run_module = functools.partial(
                self._blocks.run, kept=again.blocks, model_outputs=self.wiring.model_outputs
            )
        elif again is not None:
            # without gradients nothing asks for one: a compiled stage has one graph for such forwards and for evaluations
            values, records = [value.detach() for value in values], training and self._can_share_casts
        has_no_backward = again is not None and records
        # a module that runs as it is may take derivatives itself, and holds tensors until its block has run
        holds_none = has_no_backward and not self._whole_backward
        with (
            self._random_state(microbatch),
            products,
            keeping_no_tensors() if holds_none else contextlib.nullcontext(),
        ):
            run = run_forward(
                run_module,
                values,
                device_type=settings.device.type,
                training=records,
                autocast_dtype=settings.autocast_dtype,
                accept=accept or self._accept,
                loss_of=self.wiring.model_outputs,
                loss=loss,
            )
            if again is not None and again.blocks is not None and self._random is not None and self._has_loss:
                again.generator_state = self._random.generator_state()
        if has_no_backward:
            run = ForwardResult([output.detach() for output in run.outputs], None)
        if run.loss is not None:
            state.losses[microbatch] = run.loss.detach()
        return run

    @property
    def _can_share_casts(self) -> bool:
        """True if forwards may record a graph that keeps nothing: torch's compiler and users' own functions may keep
        tensors in ways of their own."""
        if self._settings.autocast_dtype is None or self._whole_backward:
            return False
        return not is_compiled(self._module)

    @property
    def _has_loss(self) -> bool:
        return bool(self.wiring.model_outputs)

    def _run_again(self, saved: SavedForward, microbatch: int, *, whole: bool) -> Backward:
        """Run the forward of a recomputed stage once more, with gradients now; by block, its last block. Returns the
        backward of the stage, in one piece or all but W."""
        step = functools.partial(backward_input, whole=whole)
        if (inputs := saved.recompute_inputs) is None:
            return step
        values = inputs.take_arguments().values
        if inputs.blocks is None:
            run = self._run(values, microbatch, training=True, taking=inputs.take_products())
        else:
            kept = inputs.take_blocks()
            last = self._blocks.last(values, kept, model_outputs=self.wiring.model_outputs)
            run = self._run(
                last.arguments,
                microbatch,
                training=True,
                module=last,
                accept=list,  # the first run has checked them, and of some no value is kept
                before_loss=inputs.generator_state,
            )
            step = functools.partial(
                self._blocks.backward,
                kept,
                last,
                run=functools.partial(self._run_block, microbatch=microbatch),
                backward=step,
            )
        saved.loss = run.loss
        for wiring, output in zip(self.wiring.outputs, run.outputs, strict=True):
            if wiring.local_consumers or wiring.routes:
                # the tensor itself: a backward by block tells values that it keeps by what they are
                start = output if output.requires_grad else None
                saved.roots[wiring.tensor] = BackwardRoot(start, output.dtype)
        return step

    def _run_block(
        self, block: nn.Module, values: Sequence[torch.Tensor], microbatch: int
    ) -> Sequence[torch.Tensor]:
        """Run a block of the stage again; returns what it makes."""
        settings = self._settings
        with self._random_state(microbatch):
            return run_forward(
                block,
                values,
                device_type=settings.device.type,
                training=True,
                autocast_dtype=settings.autocast_dtype,
            ).outputs

    def _check_of(self, microbatch: int) -> ForwardCheck | None:
        check = self._check
        return check if check is not None and check.microbatch == microbatch else None

    def _check_again(self, microbatch: int) -> None:
        """Run the forward that is checked once more; buffers and random generators are then as if it had not run."""
        if not (check := self._check_of(microbatch)):
            return

        def run(arguments: StageArguments) -> list[torch.Tensor]:
            if self._random is not None:
                self._random.begin(self._state.step, microbatch)
                self._random.restart(f"stage {self._stage}")
            settings = self._settings
            return run_forward(
                self._module,
                arguments.values,
                device_type=settings.device.type,
                training=False,
                autocast_dtype=settings.autocast_dtype,
                accept=self._accept,
            ).outputs

        with seeded(0):
            check.run_again(self._buffers, run)

    def _restored_to(self, recompute_inputs: RecomputeInputs | None) -> contextlib.AbstractContextManager:
        return (
            contextlib.nullcontext()
            if recompute_inputs is None
            else self._buffers.restored_to(recompute_inputs)
        )

    def _accept(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Check the outputs and copy those in receive buffers. ValueError for another shape than the traced one."""
        outputs = []
        for wiring, result in zip(self.wiring.outputs, results, strict=True):
            if wiring.shape is not None and tuple(result.shape) != wiring.shape:
                raise ValueError(
                    f"output {wiring.tensor!r} has shape {tuple(result.shape)}, traced as {wiring.shape}: "
                    "every microbatch must have the shape of the traced one"
                )
            # An input handed through: its buffer may be taken again while others still use this output.
            outputs.append(result.clone() if self._settings.is_pooled(result) else result)
        return outputs

    def _draw_from(
        self, generator_state: torch.Tensor, loss: Callable[[Any], torch.Tensor], output: Any
    ) -> torch.Tensor:
        """The loss of `output`, which draws what it would draw behind the whole stage."""
        if self._random is not None:
            self._random.go_on_from(generator_state)
        return loss(output)

    def _loss(self, output: torch.Tensor | tuple[torch.Tensor, ...], microbatch: int) -> torch.Tensor:
        state = self._state
        weight = 1.0 if state.weights is None else state.weights[microbatch]
        if weight == 0:  # a mean of nothing is no number, and its gradient none either
            state.metrics[microbatch] = {}
            return zero_loss(output)
        value = self._settings.loss(output, state.targets[microbatch])
        loss, metrics = value if isinstance(value, tuple) else (value, {})
        tensors = {name: _metric_tensor(metric, loss.device) for name, metric in metrics.items()}
        if state.weights is not None:
            loss, tensors = loss * weight, {name: metric * weight for name, metric in tensors.items()}
        state.metrics[microbatch] = tensors
        return loss

    def _random_state(self, microbatch: int) -> contextlib.AbstractContextManager:
        if self._random is None:
            # No operation of the stage draws, but a user's loss may.
            with_loss = self._has_loss and self._state.targets is not None
            return RNG_LOCK if with_loss else contextlib.nullcontext()
        return self._random.forward(self._state.step, microbatch, self._stage)

    @contextlib.contextmanager
    def _reported(self, action: str, microbatch: int):
        leave_breadcrumb(f"{self._stage}{action}{microbatch} of step {self._state.step}")
        try:
            yield
            if (observer := self._tensors.observer) is not None:
                observer.on_action_end(action, self._stage, microbatch)
            leave_breadcrumb("")
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


def _blocks_of(module: nn.Module) -> StageBlocks | None:
    """The blocks of a stage; None where its graph does not tell them apart."""
    body = getattr(module, "body", None)
    blocks = StageBlocks(body) if isinstance(body, fx.GraphModule) else None
    return blocks if blocks is not None and len(blocks) > 1 else None


def _metric_tensor(metric: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """`metric` as float64 on `device`, without a copy that the device waits for."""
    if isinstance(metric, torch.Tensor):
        return metric.detach().to(device, torch.float64)
    return torch.full((), float(metric), dtype=torch.float64, device=device)
