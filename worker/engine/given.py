"""What an engine is given, checked against its program: stages and times when it is made, samples at every step."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from worker.program import COMPUTE_OPS, Program


def check_stages(
    mesh: str, program: Program, stages: Collection[int], planned_s: Sequence[float] | None
) -> None:
    """ValueError for stages that the program runs and nobody gave, and for times of another program."""
    needed = {i.stage for i in program if i.op in COMPUTE_OPS}
    if missing := sorted(needed - set(stages)):
        raise ValueError(f"the program of mesh {mesh} runs stages {missing}, which were not given")
    if planned_s is not None and len(planned_s) != len(program):
        raise ValueError(f"planned_s has {len(planned_s)} times for {len(program)} instructions")


def check_batch(
    inputs: Sequence[tuple[torch.Tensor, ...]],
    targets: Sequence[torch.Tensor] | None,
    *,
    microbatches: int,
    needs_targets: bool,
) -> None:
    """ValueError unless there are samples, and where they are needed targets, of every microbatch."""
    if len(inputs) != microbatches:
        raise ValueError(f"run_step got {len(inputs)} microbatches, the program has {microbatches}")
    if needs_targets and (targets is None or len(targets) != microbatches):
        raise ValueError(f"run_step needs {microbatches} targets where the model's output is")
