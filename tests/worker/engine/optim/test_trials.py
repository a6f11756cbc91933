"""Trials of optimizers: which ranks' parts get the updates of the whole, and what a refusal names."""

import functools
import random
import re

import numpy as np
import pytest
import torch

from tests.tiers import some_by_day
from tests.worker import odd_optimizers
from tests.worker.engine.optim.test_zero1 import OPTIMIZERS
from tests.worker.odd_jobs import Rowwise
from worker.engine.optim.trials import (
    TENSOR_PARALLEL_PARTS,
    ZERO1_PARTS,
    check_pipeline_optimizer,
    check_tensor_parallel_optimizer,
    check_zero1_optimizer,
    step_apart,
)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Rowwise, "optimizer Rowwise updates a part of a parameter otherwise"),
        (torch.optim.Adafactor, "optimizer Adafactor cannot update parameters in parts"),
        (torch.optim.Muon, "cannot update parameters in parts"),
        (torch.optim.LBFGS, "optimizer LBFGS cannot update parameters in parts"),
    ],
)
def test_others_are_refused_by_name(optimizer, said):
    with pytest.raises(ValueError, match=said):
        check_zero1_optimizer(optimizer)


class ElsewhereOnly(torch.optim.SGD):
    """As those of kernels that know one kind of device."""

    def step(self, closure=None):
        if any(p.device.type != "meta" for group in self.param_groups for p in group["params"]):
            raise RuntimeError("not on this device")
        raise NotImplementedError("it was tried where it trains")


@pytest.mark.parametrize("check", [check_zero1_optimizer, check_tensor_parallel_optimizer])
def test_an_optimizer_is_tried_where_it_trains(check):
    with pytest.raises(ValueError, match="not on this device"):
        check(ElsewhereOnly)
    with pytest.raises(ValueError, match="it was tried where it trains"):
        check(ElsewhereOnly, "meta")


@pytest.mark.parametrize("check", [check_zero1_optimizer, check_tensor_parallel_optimizer])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_elementwise_optimizer_passes_both_trials(name, check):
    check(OPTIMIZERS[name])


