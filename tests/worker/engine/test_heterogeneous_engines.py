"""Meshes of unlike sizes: every transfer between them is a resharding, and the step is that of the plain model."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_gather_then_send, plan_resharding
from tests.worker.engine.engine_support import (
    WIDTH,
    Graph,
    LocalPipeline,
    Plain,
    chain,
    make_engine,
    planned,
    serial_programs,
    skips,
    squared_error,
    tied_chain,
    two_branches,
)
from worker.contract.planned import MeshProgram
from worker.contract.resharding import ReshardingPlan
from worker.engine.lanes.base import LaneStatus
from worker.engine.results import RunOptions, SlotLimits
from worker.engine.routes import find_routes
from worker.engine.watchdog import Watchdog
from worker.transport.base import EngineError, Topology
from worker.transport.local import LocalTransport

ROWS = 12
MICROBATCHES = 3


def _of_rows(graph: Graph, rows: int) -> Graph:
    """The same graph traced with so many rows."""
    edges = tuple(dataclasses.replace(edge, shape=(rows, *edge.shape[1:])) for edge in graph.edges)
    return Graph(graph.stages, edges, graph.tied)


def _plans(graph: Graph, mesh_of_stage, sizes: dict[str, int]) -> dict[tuple[int, bool], ReshardingPlan]:
    found = {}
    for index, route in find_routes(_of_rows(graph, ROWS).edges, mesh_of_stage).items():
        ends = (route.source_mesh, route.target_mesh)
        if sizes[ends[0]] == sizes[ends[1]]:
            continue
        for backward in (False, True) if route.differentiable else (False,):
            one, other = (
                mesh_layout(mesh, mesh=(sizes[mesh],), split=(0,), hosts=("here",) * sizes[mesh])
                for mesh in (reversed(ends) if backward else ends)
            )
            plan = plan_resharding(Tensor(route.shape, route.dtype.itemsize), one, other, Links(1e9, 1e9))
            found[index, backward] = ReshardingPlan.from_json(plan.to_json())
    return found


class UnlikePipeline(LocalPipeline):
    """All engines of a graph on meshes of these sizes."""

    def __init__(
        self, graph, mesh_of_stage, programs, sizes, *, optimizer, plans=None, times=None, **options
    ):
        topology = Topology(tuple(sizes), tuple(sizes.values()))
        plans = _plans(graph, mesh_of_stage, sizes) if plans is None else plans
        self.engines = {}
        for (mesh, worker), transport in LocalTransport.group(topology).items():
            mine = copy.deepcopy(_of_rows(graph, ROWS // sizes[mesh]))
            self.engines[mesh, worker] = make_engine(
                transport,
                MeshProgram(
                    tuple(programs[mesh]),
                    MICROBATCHES,
                    reshardings=plans,
                    **({} if times is None else times[mesh]),
                ),
                mine,
                mesh_of_stage,
                loss=squared_error,
                optimizer=optimizer,
                options=RunOptions(**options),
            )
        self.each(lambda key, engine: engine.connect())

    def run(self, step, inputs, targets):
        """One step; each worker takes its rows."""

        def rows(tensor, key):
            return tensor.chunk(self.sizes[key[0]])[key[1]]

        return self.each(
            lambda key, engine: engine.run_step(
                step, [tuple(rows(x, key) for x in one) for one in inputs], [rows(t, key) for t in targets]
            )
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {mesh: worker + 1 for mesh, worker in self.engines}


def _batch(seed: int):
    draw = torch.Generator().manual_seed(seed)
    shape = (ROWS, WIDTH)
    inputs = [(torch.randn(shape, generator=draw, dtype=torch.float64),) for _ in range(MICROBATCHES)]
    return inputs, [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(MICROBATCHES)]


def _adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def _check(graph, mesh_of_stage, sizes, programs, *, clip=None, steps=2):
    """Losses, norms and parameters of some steps equal those of the plain model, on every worker."""
    plain = Plain(graph, _adam, clip)
    with UnlikePipeline(
        graph, mesh_of_stage, programs, sizes, optimizer=_adam, clip_grad_norm=clip
    ) as pipeline:
        last = mesh_of_stage[-1]
        for step in range(1, steps + 1):
            inputs, targets = _batch(step)
            results = pipeline.run(step, inputs, targets)
            losses, gradients = plain.step(inputs, targets)
            for m, loss in enumerate(losses):
                got = [results[last, w].losses[m] for w in range(sizes[last])]
                assert sum(got) / len(got) == pytest.approx(loss, rel=1e-12)
            norm = torch.cat([g.reshape(-1) for g in gradients.values()]).norm().item()
            assert {result.grad_norm for result in results.values()} == {results[last, 0].grad_norm}
            assert results[last, 0].grad_norm == pytest.approx(norm, rel=1e-9)
        for engine in pipeline.engines.values():
            for name, parameter in engine.state()["parameters"].items():
                torch.testing.assert_close(parameter, plain.parameters[name].detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("make", [lambda: chain(2), tied_chain], ids=["chain", "tied"])
def test_steps_on_meshes_of_unlike_sizes_are_those_of_the_plain_model(make, sizes):
    graph = make()
    mesh_of_stage = ["m0"] * (len(graph.stages) - 1) + ["m1"]
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, "auto")
    _check(graph, mesh_of_stage, dict(zip(("m0", "m1"), sizes, strict=True)), programs, clip=0.05)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("make", [skips, two_branches])
def test_skips_over_meshes_of_other_sizes_and_integers_arrive(make, sizes):
    """Of (2, 1, 2) the skips from the first to the last go worker by worker, what passes the middle is resharded."""
    mesh_of_stage = ["m0", "m1", "m1", "m2"]
    graph = make()
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, "auto")
    _check(graph, mesh_of_stage, dict(zip(("m0", "m1", "m2"), sizes, strict=True)), programs, clip=0.05)


def test_stages_in_rounds_over_unlike_meshes_equal_the_plain_model():
    graph = chain(4)
    mesh_of_stage = ["m0", "m1", "m0", "m1"]
    _check(graph, mesh_of_stage, {"m0": 2, "m1": 1}, serial_programs(graph, mesh_of_stage, MICROBATCHES))


def test_an_edge_without_a_resharding_is_refused_by_name():
    graph = chain(2)
    programs = serial_programs(graph, ["m0", "m1"], MICROBATCHES)
    with pytest.raises(ValueError, match=r"tensor 'h0' of mesh m0 \(2 workers\) goes to mesh m1 \(1\)"):
        UnlikePipeline(graph, ["m0", "m1"], programs, {"m0": 2, "m1": 1}, optimizer=_adam, plans={})


def _stall_of(pipeline, waiting, batch):
    """What the engine `waiting` says when all others but m0/1 run too; they stall as long, and wait longer to say so."""
    said = {}
    for key, engine in pipeline.engines.items():
        if key != waiting:
            engine._limits_s[:] = [60.0] * len(engine._limits_s)

    def batch_of(key):
        share = [x.chunk(pipeline.sizes[key[0]])[key[1]] for x in (batch[0][0][0], batch[1][0])]
        return [(share[0],)] * MICROBATCHES, [share[1]] * MICROBATCHES

    def warm_up(key, engine):
        engine.warm_up(1, *batch_of(key))
        engine.rehearse(1)

    def run(key, engine):
        if key == ("m0", 1):
            return
        try:
            engine.run_step(1, *batch_of(key))
        except EngineError as error:
            said[key] = str(error)

    if any(engine._enqueues() for engine in pipeline.engines.values()):
        pipeline.each(warm_up)
    pipeline.each(run)
    return said[waiting]


SHORT = SlotLimits(factor=1.0, floor_s=1.5)


@pytest.mark.slow
def test_a_transfer_that_stalls_names_the_worker_whose_rows_are_missing():
    graph = chain(2)
    programs = serial_programs(graph, ["m0", "m1"], MICROBATCHES)
    sizes = {"m0": 2, "m1": 1}
    with UnlikePipeline(graph, ["m0", "m1"], programs, sizes, optimizer=_adam, limits=SHORT) as pipeline:
        said = _stall_of(pipeline, ("m1", 0), _batch(1))
    assert "RECV_F0@m0/e0" in said
    assert "it waits for m0/1; m0/1 has said nothing" in said


class OneIsMissing(frozenset):
    """These transfers (edge, backward) are resharded, and one worker's part of each has not come."""

    def missing(self, edge, backward, microbatch):
        return ("m0/1",)


