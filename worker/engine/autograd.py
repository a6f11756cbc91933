"""Backward of a stage in one piece (B), or split into input gradients (I) and weight gradients (W).

Works on autograd graphs only. Must not know stages, microbatches, transfers or schedules.

The split follows zero-bubble schedules (Qi et al. 2023) in the form that fits autograd. A node is a *path* node if an
input of the stage is reachable from it; the rest are *side* nodes. I runs the path. Where a matrix product or a
convolution takes its weight from a side node, I keeps the other operand and the gradient of the output, and W multiplies
them: no graph is kept for it. Where any other path node takes a side node's result, I computes the gradient of that
result: of a parameter itself (norms, biases) it is accumulated at once, else W runs the side nodes from there (embeddings,
and what the stage computes from parameters alone). Side nodes that reach a common parameter are one *side graph*, which W
runs once; where I could not keep its parts apart, I runs all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]
"""A node, and which of its gradients flows in here."""

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_TRANSPOSE = "TBackward0"
_WITHOUT_WORK = frozenset({_ACCUMULATE, _TRANSPOSE, "ToCopyBackward0"})

# Of a node: the place of its first operand, and the names under which autograd keeps the two.
_MATRIX_PRODUCTS = {
    "MmBackward0": (0, ("_saved_self", "_saved_mat2")),
    "BmmBackward0": (0, ("_saved_self", "_saved_mat2")),
    "AddmmBackward0": (1, ("_saved_mat1", "_saved_mat2")),
    "BaddbmmBackward0": (1, ("_saved_batch1", "_saved_batch2")),
}
_CONVOLUTION = "ConvolutionBackward0"


Root = torch.Tensor | GradientEdge
"""Where a backward starts: a tensor, or its edge in the graph."""


def backward(
    roots: Sequence[Root], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Accumulate parameter gradients into `.grad` and return the gradients of `inputs` (leaves)."""
    if roots:
        torch.autograd.backward(roots, gradients)
    gradients_of_inputs = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    return gradients_of_inputs


class _WeightProduct:
    """The factors that W multiplies for a path node: the operands that autograd kept, and the gradient of the node's output.

    `edges` lead to what gets a gradient, by the place among the node's operands. RuntimeError from `run` for an operand
    that was written to since.
    """

    def __init__(self, node: Node, edges: dict[int, Edge], operands: Sequence[torch.Tensor]):
        self.output = GradientEdge(node, 0)
        self.edges = edges
        # detached: what made the operand would hold the graph behind it
        self.operands = [operand.detach() for operand in operands]
        self.gradient: torch.Tensor | None = None
        self._versions = [operand._version for operand in self.operands]

    def run(self) -> list[tuple[Edge, torch.Tensor]]:
        """Accumulate the gradients of parameters; returns those of other edges, which are left to autograd."""
        if self.gradient is None:
            return []
        if any(o._version != before for o, before in zip(self.operands, self._versions, strict=True)):
            raise RuntimeError("a tensor that W multiplies was changed in place after I had kept it")
        return self._gradients()

    def _gradients(self) -> list[tuple[Edge, torch.Tensor]]:
        raise NotImplementedError


class _MatrixProduct(_WeightProduct):
    """One operand of a matrix product gets a gradient: the first (g bᵀ) or the second (aᵀ g)."""

    def __init__(self, node: Node, edges: dict[int, Edge], other: torch.Tensor, *, is_first: bool):
        super().__init__(node, edges, [other])
        self._is_first = is_first

    def _gradients(self) -> list[tuple[Edge, torch.Tensor]]:
        (edge,), (other,) = self.edges.values(), self.operands
        first, second = (self.gradient, other.mT) if self._is_first else (other.mT, self.gradient)
        while edge[0].name() == _TRANSPOSE:
            edge, first, second = edge[0].next_functions[0], second.mT, first.mT
        if edge[0].name() != _ACCUMULATE or first.dim() != 2:
            return [(edge, first @ second)]
        parameter = edge[0].variable
        if parameter.grad is None:
            parameter.grad = _laid_out_as(parameter, first @ second)
        else:
            parameter.grad.addmm_(first, second)
        return []


class _Convolution(_WeightProduct):
    """The weight of a convolution gets a gradient, and its bias if it has an edge."""

    def __init__(self, node: Node, edges: dict[int, Edge]):
        super().__init__(node, edges, [node._saved_input, node._saved_weight])
        self._arguments = (
            node._saved_bias_sym_sizes_opt,
            node._saved_stride,
            node._saved_padding,
            node._saved_dilation,
            node._saved_transposed,
            node._saved_output_padding,
            node._saved_groups,
        )
        self._mask = [place in edges for place in range(3)]

    def _gradients(self) -> list[tuple[Edge, torch.Tensor]]:
        gradients = torch.ops.aten.convolution_backward(
            self.gradient, *self.operands, *self._arguments, self._mask
        )
        return [(edge, gradients[place]) for place, edge in self.edges.items()]


