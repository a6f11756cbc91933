"""Which stages run their backward whole (B) and which in two parts (I, W): a choice where B was measured.

In two parts there is more freedom, and more to do: the parts walk the graph of autograd twice and launch more
kernels. Where the spec says how long B lasts, that price is known, and the choice is searched as that of
recomputation is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.scheduler.kernels import TOLERANCE
from service.scheduler.model.problem import OPS, Problem, build_problem
from service.scheduler.model.spec import PipelineSpec
from service.scheduler.recomputation import Choice


def splits(spec: PipelineSpec) -> bool:
    """Whether `auto` may split backwards at all: as the spec says, else where there is a W to move, or I is all of it and
    shorter than B."""
    if spec.split_backward is not None:
        return spec.split_backward
    return any(
        stage.backward_weight_s > 0 or stage.whole_backward_s > stage.backward_input_s * (1 + TOLERANCE)
        for stage in spec.stages
    )


def shorter_whole(spec: PipelineSpec) -> list[str]:
    """The stages whose B is shorter than I and W together; the others lose nothing by being split."""
    if spec.split_backward is not None or not splits(spec):
        return []
    return [
        stage.name
        for stage in spec.stages
        if stage.whole_backward_s < (stage.backward_input_s + stage.backward_weight_s) * (1 - TOLERANCE)
    ]


def problem_with_whole(spec: PipelineSpec, whole: Choice = frozenset()) -> Problem:
    """The problem that `auto` solves when these stages run whole backwards and all others may be split."""
    problem = build_problem(spec, split=splits(spec), inference=False)
    if not whole:
        return problem
    chosen = np.array([stage.name in whole for stage in spec.stages])
    return problem.with_fused(problem.fused | chosen[:, None])


def either_way(spec: PipelineSpec) -> Problem:
    """A problem that no choice of whole backwards beats: all are split, and together as short as the shorter way."""
    names = frozenset(shorter_whole(spec))
    problem = problem_with_whole(spec, names)
    return problem.all_split() if names else problem


def busiest_first(names: Sequence[str], problem: Problem) -> list[str]:
    """The stages in the order in which whole backwards are likely to pay: those of the busiest meshes first."""
    work = np.zeros(problem.meshes)
    np.add.at(
        work, np.repeat(problem.mesh_of_stage, OPS), problem.duration[: problem.compute_kinds].sum(axis=1)
    )
    load = work[problem.mesh_of_stage]
    rank = {stage.name: float(-seconds) for stage, seconds in zip(problem.spec.stages, load, strict=True)}
    return sorted(names, key=rank.__getitem__)