@pytest.mark.parametrize(
    ("resharded", "waits_for"),
    [({(0, False), (0, True)}, ("m0/1",)), ({(0, True)}, ("m0",)), ((), ("m0",))],
    ids=["resharded", "back only", "in pairs"],
)
@pytest.mark.parametrize("tensors", [(1, 2), None], ids=["unlike", "alike"])
def test_of_as_many_workers_the_one_is_named_whose_part_is_missing(tensors, resharded, waits_for):
    """Whether a transfer goes in pairs is the plan's to say, and not how large meshes are."""
    programs = serial_programs(chain(2), ["m0", "m1"], MICROBATCHES)
    transport = SimpleNamespace(topology=Topology(("m0", "m1"), 2, tensors), mesh="m1", worker=0)
    watch = Watchdog(
        mesh="m1",
        program=programs["m1"],
        limits_s=[1.0] * len(programs["m1"]),
        transport=transport,
        lanes=None,
        reshardings=OneIsMissing(resharded),
    )
    received = next(k for k, one in enumerate(programs["m1"]) if one.op == "RECV_F")
    assert watch._peers(received) == waits_for
    told = watch._is_published(LaneStatus("from m0", received, 0.0, None, None))
    assert told == (waits_for == ("m0/1",)), "the other workers of both meshes want to know"


