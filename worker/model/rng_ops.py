"""Replays the random operations of a pipeline in the unsplit model, each from the seed of its graph operation.

Seeds follow from (seed, worker, step, microbatch, name of the operation), DESIGN's promise. Operations are
matched by order, shape and module; what the model draws and does not use is in no graph and draws freely.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from worker.model.export import TracedModel
from worker.model.layers import is_random
from worker.model.opaque.call import CallRecord, opaque_call
from worker.model.rng import (
    RNG_LOCK,
    RandomState,
    default_generator,
    is_random_op,
    reseed_at_random_ops,
    seeded,
)


class RngOpMismatchError(RuntimeError):
    """The model draws at other places than its graph."""


@dataclass(frozen=True)
class RngOp:
    """One kernel that draws, for numbers of a `shape`, in the call of `module` (its name in the model); `first` of those
    that one operation of the graph makes. `whole`: the call itself, as of a module that runs as it is."""

    operation: str
    first: bool
    shape: tuple[int, ...] = ()
    module: str = ""
    whole: bool = False


def traced_rng_ops(traced: TracedModel, device: str = "cpu") -> list[RngOp]:
    """The random calls of one forward of the graph, in order. Changes nothing of it."""
    placed = traced.placed
    if not any(is_random(node) for node in placed.module.graph.nodes):
        return []
    stage = traced.builder([0]).stage(0).to(device)
    nodes = [node for node in _all_nodes(placed.module) if is_random_op(node)]
    opaque = {node.name: call.record for node in nodes if (call := opaque_call(node)) is not None}
    marks = _RngOpRecorder({node.name: _module_of(node) for node in nodes}, opaque)
    reseed_at_random_ops(stage, marks)
    inputs = [traced.example_inputs[int(name.removeprefix("input:"))].to(device) for name in stage.inputs]
    autocast = contextlib.nullcontext()
    if placed.autocast is not None:
        autocast = torch.autocast(torch.device(device).type, dtype=placed.autocast)
    with seeded(0), autocast, _DrawListener(marks, default_generator(torch.device(device))):
        stage(*(value.clone() for value in inputs))
    return marks.found


class MeshDraws(Protocol):
    """Draws of calls on meshes of another size: together the workers of the mesh draw what the body needs a part of."""

    def takes(self, call: int) -> bool:
        """True if the ranks of a mesh of another size draw call number `call`."""

    def draw(self, call: int, function: Callable, args: tuple, kwargs: Mapping) -> object:
        """This rank's part of what the ranks of that mesh draw."""


@dataclass(frozen=True)
class RngKey:
    """The job's seed and the forward that draws: worker, step and microbatch. Equal keys draw equal numbers."""

    seed: int
    worker: int
    step: int
    microbatch: int

    def state(self, device: torch.device) -> RandomState:
        """The random state of this forward."""
        state = RandomState(self.seed, self.worker, device)
        state.begin(self.step, self.microbatch)
        return state


@contextlib.contextmanager
def replay_rng(
    model: nn.Module,
    calls: Sequence[RngOp],
    key: RngKey,
    *,
    device: str = "cpu",
    all_of_them: bool = True,
    shared: MeshDraws | None = None,
) -> Iterator[None]:
    """The random calls of the body, one forward of `model`, draw the numbers of the pipeline's forward `key`; `shared`
    draws those that it takes.

    What the model draws and does not use is in no graph: such calls draw what they like. Raises
    OtherRandomCallsError where a call of the graph is not met and `all_of_them` are wanted.
    """
    if not calls:
        yield
        return
    state = key.state(torch.device(device))
    with (
        RNG_LOCK,  # a prefetch thread of the same process seeds and draws too
        _ModuleStack(model) as inside,
        _ReplayMode(calls, state, default_generator(torch.device(device)), inside, shared) as mode,
    ):
        yield
    if all_of_them and mode.count != len(calls):
        lost = calls[mode.count]
        raise RngOpMismatchError(
            f"the model made {mode.count} of the {len(calls)} random calls of its graph: the next, of shape "
            f"{list(lost.shape)} in module {lost.module!r}, was not met, so it cannot be told to draw the same"
        )


def _all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _module_of(node: fx.Node) -> str:
    """The innermost module in whose call the node was traced; a later call of a module has its name too."""
    stack = [path for path, *_ in (node.meta.get("nn_module_stack") or {}).values()]
    return _REPEATED_CALL.sub("", stack[-1]) if stack else ""


_REPEATED_CALL = re.compile(r"@\d+")


