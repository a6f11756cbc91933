"""Workers of whole jobs, without Ray: they train, save and go on as a plain loop of torch does."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import socket
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from tests.polling import until
from tests.reference import accumulate
from tests.tiers import some_by_day
from tests.worker.workers import LeavesCycles, Workers
from worker.actor import loaded, model_host
from worker.actor.actor import NewWorker, Worker
from worker.actor.loaded import LoadedWorker
from worker.actor.prepared import PreparedWorker
from worker.actor.state import out_of_memory_failure
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Job
from worker.contract.profile import OptimizerState
from worker.contract.program import COMPUTE_LANE
from worker.contract.reasons import Reason
from worker.data.sampler import BatchSampler, collate, read_sample
from worker.model.factory import build_model, call_factory, resolve
from worker.model.rng import RngStates

SCHEDULES = {
    "none": None,
    "cosine": {"factory": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 8}},
    "milestones": {
        "factory": "torch.optim.lr_scheduler:MultiStepLR",
        "args": {"milestones": [2, 5], "gamma": 0.3},
    },
    "one cycle": {
        "factory": "torch.optim.lr_scheduler:OneCycleLR",
        "args": {"max_lr": 0.02, "total_steps": 10},
    },
    "lambda": {
        "factory": "torch.optim.lr_scheduler:LambdaLR",
        "args": {"lr_lambda": {"factory": f"{__name__}:falling_by", "args": {"base": 0.7}}},
    },
}


def falling_by(base):
    """What LambdaLR multiplies a learning rate by: `base` to the power of the step."""
    return lambda step: base**step


def job(schedule=None, *, stages=2, meshes=2, workers_per_mesh=1, **changes):
    return {
        "model": {
            "factory": "worker.examples.gpt:build",
            "args": {"layers": 3, "width": 16, "heads": 2, "length": 8, "tied": True},
        },
        "data": {"factory": "worker.examples.text:ByteWindows", "args": {"length": 8}},
        "loss": {"factory": "torch.nn:CrossEntropyLoss"},
        "optimizer": {
            "factory": "torch.optim:AdamW",
            "args": {"lr": 1e-2},
            "schedule": SCHEDULES[schedule] if isinstance(schedule, str) else schedule,
        },
        "training": {"steps": 8, "global_batch": 8, "microbatches": 2, "seed": 5, "clip_grad_norm": 1.0},
        "pipeline": {"stages": stages, "schedule": "1f1b"},
        "resources": {"meshes": meshes, "workers_per_mesh": workers_per_mesh},
        **changes,
    }


def plain(spec, steps, loss=torch.nn.functional.cross_entropy):
    """Loss and learning rate of each step of a plain loop."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data = call_factory(spec["data"]["factory"], spec["data"]["args"])
    sampler = BatchSampler(
        len(data), training["global_batch"], training["microbatches"], seed=training["seed"]
    )

    def batches(step):
        def sample(index):
            return read_sample(data, index, seed=training["seed"], step=step)

        return [
            collate([sample(i) for i in sampler.indices(step, m)]) for m in range(training["microbatches"])
        ]

    optimizer = resolve(spec["optimizer"]["factory"])(list(model.parameters()), **spec["optimizer"]["args"])
    schedule = spec["optimizer"]["schedule"]
    if schedule:
        arguments = schedule.get("args", {})
        if "lr_lambda" in arguments:  # a factory of its own, which a person would call
            arguments = {"lr_lambda": falling_by(**arguments["lr_lambda"]["args"])}
        schedule = resolve(schedule["factory"])(optimizer, **arguments)
    losses, rates = [], []
    for step in steps:
        optimizer.zero_grad()
        found = accumulate(model, batches(step), loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        losses.append(sum(found) / len(found))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule:
            schedule.step()
    return losses, rates


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_losses_and_learning_rates_are_those_of_a_plain_loop_also_after_a_resume_on_fewer_meshes(
    schedule, tmp_path
):
    spec = job(schedule, stages=3, meshes=3)
    losses, rates = plain(spec, range(1, 9))
    found_rates = []
    with Workers(spec) as run:
        for step in range(1, 5):
            results = run.step(step)
            values = [loss for result in results for loss in result.losses]
            assert sum(values) / len(values) == pytest.approx(losses[step - 1], rel=1e-5), step
            assert len({result.learning_rate for result in results}) == 1
            found_rates.append(results[0].learning_rate)
        uri = checkpoint_format.step_uri(str(tmp_path), "job", 4)
        run.call(lambda w: w.save(uri, 4))
        checkpoint_format.finish_checkpoint(uri, step=4, shards=["m0", "m1", "m2"], keep=1)
    with Workers(job(schedule, stages=2, meshes=2)) as run:
        assert run.call(lambda w: w.restore(uri)) == [4, 4]
        for step in range(5, 9):
            results = run.step(step)
            values = [loss for result in results for loss in result.losses]
            assert sum(values) / len(values) == pytest.approx(losses[step - 1], rel=1e-5), step
            found_rates.append(results[0].learning_rate)
    assert found_rates == pytest.approx(rates)


def in_halves(first, last, uri):
    """Losses of steps 1 to 4 of the job `first`, then of steps 5 to 8 of the job `last`, which goes on from there."""
    with Workers(first) as run:
        losses = run.losses(range(1, 5))
        run.call(lambda w: w.save(uri, 4))
        meshes = [f"m{i}" for i in range(first["resources"]["meshes"])]
        checkpoint_format.finish_checkpoint(uri, step=4, shards=meshes, keep=1)
    with Workers(last) as run:
        run.call(lambda w: w.restore(uri))
        losses += run.losses(range(5, 9))
        names = [[g.get("name") for g in w.engine.optimizer.param_groups] for w in run.workers]
    return losses, names


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("schedule", ["cosine", "one cycle", "sequence"])
def test_groups_of_an_optimizer_keep_their_settings_in_a_resume_on_another_cut(
    before, after, schedule, tmp_path
):
    """The embedding has no vectors: alone on a mesh it has one group, and the first mesh's are not everybody's."""
    optimizer = {
        "factory": "odd_jobs:adamw_by_shape",
        "args": {"lr": 1e-3},
        "schedule": {"factory": "odd_jobs:warm_up_then_cosine"}
        if schedule == "sequence"
        else SCHEDULES[schedule],
    }
    cuts = {1: "auto", 2: ["embed", "blocks.1"], 3: ["embed", "blocks.0", "blocks.1"]}

    def spec(stages):
        cut = {"pipeline": {"stages": stages, "schedule": "1f1b", "cut": cuts[stages]}}
        return job(stages=stages, meshes=stages) | cut | {"optimizer": optimizer}

    losses, _ = plain(spec(1), range(1, 9))
    found, names = in_halves(spec(before), spec(after), checkpoint_format.step_uri(str(tmp_path), "job", 4))
    assert found == pytest.approx(losses, rel=1e-5)
    assert names[-1] == ["vectors", "matrices"] and (after < 3 or names[0] == ["matrices"])


@pytest.mark.slow
def test_parameters_that_were_trained_apart_are_not_put_into_one_group_without_a_word(tmp_path):
    apart, together = (
        {"factory": of, "args": {"lr": 0.1}} for of in ("odd_jobs:sgd_by_shape", "torch.optim:SGD")
    )
    with pytest.raises(
        AttemptFailure, match=r"in one group .* saved with lr 0\.[15] and 0\.[15]: let"
    ) as raised:
        in_halves(
            job(optimizer=apart),
            job(optimizer=together, stages=1, meshes=1),
            checkpoint_format.step_uri(str(tmp_path), "job", 4),
        )
    assert raised.value.reason is Reason.CHECKPOINT_FAILED


@some_by_day("shape", [{}, {"stages": 3, "meshes": 3}, {"workers_per_mesh": 2}], by_day=1)
def test_data_that_masks_at_random_trains_as_a_plain_loop_on_the_same_draws(shape):
    """The first mesh takes the input of a sample, the last one its target: of one draw."""
    spec = job(data={"factory": "odd_jobs:Masked", "args": {"length": 8}}, **shape)
    losses, _ = plain(spec, range(1, 4))
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_dropout_does_not_notice_what_a_data_set_draws():
    def losses(data):
        model = {"factory": "worker.examples.gpt:build", "args": {**job()["model"]["args"], "dropout": 0.3}}
        with Workers(job(model=model, data={"factory": data, "args": {"length": 8}})) as run:
            return run.losses(range(1, 4))

    assert losses("odd_jobs:DrawsInVain") == losses("worker.examples.text:ByteWindows")


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["all", ["s1"], ["blocks"]])
def test_a_job_that_recomputes_has_the_losses_of_one_that_does_not(recompute):
    found = []
    for wanted in ("none", recompute):
        spec = job("cosine", stages=3, meshes=3)
        spec["pipeline"]["recompute"] = wanted
        with Workers(spec) as run:
            again = [runner._recompute for w in run.workers for runner in w.engine.runners.values()]
            assert any(again) == (wanted != "none")
            found.append(run.losses(range(1, 4)))
    assert found[0] == found[1]


