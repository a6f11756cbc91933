"""The CUDA path without a GPU: what is enqueued, on which stream, after what; the results of the actions."""

import functools
import random

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import (
    LocalPipeline,
    Plain,
    batch,
    chain,
    planned,
    random_graph,
    skips,
    tied_chain,
    two_branches,
)
from tests.worker.engine.fake_cuda import Machine
from worker.contract.program import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Instruction
from worker.engine.engine import Engine
from worker.engine.lanes.cuda import CudaLanes, RunAhead
from worker.engine.results import StageError, StreamPriorities
from worker.transport.local import LocalTransport

RECEIVE = LocalTransport.receive
STARTS = {name: getattr(LocalTransport, name) for name in ("start_reduce_scatter", "start_all_gather")}
GRAPHS = {"chain": lambda: chain(4), "skips": skips, "branches": two_branches, "tied": tied_chain}


def send_without_waiting(self, peer, tag, tensor):
    """An enqueued send does not block the host."""
    self._hub.mailbox(self._rank, self.topology.rank(peer, self.worker), tag).tensor.put(tensor.clone())


def at_once(start):
    """Over when the stream goes on."""
    return lambda self, *arguments: start(self, *arguments)()


def receive_on_the_stream(receive):
    """The tensor is there when what the host enqueues next may use it."""
    return lambda self, peer, tag, out: receive(self, peer, tag, out)()


class CudaPipeline(LocalPipeline):
    """Engines whose lanes are CudaLanes over a fake machine that works in the order of `seed`, or at once (None)."""

    def __init__(self, monkeypatch, *arguments, seed=0, changed=None, warm_up=False, **options):
        monkeypatch.setattr(LocalTransport, "send", send_without_waiting)
        monkeypatch.setattr(LocalTransport, "receive", receive_on_the_stream(RECEIVE))
        monkeypatch.setattr(Engine, "_enqueues", lambda engine: True)
        monkeypatch.setattr(LocalTransport, "start_all_reduce", LocalTransport.all_reduce)
        for name, start in STARTS.items():
            monkeypatch.setattr(LocalTransport, name, at_once(start))
        monkeypatch.setattr(Engine, "_make_lanes", lambda engine, actions: self.fake_lanes(engine, actions))
        self.machine = Machine(0 if seed is None else seed, at_once=seed is None)
        self.machine.gathers = bool(options.get("sharded"))
        self.changed = changed or (lambda engine, lanes: None)
        self.cudas = {}
        super().__init__(*arguments, **options)
        for engine in self.engines.values():
            engine._warm = engine._rehearsed = not warm_up

    def fake_lanes(self, engine, actions):
        cuda = self.machine.device(engine._mesh, engine._worker)
        self.cudas[engine._mesh if engine._worker == 0 else (engine._mesh, engine._worker)] = cuda
        logged = [self.logged(cuda, engine, i, action) for i, action in enumerate(actions)]
        lanes = CudaLanes(engine._program, logged, engine._launches(), StreamPriorities(), cuda)
        self.changed(engine, lanes)
        return lanes

    @staticmethod
    def logged(cuda, engine, index, action):
        return lambda: cuda.operation(index, engine._program[index], action)


@some_by_day("seed", [None, 1, 2], by_day=1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b", "zb-h1"])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_host_enqueues_a_step_without_waiting_and_the_gradients_are_right_in_any_order(
    graph, schedule, seed, monkeypatch
):
    graph = GRAPHS[graph]()
    meshes = [f"m{s}" for s in range(len(graph.stages))]
    _, programs = planned(graph, meshes, 5, schedule)
    plain = Plain(graph, functools.partial(torch.optim.SGD, lr=0.1))
    with CudaPipeline(monkeypatch, graph, meshes, programs, 5, seed=seed) as pipeline:
        for step in range(2):
            data = batch(5, seed=step)
            losses, gradients = plain.step(*data)
            results = pipeline.step(step, [data])
            assert results[meshes[-1], 0].losses == pytest.approx(losses, abs=1e-10)
            for name, gradient in pipeline.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
            for cuda in pipeline.cudas.values():
                assert "s" not in calls_inside(cuda), "few actions all run ahead"
                cuda.calls.clear()


