"""GPT and U-Net, traced and cut by worker.model, under every schedule and placement."""

import copy
import functools

import pytest
import torch
from torch.nn import functional

from tests.tiers import some_by_day
from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import LocalPipeline, planned
from worker.examples import gpt, unet
from worker.model.export import trace

MICROBATCHES = 4
ROWS = 2
PLACEMENTS = {
    "one mesh": (["m0"] * 4, ["auto"]),
    "two meshes": (["m0", "m0", "m1", "m1"], ["auto"]),
    "four meshes": (["m0", "m1", "m2", "m3"], ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "auto"]),
    "v": (["m0", "m1", "m1", "m0"], ["auto", "zb-v"]),
    "interleaved": (["m0", "m1", "m0", "m1"], ["interleaved-1f1b"]),
}
CASES = [(placement, schedule) for placement, (_, names) in PLACEMENTS.items() for schedule in names]


class Job:
    """A model, its microbatches and its plain gradients."""

    def __init__(self, model, inputs, targets, loss):
        self.model, self.inputs, self.targets, self.loss = model, inputs, targets, loss
        self.traced = trace(model, inputs[0])

    def cut(self, stages):
        return cut_evenly(self.traced, stages)

    def plain(self):
        model = copy.deepcopy(self.model)
        losses = []
        for arguments, target in zip(self.inputs, self.targets, strict=True):
            loss = self.loss(model(*arguments), target)
            (loss / len(self.inputs)).backward()
            losses.append(loss.item())
        return losses, {name: parameter.grad for name, parameter in model.named_parameters()}

    def pipeline(self, stages, mesh_of_stage, schedule, **options):
        graph = self.cut(stages)
        _, programs = planned(graph, mesh_of_stage, len(self.inputs), schedule)
        return LocalPipeline(graph, mesh_of_stage, programs, len(self.inputs), loss=self.loss, **options)


@functools.cache
def gpt_job(dropout=0.0, tied=False):
    torch.manual_seed(0)
    model = gpt.build(layers=4, width=16, heads=2, length=8, vocab=32, dropout=dropout, tied=tied).double()
    draw = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 32, (ROWS, 9), generator=draw) for _ in range(MICROBATCHES)]
    return Job(
        model,
        [(t[:, :-1].contiguous(),) for t in tokens],
        [t[:, 1:].contiguous() for t in tokens],
        functional.cross_entropy,
    )


@functools.cache
def unet_job():
    torch.manual_seed(0)
    model = unet.build(channels=1, width=4, levels=2).double()
    draw = torch.Generator().manual_seed(1)
    images = [
        torch.randn(ROWS, 1, 8, 8, generator=draw, dtype=torch.float64) for _ in range(2 * MICROBATCHES)
    ]
    inputs, targets = [(image,) for image in images[:MICROBATCHES]], images[MICROBATCHES:]
    return Job(model, inputs, targets, functional.mse_loss)


JOBS = {"gpt": gpt_job, "tied gpt": functools.partial(gpt_job, tied=True), "unet": unet_job}


@pytest.mark.parametrize(("placement", "schedule"), CASES)
@some_by_day("name", JOBS, by_day=2)
def test_gradients_equal_those_of_the_unsplit_model(name, placement, schedule):
    job = JOBS[name]()
    losses, gradients = job.plain()
    with job.pipeline(4, PLACEMENTS[placement][0], schedule) as pipeline:
        results = pipeline.step(0, [(job.inputs, job.targets)])
        found = [loss for result in results.values() for loss in result.losses]
        assert found == pytest.approx(losses, abs=1e-10)
        measured = pipeline.gradients()
        assert measured.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(measured[parameter], gradient, rtol=1e-10, atol=1e-11)


def test_skips_of_the_unet_cross_more_than_one_stage():
    assert any(edge.target - edge.source > 1 for edge in unet_job().cut(4).edges)


def test_dropout_gives_the_same_run_under_every_cut():
    job = gpt_job(dropout=0.3)
    losses = {}
    for stages, meshes, schedule in [
        (1, ["m0"], "auto"),
        (2, ["m0", "m1"], "1f1b"),
        (4, ["m0", "m1", "m2", "m3"], "zb-h1"),
        (4, ["m0", "m1", "m1", "m0"], "auto"),
    ]:
        with job.pipeline(stages, meshes, schedule, seed=3) as pipeline:
            results = [pipeline.step(step, [(job.inputs, job.targets)]) for step in range(2)]
        key = (stages, schedule)
        losses[key] = [loss for step in results for result in step.values() for loss in result.losses]
    first = losses.pop((1, "auto"))
    assert first[0] != pytest.approx(gpt_job().plain()[0][0], rel=1e-6)
    for found in losses.values():
        assert found == pytest.approx(first, abs=1e-10)


def test_bf16_gpt_learns_as_in_fp32_within_rounding():
    torch.manual_seed(0)
    job = gpt_job()
    single = Job(copy.deepcopy(job.model).float(), job.inputs, job.targets, job.loss)
    losses, _ = single.plain()
    with single.pipeline(4, ["m0", "m1", "m2", "m3"], "1f1b", precision="bf16") as pipeline:
        results = pipeline.step(0, [(single.inputs, single.targets)])
    assert results["m3", 0].losses == pytest.approx(losses, rel=1e-2)
