"""Locates the first forward of a pipeline whose output differs from the plain model's, once a loss differs.

Runs the stages of a new trace of the plain model, one after the other, beside the recorded outputs of the
pipeline. Seeds follow the contract of random numbers without the engine's own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from worker.contract.costs import batch_dimension
from worker.engine.forward import drop_casts, run_forward
from worker.model.export import trace
from worker.model.rng import derive_seed, reseed_at_random_ops, seeded
from worker.verify.plain import PlainModel
from worker.verify.recorder import Probes, StepRecord, probe_norm


def first_different_forward(
    plain: PlainModel,
    record: StepRecord,
    probes: Probes,
    *,
    stage_starts: Sequence[str],
    mesh_of_stage: Sequence[str],
    sharing: Mapping[str, int],
    at: tuple[int, int, int],
    tolerance: float,
) -> str:
    """The first forward of a microbatch whose outputs differ, for people; `at` is worker, step and microbatch.

    The plain model's parameters are those that the step began with. `sharing` has by mesh how many workers share a
    microbatch: where those are unlike numbers, all of them are run.
    """
    worker, step, microbatch = at
    sizes = {sharing[mesh] for mesh in mesh_of_stage}
    rows = {
        size: [plain.rows(step, part, microbatch, size)[0] for part in range(size)] for size in sorted(sizes)
    }
    graphs = {
        size: trace(plain.model, parts[0], autocast=plain.autocast).cut(stage_starts)
        for size, parts in rows.items()
    }
    values = _StageValues(
        {size: [[value.clone() for value in one] for one in parts] for size, parts in rows.items()}
    )
    try:
        for index, mesh in enumerate(mesh_of_stage):
            size = sharing[mesh]
            stage = graphs[size].stages[index]
            seeds = _SeedReplay()
            reseed_at_random_ops(stage, seeds)
            for part in range(size) if len(sizes) > 1 else [worker]:
                seeds.at = (plain.seed, part, step, microbatch)
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
                who = f" (worker {part})" if part else ""
                slot = f"{index}F{microbatch} on {mesh}{who if len(sizes) > 1 else ''}"
                if wrong := _first_mismatch(made, record.made_by(part, index, microbatch), probes, tolerance):
                    return f"{slot}, whose inputs are equal and whose output {wrong!r} is not"
    finally:
        drop_casts()
    return f"the loss of {slot}, since the outputs of all stages are equal: its function or its target"


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
        expected = probes.of(value)
        if name in seen and probe_norm(seen[name] - expected) > tolerance * probe_norm(expected):
            return name
    return None


class _SeedReplay:
    """The contract of random numbers, without the engine's own way to keep it; `at` is where the next ones are drawn."""

    at: tuple[int, int, int, int]

    def restart(self, operation: str) -> None:
        torch.default_generator.manual_seed(derive_seed(*self.at, operation))
