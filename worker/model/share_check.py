"""Do workers of meshes of unlike sizes mean the same by their parts of a tensor? The model is run and compared.

Between such meshes a tensor's rows change their workers. That is right only if a worker's part is those rows of the
whole: an index of rows counted within the part, a flattening in which samples alternate, or a mean over the rows that
a worker happens to have would arrive as another value, without a word. So the parts of one microbatch are computed in
each way in which it is shared, and must be the same. Dropout lets all pass, and batch normalization uses its running
statistics: these differ by share, here as everywhere. Knows no plan and no meshes but their sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from worker.model.distance import Tolerance, distance
from worker.model.errors import CutError
from worker.model.sharing import shared_dimension
from worker.model.stages import StageBuilder, StageGraph
from worker.model.tracing import TracedModel

Samples = Sequence[tuple[Tensor, ...]]


def check_shares(
    models: Mapping[int, TracedModel],
    samples: Mapping[int, Samples],
    begins: Sequence[str],
    workers_of_stage: Sequence[int],
    tolerance: Tolerance,
    *,
    when: str = "",
) -> None:
    """Raise CutError, naming the tensor, where one that goes between stages on meshes of unlike sizes is not the same
    however many workers share the microbatch.

    `models` and `samples` (the inputs of each worker of a mesh) by the number of workers of a mesh; `when` says for
    messages how the model runs.
    """
    graphs = {size: model.cut(begins, keep=()) for size, model in models.items()}
    _check_same_edges(graphs)
    first = next(iter(graphs.values()))
    crossing = {
        edge.tensor: (sizes, edge.differentiable)
        for edge in first.edges
        if len({*(sizes := (workers_of_stage[edge.source], workers_of_stage[edge.target]))}) > 1
    }
    if not crossing:
        return
    values = {size: _values(model, samples[size], begins, {*crossing}) for size, model in models.items()}
    for edge in first.edges:
        sizes = workers_of_stage[edge.source], workers_of_stage[edge.target]
        if sizes[0] != sizes[1]:
            one, other = (values[size][edge.tensor] for size in sizes)
            shapes = tuple(one[0].shape), tuple(other[0].shape)
            along = shared_dimension(edge.tensor, shapes, sizes, differentiable=edge.differentiable)
            _check_equal(edge.tensor, one, other, along, tolerance, when)


def _check_same_edges(graphs: Mapping[int, StageGraph]) -> None:
    """The graphs traced for different numbers of rows pass on the same tensors."""
    (size, first), *others = graphs.items()

    def passed(graph: StageGraph) -> list[tuple[Any, ...]]:
        return [(e.source, e.target, e.tensor, e.dtype, e.differentiable) for e in graph.edges]

    for other_size, other in others:
        if passed(other) != passed(first):
            different = set(map(str, passed(first))) ^ set(map(str, passed(other)))
            raise CutError(
                f"the model passes on other tensors with the rows of a mesh of {size} workers than with those of one of "
                f"{other_size} ({', '.join(sorted(different)[:4])}): does it ask how many rows there are? Give all meshes "
                "the same number of workers"
            )


def _check_equal(
    tensor: str, one: list[Tensor], other: list[Tensor], along: int | None, tolerance: Tolerance, when: str
) -> None:
    if along is None:
        parts = [*one, *other]
        pairs = [(parts[0], part) for part in parts[1:]]
    else:
        pairs = [(torch.cat(one, along), torch.cat(other, along))]
    for expected, got in pairs:
        exact = not expected.is_floating_point() and not expected.is_complex()
        if not torch.equal(expected, got) and (exact or distance(expected, got, 0.0) > tolerance.values):
            raise CutError(
                f"tensor {tensor!r} is another{when} where {len(one)} workers share a microbatch than where {len(other)} "
                "do: it holds what depends on all rows that a worker has (their number or order, or a mean over them), and "
                "cannot go between meshes of unlike sizes; give both meshes the same number of workers, or keep the "
                "stages that make and use it on one mesh (pipeline.cut)"
            )


def _values(
    model: TracedModel, samples: Samples, begins: Sequence[str], names: set[str]
) -> dict[str, list[Tensor]]:
    """The tensors `names`, as they travel, of every worker."""
    starts = {model.layers.index(name) for name in begins}
    builder = model.builder(starts)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for inputs in samples:
        for name, value in _run(model, inputs, names, builder).items():
            found[name].append(value)
    return found


def _run(
    model: TracedModel, inputs: tuple[Tensor, ...], names: set[str], builder: StageBuilder
) -> dict[str, Tensor]:
    placed = model.placed
    found: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            if node.name in names:
                found[node.name] = builder.as_it_travels(node, value).clone()
            return value

    arguments = []
    for node in placed.module.graph.nodes:
        if node.op == "placeholder":
            if node in placed.inputs:
                arguments.append(inputs[placed.inputs[node]])
            else:  # a copy of what forward may change
                name = placed.parameters.get(node) or placed.buffers[node]
                tensor = placed.tensors[name].detach()
                arguments.append(tensor if node in placed.parameters else tensor.clone())
    autocast = contextlib.nullcontext() if placed.autocast is None else torch.autocast("cpu", placed.autocast)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast, _Certain():
        Recorder(placed.module).run(*arguments)
    return found


class _Certain(TorchDispatchMode):
    """Random operations give the mean of what they draw, and batch normalization its running statistics."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        aten = torch.ops.aten
        if packet in (aten.native_batch_norm, aten._native_batch_norm_legit) and len(args) == 8:
            if args[3] is not None and args[4] is not None:
                args = (*args[:5], False, *args[6:])
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if packet is aten.bernoulli_:
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if packet is aten.bernoulli and len(args) == 1:
            return args[0].clone()
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet in (aten.rand, aten.rand_like):
            return func(*args, **kwargs).fill_(0.5)
        if packet in (aten.randn, aten.randn_like):
            return func(*args, **kwargs).zero_()
        torch.manual_seed(0)
        return func(*args, **kwargs)
