"""Before the first step: stages that share matrices beside the same with whole ones, with the sums that they will have."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.cuda_workers import CudaWorkers, WatchedTransport
from tests.worker.jobs.test_tensor_parallel import on
from worker.actor import loaded
from worker.parallel.tensor import graph_collectives, shards
from worker.transport.base import EngineError

ALL_REDUCE = WatchedTransport.all_reduce


@pytest.fixture
def check(monkeypatch):
    """Loads a job with dropout on streams, spoils something, and has the workers check their stages."""
    wholes = {}

    def kept(job, stages, mesh, worker, communicator):
        wholes[tuple(stages), worker] = copy.deepcopy(stages)
        return shards.tensor_parallel_stages(job, stages, mesh, worker, communicator)

    monkeypatch.setattr(loaded, "tensor_parallel_stages", kept)

    def run(spoil=lambda: None, **training):
        spec = on([(1, 2)] * 2, job())
        spec["model"]["args"]["dropout"] = 0.2
        spec["training"] |= training
        with CudaWorkers(monkeypatch, spec) as workers:
            held = [[tensor.clone() for tensor in state_of(worker)] for worker in workers.workers]
            spoil()
            workers.call(lambda w: w.check_tensor_parallel(wholes[tuple(w.stages), w.index]))
            for worker, before in zip(workers.workers, held, strict=True):
                pairs = zip(state_of(worker), before, strict=True)
                assert all(torch.equal(now, then) for now, then in pairs)
                assert all(p.grad is None for stage in worker.stages.values() for p in stage.parameters())
            return workers.losses(range(1, 3))

    return run


def state_of(worker):
    return [t for stage in worker.stages.values() for t in (*stage.parameters(), *stage.buffers())]


@pytest.mark.slow
def test_right_sums_are_told_nothing_and_training_is_what_it_is_without_the_check(check):
    assert check() == check(check_trace=False)


def forget_gradients(monkeypatch):
    """The sum of the parts of a gradient is left out, as where it ran on another stream."""
    monkeypatch.setattr(
        graph_collectives._CopyToGroup, "backward", staticmethod(lambda ctx, gradient: (gradient, None))
    )


def forget_a_part(monkeypatch):
    """One worker's part does not come."""

    def wrong(self, group, tensor):
        if group.startswith("tensor/") and self.worker == 1:
            tensor.detach().zero_()
        ALL_REDUCE(self, group, tensor)

    monkeypatch.setattr(WatchedTransport, "all_reduce", wrong)


def meet_the_one_before(monkeypatch):
    """A sum ends with what the one before it brought, as where its buffer is used again too early."""
    before = {}

    def wrong(self, group, tensor):
        given = tensor.detach().clone()
        ALL_REDUCE(self, group, tensor)
        if group.startswith("tensor/"):
            last = before.get((group, self.worker))
            before[group, self.worker] = tensor.detach().clone()
            if last is not None and last.shape == given.shape:
                tensor.detach().copy_(last)

    monkeypatch.setattr(WatchedTransport, "all_reduce", wrong)


@some_by_day("spoil", [forget_gradients, forget_a_part, meet_the_one_before], by_day=1)
def test_wrong_sums_end_the_attempt_by_the_name_of_what_differs(spoil, check, monkeypatch):
    said = r"m[01]/\d: .* of stage \d differs by .* between workers that share its matrices"
    with pytest.raises(EngineError, match=said):
        check(lambda: spoil(monkeypatch))
