"""Exports an nn.Module with torch.export into a graph that can be cut into stages; `trace` is the entry.

Fake values give shapes, dtypes and aliases of every node. What a model gets that cannot be exported is in untraceable.py,
everything about single stages in stages.py. Node names seed random operations and name edges: they must not change.
"""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.utils._python_dispatch import _disable_current_modes

from worker.contract.planned import EdgeSignature, LayerSignature, ModelSignature
from worker.contract.profile import TraceError, resolve_stage_starts
from worker.model.autocast import AutocastSpec
from worker.model.checkpoint_regions import is_checkpointed, mark_checkpoint_regions
from worker.model.hf_patches import AssumeFinite, patch_autograd_functions, skip_noop_conversions
from worker.model.layers import expanded_modules, is_random, join_layers, layer_calls, map_layers
from worker.model.opaque.recording import OpaqueModuleError, OpaqueModules
from worker.model.passes.attention import simplify_attention
from worker.model.passes.constants import GraphConstants, fold_constants
from worker.model.passes.inplace import isolate_mutations
from worker.model.pytree import TreeSpec
from worker.model.side_effects.eager import python_state_kept, run_eagerly, run_once
from worker.model.side_effects.python_state import MovedState, PythonState
from worker.model.stages import PlacedGraph, StageBuilder, StageGraph, copy_module
from worker.model.untraceable import (
    UntraceableError,
    check_transforms,
    raise_untraceable,
    untraceable_error,
)

log = logging.getLogger(__name__)


class _FakeInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}
        self.now: fx.Node | None = None

    def fetch_attr(self, target: str) -> Any:
        # of buffers a copy: an operation on numbers alone is done, and would change a real one in place
        value = super().fetch_attr(target)
        return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value

    def run_node(self, node: fx.Node) -> Any:
        self.now = node
        self.found[node] = super().run_node(node)
        return self.found[node]


