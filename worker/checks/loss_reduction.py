"""Checks before the first step that the losses of microbatches, weighed as the job weighs them, are the loss of the batch.

The loss is called on the halves of some rows and on all of them: as the data has them and, where microbatches weigh by their
targets, with targets taken away from one half. A model that returns its own loss is called in eval mode, without dropout.
Raises LossReductionError with both values and the ways out. Knows no jobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.contract.profile import ModelError
from worker.data.microbatches import MicrobatchTensors
from worker.model.eval_mode import in_eval_mode
from worker.model.parity import tolerance_for
from worker.model.pytree import Target, Targets, target_tensors
from worker.model.rng import seeded
from worker.model.side_effects.python_state import PythonState

Loss = Callable[[Any, Target], Tensor]
CountTargets = Callable[[Target], Tensor]
Rows = tuple[tuple[Tensor, ...], Target]
"""What a model returned for some samples, and their target."""

COUNT_ATTRIBUTE = "count_targets"
"""Of a loss: a function of a target that returns what the loss divides by, so that microbatches weigh by it."""
TOLERANCE = 1e-4
"""Relative difference, in float32, of a mean over some thousand elements that is taken in two parts."""


class LossReductionError(ModelError):
    """The losses of microbatches do not make up the loss of the batch."""


MOST_BYTES = 2**28
"""Of outputs and targets that are tried together, beside the first microbatch: copies take three times as much."""
_OWN_LOSS_MICROBATCHES = 2
"""So many are one batch of a model that returns its own loss: its values are not kept for a backward."""
_BATCH_OF_ITS_OWN = (
    "microbatches if each microbatch shall be a batch of its own, as in a loop that accumulates gradients"
)
_LOSS_REMEDY = (
    "Set training.loss_reduction to tokens if the loss is a mean over targets that are not ignored; or to "
    + _BATCH_OF_ITS_OWN
)
_OWN_LOSS_REMEDY = (
    "If the model's own loss is a mean over targets that are not ignored, name its logits in model.output and give `loss` "
    "with training.loss_reduction: tokens; or set training.loss_reduction to " + _BATCH_OF_ITS_OWN
)


@dataclass(frozen=True)
class _Trial:
    """The loss of some rows in two halves, of the weights `counts`, and together; equal to a relative `tolerance`."""

    halves: tuple[float, float]
    counts: tuple[float, float]
    together: float
    tolerance: float = TOLERANCE

    @property
    def apart(self) -> float:
        """The weighed mean of the halves; one that weighs nothing is left out."""
        pairs = [(loss, count) for loss, count in zip(self.halves, self.counts, strict=True) if count]
        return sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs)

    @property
    def is_equal(self) -> bool:
        return is_loss_of_batch(self.apart, self.together, self.halves, self.tolerance)

    @property
    def adds_up(self) -> bool:
        return math.isclose(sum(self.halves), self.together, rel_tol=self.tolerance)


def is_loss_of_batch(
    apart: float, together: float, parts: Sequence[float], tolerance: float = TOLERANCE
) -> bool:
    """True if `apart`, made of the losses `parts`, is the loss `together` to rounding."""
    scale = max(abs(together), *(abs(loss) for loss in parts if math.isfinite(loss)), 0.0)
    return abs(apart - together) <= tolerance * scale + 1e-7


def check_loss_reduction(
    loss: Loss,
    seen: Sequence[Rows],
    *,
    count: CountTargets | None,
    ignored: int = -100,
) -> list[str]:
    """Try `loss` on the rows of the microbatches `seen`; notes where that cannot be done.

    `count` is the weight of a target, None where microbatches count equally. Trials with fewer targets set them to
    `ignored`. A loss that keeps state has counted these calls. Raises LossReductionError.
    """
    together = batch_of(in_float32(_within_bytes(seen)))
    try:
        first = _first_trial(loss, together, count)
    except _UntriedError as error:
        return [_not_tried(str(error))]
    if not first.is_equal:
        raise LossReductionError(_message(first, "", _LOSS_REMEDY, counted=count is not None))
    for what, rows in _with_fewer_targets(together, ignored) if count is not None else ():
        try:
            trial = _try(loss, rows, count)
        except Exception:  # it never meets such targets, or training will say so
            continue
        if not trial.is_equal:
            raise LossReductionError(_message(trial, what, _LOSS_REMEDY, counted=True))
    return []


def check_own_loss(model: nn.Module, seen: Sequence[MicrobatchTensors]) -> list[str]:
    """Try the loss that `model` returns of the inputs of the microbatches `seen`; notes where that cannot be done.

    It runs in eval mode. The model's Python state is put back, its buffers are not. Raises LossReductionError.
    """
    together = batch_of(seen[:_OWN_LOSS_MICROBATCHES])
    state = PythonState(model)

    def loss(inputs: Any, _: Target) -> Tensor:
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    tolerance = max(TOLERANCE, tolerance_for(model, None, seen[0][0][0].device.type).values)
    try:
        with in_eval_mode(model):
            trial = _first_trial(loss, together, None, tolerance)
    except _UntriedError as error:
        return [_not_tried(f"{error} (of the model in eval mode)")]
    finally:
        state.restore()
    if not trial.is_equal:
        raise LossReductionError(_message(trial, "", _OWN_LOSS_REMEDY, counted=False))
    return []


PADDING_TOLERANCE = 1e-3
"""Relative difference of a loss whose sums over positions are of other lengths."""


def check_padding(model: nn.Module, loss: Loss, padded: Sequence[MicrobatchTensors]) -> None:
    """Refuse a model whose loss of the same samples changes with their padding. It runs in eval mode, without gradients, and
    its Python state is put back. Raises LossReductionError with both values, and for batch norms, which take what lies
    behind the end of a sample into the statistics that they train with."""
    norms = [name for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise LossReductionError(
            f"{norms[0]!r} is a batch norm, whose statistics would count the padding of data.lengths: use a norm of each "
            "sample, such as LayerNorm, or leave data.lengths out; training.check_trace: false trains it so"
        )
    state, found = PythonState(model), []
    try:
        with in_eval_mode(model), torch.no_grad(), seeded(0):
            found = [float(loss(model(*inputs), target)) for inputs, target in padded]
    finally:
        state.restore()
    short, long = found
    allowed = max(PADDING_TOLERANCE, tolerance_for(model, None, "cpu").values)
    if math.isfinite(short) and abs(short - long) > allowed * max(abs(short), abs(long)):
        lengths = " and ".join(str(list(inputs[0].shape)) for inputs, _ in padded)
        raise LossReductionError(
            f"the loss of the same samples, padded to inputs of {lengths}, is {short:.6g} and {long:.6g}: the model looks "
            "behind the end of a sample. Give its samples an attention_mask, which is padded with 0, or leave data.lengths "
            "out; training.check_trace: false trains it so"
        )


class _UntriedError(Exception):
    """The rows do not make a trial, for the reason that it says."""


def _not_tried(why: str) -> str:
    return f"the loss was not tried on parts of a batch: {why}"


def _message(trial: _Trial, what: str, remedy: str, *, counted: bool) -> str:
    where = f" where {what}" if what else ""
    if not counted:
        halves = " and ".join(f"{loss:.6g}" for loss in trial.halves)
        said = (
            f"training.loss_reduction is mean, and the loss of a batch{where}, {trial.together:.6g}, is not the mean of its "
            f"halves' losses, {halves}"
        )
        if trial.adds_up:
            return f"{said}: it adds up its samples; have it return their mean (reduction: mean)"
        return f"{said}. {remedy}"
    return (
        f"training.loss_reduction is tokens, and{where} the loss of a batch is {trial.together:.6g}, while the losses of "
        f"its halves weighed by their numbers of targets ({trial.counts[0]:g} and {trial.counts[1]:g}) make "
        f"{trial.apart:.6g}: the loss counts otherwise. Give it an attribute {COUNT_ATTRIBUTE}(target) that returns what "
        f"it divides by; or set training.loss_reduction to {_BATCH_OF_ITS_OWN}"
    )


def _first_trial(
    loss: Loss, rows: Rows | None, count: CountTargets | None, tolerance: float = TOLERANCE
) -> _Trial:
    """The trial of the rows as the data has them; _UntriedError where that says nothing."""
    if rows is None:
        raise _UntriedError("the model's inputs, outputs or targets have no rows of samples")
    try:
        trial = _try(loss, rows, count, tolerance)
        again = loss_of_rows(loss, rows, seed=1), loss_of_rows(loss, rows)
    except _UntriedError:
        raise
    except Exception as error:
        raise _UntriedError(f"of them it raises {type(error).__name__}: {error}") from error
    # of a half without targets the weight is nothing where targets count
    if not math.isfinite(trial.together) or (count is None and not all(map(math.isfinite, trial.halves))):
        raise _UntriedError("that of some rows is not finite")
    if again[0] != again[1]:
        raise _UntriedError("it draws random numbers")
    return trial


@torch.no_grad()
def _try(loss: Loss, rows: Rows, count: CountTargets | None, tolerance: float = TOLERANCE) -> _Trial:
    """The trial of these rows. Raises what the loss raises, _UntriedError where there are no two parts that count."""
    half = len(rows[1]) // 2
    if half == 0:
        raise _UntriedError("there is one row only")
    parts = [_rows(rows, slice(0, half)), _rows(rows, slice(half, 2 * half))]
    counts = [1.0 if count is None else float(count(target)) for _, target in parts]
    if not any(counts):
        raise _UntriedError("the first microbatches have no targets")
    together = loss_of_rows(loss, _rows(rows, slice(0, 2 * half)))
    halves = [loss_of_rows(loss, part) if weight else 0.0 for part, weight in zip(parts, counts, strict=True)]
    return _Trial((halves[0], halves[1]), (counts[0], counts[1]), together, tolerance)


@torch.no_grad()
def loss_of_rows(loss: Loss, rows: Rows, seed: int = 0) -> float:
    """The loss of copies of the rows, called under this seed."""
    output, target = rows
    own = tuple(tensor.clone() for tensor in output)
    with seeded(seed):
        return float(loss(own[0] if len(own) == 1 else own, _map(target, torch.clone)))


def _with_fewer_targets(rows: Rows, ignored: int) -> Iterator[tuple[str, Rows]]:
    """The same rows with some targets of the second half ignored, and what is said of it."""
    output, target = rows
    if isinstance(target, Targets) or target.is_floating_point() or target.is_complex():
        return
    half = len(target) // 2
    drawn = torch.rand(target.shape, generator=torch.Generator().manual_seed(0)).to(target.device)
    left = {"two of three targets of one half are ignored": drawn < 1 / 3}
    if target.dim() > 1:
        place = torch.arange(target.shape[-1], device=target.device).expand_as(target)
        left["of one half only the first target of each row counts"] = place == 0
        left["of one half only the last target of each row counts"] = place == target.shape[-1] - 1
    left["one half has no target"] = torch.zeros_like(target, dtype=torch.bool)
    for what, kept in left.items():
        fewer = target.clone()
        fewer[half:] = torch.where(kept[half:], target[half:], ignored)
        yield what, (output, fewer)


def _within_bytes(seen: Sequence[Rows]) -> list[Rows]:
    """The first of the microbatches, and those behind it that MOST_BYTES have room for."""
    kept, size = [*seen[:1]], 0
    for rows in seen[1:]:
        size += sum(tensor.nbytes for tensor in (*rows[0], *target_tensors(rows[1])))
        if size > MOST_BYTES:
            break
        kept.append(rows)
    return kept


def batch_of(seen: Sequence[Rows]) -> Rows | None:
    """The rows of several microbatches as one; None where a tensor has no row for each sample."""
    tensors = [
        (*output, *(target.tensors if isinstance(target, Targets) else (target,))) for output, target in seen
    ]
    for each, (_, target) in zip(tensors, seen, strict=True):
        if any(not one.dim() or not len(target) or len(one) % len(target) for one in each):
            return None
    whole = tuple(torch.cat(each) for each in zip(*tensors, strict=True))
    width, first = len(seen[0][0]), seen[0][1]
    target = Targets(whole[width:], first.tree_spec) if isinstance(first, Targets) else whole[width]
    return whole[:width], target


def _rows(rows: Rows, part: slice) -> Rows:
    """The rows of some samples; of a tensor with several rows a sample all of them."""
    output, target = rows
    samples = len(target)

    def own(tensor: Tensor) -> Tensor:
        each = len(tensor) // samples
        return tensor[part.start * each : part.stop * each]

    return tuple(map(own, output)), _map(target, own)


def in_float32(seen: Sequence[Rows]) -> list[Rows]:
    """The same rows with halves as float32, in which sums of parts are compared."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    return [(tuple(map(own, output)), _map(target, own)) for output, target in seen]


def _map(target: Target, make: Callable[[Tensor], Tensor]) -> Target:
    if isinstance(target, Targets):
        return Targets(tuple(map(make, target.tensors)), target.tree_spec)
    return make(target)