def test_one_worker_builds_the_model_and_all_start_from_the_values_of_a_plain_one(monkeypatch):
    built = []
    monkeypatch.setattr(
        model_host,
        "build_model",
        lambda *args, **kwargs: built.append(args) or build_model(*args, **kwargs),
    )
    spec = job(stages=3, meshes=3, workers_per_mesh=2)
    spec["pipeline"]["cut"] = [
        "embed",
        "blocks.1",
        "blocks.2",
    ]  # by measured times one stage may have most of it
    with Workers(spec) as run:
        assert len(built) == 1
        model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=5)
        whole = dict(model.named_parameters())
        for worker in run.workers:
            own = worker.engine.state()["parameters"]
            assert 0 < sum(p.nbytes for p in own.values()) < 0.75 * sum(p.nbytes for p in whole.values())
            assert all(torch.equal(value, whole[name]) for name, value in own.items())
            assert worker._model._traced is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "dropout", "evaluated"])
def test_a_graph_of_an_earlier_attempt_is_not_traced_again_and_trains_the_same_to_the_bit(monkeypatch, kind):
    spec = job(stages=3, meshes=3)
    if kind == "dropout":
        spec["model"]["args"] |= {"dropout": 0.3}
    if kind == "evaluated":
        spec["evaluation"] = {"every_steps": 1, "data": spec["data"], "steps": 1}
    with Workers(spec) as run:
        expected = run.losses(range(1, 4)), run.evaluate() if kind == "evaluated" else None
        known = run.workers[1].known_graph()
    assert known.microbatches == run.workers[0].batches.microbatches

    def of_earlier(worker, microbatches, trace=PreparedWorker.trace):
        worker._known = known
        assert worker.knows_graph(microbatches) and not worker.knows_graph(microbatches + 1)
        leads = (worker.mesh, worker.index) == ("m0", 0)
        return trace(worker, microbatches, worker.give_graph()) if leads else []

    def profiled(worker, microbatches=None, length=None, profile=PreparedWorker.profile):
        of_earlier(worker, microbatches)  # these workers measure before one of them traces for all
        return profile(worker, microbatches, length)

    monkeypatch.setattr(PreparedWorker, "trace", of_earlier)
    monkeypatch.setattr(PreparedWorker, "profile", profiled)
    monkeypatch.setattr(model_host, "trace", lambda *_, **__: pytest.fail("it is traced"))
    monkeypatch.setattr(model_host, "check_trace", lambda *_, **__: pytest.fail("it is compared"))
    with Workers(spec) as run:
        found = run.losses(range(1, 4)), run.evaluate() if kind == "evaluated" else None
        assert run.workers[0].known_graph() == known
    assert found[0] == expected[0]
    if kind == "evaluated":
        assert (found[1].loss, found[1].metrics) == (expected[1].loss, expected[1].metrics)


