"""Exports an nn.Module with torch.export into a graph that can be cut into stages; `trace` is the entry.

Includes what export needs around it: regions of torch.utils.checkpoint, which no graph keeps, are run inline and
marked, and the stages around them recomputed as a whole; fake values give shapes, dtypes and aliases of every
node; buffers are restored after a forward; and a model that torch cannot trace gets a message with the user's
module, line, reason and remedy, while torch's own message, which may hold a whole graph, stays in the traceback.
Everything about single stages is in stages.py. Node names seed random operations and name edges: they must not
change.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.traceback import annotate, preserve_node_meta

from worker.contract.planned import EdgeSignature, LayerSignature, ModelSignature
from worker.contract.profile import CutError, TraceError, resolve_stage_starts
from worker.model.autocast import cuda_autocast
from worker.model.hf_patches import AssumeFinite, patch_autograd_functions, skip_noop_conversions
from worker.model.inplace import isolate_mutations
from worker.model.layers import expanded_modules, inner_graph, is_random, join_layers, layer_calls, map_layers
from worker.model.pytree import TreeSpec
from worker.model.stages import PlacedGraph, StageBuilder, StageGraph, copy_module

_CHECKPOINT_MARK = "slotline_checkpointed"


@contextlib.contextmanager
def mark_checkpoint_regions() -> Iterator[None]:
    """In the body, what is called through torch.utils.checkpoint is traced as plain calls that are marked."""
    module = torch.utils.checkpoint
    before = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction, module._checkpoint_without_reentrant_generator = (
        _InlinedReentrant,
        _inlined_non_reentrant,
    )
    try:
        with preserve_node_meta():
            yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = before


class _InlinedReentrant:
    """Stands for the autograd function behind a reentrant checkpoint."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
        with annotate({_CHECKPOINT_MARK: True}):
            return function(*arguments)


def _inlined_non_reentrant(*_: Any, **__: Any) -> Iterator[None]:
    """Stands for what torch does before and after the call of a checkpoint that is not reentrant."""
    with annotate({_CHECKPOINT_MARK: True}):
        yield


def is_checkpointed(node: fx.Node) -> bool:
    """True if a node, or a node in a graph that it calls, was traced in a checkpoint region."""
    if _CHECKPOINT_MARK in (node.meta.get("custom") or {}):
        return True
    inner = inner_graph(node)
    return inner is not None and any(is_checkpointed(part) for part in inner.graph.nodes)


class _FakeInterpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule):
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}

    def fetch_attr(self, target: str) -> Any:
        # of buffers a copy: an operation on numbers alone is done, and would change a real one in place
        value = super().fetch_attr(target)
        return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value

    def run_node(self, node: fx.Node) -> Any:
        self.found[node] = super().run_node(node)
        return self.found[node]


def fake_values(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    entered: contextlib.AbstractContextManager | None = None,
    *,
    with_real: bool = False,
) -> dict[fx.Node, Any]:
    """The results of all nodes for inputs of these shapes and types, with gradients and within `entered` (autocast, say);
    `with_real`: the module has tensors of its own, which are real. Inputs that are one object stay one."""
    mode, recorder = FakeTensorMode(allow_non_fake_inputs=with_real), _FakeInterpreter(module)
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


