"""REDUCE and STEP, precision, random state: the run is that of the plain loop."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn

from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import (
    Graph,
    LocalPipeline,
    Plain,
    batch,
    chain,
    linear,
    make_engine,
    make_stage,
    merged_state,
    planned,
    serial_programs,
    skips,
    squared_error,
    tied_chain,
)
from worker.contract.planned import MeshProgram
from worker.engine.optim.reduce_and_step import ModelUpdate, honours_found_inf
from worker.engine.results import NonFiniteError, RunOptions
from worker.model.export import trace
from worker.model.rng import RandomState, derive_seed, reseed_at_random_ops
from worker.transport.base import AbortedError, EngineError, Topology
from worker.transport.local import LocalTransport

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


@pytest.mark.parametrize("meshes", [["m0", "m1", "m2"], ["m0", "m1", "m0"]])
@pytest.mark.parametrize("clip", [0.05, 1e3])
def test_gradients_over_the_limit_are_scaled_to_it_and_others_left_as_they_are(clip, meshes):
    """With SGD, as Adam goes as far with any multiple of a gradient."""
    graph, sgd = tied_chain(), functools.partial(torch.optim.SGD, lr=0.5)
    plain = Plain(graph, sgd, clip)
    programs = serial_programs(graph, meshes, 2)
    with LocalPipeline(graph, meshes, programs, 2, optimizer=sgd, clip_grad_norm=clip) as pipeline:
        before = parameters_of(pipeline)
        plain.step(*batch(2))
        pipeline.step(0, [batch(2)])
        after = parameters_of(pipeline)
    for name, value in after.items():
        torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)
    moved = sum((after[name] - before[name]).square().sum() for name in after) ** 0.5 / 0.5
    assert float(moved) == pytest.approx(min(clip, plain.norm), rel=1e-4)


def test_a_tied_parameter_is_equal_on_both_meshes_after_every_step():
    graph = tied_chain()
    meshes = ["m0", "m1", "m2"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 2), 2, optimizer=adamw) as pipeline:
        for step in range(3):
            pipeline.step(step, [batch(2, seed=step)])
        first, last = (pipeline.engines[mesh, 0].state()["parameters"]["0.w"] for mesh in ("m0", "m2"))
        assert torch.equal(first, last)


def test_norm_and_flags_of_a_mesh_without_parameters_lie_on_its_device():
    """NCCL takes whatever address it is given: one of the host's memory would be read by the device."""
    reduced = []

    class Telling(LocalTransport):
        def all_reduce(self, group, tensor):
            reduced.append(tensor.device.type)

    topology = Topology(("m0", "m1"))
    transport = LocalTransport.group(topology)["m0", 0]
    transport.__class__ = Telling
    stage = make_stage(0, ["input:0"], ["h"], lambda m, x: (x * 2,))
    graph = Graph([stage, stage], ())
    engine = make_engine(
        transport,
        MeshProgram(serial_programs(graph, ["m0", "m1"], 1)["m0"], 1),
        graph,
        ["m0", "m1"],
        loss=squared_error,
        optimizer=adamw,
        options=RunOptions(device="meta"),
    )
    engine._update.begin()
    engine._update.reduce([])
    engine._update.step()
    assert reduced == ["meta"] and engine._update._norm.device.type == "meta"


def test_two_workers_a_mesh_train_on_the_mean_of_their_gradients():
    graph = skips()
    programs = serial_programs(graph, FOUR, 2)
    plain = Plain(graph, adamw, 0.3)
    with LocalPipeline(graph, FOUR, programs, 2, optimizer=adamw, workers=2, clip_grad_norm=0.3) as pipeline:
        for step in range(3):
            parts = [batch(2, seed=10 * worker + step) for worker in range(2)]
            losses, _ = plain.step(*whole(parts))
            results = pipeline.step(step, parts)
            assert results["m3", 0].losses + results["m3", 1].losses == pytest.approx(losses, abs=1e-10)


decaying = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5)


def whole(parts):
    """The batch of the plain loop: the workers' microbatches one after the other."""
    return tuple([tensor for part in parts for tensor in part[side]] for side in range(2))


def with_spare(used):
    """A chain whose second stage has a layer that takes part where `used(x)` says so."""
    graph = chain(2)

    def forward(module, x):
        x = torch.tanh(module.lin(x))
        return ((x + module.spare(x)) if used(x) else x,)

    graph.stages[1] = make_stage(1, ["h0"], ["output"], forward, lin=linear(), spare=linear())
    return graph


