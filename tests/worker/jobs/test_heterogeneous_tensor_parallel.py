"""Whole jobs whose meshes share their matrices among unlike numbers of workers: their losses are those of a plain loop."""

from __future__ import annotations

import pytest

from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs.test_heterogeneous_meshes import LOSSES, unet
from tests.worker.jobs.test_tensor_parallel import on
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format


def losses_of(layouts, spec, steps, uri, save=None):
    """Of some steps on meshes of these (data, tensor) numbers of workers; what `uri` has is restored, or saved."""
    with Workers(on(layouts, spec)) as workers:
        if save is None:
            assert set(workers.call(lambda w: w.restore(uri))) == {steps[0] - 1}
        found = workers.losses(steps)
        if save is not None:
            workers.call(lambda w: w.save(uri, save))
            checkpoint_format.finish_checkpoint(
                uri, step=save, shards=[f"m{k}" for k in range(len(layouts))], keep=1
            )
        return found, workers.planned


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "then"),
    [
        ("gpt", [(2, 2), (2, 1)], [(1, 1), (1, 2)]),
        ("unet", [(1, 2), (1, 1)], [(2, 1), (1, 2)]),
    ],
    ids=str,
)
def test_losses_are_those_of_a_plain_loop_and_go_on_from_a_checkpoint_on_other_layouts(
    name, layout, then, tmp_path
):
    """Tied words, split on one mesh and whole on the other; skips, clipping, the optimizer's state."""
    spec = {"gpt": job, "unet": unet}[name]()
    expected, _ = plain(spec, range(1, 5), LOSSES[name])
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    found, planned = losses_of(layout, spec, range(1, 3), uri, save=2)
    assert found == pytest.approx(expected[:2], rel=1e-5)
    assert {(one["edge"], one["backward"]) for one in planned["reshardings"]} >= {(0, False), (0, True)}
    found, _ = losses_of(then, spec, range(3, 5), uri)
    assert found == pytest.approx(expected[2:], rel=1e-5)


@pytest.mark.slow
def test_an_evaluation_between_such_meshes_is_that_of_whole_matrices():
    """With dropout, which an evaluation has none of; training goes on as without."""
    spec = job()
    spec["model"]["args"]["dropout"] = 0.2
    spec["evaluation"] = {"data": {**spec["data"], "prefetch": 2}, "steps": 2}
    found = []
    for layout in ([(1, 1), (1, 1)], [(1, 2), (1, 1)]):
        with Workers(on(layout, spec)) as workers:
            losses = workers.losses(range(1, 2))
            found.append([*losses, workers.evaluate().loss, *workers.losses(range(2, 3))])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
