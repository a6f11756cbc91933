"""Groups of an optimizer, and what a schedule remembers of them, go where their parameters go."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR, StepLR

from worker.engine.optim.state_dict import load_groups, load_schedule, save_groups, settings_of


class Cut:
    """An optimizer of groups of named parameters: `groups` are ("ab", settings) and so on."""

    def __init__(self, *groups: tuple[str, dict], kind=torch.optim.SGD):
        self.parameters = {name: torch.nn.Parameter(torch.zeros(1)) for names, _ in groups for name in names}
        self.optimizer = kind(
            [{"params": [self.parameters[name] for name in names], **given} for names, given in groups],
            lr=0.5,
        )

    def name_of(self, parameter: torch.Tensor) -> str:
        return next(name for name, one in self.parameters.items() if one is parameter)

    def saved(self, schedule=None) -> list[dict]:
        return save_groups(self.optimizer, self.name_of, schedule)

    def load(self, saved: list[dict]) -> list[dict]:
        return load_groups(self.optimizer, self.name_of, saved)

    def setting(self, key: str) -> list:
        return [group[key] for group in self.optimizer.param_groups]


def test_a_group_is_saved_with_its_settings_and_the_names_of_its_parameters():
    first, second = Cut(("ab", {"lr": 0.1, "momentum": 0.9}), ("c", {})).saved()
    assert (first["params"], first["lr"], first["momentum"]) == (["a", "b"], 0.1, 0.9)
    assert (second["params"], second["lr"], second["momentum"]) == (["c"], 0.5, 0)
    assert first["schedule_values"] == second["schedule_values"] == {}


def test_names_that_the_optimizer_was_made_with_are_its_own():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([("weight", parameter)], lr=0.1)
    (group,) = save_groups(optimizer, lambda _: "original", None)
    assert group["params"] == ["original"] and "param_names" not in group
    assert settings_of({**group, "param_names": ["x"]}) == {
        key: value for key, value in group.items() if key not in ("params", "schedule_values")
    }


def test_each_group_of_another_cut_takes_the_settings_that_its_parameters_had():
    saved = Cut(("ab", {"lr": 0.1, "momentum": 0.9}), ("cd", {"lr": 0.2, "weight_decay": 0.3})).saved()
    other = Cut(("d", {}), ("ef", {"lr": 0.7, "momentum": 0.4}), ("ba", {}))
    taken = other.load(saved)
    assert other.setting("lr") == [0.2, 0.7, 0.1]
    assert other.setting("momentum") == [0, 0.4, 0.9]
    assert other.setting("weight_decay") == [0.3, 0, 0]
    assert [group.get("params") for group in taken] == [["c", "d"], None, ["a", "b"]]
    assert taken[1] == {}, "nothing of it was trained before"


def test_a_group_with_a_new_parameter_takes_the_settings_of_those_it_knows():
    saved = Cut(("a", {"lr": 0.1}), ("b", {"lr": 0.2})).saved()
    other = Cut(("fb", {}))
    other.load(saved)
    assert other.setting("lr") == [0.2]


def test_parameters_of_one_group_that_were_saved_with_different_settings_are_named():
    saved = Cut(("a", {"lr": 0.1}), ("b", {"lr": 0.1, "momentum": 0.9}), ("c", {"lr": 0.1})).saved()
    with pytest.raises(
        ValueError, match=r"parameters .a. and .b. are in one group .* momentum 0 and 0\.9: let"
    ):
        Cut(("ab", {})).load(saved)
    with pytest.raises(ValueError, match="parameters 'c' and 'b'"):
        Cut(("cab", {})).load(saved)
    alike = Cut(("ca", {}))
    alike.load(saved)
    assert alike.setting("lr") == [0.1]


def test_a_setting_that_only_one_of_two_groups_has_differs():
    saved = Cut(("a", {}), ("b", {})).saved()
    saved[1]["name"] = "second"
    with pytest.raises(ValueError, match="name None and 'second'"):
        Cut(("ab", {})).load(saved)


@pytest.mark.parametrize(
    ("other", "alike"), [(torch.tensor(0.1), True), (torch.tensor(0.2), False), (0.1, False)]
)
def test_settings_that_are_tensors_are_compared_by_their_values(other, alike):
    saved = Cut(("a", {}), ("b", {})).saved()
    saved[0]["lr"], saved[1]["lr"] = torch.tensor(0.1), other
    both = Cut(("ab", {}))
    if alike:
        both.load(saved)
        assert both.setting("lr") == [torch.tensor(0.1)]
    else:
        with pytest.raises(ValueError, match="'a' and 'b'"):
            both.load(saved)


def test_groups_of_the_first_format_are_taken_by_their_place():
    saved = [{"lr": 0.1}, {"lr": 0.2}]
    one, three = Cut(("a", {})), Cut(("a", {}), ("b", {}), ("c", {"lr": 0.9}))
    assert one.load(saved) == [{"lr": 0.1}] and one.setting("lr") == [0.1]
    assert three.load(saved) == saved and three.setting("lr") == [0.1, 0.2, 0.9]


def two_phases(optimizer: torch.optim.Optimizer) -> SequentialLR:
    """Two milestones' worth of schedules, whose state has lists of as many entries as there are groups."""
    phases = [ConstantLR(optimizer, 0.5, 2), LinearLR(optimizer, 0.1, total_iters=4)]
    return SequentialLR(optimizer, phases, milestones=[2])


