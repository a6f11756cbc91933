"""Compiles stages with torch.compile before the first step, each whole, and checks them against the trace.

A compiler that cannot, errs, takes too long or makes other numbers is no failure: the stage runs as traced, and a
note says which, why and the remedy. Modules that a stage's graph calls (RNG restarts before random operations, sums
with other workers, modules that run as they are) stay outside of what is compiled: torch breaks its graphs there.
Random operations keep torch's own kernels, so dropout draws the same masks as without a compiler.
Examples are one sample for model inputs and made-up values for what other stages make: nothing is sent, no
buffer changes, no gradient is left. torch's compiler has process-wide flags, so threads of one process compile
one at a time. The time limit raises inside the thread (PyThreadState_SetAsyncExc), as a compiler looks at no
clock; dynamo's own reading of a stage, seconds, is let go on.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.contract.job import COMPILE_LIMIT_S
from worker.engine.engine import Engine
from worker.engine.forward import StageArguments, drop_casts, gather_arguments, run_forward, uncompiled
from worker.engine.recomputation.inputs import UpdatedBuffers, save_recompute_inputs
from worker.engine.results import autocast_dtype
from worker.engine.routes import ModelInput, StageWiring
from worker.model.opaque.call import copied_modules, opaque_calls, using_modules
from worker.model.parity import Outcome, Tolerance, first_mismatch, tolerance_for
from worker.model.rng import ReseedBeforeOp, release_rng_lock, seeded
from worker.model.stages import StageModule

log = logging.getLogger(__name__)

BACKEND = "inductor"
_SEED = 0
_AS_TRACED = "runs as traced"

_COMPILER_LOCK = threading.Lock()
"""Torch's compiler has flags of the process: what two threads compile at once it may leave as it is. Jobs have a process a
worker; `slotline verify` has a thread."""


def _break_around_modules(body: fx.GraphModule) -> None:
    """Have torch.compile leave out the modules that `body` calls, and of the restarts before operations that draw nothing
    keep the last alone, behind all: a loss that draws goes on from there."""
    for part in [part for part in body.modules() if isinstance(part, fx.GraphModule)]:
        calls = {
            node: part.get_submodule(str(node.target)) for node in part.graph.find_nodes(op="call_module")
        }
        restarts = [node for node, module in calls.items() if isinstance(module, ReseedBeforeOp)]
        for node in restarts:
            if _draws_random(node.next):
                continue
            if node is restarts[-1]:
                part.graph.output_node().prepend(node)
            else:
                part.graph.erase_node(node)
        for module in calls.values():
            module.forward = torch._dynamo.disable(module.forward)
        # dynamo never compiles the code of a graph module that one thread makes while another compiles
        part.recompile()


def _draws_random(node: fx.Node) -> bool:
    """True for a random operation that draws; dropout with probability 0 does not. A module in its place may."""
    if node.op == "call_module":
        return True
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("train", given.get("training")) is False:
        return False
    chances = [given[name] for name in ("dropout_p", "p") if name in given]
    return not chances or any(not isinstance(chance, int | float) or chance != 0 for chance in chances)


_DELIVERY_LIMIT_S = 1.0


class OverdueError(BaseException):
    """The body went on for too long. No Exception: what catches all of those must not keep it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OverdueError in the body after `seconds`, as soon as it runs Python code."""
    thread, lock, over, fired = threading.get_ident(), threading.Lock(), False, False

    def fire() -> None:
        nonlocal fired
        with lock:
            if not over:
                fired = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(OverdueError)
                )

    timer = threading.Timer(max(seconds, 0.0), fire)
    timer.daemon = True
    timer.start()
    raised = False
    try:
        yield
    except OverdueError:
        raised = True
        raise
    finally:
        with lock:
            over = True
        timer.cancel()
        if fired and not raised:  # it is on its way, or somebody in the body has caught it
            ends = time.monotonic() + _DELIVERY_LIMIT_S
            with contextlib.suppress(OverdueError):
                while time.monotonic() < ends:
                    time.sleep(0.01)
            raise OverdueError


class _MismatchError(RuntimeError):
    """The compiled stage differs from the trace."""


def missing_compiler(device: str) -> str | None:
    """The part that torch.compile lacks on this machine for `device`, and the way out; None: nothing."""
    if device == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "triton is missing or finds no GPU that it knows: install triton beside torch"
        names = [name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name]
        what = "C compiler (triton needs one)"
    else:
        from torch._inductor import config

        cxx = config.cpp.cxx
        names = [name for name in (cxx if isinstance(cxx, list | tuple) else (cxx,)) if name]
        what = "C++ compiler"
    if any(shutil.which(name) for name in names):
        return None
    variable = "CC" if device == "cuda" else "CXX"
    return (
        f"no {what} was found (looked for {', '.join(names)}): install g++ where the workers run, or name one by the "
        f"environment variable {variable}"
    )


class StageCompiler:
    """Compiles stages for `device` under `autocast`, for `limit_s` seconds in all. `notes` is what to tell of it."""

    def __init__(self, *, device: torch.device | str, autocast: torch.dtype | None, limit_s: float) -> None:
        self.device = torch.device(device)
        self._autocast = autocast
        self._limit_s = self._left_s = limit_s
        self._lack = missing_compiler(self.device.type)
        self.notes: list[str] = []
        if self._lack is not None:
            self.notes.append(f"training.compile: everything {_AS_TRACED}: {self._lack}")

    def compile(
        self,
        name: str,
        stage: nn.Module,
        inputs: Sequence[Tensor],
        variants: Sequence[bool] = (True,),
        loss: Callable[[Any], Tensor] | None = None,
    ) -> bool:
        """Have `stage`, with its graph in `body`, run compiled from now on; returns whether it does.

        `inputs` are examples, of which those require a gradient that get one in a step. `variants` are the forwards that
        will be needed, with gradients or without. A `loss` of the model's outputs tells which parameters get gradients.
        """
        body = getattr(stage, "body", None)
        if self._lack is not None or not isinstance(body, fx.GraphModule):
            return False
        if self._left_s <= 0:
            return self.refuse(name, "the time for compiling was over before it")
        tolerance = tolerance_for(stage, self._autocast, self.device.type)
        with _COMPILER_LOCK:
            ends = time.monotonic() + self._left_s
            try:
                _break_around_modules(body)
                stage.compiled = compiled = CompiledBody(name, body, ends)
                for training in variants:
                    with uncompiled(stage):
                        traced = self._run(stage, inputs, training, loss)
                    with _compile_settings():
                        found = self._run(stage, inputs, training, loss)
                    if not compiled.graphs:
                        raise _MismatchError(
                            "torch.compile leaves everything as it is: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
                        )
                    _compare_with_trace(traced, found, tolerance)
                compiled.seal()
                return True
            except OverdueError:
                stage.compiled, ends = None, 0.0
                return self.refuse(
                    name,
                    f"compiling took longer than {self._limit_s:g} s for all stages of a worker: cut the model smaller",
                )
            except Exception as error:
                log.warning("%s is not compiled", name, exc_info=True)
                stage.compiled = None
                return self.refuse(name, _reason_of(error))
            finally:
                self._left_s = ends - time.monotonic()
                drop_casts()

    def refuse(self, name: str, why: str) -> bool:
        """Tell that a stage is not compiled."""
        self.notes.append(f"training.compile: {name} {_AS_TRACED}: {why}")
        return False

    def _run(
        self,
        stage: StageModule,
        inputs: Sequence[Tensor],
        training: bool,
        loss: Callable[[Any], Tensor] | None,
    ) -> Outcome:
        """Run a forward on copies of `inputs`, and in training a backward on random gradients of what it makes; random
        operations, buffers and modules that run as they are begin where they do in each run, and stay there."""
        values = [value.detach().clone().requires_grad_(training and value.requires_grad) for value in inputs]
        buffers, calls = UpdatedBuffers(stage), opaque_calls(stage)
        kept = save_recompute_inputs(StageArguments([], [], []), buffers)
        with seeded(_SEED), buffers.restored_to(kept), using_modules(calls, copied_modules(calls)):
            run = run_forward(
                stage,
                values,
                device_type=self.device.type,
                training=training,
                autocast_dtype=self._autocast,
                loss_of=(places := stage.model_outputs if loss else None),
                loss=loss,
            )
            leaves = {name: value for name, value in stage.named_parameters() if value.requires_grad}
            leaves |= dict(zip(stage.inputs, values, strict=True)) if training else {}
            leaves = {name: value for name, value in leaves.items() if value.requires_grad}
            gradients: Sequence[Tensor | None] = ()
            if training and leaves and (roots := run.roots(places)):
                generator = torch.Generator().manual_seed(_SEED)
                heads = [_random_like(one, generator) for one in roots]
                gradients = torch.autograd.grad(roots, list(leaves.values()), heads, allow_unused=True)
        outputs = zip(stage.outputs, run.outputs, strict=True)
        return Outcome(
            {
                **{f"output {name!r}": one.detach() for name, one in outputs},
                **{f"buffer {name!r}": one for name, one in kept.buffers.items()},
            },
            {
                f"the gradient of {name!r}": gradient
                for name, gradient in zip(leaves, gradients, strict=False)
            },
        )


def stage_compiler(precision: str, device: str) -> StageCompiler:
    """The compiler of a job's stages in `precision`, within the time that a job has for it."""
    return StageCompiler(device=device, autocast=autocast_dtype(precision), limit_s=COMPILE_LIMIT_S)


