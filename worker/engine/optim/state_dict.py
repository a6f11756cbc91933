"""Saves and loads optimizer parameter groups and learning-rate schedules so that any cut can resume from them.

A group is saved with the names of its parameters and with what the schedule remembers of it. Another cut makes
other groups of other parameters: each takes the settings that its parameters had. Checkpoint keys: never rename
them. Knows optimizers and schedules of torch's shape; no stages and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Beside the settings of a group: the names of its parameters, and its part of the schedule's state.
PARAMS_KEY, SCHEDULE_KEY = "params", "schedule_values"
# A setting of groups that have the same numbers on every mesh.
GROUP_NUMBER_KEY = "group"
# Lists with an entry for every group in the states of torch's schedules.
_PER_GROUP_LISTS = ("base_lrs", "_last_lr", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas")
# What torch keeps of the names that an optimizer was made with; they are this cut's own.
_CUT_SPECIFIC_KEYS = (PARAMS_KEY, SCHEDULE_KEY, "param_names")
# Settings that choose an implementation for the device of the run that saved them.
IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of an optimizer, as a checkpoint names it."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def save_groups(
    optimizer: torch.optim.Optimizer, name_of: Callable[[torch.Tensor], str], schedule: Any | None
) -> list[dict[str, Any]]:
    """The groups of `optimizer` with the original names of their parameters."""
    state = None if schedule is None else schedule.state_dict()
    return [
        {
            **{key: value for key, value in group.items() if key not in _CUT_SPECIFIC_KEYS},
            PARAMS_KEY: [name_of(parameter) for parameter in group["params"]],
            SCHEDULE_KEY: _schedule_values_of(state, index, len(optimizer.param_groups)),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def load_groups(
    optimizer: torch.optim.Optimizer,
    name_of: Callable[[torch.Tensor], str],
    saved: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Give each group of `optimizer` the settings that its parameters were saved with; returns the saved group that each
    took them from, {} where none of its parameters was trained before.

    ValueError names parameters of one group that were saved with different settings.
    """
    if any(PARAMS_KEY not in group for group in saved):  # format 1: the groups of one mesh, by their place
        return [dict(group) for group in _load_by_position(optimizer, saved)]
    group_of = {name: group for group in saved for name in group[PARAMS_KEY]}
    taken = []
    for group in optimizer.param_groups:
        names = [name for parameter in group["params"] if (name := name_of(parameter)) in group_of]
        for name in names[1:]:
            _check_same_settings(names[0], group_of[names[0]], name, group_of[name])
        saved_group = group_of[names[0]] if names else _saved_group_with_number(group, saved)
        group.update(settings_of(saved_group))
        taken.append(dict(saved_group))
    return taken


def _saved_group_with_number(
    group: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The saved group with the number of `group`, which has no known parameters; {} where groups have no numbers."""
    number = group.get(GROUP_NUMBER_KEY)
    return next((one for one in saved if number is not None and one.get(GROUP_NUMBER_KEY) == number), {})


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a saved group, and its name if it has one."""
    return {key: value for key, value in group.items() if key not in _CUT_SPECIFIC_KEYS}


def load_schedule(schedule: Any, state: Mapping[str, Any], taken: Sequence[Mapping[str, Any]]) -> None:
    """Load `schedule` from its saved state; each group gets the values of the saved group that it took settings from."""
    own = schedule.state_dict()
    values = [group.get(SCHEDULE_KEY) or {} for group in taken]
    if any(SCHEDULE_KEY in group for group in taken):
        own_values = [_schedule_values_of(own, index, len(taken)) for index in range(len(taken))]
        values = [{**fresh, **known} for fresh, known in zip(own_values, values, strict=True)]
        state = _with_schedule_values(state, values)
    schedule.load_state_dict(state)


def _load_by_position(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    for group, other in zip(optimizer.param_groups, saved, strict=False):
        group.update(settings_of(other))
    return [*saved[: len(optimizer.param_groups)]]


def _check_same_settings(
    name: str, group: Mapping[str, Any], other_name: str, other: Mapping[str, Any]
) -> None:
    if group is other:
        return
    settings, other_settings = settings_of(group), settings_of(other)
    for key in sorted(settings.keys() | other_settings.keys()):
        if not equal_settings(settings.get(key), other_settings.get(key)):
            raise ValueError(
                f"parameters {name!r} and {other_name!r} are in one group of the optimizer, but were saved with "
                f"{key} {settings.get(key)!r} and {other_settings.get(key)!r}: let optimizer.factory group parameters by "
                "what does not depend on the cut (their shape, say)"
            )


def equal_settings(one: Any, other: Any) -> bool:
    """True where two settings of a group are equal, which may be tensors."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other


def _schedule_values_of(state: Any, index: int, groups: int, path: str = "") -> dict[str, Any]:
    """The values of one group in a schedule's state, by their path: "_schedulers.0.base_lrs"."""
    values: dict[str, Any] = {}
    for key, value in _children(state):
        if isinstance(value, list) and key in _PER_GROUP_LISTS and len(value) == groups:
            values[f"{path}{key}"] = value[index]
        else:
            values |= _schedule_values_of(value, index, groups, f"{path}{key}.")
    return values


def _with_schedule_values(state: Any, values: Sequence[Mapping[str, Any]], path: str = "") -> Any:
    """`state` with each list that has an entry per group made anew from `values`, one mapping per group."""
    changed: dict[Any, Any] = {}
    for key, value in _children(state):
        place = f"{path}{key}"
        if key in _PER_GROUP_LISTS and values and all(place in group for group in values):
            changed[key] = [group[place] for group in values]
        else:
            changed[key] = _with_schedule_values(value, values, f"{place}.")
    if isinstance(state, list):
        return list(changed.values())
    return {**state, **changed} if isinstance(state, Mapping) else state


def _children(state: Any) -> list[tuple[Any, Any]]:
    if isinstance(state, Mapping):
        return list(state.items())
    return list(enumerate(state)) if isinstance(state, list) else []


def without_implementation_flags(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An optimizer's saved groups without settings that depend on the device of the run that saved them."""
    return [
        {key: value for key, value in group.items() if key not in IMPLEMENTATION_FLAGS} for group in groups
    ]