@pytest.mark.slow
def test_a_graph_that_cannot_be_sent_is_traced_by_every_worker(monkeypatch):
    spec = job(stages=3, meshes=3)
    with Workers(spec) as run:
        expected = run.losses(range(1, 3))

    def refuse(_):
        raise TypeError("cannot pickle a lambda")

    monkeypatch.setattr(model_host, "serialize_models", refuse)
    with Workers(spec) as run:
        assert run.losses(range(1, 3)) == expected


@pytest.mark.slow
def test_two_workers_a_mesh_save_once_and_both_go_on(tmp_path):
    spec = job("cosine", workers_per_mesh=2)
    losses, _ = plain(spec, range(1, 5))
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
    with Workers(spec) as run:
        assert run.losses(range(1, 3)) == pytest.approx(losses[:2], rel=1e-5)
        run.call(lambda w: w.save(uri, 2))
        checkpoint_format.finish_checkpoint(uri, step=2, shards=["m0", "m1"], keep=1)
    with Workers(spec) as run:
        run.call(lambda w: w.restore(uri))
        assert run.losses(range(3, 5)) == pytest.approx(losses[2:], rel=1e-5)


def test_a_step_that_is_not_finite_stops_the_job_or_is_left_out_as_the_job_says():
    loss = {"factory": "workers:NanInStep", "args": {"step": 2, "microbatches": 2}}
    spec = job("cosine", loss=loss)
    with Workers(spec) as run:
        run.step(1)
        with pytest.raises(AttemptFailure, match="step 2: the loss or the gradient norm is not finite"):
            run.step(2)
    losses, rates = plain(job("cosine"), [1, 3, 4])
    spec["training"]["non_finite"] = "skip"
    with Workers(spec) as run:
        steps = [run.step(step) for step in (1, 2, 3, 4)]
    assert [results[0].skipped for results in steps] == [False, True, False, False]
    kept = [steps[i] for i in (0, 2, 3)]
    assert [results[0].learning_rate for results in kept] == pytest.approx(rates)
    found = [[loss for result in results for loss in result.losses] for results in kept]
    assert [sum(values) / len(values) for values in found] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_memory_that_runs_out_in_an_action_is_told_with_the_bytes_that_were_planned_and_seen():
    loss = {
        "factory": "workers:TooLargeAfter",
        "args": {"calls": 40},
    }  # the check and profiling call it some times
    with Workers(job(loss=loss)) as run:
        for step in range(1, 100):
            try:
                results = run.step(step)
            except OutOfMemoryFailure as error:
                failure = error
                break
            assert [result.peak_memory_bytes > 0 for result in results] == [True, True]
    assert failure.reason is Reason.OUT_OF_MEMORY and failure.mesh == "m1" and failure.seen_bytes > 0
    assert "can't allocate memory" in failure.message and "1F" in failure.message
    assert "mesh m1 was planned with 1,234,567 bytes" in failure.message
    assert f"had come to {failure.seen_bytes // 2:,} bytes (resident in its process" in failure.message
    assert "torch.empty" in failure.details
    copy = pickle.loads(pickle.dumps(failure))
    assert (copy.reason, copy.mesh, copy.seen_bytes) == (failure.reason, "m1", failure.seen_bytes)


