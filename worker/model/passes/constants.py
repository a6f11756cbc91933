"""Folds values that depend on no input of a model into buffers, computed once when the model is traced.

A value is constant if pure operations compute it from factories (arange, zeros, …) and from buffers that neither
forward nor a checkpoint changes. Random operations, custom operators and persistent buffers, which a checkpoint may
bring back with other values, make none. The buffers that hold folded values are no state of the model: they are
never persistent, and stages share them by name.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from worker.model.layers import inner_graph, is_random
from worker.model.passes.inplace import changed_copy

MAX_FOLDED_BYTES = 64 * 2**20
"""A larger value is computed where it is used, as the model says."""
_FACTORIES = frozenset(
    f"{name}{suffix}" for name in ("empty", "full", "ones", "zeros", "rand") for suffix in ("", "_like")
) | frozenset(f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros"))


class GraphConstants:
    """The constants of a graph: `nodes` that have constant values, these values, and the placeholders that hold some.

    `leaves` are the placeholders of tensors that never change, with these; `entered` gives the context in which nodes
    run (autocast, say). `added` has every placeholder that was added, in the order of the graph, with its tensor.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        leaves: Mapping[fx.Node, Tensor],
        entered: Callable[[], AbstractContextManager],
    ):
        self.module = module
        self.nodes = _constant_nodes(module.graph, leaves.keys())
        self.added: dict[fx.Node, Tensor] = {}
        self._leaves, self._entered = leaves, entered

    def values(self, wanted: Collection[fx.Node]) -> Iterator[tuple[fx.Node, Any]]:
        """The nodes of `wanted` in the order of the graph, each with its value; others are dropped after their last use.

        Values that cannot be computed here are left out: the CPU may lack a kernel or the memory.
        """
        needed = self._needed_for(wanted)
        order = [node for node in self.module.graph.nodes if node in needed]
        last_users = {arg: node for node in order for arg in node.all_input_nodes}
        interpreter = fx.Interpreter(self.module, garbage_collect_values=False)
        known = interpreter.env
        for node in order:
            if node.op == "placeholder":
                known[node] = self._leaves[node]
            elif all(arg in known for arg in node.all_input_nodes):
                with torch.no_grad(), self._entered(), contextlib.suppress(RuntimeError):
                    known[node] = interpreter.run_node(node)
            if node in wanted and node in known:
                yield node, known[node]
            for arg in {node, *node.all_input_nodes}:
                if last_users.get(arg, node) is node:
                    known.pop(arg, None)

    def placeholder(self, value: Tensor) -> fx.Node:
        """A placeholder that holds a copy of `value`; the same one for equal values."""
        for node, held in self.added.items():
            same_layout = (held.dtype, held.shape) == (value.dtype, value.shape)
            if same_layout and torch.equal(held, value):
                return node
        graph = self.module.graph
        last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
        with graph.inserting_after(last):
            node = graph.placeholder(f"folded_constant_{len(self.added)}")
        self.added[node] = value.detach().clone()
        return node

    def erase_unused(self) -> None:
        """Erase the constant nodes that nothing uses any longer."""
        for node in reversed(self.module.graph.nodes):
            if node in self.nodes and node.op != "placeholder" and not node.users:
                self.module.graph.erase_node(node)

    def _needed_for(self, wanted: Collection[fx.Node]) -> set[fx.Node]:
        needed: set[fx.Node] = set()
        waiting = list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        return needed


def fold_constants(constants: GraphConstants, values: Mapping[fx.Node, Any]) -> None:
    """Put placeholders in place of the constants that other operations use; `values` are the fake results of all nodes.

    Factories stay, as do views, which cost nothing: the value that they are views of is folded. What the model returns
    stays too, and values of more than MAX_FOLDED_BYTES.
    """
    graph, used, returned = constants.module.graph, {}, set()
    for node in graph.nodes:
        if node not in constants.nodes or not isinstance(values[node], Tensor):
            continue
        if any(user.op == "output" for user in node.users):
            returned.add(_view_source(node, values))
        elif any(user not in constants.nodes for user in node.users):
            used[_view_source(node, values)] = None
    wanted = {node for node in used if node not in returned and _is_worth_folding(node, values[node])}
    folded = {node: constants.placeholder(value) for node, value in constants.values(wanted)}
    for node, placeholder in folded.items():
        node.replace_all_uses_with(placeholder)
    constants.erase_unused()


def _constant_nodes(graph: fx.Graph, leaves: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes that pure operations compute from `leaves` and from nothing, and the leaves."""
    found = set(leaves)
    for node in graph.nodes:
        pure = node.op == "get_attr" or (node.op == "call_function" and _is_pure(node))
        if pure and all(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_pure(node: fx.Node) -> bool:
    """True for a function of torch (or getitem) that draws nothing, in all that it calls."""
    inner = inner_graph(node)
    if inner is not None:
        return all(_is_pure(part) for part in inner.graph.nodes if part.op == "call_function")
    if isinstance(node.target, torch._ops.OpOverload):
        own = node.target.namespace in ("aten", "prims")
        return own and not node.target._schema.is_mutable and not is_random(node)
    return node.target in (operator.getitem, changed_copy)


def _view_source(node: fx.Node, values: Mapping[fx.Node, Any]) -> fx.Node:
    """The value that `node` is a view of, unless that is larger; otherwise itself."""
    while len(node.all_input_nodes) == 1:
        source = node.all_input_nodes[0]
        if not isinstance(values[source], Tensor) or storage_id(values[source]) != storage_id(values[node]):
            break
        if values[source].numel() > values[node].numel():
            break
        node = source
    return node


def _is_worth_folding(node: fx.Node, value: Tensor) -> bool:
    """False for what takes no computing, and for too large values."""
    if node.op != "call_function" or value.nbytes > MAX_FOLDED_BYTES:
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return bool(node.all_input_nodes) and (packet is None or packet.__name__ not in _FACTORIES)


def storage_id(value: Tensor) -> int:
    """An identifier of a tensor's memory, equal for all views of it."""
    return value.untyped_storage()._cdata
