"""Jobs that begin from another job's checkpoint (checkpoint.resume_from), as a driver has their workers do it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from service.spec.job import JobSpec
from tests.worker.driver.fake_gang import FakeGang
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers
from worker.checkpoint.resumption import ResumeSource
from worker.contract.checkpoint_files import step_uri
from worker.contract.failures import AttemptFailure
from worker.contract.job import CheckpointPolicy
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler
from worker.driver.checkpoints import Checkpoints
from worker.parallel.shard_spec import ShardSpec, copy_common

SAVED, STEPS = 2, 4
COSINE = {"factory": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 6}}


class Points(torch.utils.data.Dataset):
    """Points of three numbers, and one number that follows from each."""

    def __init__(self, samples: int):
        self._samples = samples

    def __len__(self):
        return self._samples

    def __getitem__(self, index):
        point = torch.sin(torch.arange(3.0) + index)
        return point, point.prod().reshape(1)


def two_layers(width: int = 4, extra: bool = False):
    """Two layers of a network; with `extra` a third."""
    model = nn.Sequential(OrderedDict(first=nn.Linear(3, width), tanh=nn.Tanh(), second=nn.Linear(width, 1)))
    if extra:
        model = nn.Sequential(OrderedDict([*model.named_children(), ("extra", nn.Linear(1, 1))]))
    return model


def job(**changes):
    """A job of two small layers on two meshes; `changes` are sections' changed fields."""
    spec = {
        "model": {"factory": f"{__name__}:two_layers"},
        "data": {"factory": f"{__name__}:Points", "args": {"samples": 30}},
        "loss": {"factory": "torch.nn:MSELoss"},
        "optimizer": {"factory": "torch.optim:AdamW", "args": {"lr": 1e-2}},
        "training": {"steps": STEPS, "global_batch": 8, "microbatches": 2, "seed": 5},
        "pipeline": {"stages": 2, "schedule": "1f1b"},
        "resources": {"meshes": 2, "device": "cpu"},
    }
    for section, fields in changes.items():
        spec[section] = {**spec[section], **fields}
    return JobSpec.model_validate(spec).model_dump(mode="json")


