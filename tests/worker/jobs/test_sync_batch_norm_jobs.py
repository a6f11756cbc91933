"""Jobs with BatchNorm on two workers a mesh: what trains, is saved and is evaluated, beside one worker."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.job import Job
from worker.verify.proof import prove


class Pictures:
    """Small images, of four classes, and not alike in brightness."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return torch.randn(3, 6, 6, generator=draw) + index % 5, index % 4


def normed() -> nn.Module:
    def block(inside, outside):
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU())

    return nn.Sequential(block(3, 8), block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def spec_of(workers, *, synchronised=True, **changes):
    spec = job(workers_per_mesh=workers, **changes)
    spec["model"] = {"factory": f"{__name__}:normed"}
    spec["data"] = {"factory": f"{__name__}:Pictures"}
    # Adam would make whole steps of the rounding in a bias before a BatchNorm, whose gradient is zero
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.05}, "schedule": None}
    spec["training"]["sync_batch_norm"] = synchronised
    return spec


def trained(spec, uri):
    """The losses of three steps, and what a checkpoint holds after them."""
    with Workers(spec) as run:
        losses = run.losses(range(1, 4))
        run.call(lambda w: w.save(uri, 3))
        meshes = [f"m{mesh}" for mesh in range(spec["resources"]["meshes"])]
        checkpoint_format.finish_checkpoint(uri, step=3, shards=meshes, keep=1)
        return losses, checkpoint_format.load_checkpoint(uri)[0], run.notes


@pytest.mark.slow
def test_two_workers_train_as_one_does_and_go_on_from_its_checkpoint(tmp_path):
    uris = [checkpoint_format.step_uri(str(tmp_path / name), "job", 3) for name in ("one", "two")]
    expected, one, _ = trained(spec_of(1, stages=1, meshes=1), uris[0])
    losses, two, notes = trained(spec_of(2), uris[1])
    assert losses == pytest.approx(expected, rel=1e-5)
    assert notes == []
    for name, buffer in one["buffers"].items():
        torch.testing.assert_close(two["buffers"][name], buffer, rtol=1e-4, atol=1e-5)
    after = []
    for uri in uris:
        with Workers(spec_of(2)) as run:
            run.call(lambda w, uri=uri: w.restore(uri))
            after.append(run.losses(range(4, 6)))
    assert after[1] == pytest.approx(after[0], rel=1e-4)


@pytest.mark.slow
def test_workers_that_share_matrices_have_the_same_rows_and_count_them_once(tmp_path):
    """Two data-parallel ones of two each: running variances too are those of one worker."""
    uris = [checkpoint_format.step_uri(str(tmp_path / name), "job", 3) for name in ("one", "four")]
    expected, one, _ = trained(spec_of(1, stages=1, meshes=1), uris[0])
    spec = spec_of(4, stages=1, meshes=1)
    spec["resources"] |= {"tensor": 2, "tensor_plan": {"0.0": "colwise", "1.0": "rowwise"}}
    losses, four, _ = trained(spec, uris[1])
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, buffer in one["buffers"].items():
        torch.testing.assert_close(four["buffers"][name], buffer, rtol=1e-4, atol=1e-5)


def test_where_workers_normalise_by_their_own_rows_that_is_told(tmp_path):
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 3)
    _, _, (note,) = trained(spec_of(2, synchronised=False), uri)
    assert "each of 2 workers of a mesh normalises by its own rows in 2 BatchNorm layers" in note
    assert "training.sync_batch_norm: true" in note


def test_verify_says_that_it_cannot_compare_what_is_synchronised():
    with pytest.raises(ValueError, match="sync_batch_norm takes those of all 2 at once"):
        prove(Job.from_json(spec_of(2)), lambda workers: None)
