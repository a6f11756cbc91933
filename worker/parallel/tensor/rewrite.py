"""Rewrites a stage's graph for one worker of a tensor-parallel group: parameters split, collectives inserted.

Every value of the graph is whole on all ranks or split along one dimension. Where an operation has a rule
(rules.py) for the splits it is given it runs on the parts; any other gets whole tensors, gathered for it: what
is computed is always what the whole graph computes. Shapes are static, so all is decided before anything runs,
and the collectives of every rank stand in the same order in the same graph.
The scheme is Megatron-LM's (Shoeybi et al. 2019), found by propagation as in GSPMD (Xu et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from worker.parallel.tensor.graph_collectives import (
    CopyToGroup,
    GatherFromGroup,
    ReduceFromGroup,
    ScatterToGroup,
    TensorGroup,
)
from worker.parallel.tensor.placement import LayoutError, Split

_COLLECTIVE_PREFIX = "tensor_"


@dataclass(frozen=True)
class ShardedValue:
    """A value of the new graph; `split` is None where every worker has it whole, a tuple of them for a list."""

    node: fx.Node
    split: Split | tuple[Split | None, ...] | None = None


@dataclass
class GatherCost:
    """The elements that are gathered because no rule keeps them split, and the parameters from which the split came.

    `refused` are the splits that the number of ranks does not divide; `untracked_views` counts views that no split can
    follow.
    """

    elements: int = 0
    origins: set[str] = field(default_factory=set)
    refused: list[LayoutError] = field(default_factory=list)
    untracked_views: int = 0

    @property
    def cost(self) -> tuple[int, int, int, int]:
        """Less is better; of refusals the one that leaves most."""
        most = max((one.max_workers for one in self.refused), default=0)
        return self.elements, self.untracked_views, len(self.refused), -most


class Rewriter:
    """Builds the graph of one worker; `splits` are those of parameters, by their names in the graph."""

    def __init__(self, body: fx.GraphModule, values: Mapping[fx.Node, Any], group: TensorGroup):
        self.body, self.values, self.group = body, values, group
        self.gathered = GatherCost()
        self._graph = fx.Graph()
        self._modules: dict[str, nn.Module] = {}
        self._of: dict[fx.Node, ShardedValue] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        self._copied_nodes: dict[fx.Node, fx.Node] = {}
        self._scattered_nodes: dict[tuple[fx.Node, int, tuple[int, ...]], fx.Node] = {}
        self._changes = {
            _storage_id(values.get(node.args[0])) for node in body.graph.nodes if is_inplace(node)
        }
        self._place = {node: place for place, node in enumerate(body.graph.nodes)}
        self._gathered_views: set[fx.Node] = set()

    def run(self, splits: Mapping[str, Split], rules: Mapping[str, Any]) -> fx.GraphModule:
        """The graph in which the parameters `splits` are split; they are cut to size here. LayoutError."""
        for node in self.body.graph.nodes:
            if node.op == "output":
                self._graph.output(tuple(self.whole(one) for one in node.args[0]))
                continue
            if is_inplace(node):
                self._forget_copies()
                self._check_views(node)
            split = splits.get(node.target) if node.op == "get_attr" else None
            if split is not None:
                split.check(self.group.workers, f"parameter {node.target}")
            if split is not None or not any(self.split_of(one) for one in node.all_input_nodes):
                self._of[node] = ShardedValue(
                    self._graph.node_copy(node, lambda old: self._of[old].node), split
                )
                self._remember_copy(node)
                continue
            rule = rules.get(op_name(node))
            made = rule(self, node) if rule is not None else None
            self._of[node] = made if made is not None else self.on_whole(node)
            self._remember_copy(node)
        self._graph.lint()
        root = {name: self._cut(name, value, splits) for name, value in self._attributes().items()}
        return fx.GraphModule({**root, **self._modules}, self._graph, class_name=type(self.body).__name__)

    # What rules use

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of the whole tensor of `node`."""
        return tuple(self.values[node].shape)

    def split_of(self, node: Any) -> Split | tuple[Split | None, ...] | None:
        return self._of[node].split if isinstance(node, fx.Node) else None

    def local(self, node: fx.Node) -> fx.Node:
        """The new node of a value in its present layout."""
        return self._of[node].node

    def whole(self, node: fx.Node) -> fx.Node:
        """The new node of a whole value; gathered where it is split."""
        value = self._of[node]
        if value.split is None:
            return value.node
        if isinstance(value.split, tuple):
            raise LayoutError(
                f"{node.name} makes a list of split tensors, which is used as a list: leave the parameters "
                f"{', '.join(sorted(set().union(*(s.origins for s in value.split if s))))} whole"
            )
        if node not in self._wholes:
            self.gathered.elements += math.prod(self.shape(node))
            self.gathered.origins |= value.split.origins
            self._wholes[node] = self.call(GatherFromGroup(self.group, value.split), value.node)
        return self._wholes[node]

    def copied_to_group(self, node: fx.Node) -> fx.Node:
        """The new node of a whole value whose gradient is computed in parts."""
        if not self._takes_gradient(node):
            return self.whole(node)
        if node not in self._copied_nodes:
            self._copied_nodes[node] = self.call(CopyToGroup(self.group), self.whole(node))
        return self._copied_nodes[node]

    def scattered(self, node: fx.Node, split: Split) -> fx.Node:
        """The new node of a value split by `split`."""
        have = self.split_of(node)
        if have is not None and have.same_layout(split):
            return self._of[node].node
        split.check(self.group.workers, f"a dimension of {node.name}")
        key = (node, split.dim, split.parts)
        if key not in self._scattered_nodes:
            self._scattered_nodes[key] = self.call(ScatterToGroup(self.group, split), self.whole(node))
        return self._scattered_nodes[key]

    def unaliased(self, node: fx.Node, of: fx.Node) -> fx.Node:
        """The new node of `of`, whose elements `node` has; a copy where their whole tensors have memory of their own and
        one is changed in place, as the shards might be views of one another."""
        memories = {_storage_id(self.values[node]), _storage_id(self.values[of])}
        if len(memories) == 1 or memories.isdisjoint(self._changes):
            return self.local(of)
        return self.add(torch.ops.aten.clone.default, self.local(of))

    def call(self, module: nn.Module, *arguments: fx.Node) -> fx.Node:
        """A new node that calls a module of the group."""
        name = f"{_COLLECTIVE_PREFIX}{len(self._modules)}"
        self._modules[name] = module
        return self._graph.call_module(name, arguments)

    def reduced(self, node: fx.Node) -> fx.Node:
        return self.call(ReduceFromGroup(self.group), node)

    def emit(self, node: fx.Node, target: Any, arguments: tuple, keywords: Mapping | None = None) -> fx.Node:
        """A new node in the place of `node`, of any function, with its name and metadata."""
        made = self._graph.create_node(
            "call_function", target, arguments, dict(keywords or {}), name=node.name
        )
        made.meta = dict(node.meta)
        return made

    def add(self, target: Any, *arguments: Any) -> fx.Node:
        """A new node without a counterpart in the old graph."""
        return self._graph.call_function(target, arguments)

    def copy(
        self, node: fx.Node, given: Mapping[fx.Node, fx.Node], split: Any, **changed: Any
    ) -> ShardedValue:
        """The same operation on the new nodes `given`, with the named arguments in `changed` replaced."""
        bound = bound_arguments(node)
        names = list(bound)
        mapped = {
            name: changed[name]
            if name in changed
            else fx.map_arg(value, lambda old: given.get(old, self.local(old)))
            for name, value in bound.items()
        }
        only = {argument.name for argument in node.target._schema.arguments if argument.kwarg_only}
        positional = tuple(mapped[name] for name in names if name not in only)
        keywords = {name: mapped[name] for name in names if name in only}
        return ShardedValue(self.emit(node, node.target, positional, keywords), split)

    def on_whole(self, node: fx.Node) -> ShardedValue:
        """Run any operation on whole tensors. LayoutError for one that would change a gathered copy in place."""
        if is_inplace(node) and self.split_of(node.args[0]) is not None:
            raise LayoutError(
                f"{node.name} changes a split tensor in place: write the operation that makes a new one"
            )
        copied = self._graph.node_copy(node, self.whole)
        return ShardedValue(copied)

    # Inside

    def _takes_gradient(self, node: fx.Node) -> bool:
        value = self.values[node]
        if node.op == "get_attr":
            return isinstance(getattr(self.body, node.target), nn.Parameter)
        return value.is_floating_point() or value.is_complex()

    def _remember_copy(self, node: fx.Node) -> None:
        """Remember whether the view `node` of a tensor has become a view of a gathered copy."""
        memory = _storage_id(self.values[node])
        for one in node.all_input_nodes:
            gathered = self.split_of(one) is not None and self.split_of(node) is None
            if (
                memory is not None
                and memory == _storage_id(self.values[one])
                and (gathered or one in self._gathered_views)
            ):
                self._gathered_views.add(node)

    def _check_views(self, node: fx.Node) -> None:
        """LayoutError where `node` changes a view of one tensor in place, and its views have become views of several."""
        changed = node.args[0]
        memory, now = _storage_id(self.values.get(changed)), self._place[node]
        for other in self._of:
            if memory is None or _storage_id(self.values[other]) != memory:
                continue
            apart = (other in self._gathered_views) != (changed in self._gathered_views)
            if apart and any(self._place[user] > now for user in other.users):
                raise LayoutError(
                    f"{node.name} changes {changed.name} in place, which {other.name} is a view of too, and one of both is "
                    "split: write the operation that makes a new one"
                )

    def _forget_copies(self) -> None:
        """Forget gathered and scattered copies: an operation in place has made them stale."""
        for copies in (self._wholes, self._copied_nodes, self._scattered_nodes):
            copies.clear()

    def _attributes(self) -> dict[str, Any]:
        return {
            node.target: getattr(self.body, node.target)
            for node in self.body.graph.nodes
            if node.op == "get_attr"
        }

    def _cut(self, name: str, value: Any, splits: Mapping[str, Split]) -> Any:
        if name not in splits:
            return value
        part = splits[name].pick(value.detach(), self.group.worker, self.group.workers).clone()
        return nn.Parameter(part, requires_grad=value.requires_grad)


def _storage_id(value: Any) -> int | None:
    """An identifier of a tensor's memory, equal for all views of it."""
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, with its defaults up to the last one given."""
    schema = node.target._schema.arguments
    bound = dict(zip([argument.name for argument in schema], node.args, strict=False)) | dict(node.kwargs)
    last = max(index for index, argument in enumerate(schema) if argument.name in bound)
    return {
        argument.name: bound.get(argument.name, argument.default_value)
        for index, argument in enumerate(schema)
        if argument.name in bound or (index < last and not argument.kwarg_only)
    }


def op_name(node: fx.Node) -> str:
    """The name that rules have for an operation: "linear" for all overloads of aten.linear."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is not None:
        if torch.Tag.pointwise in node.target.tags:
            return "pointwise"
        return packet.__name__
    return getattr(node.target, "__name__", "")


def is_inplace(node: fx.Node) -> bool:
    """True for an operator that changes its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    )
