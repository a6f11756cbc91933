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
import functools
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from worker.contract.planned import EdgeSignature, LayerSignature, ModelSignature
from worker.contract.profile import TraceError, resolve_stage_starts
from worker.model.autocast import cuda_autocast
from worker.model.hf_patches import (
    PATCHED_FUNCTION_NAMES,
    AssumeFinite,
    patch_autograd_functions,
    skip_noop_conversions,
)
from worker.model.inplace import isolate_mutations
from worker.model.layers import (
    LIBRARY_FOLDERS,
    QUOTED_FRAME,
    expanded_modules,
    inner_graph,
    is_random,
    join_layers,
    layer_calls,
    map_layers,
    user_line,
)
from worker.model.opaque.recording import OpaqueModuleError, OpaqueModules
from worker.model.passes.attention import simplify_attention
from worker.model.passes.constants import GraphConstants, fold_constants
from worker.model.python_state import MovedState, PythonState
from worker.model.pytree import TreeSpec
from worker.model.stages import PlacedGraph, StageBuilder, StageGraph, copy_module

log = logging.getLogger(__name__)

_CHECKPOINT_MARK = "slotline_checkpointed"
_NON_REENTRANT = "_checkpoint_without_reentrant_generator"
"""What torch.utils.checkpoint calls around a region that is not reentrant; since torch 2.14 with `_impl` behind its name."""


@contextlib.contextmanager
def mark_checkpoint_regions() -> Iterator[None]:
    """In the body, what is called through torch.utils.checkpoint is traced as plain calls that are marked."""
    module = torch.utils.checkpoint
    around = f"{_NON_REENTRANT}_impl" if hasattr(module, f"{_NON_REENTRANT}_impl") else _NON_REENTRANT
    reentrant, generator = module.CheckpointFunction, getattr(module, around)
    module.CheckpointFunction = _InlinedReentrant
    setattr(module, around, _inlined_non_reentrant)
    try:
        with preserve_node_meta():
            yield
    finally:
        module.CheckpointFunction = reentrant
        setattr(module, around, generator)


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


