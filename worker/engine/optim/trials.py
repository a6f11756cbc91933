"""Trials of a job's optimizer before training: the parts that ranks update apart must get the updates of the whole.

`step_apart` steps an optimizer on given parameters together and in parts, each part with an optimizer of its own, as a
rank has it, and says which parameters differ. ZeRO-1 hands ranks flat partitions, tensor parallelism halves of a
matrix, a pipeline some of the parameters; a further way to lay parameters out over ranks is a further `RankPart`.
Parts of a parameter are tried with recorded gradients, `step_subsets` tries subsets of the parameters on an objective,
since an optimizer may look across parameters only once it has come far enough. A trial has fixed seeds, and changes
nothing of the job.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from worker.engine.optim.cross_sums import SumOverRanks, complete_sums, sums_over_ranks, zero_parameter
from worker.engine.optim.zero1 import FlatPartition, local_partitions, partition_optimizer
from worker.model.parity import PARTITION_UPDATE_TOLERANCE, SUBSET_TWIN_MARGIN, SUBSET_UPDATE_TOLERANCE
from worker.model.rng import release_rng_lock, seeded

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Makes an optimizer of some parameters; their numbers among all of a trial say in which of the job's groups they are.
MakeNumberedOptimizer = Callable[[list[nn.Parameter], list[int]], torch.optim.Optimizer]
Parameters = dict[str, nn.Parameter]
_MATRIX_SHAPE = (6, 4)
_STEPS = 3


@dataclass(frozen=True)
class Difference:
    """`part` of a parameter was updated otherwise than within the whole, by `distance` of the largest update."""

    parameter: str
    part: str
    distance: float

    def __str__(self) -> str:
        return f"{self.part} of {self.parameter} by {self.distance:.1%} of the update"


@dataclass(frozen=True)
class Trial:
    """The outcome for the optimizer of this class name: what differs, or the error that the optimizer raised.

    `optimizer` is empty where the factory itself raised. `settings_differ`: behind the last step a group's settings of some
    parameter are other numbers than within the whole.
    """

    optimizer: str
    differences: tuple[Difference, ...] = ()
    error: Exception | None = None
    settings_differ: bool = False

    def require_elementwise(self, remedy: str) -> None:
        """Raise ValueError, with `remedy` as the way out, unless every part got the update of the whole."""
        advice = (
            f"{remedy}, or choose one that updates each element by itself (torch's SGD, Adam, AdamW, ...)"
        )
        if self.error is not None:
            name = f" {self.optimizer}" if self.optimizer else ""
            raise ValueError(
                f"optimizer{name} cannot update parameters in parts ({self.obstacle}): {advice}"
            ) from self.error
        if self.differences:
            raise ValueError(
                f"optimizer {self.optimizer} updates a part of a parameter otherwise than it would as a part of the "
                f"whole (the {self.differences[0]}): {advice}"
            )

    @property
    def obstacle(self) -> str:
        """The error that the optimizer raised, with its type; empty where the trial came to its end."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def require_independent_parameters(self, remedy: str) -> None:
        """Raise ValueError, with `remedy` as the way out, if a parameter was updated otherwise without the others.

        An error of the trial refuses nothing, since training raises it where it is real; `obstacle` names it.
        """
        if self.differences:
            worst = max(self.differences, key=lambda difference: difference.distance)
            raise ValueError(
                f"optimizer {self.optimizer} updates a parameter otherwise when it has only a part of the model's "
                f"parameters, and each mesh steps its own (in a trial, {worst.parameter} with {worst.part} alone was off by "
                f"{worst.distance:.2g} of the largest movement): {remedy}"
            )


