"""Recomputation by block: a stage keeps what enters its blocks, and its backward runs them again one at a time.

A block is a layer of the model, of a transformer one of its blocks; so that the activations of one are there at a time,
and not those of the whole stage (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). The stage's own graph
stays as it is: blocks are a second reading of it, with the same parameters, buffers and modules inside.
Must not know step state, the loss, lanes or the RNG state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from worker.engine.autograd import Root, WeightBackward
from worker.engine.forward import as_non_leaf
from worker.model.rng import ReseedBeforeOp
from worker.model.stages import LAYER_MARK

Values = Mapping[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]
RunBlock = Callable[[nn.Module, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
Backward = Callable[
    [Sequence[Root], Sequence[torch.Tensor], Sequence[torch.Tensor]],
    tuple[list[torch.Tensor | None], WeightBackward],
]


@dataclass(frozen=True)
class _Block:
    """Part of a stage's graph: `module` takes the values `reads` and returns a tuple of those in `makes`."""

    module: fx.GraphModule
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass
class KeptBlocks:
    """The values of one forward that blocks read, leaves where they take a gradient; each by its name in the graph.

    Of what leaves the stage and no later block reads, an empty tensor stands for the value.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def check_unchanged(self) -> None:
        """RuntimeError when something has written to a value since: what is computed again would differ."""
        for name, version in self.versions.items():
            if name in self.values and self.values[name]._version != version:
                raise RuntimeError(
                    f"{name!r}, which a block of the stage reads, was changed in place after it was kept for recomputing: "
                    "let forward change a copy, or set pipeline.recompute to all"
                )


class StageBlocks:
    """The blocks of a stage in order. One block where the graph of `body` tells no layers apart."""

    def __init__(self, body: fx.GraphModule) -> None:
        nodes = list(body.graph.nodes)
        self._inputs = tuple(node.name for node in nodes if node.op == "placeholder")
        results = next(node for node in nodes if node.op == "output").args[0]
        self._outputs = tuple(node.name for node in results)
        groups = list(_groups(body))
        groups[-1] += [node for node in results if node.op == "get_attr"]
        self._blocks = [_block(body, group, index) for index, group in enumerate(groups)]
        self._first_reader: dict[str, int] = {}
        for index, block in reversed([*enumerate(self._blocks)]):
            self._first_reader |= dict.fromkeys(block.reads, index)

    def __len__(self) -> int:
        return len(self._blocks)

    def run(
        self, *arguments: torch.Tensor, kept: KeptBlocks, model_outputs: Iterable[int] = ()
    ) -> tuple[torch.Tensor, ...]:
        """The first forward, on arguments that take a gradient where they are to have one: what the blocks read goes to
        `kept`, and the outputs with the numbers `model_outputs`. Its graph is of no use afterwards."""
        values = dict(zip(self._inputs, arguments, strict=True))
        read_later = {self._outputs[number] for number in model_outputs}
        for index, block in enumerate(self._blocks):
            made = block.module(*(values[name] for name in block.reads))
            for name, value in zip(block.makes, made, strict=True):
                leaf = value.detach().requires_grad_(value.requires_grad)
                values[name] = as_non_leaf(leaf)
                if index == len(self._blocks) - 1:
                    continue
                if name in self._first_reader or name in read_later:
                    kept.values[name] = leaf
                else:
                    kept.values[name] = leaf.new_empty(0).requires_grad_(leaf.requires_grad)
                kept.versions[name] = kept.values[name]._version
        kept.check_unchanged()
        return tuple(values[name] for name in self._outputs)

    def last(
        self, arguments: Sequence[torch.Tensor], kept: KeptBlocks, *, model_outputs: Iterable[int] = ()
    ) -> LastBlock:
        """The last block, to be run again as a module with the outputs of the stage."""
        kept.check_unchanged()
        kept.values |= zip(self._inputs, arguments, strict=True)
        read_by_loss = {self._outputs[number] for number in model_outputs}
        return LastBlock(self._blocks[-1], self._outputs, kept.values, read_by_loss)

    def backward(
        self,
        kept: KeptBlocks,
        last: LastBlock,
        roots: Sequence[Root],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        run: RunBlock,
        backward: Backward,
    ) -> tuple[list[torch.Tensor | None], WeightBackward]:
        """Gradients of `inputs`, the stage's leaves, and what is left to W; uses `kept` up.

        `roots` are outputs of the `last` block, which ran again, and its loss, or values in `kept`; `run` runs a block
        again, `backward` runs the backward of one. What several blocks read has its gradients summed in autograd's order:
        what is known of it goes into the backward of the block in front as one more root.
        """
        name_of = {id(value): name for name, value in kept.values.items()}
        known: Gradients = {}
        at_last: list[tuple[torch.Tensor, torch.Tensor]] = []
        for root, gradient in zip(roots, gradients, strict=True):
            if (name := name_of.get(id(root))) is None:
                at_last.append((root, gradient))
            else:
                known[name] = gradient
        weights = WeightBackward()

        def go_back(at_roots: list[tuple[torch.Tensor, torch.Tensor]], views: Values) -> None:
            if not at_roots:
                return
            at_roots += _roots(views, known)
            leaves = {name: kept.values[name] for name in views if kept.values[name].requires_grad}
            found, later = backward(*zip(*at_roots, strict=True), list(leaves.values()))
            weights.add(later)
            known.update((name, g) for name, g in zip(leaves, found, strict=True) if g is not None)

        def run_and_go_back(block: _Block) -> None:
            views = _views(kept.values, block.reads)
            made = dict(zip(block.makes, run(block.module, list(views.values())), strict=True))
            go_back(_roots(made, known), views)

        for index, block in reversed([*enumerate(self._blocks)]):
            if index == len(self._blocks) - 1:
                go_back(at_last, last.take_views())
                at_last.clear()
            elif any(name in known for name in block.makes):
                run_and_go_back(block)
            for name in block.reads:
                if self._first_reader[name] == index and name not in self._inputs:
                    del kept.values[name]
        of_input = {id(kept.values[name]): known.get(name) for name in self._inputs}
        return [of_input[id(leaf)] for leaf in inputs], weights


class LastBlock(nn.Module):
    """The last block of a stage in its second run; returns all outputs of the stage, of earlier blocks what is kept."""

    def __init__(
        self, block: _Block, outputs: Sequence[str], values: Values, read_by_loss: Collection[str]
    ) -> None:
        super().__init__()
        earlier = [name for name in outputs if name not in block.makes]
        read = [name for name in earlier if name in read_by_loss]
        self._views = _views(values, dict.fromkeys([*block.reads, *read]))
        self.arguments = [self._views[name] for name in block.reads]
        self._block, self._outputs = block, outputs
        # a loss may change in place what the model returned
        self._earlier = {
            name: self._views[name].clone() if name in read else values[name] for name in earlier
        }

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self._earlier | dict(zip(self._block.makes, self._block.module(*arguments), strict=True))
        return tuple(made[name] for name in self._outputs)

    def take_views(self) -> Values:
        """The views of kept values that the run has read; they are held here no longer."""
        self.arguments.clear()
        taken, self._views = self._views, {}
        return taken


def _views(values: Values, names: Iterable[str]) -> dict[str, torch.Tensor]:
    return {name: as_non_leaf(values[name]) for name in names}


def _roots(values: Values, known: Gradients) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Take the `known` gradients of `values`; returns pairs of both."""
    return [
        (value, known.pop(name)) for name, value in values.items() if name in known and value.requires_grad
    ]


