"""Whether stages that share matrices compute, with their real sums, what one worker computes with whole matrices.

Compared where they will run, over the connections that they will use, before the first step: outputs, gradients of
inputs and of every parameter. All workers of a mesh come to it at the same time, stage by stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine import EngineError
from worker.engine.random_state import RandomState, restart_at_operations
from worker.engine.stage_run import drop_casts, run_forward
from worker.engine.tensor_share import TensorShare
from worker.model.distance import Tolerance, distance, least_size, tolerance_of
from worker.model.stages import StageModule
from worker.seeding import seeded
from worker.turns import GENERATORS

_SEED = 0x5A12ED


@dataclass(frozen=True)
class Place:
    """Where stages run, and how: `worker` is its name for people, `seed` and `share` (its number among those with other
    samples) what its engine's random numbers follow from, and `sample` the model's inputs."""

    worker: str
    device: torch.device
    autocast: torch.dtype | None
    seed: int
    share: int
    sample: Sequence[Tensor]


@dataclass(frozen=True)
class _Made:
    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def check_shared(
    shared: Mapping[int, StageModule], whole: Mapping[int, StageModule], share: TensorShare, place: Place
) -> list[str]:
    """Compare each stage of `shared`, whose engine is connected, with the same of `whole`; what to tell of it.

    Parameters, buffers and gradients are afterwards what they were; `whole` can be thrown away. EngineError names the
    first tensor that differs, and by how much.
    """
    notes = []
    for index in sorted(shared):
        expected = _alone(whole[index], place)
        found = _run(shared[index], place)
        if expected is None:
            notes.append(
                f"{place.worker}: stage {index} was not compared with its whole matrices, which do not fit beside it"
            )
        else:
            tolerance = tolerance_of(whole[index], place.autocast, place.device.type)
            _compare(index, expected, found, share, tolerance, place.worker)
    drop_casts()
    if place.device.type == "cuda":  # sums of the first step are on another stream
        torch.cuda.synchronize(place.device)
    return notes


def _alone(stage: StageModule, place: Place) -> _Made | None:
    """What the whole stage makes; None where there is no room for it."""
    try:
        stage = stage.to(place.device)
        restart_at_operations(stage, RandomState(place.seed, place.share, place.device))
        return _run(stage, place)
    except torch.OutOfMemoryError:
        return None


def _run(stage: StageModule, place: Place) -> _Made:
    before = [(buffer, buffer.detach().clone()) for buffer in stage.buffers()]
    inputs = dict(zip(stage.inputs, _inputs(stage, place), strict=True))
    leaves = {
        name: x for name, x in inputs.items() if x.is_floating_point() and not name.startswith("input:")
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    with (
        GENERATORS,
        seeded(_SEED),
    ):  # operations that draw start from the seeds of step 0, as their engine has them
        run = run_forward(
            stage,
            list(inputs.values()),
            device_type=place.device.type,
            training=True,
            autocast_dtype=place.autocast,
        )
    roots = [one for one in run.outputs if one.requires_grad]
    torch.autograd.backward(roots, [_drawn(one.shape, one.dtype, k, place) for k, one in enumerate(roots)])
    made = _Made(
        dict(zip(stage.outputs, (one.detach() for one in run.outputs), strict=True)),
        {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None},
        {
            stage.original_names[local]: parameter.grad
            for local, parameter in stage.named_parameters()
            if parameter.grad is not None
        },
    )
    for parameter in stage.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, held in before:
            buffer.copy_(held)
    return made


def _inputs(stage: StageModule, place: Place) -> Iterator[Tensor]:
    """The model's own where they are known; else numbers that are the same on all workers of a mesh."""
    named = zip(stage.inputs, stage.input_shapes, stage.input_dtypes, strict=True)
    for number, (name, shape, dtype) in enumerate(named):
        if name.startswith("input:"):
            yield place.sample[int(name.removeprefix("input:"))].to(place.device)
        elif dtype.is_floating_point:
            yield _drawn(shape, dtype, 1000 + number, place)
        else:  # an index that every table has, a mask that hides nothing
            yield torch.full(tuple(shape), dtype == torch.bool, dtype=dtype, device=place.device)


def _drawn(shape: Sequence[int], dtype: torch.dtype, number: int, place: Place) -> Tensor:
    draw = torch.Generator().manual_seed(_SEED + number)
    return torch.randn(tuple(shape), generator=draw).to(place.device, dtype)


def _compare(
    index: int, expected: _Made, found: _Made, share: TensorShare, tolerance: Tolerance, worker: str
) -> None:
    whole = {name: share.part(name, gradient) for name, gradient in expected.parameters.items()}
    least = least_size([*whole.values(), *expected.inputs.values()])
    for what, mine, theirs, small, most in (
        ("output", found.outputs, expected.outputs, 0.0, tolerance.values),
        ("the gradient of input", found.inputs, expected.inputs, least, tolerance.gradients),
        ("the gradient of", found.parameters, whole, least, tolerance.gradients),
    ):
        for name in theirs:
            here = mine.get(name)
            apart = float("inf") if here is None else distance(theirs[name], here, small)
            if apart > most:
                raise EngineError(
                    f"{worker}: {what} {name!r} of stage {index} differs by {apart:.3g} of its size (at most {most:g} is "
                    "rounding) between workers that share its matrices and one that has the whole: their sums are "
                    "wrong on these accelerators; set resources.*.tensor to 1, or training.check_trace to false where "
                    "the stage's values are known to vary so"
                )