class OneRowAtATime(torch.optim.SGD):
    """Normalises the gradient of every row of a matrix."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm(dim=-1, keepdim=True)
        return super().step(closure)


def test_a_trial_names_the_parts_that_differ():
    """Ranks may have some rows each, but not some columns."""
    trial = step_apart(OneRowAtATime, {"w": (6, 4)}, TENSOR_PARALLEL_PARTS)
    assert (trial.optimizer, trial.error) == ("OneRowAtATime", None)
    found = [(difference.parameter, difference.part) for difference in trial.differences]
    assert found == [("w", "half 0 of the columns"), ("w", "half 1 of the columns")]
    assert all(difference.distance > 1e-4 for difference in trial.differences)


def test_a_trial_keeps_the_error_of_an_optimizer_that_cannot_be_made():
    trial = step_apart(functools.partial(torch.optim.SGD, lr=-1.0), {"w": (6, 4)}, ZERO1_PARTS)
    assert trial.optimizer == "" and isinstance(trial.error, ValueError)
    with pytest.raises(
        ValueError, match=r"^optimizer cannot update .*Invalid learning rate: -1.0.*: set it, or choose"
    ):
        trial.require_elementwise("set it")


# Subsets of the parameters


def check_on_meshes(make):
    return check_pipeline_optimizer(lambda parameters, numbers: make(parameters))


REFUSED = {
    "by the norm of all gradients": (odd_optimizers.NormedSGD, "NormedSGD"),
    "clipped, once gradients are large": (odd_optimizers.ClippedSGD, "ClippedSGD"),
    "prodigy": (odd_optimizers.Prodigy, "Prodigy"),
    "prodigy from afar": (functools.partial(odd_optimizers.Prodigy, d0=1e-3), "Prodigy"),
    "prodigy at a tenth of its rate": (functools.partial(odd_optimizers.Prodigy, lr=0.1), "Prodigy"),
    "prodigy with a slow estimate": (functools.partial(odd_optimizers.Prodigy, growth=1.02), "Prodigy"),
    "d-adaptation": (odd_optimizers.DAdaptAdam, "DAdaptAdam"),
    "in fp32 only": (odd_optimizers.SinglePrecision, "SinglePrecision"),
    "of matrices only": (odd_optimizers.TakesMatrices, "TakesMatrices"),
    "with noise": (odd_optimizers.NormedLangevin, "NormedLangevin"),
    "a rate by the number of parameters": (odd_optimizers.by_count, "SGD"),
    "groups by position": (odd_optimizers.by_position, "AdamW"),
    "a late position": (functools.partial(odd_optimizers.by_position, count=60), "AdamW"),
    "a rate by depth": (odd_optimizers.by_depth, "SGD"),
    "a median that is summed": (odd_optimizers.MedianNorm, "MedianNorm"),
}


@some_by_day("case", REFUSED, by_day=7)
def test_an_optimizer_that_looks_across_parameters_is_refused_on_several_meshes(case):
    make, name = REFUSED[case]
    said = (
        f"^optimizer {name} updates a parameter otherwise when it has only a part of the model's parameters, and each "
        r"mesh steps its own \(in a trial, parameter \d+ of shape \[.*\] with .* alone was off by [\d.e+-]+ of the "
        r"largest movement\): train on one mesh \(resources.meshes: 1\), choose an optimizer that .*, or give the "
        "learning rate as a number rather than"
    )
    with pytest.raises(ValueError, match=said):
        check_on_meshes(make)


IN_TORCH = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "RMSprop",
    "Rprop",
)
PASSING = {
    **{
        name: functools.partial(getattr(torch.optim, name), foreach=False)
        for name in (*IN_TORCH, "Adafactor")
    },
    **{f"{name}, foreach": functools.partial(getattr(torch.optim, name), foreach=True) for name in IN_TORCH},
    **OPTIMIZERS,
    "Adafactor, foreach": functools.partial(torch.optim.Adafactor, foreach=True),
    "Muon": torch.optim.Muon,
    "AdamW, fused": functools.partial(torch.optim.AdamW, fused=True),
    "a huge rate": functools.partial(torch.optim.SGD, lr=1e3, momentum=0.9, weight_decay=0.1),
    "a tiny rate": functools.partial(torch.optim.AdamW, lr=1e-9),
    "a norm of each parameter": Rowwise,
    "lamb": odd_optimizers.Lamb,
    "noise": odd_optimizers.Langevin,
    "much noise": functools.partial(odd_optimizers.Langevin, temperature=10.0),
    "a drawn rate": odd_optimizers.Dithered,
    "one vector of all": odd_optimizers.FlatSigns,
    "settings that only log": odd_optimizers.NormsLogged,
    "groups by dimension": odd_optimizers.by_dimension,
    "norms of all, whose sums are completed": odd_optimizers.GlobalLamb,
}


@some_by_day("case", PASSING, by_day=14)
def test_an_optimizer_that_updates_each_parameter_by_itself_passes_on_several_meshes(case):
    assert check_on_meshes(PASSING[case]) == ""


@pytest.mark.parametrize(
    "make",
    [odd_optimizers.ReadsAttribute, odd_optimizers.wants_many, torch.optim.LBFGS, torch.optim.SparseAdam],
)
def test_what_a_trial_raises_refuses_no_pipeline(make):
    """Training raises it where it is real, and what could not be tried is named."""
    assert re.match("(AttributeError|IndexError|TypeError|RuntimeError): .", check_on_meshes(make))


@pytest.mark.parametrize("make", [odd_optimizers.Langevin, odd_optimizers.Dithered])
def test_a_trial_leaves_the_random_generators_where_they_were(make):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    check_on_meshes(make)
    assert states() == before


def test_an_optimizer_that_does_not_run_on_the_cpu_is_tried_where_it_trains():
    places = []

    class Elsewhere(torch.optim.SGD):
        def step(self, closure=None):
            places.append(self.param_groups[0]["params"][0].device.type)
            raise RuntimeError("not on this device")

    check_pipeline_optimizer(lambda parameters, numbers: Elsewhere(parameters), "meta")
    assert {*places} == {"cpu", "meta"} and places[0] == "cpu"
