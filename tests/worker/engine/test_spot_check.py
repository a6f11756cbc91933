"""One forward of a training step is computed again: the run does not notice, and a difference is told by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from service.spec.job import JobSpec
from tests.tiers import some_by_day
from tests.worker import workers
from tests.worker.actor.test_actor import job as gpt_job
from tests.worker.model import opaque_models
from tests.worker.model.opaque_models import CLASSES, WIDTH
from tests.worker.workers import Workers, plan_of
from worker.actor.assignment import run_options
from worker.contract.job import Job
from worker.engine import engine
from worker.engine.forward import StageArguments
from worker.engine.recomputation.inputs import UpdatedBuffers
from worker.engine.results import SlotLimits
from worker.engine.spot_check import LATEST_STEPS, ForwardCheck, Spot, choose_spot
from worker.model.export import trace

STEPS = range(1, 4)
SPOT = Spot(step=2, stage=1, microbatch=2)


def test_the_place_is_behind_the_first_step_and_the_same_on_every_worker():
    places = [choose_spot(seed, 5, 8, stages=3, microbatches=4) for seed in range(60)]
    assert places == [choose_spot(seed, 5, 8, stages=3, microbatches=4) for seed in range(60)]
    assert {place.step for place in places} == {6, 7, 8}
    assert {(place.stage, place.microbatch) for place in places} == {
        (s, m) for s in range(3) for m in range(4)
    }
    assert choose_spot(0, 8, 8, stages=3, microbatches=4) is None
    assert max(choose_spot(seed, 0, 10**6, 1, 1).step for seed in range(60)) <= LATEST_STEPS


def outputs_of(module, arguments):
    made = module(*arguments)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def check(module: nn.Module, between, *arguments: torch.Tensor) -> str | None:
    """The message on a forward of `module` that is computed again; `between` is called behind the first one."""
    made = ForwardCheck(Spot(7, 2, 3), module, ["made"], autocast=None, device=torch.device("cpu"))
    buffers = UpdatedBuffers(module)
    made.begin(StageArguments(list(arguments), [], []), buffers)
    made.keep(outputs_of(module, arguments))
    between(*arguments)
    made.run_again(buffers, lambda given: outputs_of(module, given.values))
    return made.difference()


def test_running_statistics_that_went_on_are_those_of_before_in_the_second_run_and_come_back():
    norm, rows = nn.BatchNorm1d(3), torch.randn(4, 3)
    with torch.no_grad():
        assert check(norm, lambda x: norm(x + 1), rows) is None
    assert norm.num_batches_tracked == 2


def test_an_argument_that_is_overwritten_before_the_backward_is_told():
    said = check(nn.Linear(3, 3), lambda x: x.add_(1), torch.ones(2, 3))
    assert said == (
        "the forward of stage s2, microbatch 3, of step 7: an argument of it was overwritten before its backward"
    )


def test_another_result_is_told_with_the_output_and_the_distance():
    layer = nn.Linear(3, 3)

    def damage(_):
        with torch.no_grad():
            layer.bias.add_(1.0)

    assert "output 'made' differs by" in (said := check(layer, damage, torch.ones(2, 3)))
    assert "the memory and the accelerator" in said


def test_compiled_code_that_goes_wrong_is_told_with_the_setting_that_avoids_it():
    (stage,) = trace(nn.Sequential(nn.Tanh()), (torch.ones(2, 3),)).cut([]).stages
    stage.compiled = lambda x: (torch.tanh(x) + 0.1,)
    assert "training.compile: false" in check(stage, lambda _: None, torch.ones(2, 3))
    assert stage.compiled is not None
    stage.compiled = lambda x: (torch.tanh(x),)
    assert check(stage, lambda _: None, torch.ones(2, 3)) is None


# Whole jobs


class CountedBranch(opaque_models.Noisy):
    """Draws, has running statistics, and counts its calls for a log."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def counted() -> nn.Module:
    layers = [
        nn.Linear(WIDTH, WIDTH),
        CountedBranch(),
        nn.Dropout(0.3),
        nn.Linear(WIDTH, WIDTH),
        CountedBranch(),
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def plain() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES))


def job(model="counted", *, meshes=1, **parts):
    """Noise in the update too: on one mesh its numbers follow those that the stages draw."""
    training = {"steps": len(STEPS), "global_batch": 16, "microbatches": 4, "seed": 5}
    spec = {
        "model": {"factory": f"{__name__}:{model}"},
        "data": {"factory": f"{opaque_models.__name__}:Rows"},
        "loss": {"factory": "torch.nn.functional:cross_entropy"},
        "optimizer": {"factory": "odd_optimizers:Langevin", "args": {"lr": 0.1}},
        "training": {**training, **parts.pop("training", {})},
        "pipeline": {"stages": 2, **parts.pop("pipeline", {})},
        "resources": {"meshes": meshes, "device": "cpu"},
    }
    return JobSpec.model_validate(spec).model_dump(mode="json")


