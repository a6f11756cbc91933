"""A loss takes what the user has: several outputs and targets, in the shape in which model and data set give them, the
model's inputs, an auxiliary loss made in an early stage. Losses and every gradient are those of a plain loop."""

from __future__ import annotations

import dataclasses
import functools
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.actor.loss import takes_inputs
from worker.contract.failures import AttemptFailure
from worker.contract.job import Factory
from worker.data.sampler import BatchSampler, collate
from worker.driver.step_measurement import mean_metrics
from worker.model.factory import build_model
from worker.model.pytree import Targets

WIDTH = 8


@dataclasses.dataclass
class Made:
    logits: torch.Tensor
    early: dict[str, torch.Tensor]
    balance: torch.Tensor
    kind: str = "made"


Pair = namedtuple("Pair", "logits early")

SHAPES = {
    "tuple": lambda logits, early, balance: (logits, early, balance),
    "dict": lambda logits, early, balance: {"out": [logits, {"early": early}], "balance": balance},
    "dataclass": lambda logits, early, balance: Made(logits, {"first": early}, balance),
    "named tuple": lambda logits, early, balance: Pair(logits, (early, balance)),
}


class Network(nn.Module):
    """Two heads, one of them at the first layer, and an auxiliary loss that is made there."""

    def __init__(self, shape: str = "dataclass", eval_early: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.early, self.head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 3)
        self.shape, self.eval_early = SHAPES[shape], eval_early

    def forward(self, x):
        first = hidden = self.layers[0](x)
        early = self.early(first)
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        logits = self.head(hidden)
        if not self.training and not self.eval_early:
            return logits
        return self.shape(logits, early, first.mean(0).square().sum())


class Rows:
    """Samples of `kind`: how the target is given."""

    def __init__(self, kind: str = "dict"):
        self.kind = kind

    def __len__(self):
        return 24

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        x, y, z = torch.randn(WIDTH, generator=draw), index % 3, torch.randn(2, generator=draw).tolist()
        if self.kind == "single":
            return x, y
        if self.kind == "named inputs":
            return {"x": x}, {"class": y, "early": z}
        return x, {"dict": {"class": y, "early": z}, "tuple": (y, z)}[self.kind]


def _sum(logits, early, balance, label, wanted):
    return cross_entropy(logits, label) + 0.5 * mse_loss(early, wanted) + 0.1 * balance


def of_tuple(output, target):
    logits, early, balance = output
    return _sum(logits, early, balance, target["class"], target["early"])


def of_dict(output, target):
    assert list(output) == ["out", "balance"]
    logits, deeper = output["out"]
    return _sum(logits, deeper["early"], output["balance"], target["class"], target["early"])


def of_dataclass(output, target):
    assert type(output) is Made and output.kind == "made"
    loss = _sum(output.logits, output.early["first"], output.balance, target["class"], target["early"])
    return loss, {"balance": output.balance}


def of_named_tuple(output, target):
    return _sum(output.logits, *output.early, *target)


def of_inputs(output, target, inputs):
    (x,) = inputs
    return cross_entropy(output.logits, target) + mse_loss(output.logits.sum(1), x.sum(1)) + output.balance


class OfNamedInputs(nn.Module):
    def forward(self, output, target, *, inputs):
        return (
            cross_entropy(output[0], target["class"])
            + (output[1].sum(1) - inputs["x"].sum(1)).square().mean()
        )


class Skips(nn.Module):
    """Leaves out targets."""

    def __init__(self, ignore_index):
        super().__init__()
        self.ignored = ignore_index

    def forward(self, output, target):
        return cross_entropy(output.logits, target, ignore_index=self.ignored) + 0.1 * output.balance


CASES = {
    "tuple": ("tuple", "dict", "of_tuple"),
    "dict": ("dict", "dict", "of_dict"),
    "dataclass": ("dataclass", "dict", "of_dataclass"),
    "named tuple": ("named tuple", "tuple", "of_named_tuple"),
    "inputs": ("dataclass", "single", "of_inputs"),
    "named inputs": ("tuple", "named inputs", "OfNamedInputs"),
}


