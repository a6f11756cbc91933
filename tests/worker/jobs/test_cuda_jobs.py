"""Whole jobs as on GPUs, without one: matrices shared, meshes of unlike sizes, states shared over NCCL and streams.

Losses are those of a plain loop, no stream touches what another may still use, and every communicator meets one order
of sums on all of its workers. The fakes are watched_cuda.py's and fake_nccl.py's; no GPU has seen this.
"""

from __future__ import annotations

import pytest
import torch

from tests.worker.actor.test_actor import job, plain
from tests.worker.cuda_workers import CudaWorkers
from tests.worker.jobs import test_sync_batch_norm_jobs
from tests.worker.jobs.test_heterogeneous_meshes import on as on_sizes
from tests.worker.jobs.test_tensor_parallel import LOSSES, on, unet
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.engine.optim.reduce_and_step import ModelUpdate
from worker.engine.results import SlotLimits
from worker.parallel.tensor.shards import TensorParallelShards


def zero_bubble(**changes):
    """Backwards in two parts, and dropout."""
    spec = job(**changes)
    spec["model"]["args"]["dropout"] = 0.2
    spec["pipeline"]["schedule"] = "zb-h1"
    return spec


CASES = {
    "tensor 2, data 2": ("gpt", lambda: on([(2, 2)] * 2, job())),
    "2 to 1 workers": ("unet", lambda: on_sizes((2, 1), unet())),
}


def check_orders(workers: CudaWorkers) -> None:
    """All workers of a group say the same to its communicator, in one order."""
    found: dict[str, list[list[tuple]]] = {}
    for device in workers.watched.devices.values():
        for communicator, said in device.said.items():
            if not communicator.startswith(("to ", "from ", "transfers/")):
                found.setdefault(communicator, []).append(said)
    assert any(name.startswith(("tensor/", "everybody", "meshes/")) for name in found)
    for name, orders in found.items():
        assert all(order == orders[0] for order in orders) and len(orders) > 1, name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_plain_loop_and_no_stream_races(case, monkeypatch, tmp_path):
    """Clipping, tied weights, skips; a checkpoint in the middle, which gathers between two steps."""
    name, spec = CASES[case]
    expected, _ = plain({"gpt": job, "unet": unet}[name](), range(1, 4), LOSSES[name])
    with CudaWorkers(monkeypatch, spec()) as workers:
        assert workers.losses(range(1, 3)) == pytest.approx(expected[:2], rel=1e-5)
        uri = checkpoint_format.step_uri(str(tmp_path), "job", 2)
        workers.call(lambda w: w.save(uri, 2))
        assert workers.losses(range(3, 4)) == pytest.approx(expected[2:], rel=1e-5)
        workers.watched.check()
        check_orders(workers)
        # how they are shared among the meshes is the measured cut's affair
        operations = [device.operations for device in workers.watched.devices.values()]
        assert sum(operations) > 500 * len(operations) and min(operations) > 100


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor 2", "1 to 2 workers"])
def test_losses_are_the_same_in_whatever_order_streams_go_on(layout, monkeypatch):
    """Streams are threads that pause at random. Meshes of tensor 2 have nodes of their own: each tensor crosses once."""
    spec = job() if layout == "1 to 2 workers" else zero_bubble()
    with monkeypatch.context() as patch, CudaWorkers(patch, spec) as alone:
        expected = alone.losses(range(1, 3))
    there = on_sizes((1, 2), spec) if layout == "1 to 2 workers" else on([(1, 2)] * 2, spec)
    nodes = {"m0": "one", "m1": "two"}
    with CudaWorkers(monkeypatch, there, nodes, threads=True, seed=3) as workers:
        assert {(one["edge"], one["backward"]) for one in workers.planned["reshardings"]} >= {
            (0, False),
            (0, True),
        }
        assert workers.losses(range(1, 3)) == pytest.approx(expected, rel=1e-5)
        said = {name for device in workers.watched.devices.values() for name in device.said}
        assert "transfers/m0>m1" in said and "to m1" not in said
        workers.watched.check()
        check_orders(workers)


def counted_by_tokens():
    spec = job(workers_per_mesh=2)
    spec["training"]["loss_reduction"] = "tokens"
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", [counted_by_tokens, lambda: test_sync_batch_norm_jobs.spec_of(2)], ids=["tokens", "batch norms"]
)
def test_sums_of_tokens_and_of_batch_norms_meet_buckets_in_one_order(spec, monkeypatch):
    """Within F and B, on the compute lane, beside the buckets of the same workers on theirs."""
    with CudaWorkers(monkeypatch, spec()) as workers:
        workers.losses(range(1, 3))
        workers.watched.check()
        check_orders(workers)


@pytest.mark.slow
def test_a_sum_inside_an_action_that_stalls_names_the_worker_that_has_not_come(monkeypatch):
    monkeypatch.setattr("worker.verify.local_gang._SLOT_LIMITS", SlotLimits(factor=1.0, floor_s=3.0))
    with CudaWorkers(monkeypatch, on([(1, 2)], job(stages=1)), threads=True) as workers:
        workers.losses(range(1, 2))
        absent = workers.workers[1]
        assert (absent.mesh, absent.index) == ("m0", 1)
        with pytest.raises(AttemptFailure) as stalled:
            workers.call(lambda w: None if w is absent else w.run_step(2))
    assert stalled.value.reason is Reason.SLOT_STALLED
    assert "mesh m0: 0F0 on lane compute has not ended" in str(stalled.value)
    assert "it waits for m0/1; m0/1 said" in str(stalled.value)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_copies_of_what_is_whole_stay_one_where_workers_round_differently(shard, monkeypatch):
    """As on CUDA, where additions by atomics have no order: here a worker's own gradients are off by a little."""
    norm = ModelUpdate._global_norm

    def rounded(update, losses):
        for parameter in update.updated.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + 1e-6 * update.collectives.worker)
        return norm(update, losses)

    def apart(agrees):
        monkeypatch.setattr(ModelUpdate, "_global_norm", rounded)
        if not agrees:
            monkeypatch.setattr(TensorParallelShards, "average_replicated", lambda share, gradients: None)
        layout = (1, 2) if shard == "none" else (2, 2)
        with CudaWorkers(monkeypatch, on([layout], job(stages=1), shard=shard)) as workers:
            workers.losses(range(1, 3))
            workers.watched.check()
            check_orders(workers)
            first, second = (
                {name: p for name, p in w.engine.updated.items() if name not in w.tensor_shards._splits}
                for w in workers.workers[:2]
            )
            assert first and first.keys() == second.keys()
            return [name for name, one in first.items() if not torch.equal(one, second[name])]

    assert apart(agrees=True) == []
    if shard == "none":
        assert apart(agrees=False) != []
