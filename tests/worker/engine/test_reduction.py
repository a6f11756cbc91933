"""Gradients of the workers of a mesh: summed in buckets beside the backwards, with the sum of one flat copy."""

import pytest
import torch

from tests.worker.engine.engine_support import (
    LocalPipeline,
    Plain,
    Recorder,
    batch,
    chain,
    planned,
    serial_programs,
    tied_chain,
)
from tests.worker.engine.lanes.test_cuda import CudaPipeline
from worker.contract.buckets import BucketedProgram, Gradient, with_buckets
from worker.contract.program import Instruction
from worker.engine import lowering

LOOPED = ["m0", "m1", "m0", "m1"]
ADAM = torch.optim.AdamW


def test_a_bucket_waits_for_the_last_backward_of_its_parameters_and_the_final_reduce_for_the_last_bucket():
    program = (
        Instruction("F", "compute", stage=0, microbatch=0),
        Instruction("F", "compute", stage=1, microbatch=0),
        Instruction("I", "compute", stage=1, microbatch=0, record=0),
        Instruction("B", "compute", stage=0, microbatch=0),
        Instruction("SEND_B", "send:m1", stage=1, microbatch=0, edge=0, peer="m1", wait=(0,)),
        Instruction("W", "compute", stage=1, microbatch=0),
        Instruction("REDUCE", "compute"),
        Instruction("STEP", "compute"),
    )
    gradients = [
        Gradient("a", (0,), 60, "float32"),
        Gradient("b", (0,), 60, "float32"),
        Gradient("c", (0,), 10, "bfloat16"),
        Gradient("d", (1,), 500, "float32"),
        Gradient("e", (0, 1), 10, "float32"),
    ]
    made = with_buckets(program, gradients, limit_bytes=100)
    names = "0F0 1F0 1I0 0B0 0REDUCE 0REDUCE 0REDUCE 1SEND_B0@m1/e0 1W0 1REDUCE 1REDUCE REDUCE STEP"
    assert " ".join(map(str, made.program)) == names
    assert [made.buckets[i] for i in sorted(made.buckets)] == [("c",), ("a",), ("b",), ("d",), ("e",)]
    by_event = {i.record: k for k, i in enumerate(made.program) if i.record is not None}
    assert [[by_event[e] for e in made.program[k].wait] for k in (4, 5, 6, 9, 10, 11)] == [
        *([3], [3], [3], [8], [8]),
        [10],
    ]
    assert [made.source[i] for i in range(13)] == [0, 1, 2, 3, None, None, None, 4, 5, None, None, 6, 7]
    assert len({i.record for i in made.program if i.record is not None}) == 4
    assert with_buckets(program, []).program == program
    assert with_buckets(program[:2], gradients).program == program[:2]


def flat(monkeypatch):
    monkeypatch.setattr(
        lowering,
        "with_buckets",
        lambda program, _: BucketedProgram(program, {}, tuple(range(len(program)))),
    )


def gradients_of(graph, programs, mesh_of_stage, microbatches=3, steps=2):
    """What every optimizer was given, step by step, and the slots of the last step."""
    with LocalPipeline(graph, mesh_of_stage, programs, microbatches, workers=2) as pipeline:
        for step in range(steps):
            results = pipeline.step(step, [batch(microbatches, seed=9 * w + step) for w in range(2)])
        return {key: e._update.optimizer.seen for key, e in pipeline.engines.items()}, results


@pytest.mark.parametrize("graph", [lambda: chain(4), tied_chain], ids=["chain", "tied"])
def test_the_sum_of_buckets_is_that_of_one_flat_copy(graph, monkeypatch):
    graph = graph()
    meshes = LOOPED[: len(graph.stages)]
    programs = serial_programs(graph, meshes, 3, split=True)
    buckets, _ = gradients_of(graph, programs, meshes)
    flat(monkeypatch)
    once, _ = gradients_of(graph, programs, meshes)
    assert buckets.keys() == once.keys()
    for key, steps in buckets.items():
        for mine, others in zip(steps, once[key], strict=True):
            for a, b in zip(mine, others, strict=True):
                assert torch.equal(a, b), key