class _ModuleStack:
    """The stack of modules of a model that are being called; `names` has all its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names: dict[nn.Module, set[str]] = {}
        self.on_begin: Callable[[set[str]], bool] = lambda names: False
        """Called with the names of a module that begins; True: its draws are its own affair until it ends."""
        self._alone: nn.Module | None = None
        self._depth = 0
        self._read()
        self._stack: list[nn.Module] = []

    @property
    def names(self) -> set[str]:
        return self._names[self._stack[-1]] if self._stack else {""}

    @property
    def alone(self) -> bool:
        """True in a module whose draws are its own affair."""
        return self._alone is not None

    def _read(self) -> None:
        for name, module in self._model.named_modules(remove_duplicate=False):
            self._names.setdefault(module, set()).add(name)

    def __enter__(self) -> _ModuleStack:
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._begin(module)),
            register_module_forward_hook(lambda module, *_: self._end(module), always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module) -> None:
        if module not in self._names:  # a forward may exchange modules of its model
            self._read()
        if module in self._names:
            self._stack.append(module)
            if self._alone is None and self.on_begin(self._names[module]):
                self._alone, self._depth = module, len(self._stack)

    def _end(self, module: nn.Module) -> None:
        if self._stack and self._stack[-1] is module:
            if self._alone is module and len(self._stack) == self._depth:
                self._alone = None
            self._stack.pop()


def _may_draw(function: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def _call_kernel(
    function: Callable, args: tuple, kwargs: Mapping | None, generator: torch.Generator
) -> tuple[object, bool]:
    """Call a kernel; its result, and whether it drew (attention without dropout does not)."""
    if not _may_draw(function):
        return function(*args, **(kwargs or {})), False
    before = generator.get_state()
    result = function(*args, **(kwargs or {}))
    return result, not torch.equal(before, generator.get_state())


def _drawn_shape(args: Sequence[object]) -> tuple[int, ...]:
    """The shape for which a kernel with these arguments draws."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
        if isinstance(value, list | tuple):
            return tuple(value)
    return ()


class _RngOpRecorder:
    """Takes the place of an engine's random state: told before each random operation of the graph. `modules` are those
    in which operations were traced, by name; `opaque` the calls of modules as they are, whose kernels are not told apart."""

    def __init__(self, modules: Mapping[str, str], opaque: Mapping[str, CallRecord]) -> None:
        self.found: list[RngOp] = []
        self._modules, self._opaque = modules, opaque
        self._now, self._begun = "", False

    def restart(self, operation: str) -> None:
        self._now, self._begun = operation, True
        if operation in self._opaque and self._opaque[operation].draws:
            self.found.append(RngOp(operation, True, module=self._opaque[operation].path, whole=True))

    def record_draw(self, shape: tuple[int, ...]) -> None:
        if self._now in self._opaque:
            return
        self.found.append(RngOp(self._now, self._begun, shape, self._modules.get(self._now, "")))
        self._begun = False


class _DrawListener(TorchDispatchMode):
    def __init__(self, marks: _RngOpRecorder, generator: torch.Generator) -> None:
        super().__init__()
        self._marks, self._generator = marks, generator

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, drew = _call_kernel(function, args, kwargs, self._generator)
        if drew:
            self._marks.record_draw(_drawn_shape(args))
        return result


class _ReplayMode(TorchDispatchMode):
    def __init__(
        self,
        calls: Sequence[RngOp],
        state: RandomState,
        generator: torch.Generator,
        inside: _ModuleStack,
        shared: MeshDraws | None,
    ) -> None:
        super().__init__()
        self._calls, self._state, self._generator, self._inside = calls, state, generator, inside
        self._shared = shared
        self.count = 0
        inside.on_begin = self._begin_module

    def _begin_module(self, names: set[str]) -> bool:
        """Start the generator anew for a module that runs as it is, where its call is the next."""
        if self.count == len(self._calls):
            return False
        call = self._calls[self.count]
        if not call.whole or call.module not in names:
            return False
        if self._shared is not None and self._shared.takes(self.count):
            raise RngOpMismatchError(
                f"module {call.module!r} runs as it is and draws random numbers, which on heterogeneous meshes cannot be "
                "replayed in the plain model"
            )
        self._state.restart(call.operation)
        self.count += 1
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = _may_draw(function) and not self._inside.alone and self._is_next(args)
        if known and self._shared is not None and self._shared.takes(self.count):
            self.count += 1
            return self._shared.draw(self.count - 1, function, args, kwargs or {})
        if known and self._calls[self.count].first:
            self._state.restart(self._calls[self.count].operation)
        result, drew = _call_kernel(function, args, kwargs, self._generator)
        self.count += drew and known
        return result

    def _is_next(self, args: Sequence[object]) -> bool:
        """True if a call has the shape and the module of the one that the graph makes next."""
        if self.count == len(self._calls):
            return False
        call = self._calls[self.count]
        return not call.whole and call.shape == _drawn_shape(args) and call.module in self._inside.names
