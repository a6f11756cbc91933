"""The stages of a worker whose mesh shares matrices (tensor parallel), by the job; no data, no driver."""

from __future__ import annotations

from collections.abc import Mapping

from worker.engine.tensor_share import TensorShare
from worker.failure import attributed_to
from worker.job import Job
from worker.model import StageModule, TracedModel
from worker.model.errors import ModelError
from worker.reasons import Reason
from worker.tensor.collectives import TensorGroup
from worker.tensor.layout import Split
from worker.tensor.plans import check_plan
from worker.tensor.stage import tensor_stage


@attributed_to(Reason.PLAN_INFEASIBLE)
def check_matrices(traced: TracedModel, plan: Mapping[str, str] | None, workers: int) -> None:
    """Refuse a `plan` that shares nothing of the model, or names modules that it has not (ModelError)."""
    check_plan(plan, list(traced.placed.parameters.values()), workers)


@attributed_to(Reason.PLAN_INFEASIBLE)
def share_matrices(
    job: Job, stages: Mapping[int, StageModule], mesh: str, worker: int
) -> tuple[TensorShare, dict[int, StageModule]]:
    """What `worker` of `mesh` runs of `stages`, and which parts of their parameters those are.

    ModelError where a parameter that several stages use is split in two ways.
    """
    tensor, plan = job.tensor_of(mesh), job.resources.tensor_plan
    group = TensorGroup(worker % tensor, tensor)
    splits: dict[str, Split | None] = {}
    found: dict[int, StageModule] = {}
    for index, stage in stages.items():
        shared = tensor_stage(stage, plan, group)
        for name in stage.original_names.values():
            split = shared.splits.get(name)
            if not _alike(splits.setdefault(name, split), split):
                raise ModelError(
                    f"parameter {name!r} has several users: one wants {_told(splits[name])} and another "
                    f"{_told(split)}; give their modules one style in resources.tensor_plan, vocab or replicate"
                )
        found[index] = shared.module
    return TensorShare(group, {name: split for name, split in splits.items() if split is not None}), found


def _alike(one: Split | None, other: Split | None) -> bool:
    return one is other if one is None or other is None else one.like(other)


def _told(split: Split | None) -> str:
    return "the whole of it" if split is None else f"parts along dimension {split.dim}"
