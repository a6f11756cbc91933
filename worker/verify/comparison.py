"""Compares a pipeline step with the plain model's in causal order, and names the slot that made a difference.

Works on what both runs left behind; runs nothing. Order: transfers, losses, loss scale, gradients, skipped
updates, learning rate, parameters, buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.model.parity import (
    LEARNING_RATE_TOLERANCE,
    MIN_GRADIENT_SHARE,
    UPDATE_ROUNDINGS,
    UPDATE_TOLERANCE,
    Distance,
    Tolerance,
    compare,
    compare_numbers,
    gradient_floor,
    gradient_pair,
    rms,
)
from worker.transport.base import real_view
from worker.verify.plain import PlainStep
from worker.verify.recorder import BackwardSlot, RecordedStep, probe_norm


class DifferenceFound(Exception):
    """Something of the pipeline is not as in the plain model; the message says what, by how much and where."""


@dataclass
class WorstDistances:
    """The number of comparisons, the greatest distance and the allowed one, by kind of tensor."""

    kinds: dict[str, tuple[int, float, float]] = field(default_factory=dict)

    def add(self, kind: str, distance: Distance) -> None:
        count, most, _ = self.kinds.get(kind, (0, 0.0, distance.allowed))
        self.kinds[kind] = (count + 1, max(most, distance.apart), distance.allowed)

    def add_exact(self, kind: str, equal: bool) -> None:
        """Count a comparison that allows no rounding."""
        self.add(kind, Distance(0.0 if equal else 1.0, 0.0))


@dataclass(frozen=True)
class WorkerTensors:
    """A worker's tensors by original name, the stages of each name there, its data-parallel rank, and the `part` that it
    holds of a whole parameter."""

    mesh: str
    worker: int
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    stages_of: Mapping[str, tuple[int, ...]]
    rows: int = 0
    part: Callable[[str, Tensor], Tensor] = lambda name, whole: whole

    def __str__(self) -> str:
        return self.mesh + (f" (worker {self.worker})" if self.worker else "")

    def place(self, name: str) -> str:
        stages = self.stages_of.get(name, ())
        return f"stage {', '.join(map(str, stages))} on {self}" if stages else str(self)


@dataclass(frozen=True)
class PipelineStep:
    """One step of the pipeline: losses by worker and microbatch, gradient norm, learning rates by mesh, whether the update
    was skipped, the gradients of each holder's optimizer by name, and in fp16 the loss scale of each worker."""

    losses: Mapping[tuple[int, int], float]
    norm: float | None
    learning_rates: Mapping[str, float]
    skipped: bool
    gradients: Sequence[Mapping[str, Tensor]]
    record: RecordedStep
    loss_scales: Sequence[float] = ()


def compare_initial(
    plain: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    holders: Sequence[WorkerTensors],
    worst: WorstDistances,
) -> None:
    """Initial values are equal, bit for bit."""
    for holder in holders:
        for kind, expected, found in (
            ("initial parameters", plain, holder.parameters),
            ("initial buffers", buffers, holder.buffers),
        ):
            for name, tensor in found.items():
                if name not in expected:
                    raise DifferenceFound(f"{holder.place(name)} holds {name!r}, which the model has not")
                wanted = holder.part(name, expected[name].detach())
                same = torch.equal(tensor.detach().cpu(), wanted)
                worst.add_exact(kind, same)
                if not same:
                    raise DifferenceFound(
                        f"before the first step: {name!r} of {holder.place(name)} does not begin with the model's "
                        f"values (apart by {compare(wanted, tensor.detach().cpu(), 0.0).apart:.3g} of "
                        "its size)"
                    )


def check_transfers(step: int, record: RecordedStep, worst: WorstDistances) -> None:
    """The tensor that a stage used is the one that another stage left to be sent, bit for bit."""
    for passed in record.transfer_checks():
        worst.add_exact("transfers", passed.intact)
    if changed := [str(passed) for passed in record.transfer_checks() if not passed.intact]:
        raise DifferenceFound(
            f"step {step}: what was sent is not what was used: {changed[0]}"
            + (f", and {len(changed) - 1} more transfers" if len(changed) > 1 else "")
            + "; a buffer was stale, or written to too early"
        )


@dataclass(frozen=True)
class ComparisonContext:
    """The same for all steps of a run: the workers' states, the tolerance, the worst distances so far, the job's
    training.clip_grad_norm, and whether meshes split a microbatch over different numbers of workers."""

    holders: Sequence[WorkerTensors]
    tolerance: Tolerance
    worst: WorstDistances
    clip: float | None
    heterogeneous: bool = False


