"""The graph of a stage in pieces that a compiler may have, and what stays outside of them.

Outside stays what is no pure function of tensors: operations that draw random numbers, with the restarts of the
generator in front of them, and calls of modules, in which workers sum. These run as traced, so dropout has the masks
that it has without a compiler. A piece has no parameters: it gets all that it reads. Must not know how pieces are
compiled, nor what a stage is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from worker.engine.random_state import Restart, is_random

_NAME = "piece_"
_LEAST_OPERATIONS = 2
"""Of fewer there is nothing to fuse."""


class Piece(nn.Module):
    """One piece: runs `compiled` where it has it, `graph` as traced where not. With `keeps`, the arguments of the next
    call are in `seen`."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.graph = graph
        self.compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self.keeps = False
        self.seen: tuple[Tensor, ...] = ()

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        if self.keeps:
            self.seen = arguments
        return (self.compiled or self.graph)(*arguments)


def pieces_of(module: nn.Module) -> list[Piece]:
    """The pieces inside of `module`, in order."""
    return [part for part in module.modules() if isinstance(part, Piece)]


@contextlib.contextmanager
def as_traced(module: nn.Module) -> Iterator[None]:
    """In the body nothing inside `module` runs compiled."""
    before = [(piece, piece.compiled) for piece in pieces_of(module)]
    for piece, _ in before:
        piece.compiled = None
    try:
        yield
    finally:
        for piece, compiled in before:
            piece.compiled = compiled


def split(body: fx.GraphModule) -> list[Piece]:
    """Make `body` call pieces; it computes what it did, in the same order. Those that are worth a compiler."""
    outer, copies = fx.Graph(), {}
    run: list[fx.Node] = []
    found: list[Piece] = []
    dropped: fx.Node | None = None  # the last restart, where it was left out

    def close() -> None:
        if not run:
            return
        piece = _add_piece(body, run, outer, copies, len(found))
        if piece is not None:
            found.append(piece)
        run.clear()

    for node in [node for node in body.graph.nodes if node.op == "placeholder"]:
        copies[node] = outer.node_copy(node)
    for node, given in list(
        copies.items()
    ):  # from another mesh tensors are in one piece, from a stage here they need not be
        copies[node] = outer.call_function(torch.ops.aten.contiguous.default, (given,))
    for node in _in_order(body.graph):
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            copies[node] = outer.node_copy(node, copies.__getitem__)
        elif node.op == "output":
            close()
            if dropped is not None:  # a loss that draws goes on from there
                outer.node_copy(dropped, copies.__getitem__)
            outer.node_copy(node, copies.__getitem__)
        elif _is_restart(node, body) and not _draws(node.next):
            dropped = node
        elif _stays_outside(node, body):
            close()
            copies[node] = outer.node_copy(node, copies.__getitem__)
            dropped = None if _is_restart(node, body) else dropped
        else:
            run.append(node)
    outer.lint()
    body.graph = outer
    return found


def _add_piece(
    body: fx.GraphModule,
    nodes: Sequence[fx.Node],
    outer: fx.Graph,
    copies: dict[fx.Node, fx.Node],
    index: int,
) -> Piece | None:
    """Put `nodes` in `outer`, as a call of a piece of `body`; None where they are too few and stay as they are."""
    if sum(node.target is not operator.getitem for node in nodes) < _LEAST_OPERATIONS:
        for node in nodes:
            copies[node] = outer.node_copy(node, copies.__getitem__)
        return None
    inside, graph, own = set(nodes), fx.Graph(), {}
    outside = dict.fromkeys(arg for one in nodes for arg in one.all_input_nodes if arg not in inside)
    inner = {node: _inner(node, body) for node in outside if _inner(node, body) is not None}
    read = [node for node in outside if node not in inner]
    for node in read:
        own[node] = graph.placeholder(node.name)
    for node in inner:
        own[node] = graph.get_attr(node.target)
    for node in nodes:
        own[node] = graph.node_copy(node, own.__getitem__)
    given = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(own[node] for node in given))
    graph.lint()
    piece = Piece(fx.GraphModule({str(node.target): part for node, part in inner.items()}, graph))
    body.add_submodule(f"{_NAME}{index}", piece)
    call = outer.call_module(f"{_NAME}{index}", tuple(copies[node] for node in read))
    for at, node in enumerate(given):
        copies[node] = outer.call_function(operator.getitem, (call, at))
    return piece


def _in_order(graph: fx.Graph) -> Iterator[fx.Node]:
    """All nodes, what takes an element of a tuple right behind what made it: only tensors go between pieces."""
    for node in graph.nodes:
        if node.target is operator.getitem:
            continue
        waiting = [node]
        while waiting:
            now = waiting.pop()
            yield now
            waiting += [user for user in reversed(now.users) if user.target is operator.getitem]


def _is_restart(node: fx.Node, body: fx.GraphModule) -> bool:
    return node.op == "call_module" and isinstance(body.get_submodule(str(node.target)), Restart)


def _stays_outside(node: fx.Node, body: fx.GraphModule) -> bool:
    if node.op == "call_module" or _draws(node):
        return True
    inner = [part for source in node.all_input_nodes if (part := _inner(source, body)) is not None]
    return any(_stays_outside(one, part) for part in inner for one in part.graph.nodes)


def _inner(node: fx.Node, body: fx.GraphModule) -> fx.GraphModule | None:
    """The graph that a node stands for, which a higher-order operation calls."""
    found = getattr(body, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws; one of dropout without any does not."""
    if not is_random(node):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    defaults = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given = defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("train", given.get("training")) is False:
        return False
    chances = [given[name] for name in ("dropout_p", "p") if name in given]
    return not chances or any(not isinstance(chance, int | float) or chance != 0 for chance in chances)


def example_of(arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same arguments on their own: parameters are themselves, one tensor given twice stays one."""
    apart: dict[int, Tensor] = {}
    for value in arguments:
        if id(value) not in apart:
            apart[id(value)] = (
                value
                if isinstance(value, nn.Parameter)
                else value.detach().requires_grad_(value.requires_grad)
            )
    return tuple(apart[id(value)] for value in arguments)


def seen_by(pieces: Sequence[Piece], run: Callable[[], Any]) -> list[tuple[Tensor, ...]]:
    """The arguments that each piece gets in `run`, on their own."""
    for piece in pieces:
        piece.keeps = True
    try:
        run()
        return [example_of(piece.seen) for piece in pieces]
    finally:
        for piece in pieces:
            piece.keeps, piece.seen = False, ()


def no_gradient(module: nn.Module, roots: Sequence[Tensor]) -> list[str]:
    """The trained parameters of `module` of which `roots` are no function."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(
        roots, list(trained.values()), [torch.zeros_like(one) for one in roots], allow_unused=True
    )
    return [name for name, gradient in zip(trained, found, strict=True) if gradient is None]