def test_what_a_schedule_remembers_of_a_group_is_saved_by_its_place_in_the_state():
    cut = Cut(("a", {"lr": 0.1}), ("b", {"lr": 0.2}))
    schedule = two_phases(cut.optimizer)
    first, second = (group["schedule_values"] for group in cut.saved(schedule))
    assert (first["_schedulers.0.base_lrs"], second["_schedulers.0.base_lrs"]) == (0.1, 0.2)
    assert (first["_schedulers.1.base_lrs"], second["_schedulers.1.base_lrs"]) == (0.1, 0.2)
    assert (first["_last_lr"], second["_last_lr"]) == (0.05, 0.1)
    assert not any("milestones" in place or place.endswith("._schedulers") for place in first)


def trained(cut: Cut, schedule, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        cut.optimizer.step()
        schedule.step()
        rates.append(cut.setting("lr"))
    return rates


@pytest.mark.parametrize("steps", [1, 3])
def test_a_schedule_goes_on_for_every_parameter_where_groups_come_in_another_order(steps):
    cut = Cut(("a", {"lr": 0.1}), ("b", {"lr": 0.2}))
    schedule = two_phases(cut.optimizer)
    trained(cut, schedule, steps)
    saved, state = cut.saved(schedule), schedule.state_dict()
    expected = trained(cut, schedule, 4)

    other = Cut(("b", {}), ("a", {}), ("f", {"lr": 0.8}))
    fresh = two_phases(other.optimizer)
    load_schedule(fresh, state, other.load(saved))
    assert fresh.last_epoch == steps and fresh.state_dict()["_milestones"] == [2]
    found = trained(other, fresh, 4)
    for (a, b), (other_b, other_a, new) in zip(expected, found, strict=True):
        assert (other_a, other_b) == pytest.approx((a, b))
        assert new > 0
    assert fresh._schedulers[0].base_lrs == [0.2, 0.1, 0.8], "a new group keeps its own"


def test_a_schedule_of_the_first_format_is_taken_as_it_is():
    cut = Cut(("a", {"lr": 0.1}))
    schedule = StepLR(cut.optimizer, 1, 0.5)
    trained(cut, schedule, 2)
    other = Cut(("a", {"lr": 0.1}))
    fresh = StepLR(other.optimizer, 1, 0.5)
    load_schedule(fresh, schedule.state_dict(), [{"lr": 0.025}])
    assert (fresh.last_epoch, fresh.base_lrs) == (2, [0.1])


class Remembers:
    """A schedule of a state of its own."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_list_that_has_not_an_entry_for_every_group_is_left_as_it_is():
    cut = Cut(("a", {"lr": 0.1}), ("b", {"lr": 0.2}))
    state = {"base_lrs": [0.3], "max_lrs": [1, 2], "other": [7, 8], "parts": [{"base_lrs": [3, 4]}, 5]}
    saved = cut.saved(Remembers(**state))
    assert [group["schedule_values"] for group in saved] == [
        {"max_lrs": 1, "parts.0.base_lrs": 3},
        {"max_lrs": 2, "parts.0.base_lrs": 4},
    ]
    other = Cut(("b", {}), ("a", {}))
    fresh = Remembers(base_lrs=[0.9], max_lrs=[9, 9], parts=[{"base_lrs": [9, 9]}, 9])
    load_schedule(fresh, state, other.load(saved))
    assert fresh.state == {
        "base_lrs": [0.3],
        "max_lrs": [2, 1],
        "other": [7, 8],
        "parts": [{"base_lrs": [4, 3]}, 5],
    }