def fake_values(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    entered: contextlib.AbstractContextManager | None = None,
    *,
    with_real: bool = False,
    recorder: _FakeInterpreter | None = None,
) -> dict[fx.Node, Any]:
    """The results of all nodes for inputs of these shapes and types, with gradients and within `entered` (autocast, say);
    `with_real`: the module has tensors of its own, which are real. Inputs that are one object stay one."""
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=with_real), recorder or _FakeInterpreter(module)
    known: dict[int, Tensor] = {}
    fakes = [known.setdefault(id(value), mode.from_tensor(value, static_shapes=True)) for value in inputs]
    with (
        torch.random.fork_rng(devices=[]),
        mode,
        torch.enable_grad(),
        entered or contextlib.nullcontext(),
    ):
        recorder.run(*fakes)
    return recorder.found


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model as a graph with a layer for every operation; made by `trace`.

    `joined` leads from a module that cannot begin a stage to the buffer, updated by forward, that it
    shares with an earlier module. The model itself checkpoints something in each layer of `checkpointed`. `aliases` are
    all names of a parameter or buffer that has several, by the one that it has here.
    `notes` are what to tell of how it was traced. `tree_spec` is that of what the model returns, None for one tensor.
    `opaque` are the modules that run as they are, each with the reason. `moved` is the Python state that forward changed
    while it was traced, which the graph keeps as it was: torch.export warns of some of it.
    """

    placed: PlacedGraph
    example_inputs: tuple[Tensor, ...]
    joined: Mapping[str, str]
    checkpointed: frozenset[str] = frozenset()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tree_spec: TreeSpec | None = None
    opaque: Mapping[str, str] = field(default_factory=dict)
    moved: tuple[MovedState, ...] = ()

    def with_interface(self, tree_spec: TreeSpec | None, notes: Sequence[str] = ()) -> TracedModel:
        """The same graph of a model that was adapted before it was traced: its result has `tree_spec`, and `notes` come
        first."""
        return replace(self, tree_spec=tree_spec, notes=(*notes, *self.notes))

    @property
    def layers(self) -> list[str]:
        """Names of the modules that may begin a stage, in execution order."""
        return list(self.placed.layers)

    def cut(self, stage_starts: Sequence[str], *, keep: Collection[int] | None = None) -> StageGraph:
        """The stages that begin at the named layers; the first layer always begins one.

        Weights are copied from the model as they are now, for the stages in `keep` only (all by
        default). Raises CutError for names that are unknown or out of order.
        """
        names = resolve_stage_starts(self.layers, stage_starts, self.joined)
        starts = {self.placed.layers.index(name) for name in names}
        return self.builder(starts).graph(keep)

    def parameters(self, stage_starts: Sequence[str], stages: Collection[int]) -> list[str]:
        """The original names of the parameters of some stages of a cut."""
        starts = {self.placed.layers.index(name) for name in resolve_stage_starts(self.layers, stage_starts)}
        builder = self.builder(starts)
        return list(dict.fromkeys(name for stage in stages for name in builder.parameters(stage)))

    def state_names(self) -> set[str]:
        """The original names of all parameters and persistent buffers that any stage uses."""
        builder = self.builder({0})
        return {*builder.parameters(0), *builder.buffers(0)}

    def signature(self, *, whole: bool = True) -> ModelSignature:
        """Its layers, their parameters and the tensors between them; not `whole`: parameters are left out, as of workers
        that share matrices."""
        tensors, builder = self.placed.tensors, self.builder(range(len(self.placed.layers)))
        return ModelSignature(
            tuple(
                LayerSignature(name, {key: tensors[key].nbytes for key in builder.parameters(index) if whole})
                for index, name in enumerate(self.placed.layers)
            ),
            tuple(
                EdgeSignature(edge.source, edge.target, edge.tensor, edge.bytes) for edge in builder.edges()
            ),
        )

    def builder(self, starts: Collection[int]) -> StageBuilder:
        """The cut before the layers with these indices (0 among them)."""
        stage_of_layer, stage = [], -1
        for layer in range(len(self.placed.layers)):
            stage += layer in starts
            stage_of_layer.append(stage)
        return StageBuilder(self.placed, stage_of_layer)


def trace(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
    transfers: str = "auto",
    opaque: Mapping[str, str] | None = None,
    whole: bool = False,
) -> TracedModel:
    """Export `model` for inputs of one microbatch's shapes; the model itself is not changed, nor what forward keeps on it.

    With `autocast` it is traced under autocast to that type, as the stages run on a `device`: `x.to(y.dtype)` asks here
    what y is. `transfers` is that of RunOptions. A module that cannot be traced runs as it is (worker/model/opaque), the
    smallest one for which that works; `opaque` has those that are known already, each with the reason; with `whole` it
    may be the model itself, which is one layer then. Raises TraceError with torch's reason when the model cannot be
    exported, and for
    models whose output is neither one tensor nor a tuple of tensors.
    """
    cast = AutocastSpec(device, autocast)
    chosen = dict(opaque or {})
    first: UntraceableError | None = None
    tried = False
    while True:
        try:
            return _trace_with(model, example_inputs, cast, transfers, chosen)
        except UntraceableError as error:
            failed, path, reason = error, error.path, str(error)
            first = first or error
        except OpaqueModuleError as error:
            failed, reason, tried = error, chosen[error.path], True
            path = _enclosing_module(model, error.path) if error.path else None
            log.info("module %r cannot run as it is either: %s", error.path, error)
        if path is not None and path in chosen:  # it failed beside that module: in what calls it
            path = _enclosing_module(model, path) if path else None
        if path is None or (path == "" and not whole):
            raise _refusal(first or failed, tried=tried)
        chosen = _with_module(model, chosen, path, reason)


def _with_module(model: nn.Module, chosen: Mapping[str, str], path: str, reason: str) -> dict[str, str]:
    """`chosen` and the module `path`, with all of its own class, which end there as well; nothing inside of it."""
    kind = type(model.get_submodule(path))
    same = [path]
    if path and not kind.__module__.startswith("torch."):
        same += [name for name, module in model.named_modules() if name and type(module) is kind]
    found = {**dict.fromkeys(same, reason), **chosen}
    return {name: why for name, why in found.items() if name in same or not _is_inside(name, same)}


def _is_inside(name: str, paths: Collection[str]) -> bool:
    return any(not path or name.startswith(f"{path}.") for path in paths if path != name)


def _enclosing_module(model: nn.Module, path: str) -> str:
    """The module that calls `path`: the next one outwards that has a forward."""
    while path:
        path = path.rpartition(".")[0]
        if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
            break
    return path


def _refusal(error: Exception, *, tried: bool) -> TraceError:
    """The refusal of a model that `error` keeps from being traced; unless it was `tried`, its parts may run as they are."""
    hint = (
        ""
        if tried
        else "; as a module of its own that part may run as it is, and with pipeline.stages: 1 all of the model"
    )
    found = TraceError(f"{error}{hint}")
    found.__cause__ = error.__cause__
    return found


def _trace_with(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    cast: AutocastSpec,
    transfers: str,
    opaque: Mapping[str, str],
) -> TracedModel:
    """`trace` where the modules `opaque` run as they are. OpaqueModuleError for one that cannot."""
    calls = OpaqueModules(model, opaque)
    with AssumeFinite() as guards:
        modules = list(model.modules())
        with python_state_kept(model, modules) as state:
            exported, moved = _export(model, example_inputs, cast, calls, state)
        if list(model.modules()) != modules:
            run_once(model, example_inputs, cast)
            with python_state_kept(model, list(model.modules())) as state:
                exported, moved = _export(model, example_inputs, cast, calls, state)
    # after its passes over inner graphs, export's own graph no longer knows all users of a node
    module = copy_module(exported.graph_module)
    calls.insert(module)
    _name_random_operations(module)
    _check_output(model, exported)
    bound = _bind_placeholders(model, exported, module, example_inputs)
    tensors, parameters, buffers, values = bound.tensors, bound.parameters, bound.buffers, bound.values
    opened = expanded_modules(model) - _all_names(model, opaque)
    layer_of_node = layer_calls(module.graph, opened)
    fakes = _shapes_of(model, module, values, cast)
    check_transforms(model, fakes)
    updated = isolate_mutations(module.graph, layer_of_node, fakes, buffers, parameters)
    if not all(node in fakes for node in module.graph.nodes):  # a change in place was rewritten
        fakes = fake_values(module, values, cast.entered())
    persistent = frozenset(model.state_dict())
    changed = frozenset[fx.Node]().union(*updated.values())
    fixed = {n: tensors[name] for n, name in buffers.items() if n not in changed and name not in persistent}
    constants = GraphConstants(module, fixed, cast.entered)
    attention_changed = simplify_attention(constants, fakes, device=cast.device, autocast=cast.dtype)
    fold_constants(constants, fakes)
    for node, value in constants.added.items():
        name = node.name
        while name in tensors:
            name += "_"
        buffers[node], tensors[name] = name, value
    layers, joined = join_layers(
        map_layers(module.graph, layer_of_node, set(buffers) - updated.keys(), parameters),
        {buffers[node]: aliases for node, aliases in updated.items()},
    )
    module.recompile()
    if attention_changed or constants.added:
        fakes = fake_values(module, [*values, *constants.added.values()], cast.entered())
    placed = PlacedGraph(
        module=module,
        layers=layers.names,
        layer_of=layers.layer_of,
        replicated=layers.replicated,
        values={node: fakes[node] for node in module.graph.nodes},
        inputs=bound.inputs,
        parameters=parameters,
        buffers=buffers,
        persistent=persistent,
        tensors=tensors,
        autocast=cast.dtype,
        transfers=transfers,
    )
    checkpointed = {layers.names[layer] for node, layer in layers.layer_of.items() if is_checkpointed(node)}
    kept = {path: opaque[path] for path in calls.called}
    return TracedModel(
        placed,
        tuple(example_inputs),
        joined,
        frozenset(checkpointed),
        aliases=tensor_aliases(model),
        notes=(*guards.notes(), *_opaque_notes(model, kept)),
        opaque=kept,
        moved=tuple(moved),
    )


@dataclass
class _BoundPlaceholders:
    """Meanings of a graph's placeholders: parameters and buffers by name, inputs of the model by index; `values` are those
    of all, in their order, `tensors` the parameters and buffers themselves by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[fx.Node, str] = field(default_factory=dict)
    buffers: dict[fx.Node, str] = field(default_factory=dict)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    values: list[Tensor] = field(default_factory=list)