@pytest.mark.parametrize("workers", [1, 2])
def test_a_parameter_that_nobody_used_is_moved_by_neither_decay_nor_workers(workers):
    """Torch's optimizers pass over a parameter without a gradient; one of zeros decays."""
    graph, meshes = with_spare(lambda x: False), ["m0", "m1"]
    plain, before = Plain(graph, decaying), graph.stages[1].spare.weight.detach().clone()
    programs = serial_programs(graph, meshes, 2)
    with LocalPipeline(graph, meshes, programs, 2, optimizer=decaying, workers=workers) as pipeline:
        for step in range(3):
            parts = [batch(2, seed=10 * worker + step) for worker in range(workers)]
            plain.step(*whole(parts))
            pipeline.step(step, parts)
        found = parameters_of(pipeline)
        for name, value in found.items():
            torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)
    assert torch.equal(found["1.spare.weight"], before)


def test_a_parameter_that_one_worker_used_trains_on_what_that_one_made_of_the_whole_batch():
    graph, meshes = with_spare(lambda x: bool(x.sum() > 0)), ["m0", "m1"]
    data = [batch(1, seed=seed) for seed in range(12)]
    with torch.no_grad():
        sums = [graph.stages[0](*inputs[0])[0].sum() > 0 for inputs, _ in data]
    use = next(one for one, used in zip(data, sums, strict=True) if used)
    leave = next(one for one, used in zip(data, sums, strict=True) if not used)
    plain = Plain(graph, decaying)
    programs = serial_programs(graph, meshes, 1)
    with LocalPipeline(graph, meshes, programs, 1, optimizer=decaying, workers=2) as pipeline:
        for step, parts in enumerate([[use, leave], [leave, use]]):
            plain.step(*whole(parts))
            pipeline.step(step, parts)
            for worker in range(2):
                for name, value in pipeline.engines["m1", worker].state()["parameters"].items():
                    torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_tied_parameter_that_no_stage_made_a_gradient_of_keeps_its_value(workers):
    graph, meshes = tied_chain(), ["m0", "m1", "m2"]
    first, _, last = graph.stages
    first.more = linear()
    first.original_names = {name: f"0.{name}" for name, _ in first.named_parameters()}
    first._function = lambda m, x: (torch.tanh(m.more(x @ m.w.detach())),)
    last._function = lambda m, b: (b @ m.w.detach().T,)
    before = first.w.detach().clone()
    plain, programs = Plain(graph, decaying), serial_programs(graph, meshes, 2)
    with LocalPipeline(graph, meshes, programs, 2, optimizer=decaying, workers=workers) as pipeline:
        parts = [batch(2, seed=worker) for worker in range(workers)]
        plain.step(*whole(parts))
        pipeline.step(0, parts)
        after = parameters_of(pipeline)
    assert torch.equal(after["0.w"], before)
    for name, value in after.items():
        torch.testing.assert_close(value, plain.parameters[name].detach(), rtol=1e-9, atol=1e-11)


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
        merged = merged_state(pipeline)
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


def test_the_same_sample_meets_another_dropout_in_every_microbatch_step_and_worker():
    """All other runs compare a key with itself: one that leaves a part out is the same everywhere."""
    graph = chain(2, dropout=0.4)
    meshes = ["m0", "m1"]
    inputs, targets = batch(1)
    same = (inputs * 3, targets * 3)
    losses = {}
    programs = serial_programs(graph, meshes, 3)
    with LocalPipeline(graph, meshes, programs, 3, optimizer=None, workers=2, seed=5) as pipeline:
        for step in range(3):
            results = pipeline.step(step, [same, same])
            for worker in range(2):
                for microbatch, loss in enumerate(results["m1", worker].losses):
                    losses.setdefault(loss, []).append((step, worker, microbatch))
    assert [places for places in losses.values() if len(places) > 1] == []
    assert len(losses) == 3 * 2 * 3