class BufferSnapshot:
    """The buffers of a model as they are now: `before`, by name. Those that are None are so again when restored."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._empty = _EmptyBuffers(model)
        self.before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}

    def restore(self) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._places:
                module._buffers[name] = buffer
                buffer.copy_(before)
        self._empty.restore()


class _EmptyBuffers:
    """The buffers of a model that are None, which forward may fill (a bias that it keeps for later calls)."""

    def __init__(self, model: nn.Module):
        self._places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is None
        ]

    def restore(self) -> None:
        for module, name in self._places:
            if name in module._buffers:
                module._buffers[name] = None


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
_CUMULATIVE_NORM_REMEDY = (
    "with momentum=None module {name!r} counts its batches in num_batches_tracked and divides by that count in Python, "
    "which no graph holds: give it a momentum (0.1 is torch's default)"
)
_FUNCTION_TRANSFORMS = ("_functorch/apis.py", "_functorch/vmap.py", "_functorch/eager_transforms.py")
_TRANSFORM_REMEDY = (
    "torch.vmap and the transforms of torch.func (grad, vjp, jvp, jacrev) leave no graph that can be cut: write a vmap as "
    "batched operations (broadcasting, torch.einsum, torch.bmm), and a derivative in closed form, or put it into a "
    "torch.library.custom_op with register_autograd"
)
_INSTALLED_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_LIBRARY_REMEDY = (
    "that line is of {library}: where no argument of the model avoids it, have model.factory name a function of your own "
    "that builds the model and replaces what stands there by torch.where and masks"
)
_MAX_REASON_CHARS = 240


_FAKE_CONSTANT_ERROR = "fake tensor in the exported program constant's list"
_CONSTANT = re.compile(r"model attribute: ([\w.]+)\.lifted_\w+")
_REMEDIES_OF_CALLS = {
    "data": "it writes to {name} through .data, which no trace holds: write to a registered buffer itself, under "
    "torch.no_grad() and without .data, and leave weights to the optimizer (forward may compute with "
    "weight.clamp(...), say)",
    "grad": "it takes gradients with torch.autograd.grad, which no trace holds: write the derivative as operations of "
    "forward, or train this model without pipelines",
}


class _UntraceableCalls(TorchFunctionMode):
    """Notices calls that no trace holds in the body, a forward of `model`: `found` says where (file:line), of what
    and in which module."""

    def __init__(self, model: nn.Module):
        super().__init__()
        named = [(f"parameter {name!r}", one) for name, one in model.named_parameters()]
        named += [(f"buffer {name!r}", one) for name, one in model.named_buffers()]
        self._model = model
        self._names = {id(one): name for name, one in named}
        self._through_data: dict[int, tuple[Tensor, str]] = {}
        self.found: dict[str, tuple[str, str, str]] = {}

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if func == Tensor.data.__get__:
            self._through_data[id(result)] = result, self._names.get(id(first), "a tensor")
        elif func == Tensor.data.__set__:
            self._note("data", self._names.get(id(first), "a tensor"))
        elif func is torch.autograd.grad:
            self._note("grad", "")
        elif id(first) in self._through_data and (
            name == "__setitem__"
            or (name.startswith("__i") and name.endswith("__"))
            or _IN_PLACE.fullmatch(name)
        ):
            self._note("data", self._through_data[id(first)][1])
        return result

    def _note(self, kind: str, name: str) -> None:
        stack = list(traceback.walk_stack(None))
        frames = (frame for frame, _ in stack)
        where = next(
            (
                f"{frame.f_code.co_filename}:{frame.f_lineno}"
                for frame in frames
                if not frame.f_code.co_filename.startswith((*LIBRARY_FOLDERS, "<"))
            ),
            "",
        )
        self.found.setdefault(kind, (where, name, _innermost_module(self._model, stack[::-1])))


_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")


def _untraceable_call_error(model: nn.Module, calls: _UntraceableCalls) -> _UntraceableError | None:
    """The error that names a call that no trace holds, if the model made one."""
    for kind, remedy in _REMEDIES_OF_CALLS.items():
        if kind in calls.found:
            where, name, path = calls.found[kind]
            return _UntraceableError(
                f"torch.export cannot trace {type(model).__name__}, at {where}: {remedy.format(name=name)}",
                path,
            )
    return None


def _constant_error(model: nn.Module, error: Exception) -> _UntraceableError | None:
    """The error of a tensor that forward makes and a trace takes for a constant, by the module that made it."""
    if _FAKE_CONSTANT_ERROR not in str(error) or (made := _CONSTANT.search(str(error))) is None:
        return None
    path = made[1]
    if path not in dict(model.named_modules()):
        return None
    return _UntraceableError(
        f"torch.export cannot trace {type(model).__name__}, in module {path!r} "
        f"({type(model.get_submodule(path)).__name__}): its forward makes a tensor that a trace takes for a constant, such "
        "as the .data of a new one that it keeps: compute with tensors, without .data, and keep what lasts in a "
        "buffer (register_buffer)",
        path,
    )


def untraceable_error(
    model: nn.Module,
    error: BaseException,
    frames: list[tuple[FrameType, int]] | None = None,
    *,
    path: str = "",
) -> _UntraceableError:
    """The error to raise in place of torch's `error`, which tracing `model` ended in; `frames` lead to the place in the
    model where torch's own do not, `path` is the module where no frames lead to one."""
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    reason = f"{kind}: {first[:_MAX_REASON_CHARS]}"
    frames = frames or list(_error_frames(error))
    path = _innermost_module(model, frames) or path
    module = f", in module {path!r} ({type(model.get_submodule(path)).__name__})" if path else ""
    place = module + _innermost_user_line(error, frames)
    if kind in _DATA_DEPENDENT_ERRORS:
        names = {frame.f_code.co_name for frame, _ in frames}
        remedy = next((text for name, text in _REMEDIES.items() if name in names), None)
        if remedy is None and (norm := _cumulative_norm(model, frames)) is not None:
            remedy = _CUMULATIVE_NORM_REMEDY.format(name=norm)
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
    elif _is_transform_error(error, frames):
        reason = f"{reason}: {_TRANSFORM_REMEDY}"
    return _UntraceableError(f"torch.export cannot trace {type(model).__name__}{place}: {reason}", path)