def spec_of(shape, kind, loss, *, model=None, **layout):
    spec = job(**layout)
    spec["model"] = {"factory": f"{__name__}:Network", "args": {"shape": shape}, **(model or {})}
    spec["data"] = {"factory": f"{__name__}:Rows", "args": {"kind": kind}}
    spec["loss"] = {"factory": f"{__name__}:{loss}"}
    spec["pipeline"]["schedule"] = "auto"
    spec["optimizer"] = {"factory": "torch.optim:SGD", "args": {"lr": 0.1}}
    return spec


def plain(spec, steps, loss_of, workers=1):
    """Losses and parameters of a loop with the model and the loss as they are."""
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    data, count = Rows(**spec["data"]["args"]), training["microbatches"] * workers
    sampler = BatchSampler(len(data), training["global_batch"], count, seed=training["seed"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = []
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for m in range(count):
            samples = [data[index] for index in sampler.indices(step, m)]
            losses.append(loss_of(model, *_batch(samples)))
            (losses[-1] / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training["clip_grad_norm"])
        optimizer.step()
        means.append(sum(loss.item() for loss in losses) / count)
    return means, {name: p.detach() for name, p in model.named_parameters()}


def _batch(samples):
    """As torch's DataLoader would make it, written down: inputs, and the target in the data set's own shape."""
    inputs, targets = zip(*samples, strict=True)
    x = torch.stack([one["x"] if isinstance(one, dict) else one for one in inputs])
    if isinstance(targets[0], dict):
        return x, {name: torch.tensor([one[name] for one in targets]) for name in targets[0]}
    if isinstance(targets[0], tuple):
        return x, tuple(torch.tensor(column) for column in zip(*targets, strict=True))
    return x, torch.tensor(targets)


def check(spec, expected, parameters):
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == pytest.approx(expected, rel=1e-5)
        seen = set()
        for stage in (stage for worker in run.workers for stage in worker.stages.values()):
            for local, found in stage.named_parameters():
                name = stage.original_names[local]
                torch.testing.assert_close(found, parameters[name], rtol=1e-4, atol=1e-6)
                seen.add(name)
        assert seen == parameters.keys()


def _called(loss, model, x, target):
    function = globals()[loss]
    function = function() if isinstance(function, type) else function
    output, taken = model(x), {}
    if "nputs" in loss:
        taken = {"inputs": {"x": x} if loss == "OfNamedInputs" else (x,)}
    value = function(output, target, **taken)
    return value[0] if isinstance(value, tuple) else value


@some_by_day("case", CASES, by_day=2)
@pytest.mark.parametrize("layout", [{"stages": 4, "meshes": 2}], ids=str)
def test_a_loss_of_several_outputs_and_targets_trains_as_in_a_plain_loop(case, layout):
    shape, kind, loss = CASES[case]
    spec = spec_of(shape, kind, loss, **layout)
    check(spec, *plain(spec, range(1, 4), functools.partial(_called, loss)))


@pytest.mark.slow
def test_recomputed_stages_and_data_parallel_workers_have_the_same_loss():
    spec = spec_of("dataclass", "dict", "of_dataclass", stages=2, meshes=2, workers_per_mesh=2)
    spec["pipeline"]["recompute"] = "all"
    check(spec, *plain(spec, range(1, 4), functools.partial(_called, "of_dataclass"), workers=2))


def test_metrics_beside_a_loss_of_several_outputs_are_those_of_the_plain_model():
    spec = spec_of("dataclass", "dict", "of_dataclass", stages=2, meshes=2)
    training = spec["training"]
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=training["seed"])
    sampler = BatchSampler(24, training["global_batch"], training["microbatches"], seed=training["seed"])
    values = [
        float(model(_batch([Rows()[index] for index in sampler.indices(1, m)])[0]).balance.detach())
        for m in range(training["microbatches"])
    ]
    with Workers(spec) as run:
        assert mean_metrics(run.step(1))["balance"] == pytest.approx(sum(values) / len(values), rel=1e-5)


@pytest.mark.slow
def test_a_part_of_the_result_may_be_named_and_one_tensor_be_taken_in_its_dict():
    spec = spec_of("dict", "single", "of_out", model={"output": "out"}, stages=2, meshes=2)

    def loss_of(model, x, target):
        return of_out(model(x)["out"], target)

    check(spec, *plain(spec, range(1, 4), loss_of))


def of_out(output, target):
    logits, deeper = output
    return cross_entropy(logits, target) + deeper["early"].square().mean()


@pytest.mark.slow
def test_microbatches_are_weighed_by_tokens_with_several_outputs_too():
    spec = spec_of("dataclass", "single", "Skips", stages=2, meshes=2)
    spec["loss"]["args"] = {"ignore_index": 0}
    spec["training"]["loss_reduction"] = "tokens"
    count = spec["training"]["microbatches"]
    sampler = BatchSampler(24, spec["training"]["global_batch"], count, seed=spec["training"]["seed"])
    tokens = [[sum(i % 3 > 0 for i in sampler.indices(step, m)) for m in range(count)] for step in (1, 2, 3)]
    assert any(len(set(of_step)) > 1 for of_step in tokens)
    weights = iter([n * count / sum(of_step) for of_step in tokens for n in of_step])

    def loss_of(model, x, target):
        return Skips(0)(model(x), target) * next(weights)

    check(spec, *plain(spec, range(1, 4), loss_of))


def test_tokens_of_several_targets_cannot_be_counted():
    spec = spec_of("dataclass", "dict", "of_dataclass", stages=2, meshes=2)
    spec["training"]["loss_reduction"] = "tokens"
    with pytest.raises(Exception, match="the target of a sample is several tensors"), Workers(spec) as run:
        run.step(1)


@pytest.mark.parametrize(("meshes", "bandwidth"), [(2, 1e9), (2, None), (1, None)], ids=str)
def test_an_evaluation_has_the_loss_of_all_outputs_also_where_the_model_returns_others_then(
    meshes, bandwidth
):
    spec = spec_of("dataclass", "dict", "either", stages=2, meshes=meshes)
    spec["model"]["args"]["eval_early"] = False
    spec["evaluation"] = {"every_steps": 1, "data": spec["data"]}
    model = build_model(spec["model"]["factory"], spec["model"]["args"], seed=spec["training"]["seed"])
    x, target = _batch([Rows()[index] for index in range(24)])
    expected = float(either(model.eval()(x), target))
    with Workers(spec, bandwidth_bytes_per_s=bandwidth) as run:
        assert run.evaluate().loss == pytest.approx(expected, rel=1e-5)


def either(output, target):
    return cross_entropy(output if isinstance(output, torch.Tensor) else output.logits, target["class"])


def test_a_loss_that_wants_one_tensor_is_told_what_there_is():
    spec = spec_of("dataclass", "single", "of_tuple", stages=2, meshes=2)
    spec["loss"] = {"factory": "torch.nn:CrossEntropyLoss"}
    with pytest.raises(AttemptFailure) as failed, Workers(spec):
        pass
    told = str(failed.value)
    assert "a Made of logits [4, 3], early.first [4, 2], balance []" in told.replace("[2, ", "[4, ")
    assert "name what it takes in model.output" in told


def two(inputs, targets):
    return inputs.sum()


def bound(output, target, inputs=None):
    return output.sum()


@pytest.mark.parametrize(
    ("path", "args", "takes"),
    [
        (f"{__name__}:of_inputs", {}, True),
        (f"{__name__}:OfNamedInputs", {}, True),
        (f"{__name__}:two", {}, False),
        (f"{__name__}:bound", {}, True),
        (f"{__name__}:bound", {"inputs": 3}, False),
        ("torch.nn:CrossEntropyLoss", {}, False),
        ("torch.nn.functional:cross_entropy", {}, False),
        ("nobody.has:this", {}, False),
    ],
)
def test_only_a_loss_that_has_a_third_parameter_of_that_name_gets_the_inputs(path, args, takes):
    assert takes_inputs(Factory(path, args)) is takes


def test_a_nest_of_targets_moves_as_one_tensor_does():
    (x,), target = collate([Rows("dict")[0], Rows("dict")[1]], with_inputs=True)
    assert isinstance(target, Targets)
    moved = target.to(torch.float64)
    assert moved.target["early"].dtype == torch.float64 and torch.equal(moved.inputs[0].float(), x)
    assert not target.is_cuda


def test_targets_of_unlike_fields_are_refused():
    rows = [(torch.ones(1), {"a": 1}), (torch.ones(1), {"b": 1})]
    with pytest.raises(ValueError, match="has a, that of another b: return the same fields"):
        collate(rows)
