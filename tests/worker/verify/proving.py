"""Jobs to be verified, and their plans, made once for each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.workers import PreparedMeasurements, plan_of
from worker.benchmark.plan_request import plan_request
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.verify.proof import Proof, prove

_SMALL = ("embed", "norm", "head")
_answers: dict[str, dict[str, Any]] = {}


class Pictures:
    """Small images, of four classes."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=draw), index % 4


def normed() -> nn.Module:
    """Convolutions with batch norms: what has buffers that forward updates."""

    def block(inside, outside):
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    return nn.Sequential(
        block(3, 8), block(8, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def gpt(*, dropout=0.0, schedule="1f1b", stages=3, meshes=3, lr_schedule=None, **changes) -> dict[str, Any]:
    """The small tied GPT."""
    spec = job(lr_schedule, stages=stages, meshes=meshes, **changes)
    spec["model"]["args"]["dropout"] = dropout
    spec["pipeline"]["schedule"] = schedule
    spec["training"] |= {"microbatches": 4, "clip_grad_norm": 0.05}
    return spec


def pictures(**changes) -> dict[str, Any]:
    spec = job(stages=3, meshes=3, **changes)
    spec["model"] = {"factory": "tests.worker.verify.proving:normed"}
    spec["data"] = {"factory": "tests.worker.verify.proving:Pictures"}
    return spec


def proof_of(
    spec: dict[str, Any],
    steps: int = 3,
    nodes: dict[str, str] | None = None,
    slow: Sequence[str] = (),
    resume: str | None = None,
) -> Proof:
    """What verifying the job finds; its plan is as a control plane would make it, for meshes on these nodes. Not for times
    as measured, which would cut the model elsewhere now and then: in it every layer takes a millisecond, the small ones of
    the GPT a third of that, and those that are `slow` a second. Where two neighbours do, two stages are cut between them."""
    read = Job.from_json(spec)

    def plan(workers):
        key = json.dumps([spec, nodes, slow], sort_keys=True)
        if key not in _answers:
            costs = plan_request(read, PreparedMeasurements(read, workers, nodes))
            _answers[key] = plan_of(spec, _with_times(json.loads(json.dumps(costs)), slow))
        planned = parse_planned_job(_answers[key])
        assert not slow or slow[-1] in planned.stage_starts
        return planned

    return prove(read, plan, steps, resume=resume)


def _with_times(costs: dict[str, Any], slow: Sequence[str]) -> dict[str, Any]:
    entries = costs.get("profiles") or [costs]  # a single one stands alone
    measured = [entry["profile"] for entry in [*entries, *costs.get("mesh_profiles", ())]]
    for layer in itertools.chain.from_iterable(profile["layers"] for profile in measured):
        for time in [name for name, value in layer.items() if name.endswith("_s") and value is not None]:
            layer[time] = 1.0 if layer["name"] in slow else 3e-4 if layer["name"] in _SMALL else 1e-3
    return costs
