"""REDUCE and STEP, precision, random state: the run is that of the plain loop."""

import functools
import threading
import time

import pytest
import torch
from engine_support import (
    LocalPipeline,
    Plain,
    batch,
    chain,
    planned,
    serial_programs,
    skips,
    squared_error,
    tied_chain,
)
from torch import nn

from worker.engine import AbortedError, EngineError, NonFiniteError
from worker.engine.random_state import derive_seed
from worker.engine.update import skips_by_itself

FOUR = ["m0", "m1", "m2", "m3"]
adamw = functools.partial(torch.optim.AdamW, lr=0.01)


def parameters_of(pipeline):
    found = {}
    for engine in pipeline.engines.values():
        found.update({name: p.clone() for name, p in engine.state()["parameters"].items()})
    return found


@pytest.mark.parametrize("clip", [None, 0.05])
def test_adamw_with_clipping_follows_the_plain_loop(clip):
    graph = tied_chain()
    meshes = ["m0", "m1", "m2"]
    plain = Plain(graph, adamw, clip)
    programs = serial_programs(graph, meshes, 4)
    with LocalPipeline(graph, meshes, programs, 4, optimizer=adamw, clip_grad_norm=clip) as pipeline:
        for step in range(4):
            data = batch(4, seed=step)
            losses, _ = plain.step(*data)
            results = pipeline.step(step, [data])
            assert results["m2", 0].losses == pytest.approx(losses, abs=1e-10)
            if clip is not None:
                assert [r.grad_norm for r in results.values()] == pytest.approx([plain.norm] * 3, rel=1e-9)
        for name, value in parameters_of(pipeline).items():
            torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)


def test_a_tied_parameter_is_equal_on_both_meshes_after_every_step():
    graph = tied_chain()
    meshes = ["m0", "m1", "m2"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 2), 2, optimizer=adamw) as pipeline:
        for step in range(3):
            pipeline.step(step, [batch(2, seed=step)])
        first, last = (pipeline.engines[mesh, 0].state()["parameters"]["0.w"] for mesh in ("m0", "m2"))
        assert torch.equal(first, last)


def test_two_workers_a_mesh_train_on_the_mean_of_their_gradients():
    graph = skips()
    programs = serial_programs(graph, FOUR, 2)
    plain = Plain(graph, adamw, 0.3)
    with LocalPipeline(graph, FOUR, programs, 2, optimizer=adamw, workers=2, clip_grad_norm=0.3) as pipeline:
        for step in range(3):
            parts = [batch(2, seed=10 * worker + step) for worker in range(2)]
            losses, _ = plain.step(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
            results = pipeline.step(step, parts)
            assert results["m3", 0].losses + results["m3", 1].losses == pytest.approx(losses, abs=1e-10)


def test_the_learning_rate_schedule_steps_with_the_optimizer():
    graph = chain(2)
    meshes = ["m0", "m1"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 2), 2) as pipeline:
        for engine in pipeline.engines.values():
            update = engine._update
            update.lr_schedule = torch.optim.lr_scheduler.StepLR(update.optimizer, 1, 0.5)
        for step in range(3):
            pipeline.step(step, [batch(2)])
        for engine in pipeline.engines.values():
            assert engine._update.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**3)
            assert engine.state()["lr_schedule"]["last_epoch"] == 3


def poisoned(step):
    inputs, targets = batch(2, seed=step)
    targets[1][0, 0] = float("nan")
    return inputs, targets


def test_a_step_with_a_nan_loss_is_skipped_everywhere_when_told_so():
    graph = chain(4)
    programs = serial_programs(graph, FOUR, 2)
    with LocalPipeline(graph, FOUR, programs, 2, optimizer=adamw, non_finite="skip") as pipeline:
        pipeline.step(0, [batch(2)])
        before = parameters_of(pipeline)
        results = pipeline.step(1, [poisoned(1)])
        assert all(result.skipped for result in results.values())
        for name, value in parameters_of(pipeline).items():
            assert torch.equal(value, before[name])
        results = pipeline.step(2, [batch(2)])
        assert not any(result.skipped for result in results.values())
        assert any(not torch.equal(value, before[name]) for name, value in parameters_of(pipeline).items())


