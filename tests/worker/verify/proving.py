"""Jobs to be verified, and their plans, made once for each."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.workers import mesh_profiles, placed, plan_of
from worker.contract.job import Job
from worker.contract.planned import parse_planned_job
from worker.verify.proof import Proof, prove

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


def proof_of(spec: dict[str, Any], steps: int = 3, nodes: dict[str, str] | None = None) -> Proof:
    """What verifying the job finds; its plan is as a control plane would make it, for meshes on these nodes."""
    read = Job.from_json(spec)

    def plan(workers):
        key = json.dumps([spec, nodes], sort_keys=True)
        if key not in _answers:
            first = workers[0]
            counts = list(first.prepare(read.mesh_sizes[0]))
            profiles = [{"microbatches": count, "profile": first.profile(count)} for count in counts]
            costs = {
                "profiles": profiles,
                **mesh_profiles(workers, read, profiles),
                "network": {"bandwidth_bytes_per_s": 1e9, "latency_s": 1e-5},
                "optimizer": asdict(first.optimizer_state()),
                "update": first.update_costs().to_json(),
                **placed(read, nodes),
            }
            _answers[key] = plan_of(spec, costs)
        return parse_planned_job(_answers[key])

    return prove(read, plan, steps)