def _groups(body: fx.GraphModule) -> list[list[fx.Node]]:
    """The operations of a graph by layer. Those of no layer go with the ones before them, a restart of random numbers with
    the operation that draws them."""
    groups: list[list[fx.Node]] = []
    layer: int | None = None
    waiting: list[fx.Node] = []
    for node in body.graph.nodes:
        if not node.op.startswith("call_"):
            continue
        waiting.append(node)
        if node.op == "call_module" and isinstance(body.get_submodule(str(node.target)), ReseedBeforeOp):
            continue
        now = node.meta.get(LAYER_MARK, layer)
        if not groups or (now != layer and layer is not None):
            groups.append([])
        layer = now
        groups[-1] += waiting
        waiting = []
    if not groups:
        groups.append([])
    groups[-1] += waiting
    return groups


def _block(body: fx.GraphModule, nodes: Sequence[fx.Node], index: int) -> _Block:
    inside, graph = set(nodes), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    read = [node for node in outside if node not in inside and node.op != "get_attr"]
    for node in read:
        copies[node] = graph.placeholder(node.name)
    for node in dict.fromkeys([*outside, *nodes]):
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
    for node in nodes:
        if node.op != "get_attr":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    made = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(copies[node] for node in made))
    graph.lint()
    module = fx.GraphModule(body, graph, class_name=f"Block{index}")
    return _Block(module, tuple(node.name for node in read), tuple(node.name for node in made))
