"""Maps every node of an exported graph to the module call it belongs to, and chooses the calls that are layers.

A module called again is a layer of its own (`name@1`); layers that share a buffer which forward updates are
joined. Reads module structure and node metadata; knows nothing of stages or parameters' values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn

from worker.contract.profile import TraceError
from worker.model.opaque.call import opaque_call

LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
QUOTED_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
WHOLE_MODEL = "model"
"""The only layer of a model that runs as it is."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class LayerMap:
    """The layers in execution order, and the layer (by index) of every node that has one place.

    Nodes without a place are inputs, parameters, and what `replicated` holds: values that
    depend on no model input and are recomputed wherever they are used.
    """

    names: tuple[str, ...]
    layer_of: Mapping[fx.Node, int]
    replicated: frozenset[fx.Node]


def expanded_modules(model: nn.Module) -> frozenset[str]:
    """Names of the modules that are opened up to find layers; what lies directly in them is a layer.

    These are the model itself, containers (Sequential, ModuleList, ModuleDict), outside the elements of a
    container wrappers that hold a container somewhere or one module only, and of these elements a backbone: the only
    one of its class, and with a container of blocks, as in Sequential(backbone, head).
    """
    found = {""}

    def visit(module: nn.Module, prefix: str, inside_container: bool) -> None:
        children = list(module.named_children())
        for name, child in children:
            path = f"{prefix}{name}"
            container = isinstance(child, _CONTAINERS)
            if inside_container:
                wrapper = _is_backbone(child, module)
            else:
                wrapper = any(isinstance(part, _CONTAINERS) for part in child.modules()) or (
                    len(children) == 1 and any(child.children())
                )
            if container or wrapper:
                found.add(path)
                visit(child, f"{path}.", container)

    visit(model, "", isinstance(model, _CONTAINERS))
    return frozenset(found)


def _is_backbone(element: nn.Module, container: nn.Module) -> bool:
    """True for the only element of its class in a container that holds a container of several blocks, which are modules of
    modules."""
    return sum(type(other) is type(element) for other in container.children()) == 1 and any(
        isinstance(part, _CONTAINERS) and sum(any(block.children()) for block in part.children()) > 1
        for part in element.modules()
    )


def layer_calls(graph: fx.Graph, expanded: frozenset[str]) -> dict[fx.Node, str]:
    """The layer call that each node runs in; nodes that run between layers are left out.

    A module called again is a layer of its own, `name@1`, `name@2`, … A graph within the graph (a
    block under no_grad, say) is one node: it belongs to the first layer that it calls.
    """
    calls: dict[fx.Node, str] = {}
    names: dict[str, str] = {}  # key of a call in the metadata -> its name
    count: dict[str, int] = {}
    for node in graph.nodes:
        found = _first_call(node, expanded)
        if found is None:
            continue
        key, path = found
        if key not in names:
            repeat = count.get(path, 0)
            count[path] = repeat + 1
            names[key] = f"{path}@{repeat}" if repeat else path or WHOLE_MODEL
        calls[node] = names[key]
    return calls


def _first_call(node: fx.Node, expanded: frozenset[str]) -> tuple[str, str] | None:
    """Key and path of the outermost module around a node, or in its inner graph, that is not expanded."""
    for key, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
        if path not in expanded:
            return key, path
    inner = inner_graph(node)
    found = (_first_call(part, expanded) for part in inner.graph.nodes) if inner is not None else ()
    return next((call for call in found if call is not None), None)


