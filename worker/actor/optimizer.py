"""Creates a job's loss, optimizer, parameter groups and LR schedule; a wrong setting is a FactoryError.

Every mesh has all parameter groups, in one order, also those of which it holds no parameter: a schedule's lists with
one entry a group fit everywhere. Group 0 holds the parameters that no pattern matches.
On CUDA torch's fused implementation is taken unless the arguments choose: it skips a step of non-finite gradients
without asking the host.
Must not know stages, the engine's steps or Ray.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from worker.actor.loss import JobLoss
from worker.checks.loss_reduction import COUNT_ATTRIBUTE
from worker.contract.failures import attributed_to
from worker.contract.job import Factory, Job, Optimizer, ParameterGroup
from worker.contract.profile import FactoryError, ModelError, OptimizerState
from worker.contract.reasons import Reason
from worker.engine.optim.cross_sums import sums_over_ranks, zero_parameter
from worker.engine.optim.model_trials import ModelParameters, NamedSubset
from worker.engine.optim.state_dict import GROUP_NUMBER_KEY, IMPLEMENTATION_FLAGS
from worker.engine.optim.trials import (
    check_pipeline_optimizer,
    check_tensor_parallel_optimizer,
    check_zero1_optimizer,
)
from worker.model.factory import (
    build_arguments,
    call_factory,
    check_patterns_match,
    pattern_matches,
    resolve,
)
from worker.model.pytree import Target, Targets, count_tokens, target_tensors


def parameter_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> list[dict[str, Any]]:
    """The parameter groups that the optimizer gets in place of `parameters`, whose names are `names`."""
    made: list[dict[str, Any]] = [{"params": [], GROUP_NUMBER_KEY: 0}]
    made += [
        {"params": [], GROUP_NUMBER_KEY: number, **build_arguments(group.settings)}
        for number, group in enumerate(groups, start=1)
    ]
    for name, parameter in zip(names, parameters, strict=True):
        made[_group_number(groups, name)]["params"].append(parameter)
    return made


def check_parameter_groups(
    groups: Sequence[ParameterGroup], names: Sequence[str], aliases: Mapping[str, Sequence[str]]
) -> None:
    """ModelError for patterns that match no trained parameter of the model, or only parameters of earlier groups."""
    taken: dict[str, int] = {}
    for number, group in enumerate(groups):
        field = f"optimizer.groups[{number}].match"
        check_patterns_match(field, group.match, names, aliases)
        for pattern in group.match:
            found = [name for name in names if pattern_matches(pattern, name)]
            if found and all(taken.get(name, number) < number for name in found):
                raise ModelError(
                    f"{field}: all that {pattern!r} matches ({', '.join(found[:4])}) is in groups before it, of which the "
                    "first counts: change their order, or remove it"
                )
        for name in names:
            if any(pattern_matches(pattern, name) for pattern in group.match):
                taken.setdefault(name, number)


def check_group_settings(groups: Sequence[ParameterGroup], optimizer: torch.optim.Optimizer) -> None:
    """FactoryError for settings of a group that the optimizer does not have: torch accepts and ignores them."""
    for number, group in enumerate(groups):
        if unknown := sorted(group.settings.keys() - optimizer.defaults.keys()):
            raise FactoryError(
                f"optimizer.groups[{number}] sets {', '.join(unknown)}, which {type(optimizer).__name__} does not know: "
                f"it has {', '.join(sorted(optimizer.defaults))}"
            )


def _group_number(groups: Sequence[ParameterGroup], name: str) -> int:
    for number, group in enumerate(groups, start=1):
        if any(pattern_matches(pattern, name) for pattern in group.match):
            return number
    return 0


# Optimizers whose fused CUDA kernels skip a step by themselves when a norm is not finite, so that the host
# need not look at it.
_FUSED_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
# Names under which schedules of the field take what an evaluation measured.
_METRIC_PARAMETERS = {"metric", "metrics", "loss", "val_loss", "current", "score", "value"}
# The shapes of parameters whose state is counted, beside a single element: a vector and a matrix.
_STATE_SHAPES = ((4096,), (64, 64))


def make_loss(spec: Factory | None, device: str = "cpu") -> JobLoss:
    """A loss module of a class, on `device`, or a function with its keyword arguments bound.

    None: the model returns its loss, which is taken as it is.
    """
    if spec is None:
        return JobLoss("of the model itself", lambda output, _: output)
    path = spec.factory
    target = resolve(path)
    if not isinstance(target, type):
        arguments = tree_map(lambda value: _on(device, value), build_arguments(spec.args))
        return JobLoss(path, functools.partial(target, **arguments))
    loss = call_factory(path, spec.args)
    if isinstance(loss, nn.Module):
        if trained := [name for name, p in loss.named_parameters() if p.requires_grad]:
            raise FactoryError(
                f"loss {path!r} has parameters of its own ({', '.join(trained)}), which nobody would train: "
                "move them into the model"
            )
        loss = loss.to(device)
    return JobLoss(path, loss)


def _on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


IGNORED_TARGET = -100
"""The integer that torch's losses, and models' own, take for no target."""


def ignored_target(spec: Factory) -> int:
    """The value of a target that is none, for a job's loss: its ignore_index, or IGNORED_TARGET where that is not given."""
    return int(spec.args.get("ignore_index", IGNORED_TARGET))