class StepComparison:
    """Compares one step of both runs; the checks are called in the order in which they are defined. `first_forward` names
    the first forward that differs, of a worker and microbatch whose loss differs; `optimizer_reason` says why an optimizer
    updates a parameter otherwise than the plain model's, where the parameters that it has are the reason, else nothing."""

    def __init__(
        self,
        step: int,
        plain: PlainStep,
        pipeline: PipelineStep,
        context: ComparisonContext,
        *,
        first_forward: Callable[[int, int], str],
        optimizer_reason: Callable[[WorkerTensors, str], str],
    ) -> None:
        self._step, self._plain, self._pipeline = step, plain, pipeline
        self._holders, self._tolerance, self._worst = context.holders, context.tolerance, context.worst
        self._clip, self._heterogeneous = context.clip, context.heterogeneous
        self._first_forward, self._optimizer_reason = first_forward, optimizer_reason

    def check_transfers(self) -> None:
        check_transfers(self._step, self._pipeline.record, self._worst)

    def check_losses(self) -> None:
        for at, expected in sorted(self._plain.losses.items(), key=lambda one: one[0][::-1]):
            worker, microbatch = at
            if at not in self._pipeline.losses:
                raise self._different(f"microbatch {microbatch} of worker {worker} has no loss")
            found = self._pipeline.losses[at]
            distance = compare(
                torch.tensor(expected).double(), torch.tensor(found).double(), self._tolerance.values
            )
            self._worst.add("losses", distance)
            if not distance.is_rounding:
                raise self._different(
                    f"the loss of microbatch {microbatch} is {found:.8g} in the pipeline and {expected:.8g} in the "
                    f"plain model; made by {self._first_forward(worker, microbatch)}"
                )

    def check_gradients(self) -> None:
        """Gradients of every parameter, in the order of a backward, before clipping; then the norm, and clipping."""
        if left := sorted(self._pipeline.record.left_over):
            raise self._different(
                f"the gradient of {left[0]!r} was not emptied before the step"
                + (f", nor {len(left) - 1} more" if len(left) > 1 else "")
            )
        plain = self._plain.gradients
        held = {name for holder in self._holders for name in holder.parameters}
        if lost := [name for name in self._plain.order if name in plain and name not in held]:
            raise self._different(
                f"{lost[0]!r} is in no stage, and in the plain model it has a gradient"
                + (f", and {len(lost) - 1} more" if len(lost) > 1 else "")
            )
        floor = gradient_floor(plain.values())
        coefficient = self._coefficient(self._pipeline.norm)
        for name, at in self._backwards():
            holder = self._holders[at]
            clipped = self._pipeline.gradients[at].get(name)
            pair = gradient_pair(plain.get(name), None if clipped is None else clipped.cpu() / coefficient)
            if pair is None:
                continue
            distance = compare(*pair, self._tolerance.gradients, floor)
            self._worst.add("gradients", distance)
            if not distance.is_rounding:
                raise self._different(self._about_gradient(holder, name, *pair, distance, floor))
        self._check_norm()

    def check_rate(self) -> None:
        holders = {str(holder): holder for holder in self._holders}
        for mesh, rate in self._pipeline.learning_rates.items():
            distance = compare_numbers(self._plain.learning_rate, rate, LEARNING_RATE_TOLERANCE)
            self._worst.add("learning rates", distance)
            if not distance.is_rounding:
                name = next(iter(holders[mesh].parameters), "")
                raise self._different(
                    f"the learning rate on {mesh} is {rate:.8g}, in the plain model {self._plain.learning_rate:.8g}"
                    + self._optimizer_reason(holders[mesh], name)
                )

    def check_parameters(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """After the update; the plain model's was made by the pipeline's gradients, which are equal to rounding."""
        for holder in self._holders:
            for name, tensor in holder.parameters.items():
                expected, found = holder.part(name, after[name].detach()), tensor.detach().cpu()
                was = holder.part(name, before[name])
                moved = rms(expected - was)
                eps = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
                allowed = UPDATE_TOLERANCE * moved + UPDATE_ROUNDINGS * eps * rms(expected)
                difference = rms(found - expected)
                apart = difference / moved if moved else (math.inf if difference > allowed else 0.0)
                beyond = apart if difference > allowed else 0.0
                self._worst.add("parameters after the step", Distance(beyond, UPDATE_TOLERANCE))
                if difference > allowed or not math.isfinite(difference):
                    still = moved and rms(found - was) == 0.0
                    what = (
                        "did not change, as the plain model's does: is it in no group of the optimizer?"
                        if still
                        else f"differs by {apart:.3g} of what the step changes"
                        + self._optimizer_reason(holder, name)
                    )
                    raise self._different(f"after STEP on {holder}, {name!r} {what}")

    def check_buffers(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        for holder in self._holders:
            for name, tensor in holder.buffers.items():
                # heterogeneous meshes have no buffers that a forward updates
                expected = buffers[holder.rows % len(buffers)].get(name)
                if expected is None:
                    continue
                distance = compare(expected, tensor.detach().cpu(), self._tolerance.values)
                self._worst.add("buffers", distance)
                if not distance.is_rounding:
                    raise self._different(
                        f"buffer {name!r} differs by {distance.apart:.3g} of its size after the forwards of "
                        f"{holder.place(name)}"
                    )

    def check_skipped(self) -> None:
        if self._pipeline.skipped is self._plain.finite:
            did = "left out its update" if self._pipeline.skipped else "made its update"
            raise self._different(
                f"the pipeline {did}, and the plain model's losses and gradients are "
                f"{'finite' if self._plain.finite else 'not finite'}"
            )

    def check_scale(self) -> None:
        for holder, scale in zip(self._holders, self._pipeline.loss_scales, strict=False):
            if scale != self._plain.loss_scale:
                raise self._different(
                    f"the loss scale is {scale:g} on {holder} and {self._plain.loss_scale:g} in the plain model"
                )

    def _different(self, message: str) -> DifferenceFound:
        return DifferenceFound(f"step {self._step}: {message}")

    def _backwards(self) -> list[tuple[str, int]]:
        """Every parameter with the holders that have it, in the order in which a backward ends with it."""
        first: dict[str, int] = {}
        for holder in self._holders:
            for name, stages in holder.stages_of.items():
                first[name] = min(first.get(name, stages[0]), *stages)
        place = {name: index for index, name in enumerate(self._plain.order)}
        pairs = [(name, at) for at, holder in enumerate(self._holders) for name in holder.parameters]
        return sorted(pairs, key=lambda one: (-first[one[0]], -place[one[0]], -one[1]))

    def _coefficient(self, norm: float | None) -> float:
        """The factor that clips a gradient."""
        if self._clip is None or norm is None:
            return 1.0
        return min(1.0, self._clip / (norm + 1e-6))

    def _check_norm(self) -> None:
        if self._pipeline.norm is None:
            return
        distance = compare_numbers(self._plain.norm, self._pipeline.norm, self._tolerance.gradients)
        self._worst.add("gradient norms", distance)
        if not distance.is_rounding:
            raise self._different(
                f"the norm of all gradients is {self._pipeline.norm:.8g} in REDUCE, and {self._plain.norm:.8g} in the "
                "plain model, though each gradient is equal: one is counted twice, or not"
            )

    def _about_gradient(
        self,
        holder: WorkerTensors,
        name: str,
        expected: Tensor,
        found: Tensor,
        distance: Distance,
        floor: float,
    ) -> str:
        share = _scale_factor(expected, found, self._tolerance.gradients, floor)
        coefficient = self._coefficient(self._pipeline.norm)
        slots = self._slots(name)
        if not slots and share is not None and math.isclose(share * coefficient, 1.0, rel_tol=1e-2):
            made = f"STEP on {holder}: it was not clipped"
        elif slots:
            made = ", ".join(map(str, slots[:3])) + (f" and {len(slots) - 3} more slots" if slots[3:] else "")
        else:
            made = f"REDUCE on {holder}, since what every backward added to it is equal"
        times = "" if share is None else f"; it is {share:.4g} times the plain model's"
        return (
            f"the gradient of {name!r} of {holder.place(name)} differs by {distance}{times}; made by {made}"
        )

    def _slots(self, name: str) -> list[BackwardSlot]:
        """The backwards that added something else to a gradient than the plain model's of the same microbatch."""
        by_microbatch: dict[tuple[int, int], dict[BackwardSlot, Tensor]] = {}
        expected: dict[tuple[int, int], Tensor] = {}
        for slot, added in self._pipeline.record.added.get(name, {}).items():
            by_microbatch.setdefault(self._comparison_key(slot.rows, slot.microbatch), {})[slot] = added
        for at, added in self._plain.added.items():
            if name in added:
                place = self._comparison_key(*at)
                expected[place] = expected.get(place, 0.0) + added[name]
        least = MIN_GRADIENT_SHARE * max(map(probe_norm, expected.values()), default=0.0)
        wrong = []
        for at, added in expected.items():
            slots = by_microbatch.get(at, {})
            if not slots:  # the holders that do not compute it
                continue
            total = sum(slots.values())
            whole = max(probe_norm(added), least)
            if probe_norm(total - added) > 3 * self._tolerance.gradients * whole:
                wrong += sorted(slots, key=lambda slot: (-slot.stage, slot.mesh, slot.worker))
        return wrong

    def _comparison_key(self, rows: int, microbatch: int) -> tuple[int, int]:
        """Ranks of heterogeneous meshes have different rows: together they have those of the microbatch."""
        return (0 if self._heterogeneous else rows, microbatch)


def _scale_factor(expected: Tensor, found: Tensor, tolerance: float, floor: float) -> float | None:
    """The number that `found` is `expected` times, where there is one."""
    expected, found = (real_view(one).double().flatten() for one in (expected, found))
    whole = float(expected @ expected)
    if not whole or rms(expected) < floor or not math.isfinite(whole):
        return None
    share = float(expected @ found) / whole
    return share if compare(expected * share, found, tolerance, floor).is_rounding else None


def by_original_name(pairs: Iterable[tuple[str, Tensor]], names: Mapping[str, str]) -> dict[str, Tensor]:
    """A stage's tensors that have a name in the model, by that name."""
    return {names[local]: tensor for local, tensor in pairs if local in names}
