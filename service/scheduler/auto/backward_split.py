"""Chooses per stage between a whole backward (B) and one split into input and weight gradients (I, W).

Split backwards leave the schedule more freedom and cost more: the two parts walk the autograd graph twice and
launch more kernels. Where the spec says how long B lasts, that price is known and the choice is searched like
recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from service.scheduler.auto.recomputation import StageChoice
from service.scheduler.kernels import OPS, TOLERANCE
from service.scheduler.problem.problem import Problem, build_problem
from service.scheduler.problem.spec import PipelineSpec, bucket_specs


def may_split_backward(spec: PipelineSpec) -> bool:
    """True where `auto` may split backwards: as the spec says, else where there is a W to move, or I alone is shorter
    than B."""
    if spec.split_backward is not None:
        return spec.split_backward
    return any(
        stage.backward_weight_s > 0 or stage.whole_backward_s > stage.backward_input_s * (1 + TOLERANCE)
        for costs in bucket_specs(spec)[0]
        for stage in costs.stages
    )


def faster_whole_stages(spec: PipelineSpec) -> list[str]:
    """The stages whose B is shorter than I and W together, of any microbatch; all others lose nothing by a split."""
    if spec.split_backward is not None or not may_split_backward(spec):
        return []
    faster = {
        stage.name
        for costs in bucket_specs(spec)[0]
        for stage in costs.stages
        if stage.whole_backward_s < (stage.backward_input_s + stage.backward_weight_s) * (1 - TOLERANCE)
    }
    return [stage.name for stage in spec.stages if stage.name in faster]


def problem_with_whole_backwards(spec: PipelineSpec, whole: StageChoice = frozenset()) -> Problem:
    """The problem that `auto` solves when these stages run whole backwards and all others may be split."""
    problem = build_problem(spec, split=may_split_backward(spec), inference=False)
    if not whole:
        return problem
    chosen = np.array([stage.name in whole for stage in spec.stages])
    return problem.with_fused(problem.fused | chosen[:, None])


def backward_relaxation(spec: PipelineSpec) -> Problem:
    """A problem that no choice of whole backwards beats: all are split, I and W no longer than a shorter B."""
    names = frozenset(faster_whole_stages(spec))
    problem = problem_with_whole_backwards(spec, names)
    return problem.all_split() if names else problem


def busiest_meshes_first(names: Sequence[str], problem: Problem) -> list[str]:
    """The stages in the order in which whole backwards are likely to pay: stages of the busiest meshes first."""
    work = np.zeros(problem.meshes)
    np.add.at(
        work, np.repeat(problem.mesh_of_stage, OPS), problem.duration[: problem.compute_kinds].sum(axis=1)
    )
    load = work[problem.mesh_of_stage]
    rank = {stage.name: float(-seconds) for stage, seconds in zip(problem.spec.stages, load, strict=True)}
    return sorted(names, key=rank.__getitem__)
