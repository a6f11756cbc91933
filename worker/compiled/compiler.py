"""Stages by torch.compile: their graphs in pieces, each compiled and tried before the first step, or left as traced.

What a compiler cannot do, does wrong or takes too long for is no failure: the stage runs as traced, and a note says
which, why and what to do. Must not know engines, transports or jobs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.compiled.pieces import Piece, pieces_of, seen_by, split
from worker.compiled.time_limit import OverdueError, time_limit
from worker.engine.stage_run import computing, drop_casts
from worker.model.distance import Tolerance, distance, least_size, tolerance_of

log = logging.getLogger(__name__)

BACKEND = "inductor"
_SEED = 0
_AS_TRACED = "runs as traced"


class _UselessError(RuntimeError):
    """What was compiled is not what it should be."""


def missing_compiler(device: str) -> str | None:
    """What torch.compile lacks on this machine for `device`, and the way out; None: nothing."""
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


class Compiler:
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
        """Have `module`, a stage with its graph in `body`, run compiled from now on; whether it does.

        `run` makes one forward of it, with gradients or without, and leaves nothing behind; `variants` are those that
        will be needed. Parameters get no gradients here.
        """
        body = getattr(module, "body", None)
        if self._lack is not None or not isinstance(body, fx.GraphModule):
            return False
        if self._left_s <= 0:
            return self._left(name, "the time for compiling was over before it")
        started = time.monotonic()
        pieces: list[Piece] = []
        try:
            pieces = split(body)
            for training in variants:
                examples = seen_by(pieces, functools.partial(run, training))
                # what may be broken off at any place has only copies
                with time_limit(self._left_s - (time.monotonic() - started)):
                    for piece, example in zip(pieces, examples, strict=True):
                        self._try(name, module, piece, example, training)
        except OverdueError:
            self._left_s = 0.0
            self._undo(pieces)
            return self._left(
                name,
                f"compiling took longer than training.compile_limit_s, {self._limit_s:g} s for all stages of a worker: "
                "give more, or cut the model into smaller stages",
            )
        except Exception as error:
            log.warning("%s is not compiled", name, exc_info=True)
            self._undo(pieces)
            return self._left(name, _reason(error))
        finally:
            drop_casts()
            self._left_s -= time.monotonic() - started
        for piece in pieces:
            piece.compiled.seal()
        return bool(pieces)

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
            piece.compiled = _Compiled(name, piece.graph)
        expected, found = (
            self._run(function, example, training) for function in (piece.graph, piece.compiled)
        )
        if not piece.compiled.calls:
            raise _UselessError(
                "torch.compile leaves everything as it is: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
            )
        _compare(expected, found, tolerance_of(module, self._autocast, self._device.type))

    def _run(
        self, function: Callable[..., tuple[Tensor, ...]], example: Sequence[Tensor], training: bool
    ) -> _Made:
        """What a piece makes of copies of its arguments; gradients are those of random ones of its outputs."""
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
            _settings(),
            computing(self._device.type, training=training, autocast_dtype=self._autocast),
        ):
            made = function(*given)
        gradients: Sequence[Tensor | None] = ()
        roots = [one for one in made if one.requires_grad]
        if roots and leaves:
            generator = torch.Generator().manual_seed(_SEED)
            heads = [_noise(one, generator) for one in roots]
            with _settings():
                gradients = torch.autograd.grad(roots, list(leaves.values()), heads, allow_unused=True)
        changed = [one.detach() for one in given if not isinstance(one, nn.Parameter)]
        return _Made([one.detach() for one in made], changed, gradients)


class _Made:
    """What one run of a piece leaves: outputs, its arguments afterwards, and gradients of those that take one."""

    def __init__(
        self, outputs: list[Tensor], changed: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        self.outputs, self.changed, self.gradients = outputs, changed, gradients


class _Compiled:
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
    """How many pieces of `module` run compiled."""
    return sum(piece.compiled is not None for piece in pieces_of(module))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """How pieces are compiled: without processes, which a killed worker might leave behind, and backwards at once, so that
    no step has to."""
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    with inductor.patch(compile_threads=1), autograd.patch(force_non_lazy_backward_lowering=True):
        yield


def _compare(expected: _Made, found: _Made, tolerance: Tolerance) -> None:
    for what, model, compiled, allowed in (
        ("an output", expected.outputs, found.outputs, tolerance.values),
        ("a buffer", expected.changed, found.changed, tolerance.values),
    ):
        for one, other in zip(model, compiled, strict=True):
            _check(what, one, other, 0.0, allowed)
    least = least_size(one for one in expected.gradients if one is not None)
    for one, other in zip(expected.gradients, found.gradients, strict=True):
        if one is None and other is None:
            continue
        if one is None or other is None:
            raise _UselessError(
                "compiled, a parameter gets a gradient where it gets none as traced, or the reverse"
            )
        _check("a gradient", one, other, least, tolerance.gradients)


def _check(what: str, one: Tensor, other: Tensor, least: float, allowed: float) -> None:
    if one.shape != other.shape or one.dtype != other.dtype:
        raise _UselessError(
            f"compiled, {what} is {list(other.shape)} {other.dtype}, as traced {list(one.shape)} {one.dtype}"
        )
    apart = distance(one, other, least)
    if apart > allowed:
        raise _UselessError(
            f"compiled, {what} of shape {list(one.shape)} differs by {apart:.3g} of its size (at most {allowed:g} is "
            "rounding)"
        )


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return made.to(like.device, like.dtype)


def _reason(error: Exception) -> str:
    """The first line of what a compiler raised; all of it is in the log."""
    if isinstance(error, _UselessError):
        return str(error)
    error = getattr(error, "inner_exception", error)  # of a backend, which dynamo wraps
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''} (the worker's log has all of it)"
