"""Whether a job may be trained with a plan that was made for another submission: what of the two must agree.

Values only. A job that leaves something open (auto) takes what the plan has. What changes no plan (steps, seeds, learning
rates, starting weights, data of the same shape) may differ; layers and memory are compared when the attempt knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.job import AUTO, Job


@dataclass(frozen=True)
class Difference:
    """A field of the job (a path with dots), its value, and the one that the plan was made for."""

    field: str
    value: Any
    wanted: Any

    @property
    def message(self) -> str:
        return f"is {self.value!r}, and the plan was made for {self.wanted!r}"


@dataclass(frozen=True)
class PlannedChoice:
    """What a plan has chosen: the modules that begin its stages, its microbatches, and its schedule by both names."""

    begins: tuple[str, ...]
    microbatches: int
    schedules: tuple[str, ...]


def differences(
    spec: Mapping[str, Any], made_for: Mapping[str, Any], chosen: PlannedChoice, device: str | None
) -> list[Difference]:
    """What keeps a job (JSON of a JobSpec) from being trained with a plan that was made for `made_for` on `device`."""
    job, other = Job.from_json(spec), Job.from_json(made_for)
    found = [Difference(field, mine, theirs) for field, mine, theirs in _same(job, other) if mine != theirs]
    found += [
        Difference(field, mine, accepted[0])
        for field, mine, accepted in _open(job, other, chosen)
        if mine != AUTO and mine not in accepted
    ]
    if device is not None and job.resources.device not in (AUTO, device):
        found.append(Difference("resources.device", job.resources.device, device))
    return found


def _same(job: Job, other: Job) -> Iterator[tuple[str, Any, Any]]:
    for name in ("factory", "args", "output", "freeze"):
        yield f"model.{name}", _plain(getattr(job.model, name)), _plain(getattr(other.model, name))
    yield "loss.factory", job.loss and job.loss.factory, other.loss and other.loss.factory
    yield "optimizer.factory", job.optimizer.factory, other.optimizer.factory
    for name in ("global_batch", "precision", "transfers", "sync_batch_norm", "compile"):
        yield f"training.{name}", getattr(job.training, name), getattr(other.training, name)
    yield "resources.meshes", job.meshes, other.meshes
    if job.meshes == other.meshes:
        yield "resources.workers_per_mesh", list(job.mesh_sizes), list(other.mesh_sizes)
        yield "resources.tensor", list(job.tensors), list(other.tensors)
        yield "resources.shard", list(job.sharded), list(other.sharded)
    yield "resources.tensor_plan", job.resources.tensor_plan, other.resources.tensor_plan
    yield "pipeline.overlap", job.pipeline.overlap, other.pipeline.overlap


def _open(job: Job, other: Job, chosen: PlannedChoice) -> Iterator[tuple[str, Any, list[Any]]]:
    """Fields that may be auto, and the other values that the plan fits."""
    mine, theirs = job.pipeline, other.pipeline
    yield "training.microbatches", job.training.microbatches, [chosen.microbatches]
    yield "pipeline.stages", AUTO if mine.cut != AUTO else mine.stages, [len(chosen.begins)]
    yield "pipeline.cut", _plain(mine.cut), [list(chosen.begins), _plain(theirs.cut)]
    yield "pipeline.schedule", mine.schedule, list(chosen.schedules)
    yield "pipeline.recompute", _plain(mine.recompute), [_plain(theirs.recompute)]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