def _bind_placeholders(
    model: nn.Module,
    exported: torch.export.ExportedProgram,
    module: fx.GraphModule,
    example_inputs: tuple[Tensor, ...],
) -> _BoundPlaceholders:
    """Tell what the placeholders of `module`, the exported graph, stand for, and take out sparse tensors that nothing uses.
    Raises TraceError for state that stages cannot hold."""
    bound = _BoundPlaceholders()
    names = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()]}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            bound.values.append(example_inputs[len(bound.inputs)])
            bound.inputs[node] = len(bound.inputs)
            continue
        value = _state_tensor(model, exported, spec)
        name = names.get(id(value), spec.target)
        if value.layout != torch.strided:
            if node.users:
                raise TraceError(
                    f"forward uses {name!r}, a tensor of layout {value.layout}, and stages hold dense ones only: keep it "
                    "dense (to_dense()), or its indices and values in two buffers"
                )
            module.graph.erase_node(node)
            continue
        bound.tensors[name] = value
        bound.values.append(value)
        (bound.parameters if isinstance(value, nn.Parameter) else bound.buffers)[node] = name
    return bound


def _shapes_of(
    model: nn.Module, module: fx.GraphModule, values: Sequence[Tensor], cast: AutocastSpec
) -> dict[fx.Node, Any]:
    """`fake_values` of a graph. Raises the TraceError of shapes or numbers that only values tell."""
    recorder = _FakeInterpreter(module)
    try:
        return fake_values(module, values, cast.entered(), recorder=recorder)
    except Exception as error:
        called = recorder.now.meta.get("nn_module_stack") if recorder.now is not None else None
        stack = [path for path, *_ in (called or {}).values()]
        raise untraceable_error(model, error, path=re.sub(r"@\d+", "", stack[-1]) if stack else "") from error