@pytest.mark.slow
def test_a_sum_over_workers_that_stalls_names_the_worker_that_has_not_come():
    graph = chain(1)
    programs = serial_programs(graph, ["m0"], MICROBATCHES)
    with UnlikePipeline(graph, ["m0"], programs, {"m0": 3}, optimizer=_adam, limits=SHORT) as pipeline:
        said = _stall_of(pipeline, ("m0", 0), _batch(1))
    assert "REDUCE" in said and "it waits for m0/1; m0/1 has said nothing" in said


def _more_than_pairs(graph, mesh_of_stage, sizes, only):
    """Of these edges between meshes of one size reshardings with several messages, worker 0 of each between."""
    found = {}
    for index, route in find_routes(_of_rows(graph, ROWS).edges, mesh_of_stage).items():
        ends = (route.source_mesh, route.target_mesh)
        for backward in (False, True) if index in only else ():
            one, other = (
                mesh_layout(mesh, mesh=(sizes[mesh],), split=(0,), hosts=(mesh,) * sizes[mesh])
                for mesh in (reversed(ends) if backward else ends)
            )
            plan = plan_gather_then_send(Tensor(route.shape, route.dtype.itemsize), one, other, Links(1e9))
            found[index, backward] = ReshardingPlan.from_json(plan.to_json())
    return found


def test_between_two_meshes_of_one_size_some_tensors_are_resharded_and_others_go_in_pairs():
    """As the plan says of each; none is taken for another."""
    graph, mesh_of_stage, sizes = skips(), ["m0", "m1", "m1", "m2"], {"m0": 2, "m1": 2, "m2": 2}
    routes = find_routes(graph.edges, mesh_of_stage)
    between = [k for k, r in sorted(routes.items()) if (r.source_mesh, r.target_mesh) == ("m0", "m2")]
    _, programs = planned(graph, mesh_of_stage, MICROBATCHES, "auto")
    plans = _more_than_pairs(graph, mesh_of_stage, sizes, [0, *between[1:]])
    assert 0 < len(plans) < 2 * len(routes) and all(len(plan.messages) > 2 for plan in plans.values())
    inputs, targets = _batch(1)
    found = []
    for given in (plans, {}):
        with UnlikePipeline(graph, mesh_of_stage, programs, sizes, optimizer=_adam, plans=given) as pipeline:
            results = pipeline.run(1, inputs, targets)
            found.append([results["m2", w].losses for w in range(2)] + [results["m2", 0].grad_norm])
            lanes = {engine.lanes for engine in pipeline.engines.values()}
            assert len(lanes) == 1, "all workers connect in one order"
    assert found[0] == found[1]


def test_a_resharding_of_other_workers_is_refused_before_anybody_waits():
    """A plan for meshes of three, on meshes of two."""
    graph = chain(2)
    programs = serial_programs(graph, ["m0", "m1"], MICROBATCHES)
    plans = _more_than_pairs(graph, ["m0", "m1"], {"m0": 3, "m1": 2}, [0])
    said = r"'h0' from mesh m0 to mesh m1 was planned for workers m0/0, m0/1, m0/2, and mesh m0 has 2: plan"
    with pytest.raises(ValueError, match=said):
        UnlikePipeline(graph, ["m0", "m1"], programs, {"m0": 2, "m1": 2}, optimizer=_adam, plans=plans)
