"""Serializes an exported model as bytes: one rank traces, all others cut its graph without holding all weights.

The graph travels with shapes in place of parameters; buffers and constants travel as they are. Parameters follow
by name, for the stages of one rank. Must not know Ray or meshes.
"""

from __future__ import annotations

import io
import operator
import pickle
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate

from worker.model.export import TracedModel
from worker.model.stages import PlacedGraph

ParameterValues = dict[str, np.ndarray]
"""Parameters by original name, as their bytes: what shared memory holds without copies."""

# What stands for a parameter that has not come yet, where only its cost is asked for: no number is special there.
_PLACEHOLDER_VALUE = 0.01


def serialize_model(traced: TracedModel) -> bytes:
    """The graph of `traced`, its layers and what is known of its tensors; no parameter's values."""
    placed = traced.placed
    content = {
        "graph": _describe_graph(placed.module),
        "layers": placed.layers,
        "layer_of": {node.name: layer for node, layer in placed.layer_of.items()},
        "replicated": [node.name for node in placed.replicated],
        "values": {node.name: value for node, value in placed.values.items()},
        "inputs": {node.name: index for node, index in placed.inputs.items()},
        "parameters": {node.name: name for node, name in placed.parameters.items()},
        "buffers": {node.name: name for node, name in placed.buffers.items()},
        "persistent": placed.persistent,
        "tensors": dict(placed.tensors),
        "autocast": placed.autocast,
        "transfers": placed.transfers,
        "example_inputs": traced.example_inputs,
        "joined": dict(traced.joined),
        "checkpointed": traced.checkpointed,
        "aliases": dict(traced.aliases),
        "form": traced.tree_spec,
        "opaque": traced.opaque,
    }
    out = io.BytesIO()
    _GraphPickler(out, protocol=5).dump(content)
    return out.getvalue()


def deserialize_model(data: bytes) -> TracedModel:
    """Inverse of `serialize_model`: parameters have shapes only, until `load_values` gives them their values."""
    content = _GraphUnpickler(io.BytesIO(data)).load()
    module = _build_graph(content["graph"])
    node_of = {node.name: node for node in module.graph.nodes}

    def by_node(part: str) -> dict[fx.Node, Any]:
        return {node_of[name]: value for name, value in content[part].items()}

    placed = PlacedGraph(
        module=module,
        layers=content["layers"],
        layer_of=by_node("layer_of"),
        replicated=frozenset(node_of[name] for name in content["replicated"]),
        values=by_node("values"),
        inputs=by_node("inputs"),
        parameters=by_node("parameters"),
        buffers=by_node("buffers"),
        persistent=content["persistent"],
        tensors=_LazyTensors(content["tensors"]),
        autocast=content["autocast"],
        transfers=content["transfers"],
    )
    return TracedModel(
        placed,
        content["example_inputs"],
        content["joined"],
        content["checkpointed"],
        content["aliases"],
        tree_spec=content["form"],
        opaque=content["opaque"],
    )


def serialize_models(models: Sequence[TracedModel]) -> bytes:
    """Several graphs of one model in one."""
    return pickle.dumps([serialize_model(traced) for traced in models], protocol=5)


def deserialize_models(data: bytes) -> list[TracedModel]:
    """Inverse of `serialize_models`."""
    return [deserialize_model(model) for model in pickle.loads(data)]


def parameter_values(traced: TracedModel, names: Collection[str]) -> ParameterValues:
    """The values of some parameters as they are now."""
    tensors = traced.placed.tensors
    return storage_values({name: tensors[name] for name in names})


def storage_values(parameters: Mapping[str, Tensor]) -> ParameterValues:
    """The values of these parameters as they are now."""
    return {name: _storage_bytes(tensor) for name, tensor in parameters.items()}


def load_values(traced: TracedModel, values: ParameterValues) -> None:
    """Give parameters of a deserialized model their values; cuts copy them."""
    tensors = traced.placed.tensors
    assert isinstance(tensors, _LazyTensors)
    tensors.assign_values(values)


