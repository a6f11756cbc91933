"""Checks before the first step that the stages of an exported model compute what the model itself computes.

On one microbatch it compares outputs, loss, buffers after the forward and the gradient of every parameter; the
graph runs cut at every border where it may be cut, as stages run. Then both run about twenty rounds more, on further
microbatches, their rows in other orders, and with the Python state that the model left, so that what changes late is seen.
The graph of the model in eval mode is compared once. Raises TraceError with the first tensor that differs and the likely
reason. The model's parameters, buffers and gradients are restored afterwards, and its Python state where that is possible.
Knows no jobs and no meshes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from worker.checks import hazards
from worker.checks.loss_reduction import Rows
from worker.contract.failures import is_out_of_memory, leave_breadcrumb
from worker.contract.profile import TraceError
from worker.data.microbatches import MicrobatchTensors
from worker.engine.forward import ForwardResult, drop_casts, run_forward
from worker.model.checkpoint_regions import mark_checkpoint_regions
from worker.model.eval_mode import in_eval_mode
from worker.model.export import TracedModel
from worker.model.hf_patches import PATCHED_FUNCTION_NAMES
from worker.model.parity import (
    Mismatch,
    Outcome,
    Tolerance,
    compare,
    first_mismatch,
    gradient_floor,
    gradient_pair,
    tolerance_for,
)
from worker.model.pytree import Target, Targets, target_tensors
from worker.model.rng import RandomState, reseed_at_random_ops, seeded
from worker.model.rng_ops import RngKey, RngOp, replay_rng, traced_rng_ops
from worker.model.side_effects.eager import BufferSnapshot
from worker.model.side_effects.python_state import Movement, PythonState
from worker.model.stages import StageBuilder, StageModule, input_name

Loss = Callable[[Any, Target], Tensor]


_SEED = 0x51071
# How often model and stages run again; after so many seconds no more than the least rounds.
ROUNDS = 20
LEAST_ROUNDS = 3
ROUNDS_BUDGET_S = 10.0
# Every so many rounds, and in the last, gradients are compared too.
_ROUNDS_PER_GRADIENTS = 4


class OwnBackwardError(TraceError):
    """A gradient differs, and the model calls autograd functions with backwards of their own, which a trace loses."""


@dataclass(frozen=True)
class _ModelRun:
    """The results of one forward and backward; parameters and buffers (`state`) are as the forward left them."""

    outputs: tuple[Tensor, ...]
    loss: Tensor
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def trace_check_bytes(model: nn.Module, traced: TracedModel, device: str) -> int:
    """The bytes that `check_trace` takes at most, beside the model where it is: copies of all parameters, two sets
    of gradients, and every value of the graph.
    """
    parameters = sum(p.nbytes for p in model.parameters())
    values = [value for value in traced.placed.values.values() if isinstance(value, Tensor)]
    copies = 3 if device == "cpu" else 4
    return copies * parameters + sum(value.numel() * value.element_size() for value in values)


def check_trace(
    model: nn.Module,
    traced: TracedModel,
    make_loss: Callable[[], Loss],
    target: Target,
    *,
    further: Sequence[MicrobatchTensors] = (),
    check_loss: Callable[[Sequence[Rows], Sequence[MicrobatchTensors]], list[str]] | None = None,
    device: str = "cpu",
) -> list[str]:
    """Compare `traced` with `model` on its example inputs; `target` belongs to them. What to tell of it, in notes.
    `check_loss` is given what the model returned for some microbatches and these microbatches, with the model on `device`,
    and adds its notes.

    Later rounds take the rows of `further` microbatches of the same shapes as well.

    `make_loss` is called once for each of both. The model's parameters, buffers and gradients are afterwards what
    they were, as is the Python state that its forward reaches, generators of Python code and the like aside. Raises
    TraceError, naming the first tensor that differs (gradients in the order of a backward), by how much, and the likely
    reason.
    """
    hazards.check_gradient_hooks(model)
    if device == "cpu":
        hazards.check_group_norms(traced.placed.module, traced.placed.values)
    leave_breadcrumb("the comparison of the traced model with the model itself")
    tolerance = tolerance_for(model, traced.placed.autocast, device)
    place = _context_of(traced, target, device, further)
    try:
        with _model_on_device(model, device) as buffers:
            stages = _Stages(traced, device)  # before forward changes anything
            comparison = _Comparison(model, traced, stages, (make_loss(), make_loss()), tolerance, buffers)
            notes = comparison.run(place)
            if check_loss is not None:
                notes += check_loss(comparison.seen, [(place.inputs, place.target), *place.further])
    finally:
        drop_casts()
        leave_breadcrumb("")
    return [*traced.notes, *notes]


def check_evaluation_trace(
    model: nn.Module,
    traced: TracedModel,
    make_loss: Callable[[], Loss],
    target: Target,
    *,
    device: str = "cpu",
) -> None:
    """Compare `traced`, made of the model in eval mode, with the model in eval mode: outputs, loss and buffers of one
    microbatch, without gradients. The model is afterwards what it was. TraceError names what differs."""
    leave_breadcrumb("the comparison of the trace in eval mode with the model itself")
    place = _context_of(traced, target, device)
    state = PythonState(model)
    try:
        with _model_on_device(model, device) as buffers, in_eval_mode(model):
            stages = _Stages(traced, device)
            losses = (make_loss(), make_loss())
            comparison = _Comparison(
                model, traced, stages, losses, tolerance_for(model, traced.placed.autocast, device), buffers
            )
            comparison.run_without_gradients(place)
    except TraceError as error:
        raise TraceError(f"in eval mode, which `evaluation` needs: {error}") from error
    finally:
        state.restore()
        drop_casts()
        leave_breadcrumb("")


def _context_of(
    traced: TracedModel, target: Target, device: str, further: Sequence[MicrobatchTensors] = ()
) -> _RunContext:
    return _RunContext(
        torch.device(device),
        tuple(value.to(device) for value in traced.example_inputs),
        target.to(device),
        traced.placed.autocast,
        traced_rng_ops(traced, device),
        tuple((tuple(value.to(device) for value in inputs), own.to(device)) for inputs, own in further),
    )


class _Comparison:
    """The comparison of a model with its stages: once with trials of what its forward moves, then in rounds.

    `losses` are that of the model and that of the stages, `buffers` those of the model before the first forward.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: TracedModel,
        stages: _Stages,
        losses: tuple[Loss, Loss],
        tolerance: Tolerance,
        buffers: BufferSnapshot,
    ):
        self._model, self._stages, self._tolerance, self._buffers = model, stages, tolerance, buffers
        self._loss, self._stages_loss = losses
        self.seen: list[Rows] = []
        """What the model returned for the first microbatches that it was given, and their targets."""
        count = len(traced.placed.outputs)
        self._outputs = range(count)
        self._names = (
            traced.tree_spec.names if traced.tree_spec else [str(k) if k else "" for k in range(count)]
        )
        persistent = traced.placed.persistent
        self._untouched = {name: t for name, t in buffers.before.items() if name in persistent}

    def run(self, place: _RunContext) -> list[str]:
        """Notes on what was compared; the Python state of the model is put back."""
        before = PythonState(self._model)
        try:
            moved, functions, trials = self._compare_first(place)
            backward_notes = self._try_backward(place, functions)
            notes = self._compare_rounds(place, moved, functions)
        finally:
            before.restore()
        own = [one for one in functions if one not in PATCHED_FUNCTION_NAMES]
        return [*hazards.hazard_notes(moved, trials, own), *backward_notes, *notes]

    def run_without_gradients(self, place: _RunContext) -> None:
        """Compare one forward of a model in eval mode."""
        run = _forward(self._model, self._loss, place, self._outputs, training=False)
        made = tuple(output.detach() for output in run.outputs)
        state = {name: t.detach().clone() for name, t in self._model.named_buffers()}
        expected = _ModelRun(made, run.loss.detach(), {}, state)
        found = self._stages.run(self._stages_loss, place, self._untouched, backward=False, training=False)
        self._compare(expected, found, _UNTRACED_EFFECTS, ())

    def _try_backward(self, place: _RunContext, functions: Sequence[str]) -> list[str]:
        """Notes on what backwards of a user's own move; refuses what gradients depend on."""
        if not functions:
            return []
        model, outputs, tolerance = self._model, self._outputs, self._tolerance.gradients
        watch = hazards.SideEffectWatch(model)
        self._buffers.restore()
        expected, _ = _run_model(model, self._loss, place, outputs, watch_backward=watch)
        moved, different = watch.moved, []

        def gradients_of(context: _RunContext, prepare: Callable[[], None] | None) -> dict[str, Tensor]:
            self._buffers.restore()
            found, _ = _run_model(model, self._loss, context, outputs, prepare_backward=prepare)
            return found.gradients

        def differs(prepare: Callable[[], None] | None) -> bool:
            different[:] = _different_gradients(expected.gradients, gradients_of(place, prepare), tolerance)
            return bool(different)

        trials = hazards.DependenceTrials(
            model, moved, differs, lambda: gradients_of(place.with_other_values(), None), by="backward"
        )
        if trials.dependence is not None:
            raise OwnBackwardError(
                f"the gradient of {different[0]!r} does not only follow from the autograd function "
                f"{', '.join(functions)} as torch.library.custom_op with register_autograd would keep it: it depends on "
                f"{trials.dependence}; {hazards.SKIP_CHECK_HINT}"
            )
        moved.before.restore()
        return hazards.hazard_notes(moved, trials, by="backward")

    def _compare_first(
        self, place: _RunContext
    ) -> tuple[hazards.ForwardSideEffects, list[str], hazards.DependenceTrials]:
        model = self._model
        watch = hazards.SideEffectWatch(model)
        expected, functions = _run_model(model, self._loss, place, self._outputs, watch)
        self.seen.append((expected.outputs, place.target))
        moved = watch.moved

        def differs(prepare: Callable[[], None] | None) -> bool:
            self._buffers.restore()
            return _rerun_differs(model, place, expected.outputs, prepare, self._tolerance.values)

        def run_other() -> None:
            self._buffers.restore()
            _rerun_differs(model, place.with_other_values(), expected.outputs, None, self._tolerance.values)

        if moved.hooks:
            raise TraceError(
                f"forward puts a hook on the gradient of a tensor ({moved.hooks[0]}), which no stage calls: "
                f"torch.library.custom_op takes a backward of its own; {hazards.SKIP_CHECK_HINT}"
            )
        trials = hazards.DependenceTrials(model, moved, differs, run_other)
        if trials.dependence is not None:
            raise TraceError(
                f"the result of {type(model).__name__}.forward depends on {trials.dependence}; {hazards.SKIP_CHECK_HINT}"
            )
        try:
            found = self._stages.run(self._stages_loss, place, self._untouched)
        except RuntimeError as error:  # such as of a tensor that changed in place before autograd's backward
            own = [one for one in functions if one not in PATCHED_FUNCTION_NAMES]
            if is_out_of_memory(error) or not own:
                raise
            raised = f"the traced model raised {type(error).__name__}: {error}, and the model itself did not"
            raise OwnBackwardError(f"{raised}: {_lost_backward(own)}") from error
        functions = [one for one in functions if one not in self._stages.functions]
        self._compare(expected, found, _UNTRACED_EFFECTS, functions)
        moved.after.restore()
        return moved, functions, trials

    def _compare_rounds(
        self, place: _RunContext, moved: hazards.ForwardSideEffects, functions: Sequence[str]
    ) -> list[str]:
        """Compare in further forwards, between which Python state is left as it is."""
        begin = time.thread_time()
        longest_s = 0.0
        for number in range(1, ROUNDS + 1):
            started = time.thread_time()
            last = number == ROUNDS or (
                number >= LEAST_ROUNDS and started + 2 * longest_s > begin + ROUNDS_BUDGET_S
            )
            gradients = last or number % _ROUNDS_PER_GRADIENTS == 0
            self._compare_round(place.in_round(number), moved, functions, number, gradients=gradients)
            if last and number < ROUNDS:
                return [
                    f"the traced model was compared with the model itself in {number} rounds in place of {ROUNDS}, which "
                    f"would take more than {ROUNDS_BUDGET_S:g} s"
                ]
            longest_s = max(longest_s, time.thread_time() - started)
        return []

    def _compare_round(
        self,
        place: _RunContext,
        moved: hazards.ForwardSideEffects,
        functions: Sequence[str],
        number: int,
        *,
        gradients: bool,
    ) -> None:
        self._buffers.restore()
        try:
            expected, _ = _run_model(self._model, self._loss, place, self._outputs)
        except Exception as error:
            if is_out_of_memory(error) or not (changed := moved.before.moved_until(PythonState(self._model))):
                raise
            raised = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise TraceError(
                f"in forward number {number + 1} {type(self._model).__name__} raised {raised}; by then it had changed "
                f"{hazards.name_movements(changed)}, which a trace keeps as it was: keep such state in a buffer "
                f"(register_buffer) and compute with tensors; {hazards.SKIP_CHECK_HINT}"
            ) from error
        if number <= min(len(place.further), LEAST_ROUNDS):
            self.seen.append((expected.outputs, place.target))
        found = self._stages.run(self._stages_loss, place, self._untouched, backward=gradients)
        if not gradients:
            expected = replace(expected, gradients={}, state={})
        try:
            self._compare(expected, found, _UNTRACED_EFFECTS, functions)
        except TraceError as error:
            changed = moved.before.moved_until(PythonState(self._model))
            raise TraceError(_late_difference(error, number, changed, moved.draws)) from None

    def _compare(self, expected: _ModelRun, found: _ModelRun, reason: str, functions: Sequence[str]) -> None:
        _compare_runs(expected, found, self._names, self._stages.parameters, self._tolerance, functions)