def target_counter(job: Job, loss: JobLoss) -> Callable[[Target], torch.Tensor] | None:
    """The function of a target by whose value microbatches weigh; None where they count equally.

    It is the loss's own count_targets, or the sum of the class weights by which torch's cross entropy divides, or the
    number of entries that are not ignored.
    """
    if job.training.loss_reduction != "tokens" or job.loss is None:
        return None
    function = loss.target.func if isinstance(loss.target, functools.partial) else loss.target
    own = getattr(function, COUNT_ATTRIBUTE, None)
    if own is not None:
        return functools.partial(_own_count, own)
    return functools.partial(
        _class_weights_or_count, ignored=ignored_target(job.loss), weights=_class_weights(loss.target)
    )


def _own_count(count: Callable[[Any], Any], target: Target) -> torch.Tensor:
    """The count that a loss gives of a target, on the device of that target, where workers add it up."""
    device = target_tensors(target)[0].device
    return torch.as_tensor(count(target.target if isinstance(target, Targets) else target), device=device)


def _class_weights(target: Any) -> torch.Tensor | None:
    """The class weights of torch's cross entropy or negative log likelihood."""
    if isinstance(target, nn.CrossEntropyLoss | nn.NLLLoss):
        return target.weight
    if isinstance(target, functools.partial) and target.func in (
        nn.functional.cross_entropy,
        nn.functional.nll_loss,
    ):
        return target.keywords.get("weight")
    return None


