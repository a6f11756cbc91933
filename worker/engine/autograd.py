"""Backward of a stage in one piece (B), or split into input gradients (I) and weight gradients (W).

Works on autograd graphs only. Must not know stages, microbatches, transfers or schedules.

The split follows zero-bubble schedules (Qi et al. 2023) in the form that fits autograd. A node is a *path* node
if an input of the stage is reachable from it. I runs the path nodes and keeps the gradient that flows into each
*border* node: a path node with a side branch to a parameter. W starts there. Border nodes that reach a common
parameter run in one call, each with exactly its kept gradient, so that nothing is counted twice.
Operators that cannot leave out the input's gradient (_UNSPLITTABLE_NODES), and all that torch.compile has
compiled, compute their parameters' gradients in I; W only hands them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

# torch's kernel for tensors in channels-last order writes the gradient of the input also where it was not asked for
# (CPU): a segmentation fault, or memory of others overwritten. It computes all its gradients from the same sums.
_UNSPLITTABLE_NODES = frozenset({"NativeGroupNormBackward0"})
_COMPILED_NODE = "CompiledFunctionBackward"


def backward(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Accumulate parameter gradients into `.grad` and return the gradients of `inputs` (leaves)."""
    if roots:
        torch.autograd.backward(roots, gradients)
    gradients_of_inputs = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return gradients_of_inputs


@dataclass
class _BorderGroup:
    """Border nodes that share parameters."""

    nodes: set[Node]
    parameters: set[torch.Tensor]


@dataclass
class WeightBackward:
    """The gradients at which I stopped, and the graph behind them, for W; `run` uses them up."""

    _gradients: dict[Node, list[torch.Tensor | None]] = field(default_factory=dict)
    _groups: list[_BorderGroup] = field(default_factory=list)
    _free_roots: list[GradientEdge] = field(default_factory=list)
    _free_gradients: list[torch.Tensor] = field(default_factory=list)
    _computed_gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the parameter gradients into `.grad`."""
        for parameter, gradient in self._computed_gradients:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.add_(gradient)
        if self._free_roots:
            torch.autograd.backward(self._free_roots, self._free_gradients, retain_graph=bool(self._groups))
        for group in self._groups:
            self._run_group(group)
        for used_up in (
            self._gradients,
            self._groups,
            self._free_roots,
            self._free_gradients,
            self._computed_gradients,
        ):
            used_up.clear()

    def _run_group(self, group: _BorderGroup) -> None:
        roots, gradients, hooks = [], [], []
        for node in group.nodes:
            kept = self._gradients.get(node, [])
            for position, gradient in enumerate(kept):
                if gradient is not None:
                    roots.append(GradientEdge(node, position))
                    gradients.append(gradient)
            if len(group.nodes) > 1:
                hooks.append(node.register_prehook(lambda _, kept=tuple(kept): kept))
        try:
            if roots:
                torch.autograd.backward(roots, gradients, inputs=list(group.parameters), retain_graph=True)
        finally:
            for hook in hooks:
                hook.remove()


def backward_input(
    roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """Gradients of `inputs` (leaves) only, and what computes the parameters' gradients later.

    A root from which no input is reachable is left to W whole.
    """
    rest = WeightBackward()
    path_roots, path_gradients = [], []
    starts = {get_gradient_edge(leaf).node for leaf in inputs}
    below, path = _reachable_and_path([get_gradient_edge(root).node for root in roots], starts)
    if path and any(node.name() == _COMPILED_NODE for node in below):
        variables = {getattr(node, "variable", None) for node in below}
        parameters = list(variables - {None, *inputs})
        found = torch.autograd.grad(roots, [*inputs, *parameters], gradients, allow_unused=True)
        rest._computed_gradients = _with_gradient(parameters, found[len(inputs) :])
        return list(found[: len(inputs)]), rest
    for root, gradient in zip(roots, gradients, strict=True):
        if get_gradient_edge(root).node in path:
            path_roots.append(root)
            path_gradients.append(gradient)
        else:
            rest._free_roots.append(get_gradient_edge(root))
            rest._free_gradients.append(gradient)
    if not path_roots:
        return [None] * len(inputs), rest
    now: list[torch.Tensor] = []
    for group in _merge_border_nodes(_border_parameters(path)):
        if any(node.name() in _UNSPLITTABLE_NODES for node in group.nodes):
            now += group.parameters
        else:
            rest._groups.append(group)
    border = [node for group in rest._groups for node in group.nodes]
    hooks = [node.register_prehook(_gradient_recorder(rest._gradients, node)) for node in border]
    try:
        found = torch.autograd.grad(
            path_roots, [*inputs, *now], path_gradients, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    rest._computed_gradients = _with_gradient(now, found[len(inputs) :])
    return list(found[: len(inputs)]), rest


def _with_gradient(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters that get a gradient, with it."""
    found = zip(parameters, gradients, strict=True)
    return [(parameter, gradient) for parameter, gradient in found if gradient is not None]


def _gradient_recorder(kept: dict[Node, list[torch.Tensor | None]], node: Node):
    def keep(gradients):
        kept[node] = list(gradients)

    return keep


def _reachable_and_path(tops: Sequence[Node], targets: set[Node]) -> tuple[set[Node], set[Node]]:
    """The nodes at or below `tops`, and those of them from which a target is reachable, targets included."""
    users: dict[Node, list[Node]] = {}
    seen: set[Node] = set(tops)
    stack = list(seen)
    while stack:
        node = stack.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            users.setdefault(below, []).append(node)
            if below not in seen:
                seen.add(below)
                stack.append(below)
    path = {node for node in targets if node in seen}
    stack = list(path)
    while stack:
        for above in users.get(stack.pop(), ()):
            if above not in path:
                path.add(above)
                stack.append(above)
    return seen, path


def _border_parameters(path: set[Node]) -> dict[Node, set[torch.Tensor]]:
    """Border nodes of `path`, each with the parameters that its side branches reach."""
    border = {}
    # in one order on all workers of a mesh, which may sum over each other within W
    for node in sorted(path, key=lambda node: node._sequence_nr(), reverse=True):
        sides = [below for below, _ in node.next_functions if below is not None and below not in path]
        if sides and (parameters := _parameters_below(sides)):
            border[node] = parameters
    return border


def _parameters_below(nodes: Sequence[Node]) -> set[torch.Tensor]:
    seen = set(nodes)
    stack = list(nodes)
    parameters = set()
    while stack:
        node = stack.pop()
        if (variable := getattr(node, "variable", None)) is not None:
            parameters.add(variable)
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                stack.append(below)
    return parameters


def _merge_border_nodes(border: dict[Node, set[torch.Tensor]]) -> list[_BorderGroup]:
    groups: list[_BorderGroup] = []
    for node, parameters in border.items():
        merged = _BorderGroup({node}, set(parameters))
        apart = []
        for group in groups:
            if group.parameters & merged.parameters:
                merged = _BorderGroup(merged.nodes | group.nodes, merged.parameters | group.parameters)
            else:
                apart.append(group)
        groups = [*apart, merged]
    return groups
