"""What to tell of a model that torch cannot trace: the user's module and line, the reason in a line, the way out.

Torch's own message may hold a whole graph: it stays in the traceback, for the log.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from worker.model.errors import TraceError

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_QUOTED = re.compile(r'File "([^"]+)", line (\d+), in (\w+)')
_BY_VALUE = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
# Functions of torch that look at values, and how a caller spares them that.
_REMEDIES = {
    "_detect_is_causal_mask": "say whether the mask is causal, with is_causal (TransformerEncoder), tgt_is_causal "
    "(TransformerDecoder) or src_is_causal and tgt_is_causal (Transformer)",
}
_LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_OWN_LOSS = (
    "if that is the loss that the model computes itself from its labels, let the job have a `loss` and name what it takes "
    "in model.output (logits, with transformers): then it is not traced"
)
_EXPERTS = (
    "experts that are looped over as they were chosen are not traced: set experts_implementation in the model's "
    "configuration to grouped_mm or batched_mm, where it has that"
)
_OWN_LINES = "use torch.where and masks in place of `if`, of .item() and of indexing by a mask"
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_OF_A_LIBRARY = (
    "that line is of {library}: where no argument of the model avoids it, have model.factory name a function of your own "
    "that builds the model and replaces what stands there by torch.where and masks"
)
_LONGEST = 240


def untraceable(model: nn.Module, error: BaseException) -> TraceError:
    """The error to raise in place of torch's `error`, which tracing `model` ended in."""
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    reason = f"{kind}: {first[:_LONGEST]}"
    frames = list(_frames(error))
    place = _module(model, frames) + _line(error, frames)
    if kind in _BY_VALUE:
        names = {frame.f_code.co_name for frame, _ in frames}
        remedy = next((text for name, text in _REMEDIES.items() if name in names), None)
        if remedy is None and (dropped := _layer_drop(model)):
            remedy = (
                f"if it leaves out whole layers at random, set {dropped} to 0 in the model's configuration"
            )
        if remedy is None and any("Experts" in type(f.f_locals.get("self")).__name__ for f, _ in frames):
            remedy = _EXPERTS
        if remedy is None and _in_own_loss(model, frames):
            remedy = _OWN_LOSS
        if remedy is None and (library := _INSTALLED.search(place)):
            remedy = _OF_A_LIBRARY.format(library=library[1])
        reason = f"what it does there is data-dependent, decided by the values of a tensor ({reason}): " + (
            remedy or _OWN_LINES
        )
    return TraceError(f"torch.export cannot trace {type(model).__name__}{place}: {reason}")


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    seen = set[int]()
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        causes.append(cause)
    for one in reversed(causes):
        yield from traceback.walk_tb(one.__traceback__)


def _module(model: nn.Module, frames: list[tuple[FrameType, int]]) -> str:
    """The innermost module that was called, other than the model itself."""
    names = {id(module): name for name, module in model.named_modules() if name}
    for frame, _ in reversed(frames):
        found = frame.f_locals.get("self")
        if id(found) in names:
            return f", in module {names[id(found)]!r} ({type(found).__name__})"
    return ""


def _layer_drop(model: nn.Module) -> str:
    """The settings by which a model of transformers leaves out layers, as far as they do."""
    configs = (getattr(module, "config", None) for module in model.modules())
    found = {
        name: float(getattr(config, name))
        for config in configs
        for name in _LAYER_DROP
        if isinstance(getattr(config, name, None), float | int) and getattr(config, name) > 0
    }
    return " and ".join(f"{name} (now {value:g})" for name, value in found.items())


def _in_own_loss(model: nn.Module, frames: list[tuple[FrameType, int]]) -> bool:
    """Whether the innermost line of the user's is of a whole model's forward that was given labels."""
    for frame, _ in reversed(frames):
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return frame.f_locals.get("self") is model and frame.f_locals.get("labels") is not None
    return False


def _line(error: BaseException, frames: list[tuple[FrameType, int]]) -> str:
    """The innermost line that is neither torch's nor ours."""
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    places += [(file, int(line)) for file, line, _ in _QUOTED.findall(str(error))]
    for file, line in reversed(places):
        if not file.startswith((*_LIBRARIES, "<")):
            return f", at {file}:{line}"
    return ""
