"""Runs a module of the model as it is, eagerly, as one node in the graph of a stage: `OpaqueCall`.

The module has no parameters and buffers of its own here: those of the stage are passed in with the inputs and put in
their places for the call (torch.func.functional_call), so that layers, optimizers and checkpoints know them as always.
Fake tensors are answered with the shapes that were recorded. A call that does something else than the recorded ones
(other shapes, an input changed in place) is a RuntimeError that names the module. Must not know exports or stages.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.func import functional_call

from worker.model.pytree import TreeSpec, flatten_tree

_CONSTANTS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)


class OpaqueError(Exception):
    """A module that cannot run as it is either; the message says why, without naming it."""


@dataclass(frozen=True)
class TensorMeta:
    """The form of a tensor that a module takes or returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, value: Tensor) -> TensorMeta:
        """OpaqueError for a sparse tensor."""
        if value.layout != torch.strided:
            raise OpaqueError(
                f"it passes on a tensor of layout {value.layout}, and stages know dense ones only"
            )
        return cls(tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)

    def matches(self, value: Tensor) -> bool:
        """True for a tensor of the same shape and type."""
        return tuple(value.shape) == self.shape and value.dtype == self.dtype

    def empty(self, device: torch.device) -> Tensor:
        """A tensor of this form, without values."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def flatten_values(value: Any) -> tuple[tuple[Tensor, ...], TreeSpec]:
    """The tensors of a module's arguments or results, and what puts them together again with the same numbers, texts and
    types. OpaqueError for anything else in them."""

    def keep(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, _CONSTANTS):
            return leaf
        raise OpaqueError(
            f"it takes or returns a {type(leaf).__name__}, and a graph passes on tensors, numbers and texts only"
        )

    return flatten_tree(value, keep)


@dataclass(frozen=True)
class CallRecord:
    """One call of a module, as it was seen: `path` is the module's name in the model, `number` counts its calls.

    `state` has all names of each parameter and buffer in the module, `changed` the places in it of those that the call
    changed. `draws` says that it drew random numbers of torch.
    """

    path: str
    number: int
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    results: TreeSpec
    state: tuple[tuple[str, ...], ...]
    changed: frozenset[int]
    draws: bool


class OpaqueCall(nn.Module):
    """Calls `module` with the tensors of the graph: those of its arguments, then its parameters and buffers.

    `arguments` puts positional and keyword arguments together. Gradients are computed inside whatever the mode of the
    caller, as the module may take derivatives itself. Returns the tensors of the result, in order.
    """

    def __init__(self, module: nn.Module, kind: str, record: CallRecord, arguments: TreeSpec):
        super().__init__()
        self._held = (
            module,
        )  # no submodule: a stage has the parameters, and copies the module with this call
        self.kind, self.record, self.arguments = kind, record, arguments
        self._names = tuple(_places(module, names) for names in record.state)

    @property
    def module(self) -> nn.Module:
        """The module that is called."""
        return self._held[0]

    def use(self, module: nn.Module) -> None:
        """Call `module` from now on, a copy of the present one."""
        self._held = (module,)

    @property
    def changed(self) -> tuple[int, ...]:
        """The places among the arguments of tensors that a call changes."""
        return tuple(len(self.record.inputs) + place for place in sorted(self.record.changed))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        record = self.record
        if (mode := detect_fake_mode(tensors)) is not None:
            with mode:
                return tuple(self._fake(meta, tensors) for meta in record.outputs)
        inputs, state = tensors[: len(record.inputs)], tensors[len(record.inputs) :]
        versions = [value._version for value in tensors]
        # an alias: whether the module asks for a gradient of an input is its own affair
        given = [value if value.requires_grad else value.detach() for value in inputs]
        positional, keywords = self.arguments.unflatten(given)
        named = {name: value for names, value in zip(self._names, state, strict=True) for name in names}
        held = dict(named)
        with torch.enable_grad():
            result = functional_call(
                self.module, held, tuple(positional), keywords, tie_weights=False, strict=False
            )
        self._take_replaced_buffers(named, held)
        outputs = self._outputs(result)
        self._check_unchanged(tensors, versions)
        return self._apart(outputs, tensors)

    def _fake(self, meta: TensorMeta, tensors: Sequence[Tensor]) -> Tensor:
        value = meta.empty(tensors[0].device if tensors else torch.device("cpu"))
        return value.requires_grad_() if meta.requires_grad and torch.is_grad_enabled() else value

    @torch.no_grad()
    def _take_replaced_buffers(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        for name, value in before.items():
            new = after[name]
            if new is value:
                continue
            if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
                raise RuntimeError(f"{self}: it gave buffer {name!r} another shape or type")
            value.copy_(new)

    def _outputs(self, result: Any) -> tuple[Tensor, ...]:
        record = self.record
        try:
            outputs, tree = flatten_values(result)
        except OpaqueError as error:
            raise RuntimeError(f"{self}: {error}") from None
        if tree != record.results or not all(
            meta.matches(value) for meta, value in zip(record.outputs, outputs, strict=True)
        ):
            raise RuntimeError(
                f"{self}: it returned {tree.describe(outputs)} where it had returned "
                f"{', '.join(map(str, record.outputs))}: the shapes, types and numbers that a module passes on must not "
                "depend on values"
            )
        if torch.is_grad_enabled() and any(
            value.requires_grad and not meta.requires_grad
            for meta, value in zip(record.outputs, outputs, strict=True)
        ):
            raise RuntimeError(
                f"{self}: its result takes a gradient, and when it was recorded it took none: let that not depend on values"
            )
        return outputs

    def _check_unchanged(self, tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
        names = [
            *(f"input {at}" for at in range(len(self.record.inputs))),
            *(names[0] for names in self.record.state),
        ]
        for at, (value, version) in enumerate(zip(tensors, versions, strict=True)):
            if value._version != version and at not in self.changed:
                raise RuntimeError(
                    f"{self}: it changed {names[at]} in place, which it had not done before: let it change a copy, or a "
                    "buffer in every forward"
                )

    @staticmethod
    def _apart(outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, each in memory of its own, as the graph takes them to be; detached where no gradient is asked for."""
        known, apart = {value.untyped_storage()._cdata for value in tensors}, []
        for value in outputs:
            if (place := value.untyped_storage()._cdata) in known:
                value = value.clone()
            known.add(place)
            apart.append(value if torch.is_grad_enabled() else value.detach())
        return tuple(apart)

    def __str__(self) -> str:
        return (
            f"module {self.record.path!r} ({self.kind}), which runs as it is"
            if self.record.path
            else self.kind
        )


