"""Which forward of a pipeline made something else: the stages of a new trace of the plain model, one after the other,
beside what the pipeline's stages were seen to make. Only run when a loss differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from worker.engine.random_state import derive_seed, restart_at_operations
from worker.engine.stage_run import drop_casts, run_forward
from worker.model import trace
from worker.seeding import seeded
from worker.verify.plain import PlainModel
from worker.verify.record import Probes, StepRecord, norm_of


def first_forward(
    plain: PlainModel,
    record: StepRecord,
    probes: Probes,
    *,
    begins: Sequence[str],
    mesh_of_stage: Sequence[str],
    at: tuple[int, int, int],
    tolerance: float,
) -> str:
    """The first forward of a microbatch whose outputs differ, for people; `at` is worker, step and microbatch.

    The plain model's parameters are those that the step began with.
    """
    worker, step, microbatch = at
    inputs, _ = plain.rows(step, worker, microbatch)
    graph = trace(plain.model, inputs, autocast=plain.autocast).cut(begins)
    values: dict[str, Tensor] = {f"input:{k}": value.clone() for k, value in enumerate(inputs)}
    try:
        for index, stage in enumerate(graph.stages):
            restart_at_operations(stage, _Seeds((plain.seed, worker, step, microbatch)))
            with seeded(0):
                run = run_forward(
                    stage,
                    [values[name].detach() for name in stage.inputs],
                    device_type="cpu",
                    training=True,
                    autocast_dtype=plain.autocast,
                )
            made = dict(zip(stage.outputs, run.outputs, strict=True))
            values |= made
            slot = f"{index}F{microbatch} on {mesh_of_stage[index]}"
            if wrong := _wrong(made, record.made_by(worker, index, microbatch), probes, tolerance):
                return f"{slot}, whose inputs are equal and whose output {wrong!r} is not"
    finally:
        drop_casts()
    return f"the loss of {slot}, since the outputs of all stages are equal: its function or its target"


def _wrong(
    made: Mapping[str, Tensor], seen: Mapping[str, Tensor], probes: Probes, tolerance: float
) -> str | None:
    for name, value in made.items():
        expected = probes.of(value)
        if name in seen and norm_of(seen[name] - expected) > tolerance * norm_of(expected):
            return name
    return None


class _Seeds:
    """The contract of random numbers, without the engine's own way to keep it."""

    def __init__(self, at: tuple[int, int, int, int]) -> None:
        self._at = at

    def restart(self, operation: str) -> None:
        torch.default_generator.manual_seed(derive_seed(*self._at, operation))
