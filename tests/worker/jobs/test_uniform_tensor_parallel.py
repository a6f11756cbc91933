"""Whole jobs whose meshes share matrices alike, on nodes of their own: tensors between them are resharded, and every loss is
to the bit what it is where workers exchange them in pairs."""

from __future__ import annotations

import pytest
import torch

from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.jobs import test_gpu_jobs
from tests.worker.jobs.test_tensor_parallel import LOSSES, on, unet
from tests.worker.workers import Workers
from worker.contract.job import Job

APART = {"m0": "one", "m1": "two"}


def dropout(**changes):
    """Tied words, clipping, Adam; masks, which all of a tensor's workers draw alike."""
    spec = job(**changes)
    spec["model"]["args"]["dropout"] = 0.2
    spec["pipeline"]["schedule"] = "zb-h1"
    return spec


def encoder_decoder():
    """The memory of the encoder crosses the meshes, and every block of the decoder reads it."""
    spec = job(stages=2)
    spec["model"] = {
        "factory": "tests.benchmarks.planned_models.planned_models:encoder_decoder",
        "args": {"layers": 1, "width": 16, "heads": 2},
    }
    return spec


def both(spec, steps, do=lambda run: None):
    """The losses of resharded tensors and of pairs, and what `do` finds in between; the reshardings."""
    found = []
    for pairs in (False, True):
        with Workers(spec, APART, pairs=pairs) as run:
            if not pairs:
                reshardings = run.planned["reshardings"]
            found.append([*run.losses(range(1, steps)), do(run), *run.losses(range(steps, steps + 1))])
    return (*found, reshardings)


def crossed(plan):
    """Elements that go over the slow link."""
    return sum(one["end"] - one["begin"] for one in plan["messages"] if not one["local"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "layout", "shard"),
    [
        ("gpt", job, (1, 2), "none"),
        ("unet", unet, (1, 2), "none"),
        ("gpt", encoder_decoder, (2, 2), "optimizer"),
    ],
    ids=["gpt", "unet", "encoder-decoder, shard"],
)
def test_losses_are_those_of_a_plain_loop_and_to_the_bit_those_of_pairs(name, make, layout, shard):
    """Skips over stages, tied words, states that workers share; each number crosses once, and not for each worker."""
    spec = make()
    expected, _ = plain(spec, range(1, 4), LOSSES[name])
    resharded, in_pairs, plans = both(on([layout] * 2, spec, shard=shard), 3)
    assert [*resharded[:2], resharded[3]] == pytest.approx(expected, rel=1e-5)
    assert resharded == in_pairs
    assert {one["backward"] for one in plans} == {False, True}
    for one in plans:
        shape = torch.Size(one["plan"]["shape"])
        assert (
            crossed(one["plan"]) == shape.numel() and len(one["plan"]["workers"]) == 2 * layout[0] * layout[1]
        )


@pytest.mark.slow
def test_an_evaluation_over_resharded_tensors_is_that_of_pairs():
    """And training goes on as without, with the same masks; no connection is made for pairs that nothing goes between."""
    spec = dropout(evaluation={"data": {**job()["data"], "prefetch": 2}, "steps": 2})
    told, lanes = [], []

    def evaluate(run):
        told.append(run.evaluation_plan.get("reshardings"))
        lanes.append({lane for worker in run.workers for lane in worker.engine.lanes})
        return run.evaluate().loss

    resharded, in_pairs, plans = both(on([(1, 2)] * 2, spec), 2, evaluate)
    assert resharded == in_pairs
    assert [(one["edge"], one["backward"]) for one in told[0]] == [(0, False)]
    assert {(one["edge"], one["backward"]) for one in plans} == {(0, False), (0, True)}
    shape = torch.Size(told[0][0]["plan"]["shape"])
    assert crossed(told[0][0]["plan"]) == shape.numel()
    assert {(one[:3], other[:3]) for one, other in lanes[0]} == {
        (f"{here}/", f"{there}/") for here in APART for there in APART
    }, "across the meshes there and back, and from worker to worker of each"
    assert lanes[1] == {("m0", "m1"), ("m1", "m0")}


@pytest.mark.slow
def test_workers_of_one_node_exchange_tensors_in_pairs():
    spec = on([(1, 2)] * 2, job(evaluation={"data": job()["data"], "steps": 1}))
    with Workers(spec, dict.fromkeys(APART, "one")) as run:
        assert "reshardings" not in run.planned and "reshardings" not in run.evaluation_plan
        lanes = {lane for worker in run.workers for lane in worker.engine.lanes}
    assert lanes == {("m0", "m1"), ("m1", "m0")}


@pytest.mark.slow
def test_workers_in_processes_of_their_own_train_as_a_plain_loop(monkeypatch):
    """And all workers of a mesh end with the same parameters."""
    spec = on([(1, 2)] * 2, job())
    monkeypatch.setattr(test_gpu_jobs, "STEPS", 2)
    answers = test_gpu_jobs.run(spec, "cpu", APART)
    assert len(answers) == sum(Job.from_json(spec).mesh_sizes)
    expected, _ = plain(job(), range(1, 3))
    with Workers(spec, APART, pairs=True) as run:
        in_pairs = [[one.losses for one in run.step(step)] for step in (1, 2)]
    for step, loss in enumerate(expected):
        found = [answer["losses"][step] for answer in answers.values()]
        losses = [one for of in found for one in of]
        assert sum(losses) / len(losses) == pytest.approx(loss, rel=1e-5)
        assert found == in_pairs[step]
    test_gpu_jobs.check_replicas(answers, rel=1e-12)