def test_a_nan_loss_of_one_worker_is_seen_by_all_even_if_gradients_are_finite():
    graph = chain(2)
    meshes = ["m0", "m1"]
    programs = serial_programs(graph, meshes, 2)

    def loss(output, target):
        return squared_error(output, torch.zeros_like(target)) + target.sum().detach()

    with LocalPipeline(graph, meshes, programs, 2, workers=2, non_finite="skip", loss=loss) as pipeline:
        results = pipeline.step(0, [batch(2), poisoned(1)])
    assert [result.skipped for result in results.values()] == [True] * 4


def test_a_nan_loss_stops_the_step_on_every_mesh_and_changes_nothing():
    graph = chain(4)
    with LocalPipeline(graph, FOUR, serial_programs(graph, FOUR, 2), 2, optimizer=adamw) as pipeline:
        before = parameters_of(pipeline)
        with pytest.raises(NonFiniteError, match="step 7"):
            pipeline.step(7, [poisoned(1)])
        assert len(pipeline.errors) == 4
        for name, value in parameters_of(pipeline).items():
            assert torch.equal(value, before[name])


def test_a_run_goes_on_from_a_saved_state_as_if_it_had_not_stopped():
    graph = skips()
    programs = serial_programs(graph, FOUR, 2)

    def run(pipeline, steps):
        return [pipeline.step(s, [batch(2, seed=s)])["m3", 0].losses for s in steps]

    with LocalPipeline(graph, FOUR, programs, 2, optimizer=adamw) as pipeline:
        losses = run(pipeline, range(4))
    with LocalPipeline(graph, FOUR, programs, 2, optimizer=adamw) as pipeline:
        run(pipeline, range(2))
        merged = {"parameters": {}, "buffers": {}, "optimizer": {}}
        for engine in pipeline.engines.values():
            state = engine.state()
            for kind in ("parameters", "buffers", "optimizer"):
                merged[kind].update(state[kind])
            merged["optimizer_groups"] = state["optimizer_groups"]
    # Another cut: two meshes instead of four, the same names.
    two = ["m0", "m0", "m1", "m1"]
    with LocalPipeline(graph, two, serial_programs(graph, two, 2), 2, optimizer=adamw) as pipeline:
        for engine in pipeline.engines.values():
            engine.load_state(merged)
        resumed = [pipeline.step(s, [batch(2, seed=s)])["m1", 0].losses for s in range(2, 4)]
    torch.testing.assert_close(resumed, losses[2:], rtol=1e-12, atol=1e-12)


def dropout_run(mesh_of_stage, programs, microbatches=6, steps=2):
    graph = chain(4, dropout=0.4)
    with LocalPipeline(graph, mesh_of_stage, programs, microbatches, optimizer=adamw, seed=5) as pipeline:
        losses = []
        for step in range(steps):
            results = pipeline.step(step, [batch(microbatches, seed=step)])
            losses.append(next(r.losses for r in results.values() if r.losses))
    return losses


def test_dropout_gives_the_same_run_under_every_schedule_and_placement():
    graph = chain(4, dropout=0.4)
    expected = dropout_run(FOUR, serial_programs(graph, FOUR, 6))
    with LocalPipeline(graph, FOUR, serial_programs(graph, FOUR, 6), 6, seed=6) as pipeline:
        assert pipeline.step(0, [batch(6)])["m3", 0].losses != pytest.approx(expected[0], rel=1e-3)
    for schedule in ("gpipe", "1f1b", "eager-1f1b", "zb-h1"):
        found = dropout_run(FOUR, planned(graph, FOUR, 6, schedule)[1])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    one = ["m0"] * 4
    torch.testing.assert_close(
        dropout_run(one, serial_programs(graph, one, 6)), expected, rtol=1e-12, atol=1e-12
    )


def test_seeds_differ_by_every_part():
    seeds = {derive_seed(a, b, c) for a in range(5) for b in range(5) for c in range(5)}
    assert len(seeds) == 125 and all(0 <= seed < 2**63 for seed in seeds)


