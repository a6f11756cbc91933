"""Checks that batch-sharded and tensor-parallel stages compute what unsharded ones do, before the first step.

Between meshes of different dp sizes rows change their ranks, which is right only if a rank's part is those rows
of the whole. An index counted within the part, a flattening in which samples alternate, or a mean over a rank's
own rows would pass unnoticed, so one microbatch is computed at each dp size on CPU and compared. Dropout passes
everything and batch norms use running statistics: these differ by sharding anyway. Tensor-parallel stages run on
the real accelerators over the real connections beside a whole stage: outputs, gradients of inputs and of
parameters. All ranks of a mesh enter it at the same time, stage by stage. Knows no plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from worker.contract.costs import batch_dimension
from worker.contract.profile import CutError
from worker.engine.forward import drop_casts, run_forward
from worker.model.export import TracedModel
from worker.model.parity import Outcome, Tolerance, compare, first_mismatch, tolerance_for
from worker.model.rng import RandomState, reseed_at_random_ops, seeded
from worker.model.stages import StageBuilder, StageGraph, StageModule
from worker.parallel.tensor.shards import TensorParallelShards
from worker.transport.base import EngineError

SamplesByRank = Sequence[tuple[Tensor, ...]]


def check_batch_sharding(
    models: Mapping[int, TracedModel],
    samples: Mapping[int, SamplesByRank],
    stage_starts: Sequence[str],
    workers_of_stage: Sequence[int],
    tolerance: Tolerance,
    *,
    when: str = "",
) -> None:
    """Raise CutError, naming the tensor, where one that goes between stages on heterogeneous meshes is not the same
    however many workers share the microbatch.

    `models` and `samples` (the inputs of each worker of a mesh) by the number of workers of a mesh; `when` says for
    messages how the model runs.
    """
    graphs = {size: model.cut(stage_starts, keep=()) for size, model in models.items()}
    _check_same_boundaries(graphs)
    first = next(iter(graphs.values()))
    crossing = {
        edge.tensor: (sizes, edge.differentiable)
        for edge in first.edges
        if len({*(sizes := (workers_of_stage[edge.source], workers_of_stage[edge.target]))}) > 1
    }
    if not crossing:
        return
    values = {
        size: _boundary_values(model, samples[size], stage_starts, {*crossing})
        for size, model in models.items()
    }
    for edge in first.edges:
        sizes = workers_of_stage[edge.source], workers_of_stage[edge.target]
        if sizes[0] != sizes[1]:
            one, other = (values[size][edge.tensor] for size in sizes)
            shapes = tuple(one[0].shape), tuple(other[0].shape)
            along = batch_dimension(edge.tensor, shapes, sizes, differentiable=edge.differentiable)
            _check_tensor(edge.tensor, one, other, along, tolerance, when)


def _check_same_boundaries(graphs: Mapping[int, StageGraph]) -> None:
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


def _check_tensor(
    tensor: str, one: list[Tensor], other: list[Tensor], along: int | None, tolerance: Tolerance, when: str
) -> None:
    if along is None:
        parts = [*one, *other]
        pairs = [(parts[0], part) for part in parts[1:]]
    else:
        pairs = [(torch.cat(one, along), torch.cat(other, along))]
    for expected, got in pairs:
        exact = not expected.is_floating_point() and not expected.is_complex()
        if not torch.equal(expected, got) and (
            exact or not compare(expected, got, tolerance.values).is_rounding
        ):
            raise CutError(
                f"tensor {tensor!r} is another{when} where {len(one)} workers share a microbatch than where {len(other)} "
                "do: it holds what depends on all rows that a worker has (their number or order, or a mean over them), and "
                "cannot go between heterogeneous meshes; give both meshes the same number of workers, or keep the "
                "stages that make and use it on one mesh (pipeline.cut)"
            )


def _boundary_values(
    model: TracedModel, samples: SamplesByRank, stage_starts: Sequence[str], names: set[str]
) -> dict[str, list[Tensor]]:
    """The tensors `names`, as they travel, of every worker."""
    starts = {model.layers.index(name) for name in stage_starts}
    builder = model.builder(starts)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for inputs in samples:
        for name, value in _run_graph(model, inputs, names, builder).items():
            found[name].append(value)
    return found


def _run_graph(
    model: TracedModel, inputs: tuple[Tensor, ...], names: set[str], builder: StageBuilder
) -> dict[str, Tensor]:
    placed = model.placed
    found: dict[str, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            if node.name in names:
                found[node.name] = builder.in_transfer_layout(node, value).clone()
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
    with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast, _DeterministicMode():
        Recorder(placed.module).run(*arguments)
    return found


class _DeterministicMode(TorchDispatchMode):
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


_TENSOR_PARALLEL_SEED = 0x5A12ED


@dataclass(frozen=True)
class StageCheckContext:
    """The device, precision and inputs with which stages are compared.

    `worker` names the rank in messages, `seed` and `share` (its data-parallel rank) seed its random numbers as its
    engine does, and `sample` has the model's inputs.
    """

    worker: str
    device: torch.device
    autocast: torch.dtype | None
    seed: int
    share: int
    sample: Sequence[Tensor]


@dataclass(frozen=True)
class _StageRun:
    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def check_tensor_parallel(
    shared: Mapping[int, StageModule],
    whole: Mapping[int, StageModule],
    share: TensorParallelShards,
    place: StageCheckContext,
) -> list[str]:
    """Compare each stage of `shared`, whose engine is connected, with the same of `whole`; what to tell of it.

    Parameters, buffers and gradients are afterwards what they were; `whole` can be thrown away. EngineError names the
    first tensor that differs, and by how much.
    """
    notes = []
    for index in sorted(shared):
        expected = _run_unsharded(whole[index], place)
        found = _run_stage(shared[index], place)
        if expected is None:
            notes.append(
                f"{place.worker}: stage {index} was not compared with its whole matrices, which do not fit beside it"
            )
        else:
            tolerance = tolerance_for(whole[index], place.autocast, place.device.type)
            _compare_stage(index, expected, found, share, tolerance, place.worker)
    drop_casts()
    if place.device.type == "cuda":  # sums of the first step are on another stream
        torch.cuda.synchronize(place.device)
    return notes


def _run_unsharded(stage: StageModule, place: StageCheckContext) -> _StageRun | None:
    """The outcome of the whole stage; None where it does not fit into memory."""
    try:
        stage = stage.to(place.device)
        reseed_at_random_ops(stage, RandomState(place.seed, place.share, place.device))
        return _run_stage(stage, place)
    except torch.OutOfMemoryError:
        return None


def _run_stage(stage: StageModule, place: StageCheckContext) -> _StageRun:
    before = [(buffer, buffer.detach().clone()) for buffer in stage.buffers()]
    inputs = dict(zip(stage.inputs, _stage_inputs(stage, place), strict=True))
    leaves = {
        name: x for name, x in inputs.items() if x.is_floating_point() and not name.startswith("input:")
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    with seeded(
        _TENSOR_PARALLEL_SEED
    ):  # operations that draw start from the seeds of step 0, as their engine has them
        run = run_forward(
            stage,
            list(inputs.values()),
            device_type=place.device.type,
            training=True,
            autocast_dtype=place.autocast,
        )
    roots = [one for one in run.outputs if one.requires_grad]
    torch.autograd.backward(
        roots, [_random_tensor(one.shape, one.dtype, k, place) for k, one in enumerate(roots)]
    )
    made = _StageRun(
        dict(zip(stage.outputs, (one.detach() for one in run.outputs), strict=True)),
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        {
            stage.original_names[local]: parameter.grad
            for local, parameter in stage.named_parameters()
            if parameter.grad is not None
        },
    )
    for parameter in stage.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, held in before:
            buffer.copy_(held)
    return made


def _stage_inputs(stage: StageModule, place: StageCheckContext) -> Iterator[Tensor]:
    """The model's own where they are known; else numbers that are the same on all workers of a mesh."""
    named = zip(stage.inputs, stage.input_shapes, stage.input_dtypes, strict=True)
    for number, (name, shape, dtype) in enumerate(named):
        if name.startswith("input:"):
            yield place.sample[int(name.removeprefix("input:"))].to(place.device)
        elif dtype.is_floating_point:
            yield _random_tensor(shape, dtype, 1000 + number, place)
        else:  # an index that every table has, a mask that hides nothing
            yield torch.full(tuple(shape), dtype == torch.bool, dtype=dtype, device=place.device)


