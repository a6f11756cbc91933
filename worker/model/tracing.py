"""From an nn.Module to a graph that can be cut: export, layers, changes in place.

`trace` is the entry; everything about single stages is in `stages`, all timing in `measure`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from worker.model.checkpointing import is_checkpointed, regions_marked
from worker.model.conversions import needless_left_out
from worker.model.cuda_autocast import cuda_casts
from worker.model.errors import CutError, TraceError
from worker.model.fake_values import fake_values
from worker.model.form import EdgeForm, LayerForm, ModelForm
from worker.model.guards import FiniteAssumed
from worker.model.inplace import isolate_changes
from worker.model.kept_buffers import KeptBuffers
from worker.model.layers import expanded_modules, is_random, join_layers, layer_calls, map_layers
from worker.model.own_backwards import own_backwards_kept
from worker.model.profile import resolve_begins
from worker.model.stages import PlacedGraph, StageBuilder, StageGraph, copy_module
from worker.model.untraceable import untraceable
from worker.nests import Form


class TracedModel:
    """A model as a graph with a layer for every operation; made by `trace`.

    `joined` leads from a module that cannot begin a stage to the buffer, updated by forward, that it
    shares with an earlier module. The model itself checkpoints something in each layer of `checkpointed`. `aliases` are
    all names of a parameter or buffer that has several, by the one that it has here.
    `notes` are what to tell of how it was traced. `form` is that of what the model returns, None for one tensor.
    """

    def __init__(
        self,
        placed: PlacedGraph,
        example_inputs: tuple[Tensor, ...],
        joined: Mapping[str, str],
        checkpointed: frozenset[str] = frozenset(),
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        notes: Sequence[str] = (),
        form: Form | None = None,
    ) -> None:
        self.placed = placed
        self.example_inputs = example_inputs
        self.joined = joined
        self.checkpointed = checkpointed
        self.aliases = aliases or {}
        self.notes = tuple(notes)
        self.form = form

    @property
    def layers(self) -> list[str]:
        """Names of the modules that may begin a stage, in execution order."""
        return list(self.placed.layers)

    def cut(self, begins: Sequence[str], *, keep: Collection[int] | None = None) -> StageGraph:
        """The stages that begin at the named layers; the first layer always begins one.

        Weights are copied from the model as they are now, for the stages in `keep` only (all by
        default). Raises CutError for names that are unknown or out of order.
        """
        for name in begins:
            if name in self.joined:
                raise CutError(
                    f"module {name!r} cannot begin a stage: it shares buffer {self.joined[name]!r}, which forward "
                    "updates, with an earlier module; give each its own, or cut elsewhere"
                )
        starts = {self.placed.layers.index(name) for name in resolve_begins(self.layers, begins)}
        return self.builder(starts).graph(keep)

    def parameters(self, begins: Sequence[str], stages: Collection[int]) -> list[str]:
        """The original names of the parameters of some stages of a cut."""
        starts = {self.placed.layers.index(name) for name in resolve_begins(self.layers, begins)}
        builder = self.builder(starts)
        return list(dict.fromkeys(name for stage in stages for name in builder.parameters(stage)))

    def held(self) -> set[str]:
        """The original names of all parameters and persistent buffers that any stage uses."""
        builder = self.builder({0})
        return {*builder.parameters(0), *builder.buffers(0)}

    def signature(self, *, whole: bool = True) -> ModelForm:
        """Its layers, their parameters and the tensors between them; not `whole`: parameters are left out, as of workers
        that share matrices."""
        tensors, builder = self.placed.tensors, self.builder(range(len(self.placed.layers)))
        return ModelForm(
            tuple(
                LayerForm(name, {key: tensors[key].nbytes for key in builder.parameters(index) if whole})
                for index, name in enumerate(self.placed.layers)
            ),
            tuple(EdgeForm(edge.source, edge.target, edge.tensor, edge.bytes) for edge in builder.edges()),
        )

    def builder(self, starts: Collection[int]) -> StageBuilder:
        """The cut before the layers with these indices (0 among them)."""
        stage_of_layer, stage = [], -1
        for layer in range(len(self.placed.layers)):
            stage += layer in starts
            stage_of_layer.append(stage)
        return StageBuilder(self.placed, stage_of_layer)


@dataclass(frozen=True)
class _Autocast:
    """Under which autocast, if any, the stages run, and where; here everything lies on CPU."""

    device: str
    dtype: torch.dtype | None

    def entered(self) -> AbstractContextManager:
        if self.dtype is None:
            return nullcontext()
        return cuda_casts(self.dtype) if self.device == "cuda" else torch.autocast("cpu", dtype=self.dtype)


def trace(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    transfers: str = "auto",
) -> TracedModel:
    """Export `model` for inputs of one microbatch's shapes; the model itself is not changed.

    With `autocast` it is traced under autocast to that type, as the stages run on a `device`: `x.to(y.dtype)` asks here
    what y is. `transfers` is that of RunOptions. Raises TraceError with torch's reason when the model cannot be
    exported, and for
    models whose output is neither one tensor nor a tuple of tensors.
    """
    cast = _Autocast(device, autocast)
    with FiniteAssumed() as guards:
        modules = list(model.modules())
        exported = _export(model, example_inputs, cast)
        if list(model.modules()) != modules:
            _settle(model, example_inputs, cast)
            exported = _export(model, example_inputs, cast)
    # after its passes over inner graphs, export's own graph no longer knows all users of a node
    module = copy_module(exported.graph_module)
    _name_random_operations(module)
    _check_output(model, exported)
    tensors: dict[str, Tensor] = {}
    parameters: dict[fx.Node, str] = {}
    buffers: dict[fx.Node, str] = {}
    inputs: dict[fx.Node, int] = {}
    names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values: list[Tensor] = []
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            values.append(example_inputs[len(inputs)])
            inputs[node] = len(inputs)
            continue
        value = _state(model, exported, spec)
        name = names.get(id(value), spec.target)
        tensors[name] = value
        values.append(value)
        (parameters if isinstance(value, nn.Parameter) else buffers)[node] = name
    calls = layer_calls(module.graph, expanded_modules(model))
    try:
        fakes = fake_values(module, values, cast.entered())
    except Exception as error:  # shapes or numbers that only values tell
        raise untraceable(model, error) from error
    updated = isolate_changes(module.graph, calls, fakes, buffers, parameters)
    layers, joined = join_layers(
        map_layers(module.graph, calls, set(buffers) - updated.keys(), parameters),
        {buffers[node]: aliases for node, aliases in updated.items()},
    )
    module.recompile()
    placed = PlacedGraph(
        module=module,
        layers=layers.names,
        layer_of=layers.layer_of,
        replicated=layers.replicated,
        values=fake_values(module, values, cast.entered()),
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        persistent=frozenset(model.state_dict()),
        tensors=tensors,
        autocast=autocast,
        transfers=transfers,
    )
    checkpointed = {layers.names[layer] for node, layer in layers.layer_of.items() if is_checkpointed(node)}
    return TracedModel(
        placed,
        tuple(example_inputs),
        joined,
        frozenset(checkpointed),
        aliases=aliases_of(model),
        notes=guards.notes(),
    )


def aliases_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer that has several, by the first of them."""
    found: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}