class Gang(FakeGang):
    """The driver's calls of workers of this process, which run side by side."""

    def __init__(self, run):
        self.meshes = [SimpleNamespace(name=mesh) for mesh in dict.fromkeys(w.mesh for w in run.workers)]
        self.workers = [_Remote(worker) for worker in run.workers]

    def wait(self, refs, **_):
        results, errors = [None] * len(refs), []

        def answer(index):
            try:
                results[index] = refs[index]()
            except AttemptFailure as failure:
                errors.append(failure)

        threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(refs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return results


class _Remote:
    def __init__(self, worker):
        self.call = SimpleNamespace(remote=lambda method, *a: lambda: getattr(worker, method)(*a))


class Driver:
    """One attempt of a job: its workers, its checkpoints and its events."""

    def __init__(self, spec, folder, job_id):
        self.events, self.run = [], Workers(spec)
        reporter = SimpleNamespace(
            event=lambda kind, message: self.events.append(message),
            checkpoint=lambda *_: None,
            undelivered=lambda _: {},
            deliver_again=lambda *_: None,
        )
        policy = CheckpointPolicy(str(folder), every_steps=1, keep=9)
        self.checkpoints = Checkpoints(
            policy, job_id, gang=Gang(self.run), reporter=reporter, limit_s=60, spec=spec
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run.__exit__()

    def train(self, first, last):
        """The loss of each step, all of which are saved."""
        losses = []
        for step in range(first, last + 1):
            losses += self.run.losses(range(step, step + 1))
            self.checkpoints.after(step, last=False)
        return losses

    def parameters(self):
        """The whole parameters, of those that are split put together from all slices."""
        found = {}
        states = self.run.call(lambda worker: worker.engine.state())
        for worker, state in zip(self.run.workers, states, strict=True):
            spec_of = ShardSpec if worker.tensor_shards is None else worker.tensor_shards.shard_spec
            for name, tensor in state["parameters"].items():
                spec = spec_of(name)
                whole = found.setdefault(name, torch.empty(spec.whole_shape(tensor.shape)))
                copy_common(spec, tensor, ShardSpec(name), whole)
        return found


def source(folder, step=SAVED):
    return ResumeSource(step_uri(str(folder), "first", step), "first", step)


def first_run(folder, spec, last=SAVED):
    """A job's own steps; its losses and parameters."""
    with Driver(spec, folder, "first") as driver:
        return driver.train(1, last), driver.parameters()


def resumed_run(folder, spec, last=STEPS, job_id="second"):
    """The losses behind the checkpoint of the first job, the parameters, and the events."""
    with Driver(spec, folder, job_id) as driver:
        done = driver.checkpoints.restore(None, source(folder))
        assert done == SAVED and driver.checkpoints.first_step == SAVED + 1
        return driver.train(done + 1, last), driver.parameters(), driver.events[0]


def plain_continuation(before, after):
    """A plain loop of the job `after` that begins from the model, and the optimizer's state, of one of `before`."""
    old, new = PlainJob(before), PlainJob(after)
    old.train(range(1, SAVED + 1))
    new.model.load_state_dict(old.model.state_dict())
    if before["optimizer"]["factory"] == after["optimizer"]["factory"]:
        state = old._optimizer.state_dict()["state"]
        new._optimizer.load_state_dict(
            {"state": state, "param_groups": new._optimizer.state_dict()["param_groups"]}
        )
    return new


@pytest.mark.slow
def test_a_run_with_nothing_changed_is_the_undisturbed_one_to_the_bit(tmp_path):
    spec = job(optimizer={"schedule": COSINE})
    losses, parameters = first_run(tmp_path, spec, STEPS)
    found, resumed, event = resumed_run(tmp_path, spec)
    assert found == losses[SAVED:]
    assert resumed.keys() == parameters.keys()
    assert all(torch.equal(resumed[name], parameters[name]) for name in parameters)
    assert event == "resumed from job first step 2: parameters, optimizer state, position in data (sample 16)"


@pytest.mark.parametrize(
    "layout",
    [
        {"resources": {"meshes": 1, "workers_per_mesh": 2, "shard": "optimizer"}, "pipeline": {"stages": 1}},
        pytest.param(
            {
                "resources": {
                    "meshes": 1,
                    "workers_per_mesh": 2,
                    "tensor": 2,
                    "tensor_plan": {"first": "colwise", "second": "rowwise"},
                },
                "pipeline": {"stages": 1},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param({"resources": {"meshes": 1}, "pipeline": {"stages": 1}}, marks=pytest.mark.slow),
    ],
    ids=["zero1", "tensor parallel", "one mesh"],
)
def test_more_steps_another_rate_and_another_layout_train_as_the_plain_loop_that_does_so(tmp_path, layout):
    before = job()
    after = job(optimizer={"args": {"lr": 1e-3, "weight_decay": 0.1}}, training={"steps": 6}, **layout)
    first_run(tmp_path, before)
    losses, parameters, event = resumed_run(tmp_path, after, last=6)
    plain = plain_continuation(before, after)
    assert losses == pytest.approx(plain.train(range(SAVED + 1, 7)).losses, rel=1e-5)
    for name, tensor in plain.model.named_parameters():
        torch.testing.assert_close(parameters[name], tensor.detach(), rtol=1e-5, atol=1e-6)
    assert "optimizer state, position in data" in event
    assert "learning rate 0.001 (was 0.01); optimizer.args.lr 0.001 (was 0.01)" in event
    assert "training.steps 6 (was 4)" in event and "not taken over" not in event


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "before", [COSINE, pytest.param(None, marks=pytest.mark.slow)], ids=["the same", "none"]
)
def test_a_schedule_stands_where_it_would_stand_after_as_many_steps_of_the_new_rate(tmp_path, before):
    first, after = (
        job(optimizer={"args": {"lr": lr}, "schedule": schedule})
        for lr, schedule in ((1e-2, before), (5e-3, COSINE))
    )
    first_run(tmp_path, first)
    losses, _, event = resumed_run(tmp_path, after)
    plain = plain_continuation(first, after)
    for _ in range(SAVED):
        plain._schedule.step()
    run = plain.train(range(SAVED + 1, STEPS + 1))
    assert losses == pytest.approx(run.losses, rel=1e-5)
    assert f"learning rate {run.rates[0]:g} (was" in event


@pytest.mark.slow
def test_other_data_begins_anew_also_behind_a_retry(tmp_path):
    before, after = job(), job(data={"args": {"samples": 24}}, training={"steps": 6})
    first_run(tmp_path, before)
    losses, parameters, event = resumed_run(tmp_path, after, last=6)
    plain = plain_continuation(before, after)
    plain._sampler = BatchSampler(24, 8, 2, seed=5, first_step=SAVED + 1)
    assert losses == pytest.approx(plain.train(range(SAVED + 1, 7)).losses, rel=1e-5)
    assert (
        "not taken over: position in data, which begins anew (data.args.samples 24 (was 30)); training"
        in event
    )
    with Driver(after, tmp_path, "second") as retried:
        retried.checkpoints._policy = CheckpointPolicy(str(tmp_path), every_steps=9, keep=9)
        step_4 = step_uri(str(tmp_path), "second", 4)
        retried.checkpoints._complete = lambda: [step_4]
        assert retried.checkpoints.restore(step_4, source(tmp_path)) == 4
        assert retried.train(5, 6) == losses[2:]
        found = retried.parameters()
    assert all(torch.equal(found[name], parameters[name]) for name in parameters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_data_that_has_another_length_than_it_had_begins_anew(tmp_path, monkeypatch):
    """Every worker loads twice then, and schedules have moved on once."""
    before, after = job(), job(optimizer={"schedule": COSINE})
    first_run(tmp_path, before)
    plain = plain_continuation(before, after)
    monkeypatch.setattr(Points, "__len__", lambda self: 26)
    losses, _, event = resumed_run(tmp_path, after)
    for _ in range(SAVED):
        plain._schedule.step()
    plain._sampler = BatchSampler(26, 8, 2, seed=5, first_step=SAVED + 1)
    assert losses == pytest.approx(plain.train(range(SAVED + 1, STEPS + 1)).losses, rel=1e-5)
    assert f"begins anew (ValueError: data '{__name__}:Points' has 26 samples, and had 30" in event


def test_the_state_of_another_optimizer_is_not_taken_over(tmp_path):
    before, after = job(), job(optimizer={"factory": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}})
    first_run(tmp_path, before)
    losses, _, event = resumed_run(tmp_path, after)
    plain = plain_continuation(before, after)
    assert losses == pytest.approx(plain.train(range(SAVED + 1, STEPS + 1)).losses, rel=1e-5)
    assert event.startswith(
        "resumed from job first step 2: parameters, position in data (sample 16); not taken over: "
    )
    assert (
        "optimizer state, which is of torch.optim.adamw.AdamW, and this job's optimizer is torch.optim.sgd.SGD"
        in event
    )
    assert "optimizer torch.optim:SGD (was torch.optim:AdamW)" in event


@pytest.mark.slow
def test_state_that_the_optimizer_misses_with_its_new_arguments_begins_anew(tmp_path):
    first_run(tmp_path, job())
    losses, _, event = resumed_run(tmp_path, job(optimizer={"args": {"lr": 1e-2, "amsgrad": True}}))
    assert len(losses) == STEPS - SAVED
    assert "not taken over: optimizer state, which has exp_avg, exp_avg_sq, step of" in event
    assert "keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step" in event


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (  # of the stage that is refused first
            {"width": 6},
            r"of another shape: .*(first\.weight \[4, 3\] .*\[6, 3\]\)|second\.weight \[1, 4\] .*\[1, 6\]\))",
        ),
        pytest.param(
            {"extra": True},
            r"missing: extra\.bias, extra\.weight\. Give `model` as it was",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_another_model_is_refused_by_the_names_of_its_tensors(tmp_path, model, message):
    first_run(tmp_path, job())
    with (
        Driver(job(model={"args": model}), tmp_path, "second") as driver,
        pytest.raises(AttemptFailure, match=message) as refused,
    ):
        driver.checkpoints.restore(None, source(tmp_path))
    assert refused.value.reason is Reason.RESUME_REFUSED
    if "extra" in model:
        first_run(tmp_path, job(model={"args": model}))
        with (
            Driver(job(), tmp_path, "second") as driver,
            pytest.raises(AttemptFailure, match=r"unexpected: extra\.bias, extra\.weight\. Give"),
        ):
            driver.checkpoints.restore(None, source(tmp_path))


@pytest.mark.slow
def test_another_batch_goes_on_with_the_next_sample_of_the_same_order(tmp_path):
    before, after = job(), job(training={"global_batch": 4})
    first_run(tmp_path, before)
    losses, _, event = resumed_run(tmp_path, after)
    plain, one_by_one = plain_continuation(before, after), BatchSampler(30, 1, 1, seed=5)
    begin = SAVED * 8

    def indices(step, microbatch):
        first = begin + (step - SAVED - 1) * 4 + microbatch * 2
        return [one_by_one.indices(position + 1, 0)[0] for position in range(first, first + 2)]

    plain._sampler = SimpleNamespace(microbatches=2, indices=indices)
    assert losses == pytest.approx(plain.train(range(SAVED + 1, STEPS + 1)).losses, rel=1e-5)
    assert "position in data (sample 16); training.global_batch 4 (was 8)" in event