def calls_of(run):
    stages = [stage for worker in run.workers for stage in worker.stages.values()]
    return [part.module.calls for stage in stages for part in stage.modules() if hasattr(part, "record")]


def trained(spec, spot, monkeypatch, plant=lambda run: None):
    """Losses, calls of the counted modules, and what the workers tell of the step, where `spot` is computed again."""
    monkeypatch.setattr(engine, "choose_spot", lambda *_: spot)
    with Workers(spec) as run:
        plant(run)
        before, told, losses = calls_of(run), [], []
        for step in STEPS:
            results = run.step(step)
            losses += [loss for result in results for loss in result.losses]
            told += [result.difference for result in results if result.difference]
        counts = [after - begin for after, begin in zip(calls_of(run), before, strict=True)]
    return losses, counts, told


@some_by_day(
    ("model", "pipeline", "stage"),
    [
        ("plain", {"schedule": "zb-v"}, 0),
        ("counted", {"schedule": "zb-v"}, 0),
        ("counted", {"schedule": "zb-v"}, 1),
        ("counted", {"recompute": "all"}, 1),
    ],
    by_day=1,
    ids=str,
)
def test_a_run_is_bit_for_bit_what_it_is_without(model, pipeline, stage, monkeypatch):
    compared = []
    difference = ForwardCheck.difference

    def noted(self):
        compared.append([len(self._made), len(self._again)])
        return difference(self)

    monkeypatch.setattr(ForwardCheck, "difference", noted)
    spec, plans = job(model, pipeline=pipeline), []

    def first_plan(
        *request,
    ):  # the update's noise follows what the stages draw: both runs have the same stages
        plans[:] = plans or [plan_of(*request)]
        return copy.deepcopy(plans[0])

    monkeypatch.setattr(workers, "plan_of", first_plan)
    expected = trained(spec, None, monkeypatch)
    assert compared == [] and expected[2] == []
    assert trained(spec, Spot(2, stage, 2), monkeypatch) == expected
    ((made, again),) = compared
    assert made == again > 0


@pytest.mark.slow
def test_a_result_that_only_the_step_had_is_told_by_stage_microbatch_and_step(monkeypatch):
    def plant(run):
        (stage,) = [worker.stages[1] for worker in run.workers if 1 in worker.stages]
        calls = iter(range(10**6))

        def hook(module, arguments, outputs):  # microbatch 2 of step 2 is the seventh forward
            return tuple(1.01 * each for each in outputs) if next(calls) == 6 else outputs

        stage.register_forward_hook(hook)

    (said,) = trained(job(), SPOT, monkeypatch, plant)[2]
    assert said.startswith(
        "the forward of stage s1, microbatch 2, of step 2: output 'output' differs by 0.01 of its size"
    )
    assert "(CountedBranch), which runs as it is" in said


def centred_cross_entropy(output, target):
    """Changes the output in place."""
    return nn.functional.cross_entropy(output.sub_(output.detach().mean()), target)


@pytest.mark.slow
def test_an_output_that_the_loss_changes_in_place_is_no_difference(monkeypatch):
    spec = job() | {"loss": {"factory": f"{__name__}:centred_cross_entropy"}}
    assert trained(spec, SPOT, monkeypatch)[2] == []


@pytest.mark.slow
@pytest.mark.parametrize("spot", [Spot(2, 0, 1), Spot(2, 1, 1)])
def test_half_precision_between_two_meshes_is_no_difference(spot, monkeypatch):
    assert trained(job(meshes=2, training={"precision": "bf16"}), spot, monkeypatch)[2] == []


@pytest.mark.parametrize(
    ("training", "resources", "until"),
    [
        ({}, {}, 4),
        ({"check_trace": False}, {}, None),
        ({"sync_batch_norm": True}, {"workers_per_mesh": 2}, None),
        ({}, {"workers_per_mesh": 2, "tensor": 2}, None),
    ],
)
def test_a_forward_that_sums_with_other_workers_is_not_computed_again(training, resources, until):
    spec = gpt_job()
    spec["training"] |= {"steps": 4, **training}
    spec["resources"] |= resources
    spec = JobSpec.model_validate(spec).model_dump(mode="json")
    options = run_options(Job.from_json(spec), "m0", limits=SlotLimits(), device="cpu")
    assert options.spot_check_until == until