@pytest.mark.parametrize("most", [10, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_host_that_runs_ahead_by_few_actions_ends_each_step_with_the_right_gradients(
    schedule, most, monkeypatch
):
    """Whatever stream goes on first, no mesh waits for one whose host waits."""
    monkeypatch.setattr("worker.engine.lanes.cuda._MAX_LAUNCHES_AHEAD", most)
    graph, meshes = skips(), ["m0", "m1", "m2", "m3"]
    programs = planned(graph, meshes, 5, schedule)[1]
    losses, gradients = Plain(graph).step(*batch(5))
    for seed in range(3):
        with CudaPipeline(monkeypatch, graph, meshes, programs, 5, seed=seed) as pipeline:
            results = pipeline.step(0, [batch(5)])
            assert results[meshes[-1], 0].losses == pytest.approx(losses, abs=1e-10)
            for name, gradient in pipeline.gradients().items():
                torch.testing.assert_close(gradient, gradients[name], rtol=1e-10, atol=1e-12)
            assert all(calls_inside(cuda).count("s") >= 5 for cuda in pipeline.cudas.values())


def calls_inside(cuda):
    """What the host said from its first action of a step to its last, a letter each: s where it waited for the device."""
    calls = "".join(call[0] for call in cuda.calls)
    return calls[calls.index("o") : calls.rindex("o")]


def run_ahead(launches, waits=None):
    """Of microbatches whose action has so many launches, each received before it and sent after the next one began."""
    program, event_waits = [], []
    for m in range(len(launches)):
        program += [
            Instruction("RECV_F", "recv:m0", 0, m, 0, "m0", record=3 * m),
            Instruction("F", "compute", 0, m, wait=(3 * m,), record=3 * m + 1),
        ]
        event_waits += [[], [3 * m]] if m == 0 else [[], [len(program) - 2]]
        if m:
            program.append(Instruction("SEND_F", "send:m2", 0, m - 1, 1, "m2", wait=(3 * m - 2,)))
            event_waits.append([next(i for i, one in enumerate(program) if one.record == 3 * m - 2)])
    of_instruction = [launches[one.microbatch] if one.op == "F" else 0 for one in program]
    ahead = RunAhead.of(program, event_waits, of_instruction)
    named = [f"{one.op[0]}{one.microbatch}" for one in program]
    waits = {named[i]: [named[w] for w in waited] for i, waited in ahead.waits.items()}
    return waits, [named[i] for i in ahead.order]


def test_the_host_waits_until_what_is_ahead_of_an_action_fits_with_it_into_the_stream():
    waits, _ = run_ahead([200, 200, 100, 100, 300])
    assert waits == {"F3": ["F0"], "F4": ["F1"]}, "300 + 100 + 100, and not 200 more"
    assert run_ahead([100] * 3) == ({}, ["R0", "F0", "R1", "F1", "S0", "R2", "F2", "S1"])


def test_an_action_that_alone_fills_the_stream_is_enqueued_when_the_device_can_run_it_and_transfers_before():
    waits, order = run_ahead([400, 400, 400])
    assert waits == {"F1": ["R0", "R1"], "F2": ["F0", "R1", "R2"]}
    assert order == ["R0", "R1", "F0", "S0", "R2", "F1", "S1", "F2"], "S0 waits for no receive of F1"


def one_chain():
    graph = chain(3)
    meshes = ["m0", "m1", "m2"]
    return graph, meshes, planned(graph, meshes, 4, "1f1b")[1]


def test_a_seed_is_an_order_and_others_are_others(monkeypatch):
    graph, meshes, programs = one_chain()

    def order(seed):
        with CudaPipeline(monkeypatch, graph, meshes, programs, 4, seed=seed) as pipeline:
            pipeline.step(0, [batch(4)])
            return pipeline.machine.order

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5
    assert sorted(order(1)) == sorted(order(2))


def runs_right(monkeypatch, case, seed, changed=None):
    """Whether a step gives the gradients of the plain run."""
    graph, meshes, programs = case
    losses, gradients = Plain(graph).step(*batch(4))
    with CudaPipeline(monkeypatch, graph, meshes, programs, 4, seed=seed, changed=changed) as pipeline:
        try:
            results = pipeline.step(0, [batch(4)])
        except Exception:
            return False
        found = pipeline.gradients()
        same = [torch.allclose(found[name], gradient, atol=1e-10) for name, gradient in gradients.items()]
        return all(same) and results[meshes[-1], 0].losses == pytest.approx(losses, abs=1e-10)


def test_every_wait_for_a_producer_that_is_left_out_shows_in_some_order(monkeypatch):
    case = one_chain()
    tried = 0
    for mesh, program in case[2].items():
        for index, instruction in enumerate(program):
            if instruction.op in RECEIVE_OPS or instruction.op in ("REDUCE", "STEP"):
                continue
            for place in range(len(instruction.wait)):

                def forget(engine, lanes, mesh=mesh, index=index, place=place):
                    if engine._mesh == mesh:
                        del lanes._waits[index][place]

                wrong = any(not runs_right(monkeypatch, case, seed, forget) for seed in range(12))
                assert wrong, f"{mesh}: {instruction} does without wait {place}"
                tried += 1
    assert tried == 2 * 2 * 2 * 4, (
        "forward and backward over two links, a send and a use each, four microbatches"
    )


def test_receives_that_wait_for_nothing_overwrite_what_is_still_needed(monkeypatch):
    case = one_chain()

    def forget(engine, lanes):
        for index, instruction in enumerate(engine._program):
            if instruction.op in RECEIVE_OPS:
                lanes._waits[index].clear()

    assert all(runs_right(monkeypatch, case, seed) for seed in range(12))
    assert not all(runs_right(monkeypatch, case, seed, forget) for seed in range(12))


@some_by_day("seed", range(15), by_day=5)
def test_streams_and_events_alone_order_every_pair_that_must_be_ordered(seed, monkeypatch):
    rng = random.Random(seed)
    graph = random_graph(rng)
    meshes = [f"m{s}" for s in range(len(graph.stages))]
    _, programs = planned(graph, meshes, rng.randint(2, 6), "1f1b", split_backward=rng.random() < 0.5)
    microbatches = 1 + max(i.microbatch for i in programs["m0"] if i.microbatch is not None)
    with CudaPipeline(monkeypatch, graph, meshes, programs, microbatches, seed=seed) as pipeline:
        pipeline.step(0, [batch(microbatches)])
        for (mesh, _), engine in pipeline.engines.items():
            check_order(engine, pipeline.cudas[mesh].finished_before())


def check_order(engine, finished_before):
    """Producer before send, receive before user, and every use of a buffer before its next receive."""
    program, routes = engine._program, engine._routes
    computes = {}
    for index, i in enumerate(program):
        if i.op in COMPUTE_OPS:
            computes.setdefault((i.stage, i.microbatch), {})[i.op] = index
    users_of_buffer = {}
    for index, i in enumerate(program):
        if i.op in SEND_OPS:
            kinds = ("F",) if i.op == "SEND_F" else ("B", "I")
            stages = (routes[i.edge].source,) if i.op == "SEND_F" else routes[i.edge].consumers
            for stage in stages:
                producer = next(v for k, v in computes[stage, i.microbatch].items() if k in kinds)
                assert producer in finished_before[index], f"{i} may start before {program[producer]} ends"
        elif i.op in RECEIVE_OPS:
            forward = i.op == "RECV_F"
            stages = routes[i.edge].consumers if forward else (routes[i.edge].source,)
            users = [
                v for stage in stages for k, v in computes[stage, i.microbatch].items() if forward or k != "F"
            ]
            first = [v for v in users if program[v].op in (("F",) if forward else ("B", "I"))]
            for user in first:
                assert index in finished_before[user], f"{program[user]} may start before {i} ends"
            buffer = engine._buffers.buffer_of[index]
            for earlier in users_of_buffer.get(buffer, ()):
                assert earlier in finished_before[index], f"{i} may overwrite what {program[earlier]} needs"
            users_of_buffer[buffer] = users


def test_transfers_have_streams_of_their_own_with_higher_priority(monkeypatch):
    graph = chain(4)
    meshes = ["m0", "m1", "m2", "m3"]
    with CudaPipeline(monkeypatch, graph, meshes, planned(graph, meshes, 3, "1f1b")[1], 3) as pipeline:
        streams = pipeline.cudas["m1"].streams
        assert sorted(stream.priority for stream in streams) == [-1, -1, -1, -1, 0]
        with pipeline.engines["m1", 0]._lanes.computing():  # kernels and memory are warmed there
            assert pipeline.cudas["m1"].current.priority == 0
        result = pipeline.step(0, [batch(3)])["m1", 0]
    assert all(slot.end_s >= slot.start_s >= result.started_s for slot in result.slots)


def test_an_error_while_enqueueing_ends_the_step_by_name(monkeypatch):
    graph = chain(4)

    def broken(module, x):
        raise KeyError("planted")

    graph.stages[2]._function = broken
    meshes = ["m0", "m1", "m2", "m3"]
    programs = planned(graph, meshes, 3, "1f1b")[1]
    with CudaPipeline(monkeypatch, graph, meshes, programs, 3, seed=None) as pipeline:
        with pytest.raises(Exception, match="planted"):
            pipeline.step(0, [batch(3)])
        assert isinstance(pipeline.errors["m2", 0], StageError)
        assert pipeline.close() == [[], [], [], []]


@pytest.mark.parametrize("spoilt", ["later", "never"])
def test_a_wait_for_what_is_enqueued_later_is_refused(spoilt):
    """A stream takes what the last step recorded for it, and nothing tells."""
    program = (
        Instruction("F", "compute", stage=0, microbatch=0, record=0),
        Instruction("B", "compute", stage=0, microbatch=0, record=1),
        Instruction("REDUCE", "reduce", stage=0, wait=(1,)),
        Instruction("REDUCE", "compute"),
    )
    lanes = CudaLanes(program, [lambda: None] * 4, [1] * 4, cuda=Machine(0).device("m0"))
    assert lanes.close(20.0) == []
    order = (0, 2, 1, 3) if spoilt == "later" else (0, 2, 3)
    wrong = tuple(program[k] for k in order)
    with pytest.raises(
        ValueError, match="0REDUCE waits for event 1, which nothing before it in the program records"
    ):
        CudaLanes(wrong, [lambda: None] * len(wrong), [1] * len(wrong), cuda=Machine(0).device("m0"))


def test_every_action_is_enqueued_in_a_range_of_its_name():
    program = (
        Instruction("F", "compute", stage=2, microbatch=0, record=0),
        Instruction("SEND_F", "m0>m1", stage=2, microbatch=0, wait=(0,), peer="m1", edge=3),
        Instruction("REDUCE", "compute"),
    )
    device = Machine(0).device("m0")
    within = []
    lanes = CudaLanes(program, [lambda: within.append([*device.nvtx.open])] * 3, [1] * 3, cuda=device)
    lanes.start()
    assert lanes.wait(20.0) and lanes.close(20.0) == []
    assert within == [["2F0"], ["2SEND_F0@m1/e3"], ["REDUCE"]] and device.nvtx.open == []
