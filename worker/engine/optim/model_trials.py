"""Trials of a job's optimizer on the model's own parameters: their names, shapes, attributes and number.

The trials of `trials.py` come before the model is built, on parameters of their own. `check_settings` calls the factory
with all parameters of the model and with those of each mesh, and compares the settings of each parameter: a factory
that looks at positions, numbers or attributes gives other ones to a part. `try_parameters` steps the optimizer where
it did not step on parameters of a trial's own, or where the model has attributes on its parameters: copies have their
real names and attributes, and shapes that are made small where the model is large. The stages of a model are
made without such attributes: what meshes update has none. Must not know jobs, stages or meshes beyond their names.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from worker.engine.optim.state_dict import equal_settings, settings_of
from worker.engine.optim.trials import (
    FACTORY_PHASES,
    PIPELINE_REMEDY,
    UPDATE_RULE_PHASES,
    Parameters,
    step_subsets,
)
from worker.model.rng import seeded

# Makes an optimizer of some parameters and their names.
MakeNamedOptimizer = Callable[[list[nn.Parameter], list[str]], torch.optim.Optimizer]
_FACTORY_REMEDY = (
    "let optimizer.factory choose by what a parameter itself is (its shape, say), name parameters with settings of their "
    "own in optimizer.groups, or give the learning rate as a number"
)
# Elements of all copies of a trial together; longer dimensions are cut off at one of these lengths.
_MAX_ELEMENTS = 20_000
_CUT_LENGTHS = (64, 16, 8, 4, 2, 1)
# Attributes that torch's own compiler leaves on parameters.
_TORCH_ATTRIBUTES = "_dynamo"


@dataclass(frozen=True)
class NamedSubset:
    """The parameters `members` of a model, in this order, as a mesh has them: without attributes. With `attributes` by
    parameter it is the model itself, in one process."""

    name: str
    members: Sequence[str]
    attributes: Mapping[str, Mapping[str, Any]] | None = None

    def make_optimizer(
        self, make: MakeNamedOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        own = {name: wholes[name] for name in self.members if name in wholes}
        for name, parameter in own.items():
            vars(parameter).update((self.attributes or {}).get(name, {}))
        return make(list(own.values()), list(own)), own

    def make_alone(self, make: MakeNamedOptimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer of a `parameter` that is none of the model."""
        return make([parameter], [""])


