"""Rewrites in-place operations of an exported graph, so that no stage changes a tensor of another.

An operation that changes what its own layer made, or a buffer, stays as it is; any other becomes a change of a
copy, and everything after it uses the copy. `changed_copy` and `changed_copy_at_random` are call targets inside
graphs: fx derives node names (edges of plans, seeds of random operations) from these function names, so they keep
them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from worker.contract.profile import TraceError
from worker.model.layers import inner_graph, is_random, user_line
from worker.model.opaque.call import opaque_call

# operations that update running statistics although their schema does not say so: the arguments
# that hold them, and the flag that switches the update on
_RUNNING_STATISTICS_OPS = {
    torch.ops.aten.batch_norm.default: ((3, 4), 5),
    torch.ops.aten.instance_norm.default: ((3, 4), 5),
}
# Stands for operator.getitem among a node's arguments, where fx cannot write that function as code.
_GETITEM = "getitem"


def changed_copy(base: torch.Tensor, views: tuple, change: tuple) -> torch.Tensor:
    """A copy of `base` in which the view that `views` leads to was changed in place.

    `views` is a chain of (operation, other arguments, keywords); `change` is one such step.
    """
    copy = base.clone()
    part: Any = copy
    for step, arguments, keywords in (*views, change):
        call = operator.getitem if step == _GETITEM else step
        part = call(part, *arguments, **dict(keywords))
    return copy


def changed_copy_at_random(base: torch.Tensor, views: tuple, change: tuple) -> torch.Tensor:
    """`changed_copy` where the change draws random numbers."""
    return changed_copy(base, views, change)


changed_copy_at_random.tags = (torch.Tag.nondeterministic_seeded,)  # as torch marks its own operations


def isolate_mutations(
    graph: fx.Graph,
    calls: dict[fx.Node, str],
    values: Mapping[fx.Node, Any],
    buffers: Mapping[fx.Node, str],
    parameters: Mapping[fx.Node, str],
) -> dict[fx.Node, frozenset[fx.Node]]:
    """Rewrite `graph` so; return the placeholders of buffers that it updates, each with its aliases (itself,
    views of it, and what changes of it return).

    `values` are (fake) results by node: nodes that share a storage alias each other. `calls`
    (layer calls) learns the nodes that are added. Raises TraceError for a change of a parameter.
    """
    return _MutationIsolator(graph, calls, values, buffers, parameters).run()


class _MutationIsolator:
    def __init__(self, graph, calls, values, buffers, parameters):
        self.graph, self.calls, self.values = graph, calls, dict(values)
        self.buffers, self.parameters = buffers, parameters
        # of a module that runs as it is the results are tensors, its node is none of them
        self.storage = {
            node: None if opaque_call(node) is not None else _storage_key(values.get(node))
            for node in graph.nodes
        }
        self.fresh = itertools.count(1)
        self.root: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            if self.storage[node] is not None:
                self.root.setdefault(self.storage[node], node)
        self.sharing: dict[Any, list[fx.Node]] = {}  # by storage, in the order of the graph
        for node in graph.nodes:
            self.sharing.setdefault(self.storage[node], []).append(node)
        self.constant = _constant_nodes(graph, {*buffers})

    def run(self) -> dict[fx.Node, frozenset[fx.Node]]:
        updated = set()
        for node in list(self.graph.nodes):
            for argument in mutated_arguments(node):
                root = self.root[self.storage[argument]]
                if root in self.buffers:
                    updated.add(root)
                elif root in self.parameters:
                    raise _changed_parameter_error(self.parameters[root], node, argument)
                elif not self._stays(node, root):
                    self._rewrite(node, argument, root)
        self._remove_unused(updated)
        return {
            root: frozenset(node for node in self.graph.nodes if self.storage.get(node) == self.storage[root])
            for root in updated
        }

    def _remove_unused(self, updated: set[fx.Node]) -> None:
        """Erase what neither the output nor an update of a buffer in a used module needs."""
        needed: set[fx.Node] = set()
        waiting = [node for node in self.graph.nodes if node.op in ("output", "placeholder")]
        changes = {}  # node -> the values that it changes
        for node in self.graph.nodes:
            if changed := mutated_arguments(node):
                changes[node] = {self.root[self.storage[argument]] for argument in changed}
        while waiting:
            while waiting:
                node = waiting.pop()
                if node not in needed:
                    needed.add(node)
                    waiting += node.all_input_nodes
            used_calls = {self.calls[node] for node in needed if node in self.calls}
            for node, roots in changes.items():
                of_buffer = roots <= updated and (node not in self.calls or self.calls[node] in used_calls)
                if node not in needed and (of_buffer or (roots - updated) & needed):
                    waiting.append(node)
        for node in reversed(self.graph.nodes):
            if node not in needed:
                self.graph.erase_node(node)

    def _stays(self, node: fx.Node, root: fx.Node) -> bool:
        call = self.calls.get(node)
        return call is not None and self.calls.get(root) == call and root not in self.constant

    def _rewrite(self, node: fx.Node, argument: fx.Node, root: fx.Node) -> None:
        if (
            not isinstance(node.target, torch._ops.OpOverload)
            or not node.args
            or node.args[0] is not argument
        ):
            raise TraceError(
                f"the model changes {argument.name!r} in place ({node.target}) where it cannot be cut: "
                "use an operation that returns a new tensor"
            )
        shared = self.sharing[self.storage[root]]
        alive = [other for other in shared if other < node and any(user > node for user in other.users)]
        with self.graph.inserting_before(node):
            functional = _functional_variant(node.target)
            same_type = all(
                self.values[arg].dtype == self.values[argument].dtype
                for arg in node.all_input_nodes
                if isinstance(self.values.get(arg), torch.Tensor)
            )
            if functional is not None and same_type and set(alive) <= {argument}:
                copy = self._add(node, functional, node.args, node.kwargs, self.values[argument])
                replacement = {argument: copy}
            else:
                change = (node.target, tuple(node.args[1:]), tuple(node.kwargs.items()))
                steps = tuple(
                    (
                        _GETITEM if n.target is operator.getitem else n.target,
                        tuple(n.args[1:]),
                        tuple(n.kwargs.items()),
                    )
                    for n in self._path(root, argument)
                )
                target = changed_copy_at_random if is_random(node) else changed_copy
                copy = self._add(node, target, (root, steps, change), {}, self.values[root])
                replacement = {root: copy}
            new = next(self.fresh), "copy"
            for other in [*alive, argument]:
                self._recreate(other, root, replacement)
        for other, substitute in replacement.items():
            other.replace_all_uses_with(substitute, lambda user: user > node)
        later = [other for other in shared if other > node]
        self.sharing[self.storage[root]] = [other for other in shared if other < node]
        self.sharing[new] = [*dict.fromkeys(replacement.values()), *later]
        self.storage |= dict.fromkeys(self.sharing[new], new)
        self.root[new] = copy
        node.replace_all_uses_with(replacement[argument])
        self.graph.erase_node(node)

    def _recreate(self, node: fx.Node, root: fx.Node, replacement: dict[fx.Node, fx.Node]) -> None:
        if node in replacement:
            return
        for step in self._path(root, node):
            if step not in replacement:
                arguments = (replacement[_before_mutation(step.args[0])], *step.args[1:])
                copy = self.graph.create_node("call_function", step.target, arguments, dict(step.kwargs))
                copy.meta = {key: value for key, value in step.meta.items() if key != "nn_module_stack"}
                self.values[copy] = self.values[step]
                replacement[step] = copy
        replacement[node] = replacement[_before_mutation(node)]

    def _path(self, root: fx.Node, node: fx.Node) -> list[fx.Node]:
        """The view operations that lead from `root` to `node`; changes on the way have happened to `root`."""
        path = []
        while (node := _before_mutation(node)) is not root:
            source = node.args[0] if node.args else None
            if not isinstance(source, fx.Node) or self.storage.get(source) != self.storage[root]:
                raise TraceError(
                    f"the model changes a view of {root.name!r} in place through {node.target}, which cannot be "
                    "followed: use an operation that returns a new tensor"
                )
            path.append(node)
            node = source
        return path[::-1]

    def _add(self, node: fx.Node, target: Any, args: tuple, kwargs: Mapping[str, Any], value: Any) -> fx.Node:
        copy = self.graph.create_node("call_function", target, args, dict(kwargs))
        copy.meta = dict(node.meta)
        self.values[copy] = value
        if node in self.calls:
            self.calls[copy] = self.calls[node]
        return copy


def _changed_parameter_error(name: str, node: fx.Node, argument: fx.Node) -> TraceError:
    """The refusal of a forward in which `node` changes `argument`, an alias of the parameter `name`, in place."""
    change = next((part for operand, part in _inner_mutations(node) if operand is argument), node)
    operation = getattr(change.target, "__name__", str(change.target)).partition(".")[0]
    place = user_line(change) or user_line(node)
    return TraceError(
        f"the model changes parameter {name!r} in its forward ({operation}{f', at {place}' if place else ''}), and only the "
        "optimizer may change parameters: weights that forward itself moves (a target network, a mean teacher) must be "
        "buffers: for each of them `del module._parameters[name]`, then `module.register_buffer(name, tensor)`; forward "
        "may then write them in place (copy_, mul_, lerp_), under no_grad as well"
    )


def _before_mutation(node: fx.Node) -> fx.Node:
    """The value itself, where `node` is what a change of it in place returned."""
    while (
        node.op == "call_function"
        and node.args
        and isinstance(node.args[0], fx.Node)
        and node.args[0] in mutated_arguments(node)
    ):
        node = node.args[0]
    return node


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node changes in place."""
    if (call := opaque_call(node)) is not None:
        return [node.args[place] for place in call.changed]
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _mutated_operands(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target in _RUNNING_STATISTICS_OPS:
        places, flag = _RUNNING_STATISTICS_OPS[node.target]
        return [node.args[i] for i in places if node.args[flag] and isinstance(node.args[i], fx.Node)]
    changed = []
    for index, declared in enumerate(node.target._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(declared.name)
            changed += [
                part for part in (given if isinstance(given, list | tuple) else [given]) if part is not None
            ]
    return [part for part in changed if isinstance(part, fx.Node)]


def mutated_buffers(graph: fx.Graph) -> set[str]:
    """The targets of the tensors held by a stage's graph that it changes in place."""
    roots = (_view_root(argument) for node in graph.nodes for argument in mutated_arguments(node))
    return {str(root.target) for root in roots if root.op == "get_attr"}


def _view_root(node: fx.Node) -> fx.Node:
    """The node of which a value is a view, or the result of an in-place change."""
    while True:
        source = _before_mutation(_view_base(node))
        if source.target is operator.getitem:
            source = source.args[0]
        if source is node:
            return node
        node = source


def _mutated_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that the graph called by a higher-order operation changes."""
    return [operand for operand, _ in _inner_mutations(node)]


def _inner_mutations(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """(operand, the node that changes it) in the graph called by a higher-order operation; empty for another node."""
    inner = inner_graph(node)
    if inner is None:
        return []
    place = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    names = (part for part in inner.graph.nodes if part.op == "placeholder")
    operands = dict(zip(names, node.args[place + 1 :], strict=False))
    changed = [(_view_base(arg), part) for part in inner.graph.nodes for arg in mutated_arguments(part)]
    return [(operands[arg], part) for arg, part in changed if isinstance(operands.get(arg), fx.Node)]


def _view_base(node: fx.Node) -> fx.Node:
    """The value that a chain of views starts from."""
    while isinstance(node.target, torch._ops.OpOverload) and any(
        r.alias_info for r in node.target._schema.returns
    ):
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _functional_variant(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operation that returns what an in-place `target` writes, if it takes the same arguments."""
    name = target._schema.name.split("::")[1]
    if target.namespace != "aten" or not name.endswith("_") or name.startswith("_"):
        return None
    if name == "copy_":  # the other form has no derivative
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    other = getattr(packet, target._overloadname, None) if packet is not None else None
    if other is None:
        return None
    same = [a.name for a in other._schema.arguments] == [a.name for a in target._schema.arguments]
    return other if same and len(other._schema.returns) == 1 else None


def _constant_nodes(graph: fx.Graph, constant_inputs: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and all(
            arg in found or arg in constant_inputs for arg in node.all_input_nodes
        ):
            found.add(node)
    return found


def _storage_key(value: Any) -> int | None:
    if isinstance(value, list | tuple):
        value = next((part for part in value if isinstance(part, torch.Tensor)), None)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
