"""What a job says of loss, optimizer and learning rate: mistakes are the user's, and are told as such."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from worker.actor import optimizer as actor_optimizer
from worker.actor.optimizer import (
    make_loss,
    make_optimizer,
    make_schedule,
    measure_optimizer_state,
    optimizer_state_bytes,
    try_schedule,
)
from worker.contract.failures import AttemptFailure
from worker.contract.job import Factory, Optimizer, ParameterGroup
from worker.contract.profile import FactoryError, OptimizerState
from worker.contract.reasons import Reason
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import ModelUpdate, UpdateSettings
from worker.engine.optim.state_dict import without_implementation_flags
from worker.parallel.collectives import Collectives
from worker.transport.base import Topology
from worker.transport.local import LocalTransport


@pytest.mark.parametrize("factory", ["torch.nn.functional:mse_loss", "torch.nn:MSELoss"])
def test_a_loss_is_a_function_or_a_class_of_modules(factory: str) -> None:
    loss = make_loss(Factory(factory, {"reduction": "sum"}))
    assert loss(torch.ones(2, 3), torch.zeros(2, 3)) == 6.0


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (Factory("torch.nn.functional:mse_loss", {"reduction": "none"}), r"shape \(2, 3\)"),
        (Factory("builtins:min"), "a tuple"),
    ],
)
def test_a_loss_that_is_no_single_number_is_refused_by_name(spec: Factory, found: str) -> None:
    loss = make_loss(spec)
    values = (torch.ones(2, 3), torch.zeros(2, 3)) if "torch" in spec.factory else ((1, 2), (3, 4))
    with pytest.raises(TypeError, match=f"loss '{spec.factory}' returned {found}, not one number"):
        loss(*values)


STATES = [
    ("torch.optim:SGD", {"lr": 0.1}, OptimizerState(0.0, 0)),
    ("torch.optim:SGD", {"lr": 0.1, "momentum": 0.9}, OptimizerState(1.0, 0)),
    ("torch.optim:AdamW", {}, OptimizerState(2.0, 4)),  # 4: the number of the step, a tensor of its own
    ("torch.optim:AdamW", {"amsgrad": True}, OptimizerState(3.0, 4)),
    ("torch.optim:Adagrad", {}, OptimizerState(1.0, 4)),
    ("torch.optim:Adafactor", {}, OptimizerState(1.0, 4)),  # of a vector; a matrix has less
    ("torch.optim:Muon", {}, OptimizerState(1.0, 0)),  # takes matrices only
]


@pytest.mark.parametrize(("factory", "arguments", "state"), STATES)
def test_what_an_optimizer_keeps_is_counted_in_a_step_of_its_own(factory, arguments, state) -> None:
    make = functools.partial(make_optimizer, Factory(factory, arguments))
    assert measure_optimizer_state(make) == state


@pytest.mark.parametrize(("factory", "arguments", "state"), STATES)
@pytest.mark.parametrize("shape", [(30, 50), (17, 3)])
def test_what_an_optimizer_keeps_of_any_matrix_is_no_more_than_counted(
    factory, arguments, state, shape
) -> None:
    make = functools.partial(make_optimizer, Factory(factory, arguments))
    expected = 4 * shape[0] * shape[1] * state.bytes_per_parameter_byte + state.bytes_per_tensor
    kept = optimizer_state_bytes(make, shape)
    assert kept < expected / 3 if "Adafactor" in factory and shape == (30, 50) else kept <= expected
    assert "Adafactor" in factory or kept == expected


def test_an_optimizer_that_cannot_step_alone_is_told_before_training() -> None:
    with pytest.raises(AttemptFailure, match="closure") as raised:
        measure_optimizer_state(functools.partial(make_optimizer, Factory("torch.optim:LBFGS")))
    assert raised.value.reason is Reason.USER_CODE_RAISED


def test_an_optimizer_gets_the_parameters_and_its_arguments() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(Factory("torch.optim:SGD", {"lr": 0.5}), [parameter])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (Factory("torch.optim:SGD", {"lrr": 1}), "lrr=1.*unexpected keyword argument 'lrr'"),
        (Factory("torch.optim:SGD", {"lr": -1}), "lr=-1.*Invalid learning rate"),
        (Factory("torch.optim:Nope"), "module torch.optim has no 'Nope'"),
        (Factory("builtins:list"), "returned list, not a torch optimizer"),
    ],
)
def test_a_wrong_optimizer_is_blamed_on_the_user(spec: Factory, told: str) -> None:
    with pytest.raises(AttemptFailure, match=told) as caught:
        make_optimizer(spec, [torch.nn.Parameter(torch.ones(2))])
    assert caught.value.reason == Reason.USER_CODE_RAISED


class WeightedError(nn.Module):
    def __init__(self, trained=False):
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 3.0]))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output, target):
        return (self.weight * (output - target) ** 2).mean() * self.scale


def test_the_tensors_of_a_loss_go_to_the_device_of_the_model(monkeypatch):
    monkeypatch.setattr(actor_optimizer, "resolve", lambda path: WeightedError)
    monkeypatch.setattr(actor_optimizer, "call_factory", lambda path, arguments: WeightedError(**arguments))
    loss = make_loss(Factory("mine:WeightedError"), "meta")
    assert loss(torch.ones(2, device="meta"), torch.zeros(2, device="meta")).device.type == "meta"
    assert make_loss(Factory("mine:WeightedError"))(torch.ones(2), torch.zeros(2)) == 2.0
    with pytest.raises(FactoryError, match=r"parameters of its own \(scale\)"):
        make_loss(Factory("mine:WeightedError", {"trained": True}))


# Factories inside arguments


def falling_by(base: float):
    """What LambdaLR multiplies a learning rate by: `base` to the power of the step."""
    return lambda step: base**step


FALLING = {"factory": f"{__name__}:falling_by", "args": {"base": 0.5}}
WEIGHTS = {"factory": "torch:tensor", "args": {"data": [1.0, 3.0]}}


@pytest.mark.parametrize("factory", ["torch.nn.functional:cross_entropy", "torch.nn:CrossEntropyLoss"])
def test_a_factory_in_an_argument_of_a_loss_is_built_first_and_goes_to_the_device(factory: str):
    output, target = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([1, 1])
    loss = make_loss(Factory(factory, {"weight": WEIGHTS}))
    weighted = nn.functional.cross_entropy(output, target, weight=torch.tensor([1.0, 3.0]))
    assert loss(output, target) == weighted
    elsewhere = make_loss(Factory(factory, {"weight": WEIGHTS}), "meta")
    assert elsewhere(output.to("meta"), target.to("meta")).device.type == "meta"


def test_a_factory_in_an_argument_of_an_optimizer_or_of_its_groups_is_built_first():
    rate = {"factory": "torch:tensor", "args": {"data": 0.25}}
    groups = (ParameterGroup(("b",), {"lr": rate}),)
    spec = Optimizer("torch.optim:SGD", {"lr": rate, "momentum": 0.5}, groups=groups)
    made = make_optimizer(spec, [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], ["a", "b"])
    assert [group["lr"] for group in made.param_groups] == [torch.tensor(0.25)] * 2
    assert all(isinstance(group["lr"], torch.Tensor) for group in made.param_groups)


def test_a_factory_in_an_argument_of_a_schedule_is_built_first():
    optimizer = sgd()
    schedule = make_schedule(Factory("torch.optim.lr_scheduler:LambdaLR", {"lr_lambda": FALLING}), optimizer)
    rates = []
    for _ in range(3):
        rates.append(actor_optimizer.learning_rate(optimizer))
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 0.25, 0.125]


def test_a_wrong_factory_in_an_argument_is_named():
    wrong = {"factory": "torch:tensr", "args": {"data": 1.0}}
    with pytest.raises(FactoryError, match=r"'torch:tensr'.*did you mean tensor"):
        make_loss(Factory("torch.nn.functional:mse_loss", {"weight": wrong}))


# Optimizers on CUDA


def on_cuda(floating=True):
    return SimpleNamespace(is_cuda=True, is_floating_point=lambda: floating)


@pytest.mark.parametrize("optimizer", actor_optimizer._FUSED_OPTIMIZERS)
def test_optimizers_with_kernels_that_skip_a_step_by_themselves_are_fused_on_cuda(optimizer):
    assert "fused" in inspect.signature(optimizer).parameters
    parameter = nn.Parameter(torch.ones(2))
    assert optimizer([parameter], lr=0.1, fused=True)._step_supports_amp_scaling
    chosen = actor_optimizer._fused_flag
    assert chosen(optimizer, {"lr": 0.1}, [on_cuda()]) == {"fused": True}
    assert chosen(optimizer, {"lr": 0.1}, [parameter]) == {}
    assert chosen(optimizer, {"lr": 0.1}, [on_cuda(), on_cuda(floating=False)]) == {}
    for choice in ("fused", "foreach", "capturable", "differentiable"):
        assert chosen(optimizer, {choice: False}, [on_cuda()]) == {}


def test_an_optimizer_for_whose_step_the_host_waits_is_noted():
    """By torch's own mark of optimizers that skip a step themselves, which CPUs have too."""

    def notes(make):
        return actor_optimizer._waiting_step_notes("mine:Optimizer", make, "cpu")

    (note,) = notes(torch.optim.Adam)
    assert note.endswith("give optimizer.args fused: true") and "the host waits for the norm" in note
    assert notes(functools.partial(torch.optim.Adam, fused=True)) == []
    (note,) = notes(torch.optim.RMSprop)
    assert note.endswith("torch's Adam, AdamW and SGD do with fused: true")
    assert notes(lambda parameters: torch.optim.SGD(parameters[1:], lr=0.1)) == [], (
        "one that none can be made of"
    )


