"""Whole jobs on meshes of unlike sizes: their losses are those of a plain loop, whoever shares a microbatch."""

from __future__ import annotations

import pytest
import torch
from test_actor import job, plain
from workers import Workers

from service.jobspec import JobSpec
from worker import checkpoint


def on(sizes, spec):
    """The job on meshes of these sizes, as the control plane hands it to its workers."""
    spec = {**spec, "resources": {"meshes": [{"workers": size} for size in sizes], "device": "cpu"}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


def unet(**changes):
    spec = job(stages=4, **changes)
    spec["model"] = {"factory": "worker.model.unet:build", "args": {}}
    spec["data"] = {"factory": "worker.data.digits:NoisyDigits", "args": {}}
    spec["pipeline"]["schedule"] = "auto"
    spec["loss"] = {"factory": "torch.nn.functional:mse_loss"}
    return spec


LOSSES = {"gpt": torch.nn.functional.cross_entropy, "unet": torch.nn.functional.mse_loss}


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_meshes_of_unlike_sizes_are_those_of_a_plain_loop(name, sizes):
    """Tied weights, skips, clipping; every worker of every mesh steps alike."""
    spec = {"gpt": job, "unet": unet}[name]()
    expected, _ = plain(spec, range(1, 4), LOSSES[name])
    with Workers(on(sizes, spec)) as workers:
        assert workers.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        assert workers.planned["reshardings"]
