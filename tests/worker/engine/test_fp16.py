"""fp16 by autocast with a dynamic loss scale: the pipelined run is the plain loop with torch.amp.GradScaler."""

import functools
import random

import pytest
import torch
from torch import nn

from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import LocalPipeline, merged_state, planned, serial_programs
from worker.contract.job import LossScaling
from worker.engine.optim import grad_scaler
from worker.engine.optim.grad_scaler import PipelineGradScaler
from worker.engine.results import NonFiniteError
from worker.model.export import trace

MESHES = ["m0", "m1", "m2", "m3"]
MICROBATCHES, ROWS, WIDTH = 2, 8, 16
SCALING = LossScaling(init_scale=2.0**10)


@pytest.fixture(autouse=True)
def scale_grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_scaler, "GROWTH_INTERVAL", 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.lin(self.norm(x)))


class HalfBlock(nn.Module):
    """What it gives, and the gradient that it takes, travel in fp16."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.lin(x))


def model_of(block=Block):
    torch.manual_seed(3)
    return nn.Sequential(*(block() for _ in range(4)))


def loss_of(output, target):
    return (output.float() - target).square().mean()


def batch(step, planted=()):
    """A batch; in a planted step one value is so large that its gradient overflows when it is scaled."""
    draw = torch.Generator().manual_seed(step)
    inputs = [(torch.randn(ROWS, WIDTH, generator=draw),) for _ in range(MICROBATCHES)]
    targets = [torch.randn(ROWS, WIDTH, generator=draw) for _ in range(MICROBATCHES)]
    if step in planted:
        targets[1][0, 0] = 3e4
    return inputs, targets


def scaler_of(scaling):
    return torch.amp.GradScaler(
        "cpu",
        init_scale=scaling.init_scale,
        growth_factor=grad_scaler.GROWTH_FACTOR,
        backoff_factor=grad_scaler.BACKOFF_FACTOR,
        growth_interval=grad_scaler.GROWTH_INTERVAL,
    )


def plain(steps, planted, optimizer, clip, scaling=SCALING, block=Block):
    """The usual loop: what each step's losses, scale and norm were, whether it was skipped, and the parameters."""
    model, told = model_of(block), []
    made, scaler = optimizer(list(model.parameters())), scaler_of(scaling)
    for step in range(steps):
        made.zero_grad()
        losses = []
        for (x,), target in zip(*batch(step, planted), strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(model(x), target)
            scaler.scale(loss / MICROBATCHES).backward()
            losses.append(loss.item())
        used = scaler.get_scale()
        scaler.unscale_(made)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(made)
        scaler.update()
        told.append((losses, used, norm.item(), scaler.get_scale() < used))
    return told, dict(model.named_parameters()), scaler


def pipeline_of(meshes, schedule, optimizer, clip, scaling=SCALING, block=Block, **options):
    graph = cut_evenly(trace(model_of(block), batch(0)[0][0], autocast=torch.float16), 4)
    assert {e.dtype for e in graph.edges} == {torch.float32 if block is Block else torch.float16}
    if schedule == "serial":
        programs = serial_programs(graph, meshes, MICROBATCHES, split=True)
    else:
        programs = planned(graph, meshes, MICROBATCHES, schedule)[1]
    return LocalPipeline(
        graph,
        meshes,
        programs,
        MICROBATCHES,
        precision="fp16",
        loss_scaling=scaling,
        optimizer=optimizer,
        clip_grad_norm=clip,
        **{"loss": loss_of, **options},
    )


adamw = functools.partial(torch.optim.AdamW, lr=0.01)
momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("schedule", "recomputed", "optimizer", "block"),
    [
        ("1f1b", (), adamw, Block),
        ("zb-h1", (), adamw, Block),
        ("zb-h1", (0, 1, 2, 3), momentum, Block),
        ("zb-h1", (), momentum, HalfBlock),
    ],
    ids=["1f1b", "zb-h1", "recomputed", "half"],
)
def test_losses_scales_norms_and_skipped_steps_are_those_of_a_loop_with_torchs_scaler(
    schedule, recomputed, optimizer, block
):
    planted = {1, 6}
    told, parameters, scaler = plain(9, planted, optimizer, 0.5, block=block)
    assert [skipped for *_, skipped in told] == [step in planted for step in range(9)]
    options = {"recomputed": recomputed, "block": block}
    with pipeline_of(MESHES, schedule, optimizer, 0.5, **options) as pipeline:
        for step, (losses, scale, norm, skipped) in enumerate(told):
            results = pipeline.step(step, [batch(step, planted)])
            assert results["m3", 0].losses == pytest.approx(losses, rel=1e-6 if step < 2 else 1e-4)
            for result in results.values():
                assert (result.loss_scale, result.overflowed, result.skipped) == (scale, skipped, skipped)
                if not skipped:
                    assert result.grad_norm == pytest.approx(norm, rel=1e-5 if step < 2 else 1e-3)
        state = merged_state(pipeline)
    assert state["loss_scale"]["scale"] == scaler.get_scale() == 2.0**11
    assert state["loss_scale"]["growth_tracker"] == scaler.state_dict()["_growth_tracker"]
    for name, parameter in parameters.items():
        torch.testing.assert_close(state["parameters"][name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_two_workers_a_mesh_skip_alike_though_only_one_overflowed():
    def half(step, worker):
        rows = slice(worker * ROWS // 2, (worker + 1) * ROWS // 2)
        inputs, targets = batch(step, {1})
        return [(x[rows],) for (x,) in inputs], [target[rows] for target in targets]

    told, parameters, _ = plain(4, {1}, momentum, 0.5)
    graph = cut_evenly(trace(model_of(), half(0, 0)[0][0], autocast=torch.float16), 2)
    meshes = ["m0", "m1"]
    programs = planned(graph, meshes, MICROBATCHES, "1f1b")[1]
    options = {"precision": "fp16", "loss_scaling": SCALING, "clip_grad_norm": 0.5, "optimizer": momentum}
    with LocalPipeline(graph, meshes, programs, MICROBATCHES, workers=2, loss=loss_of, **options) as pipeline:
        for step, (losses, scale, _, skipped) in enumerate(told):
            results = pipeline.step(step, [half(step, 0), half(step, 1)])
            assert {(r.loss_scale, r.overflowed) for r in results.values()} == {(scale, skipped)}
            found = [sum(pair) / 2 for pair in zip(*(results["m1", w].losses for w in (0, 1)), strict=True)]
            assert found == pytest.approx(losses, rel=1e-5 if step < 2 else 1e-4)
        state = merged_state(pipeline)
    for name, parameter in parameters.items():
        torch.testing.assert_close(state["parameters"][name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_an_overflow_of_one_mesh_alone_skips_the_step_on_all():
    """Of the first stage's weights only: what its backward is given is finite, and so is every other gradient."""
    with pipeline_of(MESHES, "1f1b", adamw, None) as pipeline:
        pipeline.step(0, [batch(0)])
        before = merged_state(pipeline)["parameters"]
        update = pipeline.engines["m0", 0]._update
        reduce = update.reduce

        def planted(losses):
            next(iter(update.parameters.values())).grad[0] = float("inf")
            reduce(losses)

        update.reduce = planted
        results = pipeline.step(1, [batch(1)])
        assert [result.overflowed for result in results.values()] == [True] * 4
        after = merged_state(pipeline)
    assert after["loss_scale"] == {"scale": 2.0**9, "growth_tracker": 0, "skipped_steps": 1}
    for name, value in after["parameters"].items():
        assert torch.equal(value, before[name])


def test_a_run_goes_on_bit_for_bit_on_another_layout_with_the_scale_that_was_saved():
    planted, two = {1}, ["m0", "m0", "m1", "m1"]
    with pipeline_of(MESHES, "1f1b", adamw, 0.5) as pipeline:
        for step in range(5):
            pipeline.step(step, [batch(step, planted)])
            if step == 2:
                saved = merged_state(pipeline)
        expected = merged_state(pipeline)
    assert saved["loss_scale"]["scale"] != SCALING.init_scale and saved["loss_scale"]["growth_tracker"] == 1
    with pipeline_of(two, "serial", adamw, 0.5) as pipeline:
        for engine in pipeline.engines.values():
            engine.load_state(saved)
        for step in (3, 4):
            pipeline.step(step, [batch(step, planted)])
        found = merged_state(pipeline)
    assert found["loss_scale"] == expected["loss_scale"]
    for kind in ("parameters", "optimizer"):
        torch.testing.assert_close(found[kind], expected[kind], rtol=0, atol=0)


def test_a_run_whose_gradients_never_become_finite_fails_by_name_after_the_limit(monkeypatch):
    monkeypatch.setattr(grad_scaler, "MAX_SKIPPED_STEPS", 3)
    always = set(range(10))
    poison = functools.partial(batch, planted=always)
    scaling = LossScaling(init_scale=2.0**10)

    def loss(output, target):
        return loss_of(output, target) * torch.where(target.max() > 1e4, float("nan"), 1.0)

    with pipeline_of(MESHES, "1f1b", adamw, None, scaling, loss=loss) as pipeline:
        for step in range(2):
            assert all(result.skipped for result in pipeline.step(step, [poison(step)]).values())
        with pytest.raises(
            NonFiniteError, match=r"step 2: the gradients of 3 steps in a row.*loss scale 256"
        ):
            pipeline.step(2, [poison(2)])


def test_a_loss_that_is_no_number_with_finite_gradients_is_no_overflow():
    def loss(output, target):
        return loss_of(output, target) + torch.full((), float("nan"))

    with (
        pipeline_of(MESHES, "1f1b", adamw, None, loss=loss) as pipeline,
        pytest.raises(NonFiniteError, match="step 0: the loss or the gradient norm"),
    ):
        pipeline.step(0, [batch(0)])


def test_the_scale_follows_torchs_to_the_bit_also_to_its_ends(monkeypatch):
    draw = random.Random(4)
    monkeypatch.setattr(grad_scaler, "MAX_SKIPPED_STEPS", 10**6)
    for scaling, growth, backoff, interval in (
        (LossScaling(init_scale=2.0**126), 2.0, 0.5, 1),
        (LossScaling(), 1.3, 0.7, 3),
    ):
        for name, value in (
            ("GROWTH_FACTOR", growth),
            ("BACKOFF_FACTOR", backoff),
            ("GROWTH_INTERVAL", interval),
        ):
            monkeypatch.setattr(grad_scaler, name, value)
        ours, theirs = PipelineGradScaler(scaling, "cpu"), scaler_of(scaling)
        parameter = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for step in range(200):
            overflow = draw.random() < 0.3
            loss = torch.full((), 1.0, requires_grad=True)
            (theirs.scale(loss)).backward()
            assert torch.equal(ours.gradient(loss.detach()), loss.grad)
            gradient = torch.tensor([1.0, float("inf") if overflow else 2.0, -3.0])
            parameter.grad, mine = gradient.clone(), gradient.clone()
            theirs.unscale_(optimizer)
            ours.unscale([mine])
            assert torch.equal(mine, parameter.grad)
            theirs.step(optimizer)
            theirs.update()
            assert ours.end_step(step)[1] is overflow
            assert ours.scale == theirs.get_scale()
            assert ours.state()["growth_tracker"] == theirs.state_dict()["_growth_tracker"]