def _places(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """One of the names of a tensor for each place: a module that stands at several paths has several for one, and
    functional_call would put back only some of them."""
    modules = dict(module.named_modules(remove_duplicate=False))
    places: dict[tuple[int, str], str] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        places.setdefault((id(modules[path]), attribute), name)
    return tuple(places.values())


def opaque_call(node: fx.Node) -> OpaqueCall | None:
    """The call of a module that runs as it is, where a node is one."""
    if node.op != "call_module" or node.graph.owning_module is None:
        return None
    found = node.graph.owning_module.get_submodule(str(node.target))
    return found if isinstance(found, OpaqueCall) else None


def opaque_calls(module: nn.Module) -> list[OpaqueCall]:
    """The calls of modules as they are in the graphs of `module`."""
    return [part for part in module.modules() if isinstance(part, OpaqueCall)]


def copied_modules(calls: Sequence[OpaqueCall]) -> list[nn.Module]:
    """Copies of the modules of `calls` in their present Python state; calls of one module share its copy."""
    memo: dict[int, Any] = {}
    return [copy.deepcopy(call.module, memo) for call in calls]


@contextlib.contextmanager
def using_modules(calls: Sequence[OpaqueCall], modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which each of `calls` calls its one of `modules` in place of its own."""
    before = [call.module for call in calls]
    for call, module in zip(calls, modules, strict=True):
        call.use(module)
    try:
        yield
    finally:
        for call, module in zip(calls, before, strict=True):
            call.use(module)


def copy_calls(module: fx.GraphModule, memo: dict[int, Any]) -> None:
    """Give a graph, and those that it calls, calls of their own; with one `memo` calls of one module share its copy."""
    for name, part in list(module.named_children()):
        if isinstance(part, OpaqueCall):
            setattr(module, name, copy.deepcopy(part, memo))
        elif isinstance(part, fx.GraphModule):
            copy_calls(part, memo)
