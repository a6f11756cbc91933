"""Cuts an exported graph into StageModules and the edges between them.

Every node has a layer, every layer a stage. Tensors travel contiguous, permuted where a transposed tensor lies in
one piece; the using stage restores their layout, since a view may depend on it. Also `transfer_dtype`, the type
on the wire by `training.transfers`. Knows nothing of meshes, schedules or transports.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from worker.contract.job import Bucket
from worker.contract.profile import CutError
from worker.model.opaque.call import copy_calls
from worker.model.passes.inplace import mutated_buffers


def transfer_dtype(dtype: torch.dtype, differentiable: bool, transfers: str) -> torch.dtype:
    """The dtype of a tensor on the wire: with "auto" its own, so that it arrives as it was; with "bf16" float32 that takes
    a gradient is rounded, as is its gradient. The using stage sees `dtype` again."""
    halved = transfers == "bf16" and differentiable and dtype == torch.float32
    return torch.bfloat16 if halved else dtype


OUTPUT_NAME = "output"
LAYER_MARK = "slotline_layer"
"""The entry in the `meta` of a node of a stage's graph that has the number of its layer."""


def output_name(index: int) -> str:
    """The name of the model's output number `index` among the outputs of the last stage."""
    return f"{OUTPUT_NAME}:{index}" if index else OUTPUT_NAME


def is_output(name: str) -> bool:
    """True if an output of a stage is the model's."""
    return name.partition(":")[0] == OUTPUT_NAME


def input_name(index: int) -> str:
    """The name of the model's input number `index` among the inputs of a stage."""
    return f"input:{index}"


@dataclass(frozen=True)
class StageEdge:
    """A tensor that stage `source` makes and stage `target` uses; shape as one microbatch travels, dtype as both
    stages know it. `transfer_dtype` is what travels between meshes.
    """

    source: int
    target: int
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    transfer_dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.transfer_dtype.itemsize