@pytest.mark.parametrize("answers", [True, False])
def test_on_a_gpu_the_details_have_what_torchs_allocator_holds(answers, monkeypatch, tmp_path):
    def summary(abbreviated):
        if not answers:
            raise RuntimeError("CUDA error: out of memory")
        return "Allocated memory 79 GiB"

    def snapshot():
        return {"segments": summary(True)}

    monkeypatch.setattr("torch.cuda.memory_summary", summary)
    monkeypatch.setattr("torch.cuda.memory._snapshot", snapshot)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failure = AttemptFailure(Reason.OUT_OF_MEMORY, "CUDA out of memory", "in forward")
    told = out_of_memory_failure(failure, "m0", "cuda", 5, 7)
    assert told.details.startswith("in forward" + "\nAllocated memory 79 GiB" * answers)
    written = list(tmp_path.iterdir())
    assert len(written) == answers == (f"memory_viz, are in {tmp_path}" in told.details)
    assert [pickle.loads(path.read_bytes()) for path in written] == [
        {"segments": "Allocated memory 79 GiB"}
    ] * answers
    assert out_of_memory_failure(failure, "m0", "cpu", 5, 7).details == "in forward"


def test_a_plan_that_needs_more_than_connections_leave_is_told_before_the_first_step(monkeypatch):
    """On streams all is warm and connected then; what is open to torch is given here."""
    monkeypatch.setattr(loaded, "bytes_open_to_torch", lambda device: 1_234_566)
    with Workers(job()) as run:  # it plans with 1,234,567 bytes
        for worker in run.workers:
            worker.device = "cuda"
        notes = run.call(lambda worker: worker.warm_up(1))
        assert [note.partition(": if a step")[0] for note in notes] == [
            "kernels, NCCL's connections and other processes leave 1,234,566 bytes of the accelerator to torch, and the "
            "plan needs 1,234,567"
        ] * 2
        monkeypatch.setattr(loaded, "bytes_open_to_torch", lambda device: 1_234_567)
        assert run.call(lambda worker: worker.warm_up(1)) == [None, None]