def _class_weights_or_count(target: Target, ignored: int, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return count_tokens(target, ignored)
    counted = target != ignored
    return torch.where(counted, weights.to(target.device)[torch.where(counted, target, 0)], 0.0).sum()


@attributed_to(Reason.USER_CODE_RAISED)
def make_optimizer(
    spec: Factory, parameters: Sequence[nn.Parameter], names: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """The job's optimizer; for parameters on CUDA the fused one of torch, unless its arguments choose.

    With the `names` of the parameters they are in the job's groups.
    """
    path, arguments = spec.factory, dict(spec.args)
    groups = spec.groups if isinstance(spec, Optimizer) else ()
    try:
        target, arguments = resolve(path), build_arguments(arguments)
        grouped = parameter_groups(groups, names, parameters) if names and groups else parameters
        optimizer = target(grouped, **arguments, **_fused_flag(target, arguments, parameters))
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(
            f"optimizer {path!r}({_call_arguments('parameters', arguments)}) raised {type(error).__name__}: {error}; "
            "correct optimizer.args"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FactoryError(f"optimizer {path!r} returned {type(optimizer).__name__}, not a torch optimizer")
    check_group_settings(groups, optimizer)
    try:
        inspect.signature(optimizer.step).bind()
    except ValueError:  # a compiled step() may not know its own arguments
        pass
    except TypeError as error:
        raise FactoryError(
            f"optimizer {path!r} is a {type(optimizer).__name__}, whose step() wants more than gradients ({error}): a "
            "training step computes losses and gradients once, so that there is nothing to call again; choose an "
            "optimizer whose step() needs no closure (torch's SGD, Adam, AdamW, ...)"
        ) from None
    return optimizer


def optimizer_state_bytes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], shape: Sequence[int], device: str = "cpu"
) -> int:
    """Bytes of all tensors that the optimizer of `make` keeps of one fp32 parameter after its first step."""
    parameter = nn.Parameter(torch.zeros(*shape, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    optimizer.step()
    kept = tree_leaves(dict(optimizer.state))
    return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))


def optimizer_state_keys(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dimensions: int
) -> frozenset[str] | None:
    """The names of what the optimizer of `make` keeps of a parameter of so many dimensions; None where it refuses one."""
    parameter = nn.Parameter(torch.zeros([2] * dimensions))
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer = make([parameter])
        optimizer.step()
    except Exception:  # of whatever optimizer: Muon takes matrices only
        return None
    return frozenset(optimizer.state[parameter])


@attributed_to(Reason.USER_CODE_RAISED)
def measure_optimizer_state(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str = "cpu"
) -> OptimizerState:
    """The state that the optimizer of `make` keeps, measured by steps of small parameters.

    State that grows more slowly than its parameter (Adafactor's rows and columns) is taken as that of a
    vector, which is more than a matrix needs. Shapes that the optimizer refuses are left out (Muon takes
    matrices only); what it raises for all of them is raised.
    """
    found: dict[tuple[int, ...], int] = {}
    refused: list[Exception] = []
    for shape in ((1,), *_STATE_SHAPES):
        try:
            found[shape] = optimizer_state_bytes(make, shape, device)
        except Exception as error:
            refused.append(error)
    if not found.keys() - {(1,)}:
        raise refused[-1]
    least = found.get((1,), 0)
    item = torch.get_default_dtype().itemsize
    each = max(
        (size - least) / (item * (math.prod(shape) - (1 if least else 0)))
        for shape, size in found.items()
        if shape != (1,)
    )
    each = max(each, 0.0)
    return OptimizerState(each, max(0, round(least - each * item)))


@attributed_to(Reason.USER_CODE_RAISED)
def check_layout_of_optimizer(job: Job, device: str = "cpu") -> str:
    """FactoryError where the job's ranks step optimizers of their own, and its optimizer updates something else then:
    parts of a parameter with ZeRO-1 or tensor parallelism, some of the parameters on each of several meshes.

    The error for which several meshes could not be tried before the model is built, empty where they were."""
    spec, resources = job.optimizer, job.resources
    make = functools.partial(make_optimizer, spec)
    field = "resources.shard is optimizer"
    try:
        if job.sharded:
            check_zero1_optimizer(make, device)
        field = f"parallelism.tp is {resources.tensor}"
        if resources.tensor > 1:
            check_tensor_parallel_optimizer(make, device)
        field = f"resources.meshes is {resources.meshes or 'one a stage'}"
        if job.meshes > 1:
            return check_pipeline_optimizer(functools.partial(_make_of_numbered, spec), device)
        return ""
    except ValueError as error:
        raise FactoryError(f"{field}: {error}") from error


@attributed_to(Reason.USER_CODE_RAISED)
def check_optimizer_of_model(
    job: Job, parameters: Mapping[str, nn.Parameter], device: str = "cpu", *, untried: str = ""
) -> list[str]:
    """Notes on what could not be tried of the job's optimizer with the model's trained `parameters`, by name; FactoryError
    where ranks would update them otherwise. `untried` is what check_layout_of_optimizer returned."""
    model, make = ModelParameters(parameters), functools.partial(make_optimizer, job.optimizer)
    path, several = job.optimizer.factory, job.meshes > 1
    try:
        obstacles = {
            "on the model's own parameters": model.try_parameters(make, device, untried=bool(untried)),
            "for the parameters of one mesh alone": model.check_settings(
                make, model.halves() if several else []
            ),
        }
    except ValueError as error:
        raise FactoryError(f"optimizer {path!r}: {error}") from error
    return [
        f"optimizer {path!r} could not be tried {what}: {obstacle}; if a mesh updates parameters otherwise than one process "
        "does, nobody notices: compare the job with its plain loop (slotline verify)"
        for what, obstacle in obstacles.items()
        if obstacle
    ] + (_waiting_step_notes(path, make, device) if device == "cuda" else [])


def _waiting_step_notes(
    path: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], device: str
) -> list[str]:
    """A note on an optimizer that cannot skip a step by itself: the host has to know the norm before it enqueues one."""
    try:
        optimizer = make([zero_parameter(device)])
    except Exception:  # one that wants more than one parameter, of which nothing is known here
        return []
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return []
    fused = "fused" in inspect.signature(type(optimizer)).parameters
    way = "give optimizer.args fused: true" if fused else "torch's Adam, AdamW and SGD do with fused: true"
    return [
        f"optimizer {path!r} does not skip a step by itself: in each STEP the host waits for the norm of the gradients, and "
        f"the GPU then for the host; {way}"
    ]


