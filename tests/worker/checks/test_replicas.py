"""Workers that would start from different values or read different data are refused by name before the first step."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job, plain
from tests.worker.driver.fake_gang import FakeActor, SimpleGang
from tests.worker.jobs.test_tensor_parallel import on
from tests.worker.workers import Workers
from worker.actor import model_host
from worker.checks.replicas import named_tensors
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.data.checksum import checksum
from worker.driver.trainer import check_replicas

VECTORS = {"data": {"factory": "odd_jobs:Vectors"}}
GPT = {"layers": 2, "width": 16, "heads": 2, "length": 8}


def check(run: Workers) -> None:
    """What the driver does before the first step, with workers that are threads of this process."""

    gang = SimpleGang(
        workers=[FakeActor(shard_specs=w.shard_specs, fingerprint=w.fingerprint) for w in run.workers],
        addresses=[SimpleNamespace(mesh=w.mesh, worker=w.index) for w in run.workers],
    )
    check_replicas(gang, heterogeneous=run.workers[0].job.heterogeneous)


def refusal(spec) -> AttemptFailure:
    with Workers(spec) as run, pytest.raises(AttemptFailure) as caught:
        check(run)
    return caught.value


@some_by_day("shape", [{"stages": 3, "meshes": 3}, {"workers_per_mesh": 2}], by_day=1)
def test_workers_that_agree_may_begin(shape):
    with Workers(job(**shape)) as run:
        check(run)


@pytest.mark.parametrize("factory", ["tied_from_python_and_numpy"])
def test_weights_from_pythons_and_numpys_generators_are_the_same_on_all(factory):
    with Workers(job(**VECTORS, model={"factory": f"odd_jobs:{factory}"}, stages=3, meshes=3)) as run:
        check(run)
        values = [next(iter(w.stages.values())).body for w in (run.workers[0], run.workers[2])]
        assert torch.equal(*(next(body.parameters()) for body in values))


@pytest.fixture
def built_by_each(monkeypatch):
    """Each worker builds and traces the model for itself, as where its graph cannot be sent."""

    def refuse(_):
        raise TypeError("cannot pickle a lambda")

    monkeypatch.setattr(model_host, "serialize_models", refuse)


@some_by_day("shape", [{"stages": 3, "meshes": 3}, {"workers_per_mesh": 2}], by_day=1)
def test_values_from_nowhere_are_drawn_once_for_all(shape):
    """One worker builds the model: what it draws is what all have, whatever it draws from."""
    model = {"factory": "odd_jobs:gpt_from_entropy", "args": GPT}
    with Workers(job(model=model, **shape)) as run:
        check(run)


@pytest.mark.usefixtures("built_by_each")
def test_a_tied_weight_that_two_meshes_draw_apart_is_refused_by_name():
    found = refusal(job(**VECTORS, model={"factory": "odd_jobs:tied_from_entropy"}, stages=3, meshes=3))
    assert found.reason is Reason.MODEL_BUILD_FAILED
    assert (
        "different values of 'first.weight' (m0/0 | m2/0): draw initial values from random" in found.message
    )
    assert "middle" not in found.message


@pytest.mark.slow
@pytest.mark.usefixtures("built_by_each")
def test_replicas_that_start_apart_are_refused_by_name_and_workers():
    model = {"factory": "odd_jobs:gpt_from_entropy", "args": GPT}
    found = refusal(job(model=model, workers_per_mesh=2))
    assert found.reason is Reason.MODEL_BUILD_FAILED
    assert "'head.weight' (m1/0 | m1/1)" in found.message and "blocks" not in found.message


@pytest.mark.slow
def test_values_that_came_apart_in_a_resume_are_refused_too(tmp_path):
    """As when the workers of a mesh read a checkpoint from folders of one name on different nodes."""
    with Workers(job(workers_per_mesh=2)) as run:
        check(run)
        states = [copy.deepcopy(run.workers[0].engine.state()) for _ in range(2)]
        name = next(iter(states[1]["parameters"]))
        states[1]["parameters"][name].view(-1)[0] += 1e-6
        for worker, state in zip(run.workers[:2], states, strict=True):
            worker.engine.load_state(state)
        with pytest.raises(AttemptFailure, match=rf"'{name}' \(m0/0 \| m0/1\)"):
            check(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "plan", "told"),
    [
        ([(1, 2), (1, 1)], None, r"0 to 127 along dimension 0' \(m0/0 \| m1/0\)"),
        (
            [(1, 2), (2, 2)],  # its table in columns, its head in rows
            {"embed.token": "colwise"},
            r"0 to 127 along dimension 0, 0 to 7 along dimension 1' \(m0/0 \| m1/0, m1/2\)",
        ),
    ],
    ids=str,
)
def test_a_tied_weight_that_meshes_share_otherwise_is_compared_in_pieces(layout, plan, told):
    """They train as one worker; where one of them starts otherwise by a single number it is told in which piece."""
    spec = job()
    expected, _ = plain(spec, range(1, 3))
    with Workers(on(layout, spec, tensor_plan=plan)) as run:
        check(run)
        assert run.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)
        check(run)
        for worker in run.workers:
            if worker.mesh == "m1" and worker.index % layout[1][1] == 0:
                with torch.no_grad():
                    named_tensors(worker.stages)["embed.token.weight"].view(-1)[0] += 1e-3
        with pytest.raises(
            AttemptFailure, match=f"different values of 'embed.token.weight, {told}"
        ) as caught:
            check(run)
    assert caught.value.reason is Reason.MODEL_BUILD_FAILED
    assert "and" not in caught.value.message.partition(": draw")[0], "only the piece in which it is"


@some_by_day(
    ("data", "told"),
    [
        ({"factory": "odd_jobs:ShuffledOnce", "args": {"length": 8, "unseeded": True}}, r"\(m0/0 \| m1/0\)"),
        ({"factory": "odd_jobs:OwnGenerator", "args": {"length": 8}}, "others each time that m0/0, m1/0"),
        ({"factory": "stream_data:FromEntropy", "args": {"length": 99}}, "others each time that m0/0, m1/0"),
    ],
    by_day=1,
)
def test_data_that_is_not_the_same_on_all_workers_is_refused(data, told):
    with Workers(job(data=data)) as run, pytest.raises(AttemptFailure, match=told) as caught:
        check(run)
    assert caught.value.reason is Reason.DATA_FAILED


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["odd_jobs:ShuffledOnce", "stream_data:Masked"])
def test_data_that_is_shuffled_by_a_seeded_generator_is_the_same_on_all(factory):
    with Workers(job(data={"factory": factory, "args": {"length": 8}})) as run:
        check(run)


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, 2.0, 4.0]), torch.ones(3), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([1, 2, 3])],
)
def test_a_checksum_tells_values_shapes_and_types_apart(other):
    value = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(value) == checksum(value.clone()) != checksum(other)
    assert checksum(((value,), value)) != checksum((value, (value,)))
    for dtype in (torch.bfloat16, torch.bool, torch.complex64):
        assert checksum(value.to(dtype)) == checksum(value.to(dtype))
    assert checksum(torch.ones(3, 2).T) == checksum(torch.ones(2, 3))
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor([1.0]))
