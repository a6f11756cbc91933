"""Measures the cost of REDUCE and STEP, by the engine's own update on synthetic parameters, and of collectives.

The parameters are matrices, since some optimizers take nothing else; the large ones outgrow the caches.
Must not know stages, plans or Ray.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from worker.contract.costs import LinearCost, UpdateCosts
from worker.contract.failures import attributed_to
from worker.contract.job import LossScaling
from worker.contract.reasons import Reason
from worker.engine.local_stages import LocalStages
from worker.engine.optim.grad_scaler import PipelineGradScaler
from worker.engine.optim.reduce_and_step import ModelUpdate, UpdateSettings
from worker.parallel.collectives import Collectives
from worker.transport.base import Topology, Transport, finish
from worker.transport.local import LocalTransport

# Matrices, since some optimizers take nothing else; the large ones outgrow the caches.
_FEW_TENSORS, _MANY_TENSORS = 4, 64
_SMALL_WIDTH, _LARGE_WIDTH = 4, 1024
_REPEATS = 5
_WARM_UP = 2
WORKERS_GROUP = "workers"

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@attributed_to(Reason.USER_CODE_RAISED)
def measure_update(
    make: MakeOptimizer, device: str, clip_grad_norm: float | None, scaling: LossScaling | None = None
) -> UpdateCosts:
    """The costs of REDUCE and STEP on one worker alone, by steps of few and many, small and large tensors. With `scaling`
    (fp16) gradients are unscaled and checked in REDUCE."""
    few, many, large = (
        _update_seconds(make, device, clip_grad_norm, scaling, tensors=tensors, width=width)
        for tensors, width in (
            (_FEW_TENSORS, _SMALL_WIDTH),
            (_MANY_TENSORS, _SMALL_WIDTH),
            (_FEW_TENSORS, _LARGE_WIDTH),
        )
    )
    item = torch.get_default_dtype().itemsize
    small_bytes, large_bytes = (_FEW_TENSORS * width**2 * item for width in (_SMALL_WIDTH, _LARGE_WIDTH))

    def linear(action: str) -> LinearCost:
        per_tensor_s = max(0.0, many[action] - few[action]) / (_MANY_TENSORS - _FEW_TENSORS)
        per_byte_s = max(0.0, large[action] - few[action]) / (large_bytes - small_bytes)
        return LinearCost(max(0.0, few[action] - _FEW_TENSORS * per_tensor_s), per_tensor_s, per_byte_s)

    return UpdateCosts(reduce=linear("reduce"), step=linear("step"))


def _update_seconds(
    make: MakeOptimizer,
    device: str,
    clip_grad_norm: float | None,
    scaling: LossScaling | None,
    *,
    tensors: int,
    width: int,
) -> Mapping[str, float]:
    module = nn.Module()
    for index in range(tensors):
        module.register_parameter(f"p{index}", nn.Parameter(torch.zeros(width, width, device=device)))
    update = ModelUpdate(
        LocalStages({0: module}, ["m0"]),
        Collectives(LocalTransport.group(Topology(("m0",)))["m0", 0], {}),
        UpdateSettings(clip_grad_norm=clip_grad_norm, non_finite="skip", device=device),
        optimizer=make(list(module.parameters())),
        scaler=None if scaling is None else PipelineGradScaler(scaling, device),
    )
    taken: dict[str, list[float]] = {"reduce": [], "step": []}
    for _ in range(_WARM_UP + _REPEATS):
        update.begin()
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        for action, run in (("reduce", lambda: update.reduce([])), ("step", update.step)):
            taken[action].append(_action_seconds(run, device))
    return {action: statistics.median(times[_WARM_UP:]) for action, times in taken.items()}


def measure_all_reduce(
    transport: Transport, device: str, *, large_bytes: int, group: str = WORKERS_GROUP
) -> tuple[float, float]:
    """(seconds to begin, bytes per second) of an all-reduce over the workers of a group.

    All of them call this at the same time.
    """
    return _latency_and_bandwidth(lambda tensor: transport.all_reduce(group, tensor), device, large_bytes)


def measure_reduce_scatter_all_gather(
    transport: Transport,
    device: str,
    *,
    large_bytes: int,
    group: str = WORKERS_GROUP,
    workers: int | None = None,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(seconds to begin, bytes per second) of a reduce-scatter and of an all-gather, in bytes of the whole tensor, over a
    group of `workers` (default: all)."""
    workers = workers or transport.topology.size

    def scatter(whole: torch.Tensor) -> None:
        finish(transport.start_reduce_scatter(group, torch.empty_like(_part(whole)), whole))

    def gather(whole: torch.Tensor) -> None:
        finish(transport.start_all_gather(group, whole, _part(whole).clone()))

    def _part(whole: torch.Tensor) -> torch.Tensor:
        return whole[: whole.numel() // workers]

    each = workers * torch.get_default_dtype().itemsize
    whole_bytes = large_bytes // each * each
    costs = [_latency_and_bandwidth(run, device, whole_bytes, least=workers) for run in (scatter, gather)]
    return costs[0], costs[1]


def _latency_and_bandwidth(
    run: Callable[[torch.Tensor], None], device: str, large_bytes: int, least: int = 1
) -> tuple[float, float]:
    """(seconds to begin, bytes per second) of `run` of a vector of ones."""
    item = torch.get_default_dtype().itemsize
    times: dict[int, list[float]] = {least: [], large_bytes // item: []}
    for _ in range(_WARM_UP + _REPEATS):
        for count, seconds in times.items():
            tensor = torch.ones(count, device=device)
            each = functools.partial(run, tensor)
            seconds.append(_action_seconds(each, device, before=each))
    small_s, large_s = (statistics.median(seconds[_WARM_UP:]) for seconds in times.values())
    return small_s, large_bytes / max(large_s - small_s, large_s / 10)


def _action_seconds(
    action: Callable[[], Any], device: str, before: Callable[[], Any] = lambda: None, cuda: Any = torch.cuda
) -> float:
    """Seconds of `action`; on CUDA of the device, between events. `before` is enqueued ahead of them: an all-reduce there
    synchronises the workers, and hides the host's time to start the next, as in a step."""
    if device != "cuda":
        started = time.perf_counter()
        action()
        return time.perf_counter() - started
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    before()
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