def _weight_products(node: Node, edges: dict[int, Edge]) -> list[_WeightProduct]:
    """The products that give the gradients of `edges` of `node` (by place), as far as there are such."""
    if node.name() == _CONVOLUTION:
        return [_Convolution(node, edges)] if 1 in edges and 0 not in edges else []
    if node.name() not in _MATRIX_PRODUCTS or getattr(node, "_saved_alpha", 1) != 1:
        return []
    start, names = _MATRIX_PRODUCTS[node.name()]
    products: list[_WeightProduct] = []
    for place in (start, start + 1):
        if place in edges:
            is_first = place == start
            other = getattr(node, names[1 if is_first else 0])
            if other.layout is torch.strided and not other.is_complex():
                products.append(_MatrixProduct(node, {place: edges[place]}, other, is_first=is_first))
    return products


@dataclass
class _SideGraph:
    """Side nodes that reach common parameters, and how gradients come in: by products, at edges from I, or given."""

    nodes: dict[Node, None] = field(default_factory=dict)
    products: list[_WeightProduct] = field(default_factory=list)
    from_path: list[Edge] = field(default_factory=list)
    given: list[tuple[Edge, torch.Tensor]] = field(default_factory=list)

    @property
    def belongs_to_input_gradients(self) -> bool:
        """True where no work is left for W: a parameter, or a cast of one, with a gradient that I computes anyway."""
        return not self.products and not self.given and all(n.name() in _WITHOUT_WORK for n in self.nodes)

    @property
    def is_crossed(self) -> bool:
        """True where asking autograd for the gradients of `from_path` would run other ways in as well."""
        if not self.from_path or (not self.products and len(self.nodes) == 1):
            return False
        reached: set[Node] = {node for product in self.products for node, _ in product.edges.values()}
        stack = list(reached)
        stack += {
            below for node, _ in self.from_path for below, _ in node.next_functions if below is not None
        }
        while stack:
            node = stack.pop()
            reached.add(node)
            stack += [below for below, _ in node.next_functions if below is not None and below not in reached]
        return any(node in reached for node, _ in self.from_path)

    def parameters(self) -> list[Edge]:
        """The edges into the parameters."""
        return [(node, 0) for node in self.nodes if node.name() == _ACCUMULATE]

    def run(self) -> None:
        """Accumulate the gradients of the parameters. Afterwards the graph is used up."""
        left = self.given
        for product in self.products:
            left = left + product.run()
        _accumulate(left)


def _laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient in memory as autograd lays it out, like its parameter: sums over it round in this order."""
    if gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _accumulate(found: Sequence[tuple[Edge, torch.Tensor]]) -> None:
    """Run autograd from the edges on, into `.grad`."""
    roots = []
    for edge, gradient in found:
        node, _ = edge
        if node.name() != _ACCUMULATE:
            roots.append((GradientEdge(*edge), gradient))
        elif node.variable.grad is None:
            node.variable.grad = _laid_out_as(node.variable, gradient.clone())
        else:
            node.variable.grad.add_(gradient)
    if roots:
        torch.autograd.backward(*zip(*roots, strict=True))


@dataclass
class WeightBackward:
    """The parameter gradients that I left to W; `run` uses them up."""

    _sides: list[_SideGraph] = field(default_factory=list)

    def run(self) -> None:
        """Accumulate the parameter gradients into `.grad`."""
        with torch.no_grad():
            while self._sides:
                self._sides.pop().run()

    def add(self, more: WeightBackward) -> None:
        """Run those of another backward too."""
        self._sides += more._sides

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors held for W, besides those of its `nodes`."""
        for side in self._sides:
            for product in side.products:
                yield from product.operands
                if product.gradient is not None:
                    yield product.gradient
            yield from (gradient for _, gradient in side.given)

    def nodes(self) -> list[Node]:
        """The nodes of autograd that W will run."""
        return [node for side in self._sides for node in side.nodes]


