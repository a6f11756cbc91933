"""Builds a stage as one rank of a tensor-parallel group runs it: the same inputs and outputs, fewer parameters.

The parts of a fused projection are found by trying: those with which the least must be gathered. Where the
number of workers does not divide what is to be split, the error names the numbers that can split the whole
stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from worker.model.export import fake_values
from worker.model.stages import StageInput, StageModule
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.placement import LayoutError, Split, UnevenError
from worker.parallel.tensor.plans import candidate_parts, split_parameters
from worker.parallel.tensor.rewrite import GatherCost, Rewriter
from worker.parallel.tensor.rules import RULES

_MAX_TRIED_WORKERS = 64
"""The largest group that is tried for an error message."""


@dataclass(frozen=True)
class TensorStage:
    """The rewritten stage, the splits of its parameters by original name, and the cost of gathers for want of a rule."""

    module: StageModule
    splits: Mapping[str, Split]
    gathered: GatherCost


def tensor_stage(stage: StageModule, plan: Mapping[str, str] | None, group: TensorGroup) -> TensorStage:
    """`stage` with its parameters split by `plan` (module-name patterns; None: the built-in ones) over `group`.

    The parts of a fused projection are found by trying: those with which the least must be gathered. LayoutError; where the
    number of ranks does not divide a split dimension, it names the numbers that can split the whole stage.
    """
    values = _fake_values_of(stage)
    try:
        return _split_stage(stage, plan, group, values)
    except UnevenError as error:
        fitting = [
            n
            for n in error.valid_workers
            if n == 1 or (n <= _MAX_TRIED_WORKERS and _can_split(stage, plan, n, values))
        ]
        raise UnevenError(error.problem, fitting) from None


def _can_split(
    stage: StageModule, plan: Mapping[str, str] | None, workers: int, values: Mapping[fx.Node, Any]
) -> bool:
    """True where `workers` ranks can split the stage: what divides the heads of one layer need not divide another's."""
    try:
        _split_stage(stage, plan, TensorGroup(0, workers), values)
    except LayoutError:
        return False
    return True


def _split_stage(
    stage: StageModule,
    plan: Mapping[str, str] | None,
    group: TensorGroup,
    values: Mapping[fx.Node, Any],
) -> TensorStage:
    names = {local.removeprefix("body."): name for local, name in stage.original_names.items()}
    splits = split_parameters(stage.body, names, plan, group.workers)
    if not splits:
        return TensorStage(stage, {}, GatherCost())

    def attempt(given: Mapping[str, Split]) -> tuple[fx.GraphModule, GatherCost]:
        rewriter = Rewriter(stage.body, values, group)
        return rewriter.run(given, RULES), rewriter.gathered

    body, gathered = attempt(splits)
    for name, split in list(splits.items()):
        if split.origins.isdisjoint(gathered.origins):
            continue
        for other in candidate_parts(stage.body, name, split, group.workers):
            changed = splits | {
                local: one.along(one.dim, other.parts)
                for local, one in splits.items()
                if one.parts == split.parts and _origin_module(one) == _origin_module(split)
            }
            again, found = attempt(changed)
            if found.cost < gathered.cost:
                body, gathered, splits = again, found, changed
    if gathered.refused:
        raise gathered.refused[0]
    return TensorStage(
        _with_body(body, stage), {names[local]: split for local, split in splits.items()}, gathered
    )


def split_stage_as(stage: StageModule, splits: Mapping[str, Split], group: TensorGroup) -> StageModule:
    """`stage` with the parameters in `splits` (by original name) split as in another graph of the model."""
    names = {name: local.removeprefix("body.") for local, name in stage.original_names.items()}
    own = {names[name]: split for name, split in splits.items() if name in names}
    return (
        _with_body(Rewriter(stage.body, _fake_values_of(stage), group).run(own, RULES), stage)
        if own
        else stage
    )


def _with_body(body: fx.GraphModule, stage: StageModule) -> StageModule:
    """`stage` with another graph that has parameters and buffers by the same names."""
    for local, _ in list(body.named_buffers()):
        if f"body.{local}" not in stage.original_names:
            body.register_buffer(local, body.get_buffer(local), persistent=False)
    return StageModule(
        body,
        index=stage.index,
        inputs=list(map(StageInput, stage.inputs, stage.input_shapes, stage.input_dtypes)),
        outputs=stage.outputs,
        original_names=_without_body_prefix(stage.original_names),
        tensor_names={
            k: name for k, name in _without_body_prefix(stage.tensor_names).items() if hasattr(body, k)
        },
        autocast=stage.autocast,
    )


def _without_body_prefix(names: Mapping[str, str]) -> dict[str, str]:
    return {local.removeprefix("body."): name for local, name in names.items()}


def _fake_values_of(stage: StageModule) -> dict[fx.Node, Any]:
    """The values of a stage's nodes as CPU's autocast gives them: the shapes are those of any device, and no operator is
    given tensors of two types that autocast makes one."""
    inputs = [
        torch.empty(shape, dtype=dtype)
        for shape, dtype in zip(stage.input_shapes, stage.input_dtypes, strict=True)
    ]
    entered = torch.autocast("cpu", dtype=stage.autocast, enabled=stage.autocast is not None)
    return fake_values(stage.body, inputs, entered, with_real=True)


def _origin_module(split: Split) -> str:
    return next(iter(split.origins)).rpartition(".")[0]
