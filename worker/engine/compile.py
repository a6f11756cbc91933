"""Compiles stages with torch.compile before the first step, in pieces that are checked against the trace.

A compiler that cannot, errs or takes too long is no failure: the stage runs as traced, and a note says which,
why and the remedy. Random operations, the RNG restarts before them and calls of modules (in which workers sum)
stay outside of the pieces and run as traced, so dropout draws the same masks as without a compiler. A piece has
no parameters of its own: all that it reads is passed in.
Examples are one sample for model inputs and made-up values for what other stages make: nothing is sent, no
buffer changes, no gradient is left. torch's compiler has process-wide flags, so threads of one process compile
one at a time. The time limit raises inside the thread (PyThreadState_SetAsyncExc), as a compiler looks at no
clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import operator
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.contract.job import COMPILE_LIMIT_S
from worker.engine.engine import Engine
from worker.engine.forward import Piece, compute_context, drop_casts, pieces_of
from worker.engine.results import autocast_dtype
from worker.engine.routes import ModelInput, StageWiring
from worker.engine.stage import StageRunner
from worker.model.parity import Outcome, Tolerance, first_mismatch, tolerance_for
from worker.model.rng import ReseedBeforeOp, is_random_op

_PIECE_PREFIX = "piece_"
_MIN_OPERATIONS = 2
"""The least operations of a piece: fewer leave nothing to fuse."""


def split_into_pieces(body: fx.GraphModule) -> list[Piece]:
    """Make `body` call pieces, in the same order and with the same results; returns the pieces."""
    outer, copies = fx.Graph(), {}
    run: list[fx.Node] = []
    found: list[Piece] = []
    dropped: fx.Node | None = None  # the last restart, where it was left out

    def close() -> None:
        if not run:
            return
        piece = _add_piece(body, run, outer, copies, len(found))
        if piece is not None:
            found.append(piece)
        run.clear()

    for node in [node for node in body.graph.nodes if node.op == "placeholder"]:
        copies[node] = outer.node_copy(node)
    for node, given in list(
        copies.items()
    ):  # from another mesh tensors are in one piece, from a stage here they need not be
        copies[node] = outer.call_function(torch.ops.aten.contiguous.default, (given,))
    for node in _with_getitems_behind(body.graph):
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            copies[node] = outer.node_copy(node, copies.__getitem__)
        elif node.op == "output":
            close()
            if dropped is not None:  # a loss that draws goes on from there
                outer.node_copy(dropped, copies.__getitem__)
            outer.node_copy(node, copies.__getitem__)
        elif _is_restart(node, body) and not _draws_random(node.next):
            dropped = node
        elif _stays_outside(node, body):
            close()
            copies[node] = outer.node_copy(node, copies.__getitem__)
            dropped = None if _is_restart(node, body) else dropped
        else:
            run.append(node)
    outer.lint()
    body.graph = outer
    return found


def _add_piece(
    body: fx.GraphModule,
    nodes: Sequence[fx.Node],
    outer: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    index: int,
) -> Piece | None:
    """Put `nodes` in `outer`, as a call of a piece of `body`; None where they are too few and stay as they are."""
    if sum(node.target is not operator.getitem for node in nodes) < _MIN_OPERATIONS:
        for node in nodes:
            copies[node] = outer.node_copy(node, copies.__getitem__)
        return None
    inside, graph, own = set(nodes), fx.Graph(), {}
    outside = dict.fromkeys(arg for one in nodes for arg in one.all_input_nodes if arg not in inside)
    inner = {node: _subgraph(node, body) for node in outside if _subgraph(node, body) is not None}
    read = [node for node in outside if node not in inner]
    for node in read:
        own[node] = graph.placeholder(node.name)
    for node in inner:
        own[node] = graph.get_attr(node.target)
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(own[node] for node in given))
    graph.lint()
    piece = Piece(fx.GraphModule({str(node.target): part for node, part in inner.items()}, graph))
    body.add_submodule(f"{_PIECE_PREFIX}{index}", piece)
    call = outer.call_module(f"{_PIECE_PREFIX}{index}", tuple(copies[node] for node in read))
    for at, node in enumerate(given):
        copies[node] = outer.call_function(operator.getitem, (call, at))
    return piece


def _with_getitems_behind(graph: fx.Graph) -> Iterator[fx.Node]:
    """All nodes, what takes an element of a tuple right behind what made it: only tensors go between pieces."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            continue
        waiting = [node]
        while waiting:
            now = waiting.pop()
            yield now
            waiting += [user for user in reversed(now.users) if user.target is operator.getitem]