class RankPart(Protocol):
    """The part of all parameters that one rank updates."""

    @property
    def name(self) -> str:
        """The part, for messages."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of a parameter or gradient."""

    def make_optimizer(
        self, make: MakeOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        """The rank's optimizer as training makes it, and the parameters that it updates, by the names of `wholes`."""


@dataclass(frozen=True)
class _Whole:
    """All parameters in one optimizer: the reference of a trial."""

    name: str = "whole"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole

    def make_optimizer(
        self, make: MakeOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        return make(list(wholes.values())), wholes


@dataclass(frozen=True)
class Zero1Part:
    """A flat partition of every parameter; the optimizer is made for whole ones, as `Zero1Update` does."""

    partition: FlatPartition

    @property
    def name(self) -> str:
        return f"partition {self.partition.worker} of {self.partition.workers}"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return self.partition.of(whole.reshape(-1))

    def make_optimizer(
        self, make: MakeOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        optimizer = make(list(wholes.values()))
        own = local_partitions(wholes, self.partition)
        partition_optimizer(optimizer, {wholes[name]: part for name, part in own.items()}, self.partition)
        return optimizer, own


@dataclass(frozen=True)
class TensorParallelPart:
    """A half of every matrix along `dim`, for which the optimizer is made."""

    dim: int
    half: int

    @property
    def name(self) -> str:
        return f"half {self.half} of the {('rows', 'columns')[self.dim]}"

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(2, self.dim)[self.half]

    def make_optimizer(
        self, make: MakeOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        own = {name: nn.Parameter(self.of(whole.detach()).clone()) for name, whole in wholes.items()}
        return make(list(own.values())), own


@dataclass(frozen=True)
class ParameterSubset:
    """Some of the parameters, as a mesh of a pipeline holds them: the `numbers` of so many. The optimizer is made for these
    alone, by a MakeNumberedOptimizer."""

    name: str
    numbers: Callable[[int], range]

    def make_optimizer(
        self, make: MakeNumberedOptimizer, wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        names, numbers = list(wholes), list(self.numbers(len(wholes)))
        own = {names[number]: wholes[names[number]] for number in numbers}
        return make(list(own.values()), numbers), own

    def make_alone(self, make: MakeNumberedOptimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer of a `parameter` that is none of the model."""
        return make([parameter], [0])


class ModelSubset(Protocol):
    """Some of a model's parameters, as ParameterSubset has them by their numbers."""

    @property
    def name(self) -> str:
        """The subset, for messages."""

    def make_optimizer(
        self, make: Callable[..., torch.optim.Optimizer], wholes: Parameters
    ) -> tuple[torch.optim.Optimizer, Parameters]:
        """The optimizer of these parameters, and they by the names of `wholes`."""

    def make_alone(
        self, make: Callable[..., torch.optim.Optimizer], parameter: nn.Parameter
    ) -> torch.optim.Optimizer:
        """The optimizer of a `parameter` that is none of the model."""


ZERO1_PARTS = tuple(Zero1Part(FlatPartition(worker, 2)) for worker in range(2))
TENSOR_PARALLEL_PARTS = tuple(TensorParallelPart(dim, half) for dim in range(2) for half in range(2))
_ALL_PARAMETERS = ParameterSubset("all parameters", range)
PARAMETER_HALVES = (
    ParameterSubset("the first half of the parameters", lambda count: range(count // 2)),
    ParameterSubset("the second half of the parameters", lambda count: range(count // 2, count)),
)
INTERLEAVED_PARAMETERS = (
    ParameterSubset("every second parameter from the first", lambda count: range(0, count, 2)),
    ParameterSubset("every second parameter from the second", lambda count: range(1, count, 2)),
)
# Halves and every second one have matrices and others; matrices alone have several shapes too.
_SUBSET_SHAPES = ((6, 4), (5, 3), (6,), (5,), (3, 2, 2), (), (4, 4), (8,))
# The parameters of the trial of a factory, which comes before the model is built: settings that begin at a later
# position show in model_trials.py.
_FACTORY_PARAMETERS = 64


PIPELINE_REMEDY = (
    "train on one mesh (resources.meshes: 1), choose an optimizer that updates each parameter by itself (torch's SGD, "
    "Adam, AdamW, ...), or give the learning rate as a number rather than computed from the number or the order of the "
    "parameters"
)


def check_zero1_optimizer(make: MakeOptimizer, device: str = "cpu") -> None:
    """Raise ValueError unless flat partitions get the updates of whole parameters: a matrix, a vector and a scalar."""
    shapes = {"a matrix": _MATRIX_SHAPE, "a vector": (5,), "a scalar": ()}
    step_apart(make, shapes, ZERO1_PARTS, device).require_elementwise(
        "its state cannot be sharded over the workers of a mesh; set shard to none"
    )


def check_tensor_parallel_optimizer(make: MakeOptimizer, device: str = "cpu") -> None:
    """Raise ValueError unless halves of a matrix, by rows and by columns, get the updates of the whole."""
    step_apart(make, {"a matrix": _MATRIX_SHAPE}, TENSOR_PARALLEL_PARTS, device).require_elementwise(
        "tensor-parallel workers would train another model; set tp to 1 and split the samples (data)"
    )


def check_pipeline_optimizer(make: MakeNumberedOptimizer, device: str = "cpu") -> str:
    """Raise ValueError unless each parameter gets the update that it gets together with all others; the error for which that
    could not be tried, empty where it was.

    Two trials: the update rule, by many steps of few parameters, since some optimizers look across parameters only once
    they have moved; and the factory, by few steps of many parameters, since some compute settings from the number or the
    order of parameters. Settings that an optimizer changes itself, and otherwise for a subset (an estimated distance),
    want a long trial of the rule.
    """
    several = _named(_SUBSET_SHAPES)
    many = _named(itertools.islice(itertools.cycle(((4, 3), (4,))), _FACTORY_PARAMETERS))
    layouts = (PARAMETER_HALVES, INTERLEAVED_PARAMETERS)
    rule = step_subsets(make, several, layouts, UPDATE_RULE_PHASES, device)
    rule.require_independent_parameters(PIPELINE_REMEDY)
    factory = step_subsets(make, many, [PARAMETER_HALVES], FACTORY_PHASES, device)
    factory.require_independent_parameters(PIPELINE_REMEDY)
    if rule.settings_differ:
        few = _named(_SUBSET_SHAPES[:4])
        step_subsets(make, few, [PARAMETER_HALVES], _LONG_PHASES, device).require_independent_parameters(
            PIPELINE_REMEDY
        )
    return rule.obstacle or factory.obstacle


def step_apart(
    make: MakeOptimizer, shapes: Mapping[str, Sequence[int]], parts: Sequence[RankPart], device: str = "cpu"
) -> Trial:
    """Step the optimizer of `make` on parameters of these shapes together, and on each of `parts` apart.

    Parameters and gradients are random and equal in all runs; on `device`, since some optimizers know no other. Values
    that are apart by more than 1e-4 of the largest update differ.
    """
    generator = torch.Generator().manual_seed(0)

    def random_tensors() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}

    initial, gradients = random_tensors(), [random_tensors() for _ in range(_STEPS)]
    optimizer_name = ""

    def run(part: RankPart) -> dict[str, torch.Tensor]:
        nonlocal optimizer_name
        wholes = {name: nn.Parameter(value.clone()) for name, value in initial.items()}
        optimizer, updated = part.make_optimizer(make, wholes)
        optimizer_name = type(optimizer).__name__
        for of_step in gradients:
            for name, parameter in updated.items():
                parameter.grad = part.of(of_step[name]).clone()
            optimizer.step()
        return {name: parameter.detach() for name, parameter in updated.items()}

    try:
        together = run(_Whole())
        apart = [(part, run(part)) for part in parts]
    except Exception as error:
        return Trial(optimizer_name, error=error)
    largest = max(float((value - initial[name]).abs().max()) for name, value in together.items())
    differences = []
    for part, values in apart:
        for name, value in values.items():
            wanted = part.of(together[name])
            distance = float((value - wanted).abs().max()) if wanted.numel() else 0.0
            if distance > PARTITION_UPDATE_TOLERANCE * largest:
                differences.append(Difference(name, part.name, distance / largest if largest else math.inf))
    return Trial(optimizer_name, tuple(differences))


def step_subsets(
    make: Callable[..., torch.optim.Optimizer],
    shapes: Mapping[str, Sequence[int]],
    layouts: Sequence[Sequence[ModelSubset]],
    phases: Sequence[TrialPhase],
    device: str = "cpu",
    whole: ModelSubset = _ALL_PARAMETERS,
) -> Trial:
    """Step the optimizer of `make` on parameters of these shapes together, as `whole` hands them over, and on each subset
    of each of `layouts` apart; `make` is called as they call it. Where its sums over parameters can be completed
    (cross_sums.py), the subsets of a layout step at once, as ranks that sum together.

    In fp64 on the CPU, where the optimizer takes that, so that small updates show as well and kernels do not depend on the
    number of parameters; else in fp32, else on `device`. Shapes that it refuses alone are left out. Values differ where
    neither rounding nor drawn numbers explain it: a twin of the whole run, with another seed and values changed in their
    last bits, says how far these take a run of this optimizer.
    """
    together: _Run | None = None
    try:
        objective, together = _run_together(make, shapes, phases, device, whole)
        apart = [
            pair
            for subsets in layouts
            for pair in zip(subsets, _run_layout(make, objective, subsets, together.sums), strict=True)
        ]
        steps, movement = together.finite_steps, together.movement
        expected = SUBSET_UPDATE_TOLERANCE * movement

        def differences() -> tuple[Difference, ...]:
            return tuple(
                Difference(name, subset.name, float((distance / movement)[:steps][beyond].max()))
                for subset, run in apart
                for name, distance in run.distances(together).items()
                if (beyond := (distance > expected)[:steps]).any()
            )

        if differences():
            twin = _run_subset(make, objective, whole, twin=True)
            distance = torch.stack([*twin.distances(together).values()]).amax(0).cummax(0).values
            expected = torch.maximum(expected, SUBSET_TWIN_MARGIN * distance)
        settings_differ = any(
            not _same_numbers(kept, together.settings[name])
            for _, run in apart
            for name, kept in run.settings.items()
        )
        return Trial(together.optimizer, differences(), settings_differ=settings_differ)
    except Exception as error:
        return Trial(together.optimizer if together else "", error=error)


@dataclass(frozen=True)
class TrialPhase:
    """Steps of a trial; gradients begin with `scale` and are multiplied by `growth` after each. Most elements of `sparse`
    ones are zero."""

    steps: int
    scale: float = 1.0
    growth: float = 1.0
    sparse: bool = False


UPDATE_RULE_PHASES = (
    TrialPhase(16),
    TrialPhase(8, growth=1.6),
    TrialPhase(8, growth=1 / 1.6),
    TrialPhase(8, sparse=True),
)
_LONG_PHASES = (TrialPhase(800),)
FACTORY_PHASES = (TrialPhase(3),)


class _Objective:
    """A sum over elements: near its minimum a parabola, far from it a cone, so that large steps stay finite. Distance of
    the minimum, curvature and noise differ from parameter to parameter. Parameters are slices of one vector."""

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        phases: Sequence[TrialPhase],
        device: str,
        dtype: torch.dtype,
    ):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype)

        self.shapes, self.device = dict(shapes), device
        self._sizes = [math.prod(shape) for shape in shapes.values()]
        self.slices = dict(zip(shapes, torch.arange(sum(self._sizes)).split(self._sizes), strict=True))
        scales = [phase.scale * phase.growth**k for phase in phases for k in range(phase.steps)]
        self.steps, elements = len(scales), sum(self._sizes)
        distance, curvature, noise = (
            (2.0 ** normal(len(shapes))).repeat_interleave(torch.tensor(self._sizes)) for _ in range(3)
        )
        self._initial = normal(elements).to(device)
        self._minimum = self._initial + (distance * normal(elements)).to(device)
        self._curvature = curvature.to(device)
        self._noise = (0.2 * noise * curvature * normal(self.steps, elements)).to(device)
        kept = torch.rand((self.steps, elements), generator=generator) < 0.2
        kept[:, [int(places[0]) for places in self.slices.values()]] = True  # no gradient is zero as a whole
        dense = torch.tensor([not phase.sparse for phase in phases for _ in range(phase.steps)])
        self._weight = (torch.tensor(scales, dtype=dtype)[:, None] * (kept | dense[:, None])).to(device)

    def start(self, name: str, twin: bool) -> torch.Tensor:
        """The value before the first step; that of a `twin` is changed in its last bits."""
        value = self._initial[self.slices[name]].reshape(self.shapes[name]).clone()
        return value * (1.0 + torch.finfo(value.dtype).eps) if twin else value

    def gradient_of(self, names: Sequence[str]) -> Callable[[int, torch.Tensor], Sequence[torch.Tensor]]:
        """A function from a step and the values of some parameters, as one vector, to their gradients. Its operations round
        an element in one way wherever it lies: equal values have equal gradients, to the bit."""
        places = torch.cat([self.slices[name] for name in names])
        minimum, curvature = self._minimum[places], self._curvature[places]
        noise, weight = self._noise[:, places], self._weight[:, places]
        shapes = [self.shapes[name] for name in names]
        sizes = [math.prod(shape) for shape in shapes]

        def gradients(step: int, values: torch.Tensor) -> Sequence[torch.Tensor]:
            away = values - minimum
            flat = (away / (away.abs() + 1.0) * curvature + noise[step]) * weight[step]
            return [part.reshape(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]

        return gradients


@dataclass(frozen=True)
class _Run:
    """The values of parameters before the first step and after each, [1 + steps, elements], and the numbers among the
    settings of each one's group behind the last step."""

    optimizer: str
    values: Mapping[str, torch.Tensor]
    settings: Mapping[str, Mapping[str, float]]
    sums: bool = False  # its sums over parameters can be completed over ranks

    def distances(self, whole: _Run) -> dict[str, torch.Tensor]:
        """The largest distance of an element of each parameter from that in `whole`, by step; infinite for NaN."""
        return {
            name: (value - whole.values[name]).abs().amax(1).nan_to_num(math.inf, math.inf)
            for name, value in self.values.items()
        }

    @property
    def movement(self) -> torch.Tensor:
        """The largest distance of an element from where it began, up to each step."""
        values = torch.cat([*self.values.values()], dim=1)
        return (values - values[:1]).abs().amax(1).cummax(0).values

    @property
    def finite_steps(self) -> int:
        """The number of steps until a value is not finite, the start included."""
        values = torch.cat([*self.values.values()], dim=1)
        return int(values.isfinite().all(1).long().cumprod(0).sum())


def _run_together(
    make: Callable[..., torch.optim.Optimizer],
    shapes: Mapping[str, Sequence[int]],
    phases: Sequence[TrialPhase],
    device: str,
    whole: ModelSubset,
) -> tuple[_Objective, _Run]:
    """The run of all parameters, in the first type and place that the optimizer takes; without the shapes that it
    refuses."""
    refused: list[Exception] = []

    def run(objective: _Objective) -> tuple[_Objective, _Run] | None:
        try:
            return objective, _run_subset(make, objective, whole)
        except Exception as error:
            refused.append(error)
        return None

    for place, dtype in itertools.product(dict.fromkeys(("cpu", device)), (torch.float64, torch.float32)):
        if result := run(_Objective(shapes, phases, place, dtype)):
            return result
        accepted = {
            shape
            for shape in {*shapes.values()}
            if run(_Objective({"alone": shape}, (TrialPhase(1),), place, dtype))
        }
        named = {name: shape for name, shape in shapes.items() if shape in accepted}
        if 1 < len(named) < len(shapes) and (result := run(_Objective(named, phases, place, dtype))):
            return result
    raise refused[0]


class _RankSums:
    """Sums of tensors over `ranks` threads, in the order of their numbers. A rank that ends while others sum again is an
    error of these."""

    def __init__(self, ranks: int):
        self._ranks, self._counts, self._ended = ranks, [0] * ranks, [False] * ranks
        self._parts: dict[int, dict[int, torch.Tensor]] = {}
        self._changed = threading.Condition()

    def of(self, rank: int) -> SumOverRanks:
        """The callable that sums, for this rank."""

        def total(tensor: torch.Tensor) -> torch.Tensor:
            with release_rng_lock(), self._changed:
                number = self._counts[rank]
                self._counts[rank] += 1
                parts = self._parts.setdefault(number, {})
                parts[rank] = tensor.detach().to(torch.float64, copy=True)
                self._changed.notify_all()
                self._changed.wait_for(lambda: len(parts) == self._ranks or self._lacking(number))
            if len(parts) < self._ranks:
                raise RuntimeError(f"another rank ended before sum {number + 1}: all must sum as often")
            if len(shapes := {part.shape for part in parts.values()}) > 1:
                raise ValueError(f"ranks sum tensors of the shapes {sorted([*shape] for shape in shapes)}")
            return tensor.copy_(torch.stack([parts[one] for one in range(self._ranks)]).sum(0))

        return total

    def end(self, rank: int) -> None:
        """No sum of this rank comes any more."""
        with self._changed:
            self._ended[rank] = True
            self._changed.notify_all()

    def _lacking(self, number: int) -> bool:
        return any(ended and count <= number for ended, count in zip(self._ended, self._counts, strict=True))


def _run_layout(
    make: Callable[..., torch.optim.Optimizer],
    objective: _Objective,
    subsets: Sequence[ModelSubset],
    sums: bool,
) -> list[_Run]:
    """The runs of `subsets`; an optimizer whose `sums` can be completed has them completed, beside a rank that has no
    parameter."""
    if not sums:
        return [_run_subset(make, objective, subset) for subset in subsets]
    ranks = _RankSums(len(subsets) + 1)

    def run(rank: int) -> _Run | None:
        try:
            if rank == len(subsets):
                return _run_without_parameters(make, objective, subsets[0], ranks.of(rank))
            return _run_subset(make, objective, subsets[rank], total=ranks.of(rank), leads=rank == 0)
        finally:
            ranks.end(rank)

    with ThreadPoolExecutor(len(subsets) + 1, thread_name_prefix="slotline-trial") as threads:
        runs = list(threads.map(run, range(len(subsets) + 1)))
    return runs[:-1]


def _run_without_parameters(
    make: Callable[..., torch.optim.Optimizer],
    objective: _Objective,
    subset: ModelSubset,
    total: SumOverRanks,
) -> None:
    """Step as a rank does that trains no parameter, but enters the sums of others."""
    parameter = zero_parameter(objective.device)
    with seeded(0):
        optimizer = subset.make_alone(make, parameter)
        complete_sums(optimizer, total, leads=False, device=objective.device)
        for _ in range(objective.steps):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()


def _run_subset(
    make: Callable[..., torch.optim.Optimizer],
    objective: _Objective,
    subset: ModelSubset,
    twin: bool = False,
    total: SumOverRanks | None = None,
    leads: bool = False,
) -> _Run:
    with seeded(int(twin)):
        wholes = {name: nn.Parameter(objective.start(name, twin)) for name in objective.shapes}
        optimizer, updated = subset.make_optimizer(make, wholes)
        if total is not None:
            complete_sums(optimizer, total, leads=leads, device=objective.device)
        gradients, parameters = objective.gradient_of([*updated]), [*updated.values()]
        values = [torch.cat([p.detach().reshape(-1) for p in parameters])]
        for step in range(objective.steps):
            for parameter, gradient in zip(parameters, gradients(step, values[-1]), strict=True):
                parameter.grad = gradient
            optimizer.step()
            values.append(torch.cat([p.detach().reshape(-1) for p in parameters]))
    sizes = [parameter.numel() for parameter in parameters]
    kept = torch.stack(values).cpu().split(sizes, dim=1)
    settings = {
        parameter: {
            key: float(value)
            for key, value in group.items()
            if isinstance(value, int | float | torch.Tensor) and torch.as_tensor(value).numel() == 1
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return _Run(
        type(optimizer).__name__,
        dict(zip(updated, kept, strict=True)),
        {name: settings.get(parameter, {}) for name, parameter in updated.items()},
        sums_over_ranks(optimizer),
    )


def _same_numbers(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Equal but for rounding: sums over ranks have another order."""
    return one.keys() == other.keys() and all(
        math.isclose(value, other[key], rel_tol=1e-9) or (math.isnan(value) and math.isnan(other[key]))
        for key, value in one.items()
    )


def _named(shapes: Iterable[Sequence[int]]) -> dict[str, Sequence[int]]:
    return {
        f"parameter {number} of shape {list(shape)}": shape for number, shape in enumerate(shapes, start=1)
    }
