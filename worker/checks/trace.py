"""Checks before the first step that the stages of an exported model compute what the model itself computes.

On one microbatch it compares outputs, loss, buffers after the forward and the gradient of every parameter; the
graph runs cut at every border where it may be cut, as stages run. Raises TraceError with the first tensor that
differs and the likely reason. The model's parameters, buffers and gradients are restored afterwards; objects that
its forward changes elsewhere are not seen. Knows no jobs and no meshes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.contract.failures import leave_breadcrumb
from worker.contract.profile import TraceError
from worker.engine.forward import ForwardResult, drop_casts, run_forward
from worker.model import hazards
from worker.model.export import BufferSnapshot, TracedModel, mark_checkpoint_regions
from worker.model.hf_patches import PATCHED_FUNCTION_NAMES
from worker.model.parity import Tolerance, compare, gradient_floor, gradient_pair, tolerance_for
from worker.model.pytree import Target
from worker.model.rng import RandomState, reseed_at_random_ops, seeded
from worker.model.rng_ops import RngOp, replay_rng, traced_rng_ops
from worker.model.stages import StageBuilder, StageModule, input_name

Loss = Callable[[Any, Target], Tensor]


_SEED = 0x51071


@dataclass(frozen=True)
class _Outcome:
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
    device: str = "cpu",
) -> list[str]:
    """Compare `traced` with `model` on its example inputs; `target` belongs to them. What to tell of it, in notes.

    `make_loss` is called once for each of both. The model's parameters, buffers and gradients are afterwards what
    they were; of objects that its forward changes elsewhere nothing is known. Raises TraceError, naming the first
    tensor that differs (gradients in the order of a backward), by how much, and the likely reason.
    """
    hazards.check_gradient_hooks(model)
    if device == "cpu":
        hazards.check_group_norms(traced.placed.module, traced.placed.values)
    leave_breadcrumb("the comparison of the traced model with the model itself")
    autocast = traced.placed.autocast
    tolerance = tolerance_for(model, autocast, device)
    place = _RunContext(
        torch.device(device),
        tuple(value.to(device) for value in traced.example_inputs),
        target.to(device),
        autocast,
        traced_rng_ops(traced, device),
    )
    builder = traced.builder(range(len(traced.layers)))
    count = len(traced.layers)
    try:
        with _model_on_device(model, device) as buffers:
            stages = [
                builder.stage(index).to(device) for index in range(count)
            ]  # before forward changes anything
            several = range(len(traced.placed.outputs))
            expected, moved, functions = _run_model(model, make_loss(), place, several)

            def differs(seed: int | None) -> bool:
                buffers.restore()
                return _rerun_differs(model, place, expected.outputs, seed, tolerance.values)

            if moved.hooks:
                raise TraceError(
                    f"forward puts a hook on the gradient of a tensor ({moved.hooks[0]}), which no stage calls: "
                    f"torch.library.custom_op takes a backward of its own; {hazards.SKIP_CHECK_HINT}"
                )
            if (depends := hazards.find_dependence(model, moved, differs)) is not None:
                raise TraceError(
                    f"the result of {type(model).__name__}.forward depends on {depends}; {hazards.SKIP_CHECK_HINT}"
                )
            untouched = {name: t for name, t in buffers.before.items() if name in traced.placed.persistent}
            found = _run_stages(stages, _differentiable_inputs(builder), make_loss(), place, untouched)
    finally:
        drop_casts()
        leave_breadcrumb("")
    parameters = [name for index in reversed(range(count)) for name in builder.parameters(index)]
    names = traced.tree_spec.names if traced.tree_spec else [str(k) if k else "" for k in several]
    _compare_outcomes(expected, found, names, list(dict.fromkeys(parameters)), tolerance, functions)
    return [
        *traced.notes,
        *hazards.hazard_notes(model, moved, [one for one in functions if one not in PATCHED_FUNCTION_NAMES]),
    ]


@dataclass(frozen=True)
class _RunContext:
    """The device, inputs and random calls of both runs.

    Each call draws by its name, since stages make them in the order of layers, and a model in that of its lines.
    """

    device: torch.device
    inputs: tuple[Tensor, ...]
    target: Target
    autocast: torch.dtype | None
    calls: Sequence[RngOp]

    def replayed(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A forward of the model draws as its graph does."""
        where = {"seed": _SEED, "worker": 0, "step": 0, "microbatch": 0}
        return replay_rng(model, self.calls, **where, device=self.device.type, all_of_them=False)

    def random_state(self) -> RandomState:
        return RandomState(_SEED, 0, self.device)


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
    model: nn.Module, loss: Loss, place: _RunContext, outputs: Sequence[int]
) -> tuple[_Outcome, hazards.ForwardSideEffects, list[str]]:
    """The outcome of the model itself at `outputs`, the side effects of its forward, and the names of custom autograd
    functions that it called.
    """
    found: list[hazards.ForwardSideEffects] = []
    with (
        seeded(_SEED),
        mark_checkpoint_regions(),
        hazards.SideEffectWatch(model) as watch,
        contextlib.ExitStack() as forward,
    ):
        forward.enter_context(place.replayed(model))

        def then_loss(output: Tensor) -> Tensor:
            forward.close()
            found.append(watch.end())
            place.random_state().restart("loss")
            return loss(output, place.target)

        run = run_forward(
            model,
            [value.clone() for value in place.inputs],
            device_type=place.device.type,
            training=True,
            autocast_dtype=place.autocast,
            loss_of=outputs,
            loss=then_loss,
        )
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
    run.loss.backward()
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    made = tuple(output.detach() for output in run.outputs)
    return _Outcome(made, run.loss.detach(), gradients, state), found[0], functions