def as_float32(graph):
    for stage in graph.stages:
        stage.float()
    edges = tuple(
        type(e)(e.source, e.target, e.tensor, e.shape, torch.float32, e.differentiable) for e in graph.edges
    )
    return type(graph)(graph.stages, edges, graph.tied)


def test_bf16_runs_stay_within_bf16_rounding_and_keep_fp32_parameters():
    graph = as_float32(skips())
    inputs, targets = batch(4, dtype=torch.float32)
    losses, gradients = Plain(graph).step(inputs, targets)
    with LocalPipeline(graph, FOUR, planned(graph, FOUR, 4, "1f1b")[1], 4, precision="bf16") as pipeline:
        engine = pipeline.engines["m1", 0]
        assert {buffer.dtype for buffer in engine._buffers.tensors} == {torch.bfloat16}
        results = pipeline.step(0, [(inputs, targets)])
        assert results["m3", 0].losses == pytest.approx(losses, rel=2e-2)
        norm = sum(g.square().sum() for g in gradients.values()).sqrt()
        for name, gradient in pipeline.gradients().items():
            assert gradient.dtype == torch.float32
            assert (gradient - gradients[name]).norm() < 2e-2 * norm
    assert all(p.dtype == torch.float32 for p in parameters_of(pipeline).values())


def test_batch_norm_counts_its_microbatches_as_the_plain_loop_does():
    graph = chain(2)
    graph.stages[1].lin = nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), graph.stages[1].lin)
    graph.stages[1].original_names = {n: f"1.{n}" for n in graph.stages[1].state_dict()}
    meshes = ["m0", "m1"]
    plain = Plain(graph)
    losses, _ = plain.step(*batch(4))
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 4), 4) as pipeline:
        assert pipeline.step(0, [batch(4)])["m1", 0].losses == pytest.approx(losses, abs=1e-10)
        buffers = pipeline.engines["m1", 0].state()["buffers"]
    expected = dict(plain.graph.stages[1].named_buffers())
    for name, value in expected.items():
        torch.testing.assert_close(buffers[f"1.{name}"], value)


def test_the_loss_is_the_mean_over_microbatches_in_the_gradient():
    graph = chain(1)
    inputs, targets = batch(4)
    with LocalPipeline(graph, ["m0"], serial_programs(graph, ["m0"], 4), 4) as pipeline:
        pipeline.step(0, [(inputs, targets)])
        found = pipeline.gradients()
    stage = graph.stages[0]
    squared_error(stage(torch.cat([x for (x,) in inputs]))[0], torch.cat(targets)).backward()
    torch.testing.assert_close(found["0.lin.weight"], stage.lin.weight.grad)


def test_abort_from_another_thread_ends_a_step_at_once():
    graph = chain(2)
    forwards = []

    def slow(module, x):
        forwards.append(x)
        time.sleep(0.4)
        return (module.lin(x),)

    graph.stages[1]._function = slow
    meshes = ["m0", "m1"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 8), 8) as pipeline:
        engine = pipeline.engines["m1", 0]
        threading.Timer(0.3, engine.abort, ["the user said so"]).start()
        with pytest.raises(AbortedError, match="the user said so"):
            pipeline.step(0, [batch(8)])
        assert len(forwards) < 8
        assert {type(error) for error in pipeline.errors.values()} == {AbortedError}
        with pytest.raises(EngineError, match="the engine ended before"):
            engine.run_step(1, *batch(8))


def test_only_an_optimizer_that_a_skipped_step_leaves_as_it_is_need_not_be_asked_by_the_host():
    def made(kind, **options):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return kind([parameter], lr=0.1, **options)

    assert skips_by_itself(made(torch.optim.AdamW, fused=True))
    assert skips_by_itself(made(torch.optim.SGD, fused=True))
    assert not skips_by_itself(made(torch.optim.AdamW))
    assert not skips_by_itself(None)
    momentum = made(torch.optim.SGD, fused=True, momentum=0.9)
    assert not skips_by_itself(momentum)
    momentum.step()
    assert skips_by_itself(momentum)