_ONE_ROW_ERROR = "Expected more than 1 value per channel when training"
_ONE_ROW_REMEDY = (
    "of one row there are no statistics: give a worker more rows of a microbatch, by fewer training.microbatches, fewer "
    "data-parallel workers or a larger training.global_batch, or set training.sync_batch_norm"
)


def one_row_remedy(error: BaseException) -> str:
    """The remedy for the error that torch's batch norm raises for a single row; empty for another error."""
    return _ONE_ROW_REMEDY if _ONE_ROW_ERROR in str(error) else ""


class _UntraceableError(TraceError):
    """A TraceError of a forward that runs eagerly; `path` is the module in which tracing it ended, empty for the model."""

    def __init__(self, message: str, path: str):
        super().__init__(message)
        self.path = path


def _error_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    seen = set[int]()
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        causes.append(cause)
    for one in reversed(causes):
        yield from traceback.walk_tb(one.__traceback__)


def _innermost_module(model: nn.Module, frames: list[tuple[FrameType, int]]) -> str:
    """The name of the innermost module that was called, other than the model itself; empty without one."""
    # by its attributes, which the stand-ins that torch traces with share
    names = {id(vars(module)): name for name, module in model.named_modules() if name}
    for frame, _ in reversed(frames):
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module) and id(vars(found)) in names:
            return names[id(vars(found))]
    return ""