def _is_restart(node: fx.Node, body: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(body.get_submodule(str(node.target)), ReseedBeforeOp)


def _stays_outside(node: fx.Node, body: fx.GraphModule) -> bool:
    if node.op == "call_module" or _draws_random(node):
        return True
    inner = [part for source in node.all_input_nodes if (part := _subgraph(source, body)) is not None]
    return any(_stays_outside(one, part) for part in inner for one in part.graph.nodes)


def _subgraph(node: fx.Node, body: fx.GraphModule) -> fx.GraphModule | None:
    """The graph that a node stands for, which a higher-order operation calls."""
    found = getattr(body, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def _draws_random(node: fx.Node) -> bool:
    """True for an operation that draws random numbers; dropout with probability 0 does not."""
    if not is_random_op(node):
        return False
    if node.op == "call_module":
        return True
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("train", given.get("training")) is False:
        return False
    chances = [given[name] for name in ("dropout_p", "p") if name in given]
    return not chances or any(not isinstance(chance, int | float) or chance != 0 for chance in chances)


def detached_arguments(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Detached copies of arguments: parameters stay themselves, one tensor given twice stays one."""
    apart: dict[int, Tensor] = {}
    for value in arguments:
        if id(value) not in apart:
            apart[id(value)] = (
                value
                if isinstance(value, nn.Parameter)
                else value.detach().requires_grad_(value.requires_grad)
            )
    return tuple(apart[id(value)] for value in arguments)


def record_arguments(pieces: Sequence[Piece], run: Callable[[], Any]) -> list[tuple[Tensor, ...]]:
    """The arguments that each piece gets in `run`, on their own."""
    for piece in pieces:
        piece.recording = True
    try:
        run()
        return [detached_arguments(piece.recorded_arguments) for piece in pieces]
    finally:
        for piece in pieces:
            piece.recording, piece.recorded_arguments = False, ()


def parameters_without_gradient(module: nn.Module, roots: Sequence[Tensor]) -> list[str]:
    """The trained parameters of `module` of which `roots` are no function."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        roots, list(trained.values()), [torch.zeros_like(one) for one in roots], allow_unused=True
    )
    return [name for name, gradient in zip(trained, found, strict=True) if gradient is None]


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


log = logging.getLogger(__name__)

BACKEND = "inductor"
_SEED = 0
_AS_TRACED = "runs as traced"

_COMPILER_LOCK = threading.Lock()
"""Torch's compiler has flags of the process: what two threads compile at once it may leave as it is, and a graph module
that one thread makes while another compiles is never compiled (dynamo patches torch.fx.graph_module). Jobs have a process a
worker; `slotline verify` has a thread."""


class _MismatchError(RuntimeError):
    """The compiled function differs from the trace."""


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
        self._device = torch.device(device)
        self._autocast = autocast
        self._limit_s = self._left_s = limit_s
        self._lack = missing_compiler(self._device.type)
        self.notes: list[str] = []
        if self._lack is not None:
            self.notes.append(f"training.compile: everything {_AS_TRACED}: {self._lack}")

    def compile(
        self, name: str, module: nn.Module, run: Callable[[bool], Any], variants: Sequence[bool] = (True,)
    ) -> bool:
        """Have `module`, a stage with its graph in `body`, run compiled from now on; returns whether it does.

        `run` makes one forward of it, with gradients or without, and leaves nothing behind; `variants` are those that
        will be needed. Parameters get no gradients here.
        """
        body = getattr(module, "body", None)
        if self._lack is not None or not isinstance(body, fx.GraphModule):
            return False
        pieces: list[Piece] = []
        try:
            with _COMPILER_LOCK:
                pieces = split_into_pieces(body)
            # All forwards come first and without the lock: workers may meet in them.
            examples = [record_arguments(pieces, functools.partial(run, training)) for training in variants]
            if self._left_s <= 0:
                return self._left(name, "the time for compiling was over before it")
            with _COMPILER_LOCK:
                self._compile_within_limit(name, module, pieces, dict(zip(variants, examples, strict=True)))
        except OverdueError:
            self._left_s = 0.0
            self._undo(pieces)
            return self._left(
                name,
                f"compiling took longer than {self._limit_s:g} s for all stages of a worker: cut the model smaller",
            )
        except Exception as error:
            log.warning("%s is not compiled", name, exc_info=True)
            self._undo(pieces)
            return self._left(name, _reason_of(error))
        finally:
            drop_casts()
        for piece in pieces:
            piece.compiled.seal()
        return bool(pieces)

    def _compile_within_limit(
        self,
        name: str,
        module: nn.Module,
        pieces: Sequence[Piece],
        examples: Mapping[bool, Sequence[Sequence[Tensor]]],
    ) -> None:
        """Compile `pieces` for the arguments that each gets in training or not. Raises OverdueError."""
        started = time.monotonic()
        try:
            with time_limit(self._left_s):  # what may be broken off at any place has only copies
                for training, arguments in examples.items():
                    for piece, example in zip(pieces, arguments, strict=True):
                        self._try(name, module, piece, example, training)
        finally:
            self._left_s -= time.monotonic() - started

    def refuse(self, name: str, why: str) -> None:
        """Tell that a stage is not compiled."""
        self._left(name, why)

    def _left(self, name: str, why: str) -> bool:
        self.notes.append(f"training.compile: {name} {_AS_TRACED}: {why}")
        return False

    def _undo(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece.compiled = None

    def _try(
        self, name: str, module: nn.Module, piece: Piece, example: Sequence[Tensor], training: bool
    ) -> None:
        """Compile a piece for such arguments, and compare it with what was traced. Raises _UselessError."""
        if piece.compiled is None:
            piece.compiled = _CompiledPiece(name, piece.graph)
        expected, found = (
            self._run(function, example, training) for function in (piece.graph, piece.compiled)
        )
        if not piece.compiled.calls:
            raise _MismatchError(
                "torch.compile leaves everything as it is: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
            )
        _compare_with_trace(expected, found, tolerance_for(module, self._autocast, self._device.type))

    def _run(
        self, function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], training: bool
    ) -> Outcome:
        """Run a piece on copies of its arguments, and its backward on random gradients of its outputs."""
        copies = {id(value): value for value in example if isinstance(value, nn.Parameter)}
        leaves = {id(value): value for value in copies.values() if value.requires_grad}
        with torch.enable_grad():
            for value in example:
                if id(value) not in copies:
                    leaf = value.detach().clone().requires_grad_(value.requires_grad)
                    copies[id(value)] = (
                        leaf.clone() if leaf.requires_grad else leaf
                    )  # may be changed in place
                    if leaf.requires_grad:
                        leaves[id(value)] = leaf
        given = [copies[id(value)] for value in example]
        with (
            _compile_settings(),
            compute_context(self._device.type, training=training, autocast_dtype=self._autocast),
        ):
            made = function(*given)
        gradients: Sequence[Tensor | None] = ()
        roots = [one for one in made if one.requires_grad]
        if roots and leaves:
            generator = torch.Generator().manual_seed(_SEED)
            heads = [_random_like(one, generator) for one in roots]
            with _compile_settings():
                gradients = torch.autograd.grad(roots, list(leaves.values()), heads, allow_unused=True)
        changed = [one.detach() for one in given if not isinstance(one, nn.Parameter)]
        return Outcome(
            {
                **{f"an output {number}": one.detach() for number, one in enumerate(made)},
                **{f"a buffer {number}": one for number, one in enumerate(changed)},
            },
            {f"a gradient {number}": gradient for number, gradient in enumerate(gradients)},
        )


def stage_compiler(precision: str, device: str) -> StageCompiler:
    """The compiler of a job's stages in `precision`, within the time that a job has for it."""
    return StageCompiler(device=device, autocast=autocast_dtype(precision), limit_s=COMPILE_LIMIT_S)


class _CompiledPiece:
    """A piece by torch.compile. Once sealed it compiles nothing any more: other arguments than those tried (no stage has
    such) are told and run as traced."""

    def __init__(self, name: str, graph: fx.GraphModule) -> None:
        self._name = name
        self._sealed = False
        self.calls = 0
        self._compiler = torch._dynamo.lookup_backend(BACKEND)
        self._run = torch.compile(graph, backend=self._backend, fullgraph=True, dynamic=False)

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        return self._run(*arguments)

    def seal(self) -> None:
        self._sealed = True

    def _backend(self, graph: fx.GraphModule, arguments: list[Tensor]) -> Callable[..., Any]:
        self.calls += 1
        if not self._sealed:
            return self._compiler(graph, arguments)
        log.warning(
            "training.compile: %s %s from here on: it got other arguments (%s) than it was compiled for",
            self._name,
            _AS_TRACED,
            ", ".join(f"{list(one.shape)} by {one.stride()}" for one in arguments if isinstance(one, Tensor)),
        )
        return graph.forward


def compiled_pieces(module: nn.Module) -> int:
    """The number of pieces of `module` that run compiled."""
    return sum(piece.compiled is not None for piece in pieces_of(module))


@contextlib.contextmanager
def _compile_settings() -> Iterator[None]:
    """A context with the compiler's settings: without processes, which a killed worker might leave behind, and with
    backwards compiled at once, so that no step has to."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=1), autograd.patch(force_non_lazy_backward_lowering=True):
        yield


def _compare_with_trace(traced: Outcome, compiled: Outcome, tolerance: Tolerance) -> None:
    """Raises _MismatchError for the first tensor of another dtype, or that differs by more than rounding."""
    for side, other in ((traced.values, compiled.values), (traced.gradients, compiled.gradients)):
        for name, tensor in side.items():
            _check_kind(name, tensor, other[name])
    if (mismatch := first_mismatch(traced, compiled, tolerance)) is not None:
        shape = list(mismatch.expected.shape)
        raise _MismatchError(
            f"compiled, {_without_number(mismatch.name)} of shape {shape} differs by {mismatch.distance}"
        )


def _check_kind(name: str, traced: Tensor | None, compiled: Tensor | None) -> None:
    if (traced is None) != (compiled is None):
        raise _MismatchError(
            "compiled, a parameter gets a gradient where it gets none as traced, or the reverse"
        )
    if traced is not None and (traced.shape, traced.dtype) != (compiled.shape, compiled.dtype):
        raise _MismatchError(
            f"compiled, {_without_number(name)} is {list(compiled.shape)} {compiled.dtype}, as traced "
            f"{list(traced.shape)} {traced.dtype}"
        )


def _without_number(name: str) -> str:
    return name.rpartition(" ")[0]


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
    device: str,
) -> list[str]:
    """Have the stages of `engine` run compiled, as far as `compiler` can; returns notes for the user.

    `inputs` and `target` are a microbatch of this worker.
    """
    done = []
    with engine.muted():
        for index, (module, wiring) in engine.stages.items():
            name, runner = f"stage s{index}", engine.runners[index]
            values = list(_example_inputs(module, wiring, inputs, device))
            if runner.runs_by_block:
                compiler.refuse(name, "it recomputes by block, and a block is computed as traced")
                continue
            several = len(wiring.model_outputs) > 1 and True in runner.with_gradients
            if several and (why := _reason_not_to_compile(runner, module, values, target.to(device))):
                compiler.refuse(name, why)
                continue
            run = functools.partial(_run_once, runner, values)
            if compiler.compile(name, module, run, runner.with_gradients):
                done.append(f"s{index} in {compiled_pieces(module)}")
    notes = list(compiler.notes)
    if done:
        notes.append(f"by torch.compile, stages in pieces: {', '.join(done)}")
    return notes


def _run_once(runner: StageRunner, values: Sequence[Tensor], training: bool) -> None:
    runner.dry_run(values, training=training)


def _example_inputs(
    module: nn.Module, wiring: StageWiring, inputs: Sequence[Tensor], device: str
) -> Iterator[Tensor]:
    """Example arguments of the stage's forward."""
    generator = torch.Generator().manual_seed(_SEED)
    for source, shape, dtype in zip(wiring.inputs, module.input_shapes, module.input_dtypes, strict=True):
        if isinstance(source, ModelInput):
            yield inputs[source.position].to(device)
        elif dtype.is_floating_point or dtype.is_complex:
            yield torch.randn(shape, generator=generator).to(device, dtype)
        else:  # indices that every table has, and masks that hide nothing
            fill = torch.ones if dtype == torch.bool else torch.zeros
            yield fill(shape, dtype=dtype, device=device)


def _reason_not_to_compile(
    runner: StageRunner, module: nn.Module, values: Sequence[Tensor], target: Any
) -> str | None:
    """The reason why a stage with several model outputs runs as traced; None: it may be compiled.

    Where the loss leaves outputs unused, autograd gives parameters that only these depend on no gradient; a compiled
    backward begins at all outputs, and gives them one of zeros."""
    try:
        roots = runner.dry_run(values, training=True, target=target)
        lost = parameters_without_gradient(module, roots) if roots else []
    except Exception as error:
        log.warning("stage s%d is not compiled", module.index, exc_info=True)
        return f"which of the model's outputs the loss uses is not known: it raised {type(error).__name__}: {error}"
    if not lost:
        return None
    return (
        f"the loss uses only some of the model's outputs, and {lost[0]!r} ({len(lost)} in all), which gets no gradient from "
        "it, would get one of zeros"
    )