@pytest.mark.slow
def test_a_fault_of_an_accelerator_names_it_and_its_node_and_is_no_fault_of_the_job():
    spec = job(
        loss={"factory": "workers:FaultAt", "args": {"call": 40}}
    )  # the check and profiling call it some times
    with Workers(spec) as run, pytest.raises(AttemptFailure) as caught:
        for step in range(1, 100):
            run.step(step)
    failure = caught.value
    assert failure.reason is Reason.ACCELERATOR_FAILED
    assert failure.message.startswith(f"the CPU of node {socket.gethostname()}: StageError: 1F")
    assert "uncorrectable ECC" in failure.message and "where it surfaced" in failure.message


# What a worker refuses, and what it remembers


def placed(spec):
    """A worker of a job that is given as JSON."""
    return NewWorker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu")


@pytest.mark.parametrize(
    ("changes", "reason", "told"),
    [
        ({"data": {"factory": "builtins:iter", "args": {}}}, Reason.DATA_FAILED, "iter expected|takes"),
        ({"data": {"factory": "builtins:object"}}, Reason.DATA_FAILED, "cannot tell how many samples"),
        ({"data": {"factory": "builtins:set"}}, Reason.DATA_FAILED, "builtins:set is empty"),
        ({"data": {"factory": "builtins:list"}}, Reason.DATA_FAILED, "the data set is empty"),
        (
            {
                "optimizer": {
                    "factory": "torch.optim:SGD",
                    "schedule": {"factory": "torch.optim.lr_scheduler:No"},
                }
            },
            Reason.MODEL_BUILD_FAILED,
            "lr_scheduler has no 'No'",
        ),
    ],
)
def test_what_cannot_train_is_refused_before_anything_is_measured(changes, reason, told):
    with pytest.raises(AttemptFailure, match=told) as caught:
        placed(job(**changes)).prepare()
    assert caught.value.reason == reason


def test_a_worker_tells_the_memory_that_it_was_given_or_has_and_what_its_optimizer_keeps():
    def worker(**resources):
        spec = job() | {"resources": {"meshes": 2, **resources}}
        return placed(spec).prepare()

    assert worker(memory_per_worker=12345).memory_limit(3) == 12345
    whole, half = worker().memory_limit(1), worker(memory_per_worker="auto").memory_limit(2)
    assert whole / 4 < half < whole
    assert worker().optimizer_state() == OptimizerState(2.0, 4)


@pytest.mark.slow
def test_a_wrong_argument_of_a_schedule_is_told_when_the_stages_are_loaded():
    schedule = {"factory": "torch.optim.lr_scheduler:StepLR", "args": {"steps": 3}}
    with pytest.raises(AttemptFailure, match=r"StepLR.*steps=3.*correct optimizer\.schedule\.args") as caught:
        Workers(job(schedule, stages=1, meshes=1))
    assert caught.value.reason == Reason.USER_CODE_RAISED