@attributed_to(Reason.USER_CODE_RAISED)
def check_optimizer_of_meshes(
    job: Job, parameters: Mapping[str, nn.Parameter], names_of_mesh: Mapping[str, Sequence[str]]
) -> None:
    """FactoryError where the factory gives one of the model's trained `parameters` other settings on its mesh, which has
    those of these names in this order, than in one process; or where sums over parameters would count one twice."""
    parts = [
        NamedSubset(f"the {len(own)} of mesh {mesh}, in the order of its stages", own)
        for mesh, names in names_of_mesh.items()
        if (own := [name for name in names if name in parameters])
    ]
    holders = Counter(name for part in parts for name in part.members)
    make = functools.partial(make_optimizer, job.optimizer)
    try:
        ModelParameters(parameters).check_settings(make, parts)
        shared = [name for name, meshes in holders.items() if meshes > 1]
        if shared and sums_over_ranks(make([zero_parameter()], [""])):
            raise ValueError(
                f"it sums over all parameters, and {shared[0]!r} ({len(shared)} in all) is held by {holders[shared[0]]} "
                "meshes, whose sums would count it as often: untie it, have both of its layers on one mesh "
                "(pipeline.stages), or choose an optimizer that updates each parameter by itself"
            )
    except ValueError as error:
        raise FactoryError(f"optimizer {job.optimizer.factory!r}: {error}") from error


def _make_of_numbered(
    spec: Optimizer, parameters: list[nn.Parameter], numbers: list[int]
) -> torch.optim.Optimizer:
    """The job's optimizer for parameters without names, dealt to its groups by their numbers: with groups a factory is
    called with these, as many on every mesh."""
    groups = tuple(
        replace(group, match=(f"{number}.*",)) for number, group in enumerate(spec.groups, start=1)
    )
    names = [f"{number % (len(groups) + 1)}.{number}" for number in numbers]
    return make_optimizer(replace(spec, groups=groups), parameters, names)