def _export(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _Autocast
) -> torch.export.ExportedProgram:
    if not all(isinstance(value, Tensor) for value in example_inputs):
        kinds = ", ".join(type(value).__name__ for value in example_inputs)
        raise TraceError(f"a model's inputs must be tensors, got {kinds}: let the data set return tensors")
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            cast.entered(),
            regions_marked(),
            needless_left_out(),
            own_backwards_kept(),
        ):
            return torch.export.export(model, tuple(example_inputs), strict=False)
    except Exception as error:
        own = _own_error(model, example_inputs, cast)
        if isinstance(own, TraceError):
            raise own from None
        if own is not None:
            raise TraceError(
                f"{type(model).__name__}.forward raised {type(own).__name__}: {own} "
                f"(inputs {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in example_inputs)})"
            ) from own
        raise untraceable(model, error) from error


def _settle(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _Autocast) -> None:
    """Run once a model whose first forward exchanges modules of its own, as BigBird's does for short texts.

    A graph of that forward names modules that are gone, and export puts back the attributes by which the model knows
    that they are."""
    buffers = KeptBuffers(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
        model(*example_inputs)
    buffers.put_back()


def _name_random_operations(module: fx.GraphModule) -> None:
    """Give random operations of inner graphs names that no other has: the engine seeds them by name."""
    for path, part in module.named_modules():
        if path and isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if is_random(node):
                    node._rename(f"{path.replace('.', '_')}_{node.name}")
            part.recompile()


def _own_error(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _Autocast) -> Exception | None:
    """What the model raises when it simply runs, if it does."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
            model(*example_inputs)
    except Exception as error:
        return error
    return None


def _state(model: nn.Module, exported: torch.export.ExportedProgram, spec: Any) -> Tensor:
    """The model's own parameter or buffer behind an input of the graph, or a constant of the graph."""
    if spec.kind == InputKind.PARAMETER:
        return model.get_parameter(spec.target)
    if spec.kind == InputKind.BUFFER:
        return model.get_buffer(spec.target)
    value = exported.constants.get(spec.target)
    if not isinstance(value, Tensor):
        raise TraceError(f"the model holds {spec.target!r}, a {type(value).__name__}, which cannot be cut")
    return value


def _check_output(model: nn.Module, exported: torch.export.ExportedProgram) -> None:
    """A model ends in one tensor, or in a tuple of several."""
    spec = exported.call_spec.out_spec
    results = next(node for node in exported.graph_module.graph.nodes if node.op == "output").args[0]
    if all(isinstance(result, fx.Node) for result in results) and (
        spec.is_leaf() or (spec.type is tuple and all(child.is_leaf() for child in spec.children()))
    ):
        return
    kind = getattr(spec.type, "__name__", str(spec.type))
    raise TraceError(
        f"{type(model).__name__} returns a {kind} of {spec.num_leaves}, but a pipeline ends in one tensor, or in a tuple "
        "of tensors: return only what the loss takes"
    )
