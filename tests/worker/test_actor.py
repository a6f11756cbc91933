"""What the actor makes of a job's loss and optimizer: mistakes are the user's, and are told as such."""

from __future__ import annotations

import pytest
import torch

from worker.actor import _make_loss, _make_optimizer
from worker.failure import USER_CODE_RAISED, AttemptFailure


@pytest.mark.parametrize("factory", ["torch.nn.functional:mse_loss", "torch.nn:MSELoss"])
def test_a_loss_is_a_function_or_a_class_of_modules(factory: str) -> None:
    loss = _make_loss({"factory": factory, "args": {"reduction": "sum"}})
    assert loss(torch.ones(2, 3), torch.zeros(2, 3)) == 6.0


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"factory": "torch.nn.functional:mse_loss", "args": {"reduction": "none"}}, r"shape \(2, 3\)"),
        ({"factory": "builtins:min"}, "a tuple"),
    ],
)
def test_a_loss_that_is_no_single_number_is_refused_by_name(spec: dict, found: str) -> None:
    loss = _make_loss(spec)
    values = (torch.ones(2, 3), torch.zeros(2, 3)) if "torch" in spec["factory"] else ((1, 2), (3, 4))
    with pytest.raises(TypeError, match=f"loss '{spec['factory']}' returned {found}, not one number"):
        loss(*values)


def test_an_optimizer_gets_the_parameters_and_its_arguments() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = _make_optimizer({"factory": "torch.optim:SGD", "args": {"lr": 0.5}}, [parameter])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"factory": "torch.optim:SGD", "args": {"lrr": 1}}, "lrr=1.*unexpected keyword argument 'lrr'"),
        ({"factory": "torch.optim:SGD", "args": {"lr": -1}}, "lr=-1.*Invalid learning rate"),
        ({"factory": "torch.optim:Nope"}, "module torch.optim has no 'Nope'"),
        ({"factory": "builtins:list"}, "returned list, not a torch optimizer"),
    ],
)
def test_a_wrong_optimizer_is_blamed_on_the_user(spec: dict, told: str) -> None:
    with pytest.raises(AttemptFailure, match=told) as caught:
        _make_optimizer(spec, [torch.nn.Parameter(torch.ones(2))])
    assert caught.value.reason == USER_CODE_RAISED
