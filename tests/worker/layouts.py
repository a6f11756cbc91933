"""Jobs on several layouts, and how far a step after a resume is from the step of the run that was resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from service.spec.job import JobSpec
from tests.polling import until
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format

LIMIT_S = 120.0
STEPS = 2
"""Trained before the checkpoint."""


@dataclass(frozen=True)
class Layout:
    """So many stages on meshes of so many workers."""

    stages: int
    workers: tuple[int, ...]


LAYOUTS = {
    "4 on 4": Layout(4, (1, 1, 1, 1)),
    "2 on 2": Layout(2, (1, 1)),
    "4 on 2": Layout(4, (1, 1)),
    "data 2": Layout(2, (2, 2)),
    "[2, 1]": Layout(4, (2, 1)),
}


@dataclass(frozen=True)
class Trained:
    """A run's checkpoint after STEPS, and its step behind it."""

    uri: str
    loss: float
    parameters: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """The greatest ones of the next step's loss and parameters; `changed` is the most that the step moves one."""

    loss: float
    parameters: float
    changed: float

    @property
    def bitwise(self) -> bool:
        return self.loss == 0 and self.parameters == 0


def on(layout: Layout, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The job on that layout, as the control plane hands it to its workers."""
    alike = len(set(layout.workers)) == 1
    meshes = (
        {"meshes": len(layout.workers), "workers_per_mesh": layout.workers[0]}
        if alike
        else {"meshes": [{"workers": size} for size in layout.workers]}
    )
    spec = {
        **spec,
        "pipeline": {**spec["pipeline"], "stages": layout.stages, "schedule": "auto"},
        "resources": {**meshes, "device": "cpu"},
    }
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


def trained(spec: Mapping[str, Any], layout: Layout, folder: str) -> Trained:
    """Train, save beside training as a driver has it, and take one step more."""
    uri = checkpoint_format.step_uri(folder, "job", STEPS)
    with Workers(on(layout, spec)) as run:
        run.losses(range(1, STEPS + 1))
        run.call(lambda worker: worker.begin_save(uri, STEPS))
        loss = run.losses(range(STEPS + 1, STEPS + 2))[0]
        saved = until(lambda: None not in (answers := run.call(lambda worker: worker.saved())) and answers)
        assert not any(one.error for one in saved)
        others = [name for one in saved for name in one.shards]
        meshes = dict.fromkeys(worker.mesh for worker in run.workers)
        checkpoint_format.finish_checkpoint(uri, step=STEPS, shards=[*meshes, *others], keep=1)
        return Trained(uri, loss, _parameters(run))


def resumed(spec: Mapping[str, Any], layout: Layout, runs: Mapping[str, Trained]) -> dict[str, Difference]:
    """The step behind each of the runs' checkpoints on this layout, beside that of the run itself."""
    found = {}
    with Workers(on(layout, spec)) as run:
        for name, other in runs.items():
            assert set(run.call(lambda worker, uri=other.uri: worker.restore(uri))) == {STEPS}
            before = _parameters(run)
            loss = run.losses(range(STEPS + 1, STEPS + 2))[0]
            after = _parameters(run)
            assert after.keys() == other.parameters.keys()
            found[name] = Difference(
                abs(loss - other.loss), _most(after, other.parameters), _most(after, before)
            )
    return found


def _parameters(run: Workers) -> dict[str, torch.Tensor]:
    """All parameters; those of several workers are compared first."""
    found: dict[str, torch.Tensor] = {}
    for worker in run.workers:
        for name, tensor in worker.engine.state()["parameters"].items():
            assert name not in found or torch.equal(found[name], tensor), name
            found[name] = tensor.clone()
    return found


def _most(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)