def _cumulative_norm(model: nn.Module, frames: list[tuple[FrameType, int]]) -> str | None:
    """The name of the batch norm with momentum=None whose forward the frames lead through."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            return names.get(id(module))
    return None


def _is_transform_error(error: BaseException, frames: list[tuple[FrameType, int]]) -> bool:
    """True for an error of a transform of torch.func: it was raised in one, or speaks of a tensor that one wraps."""
    return "functorch" in str(error).partition("\n")[0] or any(
        frame.f_code.co_filename.endswith(_FUNCTION_TRANSFORMS) for frame, _ in frames
    )


def _transform_frames(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec
) -> list[tuple[FrameType, int]]:
    """The frames that lead to the first transform of torch.func in an eager forward, outermost first; empty without one."""
    found: list[tuple[FrameType, int]] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and not found and frame.f_code.co_filename.endswith(_FUNCTION_TRANSFORMS):
            found.extend(traceback.walk_stack(frame))

    buffers, before = BufferSnapshot(model), sys.getprofile()
    sys.setprofile(watch)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
            model(*example_inputs)
    finally:
        sys.setprofile(before)
        buffers.restore()
    return found[::-1]


def _check_transforms(model: nn.Module, values: Mapping[fx.Node, Any]) -> None:
    """Raise TraceError for a graph in which a transform of torch.func wraps tensors; `values` are fake results."""
    for node, value in values.items():
        if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            stack = [path for path, *_ in (node.meta.get("nn_module_stack") or {}).values()]
            module = f" in module {stack[-1]!r}" if stack and stack[-1] else ""
            place = f", at {line}" if (line := user_line(node)) else ""
            raise _UntraceableError(
                f"{type(model).__name__} transforms a function{module}{place}: {_TRANSFORM_REMEDY}",
                stack[-1] if stack else "",
            )


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
        if not frame.f_code.co_filename.startswith((*LIBRARY_FOLDERS, "<")):
            return frame.f_locals.get("self") is model and frame.f_locals.get("labels") is not None
    return False


def _innermost_user_line(error: BaseException, frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line that is neither torch's nor ours."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places += [(file, int(line)) for file, line, _ in QUOTED_FRAME.findall(str(error))]
    for file, line in reversed(places):
        if not file.startswith((*LIBRARY_FOLDERS, "<")):
            return f", at {file}:{line}"
    return ""


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
    cast = _AutocastSpec(device, autocast)
    chosen = dict(opaque or {})
    first: _UntraceableError | None = None
    tried = False
    while True:
        try:
            return _trace_with(model, example_inputs, cast, transfers, chosen)
        except _UntraceableError as error:
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
    cast: _AutocastSpec,
    transfers: str,
    opaque: Mapping[str, str],
) -> TracedModel:
    """`trace` where the modules `opaque` run as they are. OpaqueModuleError for one that cannot."""
    calls = OpaqueModules(model, opaque)
    with AssumeFinite() as guards:
        modules = list(model.modules())
        with _python_state_kept(model, modules) as state:
            exported, moved = _export(model, example_inputs, cast, calls, state)
        if list(model.modules()) != modules:
            _run_once(model, example_inputs, cast)
            with _python_state_kept(model, list(model.modules())) as state:
                exported, moved = _export(model, example_inputs, cast, calls, state)
    # after its passes over inner graphs, export's own graph no longer knows all users of a node
    module = copy_module(exported.graph_module)
    calls.insert(module)
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
        if value.layout != torch.strided:
            if node.users:
                raise TraceError(
                    f"forward uses {name!r}, a tensor of layout {value.layout}, and stages hold dense ones only: keep it "
                    "dense (to_dense()), or its indices and values in two buffers"
                )
            module.graph.erase_node(node)
            continue
        tensors[name] = value
        values.append(value)
        (parameters if isinstance(value, nn.Parameter) else buffers)[node] = name
    opened = expanded_modules(model) - _all_names(model, opaque)
    layer_of_node = layer_calls(module.graph, opened)
    fakes = _shapes_of(model, module, values, cast)
    _check_transforms(model, fakes)
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
        inputs=inputs,
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


def _shapes_of(
    model: nn.Module, module: fx.GraphModule, values: Sequence[Tensor], cast: _AutocastSpec
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


def modules_with_own_backwards(
    model: nn.Module,
    example_inputs: tuple[Tensor, ...],
    *,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> dict[str, str]:
    """The modules in whose forward a custom autograd function is called, whose backward a trace loses, as `opaque` of
    `trace`; the model itself has an empty name."""
    found: dict[str, str] = {}

    def note(kind: type[torch.autograd.Function]) -> None:
        path = _innermost_module(model, list(traceback.walk_stack(None))[::-1])
        found[path] = f"the autograd function {kind.__name__} has a backward of its own, which tracing loses"

    with _noted_autograd_functions(note), _python_state_kept(model, list(model.modules())):
        _run_eagerly(model, example_inputs, _AutocastSpec(device, autocast))
    return found


@contextlib.contextmanager
def _noted_autograd_functions(note: Callable[[type[torch.autograd.Function]], None]) -> Iterator[None]:
    """In the body `note` is called with each autograd function that is called and neither torch's nor patched here: at its
    forward, as `apply` may have been taken from the class before, or at `apply` where the class is made in the body."""
    known = _autograd_functions()
    forwards = {kind: vars(kind)["forward"] for kind in known if "forward" in vars(kind)}
    applied = torch.autograd.Function.__dict__["apply"]

    def noted(kind: type[torch.autograd.Function]) -> staticmethod:
        forward = kind.forward

        @functools.wraps(forward)  # torch binds arguments by its signature
        def called(*args: Any, **kwargs: Any) -> Any:
            note(kind)
            return forward(*args, **kwargs)

        return staticmethod(called)

    def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if kind not in known and _is_own(kind):
            note(kind)
        return applied.__get__(None, kind)(*args, **kwargs)

    try:
        for kind in forwards:
            kind.forward = noted(kind)
        torch.autograd.Function.apply = classmethod(apply)
        yield
    finally:
        torch.autograd.Function.apply = applied
        for kind, forward in forwards.items():
            kind.forward = forward


def _autograd_functions() -> list[type[torch.autograd.Function]]:
    """The autograd functions that are defined by now and neither torch's nor patched here."""
    kinds = [torch.autograd.Function]
    for kind in kinds:  # which grows
        kinds += [one for one in kind.__subclasses__() if one not in kinds]
    return [kind for kind in kinds if _is_own(kind)]