class Masks(nn.Module):
    """Which elements two dropouts of one stage keep."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(64, 64)
        self.one, self.two = nn.Dropout(), nn.Dropout()

    def forward(self, x):
        kept = self.scale(x)
        return torch.stack([self.one(kept), self.two(kept)])


def test_two_operations_of_a_stage_and_two_stages_without_a_graph_draw_different_masks():
    traced = cut_evenly(trace(Masks(), (torch.ones(64),)), 1).stages[0]
    state = RandomState(5, 0, torch.device("cpu"))
    assert reseed_at_random_ops(traced, state) == 2
    with state.forward(0, 0, 0):
        first, second = traced(torch.ones(64))[0]
    assert not torch.equal(first, second)
    with state.forward(0, 0, 0):
        torch.rand(3)  # what else draws in between changes nothing
        assert torch.equal(traced(torch.ones(64))[0], torch.stack([first, second]))

    drawn = []
    for stage in (0, 1):
        with state.forward(0, 0, stage):
            drawn.append(torch.rand(8))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("part", ["seed", "worker", "step", "microbatch", "operation"])
def test_a_random_operation_draws_anew_when_any_part_of_its_key_changes(part):
    def draw(seed=5, worker=0, step=0, microbatch=0, operation="dropout"):
        state = RandomState(seed, worker, torch.device("cpu"))
        with state.forward(step, microbatch, 0):
            state.restart(operation)
            return torch.rand(8)

    changed = {"operation": "dropout_1"}.get(part, 1)
    assert torch.equal(draw(), draw())
    assert not torch.equal(draw(), draw(**{part: changed}))


def test_parts_of_a_key_do_not_run_together_and_fit_what_a_generator_takes():
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert all(0 <= derive_seed(part) < 2**63 for part in range(100))
    assert any(derive_seed(part) >= 2**62 for part in range(100)), "no bit is given away"


def as_float32(graph):
    for stage in graph.stages:
        stage.float()
    edges = tuple(
        type(e)(e.source, e.target, e.tensor, e.shape, torch.float32, e.differentiable) for e in graph.edges
    )
    return type(graph)(graph.stages, edges, graph.tied)


@pytest.mark.parametrize(("transfers", "wire"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_bf16_runs_stay_within_bf16_rounding_and_keep_fp32_parameters(transfers, wire):
    graph = as_float32(skips())
    inputs, targets = batch(4, dtype=torch.float32)
    losses, gradients = Plain(graph).step(inputs, targets)
    options = {"precision": "bf16", "transfers": transfers}
    with LocalPipeline(graph, FOUR, planned(graph, FOUR, 4, "1f1b")[1], 4, **options) as pipeline:
        engine = pipeline.engines["m1", 0]
        assert {buffer.dtype for buffer in engine._buffers.tensors} == {wire}
        results = pipeline.step(0, [(inputs, targets)])
        assert results["m3", 0].losses == pytest.approx(losses, rel=2e-2)
        norm = sum(g.square().sum() for g in gradients.values()).sqrt()
        for name, gradient in pipeline.gradients().items():
            assert gradient.dtype == torch.float32
            assert (gradient - gradients[name]).norm() < 2e-2 * norm
    assert all(p.dtype == torch.float32 for p in parameters_of(pipeline).values())


def normalised(count):
    """A chain whose second stage keeps running statistics."""
    graph = chain(count)
    graph.stages[1].lin = nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64), graph.stages[1].lin)
    graph.stages[1].original_names = {n: f"1.{n}" for n in graph.stages[1].state_dict()}
    return graph


def test_batch_norm_counts_its_microbatches_as_the_plain_loop_does():
    graph = normalised(2)
    meshes = ["m0", "m1"]
    plain = Plain(graph)
    losses, _ = plain.step(*batch(4))
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 4), 4) as pipeline:
        assert pipeline.step(0, [batch(4)])["m1", 0].losses == pytest.approx(losses, abs=1e-10)
        buffers = pipeline.engines["m1", 0].state()["buffers"]
    expected = dict(plain.graph.stages[1].named_buffers())
    for name, value in expected.items():
        torch.testing.assert_close(buffers[f"1.{name}"], value)


def test_a_resumed_run_has_the_running_statistics_and_evaluates_as_the_run_that_went_on():
    graph = normalised(3)
    plain = Plain(graph, adamw)
    meshes = ["m0", "m1", "m2"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 4), 4, optimizer=adamw) as pipeline:
        for step in range(3):
            plain.step(*batch(4, seed=step))
            pipeline.step(step, [batch(4, seed=step)])
        saved = merged_state(pipeline)
    buffers = dict(plain.graph.stages[1].named_buffers())
    assert saved["buffers"].keys() == {f"1.{name}" for name in buffers} and len(buffers) == 3

    for stage in graph.stages:
        stage.eval()
    two = ["m0", "m0", "m1"]
    with LocalPipeline(graph, two, planned(graph, two, 4, "inference")[1], 4) as pipeline:
        for engine in pipeline.engines.values():
            engine.load_state(saved)
        resumed = pipeline.engines["m0", 0].state()["buffers"]
        for name, value in buffers.items():
            torch.testing.assert_close(resumed[f"1.{name}"], value, rtol=1e-12, atol=1e-12)
        inputs, _ = batch(4, seed=9)
        outputs = pipeline.step(0, [(inputs, None)])["m1", 0].outputs
    for (x,), output in zip(inputs, outputs, strict=True):
        for stage in plain.graph.stages:
            (x,) = stage.eval()(x)
        torch.testing.assert_close(output, x.detach(), rtol=1e-9, atol=1e-11)


def test_a_resumed_run_goes_on_at_the_learning_rate_that_its_schedule_had_reached():
    graph = chain(2)
    meshes = ["m0", "m1"]

    def pipeline():
        made = LocalPipeline(graph, meshes, serial_programs(graph, meshes, 2), 2, optimizer=adamw)
        for engine in made.engines.values():
            update = engine._update
            update.lr_schedule = torch.optim.lr_scheduler.StepLR(update.optimizer, 2, 0.5)
        return made

    def rates(running, steps):
        for step in steps:
            running.step(step, [batch(2, seed=step)])
            yield running.engines["m0", 0]._update.optimizer.param_groups[0]["lr"]

    with pipeline() as unbroken:
        expected = list(rates(unbroken, range(6)))
    with pipeline() as first:
        assert list(rates(first, range(3))) == expected[:3]
        saved = merged_state(first)
    with pipeline() as second:
        for engine in second.engines.values():
            engine.load_state(saved)
        assert list(rates(second, range(3, 6))) == pytest.approx(expected[3:])


def test_a_run_with_a_schedule_goes_on_from_one_without_and_the_other_way_round():
    """Someone adds or drops `lr_schedule` and resumes: the weights are what the checkpoint is for."""
    graph = chain(1)

    def pipeline(scheduled):
        made = LocalPipeline(graph, ["m0"], serial_programs(graph, ["m0"], 2), 2, optimizer=adamw)
        update = made.engines["m0", 0]._update
        if scheduled:
            update.lr_schedule = torch.optim.lr_scheduler.StepLR(update.optimizer, 1, 0.5)
        return made

    for scheduled in (False, True):
        with pipeline(scheduled) as first:
            first.step(0, [batch(2)])
            saved = merged_state(first)
        with pipeline(not scheduled) as second:
            engine = second.engines["m0", 0]
            engine.load_state(saved)
            found = engine.state()
            assert (found["lr_schedule"] or {}).get("last_epoch", 0) == 0
        for name, value in saved["parameters"].items():
            assert torch.equal(found["parameters"][name], value)


def test_a_mesh_without_an_optimizer_saves_and_takes_back_its_parameters_alone():
    graph = chain(1)
    with LocalPipeline(graph, ["m0"], serial_programs(graph, ["m0"], 2), 2, optimizer=None) as pipeline:
        engine = pipeline.engines["m0", 0]
        saved = copy.deepcopy(engine.state())
        assert (saved["optimizer"], saved["optimizer_groups"], saved["lr_schedule"]) == ({}, [], None)
        results = pipeline.step(0, [batch(2)])
        assert results["m0", 0].grad_norm > 0, "a norm is told though nothing is updated"
        engine.load_state({**saved, "parameters": {n: p + 1 for n, p in saved["parameters"].items()}})
        for name, value in parameters_of(pipeline).items():
            assert torch.equal(value, saved["parameters"][name] + 1)


def test_a_state_that_lacks_a_parameter_or_a_buffer_is_refused_by_its_name():
    graph = normalised(2)
    meshes = ["m0", "m1"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 2), 2) as pipeline:
        saved = merged_state(pipeline)
        engine = pipeline.engines["m1", 0]
        for kind, name in (("parameters", "1.lin.0.weight"), ("buffers", "1.lin.0.running_mean")):
            less = {**saved, kind: {n: v for n, v in saved[kind].items() if n != name}}
            with pytest.raises(KeyError, match=f"no {kind[:-1]} '{name}'"):
                engine.load_state(less)


def test_the_loss_is_the_mean_over_microbatches_in_the_gradient():
    graph = chain(1)
    inputs, targets = batch(4)
    with LocalPipeline(graph, ["m0"], serial_programs(graph, ["m0"], 4), 4) as pipeline:
        pipeline.step(0, [(inputs, targets)])
        found = pipeline.gradients()
    stage = graph.stages[0]
    squared_error(stage(torch.cat([x for (x,) in inputs]))[0], torch.cat(targets)).backward()
    torch.testing.assert_close(found["0.lin.weight"], stage.lin.weight.grad)


def test_an_abort_from_another_thread_ends_a_step_after_the_action_that_runs():
    graph = chain(2)
    forwards, begun, aborted = [], threading.Event(), threading.Event()

    def forward(module, x):
        forwards.append(x)
        if len(forwards) == 2:
            begun.set()
            assert aborted.wait(60)
        return (module.lin(x),)

    graph.stages[1]._function = forward
    meshes = ["m0", "m1"]
    with LocalPipeline(graph, meshes, serial_programs(graph, meshes, 8), 8) as pipeline:
        engine = pipeline.engines["m1", 0]

        def abort():
            begun.wait(60)
            engine.abort("the user said so")
            aborted.set()

        threading.Thread(target=abort).start()
        with pytest.raises(AbortedError, match="the user said so"):
            pipeline.step(0, [batch(8)])
        assert len(forwards) == 2
        assert {type(error) for error in pipeline.errors.values()} == {AbortedError}
        with pytest.raises(EngineError, match="the engine ended before"):
            engine.run_step(1, *batch(8))


def test_only_an_optimizer_that_a_skipped_step_leaves_as_it_is_need_not_be_asked_by_the_host():
    def made(kind, **options):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return kind([parameter], lr=0.1, **options)

    assert honours_found_inf(made(torch.optim.AdamW, fused=True))
    assert honours_found_inf(made(torch.optim.SGD, fused=True))
    assert not honours_found_inf(made(torch.optim.AdamW))
    assert not honours_found_inf(None)
    momentum = made(torch.optim.SGD, fused=True, momentum=0.9)
    assert not honours_found_inf(momentum)
    momentum.step()
    assert honours_found_inf(momentum)


class OnDevice(torch.Tensor):
    """A norm that says it lies on a device, so that the host is not to read it within the step."""

    is_cuda = True

    def __float__(self):
        raise AssertionError("the host waits for the device within a step")


@pytest.mark.parametrize(
    "kind",
    [
        functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
        functools.partial(torch.optim.SGD, lr=0.1, fused=True),
    ],
    ids=["AdamW", "SGD"],
)
def test_an_optimizer_that_skips_by_itself_is_told_of_a_nan_and_changes_nothing(kind, monkeypatch):
    graph = as_float32(chain(2))
    meshes = ["m0", "m1"]
    norm_of, finish = ModelUpdate._global_norm, ModelUpdate.finish

    def on_device(self, losses):
        return norm_of(self, losses).as_subclass(OnDevice)

    def after_the_step(self, number):
        self._norm = self._norm.as_subclass(torch.Tensor)
        return finish(self, number)

    def run(*, poison, told):
        with monkeypatch.context() as patch:
            if told:
                patch.setattr(ModelUpdate, "_global_norm", on_device)
                patch.setattr(ModelUpdate, "finish", after_the_step)
            programs = serial_programs(graph, meshes, 2)
            options = {"optimizer": kind, "non_finite": "skip", "clip_grad_norm": 0.5}
            with LocalPipeline(graph, meshes, programs, 2, **options) as pipeline:
                skipped = []
                for number in range(4):
                    inputs, targets = batch(2, seed=number, dtype=torch.float32)
                    if number in poison:
                        targets[1][0, 0] = float("nan")
                    results = pipeline.step(number, [(inputs, targets)])
                    skipped += [number for result in results.values() if result.skipped]
                return skipped, merged_state(pipeline)

    skipped, found = run(poison={0, 2}, told=True)
    asked, expected = run(poison={0, 2}, told=False)
    assert sorted(skipped) == sorted(asked) == [0, 0, 2, 2]
    for name, value in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], value, rtol=1e-6, atol=1e-7)
        assert torch.isfinite(value).all()
    for name, entry in expected["optimizer"].items():
        torch.testing.assert_close(found["optimizer"][name], entry, rtol=1e-6, atol=1e-7)