def _rerun_differs(
    model: nn.Module, place: _RunContext, outputs: Sequence[Tensor], seed: int | None, tolerance: float
) -> bool:
    """True if a forward with Python's RNGs at `seed`, all else as before, makes other outputs."""
    with seeded(_SEED), mark_checkpoint_regions(), place.replayed(model):
        if seed is not None:
            hazards.seed_python_rngs(seed)
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


def _run_stages(
    stages: Sequence[StageModule],
    differentiable: Collection[tuple[int, str]],
    loss: Loss,
    place: _RunContext,
    untouched: Mapping[str, Tensor],
) -> _Outcome:
    """The outcome of the stages: tensors are detached at borders, gradients are summed over users.

    `untouched` are the buffers of the model, of which the stages may have left out some.
    """
    values: dict[str, Tensor] = {input_name(k): value.clone() for k, value in enumerate(place.inputs)}
    leaves: list[dict[str, Tensor]] = []
    runs: list[ForwardResult] = []
    with seeded(_SEED):
        state_of_calls = place.random_state()

        def then_loss(output: Tensor) -> Tensor:
            state_of_calls.restart("loss")
            return loss(output, place.target)

        for stage in stages:
            if place.calls:
                reseed_at_random_ops(stage, state_of_calls)
            own = {name: values[name].detach() for name in stage.inputs}
            crossing = {name: leaf for name, leaf in own.items() if (stage.index, name) in differentiable}
            for leaf in crossing.values():
                leaf.requires_grad_()
            position = stage.model_outputs
            run = run_forward(
                stage,
                list(own.values()),
                device_type=place.device.type,
                training=True,
                autocast_dtype=place.autocast,
                loss_of=position,
                loss=then_loss if position else None,
            )
            values |= dict(zip(stage.outputs, run.outputs, strict=True))
            leaves.append(crossing)
            runs.append(run)
    state = dict(untouched)
    updated: set[str] = set()
    for stage in stages:
        for local, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            name = stage.original_names.get(local)
            if (
                name is not None and name not in updated
            ):  # one stage changes a buffer, others may only read it
                state[name] = tensor.detach()
                updated |= {name} if local in stage.updated_buffers else set()
    made = tuple(runs[-1].outputs[at].detach() for at in stages[-1].model_outputs)
    return _Outcome(made, runs[-1].loss.detach(), _backward_stages(stages, runs, leaves), state)


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


def _compare_outcomes(
    expected: _Outcome,
    found: _Outcome,
    outputs: Sequence[str],
    order: Sequence[str],
    tolerance: Tolerance,
    functions: Sequence[str],
) -> None:
    values = {
        **{
            f"the output {name}".rstrip(): pair
            for name, pair in zip(outputs, zip(expected.outputs, found.outputs, strict=True), strict=True)
        },
        "the loss": (expected.loss, found.loss),
        **{
            f"{name!r} after the forward": (tensor, found.state[name])
            for name, tensor in expected.state.items()
            if name in found.state
        },
    }
    for what, (model, graph) in values.items():
        _check_close(what, model, graph, 0.0, tolerance.values, _UNTRACED_EFFECTS)
    names = [*order, *(name for name in expected.gradients if name not in order)]
    floor = gradient_floor(expected.gradients.values())
    reason = _UNTRACED_EFFECTS
    if functions:
        reason = (
            f"tracing keeps only the forward of the autograd function {', '.join(functions)}, not its own backward: "
            "write it as torch.library.custom_op with register_autograd, which is kept, or so that autograd derives "
            "the backward"
        )
    for name in names:
        if (pair := gradient_pair(expected.gradients.get(name), found.gradients.get(name))) is not None:
            _check_close(f"the gradient of {name!r}", *pair, floor, tolerance.gradients, reason)


_UNTRACED_EFFECTS = (
    "forward does something that no graph holds: it depends on or changes Python objects, draws numbers outside of "
    "torch, or changes what autograd does"
)


def _check_close(
    what: str, model: Tensor, graph: Tensor, floor: float, tolerance: float, reason: str
) -> None:
    if model.shape != graph.shape:
        raise TraceError(
            f"{what} has shape {tuple(graph.shape)} in the traced model and {tuple(model.shape)} in the model itself: "
            f"{reason}; {hazards.SKIP_CHECK_HINT}"
        )
    distance = compare(model, graph, tolerance, floor)
    if not distance.is_rounding:
        raise TraceError(
            f"{what} differs between the traced model and the model itself by {distance}: {reason}; "
            f"{hazards.SKIP_CHECK_HINT}"
        )