def test_other_optimizers_are_left_as_they_are():
    for optimizer in (torch.optim.RMSprop, torch.optim.Adagrad, lambda parameters: None):
        assert actor_optimizer._fused_flag(optimizer, {}, [on_cuda()]) == {}


@pytest.mark.parametrize("optimizer", actor_optimizer._FUSED_OPTIMIZERS)
def test_a_state_saved_by_fused_kernels_goes_on_in_others(optimizer):
    """As a checkpoint taken on CUDA that is restored on CPU, and the other way round."""

    def steps(optimizer_of, count):
        for _ in range(count):
            parameter = optimizer_of.param_groups[0]["params"][0]
            parameter.grad = parameter.detach() * 0.5 + 1
            optimizer_of.step()

    def make(fused, value=1.0):
        return optimizer([nn.Parameter(torch.full((3,), value))], lr=0.1, weight_decay=0.1, fused=fused)

    unbroken = make(False)
    steps(unbroken, 4)
    for before, after in ((True, False), (False, True)):
        first = make(before)
        steps(first, 2)
        saved = first.state_dict()
        second = make(after, first.param_groups[0]["params"][0].detach().clone()[0].item())
        groups = second.state_dict()["param_groups"]
        groups[0] |= without_implementation_flags(saved["param_groups"])[0]
        second.load_state_dict({"state": saved["state"], "param_groups": groups})
        assert second.param_groups[0]["fused"] is after
        steps(second, 2)
        torch.testing.assert_close(
            second.param_groups[0]["params"][0], unbroken.param_groups[0]["params"][0], rtol=1e-5, atol=1e-6
        )


