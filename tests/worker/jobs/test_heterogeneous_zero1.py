"""Meshes that share matrices among unlike numbers of workers, some of which share the optimizer's state too."""

from __future__ import annotations

import concurrent.futures
import multiprocessing

import pytest

from tests.worker.actor.test_actor import plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs import job_process
from tests.worker.jobs.test_gpu_jobs import Planned, check_replicas
from tests.worker.jobs.test_heterogeneous_meshes import LOSSES
from tests.worker.jobs.test_plain_modules import plain_losses
from tests.worker.jobs.test_tensor_parallel import t5, unet
from tests.worker.jobs.test_tensor_parallel_zero1 import ONE, assert_equal, half, kept, on, save, spec_of
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.transport.rendezvous import host_store

DESIGN = [(2, 2, "none"), (2, 1, "optimizer")]
"""The list of DESIGN section 12: (data, tensor, shard) of each mesh."""
APART, BOTH = ([(2, 2, shard), (2, 1, shard)] for shard in ("none", "optimizer"))

PINNED = {"schedule": "1f1b", "cut": ["embed", "blocks.2"]}
"""What two runs that are compared share: by costs as measured each could have a plan of its own."""


def trained(layout, spec, uri):
    """Losses on a layout with an evaluation between them, the whole checkpoint behind them, and what each worker keeps,
    and would of halves."""
    with Workers(on(layout, spec)) as run:
        losses = [*run.losses(range(1, 3)), run.evaluate().loss, *run.losses(range(3, 4))]
        save(run, uri, 3)
        held = {(w.mesh, w.index): (kept(w), half(w)) for w in run.workers}
        planned = {stage["mesh"]: stage["static_bytes"] for stage in run.planned["spec"]["stages"]}
        for worker in run.workers:
            own = {
                p: p.nbytes * (1 + p.requires_grad) for s in worker.stages.values() for p in s.parameters()
            }
            assert sum(own.values()) + kept(worker) == pytest.approx(planned[worker.mesh], rel=0.02)
    return losses, checkpoint_format.load_checkpoint(uri)[0], held


@pytest.mark.slow
def test_what_shares_its_state_trains_to_the_bit_as_what_does_not(tmp_path):
    """Tied words, split on one mesh and whole on the other, groups and frozen parameters: losses, all parameters and the
    optimizer's state; each worker keeps its part, and plans so. No clipping, whose norm is summed in another order."""
    spec = spec_of(clip_grad_norm=None)
    spec["pipeline"] |= PINNED
    spec["model"] |= {"freeze": ["blocks.0.*"]}
    spec["optimizer"] |= {"groups": [{"match": ["*.bias", "re:norm"], "weight_decay": 0.5}]}
    spec["evaluation"] = {"data": {**spec["data"], "prefetch": 2}, "steps": 2}
    losses, state, held = trained(APART, spec, checkpoint_format.step_uri(f"{tmp_path}/apart", "job", 3))
    other = trained(BOTH, spec, checkpoint_format.step_uri(f"{tmp_path}/both", "job", 3))
    assert other[0] == losses
    assert_equal(other[1], state)
    assert all(other[2][place][0] <= halves for place, (_, halves) in held.items()), (
        "half of what each would keep"
    )


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_three_other_layouts_and_each_of_theirs_on_it(tmp_path):
    """One step each in turns, clipped: losses and in the end all parameters are those of a plain loop. With momentum: Adam
    makes as much of a gradient that is rounding as of any other."""
    spec, steps = spec_of(), range(1, 8)
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}, "schedule": None}
    expected, parameters = plainly(spec, steps)
    others = ([ONE], [(2, 1, "optimizer"), (1, 2, "none")], [(1, 2, "none"), (2, 2, "optimizer")])
    uris = {step: checkpoint_format.step_uri(str(tmp_path), "job", step) for step in steps}

    def step_of(run, step):
        if step > 1:
            assert set(run.call(lambda w: w.restore(uris[step - 1]))) == {step - 1}
        assert run.losses(range(step, step + 1)) == pytest.approx(expected[step - 1 : step], rel=1e-5), step
        save(run, uris[step], step)

    with Workers(on(DESIGN, spec)) as run:
        for number, layout in enumerate(others):
            step_of(run, 2 * number + 1)
            with Workers(on(layout, spec)) as other:
                step_of(other, 2 * number + 2)
        step_of(run, 7)
    found = checkpoint_format.load_checkpoint(uris[7])[0]["parameters"]
    assert found.keys() == parameters.keys()
    assert max(float((found[name] - p).abs().max()) for name, p in parameters.items()) < 1e-5


