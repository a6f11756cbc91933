"""`tensor` together with `shard: optimizer`: losses are those of a plain loop, and checkpoints go on on any layout."""

from __future__ import annotations

import pytest
import torch

from service.spec.job import JobSpec
from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.job import Job

BOTH, APART, ONE = (2, 2, "optimizer"), (2, 2, "none"), (1, 1, "none")


def on(entries, spec):
    """The job on meshes of these (data, tensor, shard), as the control plane hands it to its workers."""
    meshes = [
        {"workers": data * tensor, "parallel": {"data": data, "tensor": tensor}, "shard": shard}
        for data, tensor, shard in entries
    ]
    spec = {**spec, "resources": {"meshes": meshes, "device": "cpu"}}
    return {**spec, "resources": JobSpec.model_validate(spec).model_dump(mode="json")["resources"]}


def save(run, uri, step):
    run.call(lambda w: w.save(uri, step))
    meshes = sorted({worker.mesh for worker in run.workers})
    checkpoint_format.finish_checkpoint(uri, step=step, shards=meshes, keep=9)


def kept(worker):
    """Bytes of a worker's optimizer state."""
    return sum(tensor.nbytes for tensor in state(worker))


def half(worker):
    """Bytes of the larger half of each tensor of a worker's optimizer state: long ones are cut at a multiple of 128."""
    found = 0
    for tensor in state(worker):
        elements = (tensor.numel() + 1) // 2
        found += tensor.element_size() * (elements if elements < 128 else (elements + 127) // 128 * 128)
    return found


def state(worker):
    """The tensors of a worker's optimizer state but for those that are one number."""
    entries = worker.engine.optimizer.state.values()
    return [t for entry in entries for t in entry.values() if isinstance(t, torch.Tensor) and t.ndim]


def assert_equal(found, expected):
    """Two checkpoints, to the bit."""
    for kind in ("parameters", "optimizer"):
        assert found[kind].keys() == expected[kind].keys()
    for name, value in expected["parameters"].items():
        assert torch.equal(found["parameters"][name], value), name
    for name, entry in expected["optimizer"].items():
        assert found["optimizer"][name].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(found["optimizer"][name][key], value), (name, key)


def spec_of(**training):
    spec = job()
    spec["pipeline"]["schedule"] = "auto"
    spec["training"] |= training
    return spec


@pytest.mark.slow
def test_losses_are_those_of_a_plain_loop_and_checkpoints_go_on_on_other_layouts(tmp_path):
    """Tied words, fused heads, Adam's state; to one worker, and from there to what shares all, half, or no matrices."""
    spec = spec_of()
    expected, _ = plain(spec, range(1, 7))
    uris = [checkpoint_format.step_uri(str(tmp_path), "job", step) for step in (2, 4)]
    with Workers(on([BOTH, BOTH], spec)) as run:
        assert run.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        save(run, uris[0], 2)
    with Workers(on([ONE], spec)) as run:
        run.call(lambda w: w.restore(uris[0]))
        assert run.losses(range(3, 5)) == pytest.approx(expected[2:4], rel=1e-5)
        save(run, uris[1], 4)
    for layout in ([BOTH, APART], [(2, 1, "optimizer")] * 2):
        with Workers(on(layout, spec)) as run:
            run.call(lambda w: w.restore(uris[1]))
            assert run.losses(range(5, 7)) == pytest.approx(expected[4:], rel=1e-5)


@pytest.mark.slow
def test_two_data_workers_that_share_train_to_the_bit_as_two_that_do_not(tmp_path):
    """On one mesh of two, with groups and frozen parameters; each keeps half of what it would, and plans so, and evaluations
    are the same. No clipping, whose norm is summed in another order."""
    spec = spec_of(clip_grad_norm=None)
    spec["pipeline"] |= {
        "schedule": "1f1b",
        "cut": ["embed", "blocks.2"],
    }  # by costs as measured they may be others
    spec["model"] |= {"freeze": ["blocks.0.*"]}
    spec["optimizer"] |= {"groups": [{"match": ["*.bias", "re:norm"], "weight_decay": 0.5}]}
    spec["evaluation"] = {"data": {**spec["data"], "prefetch": 2}, "steps": 2}
    losses, states, held, halves = [], [], [], []
    for layout in ([APART, APART], [BOTH, APART]):
        uri = checkpoint_format.step_uri(str(tmp_path / str(len(states))), "job", 3)
        with Workers(on(layout, spec)) as run:
            losses.append([*run.losses(range(1, 3)), run.evaluate().loss, *run.losses(range(3, 4))])
            save(run, uri, 3)
            held.append({(w.mesh, w.index): kept(w) for w in run.workers})
            halves.append({(w.mesh, w.index): half(w) for w in run.workers})
            planned = {s["mesh"]: s["static_bytes"] for s in run.planned["spec"]["stages"]}
            for worker in run.workers:
                own = {
                    p: p.nbytes * (1 + p.requires_grad)
                    for s in worker.stages.values()
                    for p in s.parameters()
                }
                assert sum(own.values()) + kept(worker) == pytest.approx(planned[worker.mesh], rel=0.02)
        states.append(checkpoint_format.load_checkpoint(uri)[0])
    assert losses[1] == losses[0]
    assert_equal(states[1], states[0])
    for (mesh, worker), size in held[0].items():
        assert held[1][mesh, worker] <= (halves[0][mesh, worker] if mesh == "m0" else size)


@pytest.mark.slow
def test_a_norm_counts_every_part_once_whoever_has_it():
    spec = spec_of(clip_grad_norm=0.05)
    norms = []
    for layout in ([ONE, ONE], [BOTH, APART]):
        with Workers(on(layout, spec)) as run:
            steps = [run.step(number) for number in range(1, 4)]
        assert all(len({one.grad_norm for one in step}) == 1 for step in steps), "all know the same"
        norms.append([step[0].grad_norm for step in steps])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)  # rounding: 2e-5 in one of torch's builds


def test_only_workers_that_have_other_samples_share_a_state():
    read = Job.from_json(on([(1, 2, "optimizer"), (1, 2, "none")], job()))
    assert read.sharded == (), "both have their part of every matrix, and nobody has the same"
    assert Job.from_json(on([BOTH, APART], job())).sharded == ("m0",)


@pytest.mark.slow
def test_fp16_leaves_out_the_same_steps(monkeypatch):
    monkeypatch.setattr("worker.engine.optim.grad_scaler.GROWTH_INTERVAL", 3)
    spec = spec_of(precision="fp16", loss_scaling={"init_scale": 2.0**22}, steps=12)
    found = []
    for layout in ([APART, APART], [BOTH, BOTH]):
        with Workers(on(layout, spec)) as run:
            steps = [run.step(number) for number in range(1, 9)]
        assert all(len({(one.loss_scale, one.skipped) for one in step}) == 1 for step in steps)
        found.append([(step[0].loss_scale, step[0].skipped) for step in steps])
    assert found[0] == found[1]
    assert {skipped for _, skipped in found[0]} == {False, True}
