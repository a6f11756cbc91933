"""The groups of a job's optimizer: which parameter is in which, by its name in the model.

Every mesh has all groups, in one order, also those of which it holds no parameter: a schedule's lists with an entry a
group fit everywhere. The first are the parameters that no group matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.engine.optimizer_state import NUMBER
from worker.job import ParameterGroup
from worker.model.errors import FactoryError, ModelError
from worker.model.patterns import check_matched, matches


def parameter_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """What the optimizer is called with in place of `parameters`, which are called `names`."""
    made: list[dict[str, Any]] = [{"params": [], NUMBER: 0}]
    made += [{"params": [], NUMBER: number, **one.settings} for number, one in enumerate(groups, start=1)]
    for name, parameter in zip(names, parameters, strict=True):
        made[_group_of(groups, name)]["params"].append(parameter)
    return made


def check_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> None:
    """ModelError for patterns that match no trained parameter of the model, or only those of groups before theirs."""
    taken: dict[str, int] = {}
    for number, one in enumerate(groups):
        field = f"optimizer.groups[{number}].match"
        check_matched(field, one.match, names, aliases)
        for pattern in one.match:
            found = [name for name in names if matches(pattern, name)]
            if found and all(taken.get(name, number) < number for name in found):
                raise ModelError(
                    f"{field}: all that {pattern!r} matches ({', '.join(found[:4])}) is in groups before it, of which the "
                    "first counts: change their order, or remove it"
                )
        for name in names:
            if any(matches(pattern, name) for pattern in one.match):
                taken.setdefault(name, number)


def check_settings(groups: Sequence[ParameterGroup], optimizer: torch.optim.Optimizer) -> None:
    """FactoryError for settings of a group that the optimizer does not have: torch takes any, and uses none of them."""
    for number, one in enumerate(groups):
        if unknown := sorted(one.settings.keys() - optimizer.defaults.keys()):
            raise FactoryError(
                f"optimizer.groups[{number}] sets {', '.join(unknown)}, which {type(optimizer).__name__} does not know: "
                f"it has {', '.join(sorted(optimizer.defaults))}"
            )


def _group_of(groups: Sequence[ParameterGroup], name: str) -> int:
    for number, one in enumerate(groups, start=1):
        if any(matches(pattern, name) for pattern in one.match):
            return number
    return 0
