"""Nests of tensors: tuples, dicts and dataclasses of them (those of transformers and diffusers among them), taken apart
and put together again.

Stages and transports know tensors only; what a model returns, and what a data set gives as a target, may be more.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hole:
    """Where in a nest its tensor number `index` was."""

    index: int


@dataclass(frozen=True)
class Form:
    """A nest with holes in place of its tensors, whose dotted `names` are in order; anything else that was in it and is
    no number, text or None is gone, None is in its place."""

    nest: Any
    names: tuple[str, ...]

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nest with these tensors; its dicts, lists and dataclasses are new ones."""
        return _mapped(self.nest, lambda leaf: tensors[leaf.index] if isinstance(leaf, Hole) else leaf)

    def describe(self, tensors: Sequence[Tensor]) -> str:
        """For people: its kind, and the names and shapes of its tensors."""
        return described(self.nest, zip(self.names, tensors, strict=True))


@dataclass(frozen=True, eq=False)
class Targets:
    """Several targets of a microbatch, and what else its loss takes, as one: it moves to devices as one tensor does.

    `inputs` are those of the model, by name where they have names, else in order; None where the loss takes none.
    """

    tensors: tuple[Tensor, ...]
    form: Form

    @classmethod
    def of(cls, target: Any, inputs: Any = None) -> Targets:
        return cls(*taken_apart((target, inputs)))

    @property
    def target(self) -> Any:
        """As the data set gives it, stacked."""
        return self.form.filled(self.tensors)[0]

    @property
    def inputs(self) -> Any:
        return self.form.filled(self.tensors)[1]

    @property
    def is_cuda(self) -> bool:
        return all(tensor.is_cuda for tensor in self.tensors)

    def __len__(self) -> int:
        """How many samples."""
        return len(self.tensors[0])

    def __getitem__(self, rows: slice) -> Targets:
        """Those of some samples."""
        return Targets(tuple(tensor[rows] for tensor in self.tensors), self.form)

    def to(self, *args: Any, **options: Any) -> Targets:
        """As Tensor.to."""
        return Targets(tuple(tensor.to(*args, **options) for tensor in self.tensors), self.form)

    def pin_memory(self) -> Targets:
        """As Tensor.pin_memory."""
        return Targets(tuple(tensor.pin_memory() for tensor in self.tensors), self.form)


Target = Tensor | Targets


def all_tensors(target: Target) -> tuple[Tensor, ...]:
    """The tensors of a target, in order."""
    return target.tensors if isinstance(target, Targets) else (target,)


def tokens_of(target: Target, ignored: int) -> Tensor:
    """How many entries of a target are not `ignored`; ValueError where it is not one tensor."""
    found = target.target if isinstance(target, Targets) else target
    if not isinstance(found, Tensor):
        raise ValueError(
            "training.loss_reduction is tokens, and the target of a sample is several tensors, whose tokens nobody can "
            "count: return one, or take loss_reduction: mean"
        )
    return (found != ignored).sum()


def no_loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Zero, with gradients of zero for what a model returned: what a microbatch without tokens adds."""
    made = output if isinstance(output, tuple) else (output,)
    return sum(
        (one.sum() * 0.0 for one in made if one.is_floating_point()), torch.zeros(()).to(made[0].device)
    )


def taken_apart(value: Any) -> tuple[tuple[Tensor, ...], Form]:
    """The tensors of a nest, and what puts them together again."""
    tensors: list[Tensor] = []

    def leaf(found: Any) -> Any:
        if isinstance(found, Tensor):
            tensors.append(found)
            return Hole(len(tensors) - 1)
        return found if found is None or isinstance(found, bool | int | float | str) else None

    form = Form(_mapped(value, leaf), tuple(name for name, _ in tensors_of(value)))
    return tuple(tensors), form


def tensors_of(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest with their dotted names; that of a tensor itself is empty."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, part in parts_of(value):
        yield from tensors_of(part, f"{path}.{name}" if path else name)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of the outermost dict, dataclass, tuple or list by name; of anything else none."""
    if isinstance(value, Mapping):  # before dataclasses: ModelOutput is both
        yield from ((str(key), part) for key, part in value.items())
    elif _is_dataclass(value):
        yield from ((one.name, getattr(value, one.name)) for one in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from ((str(name), part) for name, part in zip(names, value, strict=True))


def described(value: Any, tensors: Iterator[tuple[str, Tensor]] | None = None) -> str:
    """For people: the kind of a nest, and the names and shapes of its tensors."""
    found = tensors_of(value) if tensors is None else tensors
    shown = ", ".join(f"{name or 'a tensor'} {list(tensor.shape)}" for name, tensor in found)
    return f"a {type(value).__name__} of {shown or 'no tensors'}"


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The nest with what `leaf` makes of each thing in it that is no nest, in the order of `tensors_of`."""
    if isinstance(value, Hole):  # a dataclass too
        return leaf(value)
    if isinstance(value, Mapping):
        made = {key: _mapped(part, leaf) for key, part in value.items()}
        if not _is_dataclass(value):
            return made if type(value) is dict else _like(value, made)
        # as transformers' and diffusers' are: what is None is a field and no entry
        left = {one.name: None for one in dataclasses.fields(value) if one.name not in made}
        return type(value)(**left, **made)
    if _is_dataclass(value):
        made = copy.copy(value)
        for one in dataclasses.fields(value):
            object.__setattr__(made, one.name, _mapped(getattr(value, one.name), leaf))
        return made
    if isinstance(value, tuple | list):
        made = [_mapped(part, leaf) for part in value]
        if hasattr(value, "_fields"):
            return type(value)(*made)
        return tuple(made) if isinstance(value, tuple) else made
    return leaf(value)


def _like(value: Mapping, entries: dict[Any, Any]) -> Any:
    """A dict of the same kind, where that can be made of entries; else a plain one."""
    try:
        return type(value)(entries)
    except Exception:
        return entries


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