class BufferSnapshot:
    """The buffers of a model as they are now: `before`, by name."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._places:
                module._buffers[name] = buffer
                buffer.copy_(before)


_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_QUOTED_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_DATA_DEPENDENT_ERRORS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
)
# Functions of torch that look at values, and how a caller spares them that.
_REMEDIES = {
    "_detect_is_causal_mask": "say whether the mask is causal, with is_causal (TransformerEncoder), tgt_is_causal "
    "(TransformerDecoder) or src_is_causal and tgt_is_causal (Transformer)",
}
_LAYER_DROP_SETTINGS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_OWN_LOSS_REMEDY = (
    "if that is the loss that the model computes itself from its labels, let the job have a `loss` and name what it takes "
    "in model.output (logits, with transformers): then it is not traced"
)
_EXPERTS_REMEDY = (
    "experts that are looped over as they were chosen are not traced: set experts_implementation in the model's "
    "configuration to grouped_mm or batched_mm, where it has that"
)
_USER_CODE_REMEDY = "use torch.where and masks in place of `if`, of .item() and of indexing by a mask"
_INSTALLED_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_LIBRARY_REMEDY = (
    "that line is of {library}: where no argument of the model avoids it, have model.factory name a function of your own "
    "that builds the model and replaces what stands there by torch.where and masks"
)
_MAX_REASON_CHARS = 240


def untraceable_error(model: nn.Module, error: BaseException) -> TraceError:
    """The error to raise in place of torch's `error`, which tracing `model` ended in."""
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    reason = f"{kind}: {first[:_MAX_REASON_CHARS]}"
    frames = list(_error_frames(error))
    place = _innermost_module(model, frames) + _innermost_user_line(error, frames)
    if kind in _DATA_DEPENDENT_ERRORS:
        names = {frame.f_code.co_name for frame, _ in frames}
        remedy = next((text for name, text in _REMEDIES.items() if name in names), None)
        if remedy is None and (dropped := _active_layer_drop(model)):
            remedy = (
                f"if it leaves out whole layers at random, set {dropped} to 0 in the model's configuration"
            )
        if remedy is None and any("Experts" in type(f.f_locals.get("self")).__name__ for f, _ in frames):
            remedy = _EXPERTS_REMEDY
        if remedy is None and _in_own_loss(model, frames):
            remedy = _OWN_LOSS_REMEDY
        if remedy is None and (library := _INSTALLED_PACKAGE.search(place)):
            remedy = _LIBRARY_REMEDY.format(library=library[1])
        reason = f"what it does there is data-dependent, decided by the values of a tensor ({reason}): " + (
            remedy or _USER_CODE_REMEDY
        )
    return TraceError(f"torch.export cannot trace {type(model).__name__}{place}: {reason}")


def _error_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    seen = set[int]()
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        causes.append(cause)
    for one in reversed(causes):
        yield from traceback.walk_tb(one.__traceback__)


def _innermost_module(model: nn.Module, frames: list[tuple[FrameType, int]]) -> str:
    """The innermost module that was called, other than the model itself."""
    names = {id(module): name for name, module in model.named_modules() if name}
    for frame, _ in reversed(frames):
        found = frame.f_locals.get("self")
        if id(found) in names:
            return f", in module {names[id(found)]!r} ({type(found).__name__})"
    return ""