def inner_graph(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a higher-order operation calls."""
    if node.op != "call_function":
        return None
    for arg in node.all_input_nodes:
        inner = getattr(node.graph.owning_module, str(arg.target), None) if arg.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            return inner
    return None


def user_line(node: fx.Node) -> str | None:
    """The innermost line (file:line) that a node was traced from and that is neither torch's nor ours, where known."""
    for file, line, _ in reversed(QUOTED_FRAME.findall(node.meta.get("stack_trace") or "")):
        if not file.startswith((*LIBRARY_FOLDERS, "<")):
            return f"{file}:{line}"
    return None


def map_layers(
    graph: fx.Graph,
    calls: Mapping[fx.Node, str],
    constants: Collection[fx.Node],
    parameters: Collection[fx.Node],
) -> LayerMap:
    """Give every node of `graph` its layer.

    A node between layers goes to the first layer that uses it, so that a join is with its
    consumer. `constants` are the placeholders of values that never change, `parameters` those of
    trained values. Raises TraceError for a model without modules to cut between.
    """
    replicated = _replicated_nodes(graph, calls, constants, parameters)
    order: dict[str, int] = {}
    for node in graph.nodes:
        if node in calls and node not in replicated:
            order.setdefault(calls[node], len(order))
    if not order:
        raise TraceError(
            "the model's forward calls no submodule, so there is nothing to cut: build it from nn.Module blocks"
        )
    layer_of: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            layer_of[node] = len(order) - 1
        elif node.op == "placeholder" or node in replicated:
            continue
        elif node in calls:
            layer_of[node] = order[calls[node]]
        elif users := [layer_of[user] for user in node.users if user in layer_of]:
            layer_of[node] = min(users)
    inner = [n for n in graph.nodes if n.op != "placeholder" and n not in replicated]
    for node in inner:
        sources = [layer_of[arg] for arg in node.all_input_nodes if arg in layer_of]
        if (
            node not in layer_of and sources
        ):  # an update of a buffer, which nothing uses: with what it depends on
            layer_of[node] = max(sources)
        elif node.target is operator.getitem and sources:  # only tensors cross a border, no tuples
            layer_of[node] = sources[0]
    for node in reversed(inner):  # what such an update begins with
        layer_of.setdefault(node, min((layer_of[user] for user in node.users if user in layer_of), default=0))
    _check_execution_order(graph, layer_of, list(order))
    return LayerMap(names=tuple(order), layer_of=layer_of, replicated=replicated)


def join_layers(
    layers: LayerMap, updated: Mapping[str, Collection[fx.Node]]
) -> tuple[LayerMap, dict[str, str]]:
    """Make one layer of all from the first to the last that use a buffer which forward updates.

    `updated` has the aliases of such buffers by name. Also returns the layers that can no longer begin a
    stage, each with the buffer that is the reason.
    """
    joined: dict[int, str] = {}
    for name, aliases in updated.items():
        users = [layers.layer_of[u] for alias in aliases for u in alias.users if u in layers.layer_of]
        joined |= {layer: name for layer in range(min(users, default=0) + 1, max(users, default=0) + 1)}
    kept = [layer for layer in range(len(layers.names)) if layer not in joined]
    place = {layer: index for index, layer in enumerate(kept)}
    for layer in range(len(layers.names)):
        place.setdefault(layer, place.get(layer - 1, 0))
    merged = LayerMap(
        names=tuple(layers.names[layer] for layer in kept),
        layer_of={node: place[layer] for node, layer in layers.layer_of.items()},
        replicated=layers.replicated,
    )
    return merged, {layers.names[layer]: name for layer, name in joined.items()}


def _replicated_nodes(
    graph: fx.Graph,
    calls: Mapping[fx.Node, str],
    constants: Collection[fx.Node],
    parameters: Collection[fx.Node],
) -> frozenset[fx.Node]:
    """Values of constants, and values of parameters that are made between layers (views, mostly)."""
    constant: set[fx.Node] = set(constants)
    weights: set[fx.Node] = set(parameters)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or is_random(node):
            continue
        if all(arg in constant for arg in node.all_input_nodes):
            constant.add(node)
        elif node not in calls and all(arg in constant or arg in weights for arg in node.all_input_nodes):
            weights.add(node)
    return frozenset((constant | weights) - {*constants, *parameters})


def is_random(node: fx.Node) -> bool:
    """True if a node draws random numbers, itself or in a graph that it calls; a module that runs as it is may always."""
    if opaque_call(node) is not None:
        return True
    if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    inner = inner_graph(node)
    return inner is not None and any(is_random(part) for part in inner.graph.nodes)


def _check_execution_order(graph: fx.Graph, layer_of: Mapping[fx.Node, int], names: list[str]) -> None:
    for node in graph.nodes:
        for arg in node.all_input_nodes:
            if node in layer_of and layer_of.get(arg, 0) > layer_of[node]:
                raise TraceError(
                    f"module {names[layer_of[node]]!r} uses {arg.name!r} of module {names[layer_of[arg]]!r}, which "
                    "begins later: the model's modules do not run one after the other, so it cannot be cut"
                )