# Schedules


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)


def test_a_schedule_gets_the_optimizer_and_its_arguments():
    optimizer = sgd()
    schedule = make_schedule(
        Factory("torch.optim.lr_scheduler:StepLR", {"step_size": 2, "gamma": 0.5}), optimizer
    )
    rates = []
    for _ in range(4):
        rates.append(actor_optimizer.learning_rate(optimizer))
        optimizer.step()
        schedule.step()
    assert rates == [0.5, 0.5, 0.25, 0.25]


def tried(name: str, arguments: dict, steps: int) -> list[float]:
    """The learning rate that a schedule leaves when it is tried over so many steps."""
    optimizer, spec = sgd(), Factory(f"torch.optim.lr_scheduler:{name}", arguments)
    try_schedule(spec, make_schedule(spec, optimizer), optimizer, steps=steps)
    return actor_optimizer.learning_rate(optimizer)


def test_a_schedule_that_ends_before_the_training_is_refused_with_the_step():
    one_cycle = {"max_lr": 0.5, "total_steps": 4, "cycle_momentum": False}
    assert 0 < tried("OneCycleLR", one_cycle, 3) < 0.5
    with pytest.raises(
        AttemptFailure, match=r"after step 5 of training.steps 8: Tried to step 5 times"
    ) as caught:
        tried("OneCycleLR", one_cycle, 8)
    assert caught.value.reason == Reason.USER_CODE_RAISED


def test_a_schedule_is_tried_as_long_as_the_training_takes_and_no_further():
    assert tried("ExponentialLR", {"gamma": 0.5}, 5) == 0.5**6
    with pytest.raises(AttemptFailure, match=r"sets the learning rate \[inf\] for step"):
        tried("ExponentialLR", {"gamma": 1e30}, 1_000_000_000)


class Remembers(torch.optim.lr_scheduler.StepLR):
    """A schedule whose state is no plain data."""

    def state_dict(self):
        return {**super().state_dict(), "self": WeightedError()}