def _active_layer_drop(model: nn.Module) -> str:
    """The settings by which a model of transformers leaves out layers, as far as they do."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {
        name: float(getattr(config, name))
        for config in configs
        for name in _LAYER_DROP_SETTINGS
        if isinstance(getattr(config, name, None), float | int) and getattr(config, name) > 0
    }
    return " and ".join(f"{name} (now {value:g})" for name, value in found.items())


def _in_own_loss(model: nn.Module, frames: list[tuple[FrameType, int]]) -> bool:
    """True if the innermost user line is in the forward of a whole model that was given labels."""
    for frame, _ in reversed(frames):
        if not frame.f_code.co_filename.startswith((*_LIBRARY_FOLDERS, "<")):
            return frame.f_locals.get("self") is model and frame.f_locals.get("labels") is not None
    return False


def _innermost_user_line(error: BaseException, frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line that is neither torch's nor ours."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places += [(file, int(line)) for file, line, _ in _QUOTED_FRAME.findall(str(error))]
    for file, line in reversed(places):
        if not file.startswith((*_LIBRARY_FOLDERS, "<")):
            return f", at {file}:{line}"
    return ""


class TracedModel:
    """A model as a graph with a layer for every operation; made by `trace`.

    `joined` leads from a module that cannot begin a stage to the buffer, updated by forward, that it
    shares with an earlier module. The model itself checkpoints something in each layer of `checkpointed`. `aliases` are
    all names of a parameter or buffer that has several, by the one that it has here.
    `notes` are what to tell of how it was traced. `tree_spec` is that of what the model returns, None for one tensor.
    """

    def __init__(
        self,
        placed: PlacedGraph,
        example_inputs: tuple[Tensor, ...],
        joined: Mapping[str, str],
        checkpointed: frozenset[str] = frozenset(),
        aliases: Mapping[str, tuple[str, ...]] | None = None,
        notes: Sequence[str] = (),
        tree_spec: TreeSpec | None = None,
    ) -> None:
        self.placed = placed
        self.example_inputs = example_inputs
        self.joined = joined
        self.checkpointed = checkpointed
        self.aliases = aliases or {}
        self.notes = tuple(notes)
        self.tree_spec = tree_spec

    @property
    def layers(self) -> list[str]:
        """Names of the modules that may begin a stage, in execution order."""
        return list(self.placed.layers)

    def cut(self, stage_starts: Sequence[str], *, keep: Collection[int] | None = None) -> StageGraph:
        """The stages that begin at the named layers; the first layer always begins one.

        Weights are copied from the model as they are now, for the stages in `keep` only (all by
        default). Raises CutError for names that are unknown or out of order.
        """
        for name in stage_starts:
            if name in self.joined:
                raise CutError(
                    f"module {name!r} cannot begin a stage: it shares buffer {self.joined[name]!r}, which forward "
                    "updates, with an earlier module; give each its own, or cut elsewhere"
                )
        starts = {self.placed.layers.index(name) for name in resolve_stage_starts(self.layers, stage_starts)}
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


@dataclass(frozen=True)
class _AutocastSpec:
    """Under which autocast, if any, the stages run, and where; here everything lies on CPU."""

    device: str
    dtype: torch.dtype | None

    def entered(self) -> AbstractContextManager:
        if self.dtype is None:
            return nullcontext()
        return cuda_autocast(self.dtype) if self.device == "cuda" else torch.autocast("cpu", dtype=self.dtype)


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
    cast = _AutocastSpec(device, autocast)
    with AssumeFinite() as guards:
        modules = list(model.modules())
        exported = _export(model, example_inputs, cast)
        if list(model.modules()) != modules:
            _run_once(model, example_inputs, cast)
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
        value = _state_tensor(model, exported, spec)
        name = names.get(id(value), spec.target)
        tensors[name] = value
        values.append(value)
        (parameters if isinstance(value, nn.Parameter) else buffers)[node] = name
    calls = layer_calls(module.graph, expanded_modules(model))
    try:
        fakes = fake_values(module, values, cast.entered())
    except Exception as error:  # shapes or numbers that only values tell
        raise untraceable_error(model, error) from error
    updated = isolate_mutations(module.graph, calls, fakes, buffers, parameters)
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
        aliases=tensor_aliases(model),
        notes=guards.notes(),
    )


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
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec
) -> torch.export.ExportedProgram:
    if not all(isinstance(value, Tensor) for value in example_inputs):
        kinds = ", ".join(type(value).__name__ for value in example_inputs)
        raise TraceError(f"a model's inputs must be tensors, got {kinds}: let the data set return tensors")
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            cast.entered(),
            mark_checkpoint_regions(),
            skip_noop_conversions(),
            patch_autograd_functions(),
        ):
            return torch.export.export(model, tuple(example_inputs), strict=False)
    except Exception as error:
        own = _eager_error(model, example_inputs, cast)
        if isinstance(own, TraceError):
            raise own from None
        if own is not None:
            raise TraceError(
                f"{type(model).__name__}.forward raised {type(own).__name__}: {own} "
                f"(inputs {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in example_inputs)})"
            ) from own
        raise untraceable_error(model, error) from error


def _run_once(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec) -> None:
    """Run once a model whose first forward exchanges modules of its own, as BigBird's does for short texts.

    A graph of that forward names modules that are gone, and export puts back the attributes by which the model knows
    that they are."""
    buffers = BufferSnapshot(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
        model(*example_inputs)
    buffers.restore()


def _name_random_operations(module: fx.GraphModule) -> None:
    """Give random operations of inner graphs names that no other has: the engine seeds them by name."""
    for path, part in module.named_modules():
        if path and isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if is_random(node):
                    node._rename(f"{path.replace('.', '_')}_{node.name}")
            part.recompile()


def _eager_error(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec
) -> Exception | None:
    """The error that the model raises when it runs eagerly, if it does."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
            model(*example_inputs)
    except Exception as error:
        return error
    return None


def _state_tensor(model: nn.Module, exported: torch.export.ExportedProgram, spec: Any) -> Tensor:
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
