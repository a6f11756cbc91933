"""Trials of optimizers on a model's own parameters: settings by position and number, attributes, and what a trial of
parameters of its own could not tell."""

import functools

import pytest
import torch
from torch import nn

from tests.worker import odd_optimizers
from worker.engine.optim.model_trials import ModelParameters, NamedSubset

WIDE = 5000


def parameters(count, *, marked=()):
    """A matrix and a vector in turn, the `marked` ones with an attribute of the model."""
    found = {}
    for number in range(count):
        found[f"l{number}"] = nn.Parameter(torch.ones((4, 3) if number % 2 == 0 else (3,)))
        if number in marked:
            found[f"l{number}"].of_model = True
    return found


def without_names(factory, **arguments):
    return lambda parameters, names: factory(parameters, **arguments)


def settings(model, factory, parts=None, **arguments):
    return model.check_settings(
        without_names(factory, **arguments), model.halves() if parts is None else parts
    )


BY_PLACE = {
    "behind every parameter of a trial": (odd_optimizers.by_position, {"count": 100}, "weight_decay"),
    "by depth": (odd_optimizers.by_depth, {}, "lr"),
    "by number": (odd_optimizers.by_count, {}, "lr"),
}


@pytest.mark.parametrize("case", BY_PLACE)
def test_settings_that_depend_on_a_parameters_place_are_refused_by_its_name(case):
    factory, arguments, setting = BY_PLACE[case]
    said = (
        rf"the factory gives parameter 'l\d+' {setting} .* among all 210 trained parameters of the model, and .* among "
        "the (first|second) half of the parameters: let optimizer.factory choose by what a parameter itself is"
    )
    with pytest.raises(ValueError, match=said):
        settings(ModelParameters(parameters(210)), factory, **arguments)


@pytest.mark.parametrize(
    "factory",
    [
        odd_optimizers.by_dimension,
        torch.optim.Adagrad,
        functools.partial(torch.optim.AdamW, fused=True),  # not on the meta device
        functools.partial(torch.optim.SGD, lr=torch.tensor(0.1)),
    ],
)
def test_settings_that_depend_on_the_parameter_alone_pass(factory):
    assert settings(ModelParameters(parameters(7)), factory) == ""


def test_one_mesh_that_has_another_order_than_the_model_is_compared_by_name():
    model = parameters(6)
    settings(ModelParameters(model), odd_optimizers.by_depth, [NamedSubset("mesh m0", list(model))])
    with pytest.raises(ValueError, match=r"parameter 'l5' lr 0\.05.* among mesh m0: "):
        settings(ModelParameters(model), odd_optimizers.by_depth, [NamedSubset("mesh m0", [*model][::-1])])


def no_decay_where_marked(parameters):
    """As of models whose code marks parameters that take no decay."""
    marked = [p for p in parameters if getattr(p, "of_model", False)]
    others = [p for p in parameters if not getattr(p, "of_model", False)]
    return torch.optim.AdamW([{"params": marked, "weight_decay": 0.0}, {"params": others}])


def test_settings_by_attributes_which_no_stage_has_are_refused_on_one_mesh_too():
    said = (
        r"'l2' weight_decay 0\.0 among all 5 .* and 0\.01 as the stages have them: the attributes that the model sets on "
        r"its parameters \(of_model\) do not reach the stages; name such parameters in optimizer.groups"
    )
    with pytest.raises(ValueError, match=said):
        settings(ModelParameters(parameters(5, marked=[2])), no_decay_where_marked, [])
    assert settings(ModelParameters(parameters(5)), no_decay_where_marked, []) == ""


class SlowWhereMarked(odd_optimizers.NormedSGD):
    """Looks at an attribute of a parameter in its step."""

    def update(self, trained, gradients, group):
        for p, g in zip(trained, gradients, strict=True):
            p.sub_(g, alpha=0.01 if getattr(p, "of_model", False) else 0.1)


def test_a_step_that_looks_at_attributes_is_refused_whatever_the_number_of_meshes():
    said = r"SlowWhereMarked updates 'l1' otherwise where parameters have no attributes .*\(of_model\)"
    with pytest.raises(ValueError, match=said):
        ModelParameters(parameters(4, marked=[1])).try_parameters(
            without_names(SlowWhereMarked), "cpu", untried=False
        )
    unread = ModelParameters(parameters(4, marked=[1]))
    assert unread.try_parameters(without_names(torch.optim.AdamW), "cpu", untried=False) == ""


class WantsWide(odd_optimizers.NormedSGD):
    """Of a global norm, for matrices of the model's width only, which no parameter of a trial has."""

    def update(self, trained, gradients, group):
        if not all(p.shape[-1] == WIDE or p.ndim == 1 for p in trained):
            raise RuntimeError(f"{WIDE} columns are wanted")
        super().update(trained, gradients, group)


class WantsNames(odd_optimizers.NormedSGD):
    """Of a global norm, for a number of parameters that no trial has."""

    def update(self, trained, gradients, group):
        if len(trained) not in (3, 6):
            raise RuntimeError("3 or 6 parameters are wanted")
        super().update(trained, gradients, group)


def test_an_optimizer_that_only_takes_the_models_own_parameters_gets_its_verdict_of_them():
    model = ModelParameters(parameters(6))
    with pytest.raises(ValueError, match=r"WantsNames updates a parameter otherwise .*train on one mesh"):
        model.try_parameters(without_names(WantsNames), "cpu", untried=True)
    assert model.try_parameters(without_names(WantsNames), "cpu", untried=False) == ""
    small = ModelParameters({"a": nn.Parameter(torch.ones(2, WIDE)), "b": nn.Parameter(torch.ones(2, WIDE))})
    with pytest.raises(ValueError, match="WantsWide updates a parameter otherwise"):
        small.try_parameters(without_names(WantsWide), "cpu", untried=True)


def test_what_no_trial_could_step_is_named():
    wide = ModelParameters({k: nn.Parameter(torch.ones(40, WIDE)) for k in "ab"})
    assert (
        wide.try_parameters(without_names(WantsWide), "cpu", untried=True)
        == "RuntimeError: 5000 columns are wanted"
    )
    said = ModelParameters(parameters(4, marked=range(4))).try_parameters(
        without_names(odd_optimizers.ReadsAttribute), "cpu", untried=True
    )
    assert "AttributeError" in said and "of_model" in said
    assert "IndexError: a head is missing" in settings(
        ModelParameters(parameters(50)), odd_optimizers.wants_many
    )