class CompiledBody:
    """A stage's body by torch.compile, until `ends` of time.monotonic(). Once sealed it compiles nothing any more: other
    arguments than those tried (no stage has such) are told and run as traced."""

    def __init__(self, name: str, body: fx.GraphModule, ends: float) -> None:
        self._name, self._ends = name, ends
        self._sealed = False
        self.graphs = 0
        self._compiler = torch._dynamo.lookup_backend(BACKEND)
        self._run = torch.compile(body.forward, backend=self._backend, dynamic=False)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        # from another mesh tensors are in one piece, from a stage here they need not be
        return self._run(*(one.contiguous() for one in arguments))

    def seal(self) -> None:
        self._sealed = True

    def _backend(self, graph: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        if not self._sealed:
            # what may be broken off at any place is the compiler alone; a prefetch thread may draw meanwhile
            with release_rng_lock(), time_limit(self._ends - time.monotonic()):
                return self._compiler(graph, arguments)
        log.warning(
            "training.compile: %s %s from here on: it got other arguments (%s) than it was compiled for",
            self._name,
            _AS_TRACED,
            ", ".join(f"{list(one.shape)} by {one.stride()}" for one in arguments if isinstance(one, Tensor)),
        )
        return graph.forward


@contextlib.contextmanager
def _compile_settings() -> Iterator[None]:
    """A context with the compiler's settings: without processes, which a killed worker might leave behind, with backwards
    compiled at once, so that no step has to, and with torch's own random kernels, so that masks are those of the trace."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    with (
        inductor.patch(compile_threads=1, fallback_random=True),
        autograd.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


def _compare_with_trace(traced: Outcome, compiled: Outcome, tolerance: Tolerance) -> None:
    """Raises _MismatchError for the first tensor of another dtype, or that differs by more than rounding."""
    lost = [
        name for name, one in traced.gradients.items() if one is None and compiled.gradients[name] is not None
    ]
    if lost:
        raise _MismatchError(
            f"compiled, {lost[0]} ({len(lost)} in all) would be one of zeros where it is none, as the loss uses only some "
            "of the model's outputs"
        )
    for side, other in ((traced.values, compiled.values), (traced.gradients, compiled.gradients)):
        for name, tensor in side.items():
            _check_kind(name, tensor, other[name])
    if (mismatch := first_mismatch(traced, compiled, tolerance)) is not None:
        shape = list(mismatch.expected.shape)
        raise _MismatchError(f"compiled, {mismatch.name} of shape {shape} differs by {mismatch.distance}")


def _check_kind(name: str, traced: Tensor | None, compiled: Tensor | None) -> None:
    if traced is not None and compiled is None:
        raise _MismatchError(f"compiled, {name} is none")
    if traced is not None and (traced.shape, traced.dtype) != (compiled.shape, compiled.dtype):
        raise _MismatchError(
            f"compiled, {name} is {list(compiled.shape)} {compiled.dtype}, as traced {list(traced.shape)} {traced.dtype}"
        )


def _random_like(like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return made.to(like.device, like.dtype)


def _reason_of(error: Exception) -> str:
    """The first line of what a compiler raised; all of it is in the log."""
    if isinstance(error, _MismatchError):
        return str(error)
    error = getattr(error, "inner_exception", error)  # of a backend, which dynamo wraps
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''} (the worker's log has all of it)"


def compile_stages(
    engine: Engine,
    compiler: StageCompiler,
    inputs: Sequence[Tensor],
    target: Any,
    loss: Callable[[Any, Any], Tensor],
) -> list[str]:
    """Have the stages of `engine` run compiled, as far as `compiler` can; returns notes for the user.

    `inputs` and `target` are a microbatch of this worker.
    """
    done = []
    with engine.muted():
        for index, module in engine.stages.items():
            name, runner = f"stage s{index}", engine.runners[index]
            if runner.runs_by_block:
                compiler.refuse(name, "it recomputes by block, and a block is computed as traced")
                continue
            examples = _example_inputs(module, runner.wiring, inputs, compiler.device)
            # autograd gives parameters that no used output depends on no gradient; a compiled backward one of zeros
            several = len(runner.wiring.model_outputs) > 1
            of_outputs = (lambda output: loss(output, target.to(compiler.device))) if several else None
            if compiler.compile(name, module, examples, runner.with_gradients, of_outputs):
                done.append(f"s{index} in {module.compiled.graphs}")
    notes = list(compiler.notes)
    if done:
        notes.append(f"by torch.compile, stages in graphs: {', '.join(done)}")
    return notes


def _example_inputs(
    module: StageModule, wiring: StageWiring, inputs: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Example arguments of the stage's forward, of which those require a gradient that get one."""
    generator = torch.Generator().manual_seed(_SEED)
    examples = []
    for source, shape, dtype in zip(wiring.inputs, module.input_shapes, module.input_dtypes, strict=True):
        if isinstance(source, ModelInput):
            examples.append(inputs[source.position].to(device))
        elif dtype.is_floating_point or dtype.is_complex:
            examples.append(torch.randn(shape, generator=generator).to(device, dtype))
        else:  # indices that every table has, and masks that hide nothing
            fill = torch.ones if dtype == torch.bool else torch.zeros
            examples.append(fill(shape, dtype=dtype, device=device))
    given = iter(examples)
    return gather_arguments(wiring.inputs, lambda _: next(given), training=True).values
