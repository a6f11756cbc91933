"""BatchNorm over the workers of a mesh: the run is that of the plain loop over whole microbatches, statistics too."""

import copy

import pytest
import torch
from torch import nn

from tests.worker.cuts import cut_evenly
from tests.worker.engine.engine_support import LocalPipeline, serial_programs
from worker.model.export import trace

MICROBATCHES, ROWS, CHANNELS = 3, 8, 4


class Joined(nn.Module):
    """Convolutions with batch norms, one beside the way of the gradient, and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS), nn.ReLU())
        self.second = nn.Sequential(
            nn.Dropout(dropout),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
            nn.BatchNorm2d(CHANNELS, momentum=0.3),
        )
        self.beside = nn.Sequential(nn.Conv2d(2, CHANNELS, 1), nn.BatchNorm2d(CHANNELS, affine=False))
        self.other = nn.Sequential(nn.Conv2d(2, CHANNELS, 1), nn.BatchNorm2d(CHANNELS))
        self.last = nn.Sequential(
            nn.Flatten(),
            nn.Linear(CHANNELS * 16, 6),
            nn.BatchNorm1d(6, track_running_stats=False),
            nn.Linear(6, 2),
        )

    def forward(self, x):
        h = self.first(x)
        return self.last(self.second(h) + self.beside(x) * torch.sigmoid(self.other(x)))


def loss_of(output, target):
    return (output.float() - target).square().mean()


def batch(step, worker=None, workers=2):
    draw = torch.Generator().manual_seed(step)
    inputs = [torch.randn(ROWS, 2, 4, 4, generator=draw) * 2 + 1 for _ in range(MICROBATCHES)]
    targets = [torch.randn(ROWS, 2, generator=draw) for _ in range(MICROBATCHES)]
    share = ROWS if worker is None else ROWS // workers
    rows = slice(None) if worker is None else slice(worker * share, (worker + 1) * share)
    return [(x[rows],) for x in inputs], [target[rows] for target in targets]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain(model, steps, precision=None):
    """Losses of a loop over whole microbatches on one worker; `model` is trained."""
    optimizer, found = sgd(model.parameters()), []
    for step in range(steps):
        optimizer.zero_grad()
        losses = []
        for (x,), target in zip(*batch(step), strict=True):
            with torch.autocast("cpu", dtype=precision or torch.bfloat16, enabled=precision is not None):
                loss = loss_of(model(x), target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(losses)
    return found


def pipeline_of(model, split, workers=2, autocast=None, **options):
    graph = cut_evenly(trace(model, batch(0, 0, workers)[0][0], autocast=autocast), 3)
    meshes = ["m0", "m1", "m2"]
    programs = serial_programs(graph, meshes, MICROBATCHES, split=split)
    return LocalPipeline(
        graph, meshes, programs, MICROBATCHES, workers=workers, loss=loss_of, optimizer=sgd, **options
    )


def mean_losses(results, workers):
    columns = zip(*(results["m2", worker].losses for worker in range(workers)), strict=True)
    return [sum(column) / workers for column in columns]


def model_of(**arguments):
    torch.manual_seed(2)
    return Joined(**arguments)


@pytest.mark.parametrize(
    ("split", "workers", "recomputed"),
    [
        (False, 2, ()),
        (True, 2, ()),
        (True, 4, (0, 1, 2)),
        (False, 2, {0: "by_block"}),
    ],
    ids=["whole", "split", "four workers, recomputed", "recomputed by block"],
)
def test_losses_gradients_and_running_statistics_are_those_of_whole_microbatches(split, workers, recomputed):
    model = model_of()
    with pipeline_of(model, split, workers, recomputed=recomputed, sync_batch_norm=True) as pipeline:
        reference = copy.deepcopy(model)
        for step, expected in enumerate(plain(reference, 3)):
            results = pipeline.step(step, [batch(step, w, workers) for w in range(workers)])
            assert mean_losses(results, workers) == pytest.approx(expected, rel=1e-5)
        states = {key: engine.state() for key, engine in pipeline.engines.items()}
    buffers = dict(reference.named_buffers())
    seen = set()
    for (_, worker), state in states.items():
        for name, value in state["buffers"].items():
            torch.testing.assert_close(
                value, buffers[name], rtol=1e-5, atol=1e-6, msg=f"{name} of worker {worker}"
            )
            seen.add(name)
        for name, value in state["parameters"].items():
            torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-6)
    assert seen == set(buffers)


def test_without_it_each_worker_has_the_statistics_of_its_own_rows():
    model = model_of()
    with pipeline_of(model, False) as pipeline:
        results = pipeline.step(0, [batch(0, 0), batch(0, 1)])
        assert mean_losses(results, 2) != pytest.approx(plain(copy.deepcopy(model), 1)[0], rel=1e-3)
        name = "first.1.running_mean"
        found = [pipeline.engines["m0", worker].state()["buffers"][name] for worker in (0, 1)]
        assert not torch.equal(*found)


def test_under_autocast_it_rounds_as_the_plain_run_does():
    model = model_of()
    with pipeline_of(
        model, True, autocast=torch.bfloat16, precision="bf16", sync_batch_norm=True
    ) as pipeline:
        results = pipeline.step(0, [batch(0, 0), batch(0, 1)])
    assert mean_losses(results, 2) == pytest.approx(plain(model, 1, torch.bfloat16)[0], rel=2e-2)


def test_workers_in_one_process_that_draw_for_dropout_do_not_wait_for_each_other_for_ever():
    with pipeline_of(model_of(dropout=0.5), False, sync_batch_norm=True) as pipeline:
        first = pipeline.step(0, [batch(0, 0), batch(0, 1)])
    with pipeline_of(model_of(dropout=0.5), False, sync_batch_norm=True) as pipeline:
        again = pipeline.step(0, [batch(0, 0), batch(0, 1)])
    assert mean_losses(first, 2) == mean_losses(again, 2)
