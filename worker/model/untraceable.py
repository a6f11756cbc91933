"""Explains why torch.export cannot take a model: the user's module and line, torch's reason, and a remedy.

torch's own message, which may hold a whole graph, stays in the traceback. A model whose forward fails by itself gets that
error instead: it is run once more, eagerly, to tell. Modules whose own backwards a trace would lose are found here too.
Knows nothing of stages.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from worker.contract.profile import TraceError
from worker.model.autocast import AutocastSpec
from worker.model.hf_patches import PATCHED_FUNCTION_NAMES
from worker.model.layers import LIBRARY_FOLDERS, QUOTED_FRAME, user_line
from worker.model.side_effects.eager import BufferSnapshot, python_state_kept, run_eagerly

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
_IN_PLACE = re.compile(r"[a-z]\w*[a-z0-9]_")
_ONE_ROW_ERROR = "Expected more than 1 value per channel when training"
_ONE_ROW_REMEDY = (
    "of one row there are no statistics: give a worker more rows of a microbatch, by fewer training.microbatches, fewer "
    "data-parallel workers or a larger training.global_batch, or set training.sync_batch_norm"
)


Frames = list[tuple[FrameType, int]]
"""Frames of a call and the lines that they were at, outermost first."""


class UntraceableError(TraceError):
    """A TraceError of a forward that runs eagerly; `path` is the module in which tracing it ended, empty for the model."""

    def __init__(self, message: str, path: str):
        super().__init__(message)
        self.path = path


def raise_untraceable(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: AutocastSpec, error: Exception
) -> NoReturn:
    """Raise the TraceError for a model whose export ended in `error`: UntraceableError where its forward runs eagerly, else
    with what that forward raises."""
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


class _UntraceableCalls(TorchFunctionMode):
    """Notices calls that no trace holds in the body, a forward of `model`: `found` says where (file:line), of what
    and in which module."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = model
        self._names = {id(tensor): f"parameter {name!r}" for name, tensor in model.named_parameters()}
        self._names |= {id(tensor): f"buffer {name!r}" for name, tensor in model.named_buffers()}
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


def _untraceable_call_error(model: nn.Module, calls: _UntraceableCalls) -> UntraceableError | None:
    """The error that names a call that no trace holds, if the model made one."""
    for kind, remedy in _REMEDIES_OF_CALLS.items():
        if kind in calls.found:
            where, name, path = calls.found[kind]
            return UntraceableError(
                f"torch.export cannot trace {type(model).__name__}, at {where}: {remedy.format(name=name)}",
                path,
            )
    return None


def _constant_error(model: nn.Module, error: Exception) -> UntraceableError | None:
    """The error of a tensor that forward makes and a trace takes for a constant, by the module that made it."""
    if _FAKE_CONSTANT_ERROR not in str(error) or (made := _CONSTANT.search(str(error))) is None:
        return None
    path = made[1]
    if path not in dict(model.named_modules()):
        return None
    return UntraceableError(
        f"torch.export cannot trace {type(model).__name__}, in module {path!r} "
        f"({type(model.get_submodule(path)).__name__}): its forward makes a tensor that a trace takes for a constant, such "
        "as the .data of a new one that it keeps: compute with tensors, without .data, and keep what lasts in a "
        "buffer (register_buffer)",
        path,
    )


def untraceable_error(
    model: nn.Module,
    error: BaseException,
    frames: Frames | None = None,
    *,
    path: str = "",
) -> UntraceableError:
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
        remedy = _data_dependent_remedy(model, frames, place)
        reason = (
            f"what it does there is data-dependent, decided by the values of a tensor ({reason}): {remedy}"
        )
    elif _is_transform_error(error, frames):
        reason = f"{reason}: {_TRANSFORM_REMEDY}"
    return UntraceableError(f"torch.export cannot trace {type(model).__name__}{place}: {reason}", path)