def _all_names(model: nn.Module, paths: Collection[str]) -> frozenset[str]:
    """All names of the modules `paths`."""
    meant = {id(model.get_submodule(path)) for path in paths}
    return frozenset(
        name for name, module in model.named_modules(remove_duplicate=False) if id(module) in meant
    )


def _opaque_notes(model: nn.Module, opaque: Mapping[str, str]) -> list[str]:
    """Notes on the modules that run as they are, those with one reason in one."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in opaque.items():
        by_reason.setdefault(reason, []).append(path)
    return [
        f"{_named_modules(model, paths)} as it is, eagerly: no stage begins inside, and its stage runs its backward in one "
        f"piece, which W is not split from. The reason: {reason}"
        for reason, paths in by_reason.items()
    ]


_NAMED_MODULES = 4


def _named_modules(model: nn.Module, paths: Sequence[str]) -> str:
    shown = ", ".join(repr(path) if path else "the model itself" for path in paths[:_NAMED_MODULES])
    more = f" and {len(paths) - _NAMED_MODULES} more" if len(paths) > _NAMED_MODULES else ""
    return f"module {shown}{more} ({type(model.get_submodule(paths[0])).__name__}) runs"


def tensor_aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer that has several, by the first of them."""
    found: dict[int, list[str]] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        found.setdefault(id(tensor), []).append(name)
    return {names[0]: tuple(names) for names in found.values() if len(names) > 1}


