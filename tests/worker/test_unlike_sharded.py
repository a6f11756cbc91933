"""Meshes that share matrices among unlike numbers of workers, some of which share the optimizer's state too."""

from __future__ import annotations

import pytest
from test_tensor_sharded import assert_equal, kept, on, save, spec_of
from workers import Workers

from worker import checkpoint

# DESIGN section 12's own; and what else may stand beside each other.
DESIGN = [(2, 2, "none"), (2, 1, "optimizer")]
BOTH = [(2, 2, "optimizer"), (2, 1, "optimizer")]
TURNED = [(2, 1, "none"), (2, 2, "optimizer")]
UNLIKE_DATA = [(2, 1, "optimizer"), (1, 2, "optimizer")]


def trained(layout, spec, uri, steps=range(1, 4)):
    """Losses on a layout, and the whole checkpoint behind them."""
    with Workers(on(layout, spec)) as run:
        losses = run.losses(steps)
        save(run, uri, steps[-1])
        held = {(w.mesh, w.index): kept(w) for w in run.workers}
        planned = {s["mesh"]: s["static_bytes"] for s in run.planned["spec"]["stages"]}
        for worker in run.workers:
            own = {
                p: p.nbytes * (1 + p.requires_grad) for s in worker.stages.values() for p in s.parameters()
            }
            assert sum(own.values()) + kept(worker) == pytest.approx(planned[worker.mesh], rel=0.02)
    return losses, checkpoint.load(uri)[0], held


def test_what_shares_its_state_trains_to_the_bit_as_what_does_not(tmp_path):
    """Tied words, split on one mesh and whole on the other, groups and frozen parameters: losses, all parameters and the
    optimizer's state; each worker keeps its part, and plans so. No clipping, whose norm is summed in another order."""
    spec = spec_of(clip_grad_norm=None)
    spec["model"] |= {"freeze": ["blocks.0.*"]}
    spec["optimizer"] |= {"groups": [{"match": ["*.bias", "re:norm"], "weight_decay": 0.5}]}
    found = []
    for number, layout in enumerate(([(2, 2, "none"), (2, 1, "none")], DESIGN, BOTH)):
        found.append(trained(layout, spec, checkpoint.step_uri(str(tmp_path / str(number)), "job", 3)))
    (losses, state, held), *others = found
    for (other, shared), sharded in zip(((o[0], o[1:]) for o in others), (["m1"], ["m0", "m1"]), strict=True):
        assert other == losses
        assert_equal(shared[0], state)
        for (mesh, worker), size in held.items():
            assert shared[1][mesh, worker] <= (size / 2 + 64 if mesh in sharded else size), mesh