def _data_dependent_remedy(model: nn.Module, frames: Frames, place: str) -> str:
    """The remedy for a forward that looks at values, where `frames` lead to `place`."""
    names = {frame.f_code.co_name for frame, _ in frames}
    for name, remedy in _REMEDIES.items():
        if name in names:
            return remedy
    if (norm := _cumulative_norm(model, frames)) is not None:
        return _CUMULATIVE_NORM_REMEDY.format(name=norm)
    if dropped := _active_layer_drop(model):
        return f"if it leaves out whole layers at random, set {dropped} to 0 in the model's configuration"
    if any("Experts" in type(frame.f_locals.get("self")).__name__ for frame, _ in frames):
        return _EXPERTS_REMEDY
    if _in_own_loss(model, frames):
        return _OWN_LOSS_REMEDY
    if library := _INSTALLED_PACKAGE.search(place):
        return _LIBRARY_REMEDY.format(library=library[1])
    return _USER_CODE_REMEDY


def one_row_remedy(error: BaseException) -> str:
    """The remedy for the error that torch's batch norm raises for a single row; empty for another error."""
    return _ONE_ROW_REMEDY if _ONE_ROW_ERROR in str(error) else ""


def _error_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    seen = set[int]()
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        causes.append(cause)
    for raised in reversed(causes):
        yield from traceback.walk_tb(raised.__traceback__)


def _innermost_module(model: nn.Module, frames: Frames) -> str:
    """The name of the innermost module that was called, other than the model itself; empty without one."""
    # by its attributes, which the stand-ins that torch traces with share
    names = {id(vars(module)): name for name, module in model.named_modules() if name}
    for frame, _ in reversed(frames):
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module) and id(vars(found)) in names:
            return names[id(vars(found))]
    return ""


def _cumulative_norm(model: nn.Module, frames: Frames) -> str | None:
    """The name of the batch norm with momentum=None whose forward the frames lead through."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(frames):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            return names.get(id(module))
    return None


def _is_transform_error(error: BaseException, frames: Frames) -> bool:
    """True for an error of a transform of torch.func: it was raised in one, or speaks of a tensor that one wraps."""
    return "functorch" in str(error).partition("\n")[0] or any(
        frame.f_code.co_filename.endswith(_FUNCTION_TRANSFORMS) for frame, _ in frames
    )


def _transform_frames(model: nn.Module, example_inputs: tuple[Tensor, ...], cast: AutocastSpec) -> Frames:
    """The frames that lead to the first transform of torch.func in an eager forward, outermost first; empty without one."""
    found: Frames = []

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


def check_transforms(model: nn.Module, values: Mapping[fx.Node, Any]) -> None:
    """Raise TraceError for a graph in which a transform of torch.func wraps tensors; `values` are fake results."""
    for node, value in values.items():
        if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            stack = [path for path, *_ in (node.meta.get("nn_module_stack") or {}).values()]
            module = f" in module {stack[-1]!r}" if stack and stack[-1] else ""
            place = f", at {line}" if (line := user_line(node)) else ""
            raise UntraceableError(
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


def _in_own_loss(model: nn.Module, frames: Frames) -> bool:
    """True if the innermost user line is in the forward of a whole model that was given labels."""
    for frame, _ in reversed(frames):
        if not frame.f_code.co_filename.startswith((*LIBRARY_FOLDERS, "<")):
            return frame.f_locals.get("self") is model and frame.f_locals.get("labels") is not None
    return False


def _innermost_user_line(error: BaseException, frames: Frames) -> str:
    """The innermost line that is neither torch's nor ours."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places += [(file, int(line)) for file, line, _ in QUOTED_FRAME.findall(str(error))]
    for file, line in reversed(places):
        if not file.startswith((*LIBRARY_FOLDERS, "<")):
            return f", at {file}:{line}"
    return ""


def _eager_error(
    model: nn.Module, example_inputs: tuple[Tensor, ...], cast: AutocastSpec, calls: _UntraceableCalls
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

    with _noted_autograd_functions(note), python_state_kept(model, list(model.modules())):
        run_eagerly(model, example_inputs, AutocastSpec(device, autocast))
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