def test_a_bucket_is_summed_while_other_stages_still_go_backward_and_shows_as_a_slot():
    graph = chain(4)
    _, results = gradients_of(graph, serial_programs(graph, LOOPED, 3), LOOPED)
    for (mesh, _), result in results.items():
        reduces = [s for s in result.slots if s.action == "REDUCE"]
        last, first = (2, 0) if mesh == "m0" else (3, 1)  # backward comes to the later stage first
        assert [(s.lane, s.stage) for s in reduces] == [
            ("reduce", last),
            ("reduce", first),
            ("compute", None),
        ]
        final = max(s.end_s for s in result.slots if s.action == "B")
        assert reduces[0].start_s < final, "the first bucket waits for all backwards"
        assert all(s.end_s > s.start_s for s in reduces)
        assert reduces[2].start_s >= reduces[1].end_s


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_on_streams_buckets_overtake_and_the_run_is_that_of_the_plain_loop(seed, monkeypatch):
    graph = chain(4)
    programs = planned(graph, LOOPED, 2, "interleaved-1f1b")[1]
    plain = Plain(graph, ADAM, 0.3)
    with CudaPipeline(
        monkeypatch, graph, LOOPED, programs, 2, seed=seed, optimizer=ADAM, workers=2, clip_grad_norm=0.3
    ) as pipeline:
        for step in range(2):
            parts = [batch(2, seed=10 * worker + step) for worker in range(2)]
            losses, _ = plain.step(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
            results = pipeline.step(step, parts)
            assert results["m1", 0].losses + results["m1", 1].losses == pytest.approx(losses, abs=1e-10)
            assert results["m0", 1].grad_norm == pytest.approx(plain.norm, rel=1e-9)


def test_a_bucket_that_does_not_wait_for_its_backward_shows_in_some_order(monkeypatch):
    graph = chain(4)
    programs = planned(graph, LOOPED, 2, "interleaved-1f1b")[1]
    parts = [batch(2, seed=worker) for worker in range(2)]
    plain = Plain(graph)
    _, expected = plain.step(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])

    def right(seed, changed=None):
        with CudaPipeline(
            monkeypatch, graph, LOOPED, programs, 2, seed=seed, changed=changed, workers=2, optimizer=Recorder
        ) as pipeline:
            pipeline.step(0, parts)
            return all(
                gradient is not None and torch.allclose(gradient, expected[name], atol=1e-12)
                for name, gradient in pipeline.gradients().items()
            )

    def forget(engine, lanes):
        for index in engine._actions._gradient_buckets:
            lanes._waits[index].clear()

    assert all(right(seed) for seed in range(8))
    assert not all(right(seed, forget) for seed in range(8))


def with_sums(graph, mesh_of_stage, microbatches, contention):
    """The plan of a graph with one sum a stage, as long as two actions; and its programs."""
    from service.scheduler.job.reduces import MeshReduces, place_reduces
    from service.scheduler.problem.spec import PipelineSpec

    network = {"contention": contention}
    plan, _ = planned(graph, mesh_of_stage, microbatches, "interleaved-1f1b", network=network)
    spec = PipelineSpec.model_validate(
        {
            "microbatches": microbatches,
            "meshes": [{"name": mesh} for mesh in dict.fromkeys(mesh_of_stage)],
            "stages": [
                {"name": f"s{k}", "mesh": mesh, "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}
                for k, mesh in enumerate(mesh_of_stage)
            ],
            "edges": [],
            "network": network,
        }
    )
    sums = {
        mesh: MeshReduces(
            [Gradient(f"{k}", (k,), 8, "") for k, m in enumerate(mesh_of_stage) if m == mesh], lambda *_: 2.0
        )
        for mesh in dict.fromkeys(mesh_of_stage)
    }
    plan = place_reduces(spec, plan, sums)
    return plan, {mesh: plan.program(mesh) for mesh in plan.programs}


@pytest.mark.parametrize("sharded", [(), ("m0", "m1")])
@pytest.mark.parametrize("contention", ["link", "full-duplex"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_planned_buckets_run_where_the_plan_has_them_and_the_run_is_that_of_the_plain_loop(
    seed, contention, sharded, monkeypatch
):
    graph = chain(4)
    _, programs = with_sums(graph, LOOPED, 2, contention)
    plain = Plain(graph, ADAM, 0.3)
    with CudaPipeline(
        monkeypatch,
        graph,
        LOOPED,
        programs,
        2,
        seed=seed,
        optimizer=ADAM,
        workers=2,
        clip_grad_norm=0.3,
        sharded=sharded,
    ) as pipeline:
        for (mesh, _), engine in pipeline.engines.items():
            ran = [str(one) + one.lane for one in engine._program]
            assert ran == [str(one) + one.lane for one in programs[mesh]]
            waits = [
                [one.wait for one in p if one.lane == "reduce"] for p in (engine._program, programs[mesh])
            ]
            assert waits[0] == waits[1]
        for step in range(2):
            parts = [batch(2, seed=10 * worker + step) for worker in range(2)]
            losses, _ = plain.step(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
            results = pipeline.step(step, parts)
            assert results["m1", 0].losses + results["m1", 1].losses == pytest.approx(losses, abs=1e-10)
            assert results["m0", 1].grad_norm == pytest.approx(plain.norm, rel=1e-9)
        for key, engine in pipeline.engines.items():
            for name, value in engine._update.parameters.items():
                torch.testing.assert_close(
                    value.detach(), plain.parameters[name].detach(), rtol=1e-9, atol=1e-11, msg=str(key)
                )