class ModelParameters:
    """The trained parameters of a model by name, in its order; only their shapes, types and attributes are looked at."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._parameters = parameters
        self._attributes = {
            name: attributes
            for name, parameter in parameters.items()
            if (
                attributes := {
                    k: v for k, v in vars(parameter).items() if not k.startswith(_TORCH_ATTRIBUTES)
                }
            )
        }
        self._names = list(parameters)
        self._model = NamedSubset("the model", self._names, self._attributes)
        self._stripped = NamedSubset("all parameters", self._names)

    def halves(self) -> list[NamedSubset]:
        """Parts as a cut makes them, before one is known: a first and a second half."""
        middle = len(self._names) // 2
        halves = {"the first half": self._names[:middle], "the second half": self._names[middle:]}
        return [
            NamedSubset(f"{half} of the parameters", members) for half, members in halves.items() if members
        ]

    def check_settings(self, make: MakeNamedOptimizer, parts: Sequence[NamedSubset]) -> str:
        """Raise ValueError with the way out where the factory gives a parameter other settings among those of one of `parts`
        than among all; the error for which that could not be tried, empty where it was."""
        if not parts and not self._attributes:
            return ""
        obstacle: Exception | None = None
        for make_copies in (self._meta_copies, self._expanded_copies):
            try:
                settings = [
                    _settings(make, subset, make_copies()) for subset in (self._model, self._stripped, *parts)
                ]
            except Exception as error:
                obstacle = obstacle or error
                continue
            whole, stripped, *apart = settings
            self._compare(whole, stripped, "as the stages have them", self._attribute_remedy)
            for part, own in zip(parts, apart, strict=True):
                self._compare(stripped, own, f"among {part.name}", _FACTORY_REMEDY)
            return ""
        return f"{type(obstacle).__name__}: {obstacle}"

    def try_parameters(self, make: MakeNamedOptimizer, device: str, *, untried: bool) -> str:
        """Raise ValueError with the way out where the optimizer updates a parameter otherwise without its attributes or,
        `untried` on several meshes, otherwise without the other half of the parameters; the error for which that could
        not be tried, empty where it was."""
        layouts = [[self._stripped]] if self._attributes else []
        if untried:
            layouts.append(self.halves())
        if not layouts:
            return ""
        phases = UPDATE_RULE_PHASES if untried else FACTORY_PHASES
        trial = step_subsets(make, self._small_shapes(), layouts, phases, device, self._model)
        without = [one for one in trial.differences if one.part == self._stripped.name]
        if without:
            raise ValueError(
                f"optimizer {trial.optimizer} updates {without[0].parameter!r} otherwise where parameters have no "
                f"attributes (in a trial, off by {without[0].distance:.2g} of the largest movement): "
                f"{self._attribute_remedy}"
            )
        trial.require_independent_parameters(PIPELINE_REMEDY)
        return trial.obstacle

    @property
    def _attribute_remedy(self) -> str:
        names = dict.fromkeys(itertools.chain.from_iterable(self._attributes.values()))
        return (
            f"the attributes that the model sets on its parameters ({', '.join(list(names)[:4])}) do not reach the stages; "
            "name such parameters in optimizer.groups"
        )

    def _compare(self, whole: Mapping[str, Any], part: Mapping[str, Any], where: str, remedy: str) -> None:
        for name, own in part.items():
            wanted = whole[name]
            for key in sorted(wanted.keys() | own.keys()):
                if not _equal(wanted.get(key), own.get(key)):
                    raise ValueError(
                        f"the factory gives parameter {name!r} {key} {wanted.get(key)!r} among all {len(whole)} trained "
                        f"parameters of the model, and {own.get(key)!r} {where}: {remedy}"
                    )

    def _copies(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Parameters:
        return {name: nn.Parameter(value_of(p.detach())) for name, p in self._parameters.items()}

    def _meta_copies(self) -> Parameters:
        return self._copies(functools.partial(torch.empty_like, device="meta"))

    def _expanded_copies(self) -> Parameters:
        """Zeros of one element each, for factories that cannot take parameters of the meta device."""
        return self._copies(lambda value: torch.zeros((), dtype=value.dtype).expand(value.shape))

    def _small_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {name: tuple(p.shape) for name, p in self._parameters.items()}
        for cut in _cut_shapes(shapes):
            if sum(torch.Size(shape).numel() for shape in cut.values()) <= _MAX_ELEMENTS:
                break
        return cut


def _cut_shapes(shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, tuple[int, ...]]]:
    yield dict(shapes)
    for length in _CUT_LENGTHS:
        yield {name: tuple(min(size, length) for size in shape) for name, shape in shapes.items()}


def _settings(make: MakeNamedOptimizer, subset: NamedSubset, copies: Parameters) -> dict[str, dict[str, Any]]:
    """The settings of each parameter's group that are numbers, texts or tensors, by name; none of a parameter that is in no
    group."""
    with seeded(0):
        optimizer, own = subset.make_optimizer(make, copies)
    names = {parameter: name for name, parameter in own.items()}
    settings: dict[str, dict[str, Any]] = {name: {} for name in own}
    for group in optimizer.param_groups:
        plain = {key: value for key, value in settings_of(group).items() if _is_plain(value)}
        settings |= {names[p]: plain for p in group["params"] if p in names}
    return settings


def _is_plain(value: Any) -> bool:
    return all(
        leaf is None or isinstance(leaf, int | float | str | torch.Tensor) for leaf in tree_leaves(value)
    )


def _equal(one: Any, other: Any) -> bool:
    """Equal as settings; NaN is NaN, and a tensor without values equals one of its shape."""
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in (one, other)):
        return repr(one) == repr(other)
    return equal_settings(one, other) or repr(one) == repr(other)