def backward_input(
    roots: Sequence[Root],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    whole: bool = False,
) -> tuple[list[torch.Tensor | None], WeightBackward]:
    """Gradients of `inputs` (leaves), and what computes the gradients of weights later.

    Those of norms and biases are accumulated at once. A root from which no input is reachable is left to W whole.
    `whole`: nothing is, I runs the backward in one piece.
    """
    if whole:
        return backward(roots, gradients, inputs), WeightBackward()
    starts = [_edge_of(root) for root in roots]
    below, path = _graph_and_path([node for node, _ in starts], {_edge_of(leaf)[0] for leaf in inputs})
    free = [(edge, g) for edge, g in zip(starts, gradients, strict=True) if edge[0] not in path]
    now: list[tuple[Edge, torch.Tensor]] = [
        (edge, g) for edge, g in zip(starts, gradients, strict=True) if edge[0] in path
    ]
    later: list[_SideGraph] = []
    asked: dict[Edge, None] = {}
    for side in _side_graphs(below, path, free):
        if side.is_crossed:
            now += side.given
            asked |= dict.fromkeys(side.parameters())
        elif side.belongs_to_input_gradients:
            asked |= dict.fromkeys(side.from_path)
        else:
            later.append(side)
    if not now:
        return [None] * len(inputs), WeightBackward(later)
    products = [product for side in later for product in side.products]
    wanted = [*asked, *(edge for side in later for edge in side.from_path)]
    found = torch.autograd.grad(
        [GradientEdge(*edge) for edge, _ in now],
        [*inputs, *(product.output for product in products), *(GradientEdge(*edge) for edge in wanted)],
        [gradient for _, gradient in now],
        allow_unused=True,
    )
    values = iter(found[len(inputs) :])
    for product in products:
        product.gradient = _without_neighbours(next(values))
    known = {
        edge: _without_neighbours(gradient)
        for edge, gradient in zip(wanted, values, strict=True)
        if gradient is not None
    }
    for side in later:
        side.given = [*side.given, *((edge, known[edge]) for edge in side.from_path if edge in known)]
    with torch.no_grad():
        _accumulate([(edge, known[edge]) for edge in asked if edge in known])
    return list(found[: len(inputs)]), WeightBackward(later)


def _without_neighbours(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient; a copy of one that lies in a larger one's memory (of a concatenation, say), which would stay too."""
    if gradient is None or gradient.untyped_storage().nbytes() <= gradient.nbytes:
        return gradient
    return gradient.clone()


def _edge_of(root: Root) -> Edge:
    node, place = (root if isinstance(root, GradientEdge) else get_gradient_edge(root))[:2]
    return node, place


def _graph_and_path(
    tops: Sequence[Node], targets: set[Node]
) -> tuple[dict[Node, tuple[Edge, ...]], set[Node]]:
    """The nodes at or below `tops` with the edges that leave them, in one order on all workers of a mesh, and those from
    which a target is reachable, targets included."""
    below: dict[Node, tuple[Edge, ...]] = {}
    users: dict[Node, list[Node]] = {}
    stack = list(reversed(tops))
    while stack:
        node = stack.pop()
        if node in below:
            continue
        below[node] = node.next_functions
        for next_node, _ in below[node]:
            if next_node is not None:
                users.setdefault(next_node, []).append(node)
                stack.append(next_node)
    path = {node for node in targets if node in below}
    stack = list(path)
    while stack:
        for above in users.get(stack.pop(), ()):
            if above not in path:
                path.add(above)
                stack.append(above)
    return below, path


def _side_graphs(
    below: dict[Node, tuple[Edge, ...]], path: set[Node], free: Sequence[tuple[Edge, torch.Tensor]]
) -> list[_SideGraph]:
    """The side graphs, each with its ways in from path nodes and from the `free` roots."""
    graph_of: dict[Node, _SideGraph] = {}

    def graph_at(edges: Iterable[Edge]) -> _SideGraph:
        """The side graph that the edges lead into; joins those that a common node shows to be one."""
        graph, stack = _SideGraph(), [node for node, _ in edges]
        while stack:
            node = stack.pop()
            other = graph_of.get(node)
            if other is graph:
                continue
            if other is None:
                graph.nodes[node], graph_of[node] = None, graph
                stack += [next_node for next_node, _ in below[node] if next_node is not None]
                continue
            if len(other.nodes) < len(graph.nodes):
                graph, other = other, graph
            # keeps the larger one: each node moves a logarithm of times at most
            graph.nodes |= other.nodes
            graph.products += other.products
            graph.from_path += [edge for edge in other.from_path if edge not in graph.from_path]
            graph.given += other.given
            graph_of.update(dict.fromkeys(other.nodes, graph))
        return graph

    for node in [node for node in below if node in path]:
        edges = {
            place: edge
            for place, edge in enumerate(below[node])
            if edge[0] is not None and edge[0] not in path
        }
        for product in _weight_products(node, edges) if edges else ():
            graph_at(product.edges.values()).products.append(product)
            edges = {place: edge for place, edge in edges.items() if place not in product.edges}
        for edge in edges.values():
            graph = graph_at([edge])
            if edge not in graph.from_path:
                graph.from_path.append(edge)
    for edge, gradient in free:
        graph_at([edge]).given.append((edge, gradient))
    return list({id(graph): graph for graph in graph_of.values()}.values())
