"""Locates what makes a difference that was found: the first forward that differs, or an optimizer that looks across.

Runs the stages of the trace that the pipeline runs, one after the other, with the plain model's parameters, beside the
recorded outputs of the pipeline: what differs from these is the pipeline's, else the plain model's or the loss's. Seeds
follow the contract of random numbers without the engine's own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.contract.costs import batch_dimension
from worker.engine.forward import drop_casts, run_forward
from worker.model.export import TracedModel
from worker.model.parity import TRIED_UPDATE_TOLERANCE, compare_numbers, rms
from worker.model.rng import derive_seed, reseed_at_random_ops, seeded
from worker.model.stages import StageModule
from worker.verify.comparison import WorkerTensors
from worker.verify.plain import PlainModel, PlainStep, TriedUpdate
from worker.verify.recorder import Probes, RecordedStep, probe_norm

TARGET_CHANGED = (
    "it changes its target in place, which is the data set's and may be used again: let it change a copy "
    "(target.clone())"
)
# Updates by which an optimizer is tried: some look across parameters only when they have moved.
_TRIED_UPDATES = 10
# How often a loss is computed again, to see whether it repeats.
_LOSS_TRIALS = 20


@dataclass(frozen=True)
class TracedStages:
    """The traces that the pipeline runs, by the number of workers that share a microbatch; where it is cut; the mesh of
    each stage, and how many workers share a microbatch on each mesh."""

    traced: Mapping[int, TracedModel]
    starts: Sequence[str]
    mesh_of_stage: Sequence[str]
    sharing: Mapping[str, int]

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[int, list[StageModule]]:
        """The stages by the number of workers, with the values of `tensors`."""
        sizes = {self.sharing[mesh] for mesh in self.mesh_of_stage}
        return {
            size: with_tensors(self.traced[size], tensors).cut(self.starts).stages for size in sorted(sizes)
        }


def with_tensors(traced: TracedModel, tensors: Mapping[str, Tensor]) -> TracedModel:
    """The traced model with `tensors` in the places of its parameters and buffers of these names."""
    own = {name: tensors.get(name, tensor) for name, tensor in traced.placed.tensors.items()}
    return replace(traced, placed=replace(traced.placed, tensors=own))


def first_different_forward(
    plain: PlainModel,
    expected: PlainStep,
    record: RecordedStep,
    probes: Probes,
    stages: TracedStages,
    *,
    buffers: Mapping[str, Tensor],
    at: tuple[int, int, int],
    tolerance: float,
) -> str:
    """The cause of a loss that differs, for people: the first forward of its microbatch whose outputs differ from those of
    the trace, the plain model itself or the loss. `at` is worker, step and microbatch.

    The plain model's parameters are those that the step began with, as are `buffers`. Where meshes share a microbatch
    among different numbers of workers, all of these are run.
    """
    worker, step, microbatch = at
    forwards = _TracedForwards(plain, stages, buffers, worker, step)
    try:
        for earlier in range(microbatch if forwards.update_buffers else 0):
            for _ in forwards.run(earlier):
                pass
        for forward in forwards.run(microbatch):
            seen = record.made_by(forward.part, forward.stage, microbatch)
            if wrong := _first_mismatch(forward.made, seen, probes, tolerance):
                return f"{forward}, whose inputs are equal and whose output {wrong!r} is not"
            if forward.part == worker:
                outputs = forward.model_outputs
    finally:
        drop_casts()
    for output, own in zip(outputs, expected.outputs[worker, microbatch], strict=True):
        if _is_apart(own, probes.of(output), tolerance):
            return (
                "the plain model itself, whose forward makes another output than its trace, while all stages make what the "
                "trace makes: it depends on something that no graph holds (Python objects, random numbers outside of torch, "
                "modes of modules)"
            )
    loss = expected.losses[worker, microbatch]
    reason = _loss_reason(plain, step, (worker, microbatch), outputs, loss, tolerance)
    return f"the loss of {forward}, since the outputs of all stages are equal: {reason}"


def _loss_reason(
    plain: PlainModel,
    step: int,
    at: tuple[int, int],
    outputs: Sequence[Tensor],
    loss: float,
    tolerance: float,
) -> str:
    """The likely reason why of equal outputs the losses differ."""
    if plain.loss_changes_target:
        return TARGET_CHANGED
    for again in plain.losses_again(step, at, outputs, _LOSS_TRIALS):
        if not compare_numbers(loss, again, tolerance).is_rounding:
            return f"it does not repeat, in the plain model either: of the same output and target it makes {again:.8g}, too"
    return "its function or its target"


@dataclass(frozen=True)
class _TracedForward:
    """A forward of a stage by its trace: the `part` of the microbatch, and the tensors it made, by name."""

    stage: int
    mesh: str
    microbatch: int
    part: int
    several: bool
    made: Mapping[str, Tensor]
    model_outputs: Sequence[Tensor]

    def __str__(self) -> str:
        who = f" (worker {self.part})" if self.part and self.several else ""
        return f"{self.stage}F{self.microbatch} on {self.mesh}{who}"


class _TracedForwards:
    """Runs the stages of the traces one after the other, with the plain model's parameters."""

    def __init__(
        self,
        plain: PlainModel,
        stages: TracedStages,
        buffers: Mapping[str, Tensor],
        worker: int,
        step: int,
    ) -> None:
        self._plain, self._stages, self._worker, self._step = plain, stages, worker, step
        parameters = dict(plain.model.named_parameters(remove_duplicate=False))
        self._modules = stages.cut({**parameters, **buffers})
        self._seeds = _SeedReplay()
        for modules in self._modules.values():
            for module in modules:
                reseed_at_random_ops(module, self._seeds)
        self.update_buffers = any(m.updated_buffers for modules in self._modules.values() for m in modules)

    def run(self, microbatch: int) -> Iterator[_TracedForward]:
        """All forwards of a microbatch, in order."""
        plain, step, several = self._plain, self._step, len(self._modules) > 1
        rows = {
            size: [plain.rows(step, part, microbatch, size)[0] for part in range(size)]
            for size in self._modules
        }
        values = _StageValues(
            {size: [[value.clone() for value in one] for one in parts] for size, parts in rows.items()}
        )
        for index, mesh in enumerate(self._stages.mesh_of_stage):
            size = self._stages.sharing[mesh]
            stage = self._modules[size][index]
            for part in range(size) if several else [self._worker]:
                self._seeds.at = (plain.seed, part, step, microbatch)
                with seeded(0):
                    run = run_forward(
                        stage,
                        [
                            values.of(name, size, part, shape).detach()
                            for name, shape in zip(stage.inputs, stage.input_shapes, strict=True)
                        ],
                        device_type="cpu",
                        training=True,
                        autocast_dtype=plain.autocast,
                    )
                made = dict(zip(stage.outputs, run.outputs, strict=True))
                values.keep(made, size, part)
                outputs = [run.outputs[place] for place in stage.model_outputs]
                yield _TracedForward(index, mesh, microbatch, part, several, made, outputs)