def _fused_flag(
    target: Any, arguments: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> dict[str, bool]:
    fits = all(p.is_cuda and p.is_floating_point() for p in parameters)
    return (
        {"fused": True}
        if fits and target in _FUSED_OPTIMIZERS and not arguments.keys() & {*IMPLEMENTATION_FLAGS}
        else {}
    )


@attributed_to(Reason.USER_CODE_RAISED)
def make_schedule(spec: Factory, optimizer: torch.optim.Optimizer) -> Any:
    """The learning-rate schedule of `optimizer`: an object with step(), state_dict() and load_state_dict().

    The engine calls step() once after each optimizer step; a step that is skipped because its gradients
    are not finite does not count, neither here nor in the optimizer's own state.
    """
    path, arguments = spec.factory, dict(spec.args)
    call = f"schedule {path!r}({_call_arguments('optimizer', arguments)})"
    try:
        schedule = resolve(path)(optimizer, **build_arguments(arguments))
    except FactoryError:
        raise
    except Exception as error:
        raise FactoryError(
            f"{call} raised {type(error).__name__}: {error}; correct optimizer.schedule.args"
        ) from error
    if missing := [name for name in ("step", "state_dict", "load_state_dict") if not hasattr(schedule, name)]:
        raise FactoryError(
            f"{call} returned {type(schedule).__name__}, which has no {', '.join(missing)}: "
            "return a scheduler of torch.optim.lr_scheduler, or one like it"
        )
    if metric := _metric_dependence(schedule):
        raise FactoryError(
            f"{call} returned {type(schedule).__name__}, which changes the rate by {metric}: every mesh steps a "
            "schedule of its own, after every training step, and knows no loss or metric of the whole; choose a "
            "schedule that depends on the number of steps only"
        )
    try:
        inspect.signature(schedule.step).bind()
    except TypeError as error:
        raise FactoryError(
            f"{call} returned {type(schedule).__name__}, whose step() wants more than the number of steps "
            f"({error}): choose a schedule that depends on nothing else"
        ) from None
    _check_storable(call, schedule.state_dict())
    return schedule


_TRIED_SCHEDULE_STEPS = 100_000


@attributed_to(Reason.USER_CODE_RAISED)
def try_schedule(
    spec: Factory, schedule: Any, optimizer: torch.optim.Optimizer, *, steps: int, limit_s: float = 5.0
) -> None:
    """Step a new schedule through `steps` training steps, or as many as `limit_s` lets; FactoryError for one that raises or
    sets a rate that is no number. The optimizer's rates are afterwards those behind the last step."""
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer's steps
        for step in range(1, min(steps, _TRIED_SCHEDULE_STEPS) + 1):
            rates = [float(group["lr"]) for group in optimizer.param_groups]
            if not all(map(math.isfinite, rates)):
                raise FactoryError(
                    f"schedule {spec.factory!r} sets the learning rate {rates} for step {step} of training.steps {steps}: "
                    "correct optimizer.schedule.args"
                )
            if time.monotonic() - begin > limit_s:
                return
            try:
                schedule.step()
            except Exception as error:
                raise FactoryError(
                    f"schedule {spec.factory!r} raised {type(error).__name__} after step {step} of training.steps {steps}: "
                    f"{error}; correct optimizer.schedule.args"
                ) from error


def warmup_decay(
    optimizer: torch.optim.Optimizer, steps: int, warmup: int = 0, decay: str = "constant"
) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule that raises the learning rate in a line over the first `warmup` steps, and then keeps it (constant), or
    lowers it to 0 behind the last of `steps` in a line (linear) or half a cosine (cosine)."""
    if decay not in ("constant", "linear", "cosine"):
        raise ValueError(f"decay is {decay!r}: write constant, linear or cosine")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[
            decay
        ]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _metric_dependence(schedule: Any) -> str | None:
    """The dependence of a schedule, or of one inside it, on a measured value; None if there is none."""
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return f"a metric ({type(schedule).__name__})"
    for name in inspect.signature(schedule.step).parameters:
        if name.lower().strip("_") in _METRIC_PARAMETERS:
            return f"a metric ({type(schedule).__name__}.step takes {name!r})"
    inner = getattr(schedule, "_schedulers", ())
    return next((metric for schedule in inner if (metric := _metric_dependence(schedule))), None)


def _check_storable(call: str, state: Any) -> None:
    content = io.BytesIO()
    try:
        torch.save(state, content)
        content.seek(0)
        torch.load(content, weights_only=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise FactoryError(
            f"{call}: its state_dict() holds objects that a checkpoint cannot store ({reason}): "
            "keep numbers, texts, lists and tensors there"
        ) from error


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first group of parameters, as the next step will use it."""
    return float(optimizer.param_groups[0]["lr"])


def _call_arguments(first: str, arguments: Mapping[str, Any]) -> str:
    return ", ".join([first, *(f"{key}={value!r}" for key, value in arguments.items())])