def test_a_profile_is_used_again_for_the_same_work_only():
    def key(workers_per_mesh=1, **changes):
        return placed(job(workers_per_mesh=workers_per_mesh, **changes)).prepare().profile_keys()[2]

    smaller = job()["training"] | {"global_batch": 4}
    keys = [key(), key(meshes=3), key(2), key(training=smaller)]
    assert len(set(keys)) == len(keys)
    assert key(training=job()["training"] | {"steps": 1, "seed": 9}) == keys[0]


@pytest.mark.slow
@pytest.mark.parametrize("workers_per_mesh", [1, 2])
def test_a_job_that_leaves_its_numbers_open_learns_what_a_plain_loop_learns_at_the_chosen_ones(
    workers_per_mesh,
):
    spec = job("cosine", workers_per_mesh=workers_per_mesh)
    spec["training"]["microbatches"] = spec["pipeline"]["stages"] = spec["pipeline"]["schedule"] = "auto"
    with Workers(spec) as run:
        chosen = run.planned["spec"]["microbatches"]
        assert chosen in (1, 2, 4, 8) and len(run.planned["begins"]) % 2 == 0
        found = run.losses(range(1, 5))
        counts = [len(result.losses) for result in run.step(5)]
    assert set(counts) <= {0, chosen}, "as many losses as microbatches, where the model ends"
    spec["training"]["microbatches"] = chosen
    assert found == pytest.approx(plain(spec, range(1, 5))[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stages_are_loaded_for_the_planned_number_of_microbatches_whatever_was_profiled_last(count):
    """With the shapes of another number the graph would refuse the batch, or the loss would be scaled wrongly."""
    spec = job("cosine")
    spec["training"]["microbatches"] = "auto"
    fixed = {**spec, "training": {**spec["training"], "microbatches": count}}
    worker = placed(spec).prepare()
    keys = worker.profile_keys()
    assert list(keys) == [1, 2, 4, 8] and len(set(keys.values())) == 4
    profiles = {n: worker.profile(n) for n in (1, 2, 4, 8)}
    assert [p["microbatch"].split("]")[0] for p in profiles.values()] == ["[8, 8", "[4, 8", "[2, 8", "[1, 8"]
    with Workers(fixed) as run:
        assert run.losses(range(1, 3)) == pytest.approx(plain(fixed, range(1, 3))[0], rel=1e-5)
    assert placed(fixed).prepare().profile_keys() == {count: keys[count]}, (
        "a profile serves jobs that say the number, too"
    )


def test_more_or_fewer_microbatches_than_the_job_says_are_refused():
    worker = placed(job()).prepare()
    with pytest.raises(AttemptFailure, match="4 microbatches were planned, but the job says 2"):
        worker.profile(4)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_data_set_that_raises_is_reported_with_its_index_in_its_own_step(prefetch):
    spec = job()
    data = {"factory": "workers:RaisesAt", "args": {"length": 8, "step": 3, "batch": 8, "seed": 5}}
    spec["data"] = data | {"prefetch": prefetch}
    with Workers(spec) as run:
        run.step(1), run.step(2)
        with pytest.raises(
            AttemptFailure, match=r"sample \d+ of data workers:RaisesAt raised OSError"
        ) as told:
            run.call(lambda w: w.run_step(3) if w.mesh == "m0" else None)
    assert told.value.reason is Reason.DATA_FAILED


@pytest.mark.slow
def test_samples_of_the_next_steps_are_read_while_a_step_runs_and_not_on_its_thread():
    spec = job()
    spec["data"] = {"factory": "workers:Watched", "args": {"length": 8}, "prefetch": 1}
    with Workers(spec) as run:
        run.step(1)
        datasets = [worker.batches._dataset for worker in run.workers]
        until(
            lambda: min(len(data.readers) for data in datasets) >= 1 + 8 * 2,
            "the samples of step 2 are not read before it begins",
            limit_s=20,
        )
        assert all(set(data.readers[-8:]) == {"slotline-data"} for data in datasets)
        threads = [worker.reader._reader._thread for worker in run.workers]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.slow
def test_losses_are_the_same_however_far_samples_are_read_ahead():
    found = []
    for prefetch in (0, 1, 5):
        spec = job("cosine")
        spec["data"] = {**spec["data"], "prefetch": prefetch}
        with Workers(spec) as run:
            found.append(run.losses(range(1, 6)))
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_data_set_that_draws_while_a_stage_draws_disturbs_neither():
    found = []
    for prefetch in (0, 2):
        spec = job()
        spec["model"]["args"]["dropout"] = 0.3
        spec["data"] = {"factory": "workers:SeedsAndDraws", "args": {"length": 8}, "prefetch": prefetch}
        with Workers(spec) as run:
            found.append(run.losses(range(1, 7)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_garbage_is_looked_for_between_steps_only():
    spec = job(stages=1, meshes=1, loss={"factory": "tests.worker.workers:LeavesCycles"})
    with Workers(spec) as workers, _collections() as searches:
        (worker,) = workers.workers
        worker.collect_between_steps()
        run_step, within = worker.engine.run_step, []

        def counted(*step):
            searches.clear()
            result = run_step(*step)
            within.append((len(searches), LeavesCycles.Cycle.left))
            return result

        worker.engine.run_step = counted
        for step in (1, 2, 3):
            workers.step(step)
            assert LeavesCycles.Cycle.left == 0
        assert within == [(0, 2 * 1000)] * 3


@pytest.mark.slow
def test_garbage_of_modules_that_run_as_they_are_is_looked_for_at_any_time(monkeypatch):
    """They may hold activations in cycles: those of all microbatches would be too many."""
    with Workers(job(stages=1, meshes=1)) as workers, _collections():
        monkeypatch.setattr("worker.actor.loaded.opaque_calls", lambda stage: [stage])
        workers.workers[0].collect_between_steps()
        assert gc.isenabled()


@contextlib.contextmanager
def _collections():
    """The searches for garbage of this process in the body; afterwards it looks for it as before."""
    searches = []

    def begun(phase, info):
        if phase == "start":
            searches.append(info)

    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own, which tests widen
    gc.callbacks.append(begun)
    try:
        yield searches
    finally:
        gc.callbacks.remove(begun)
        gc.set_threshold(*usual)
        gc.unfreeze()
        gc.enable()


def test_a_worker_answers_the_calls_of_the_state_that_it_is_in():
    spec = job("cosine", stages=1, meshes=1)
    worker = Worker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu")
    for method, state in (("run_step", "NewWorker"), ("_state", "NewWorker"), ("no_such", "NewWorker")):
        with pytest.raises(
            AttemptFailure, match=f"worker m0/0 was asked for '{method}'.* no call of a {state}"
        ):
            worker.call(method, 1)
    assert worker.call("prepare") is None
    (key,) = worker.call("profile_keys").values()
    assert key and worker.call("clock") > 0
    with pytest.raises(AttemptFailure, match="'prepare', which is no call of a PreparedWorker") as refused:
        worker.call("prepare")
    assert refused.value.reason is Reason.INTERNAL


def test_a_worker_that_cannot_be_loaded_ends_its_threads_and_connections(monkeypatch):
    """Another attempt in this process, or a job that goes on, would meet them."""
    closed = []
    monkeypatch.setattr(LoadedWorker, "_compile_stages", lambda self: 1 / 0)
    monkeypatch.setattr(
        LoadedWorker, "close", lambda self, close=LoadedWorker.close: closed.append(close(self))
    )
    with pytest.raises(AttemptFailure, match="ZeroDivisionError"):
        Workers(job("cosine"))
    assert len(closed) == 2
    assert not [thread for thread in threading.enumerate() if thread.name == f"slotline-{COMPUTE_LANE}"]


def trained_actor(steps):
    """The actor of the one worker of a job that has trained `steps`; nothing else holds its state."""
    gang = Workers(job("cosine", stages=1, meshes=1))
    gang.losses(range(1, steps + 1))
    (worker,) = gang.workers
    actor = Worker(job=worker.job, mesh="m0", worker=0, device="cpu")
    worker.collect_between_steps()
    actor._state = worker
    return actor


@pytest.mark.slow
def test_a_worker_that_starts_over_holds_nothing_of_its_attempt_and_is_as_new():
    actor = trained_actor(2)
    generators = torch.get_rng_state(), random.getstate()
    actor._rng = RngStates.read()
    random.random()
    torch.rand(3)
    parameters = [weakref.ref(p) for stage in actor._state.stages.values() for p in stage.parameters()]
    assert parameters and not gc.isenabled()
    actor.start_over()
    assert not any(ref() is not None for ref in parameters)
    assert type(actor._state) is NewWorker and gc.isenabled() and not gc.get_freeze_count()
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("slotline-")]
    assert actor.call("prepare") is None and actor.call("profile_keys")
    actor.start_over()  # also before anything is loaded
    assert type(actor._state) is NewWorker


@pytest.mark.slow
def test_a_worker_of_whose_attempt_something_is_left_does_not_start_over():
    actor = trained_actor(1)
    kept_by_user_code = next(iter(actor._state.stages.values()))
    with pytest.raises(AttemptFailure, match="the process still holds") as refused:
        actor.start_over()
    assert refused.value.reason is Reason.INTERNAL
    assert type(kept_by_user_code).__name__ in refused.value.message


def test_a_spare_has_the_code_of_its_job_and_then_the_place_of_a_worker(monkeypatch):
    spec = job(meshes=2, stages=2)
    imported = []
    monkeypatch.setattr("worker.actor.actor.resolve", imported.append)
    spare = Worker(job=Job.from_json(spec), mesh="spare", worker=2, device="cpu")
    assert spare.call("import_code") is None
    assert imported[:2] == [spec["model"]["factory"], spec["data"]["factory"]]
    spare.take_place("m1", 0)
    assert spare.call("prepare") is None
    assert (spare._state.mesh, spare._state.index, spare._state.place.workers_per_mesh) == ("m1", 0, 1)
    spare.start_over()
    assert (spare._state.mesh, spare._state.index) == ("m1", 0)


def test_a_worker_that_still_writes_does_not_start_over(monkeypatch):
    """Its checkpoint would be another attempt's, too."""
    monkeypatch.setattr("worker.actor.actor._THREADS_END_S", 0.05)
    worker = Worker(job=Job.from_json(job()), mesh="m0", worker=0, device="cpu")
    written = threading.Event()
    thread = threading.Thread(target=written.wait, name="slotline-checkpoint", daemon=True)
    thread.start()
    with pytest.raises(AttemptFailure, match="thread slotline-checkpoint has not ended"):
        worker.start_over()
    written.set()
    thread.join(10)
    worker.start_over()
    assert worker.call("prepare") is None


def test_a_worker_with_a_process_of_its_attempt_does_not_start_over(monkeypatch):
    earlier, reader = SimpleNamespace(name="earlier"), SimpleNamespace(name="reader-1")
    processes = [earlier]
    monkeypatch.setattr("multiprocessing.active_children", lambda: [*processes])
    worker = Worker(job=Job.from_json(job()), mesh="m0", worker=0, device="cpu")
    worker.start_over()
    processes.append(reader)
    with pytest.raises(AttemptFailure, match="process reader-1 has not ended"):
        worker.start_over()


@pytest.mark.parametrize("own_code", [True, False])
def test_a_worker_that_starts_over_imports_the_modules_of_its_job_anew_and_no_others(
    monkeypatch, tmp_path, own_code
):
    """What a factory keeps in a global would else differ from that of workers that are started."""
    (tmp_path / "counting_models").mkdir()
    (tmp_path / "counting_models" / "__init__.py").write_text("from counting_models.inner import built\n")
    (tmp_path / "counting_models" / "inner.py").write_text("built = []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    spec = job() | ({"code": {"working_dir": "file:///code.zip"}} if own_code else {})
    worker = Worker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu")
    try:
        resolve("counting_models:built").append(1)
        modules = {name: module for name, module in sys.modules.items() if "counting_models" not in name}
        worker.start_over()
        assert resolve("counting_models:built") == ([] if own_code else [1])
        assert all(sys.modules[name] is module for name, module in modules.items())
    finally:
        for name in ("counting_models", "counting_models.inner"):
            sys.modules.pop(name, None)