def _export(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    cast: AutocastSpec,
    opaque: OpaqueModules,
    state: PythonState,
) -> tuple[torch.export.ExportedProgram, list[MovedState]]:
    """Export a model, with placeholders for the calls of the modules `opaque`, which are recorded before; and what its
    forward moved meanwhile of the Python `state` that it began with."""
    if not all(isinstance(value, Tensor) for value in example_inputs):
        kinds = ", ".join(type(value).__name__ for value in example_inputs)
        raise TraceError(f"a model's inputs must be tensors, got {kinds}: let the data set return tensors")
    if opaque:
        opaque.record(
            lambda: run_eagerly(model, example_inputs, cast),
            [lambda given=given: run_eagerly(model, given, cast) for given in _other_values(example_inputs)],
        )
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            cast.entered(),
            mark_checkpoint_regions(),
            skip_noop_conversions(),
            patch_autograd_functions(),
            warnings.catch_warnings(),
            opaque.exporting(),
            _moved_while_exported(model, state) as moved,
        ):
            # `moved` has these tensors, and whether they matter is found by comparing the model with its graph
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            return torch.export.export(model, tuple(example_inputs), strict=False), moved
    except OpaqueModuleError:
        raise
    except Exception as error:
        raise_untraceable(model, example_inputs, cast, error)


@contextlib.contextmanager
def _moved_while_exported(model: nn.Module, before: PythonState) -> Iterator[list[MovedState]]:
    """In the body, an export, fill the list with what forward moves; torch puts attributes back where it looks for tensors
    among them, so it is read just before."""
    # with the compiler 2 to 3 s of a processor, which only the worker that traces needs
    from torch.export import _trace

    moved: list[MovedState] = []
    original = _trace._detect_attribute_assignment

    @contextlib.contextmanager
    def watched(module: nn.Module) -> Iterator[None]:
        with original(module):
            yield
            # what is compared here has values, and is no part of the graph
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                moved[:] = before.state_moved_until(PythonState(model))

    _trace._detect_attribute_assignment = watched
    try:
        yield moved
    finally:
        _trace._detect_attribute_assignment = original


def _other_values(inputs: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Inputs of the same shapes: one row in all places, and half of the numbers that are not whole, or their negatives."""
    found = []
    for factor in (0.5, -1.0):
        rows = [value[-1:].expand_as(value).clone() if value.dim() else value.clone() for value in inputs]
        found.append(tuple(row * factor if row.is_floating_point() else row for row in rows))
    return found


def _name_random_operations(module: fx.GraphModule) -> None:
    """Give random operations of inner graphs names that no other has: the engine seeds them by name."""
    for path, part in module.named_modules():
        if path and isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if is_random(node):
                    node._rename(f"{path.replace('.', '_')}_{node.name}")
            part.recompile()


def _state_tensor(model: nn.Module, exported: torch.export.ExportedProgram, spec: Any) -> Tensor:
    """The model's own parameter or buffer behind an input of the graph, or a constant of the graph."""
    if spec.kind == InputKind.PARAMETER:
        return model.get_parameter(spec.target)
    if spec.kind == InputKind.BUFFER:
        return model.get_buffer(spec.target)
    value = exported.constants.get(spec.target)
    if not isinstance(value, Tensor):
        held = " or ".join(PythonState(model).paths_of_type(type(value))) or f"of {type(model).__name__}"
        if isinstance(value, torch.Generator):
            raise TraceError(
                f"forward draws from the torch.Generator {held}, which no stage has: draw without it, then the numbers "
                "follow from training.seed"
            )
        raise TraceError(f"forward uses the {type(value).__name__} {held}, which cannot be cut into stages")
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