class _LazyTensors(Mapping[str, Tensor]):
    """The tensors of a deserialized model by name; a parameter without values is made small and positive."""

    def __init__(self, known: dict[str, Tensor]):
        self._known = known

    def assign_values(self, values: ParameterValues) -> None:
        for name, value in values.items():
            shape = self._known[name]
            with warnings.catch_warnings():  # it may be read only: cuts copy it
                warnings.simplefilter("ignore")
                tensor = torch.from_numpy(value).view(shape.dtype)
            if _is_dense(shape):
                tensor = tensor.as_strided(shape.shape, shape.stride())
            self._known[name] = nn.Parameter(tensor.reshape(shape.shape), requires_grad=shape.requires_grad)

    def shape(self, name: str) -> Tensor:
        """The tensor as it is known, without making anything."""
        return self._known[name]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._known[name]
        if not tensor.is_meta:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).fill_(
            _PLACEHOLDER_VALUE
        )
        return nn.Parameter(made, requires_grad=tensor.requires_grad)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _storage_bytes(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor in its own order of dimensions; without the holes, where it has some."""
    flat = tensor.detach().cpu()
    if not _is_dense(flat):
        flat = flat.contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy()


def _is_dense(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in steps)


# Graphs


def _describe_graph(module: fx.GraphModule) -> dict[str, Any]:
    """Nodes in order, and the graphs and tensors that they refer to by attribute."""
    nodes = [(n.op, n.name, n.target, n.args, dict(n.kwargs)) for n in module.graph.nodes]
    held = {}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            value = operator.attrgetter(str(node.target))(module)
            held[str(node.target)] = _describe_graph(value) if isinstance(value, fx.GraphModule) else value
    return {"nodes": nodes, "held": held}


def _build_graph(described: dict[str, Any]) -> fx.GraphModule:
    graph, made = fx.Graph(), {}

    def resolved(value: Any) -> Any:
        return made[value.name] if isinstance(value, _NodeRef) else value

    for op, name, target, args, kwargs in described["nodes"]:
        args, kwargs = map_aggregate(args, resolved), map_aggregate(kwargs, resolved)
        made[name] = graph.create_node(op, target, args, kwargs, name=name)
        if made[name].name != name:
            raise ValueError(f"node {name!r} came back as {made[name].name!r}")
    root = {
        name: _build_graph(value) if isinstance(value, dict) else value
        for name, value in described["held"].items()
    }
    return fx.GraphModule(root, graph)


class _NodeRef:
    """A node of the graph that is being read."""

    def __init__(self, name: str):
        self.name = name


class _GraphPickler(pickle.Pickler):
    """Nodes by name, operations by theirs, and of fake tensors and parameters what is known without values."""

    def persistent_id(self, value: Any) -> tuple | None:
        if isinstance(value, fx.Node):
            return "node", value.name
        if isinstance(value, torch._ops.OpOverload):
            namespace, _, name = value._schema.name.partition("::")
            return "operation", namespace, name, value._overloadname
        if isinstance(value, torch._ops.HigherOrderOperator):
            return "higher", value.name()
        if isinstance(value, FakeTensor | nn.Parameter):
            return (
                "shape",
                isinstance(value, nn.Parameter),
                tuple(value.shape),
                value.stride(),
                value.dtype,
                value.requires_grad,
            )
        return None


class _GraphUnpickler(pickle.Unpickler):
    def persistent_load(self, found: tuple) -> Any:
        kind, *parts = found
        if kind == "node":
            return _NodeRef(*parts)
        if kind == "operation":
            namespace, name, overload = parts
            return getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if kind == "higher":
            return getattr(torch.ops.higher_order, *parts)
        is_parameter, shape, stride, dtype, requires_grad = parts
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if is_parameter:
            return nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.requires_grad_(requires_grad)