class StageInput(NamedTuple):
    """A tensor that a stage takes: its name, its shape of one microbatch, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class StageModule(nn.Module):
    """One stage: takes the tensors named by `inputs`, returns a tuple of those named by `outputs`.

    An input named `input:<k>` is the model's input k; the model's output is named `output`, where
    it has several the next ones `output:<k>`.
    `original_names` leads from the names of parameters and of persistent buffers here to their
    names in the model; a buffer that is not in it is a constant. `updated_buffers` are those that
    forward changes, by their names here. `tensor_names` has all of them, constants too. `autocast` is the type that it is
    to run under, if any; who calls it sees to that. `compiled` runs in place of `body` where there is one.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        *,
        index: int,
        inputs: Sequence[StageInput],
        outputs: tuple[str, ...],
        original_names: dict[str, str],
        tensor_names: dict[str, str],
        autocast: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.body = body
        self.compiled: Callable[..., tuple[Tensor, ...]] | None = None
        self.index = index
        self.autocast = autocast
        self.inputs = tuple(one.name for one in inputs)
        self.input_shapes = tuple(one.shape for one in inputs)
        self.input_dtypes = tuple(one.dtype for one in inputs)
        self.outputs = outputs
        self.original_names = {f"body.{local}": name for local, name in original_names.items()}
        self.tensor_names = {f"body.{local}": name for local, name in tensor_names.items()}
        self.updated_buffers = tuple(f"body.{name}" for name in sorted(mutated_buffers(body.graph)))
        self._device = torch.device("cpu")

    @property
    def model_outputs(self) -> tuple[int, ...]:
        """The positions in `outputs` that are the model's."""
        return tuple(at for at, name in enumerate(self.outputs) if is_output(name))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if tuple(x.shape for x in inputs) != self.input_shapes:
            self._refuse(inputs)
        return (self.compiled or self.body)(*inputs)

    def _refuse(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise ValueError(
                f"stage {self.index} takes {len(self.inputs)} tensors {self.inputs}, got {len(inputs)}"
            )
        for name, given, traced in zip(self.inputs, inputs, self.input_shapes, strict=True):
            if tuple(given.shape) != tuple(traced):
                raise ValueError(
                    f"stage {self.index} got {name!r} of shape {tuple(given.shape)}, but the model was traced with "
                    f"{tuple(traced)}: give every microbatch the traced shape"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StageModule:
        super()._apply(fn, recurse)
        device = fn(torch.empty(0, device=self._device)).device
        if device != self._device:
            _move_constants(self.body, device)
            self._device = device
        return self


@dataclass
class StageGraph:
    """The stages in execution order, their edges by (source, target, order of production), and ties.

    A stage that was not asked for is None. `tied` lists the stages of every trained parameter
    that more than one stage uses.
    """

    stages: list[StageModule | None]
    edges: tuple[StageEdge, ...]
    tied: dict[str, tuple[int, ...]]


def trained_tensors(stages: Iterable[StageModule]) -> dict[str, Tensor]:
    """The tensors that training changes or a checkpoint holds, by original name: constants of two graphs may share
    a name."""
    held = {}
    for stage in stages:
        kept = {*stage.original_names, *stage.updated_buffers}
        for local, name in stage.tensor_names.items():
            if local in kept:
                owner, _, attribute = local.rpartition(".")
                held[name] = getattr(stage.get_submodule(owner), attribute)
    return held


@dataclass(frozen=True)
class BucketStages:
    """The stages of one mesh for microbatches that are padded to `bucket`, by number, on the parameters and buffers of the
    trained ones; `edges` are those of the whole graph, in the order of the trained graph's."""

    bucket: Bucket
    modules: Mapping[int, StageModule]
    edges: tuple[StageEdge, ...]


def share_stages(
    graph: StageGraph, trained: StageGraph, own: Mapping[int, StageModule], bucket: Bucket
) -> BucketStages:
    """The stages of `graph`, traced for `bucket`, that a mesh runs, which trains `own` of the graph `trained`. Raises
    CutError where their edges, parameters or buffers are others than those of the trained ones."""
    of = f"for microbatches of {bucket} (data.lengths)"
    _check_edges(graph.edges, trained.edges, of)
    if graph.tied != trained.tied:
        raise CutError(
            f"{of} stages share other parameters: {graph.tied}, and {trained.tied} in the largest ones"
        )
    held, modules = trained_tensors(own.values()), {}
    for index, stage in own.items():
        modules[index] = graph.stages[index]
        _share_tensors(modules[index], set(stage.tensor_names.values()), held, of)
    return BucketStages(bucket, modules, graph.edges)


def _check_edges(edges: Sequence[StageEdge], trained: Sequence[StageEdge], of: str) -> None:
    """CutError unless both go between the same stages with tensors of the same kinds, in one order; names may differ, one
    for one."""
    names: dict[tuple[int, str], str] = {}
    others: dict[tuple[int, str], str] = {}
    for edge, like in zip(edges, trained, strict=False):
        same = (edge.source, edge.target, edge.dtype, edge.differentiable) == (
            like.source,
            like.target,
            like.dtype,
            like.differentiable,
        )
        same = same and names.setdefault((like.source, like.tensor), edge.tensor) == edge.tensor
        if not same or others.setdefault((edge.source, edge.tensor), like.tensor) != like.tensor:
            raise CutError(
                f"{of} stage {edge.source} hands {edge.tensor!r} {list(edge.shape)} to stage {edge.target}, where the "
                f"largest ones hand {like.tensor!r} {list(like.shape)} from {like.source} to {like.target}: does the model "
                "ask how long its input is? Have it pass on the same tensors for every shape"
            )
    if len(edges) != len(trained):
        raise CutError(
            f"{of} {len(edges)} tensors go between stages, and {len(trained)} in the largest ones: does the model ask how "
            "long its input is? Have it pass on the same tensors for every shape"
        )


def _share_tensors(stage: StageModule, known: Collection[str], held: Mapping[str, Tensor], of: str) -> None:
    """Put the trained tensors into `stage`; constants stay its own."""
    for local, name in stage.tensor_names.items():
        owner, _, attribute = local.rpartition(".")
        module, tensor = stage.get_submodule(owner), held.get(name)
        kind = module._parameters if attribute in module._parameters else module._buffers
        if tensor is None and kind is module._buffers and local not in stage.updated_buffers:
            continue
        if tensor is None or name not in known or tensor.shape != kind[attribute].shape:
            raise CutError(
                f"{of} stage {stage.index} uses {name!r} {list(kind[attribute].shape)}, and with the largest ones it does "
                "not, or in another shape: have the model use the same parameters and buffers for every shape"
            )
        kind[attribute] = tensor


@dataclass(frozen=True)
class PlacedGraph:
    """An exported graph with the layer of every node: what `StageBuilder` cuts.

    `values` are fake results (shape, dtype, requires_grad) by node; `parameters` and `buffers` (with
    constants) give the original names of placeholders, `tensors` the tensors by original name.
    `autocast` is the type under which the stages run, if any; `transfers` how tensors travel.
    """

    module: fx.GraphModule
    layers: tuple[str, ...]
    layer_of: Mapping[fx.Node, int]
    replicated: frozenset[fx.Node]
    values: Mapping[fx.Node, Any]
    inputs: Mapping[fx.Node, int]
    parameters: Mapping[fx.Node, str]
    buffers: Mapping[fx.Node, str]
    persistent: frozenset[str]
    tensors: Mapping[str, Tensor]
    autocast: torch.dtype | None
    transfers: str = "auto"

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values the model returns."""
        node = next(node for node in self.module.graph.nodes if node.op == "output")
        return tuple(node.args[0])


class StageBuilder:
    """Cuts a placed graph: layer i runs in stage `stage_of_layer[i]` (ascending from 0)."""

    def __init__(self, placed: PlacedGraph, stage_of_layer: Sequence[int]) -> None:
        self._placed = placed
        self._order = {node: index for index, node in enumerate(placed.module.graph.nodes)}
        self._stage_of = {node: stage_of_layer[layer] for node, layer in placed.layer_of.items()}
        self._members: list[list[fx.Node]] = [[] for _ in range(stage_of_layer[-1] + 1)]
        for node in placed.module.graph.nodes:
            if node in self._stage_of and node.op != "output":
                self._members[self._stage_of[node]].append(node)
        self._needed = [self._find_needed(stage) for stage in range(len(self._members))]
        self._crossing: dict[tuple[int, int], list[fx.Node]] = {}
        for target, nodes in enumerate(self._needed):
            for node in nodes:
                source = self._stage_of.get(node, target)
                if source != target:
                    self._crossing.setdefault((source, target), []).append(node)

    def graph(self, keep: Collection[int] | None = None) -> StageGraph:
        """All stages, or None in place of those not in `keep`, with edges and ties of the whole model."""
        count = len(self._members)
        return StageGraph(
            stages=[self.stage(i) if keep is None or i in keep else None for i in range(count)],
            edges=self.edges(),
            tied=self.tied(),
        )

    def edges(self) -> tuple[StageEdge, ...]:
        """The edges between stages, by source, target and order of production."""
        return tuple(
            self._edge(source, target, node)
            for (source, target), nodes in sorted(self._crossing.items())
            for node in nodes
        )

    def tied(self) -> dict[str, tuple[int, ...]]:
        """The stages of each trained parameter that more than one stage uses."""
        users: dict[str, dict[int, None]] = {}
        for stage, nodes in enumerate(self._needed):
            for node in nodes:
                name = self._placed.parameters.get(node)
                if name is not None and self._placed.values[node].requires_grad:
                    users.setdefault(name, {})[stage] = None
        return {name: tuple(stages) for name, stages in users.items() if len(stages) > 1}

    def tensors(self) -> list[str]:
        """The tensors that cross borders, in order of production."""
        crossing = {node for nodes in self._crossing.values() for node in nodes}
        return [node.name for node in sorted(crossing, key=self._order.__getitem__)]

    def operations(self, index: int) -> list[fx.Node]:
        """The nodes that run in a stage and nowhere else, in order."""
        return list(self._members[index])

    def parameters(self, index: int) -> list[str]:
        """The original names of the parameters that a stage uses."""
        parameters = self._placed.parameters
        return list(dict.fromkeys(parameters[n] for n in self._needed[index] if n in parameters))

    def buffers(self, index: int) -> list[str]:
        """The original names of the persistent buffers that a stage uses."""
        placed = self._placed
        found = (placed.buffers[n] for n in self._needed[index] if n in placed.buffers)
        return [name for name in dict.fromkeys(found) if name in placed.persistent]

    def stage(self, index: int) -> StageModule:
        """One stage, with copies of its weights."""
        leaving = {node for (source, _), nodes in self._crossing.items() if source == index for node in nodes}
        return self._build(index, self._needed[index], sorted(leaving, key=self._order.__getitem__))

    def _find_needed(self, stage: int) -> list[fx.Node]:
        """Nodes of a stage, in order, with what it needs: parameters, recomputed values, foreign tensors."""
        needed: set[fx.Node] = set()
        waiting = list(self._members[stage])
        if stage == len(self._members) - 1:
            waiting += self._placed.outputs
        while waiting:
            node = waiting.pop()
            if node in needed:
                continue
            needed.add(node)
            if node in self._placed.replicated or self._stage_of.get(node) == stage:
                waiting += node.all_input_nodes
        return sorted(needed, key=self._order.__getitem__)

    def _build(self, stage: int, nodes: Sequence[fx.Node], leaving: Sequence[fx.Node]) -> StageModule:
        placed, graph, copies = self._placed, fx.Graph(), {}
        root: dict[str, Any] = {}
        memo: dict[int, Any] = {}  # calls of one module that runs as it is have one copy of it
        original_names: dict[str, str] = {}
        local_names: dict[str, str] = {}
        inputs = sorted((n for n in nodes if n in placed.inputs), key=placed.inputs.__getitem__)
        foreign = [n for n in nodes if self._stage_of.get(n, stage) != stage]
        for node in [*inputs, *foreign]:
            copies[node] = graph.placeholder(node.name)
        for node in foreign:  # after all placeholders
            if order := self._transfer_order(node):
                back = tuple(order.index(dim) for dim in range(len(order)))
                copies[node] = graph.call_function(torch.ops.aten.permute.default, (copies[node], back))
        for node in nodes:
            if node in copies:
                continue
            if node.op == "placeholder":
                name = placed.parameters.get(node) or placed.buffers[node]
                if name not in local_names:
                    local = local_names[name] = _local_name(name, root)
                    root[local] = _copy_tensor(placed.tensors[name])
                    if node in placed.parameters or name in placed.persistent:
                        original_names[local] = name
                copies[node] = graph.get_attr(local_names[name])
            elif node.op == "get_attr":
                local = _local_name(f"{node.target}", root)
                root[local] = copy_module(getattr(placed.module, node.target))
                copy_calls(root[local], memo)
                copies[node] = graph.get_attr(local)
            elif node.op == "call_module":
                local = _local_name(f"{node.target}", root)
                root[local] = copy.deepcopy(placed.module.get_submodule(f"{node.target}"), memo)
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].target = local
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            if (layer := placed.layer_of.get(node)) is not None:
                copies[node].meta[LAYER_MARK] = layer
        results = []
        for node in leaving:
            order = self._transfer_order(node)
            permute = torch.ops.aten.permute.default
            results.append(graph.call_function(permute, (copies[node], order)) if order else copies[node])
        names = [node.name for node in leaving]
        if stage == len(self._members) - 1:
            for k, node in enumerate(placed.outputs):
                results.append(copies[node])
                names.append(output_name(k))
        graph.output(tuple(results))
        graph.lint()
        body = fx.GraphModule(root, graph, class_name=f"Stage{stage}")
        for local, buffer in list(body.named_buffers()):
            if local not in original_names:
                body.register_buffer(local, buffer, persistent=False)
        return StageModule(
            body,
            index=stage,
            inputs=[
                *(
                    StageInput(input_name(placed.inputs[n]), placed.values[n].shape, placed.values[n].dtype)
                    for n in inputs
                ),
                *(StageInput(n.name, self._transfer_shape(n), placed.values[n].dtype) for n in foreign),
            ],
            outputs=tuple(names),
            original_names=original_names,
            tensor_names={local: name for name, local in local_names.items()},
            autocast=placed.autocast,
        )

    def _transfer_order(self, node: fx.Node) -> tuple[int, ...] | None:
        """The order of dimensions in which a transposed tensor lies in one piece; None for one that does so
        as it is, or in no order.

        Tensors travel in one piece. The using stage gives them their layout back: a view may depend on it.
        """
        value = self._placed.values[node]
        if value.is_contiguous():
            return None
        order = tuple(sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), -value.shape[dim])))
        return order if value.permute(order).is_contiguous() else None

    def in_transfer_layout(self, node: fx.Node, value: Tensor) -> Tensor:
        """A value of `node` with its dimensions in the order in which they travel."""
        order = self._transfer_order(node)
        return value.permute(order) if order else value

    def _transfer_shape(self, node: fx.Node) -> tuple[int, ...]:
        shape = self._placed.values[node].shape
        return tuple(shape[dim] for dim in self._transfer_order(node) or range(len(shape)))

    def _edge(self, source: int, target: int, node: fx.Node) -> StageEdge:
        value = self._placed.values[node]
        return StageEdge(
            source=source,
            target=target,
            tensor=node.name,
            shape=self._transfer_shape(node),
            dtype=value.dtype,
            differentiable=value.requires_grad,
            transfer_dtype=transfer_dtype(value.dtype, value.requires_grad, self._placed.transfers),
        )


def _local_name(name: str, taken: Mapping[str, Any]) -> str:
    local = base = "_".join(
        part if part.isidentifier() or part.isdigit() else "x" for part in name.split(".")
    )
    count = 1
    while local in taken or not local.isidentifier():
        local, count = f"p_{base}_{count}", count + 1
    return local


def _copy_tensor(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return (
        nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
    )


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph module in a graph of its own, with the same names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def _move_constants(module: fx.GraphModule, device: torch.device) -> None:
    """Make the constants that a graph computes (arange, zeros, …) on `device`."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        changed = False
        for node in part.graph.nodes:
            args = fx.node.map_aggregate(node.args, moved)
            kwargs = fx.node.map_aggregate(node.kwargs, moved)
            if getattr(node.target, "__name__", "") == "wrap_with_autocast" and args[0] != device.type:
                args = (device.type, *args[1:])
            if args != node.args or kwargs != node.kwargs:
                node.args, node.kwargs, changed = args, kwargs, True
        if changed:
            part.recompile()
