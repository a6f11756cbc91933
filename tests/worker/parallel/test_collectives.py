"""A sum inside a stage that does not end names the workers that have not come to it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.worker.engine.engine_support import chain, serial_programs, squared_error
from worker.actor.state import engine_failure
from worker.contract.planned import MeshProgram
from worker.contract.reasons import Reason
from worker.engine.engine import Engine, engine_collectives
from worker.engine.local_stages import LocalStages
from worker.engine.results import RunOptions, SlotLimits
from worker.model.export import trace
from worker.parallel.collectives import Collectives
from worker.parallel.process_groups import tp_group
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.shards import TensorParallelShards
from worker.parallel.tensor.tensor_stage import tensor_stage
from worker.transport.base import EngineError, PeerLostError, Topology
from worker.transport.local import LocalTransport

WORKERS = 2
ROWS = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
PLAN = {"0": "colwise", "2": "rowwise", "3": "colwise", "4": "rowwise"}
SHORT, LONG = SlotLimits(factor=1.0, floor_s=2.0), SlotLimits(factor=1.0, floor_s=120.0)


class Blocks:
    """The sums of a worker, of which one waits for `until` before it is begun."""

    def __init__(self, communicator, number, until):
        self._communicator, self._left, self._until = communicator, number, until

    def all_reduce(self, tensor):
        self._left -= 1
        if self._left == 0:
            self._until.wait(120)
        self._communicator.all_reduce(tensor)


def engine_of(worker, transport, limits):
    """An engine of one stage of two sums forward and two backward, and its group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 4))
    traced = trace(model, (ROWS,))
    cut = traced.cut([traced.layers[0]])
    program, options = (
        MeshProgram(serial_programs(chain(1), ["m0"], 1)["m0"], 1),
        RunOptions(tensor=WORKERS, limits=limits),
    )
    collectives = engine_collectives(transport, program, ["m0"], cut.tied, options)
    group = TensorGroup(worker, WORKERS, collectives.in_stage(tp_group("m0", worker, WORKERS)))
    shared = tensor_stage(cut.stages[0], PLAN, group)
    shards = TensorParallelShards(group, shared.splits)
    engine = Engine(
        program,
        LocalStages({0: shared.module}, ["m0"], cut.edges, cut.tied, shards),
        collectives,
        loss=squared_error,
        optimizer=torch.optim.SGD(shared.module.parameters(), lr=0.1),
        options=options,
    )
    return engine, group


class Leaves(Blocks):
    """The sums of a worker that goes without a word in place of one."""

    def all_reduce(self, tensor):
        self._left -= 1
        if self._left == 0:
            self._until()
        self._communicator.all_reduce(tensor)


def end_of(block_at=None, leave_at=None):
    """The error of worker 0 when worker 1 never comes, blocks before a sum of its own, and watches itself for long, or
    leaves."""
    ends = LocalTransport.group(Topology(("m0",), WORKERS))
    made = {w: engine_of(w, end, LONG if w == 1 else SHORT) for (_, w), end in ends.items()}
    said, until, ready = {}, threading.Event(), threading.Barrier(WORKERS, timeout=60)
    group = made[1][1]
    if block_at is not None:
        group.communicator = Blocks(group.communicator, block_at, until)
    if leave_at is not None:
        group.communicator = Leaves(group.communicator, leave_at, ends["m0", 1].abort)
        for end in ends.values():  # whoever tells first would be the cause of the others
            end.announce = lambda reason: None

    def run(worker, engine):
        try:
            engine.connect()
            ready.wait()
            if worker == 1 and block_at is None and leave_at is None:
                return
            engine.run_step(1, [(ROWS,)], [ROWS])
        except EngineError as error:
            said[worker] = error
        finally:
            until.set()

    threads = [threading.Thread(target=run, args=(w, engine)) for w, (engine, _) in made.items()]
    for one in threads:
        one.start()
    for one in threads:
        one.join(100)
    for engine, _ in made.values():
        engine.close()
    return said[0]


def test_a_worker_that_never_came_is_named():
    said = str(end_of())
    assert "0F0 on lane compute has not ended" in said
    assert "it waits for m0/1; m0/1 has said nothing" in said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "slot"), [(2, "0F0"), (3, "0B0")])
def test_a_worker_that_is_in_the_slot_and_not_yet_at_the_sum_is_named(number, slot):
    said = str(end_of(block_at=number))
    assert f"{slot} on lane compute has not ended" in said
    assert "it waits for m0/1; m0/1 said" in said
    assert f"come to {number - 1} sums of tensor/m0/0" in said


@pytest.mark.slow
def test_a_worker_that_is_lost_in_a_sum_is_no_fault_of_the_users_code():
    """Nobody says why: what is told has the slot, the group and what its workers said last."""
    error = end_of(leave_at=2)
    assert engine_failure(error).reason is Reason.SLOT_STALLED
    assert isinstance(error, PeerLostError)
    assert "0F0: the all-reduce over tensor/m0/0 was aborted; m0/1 said" in str(error)


def test_who_has_come_is_told_apart_by_the_group_and_the_number():
    """Groups whose names begin alike; a worker that is further than this one has come."""
    end = LocalTransport.group(Topology(("m0",), 12))["m0", 0]
    here, asked = [], {}

    def all_reduce(group, tensor):
        here.append(collectives.missing(lambda name: asked.get(name, "")))

    end.all_reduce = all_reduce
    collectives = Collectives(end, {"norms/m0/1": (0, 1, 2), "norms/m0/10": (0, 10, 11)})
    for group in ("norms/m0/1", "norms/m0/10", "norms/m0/1"):
        collectives.in_stage(group).all_reduce(torch.ones(1))
    assert here == [("m0/1", "m0/2"), ("m0/10", "m0/11"), ("m0/1", "m0/2")]
    assert collectives.missing(lambda name: "") == (), "it waits for nobody"
    asked = {
        "m0/1": "step 1, running 0F0 for 0.1 s, come to 3 sums of norms/m0/1, come to 9 sums of norms/m0/10",
        "m0/2": "step 1, running 0F0 for 0.1 s, come to 1 sums of norms/m0/1, come to 9 sums of norms/m0/10",
    }
    collectives.in_stage("norms/m0/1").all_reduce(torch.ones(1))
    assert here[-1] == ("m0/2",)
    assert collectives.progress_text() == ", come to 3 sums of norms/m0/1, come to 1 sums of norms/m0/10"
