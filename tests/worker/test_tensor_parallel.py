"""Whole jobs whose meshes share matrices: their losses are those of a plain loop, on any layout and resumed on others."""

from __future__ import annotations

import pytest
from test_actor import job, plain
from test_unlike_meshes import LOSSES, unet
from workers import Workers

from service.jobspec import JobSpec
from worker import checkpoint


def on(layout, spec, **resources):
    """The job on meshes of these (data, tensor) numbers of workers, as the control plane hands it to its workers."""
    meshes = [
        {"workers": data * tensor, "parallel": {"data": data, "tensor": tensor}} for data, tensor in layout
    ]
    spec = {**spec, "resources": {"meshes": meshes, "device": "cpu", **resources}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


SPECS = {"gpt": job, "unet": unet}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", [(1, 2), (2, 2)])
def test_losses_are_those_of_a_plain_loop(name, layout, tmp_path):
    """Tied weights split by words, fused queries, keys and values, skips, clipping, Adam's state."""
    spec = SPECS[name]()
    expected, _ = plain(spec, range(1, 5), LOSSES[name])
    uri = checkpoint.step_uri(str(tmp_path), "job", 2)
    with Workers(on([layout, layout], spec)) as workers:
        assert workers.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        held = workers.call(lambda w: sum(p.numel() for s in w.stages.values() for p in s.parameters()))
        workers.call(lambda w: w.save(uri, 2))
        checkpoint.finish(uri, step=2, shards=["m0", "m1"], keep=1)
    with Workers(SPECS[name]()) as workers:
        whole = workers.call(lambda w: sum(p.numel() for s in w.stages.values() for p in s.parameters()))
        assert workers.call(lambda w: w.restore(uri)) == [2, 2]
        assert workers.losses(range(3, 5)) == pytest.approx(expected[2:], rel=1e-5)
        workers.call(lambda w: w.save(uri, 4))
        checkpoint.finish(uri, step=4, shards=["m0", "m1"], keep=1)
    assert sum(held[:2]) < 1.5 * whole[0]