def _random_tensor(shape: Sequence[int], dtype: torch.dtype, number: int, place: StageCheckContext) -> Tensor:
    draw = torch.Generator().manual_seed(_TENSOR_PARALLEL_SEED + number)
    return torch.randn(tuple(shape), generator=draw).to(place.device, dtype)


def _compare_stage(
    index: int,
    expected: _StageRun,
    found: _StageRun,
    share: TensorParallelShards,
    tolerance: Tolerance,
    worker: str,
) -> None:
    whole = {name: share.part(name, gradient) for name, gradient in expected.parameters.items()}
    outcomes = (
        Outcome(
            {f"output {name!r}": tensor for name, tensor in run.outputs.items()},
            {
                **{f"the gradient of input {name!r}": gradient for name, gradient in run.inputs.items()},
                **{f"the gradient of {name!r}": gradient for name, gradient in parameters.items()},
            },
        )
        for run, parameters in ((expected, whole), (found, found.parameters))
    )
    if (mismatch := first_mismatch(*outcomes, tolerance)) is not None:
        raise EngineError(
            f"{worker}: {mismatch.name} of stage {index} differs by {mismatch.distance} between workers "
            "that share its matrices and one that has the whole: their sums are wrong on these accelerators; set "
            "tp to 1, or training.check_trace to false where the stage's values are known to vary so"
        )