def _is_own(kind: type[torch.autograd.Function]) -> bool:
    return not kind.__module__.startswith("torch.") and kind.__name__ not in PATCHED_FUNCTION_NAMES


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
    cast: _AutocastSpec,
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
            lambda: _run_eagerly(model, example_inputs, cast),
            [lambda given=given: _run_eagerly(model, given, cast) for given in _other_values(example_inputs)],
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
        calls = _UntraceableCalls(model)
        own = _eager_error(model, example_inputs, cast, calls)
        if isinstance(own, TraceError):
            raise own from None
        if own is not None:
            raise TraceError(
                f"{type(model).__name__}.forward raised {type(own).__name__}: {own} "
                f"(inputs {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in example_inputs)})"
                + (f": {remedy}" if (remedy := one_row_remedy(own)) else "")
            ) from own
        frames = list(_error_frames(error))
        if _is_transform_error(error, frames) and not _innermost_user_line(error, frames):
            frames = _transform_frames(model, example_inputs, cast)
        named = _untraceable_call_error(model, calls) if _FAKE_CONSTANT_ERROR in str(error) else None
        raise (named or _constant_error(model, error) or untraceable_error(model, error, frames)) from error


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


@contextlib.contextmanager
def _python_state_kept(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[PythonState]:
    """In the body forward may keep fake tensors on the model; afterwards none is left there, if it has still `modules`."""
    state, empty = PythonState(model), _EmptyBuffers(model)
    registered = {
        id(module): {*module._parameters, *module._buffers}
        for module in modules
        if not isinstance(module, torch.jit.ScriptModule)  # none can be made there
    }
    made: list[str] = []
    try:
        yield state
    finally:
        if list(model.modules()) == list(modules):
            state.restore()
            empty.restore()
            made = _drop_made_tensors(model, registered)
    if made:
        raise TraceError(
            f"forward makes {made[0]!r}, a parameter or buffer that the model has not when it is built: neither stages nor "
            "an optimizer know of it; make it in __init__, or have model.factory call the model once"
        )


def _drop_made_tensors(model: nn.Module, registered: Mapping[int, Collection[str]]) -> list[str]:
    """Take away the parameters and buffers that are not `registered`, by the id of their module; their names."""
    made = []
    for path, module in model.named_modules():
        for kept in (module._parameters, module._buffers) if id(module) in registered else ():
            for name in [name for name in kept if name not in registered[id(module)]]:
                del kept[name]
                made.append(f"{path}.{name}" if path else name)
    return made


def _run_once(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec) -> None:
    """Run once a model whose first forward exchanges modules of its own, as BigBird's does for short texts.

    A graph of that forward names modules that are gone, and export puts back the attributes by which the model knows
    that they are."""
    buffers = BufferSnapshot(model)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), cast.entered():
        model(*example_inputs)
    buffers.restore()


def _run_eagerly(model: nn.Module, inputs: tuple[Tensor, ...], cast: _AutocastSpec) -> None:
    """One forward on real values, within which nothing of ours answers for them."""
    buffers = BufferSnapshot(model)
    given = [value.clone() for value in inputs]
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            cast.entered(),
            torch._C.DisableTorchFunction(),
        ):
            model(*given)
    finally:
        buffers.restore()


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


def _eager_error(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: _AutocastSpec, calls: _UntraceableCalls
) -> Exception | None:
    """The error that the model raises when it runs eagerly, if it does; `calls` notices what it calls."""
    buffers, given = BufferSnapshot(model), [value.clone() for value in example_inputs]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), cast.entered(), calls:
            model(*given)
    except Exception as error:
        return error
    finally:
        buffers.restore()
    return None


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