def _late_difference(error: TraceError, number: int, changed: Sequence[Movement], draws: bool) -> str:
    """The message for a difference that came up after some equal rounds."""
    message = f"in forward number {number + 1} {error}"
    if not changed and not draws:
        return message
    reasons = []
    if changed:
        reasons.append(
            f"by then the model had changed {hazards.name_movements(changed)}, which a trace keeps as it was: keep such "
            "state in a buffer (register_buffer) and compute with tensors"
        )
    if draws:
        reasons.append("forward draws random numbers of Python or numpy: draw them with torch")
    if _UNTRACED_EFFECTS in message:
        return message.replace(_UNTRACED_EFFECTS, "; ".join(reasons))
    return message.replace(hazards.SKIP_CHECK_HINT, "; ".join([*reasons, hazards.SKIP_CHECK_HINT]))


@dataclass(frozen=True)
class _RunContext:
    """The device, inputs and random calls of both runs in a round.

    Each call draws by its name, since stages make them in the order of layers, and a model in that of its lines.
    """

    device: torch.device
    inputs: tuple[Tensor, ...]
    target: Target
    autocast: torch.dtype | None
    calls: Sequence[RngOp]
    further: tuple[MicrobatchTensors, ...] = ()
    round: int = 0

    def in_round(self, number: int) -> _RunContext:
        """The same for another round: for one microbatch after the other, with the rows in another order, and with other
        random numbers."""
        known = [(self.inputs, self.target), *self.further]
        # gradients are compared in every so many rounds, which are to come to all microbatches too
        inputs, target = known[(number + number // _ROUNDS_PER_GRADIENTS) % len(known)]
        place = replace(self, inputs=inputs, target=target)
        rows = len(inputs[0]) if inputs and inputs[0].dim() else 0
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(number)).to(self.device)
        return replace(place._with_values(lambda value: value[order], rows), round=number)

    def with_other_values(self) -> _RunContext:
        """Inputs that no round has: one row in all places, and half of the numbers that are not whole."""
        rows = len(self.inputs[0]) if self.inputs and self.inputs[0].dim() else 0

        def other(value: Tensor) -> Tensor:
            value = value[-1:].expand_as(value).clone()
            return value * 0.5 if value.is_floating_point() else value

        return replace(self._with_values(other, rows), round=ROUNDS + 1)

    def _with_values(self, make: Callable[[Tensor], Tensor], rows: int) -> _RunContext:
        def made(value: Tensor) -> Tensor:
            return make(value) if value.dim() and len(value) == rows else value

        target = self.target
        changed = (
            Targets(tuple(map(made, target.tensors)), target.tree_spec)
            if isinstance(target, Targets)
            else made(target)
        )
        return replace(self, inputs=tuple(map(made, self.inputs)), target=changed)

    def copied_target(self) -> Target:
        """The target, in tensors of its own."""
        if isinstance(self.target, Targets):
            return Targets(tuple(one.clone() for one in self.target.tensors), self.target.tree_spec)
        return self.target.clone()

    @property
    def seed(self) -> int:
        return _SEED + self.round

    def replayed(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A forward of the model draws as its graph does."""
        key = RngKey(_SEED, worker=0, step=self.round, microbatch=0)
        return replay_rng(model, self.calls, key, device=self.device.type, all_of_them=False)

    def random_state(self) -> RandomState:
        state = RandomState(_SEED, 0, self.device)
        state.begin(self.round, 0)
        return state


@contextlib.contextmanager
def _model_on_device(model: nn.Module, device: str) -> Iterator[BufferSnapshot]:
    """The model on `device` in the body; afterwards its buffers are what they were, and its gradients."""
    at_home = BufferSnapshot(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        if device != "cpu":
            model.to(device)
        yield BufferSnapshot(model) if device != "cpu" else at_home
    finally:
        for parameter, _ in gradients:
            parameter.grad = None
        if device != "cpu":
            model.to("cpu")
            torch.cuda.empty_cache()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        at_home.restore()


def _run_model(
    model: nn.Module,
    loss: Loss,
    place: _RunContext,
    outputs: Sequence[int],
    watch: contextlib.AbstractContextManager[Any] | None = None,
    watch_backward: contextlib.AbstractContextManager[Any] | None = None,
    prepare_backward: Callable[[], None] | None = None,
) -> tuple[_ModelRun, list[str]]:
    """The outcome of the model itself at `outputs`, and the names of custom autograd functions that it called; `watch` is
    entered for its forward, `watch_backward` for its backward, before which `prepare_backward` is called.
    """
    run = _forward(model, loss, place, outputs, watch)
    state = {name: t.detach().clone() for name, t in model.named_buffers()}
    state |= {name: p.detach() for name, p in model.named_parameters()}
    if not run.loss.requires_grad:
        raise TraceError(
            f"the loss of {type(model).__name__} depends on no parameter that is trained: is its output detached, or "
            "does the loss not use it?"
        )
    functions = list(
        dict.fromkeys(name for one in run.outputs for name in hazards.custom_autograd_functions(one))
    )
    if prepare_backward is not None:
        prepare_backward()
    with watch_backward or contextlib.nullcontext():
        run.loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    made = tuple(output.detach() for output in run.outputs)
    return _ModelRun(made, run.loss.detach(), gradients, state), functions


def _forward(
    model: nn.Module,
    loss: Loss,
    place: _RunContext,
    outputs: Sequence[int],
    watch: contextlib.AbstractContextManager[Any] | None = None,
    *,
    training: bool = True,
) -> ForwardResult:
    """A forward of the model itself, for which `watch` is entered, and the loss of its `outputs`."""
    with seeded(place.seed), mark_checkpoint_regions(), contextlib.ExitStack() as forward:
        forward.enter_context(watch or contextlib.nullcontext())
        forward.enter_context(place.replayed(model))

        def then_loss(output: Tensor) -> Tensor:
            forward.close()
            return _call_loss(loss, output, place)

        return run_forward(
            model,
            [value.clone() for value in place.inputs],
            device_type=place.device.type,
            training=training,
            autocast_dtype=place.autocast,
            loss_of=outputs,
            loss=then_loss,
        )


def _different_gradients(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], tolerance: float
) -> list[str]:
    """The names of the gradients that are more apart than by rounding."""
    floor = gradient_floor(expected.values())
    pairs = {name: gradient_pair(expected.get(name), found.get(name)) for name in {**expected, **found}}
    return [
        name
        for name, pair in pairs.items()
        if pair is not None and not compare(*pair, tolerance, floor).is_rounding
    ]


def _call_loss(loss: Loss, output: Any, place: _RunContext) -> Tensor:
    """The loss, which draws from generators of its own seeds. It may change the output, and is given a copy: the model's is
    compared afterwards. Refuses one that changes its target."""
    own = tuple(one.clone() for one in output) if isinstance(output, tuple) else output.clone()
    place.random_state().restart("loss")
    hazards.seed_python_rngs(place.seed)
    target = place.copied_target()
    versions = [one._version for one in target_tensors(target)]
    value = loss(own, target)
    if versions != [one._version for one in target_tensors(target)]:
        raise TraceError(
            "the loss changes its target in place, which is the data set's and may be used again: let it change a copy "
            f"(target.clone()); {hazards.SKIP_CHECK_HINT}"
        )
    return value


def _rerun_differs(
    model: nn.Module,
    place: _RunContext,
    outputs: Sequence[Tensor],
    prepare: Callable[[], None] | None,
    tolerance: float,
) -> bool:
    """True if a forward after `prepare`, all else as before, makes other outputs."""
    with seeded(place.seed), mark_checkpoint_regions(), place.replayed(model):
        if prepare is not None:
            prepare()
        try:
            run = run_forward(
                model,
                [value.clone() for value in place.inputs],
                device_type=place.device.type,
                training=True,
                autocast_dtype=place.autocast,
            )
        except Exception:
            return True
    made = [output.detach() for output in run.outputs]
    return len(made) != len(outputs) or any(
        not compare(output, got, tolerance).is_rounding for output, got in zip(outputs, made, strict=True)
    )


def _differentiable_inputs(builder: StageBuilder) -> set[tuple[int, str]]:
    """The inputs of stages that get a gradient, as (stage, name)."""
    return {(edge.target, edge.tensor) for edge in builder.edges() if edge.differentiable}


class _Stages:
    """The stages of a model that is cut wherever it may be, on a device; runs them as often as asked."""

    def __init__(self, traced: TracedModel, device: str):
        builder = traced.builder(range(len(traced.layers)))
        count = len(traced.layers)
        self._stages = [builder.stage(index).to(device) for index in range(count)]
        self._differentiable = _differentiable_inputs(builder)
        self._buffers = [
            (buffer, buffer.detach().clone())
            for stage in self._stages
            for name, buffer in stage.named_buffers()
            if name in stage.updated_buffers
        ]
        self._random_state: RandomState | None = None
        self.functions: set[str] = set()
        """Names of custom autograd functions that the stages call themselves, in modules that run as they are."""
        self.parameters = list(
            dict.fromkeys(name for index in reversed(range(count)) for name in builder.parameters(index))
        )

    def run(
        self,
        loss: Loss,
        place: _RunContext,
        untouched: Mapping[str, Tensor],
        *,
        backward: bool = True,
        training: bool = True,
    ) -> _ModelRun:
        """The outcome of the stages: tensors are detached at borders, gradients are summed over users.

        `untouched` are the buffers of the model, of which the stages may have left out some. Buffers begin as they were
        when the stages were made.
        """
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        values: dict[str, Tensor] = {input_name(k): value.clone() for k, value in enumerate(place.inputs)}
        leaves: list[dict[str, Tensor]] = []
        runs: list[ForwardResult] = []
        with seeded(place.seed):
            self._begin(place)
            for stage in self._stages:
                own = {name: values[name].detach() for name in stage.inputs}
                crossing = {
                    name: leaf for name, leaf in own.items() if (stage.index, name) in self._differentiable
                }
                for leaf in crossing.values():
                    leaf.requires_grad_()
                position = stage.model_outputs
                run = run_forward(
                    stage,
                    list(own.values()),
                    device_type=place.device.type,
                    training=training,
                    autocast_dtype=place.autocast,
                    loss_of=position,
                    loss=(lambda output: _call_loss(loss, output, place)) if position else None,
                )
                values |= dict(zip(stage.outputs, run.outputs, strict=True))
                leaves.append(crossing)
                runs.append(run)
        self.functions |= {
            name for run in runs for one in run.outputs for name in hazards.custom_autograd_functions(one)
        }
        made = tuple(runs[-1].outputs[at].detach() for at in self._stages[-1].model_outputs)
        gradients = _backward_stages(self._stages, runs, leaves) if backward else {}
        for stage in self._stages:
            stage.zero_grad()
        return _ModelRun(made, runs[-1].loss.detach(), gradients, self._state(untouched))

    def _begin(self, place: _RunContext) -> None:
        if not place.calls:
            return
        if self._random_state is None:
            self._random_state = place.random_state()
            for stage in self._stages:
                reseed_at_random_ops(stage, self._random_state)
        self._random_state.begin(place.round, 0)

    def _state(self, untouched: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = dict(untouched)
        updated: set[str] = set()
        for stage in self._stages:
            for local, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
                name = stage.original_names.get(local)
                if (
                    name is not None and name not in updated
                ):  # one stage changes a buffer, others may only read it
                    state[name] = tensor.detach()
                    updated |= {name} if local in stage.updated_buffers else set()
        return state


def _backward_stages(
    stages: Sequence[StageModule], runs: Sequence[ForwardResult], leaves: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The gradient of every parameter, by original name, summed over the stages that use it."""
    found: dict[str, Tensor] = {}
    arrived: dict[str, Tensor] = {}
    for stage, run, own in zip(reversed(stages), reversed(runs), reversed(leaves), strict=True):
        roots, gradients = [], []
        if run.loss is not None and run.loss.requires_grad:
            roots.append(run.loss)
            gradients.append(torch.ones_like(run.loss))
        for name, made in zip(stage.outputs, run.outputs, strict=True):
            gradient = arrived.pop(name, None)
            if gradient is not None and made.requires_grad:
                roots.append(made)
                gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)
        _accumulate(arrived, {name: leaf.grad for name, leaf in own.items()})
        _accumulate(found, {stage.original_names[local]: p.grad for local, p in stage.named_parameters()})
    return found


def _accumulate(total: dict[str, Tensor], more: Mapping[str, Tensor | None]) -> None:
    for name, gradient in more.items():
        if gradient is not None:
            total[name] = total[name] + gradient if name in total else gradient


def _compare_runs(
    expected: _ModelRun,
    found: _ModelRun,
    outputs: Sequence[str],
    order: Sequence[str],
    tolerance: Tolerance,
    functions: Sequence[str],
) -> None:
    """TraceError for the first difference. `order` has the parameters in that of a backward; a gradient that one run did not
    make counts as zeros."""
    kept = [name for name in expected.state if name in found.state]
    gradients = {
        f"the gradient of {name!r}": pair
        for name in (*order, *(name for name in expected.gradients if name not in order))
        if (pair := gradient_pair(expected.gradients.get(name), found.gradients.get(name))) is not None
    }
    outcomes = [
        Outcome(
            {
                **{f"the output {name}".rstrip(): x for name, x in zip(outputs, run.outputs, strict=True)},
                "the loss": run.loss,
                **{f"{name!r} after the forward": run.state[name] for name in kept},
            },
            {name: pair[side] for name, pair in gradients.items()},
        )
        for side, run in enumerate((expected, found))
    ]
    mismatch = first_mismatch(*outcomes, tolerance)
    if mismatch is None:
        return
    if mismatch.is_gradient and functions:
        raise OwnBackwardError(_mismatch_text(mismatch, _lost_backward(functions)))
    raise TraceError(_mismatch_text(mismatch, _UNTRACED_EFFECTS))


def _lost_backward(functions: Sequence[str]) -> str:
    return (
        f"tracing keeps only the forward of the autograd function {', '.join(functions)}, not its own backward: "
        "write it as torch.library.custom_op with register_autograd, which is kept, or so that autograd derives "
        "the backward"
    )


_UNTRACED_EFFECTS = (
    "forward does something that no graph holds: it depends on or changes Python objects, draws numbers outside of "
    "torch, or changes what autograd does"
)


def _mismatch_text(mismatch: Mismatch, reason: str) -> str:
    model, graph = mismatch.expected, mismatch.found
    if model.shape != graph.shape:
        difference = (
            f"has shape {tuple(graph.shape)} in the traced model and {tuple(model.shape)} in the model itself"
        )
    else:
        difference = f"differs between the traced model and the model itself by {mismatch.distance}"
    return f"{mismatch.name} {difference}: {reason}; {hazards.SKIP_CHECK_HINT}"