def plainly(spec, steps):
    """Losses of a plain loop, and its parameters behind it."""
    models = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.worker.actor.test_actor.build_model", keeping(models))
        losses, _ = plain(spec, steps)
    return losses, {name: p.detach() for name, p in models[0].named_parameters()}


def keeping(models):
    from worker.model.factory import build_model

    def build(*arguments, **named):
        models.append(build_model(*arguments, **named))
        return models[-1]

    return build


@pytest.mark.slow
def test_a_u_net_with_its_skips():
    expected, _ = plain(unet(), range(1, 4), LOSSES["unet"])
    layout = [(2, 1, "optimizer"), (2, 2, "optimizer")]
    with Workers(on(layout, unet())) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_an_encoder_and_a_decoder():
    pytest.importorskip("transformers")
    spec = t5()
    expected = plain_losses(
        {**spec, "training": {**spec["training"], "microbatches": 2 * spec["training"]["microbatches"]}},
        range(1, 3),
        lambda model, batch: model(**batch).loss,
    )
    with Workers(on([(1, 2, "none"), (2, 1, "optimizer")], spec)) as run:
        assert run.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_fp16_leaves_out_the_same_steps_and_all_workers_know_one_norm(monkeypatch):
    """An overflow of anybody's part; the norm counts every part once, whoever has it."""
    monkeypatch.setattr("worker.engine.optim.grad_scaler.GROWTH_INTERVAL", 3)
    scaling = {"init_scale": 2.0**22}
    spec = spec_of(precision="fp16", loss_scaling=scaling, steps=12, clip_grad_norm=0.05)
    spec["pipeline"] |= PINNED
    found = []
    for layout in (APART, BOTH):
        with Workers(on(layout, spec)) as run:
            steps = [run.step(number) for number in range(1, 9)]
        told = [
            {(one.loss_scale, one.skipped, None if one.skipped else one.grad_norm) for one in step}
            for step in steps
        ]
        assert all(len(one) == 1 for one in told)
        found.append([one.pop() for one in told])
    assert [one[:2] for one in found[0]] == [one[:2] for one in found[1]]
    assert {skipped for _, skipped, _ in found[0]} == {False, True}
    norms = [[norm for _, skipped, norm in run if not skipped] for run in found]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.slow
def test_worker_processes_train_as_a_plain_loop():
    """A process each, over gloo; torch is imported once, and they are forks of what did."""
    spec, steps = on(DESIGN, spec_of()), 3
    planned, store = Planned(spec).planned, host_store("127.0.0.1")
    given = {"job": spec, "planned": planned, "device": "cpu", "port": store.port, "steps": steps}
    places = [
        (f"m{k}", index) for k, (data, tensor, _) in enumerate(DESIGN) for index in range(data * tensor)
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["worker.actor.actor"])
    with concurrent.futures.ProcessPoolExecutor(len(places), mp_context=context) as pool:
        ends = [pool.submit(job_process.trained, {**given, "place": place}) for place in places]
        answers = dict(zip(places, (end.result(280) for end in ends), strict=True))
    expected, _ = plain(spec, range(1, steps + 1))
    for step, loss in enumerate(expected):
        found = [one for answer in answers.values() for one in answer["losses"][step]]
        assert sum(found) / len(found) == pytest.approx(loss, rel=1e-5), step
    check_replicas(answers, rel=0)
