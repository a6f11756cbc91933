"""Flattens pytrees of tensors (tuples, dicts, dataclasses) into tensors and a TreeSpec, and rebuilds them.

Dataclasses include those of transformers and diffusers. Stages and transports know tensors only; what a model
returns and what a data set gives as a target may be more: Targets moves such a target as one tensor does. Of
leaves that are no tensors only numbers, texts and None are kept.
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
class LeafSpec:
    """The place of tensor number `index` in a pytree."""

    index: int


@dataclass(frozen=True)
class TreeSpec:
    """A nest with holes in place of its tensors, whose dotted `names` are in order; anything else that was in it and is
    no number, text or None is gone, None is in its place."""

    tree: Any
    names: tuple[str, ...]

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """The nest with these tensors; its dicts, lists and dataclasses are new ones."""
        return _map_tree(self.tree, lambda leaf: tensors[leaf.index] if isinstance(leaf, LeafSpec) else leaf)

    def describe(self, tensors: Sequence[Tensor]) -> str:
        """For people: its kind, and the names and shapes of its tensors."""
        return describe_tree(self.tree, zip(self.names, tensors, strict=True))


@dataclass(frozen=True, eq=False)
class Targets:
    """Several targets of a microbatch, and what else its loss takes, as one: it moves to devices as one tensor does.

    `inputs` are those of the model, by name where they have names, else in order; None where the loss takes none.
    """

    tensors: tuple[Tensor, ...]
    tree_spec: TreeSpec

    @classmethod
    def of(cls, target: Any, inputs: Any = None) -> Targets:
        return cls(*flatten_tree((target, inputs)))

    @property
    def target(self) -> Any:
        """The target as the data set returns it, stacked."""
        return self.tree_spec.unflatten(self.tensors)[0]

    @property
    def inputs(self) -> Any:
        return self.tree_spec.unflatten(self.tensors)[1]

    @property
    def is_cuda(self) -> bool:
        return all(tensor.is_cuda for tensor in self.tensors)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.tensors[0])

    def __getitem__(self, rows: slice) -> Targets:
        """The targets of a slice of samples."""
        return Targets(tuple(tensor[rows] for tensor in self.tensors), self.tree_spec)

    def to(self, *args: Any, **options: Any) -> Targets:
        """Tensor.to, for each tensor."""
        return Targets(tuple(tensor.to(*args, **options) for tensor in self.tensors), self.tree_spec)

    def pin_memory(self) -> Targets:
        """Tensor.pin_memory, for each tensor."""
        return Targets(tuple(tensor.pin_memory() for tensor in self.tensors), self.tree_spec)


Target = Tensor | Targets


def target_tensors(target: Target) -> tuple[Tensor, ...]:
    """The tensors of a target, in order."""
    return target.tensors if isinstance(target, Targets) else (target,)


def count_tokens(target: Target, ignored: int) -> Tensor:
    """The number of entries of a target that are not `ignored`; ValueError where it is not one tensor."""
    found = target.target if isinstance(target, Targets) else target
    if not isinstance(found, Tensor):
        raise ValueError(
            "training.loss_reduction is tokens, and the target of a sample is several tensors, whose tokens nobody can "
            "count: return one, or take loss_reduction: mean"
        )
    return (found != ignored).sum()


def zero_loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Zero, with gradients of zero for what a model returned: what a microbatch without tokens adds."""
    made = output if isinstance(output, tuple) else (output,)
    return sum(
        (one.sum() * 0.0 for one in made if one.is_floating_point()), torch.zeros(()).to(made[0].device)
    )


def flatten_tree(value: Any, keep: Callable[[Any], Any] | None = None) -> tuple[tuple[Tensor, ...], TreeSpec]:
    """The tensors of a nest, and what puts them together again. `keep` says what stays of a leaf that is no tensor; without
    it numbers, texts and None."""
    tensors: list[Tensor] = []

    def leaf(found: Any) -> Any:
        if isinstance(found, Tensor):
            tensors.append(found)
            return LeafSpec(len(tensors) - 1)
        if keep is not None:
            return keep(found)
        return found if found is None or isinstance(found, bool | int | float | str) else None

    tree_spec = TreeSpec(_map_tree(value, leaf), tuple(name for name, _ in named_leaves(value)))
    return tuple(tensors), tree_spec


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nest with their dotted names; that of a tensor itself is empty."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for name, part in named_children(value):
        yield from named_leaves(part, f"{path}.{name}" if path else name)


def named_children(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of the outermost dict, dataclass, tuple or list by name; of anything else none."""
    if isinstance(value, Mapping):  # before dataclasses: ModelOutput is both
        yield from ((str(key), part) for key, part in value.items())
    elif _is_dataclass(value):
        yield from ((one.name, getattr(value, one.name)) for one in dataclasses.fields(value))
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None) or range(len(value))
        yield from ((str(name), part) for name, part in zip(names, value, strict=True))


def describe_tree(value: Any, tensors: Iterator[tuple[str, Tensor]] | None = None) -> str:
    """For people: the kind of a nest, and the names and shapes of its tensors."""
    found = named_leaves(value) if tensors is None else tensors
    shown = ", ".join(f"{name or 'a tensor'} {list(tensor.shape)}" for name, tensor in found)
    return f"a {type(value).__name__} of {shown or 'no tensors'}"


def _map_tree(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with what `leaf` makes of each of its leaves, in the order of `named_leaves`."""
    if isinstance(value, LeafSpec):  # a dataclass too
        return leaf(value)
    if isinstance(value, Mapping):
        made = {key: _map_tree(part, leaf) for key, part in value.items()}
        if not _is_dataclass(value):
            return made if type(value) is dict else _rebuild_mapping(value, made)
        # as transformers' and diffusers' are: what is None is a field and no entry
        left = {one.name: None for one in dataclasses.fields(value) if one.name not in made}
        return type(value)(**left, **made)
    if _is_dataclass(value):
        made = copy.copy(value)
        for one in dataclasses.fields(value):
            object.__setattr__(made, one.name, _map_tree(getattr(value, one.name), leaf))
        return made
    if isinstance(value, tuple | list):
        made = [_map_tree(part, leaf) for part in value]
        if hasattr(value, "_fields"):
            return type(value)(*made)
        return tuple(made) if isinstance(value, tuple) else made
    return leaf(value)


def _rebuild_mapping(value: Mapping, entries: dict[Any, Any]) -> Any:
    """A dict of the same kind, where that can be made of entries; else a plain one."""
    try:
        return type(value)(entries)
    except Exception:
        return entries


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
