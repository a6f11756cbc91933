"""Derives a stage's RecomputeSpec: the bytes it then keeps, and whether the job or the model requires it.

Knows the costs of layers; whether recomputing pays is decided in auto/recomputation.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Literal

from service.scheduler.job.cut import CutProblem
from service.scheduler.problem.spec import RecomputeSpec
from worker.contract.profile import CutError

Recompute = Literal["auto", "none", "all"] | Sequence[str]


def check_recompute_names(recompute: Recompute, layers: Sequence[str], stages: int) -> None:
    """Raise CutError for a name that is neither a stage nor a module with layers."""
    if isinstance(recompute, str):
        return
    for name in recompute:
        if not any(_name_matches(name, stage, ()) for stage in range(stages)) and not _name_matches(
            name, -1, layers
        ):
            near = difflib.get_close_matches(name, layers, n=3) or list(layers[:8])
            raise CutError(
                f"recompute name {name!r} is no stage (s0 to s{stages - 1}) and no module that layers are in: "
                f"did you mean {', '.join(near)}?"
            )


def recompute_spec(
    problem: CutProblem, recompute: Recompute, stage: int, first: int, end: int, activation_bytes: int
) -> RecomputeSpec | None:
    """What stage number `stage`, of layers first..end-1, may or must do; None where it keeps all.

    `auto` leaves the choice to the schedule, but for stages with a region that the model itself checkpoints: like
    those that names ask for they recompute. It keeps the tensors that it takes from other stages (the model's own
    inputs are there all step long) and notes the buffers that it updates.
    """
    names = [layer.name for layer in problem.profile.layers[first:end]]
    required = recompute == "all" or (
        recompute != "none"
        and (
            not problem.profile.checkpointed.isdisjoint(names)
            or (recompute != "auto" and any(_name_matches(name, stage, names) for name in recompute))
        )
    )
    if not required and recompute != "auto":
        return None
    taken = [t for t in problem.tensors if t.source < first and any(first <= x < end for x in t.targets)]
    kept = sum(tensor.size for tensor in taken)
    saved = sum(t.size for t in taken if any(first <= layer < end for layer in t.saved_at))
    profile = problem.profile
    here = {name for layer in profile.layers[first:end] for name in layer.buffers}
    updated = sum(profile.buffer_sizes[name] for name in profile.updated_buffers if name in here)
    if not required and kept + updated >= activation_bytes:
        return None
    return RecomputeSpec(
        activation_bytes=kept + updated,
        extra_s=sum(layer.forward_s for layer in profile.layers[first:end]),
        # the buffers as they are now and as the second run leaves them, beside what autograd keeps
        rematerialised_bytes=max(0, activation_bytes - saved) + 2 * updated,
        required=required,
    )


def _name_matches(name: str, stage: int, layers: Sequence[str]) -> bool:
    """Whether a name is that of the stage, of one of its layers (whichever call of it), or of a module around one."""
    return name == f"s{stage}" or any(
        layer == name or layer.partition("@")[0] == name or layer.startswith(f"{name}.") for layer in layers
    )