def different_alone(
    plain: PlainModel,
    holder: WorkerTensors,
    name: str,
    before: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
) -> str:
    """The reason, for people, where an optimizer of a holder's parameters alone updates `name` otherwise than one of all
    parameters; else nothing. Tries both from the values `before`, by multiples of the gradients."""
    own = [one for one in holder.parameters if one in plain.trained]
    if name not in own or len(own) == len(plain.trained):
        return ""

    def tried(names: Sequence[str], seed: int = 0) -> TriedUpdate:
        return plain.try_updates(names, before, gradients, _TRIED_UPDATES, seed)[name]

    alone, whole, twin = tried(own), tried([*plain.trained]), tried([*plain.trained], seed=1)
    allowed = TRIED_UPDATE_TOLERANCE * rms(whole.value - before[name])
    if rms(twin.value - whole.value) > allowed:
        return f"; {whole.optimizer} draws random numbers: it does not repeat its own updates"
    if rms(alone.value - whole.value) <= allowed:
        return ""
    settings = [
        f"{key} is {alone.settings[key]:.8g}, not {value:.8g}"
        for key, value in whole.settings.items()
        if isinstance(value, int | float) and alone.settings.get(key, value) != value
    ]
    return (
        f"; {whole.optimizer} updates it otherwise with the {len(own)} parameters of {holder} than with all "
        f"{len(plain.trained)}{f' ({settings[0]})' if settings else ''}: it, or its factory, looks across parameters"
    )


class _StageValues:
    """The tensors that stages made, of each part of the microbatch; begins with the model's inputs, by how many share."""

    def __init__(self, inputs: Mapping[int, Sequence[Sequence[Tensor]]]) -> None:
        self._inputs = inputs
        self._made: dict[str, tuple[int, dict[int, Tensor]]] = {}

    def keep(self, made: Mapping[str, Tensor], size: int, part: int) -> None:
        for name, value in made.items():
            self._made.setdefault(name, (size, {}))[1][part] = value

    def of(self, name: str, size: int, part: int, shape: tuple[int, ...]) -> Tensor:
        """The part of a tensor that one of `size` workers has, of that shape."""
        if name.startswith("input:"):
            return self._inputs[size][part][int(name.removeprefix("input:"))]
        other, parts = self._made[name]
        if other == size:
            return parts[part]
        shapes = tuple(parts[0].shape), tuple(shape)
        along = batch_dimension(name, shapes, (other, size), differentiable=False)
        if along is None:
            return parts[0]
        whole = torch.cat([parts[one] for one in range(other)], along)
        return whole.chunk(size, along)[part].contiguous()


def _first_mismatch(
    made: Mapping[str, Tensor], seen: Mapping[str, Tensor], probes: Probes, tolerance: float
) -> str | None:
    for name, value in made.items():
        if name in seen and _is_apart(seen[name], probes.of(value), tolerance):
            return name
    return None


def _is_apart(probe: Tensor, expected: Tensor, tolerance: float) -> bool:
    return probe_norm(probe - expected) > tolerance * probe_norm(expected)


class _SeedReplay:
    """The contract of random numbers, without the engine's own way to keep it; `at` is where the next ones are drawn."""

    at: tuple[int, int, int, int]

    def restart(self, operation: str) -> None:
        torch.default_generator.manual_seed(derive_seed(*self.at, operation))