@pytest.mark.parametrize(
    ("factory", "arguments", "told"),
    [
        ("torch.optim.lr_scheduler:CosineAnnealingLR", {}, "T_max.*correct optimizer.schedule.args"),
        ("torch.optim.lr_scheduler:Nope", {}, "module torch.optim.lr_scheduler has no 'Nope'"),
        (
            "torch.optim.lr_scheduler:ReduceLROnPlateau",
            {},
            "ReduceLROnPlateau, which .* by a metric .*number of steps only",
        ),
        ("odd_jobs:PlateauOfNothing", {}, "PlateauOfNothing, .* by a metric .PlateauOfNothing"),
        ("odd_jobs:eases_off_in_a_chain", {}, "ChainedScheduler, .* by a metric .EasesOff.step"),
        ("odd_jobs:EasesOff", {}, "EasesOff, .* by a metric .EasesOff.step takes 'metrics'"),
        ("builtins:list", {}, "'list' is|list.*raised TypeError"),
        ("builtins:id", {}, "returned int, which has no step, state_dict, load_state_dict"),
    ],
)
def test_a_wrong_schedule_is_blamed_on_the_user(factory, arguments, told):
    with pytest.raises(AttemptFailure, match=told) as caught:
        make_schedule(Factory(factory, arguments), sgd())
    assert caught.value.reason == Reason.USER_CODE_RAISED


def test_a_schedule_whose_state_no_checkpoint_can_store_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(actor_optimizer, "resolve", lambda path: Remembers)
    with pytest.raises(AttemptFailure, match="objects that a checkpoint cannot store"):
        make_schedule(Factory("mine:Remembers", {"step_size": 1}), sgd())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 5}),
        ("CosineAnnealingWarmRestarts", {"T_0": 3}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.5, "cycle_momentum": False}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("LinearLR", {"total_iters": 4}),
        ("MultiStepLR", {"milestones": [1, 3]}),
        ("OneCycleLR", {"max_lr": 0.5, "total_steps": 9, "cycle_momentum": False}),
        ("PolynomialLR", {"total_iters": 8}),
    ],
)
def test_schedules_of_torch_go_on_from_their_saved_state(name, arguments, tmp_path):
    from worker.checkpoint import format as checkpoint_format

    spec = Factory(f"torch.optim.lr_scheduler:{name}", arguments)

    def rates(optimizer, schedule, count):
        found = []
        for _ in range(count):
            found.append(actor_optimizer.learning_rate(optimizer))
            optimizer.step()
            schedule.step()
        return found

    whole = sgd()
    expected = rates(whole, make_schedule(spec, whole), 8)
    first = sgd()
    schedule = make_schedule(spec, first)
    found = rates(first, schedule, 4)
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 4)
    checkpoint_format.save_shard(uri, step=4, shard="m0", state={"lr_schedule": schedule.state_dict()})
    checkpoint_format.finish_checkpoint(uri, step=4, shards=["m0"], keep=1)
    second = sgd()
    schedule = make_schedule(spec, second)
    second.load_state_dict(first.state_dict())
    schedule.load_state_dict(checkpoint_format.load_checkpoint(uri)[0]["lr_schedule"])
    assert found + rates(second, schedule, 4) == pytest.approx(expected)


def test_a_step_that_is_skipped_does_not_count_for_the_schedule_nor_for_the_optimizer():
    topology = Topology(("m0",))
    stage = nn.Linear(2, 2)
    spec = Factory("torch.optim.lr_scheduler:StepLR", {"step_size": 1, "gamma": 0.5})
    optimizer = make_optimizer(Factory("torch.optim:Adam", {"lr": 1.0}), list(stage.parameters()))
    update = ModelUpdate(
        LocalStages({0: stage}, ["m0"]),
        Collectives(LocalTransport.group(topology)["m0", 0], {}),
        UpdateSettings(None, "skip"),
        optimizer=optimizer,
        lr_schedule=make_schedule(spec, optimizer),
    )
    rates = []
    for step, scale in enumerate([1.0, float("nan"), float("inf"), 1.0]):
        rates.append(actor_optimizer.learning_rate(update.optimizer))
        update.begin()
        loss = stage(torch.ones(1, 2)).sum() * scale
        loss.backward()
        update.reduce([loss.detach()])
        update.step()
        assert update.finish(step).skipped == (step in (1, 2))
    assert rates == [1.0, 0.5, 0.5, 0.5]
    assert actor_optimizer.learning_rate(update.optimizer) == 0.25
    assert {entry["step"].item() for entry in update.optimizer.state_dict()["state"].values()} == {2.0}
