"""Measures time, memory and FLOPs of every layer of a traced model, forward and backward, on one device.

One layer at a time, so that a model that fits on no single device can be measured on one. A tensor-parallel layer is
measured by one rank alone: its collectives are counted, not run.
FLOPs come from torch's FlopCounterMode: a multiplication and an addition are two; matrix products, convolutions and
attention are counted. Attention counts the whole square, also where it is causal, and its backward twice the forward:
what fused kernels recompute to save memory is no work of the model.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from worker.contract.failures import attributed_to
from worker.contract.profile import HostCost, LayerCost, LayerEdge, LayerProfile
from worker.contract.reasons import Reason
from worker.engine.autograd import WeightBackward, backward, backward_input
from worker.engine.compile import StageCompiler
from worker.engine.forward import drop_casts, keeping_no_tensors, run_forward, uncompiled
from worker.engine.recomputation.products import KeptProducts, StageProducts
from worker.model.export import TracedModel
from worker.model.opaque.call import opaque_calls
from worker.model.rng import RandomState, reseed_at_random_ops
from worker.model.stages import OUTPUT_NAME, StageModule, input_name, is_output
from worker.parallel.sync_batch_norm import batch_norm_collectives
from worker.parallel.tensor.graph_collectives import TensorGroup
from worker.parallel.tensor.tensor_stage import tensor_stage

log = logging.getLogger(__name__)


# Measuring all layers stops after about this long, each measured at least MIN_REPEATS times.
MEASURE_BUDGET_S = 2.0
MIN_REPEATS = 2

LossFunction = Callable[[Tensor, Tensor], Tensor]


def measure_layers(
    traced: TracedModel,
    loss: LossFunction,
    target: Tensor,
    *,
    device: torch.device | str = "cpu",
    repeats: int = 5,
    tensor_parallel: TensorParallelProbe | None = None,
    compiler: StageCompiler | None = None,
) -> LayerProfile:
    """The profile of `traced` for its example inputs; `target` belongs to them.

    Times are medians of up to `repeats` runs after one to warm up, which also counts the bytes that autograd keeps; on
    CPU they are processor time, on CUDA those of the device and of the host apart. The loss counts as a part of the last
    layer. With `tensor_parallel` each layer runs as on one rank of a tensor-parallel group; with a `compiler` it is
    compiled.
    """
    device = torch.device(device)

    def loss_of(output: Tensor) -> Tensor:
        return loss(output, target.to(device))

    profiler = _LayerProfiler(traced, loss_of, device, repeats, tensor_parallel, compiler)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return profiler.profile()


class _LayerProfiler:
    """Runs the layers of a model one after the other, each on the outputs of those before, and collects the profile."""

    def __init__(
        self,
        traced: TracedModel,
        loss: Callable[[Tensor], Tensor],
        device: torch.device,
        repeats: int,
        tensor_parallel: TensorParallelProbe | None,
        compiler: StageCompiler | None,
    ) -> None:
        self._traced, self._placed, self._loss, self._device = traced, traced.placed, loss, device
        self._repeats, self._tensor_parallel, self._compiler = repeats, tensor_parallel, compiler
        self._builder = traced.builder(range(len(self._placed.layers)))
        self._edges = self._builder.edges()
        self._differentiable = {edge.tensor for edge in self._edges if edge.differentiable}
        self._last_use: dict[str, int] = {}
        for edge in self._edges:
            self._last_use[edge.tensor] = max(self._last_use.get(edge.tensor, 0), edge.target)
        self._tensors: dict[str, Tensor] = {
            input_name(index): value for index, value in enumerate(traced.example_inputs)
        }
        """Inputs and outputs of layers that a later layer needs, on the host."""
        self._parameter_sizes: dict[str, int] = {}
        self._buffer_sizes: dict[str, int] = {}
        self._frozen: dict[str, None] = {}
        self._updated_buffers: set[str] = set()
        self._compiled: set[str] = set()
        self._split: set[str] = set()
        self._saved_at: dict[str, set[int]] = {}

    def profile(self) -> LayerProfile:
        costs = tuple(self._measure(index, name) for index, name in enumerate(self._placed.layers))
        example_inputs = self._traced.example_inputs
        return LayerProfile(
            layers=costs,
            edges=self._layer_edges(),
            device_type=self._device.type,
            microbatch=", ".join(f"{list(value.shape)} {_dtype_name(value)}" for value in example_inputs),
            parameter_sizes=self._parameter_sizes,
            frozen_parameters=tuple(self._frozen),
            buffer_sizes=self._buffer_sizes,
            updated_buffers=frozenset(self._updated_buffers),
            checkpointed=self._traced.checkpointed,
            compiled=frozenset(self._compiled),
            split_parameters=frozenset(self._split),
            joined=dict(self._traced.joined),
        )

    def _measure(self, index: int, name: str) -> LayerCost:
        run = self._layer_run(index)
        if self._compiler is not None:
            # torch breaks its graphs at random operations, as in a stage
            reseed_at_random_ops(run.stage, RandomState(0, 0, self._device))
            if self._compiler.compile(f"layer {name}", run.stage, list(run.inputs.values())):
                self._compiled.add(name)
        saved = run.count_saved()
        products = None if name in self._compiled else run.count_products()
        for tensor in saved.tensors:
            self._saved_at.setdefault(tensor, set()).add(index)
        sums = () if self._tensor_parallel is None else _layer_collectives(run, self._tensor_parallel)
        times = _layer_times(
            run,
            self._device,
            self._repeats,
            MEASURE_BUDGET_S / len(self._placed.layers),
            selective=products is not None,
        )
        run.stage.zero_grad(set_to_none=True)
        parameters, buffers = self._named_state(run.stage)
        self._tensors |= run.results()
        self._tensors = {
            key: value for key, value in self._tensors.items() if self._last_use.get(key, index + 1) > index
        }
        return LayerCost(
            name=name,
            forward_s=times.forward_s,
            backward_input_s=times.backward_input_s,
            backward_weight_s=times.backward_weight_s,
            backward_s=times.backward_s,
            activation_bytes=saved.bytes,
            weight_stash_bytes=saved.weight_stash_bytes,
            parameter_bytes=sum(value.nbytes for value in parameters.values()),
            parameters=tuple(parameters),
            buffers=tuple(buffers),
            cast_bytes=saved.cast_bytes,
            sums=sums,
            norm_sums=batch_norm_collectives(self._builder.operations(index), self._placed.values),
            flops=saved.flops,
            selective_s=times.selective_s,
            host=times.host,
            selective_bytes=0 if products is None else products.bytes,
            selective_only_bytes=0 if products is None else products.only_bytes,
        )

    def _layer_run(self, index: int) -> _LayerRun:
        stage = self._builder.stage(index)
        if self._tensor_parallel is not None:
            stage, split = self._tensor_parallel.tensor_parallel_stage(stage)
            self._split |= split
        stage = stage.to(self._device)
        return _LayerRun(
            stage,
            {key: self._tensors[key].to(self._device) for key in stage.inputs},
            self._differentiable,
            loss=self._loss if OUTPUT_NAME in stage.outputs else None,
            device_type=self._device.type,
            autocast=self._placed.autocast,
        )

    def _named_state(self, stage: StageModule) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The parameters and buffers of a layer by their names in the model; notes their sizes."""
        parameters = {stage.original_names[local]: value for local, value in stage.named_parameters()}
        buffers = {stage.original_names.get(local, local): value for local, value in stage.named_buffers()}
        self._parameter_sizes |= {name: value.nbytes for name, value in parameters.items()}
        self._frozen |= {name: None for name, value in parameters.items() if not value.requires_grad}
        self._buffer_sizes |= {name: value.nbytes for name, value in buffers.items()}
        self._updated_buffers |= {stage.original_names.get(local, local) for local in stage.updated_buffers}
        return parameters, buffers

    def _layer_edges(self) -> tuple[LayerEdge, ...]:
        order = {tensor: place for place, tensor in enumerate(self._builder.tensors())}
        return tuple(
            LayerEdge(
                source=edge.source,
                target=edge.target,
                tensor=edge.tensor,
                bytes=edge.bytes,
                differentiable=edge.differentiable,
                order=order[edge.tensor],
                saved_by_source=edge.source in self._saved_at.get(edge.tensor, ()),
                saved_by_target=edge.target in self._saved_at.get(edge.tensor, ()),
                shape=edge.shape,
            )
            for edge in self._edges
        )


class TensorParallelProbe:
    """Runs a stage as the first of `workers` tensor-parallel ranks by `plan`, and counts its collectives."""

    def __init__(self, workers: int, plan: Mapping[str, str] | None):
        self._plan = plan
        self._counted = _CountingTransport()
        self._group = TensorGroup(0, workers, self._counted)

    @attributed_to(Reason.PLAN_INFEASIBLE)
    def tensor_parallel_stage(self, stage: StageModule) -> tuple[StageModule, frozenset[str]]:
        """The stage of one rank, and the parameters that are split, by their names in the model; AttemptFailure for
        matrices that cannot be split over the ranks."""
        sharded = tensor_stage(stage, self._plan, self._group)
        return sharded.module, frozenset(sharded.splits)

    def take_counts(self) -> list[tuple[str, int, int]]:
        """The collectives since the last call: kind (a field of CollectiveCost), count, bytes of whole tensors in all."""
        totals, self._counted.totals = self._counted.totals, {}
        return [(kind, count, size) for kind, (count, size) in sorted(totals.items())]


class _CountingTransport:
    """Counts collectives in place of the group's transport; gathers give this rank's own tensor."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[int, int]] = {}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._add("reduce", tensor)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        self._add("gather", out)
        out.copy_(tensor.expand_as(out))

    def _add(self, kind: str, whole: torch.Tensor) -> None:
        count, size = self.totals.get(kind, (0, 0))
        self.totals[kind] = (count + 1, size + whole.nbytes)


@dataclass(frozen=True)
class _SavedForBackward:
    """The bytes that autograd keeps of a layer, those that I keeps for W, the kept ones of its inputs and outputs, and its
    FLOPs."""

    bytes: int
    weight_stash_bytes: int
    tensors: frozenset[str]
    cast_bytes: int
    flops: int | None


@dataclass(frozen=True)
class _Products:
    """The bytes of the products of a layer, and of those among them that autograd does not keep."""

    bytes: int
    only_bytes: int


class _LayerRun:
    """Runs one layer forward and backward with gradients of ones for what leaves it."""

    def __init__(
        self,
        stage: StageModule,
        inputs: Mapping[str, Tensor],
        differentiable: set[str],
        *,
        loss: Callable[[Tensor], Tensor] | None,
        device_type: str,
        autocast: torch.dtype | None,
    ) -> None:
        self.stage = stage
        self.inputs = {
            name: value.detach().requires_grad_(name in differentiable) for name, value in inputs.items()
        }
        self.leaves = [value for value in self.inputs.values() if value.requires_grad]
        self.loss = loss
        self.device_type = device_type
        self.autocast = autocast
        self.outputs: dict[str, Tensor] = {}
        self.rest = WeightBackward()
        self._whole_backward = bool(opaque_calls(stage))
        self._products, self._kept = StageProducts(), KeptProducts()

    def forward(self) -> None:
        position = self.stage.model_outputs if self.loss is not None else None
        run = run_forward(
            self.stage,
            list(self.inputs.values()),
            device_type=self.device_type,
            training=True,
            autocast_dtype=self.autocast,
            loss_of=position,
            loss=self.loss,
        )
        self.outputs = dict(zip(self.stage.outputs, run.outputs, strict=True))
        self.roots = run.roots(position)
        self.gradients = [torch.ones_like(root) for root in self.roots]

    def module_alone(self) -> None:
        """The forward without the loss."""
        run_forward(
            self.stage,
            list(self.inputs.values()),
            device_type=self.device_type,
            training=True,
            autocast_dtype=self.autocast,
        )

    def keep_products(self) -> None:
        """The first forward of a stage that recomputes selectively."""
        self._kept = KeptProducts()
        with keeping_no_tensors(), self._products.keeping(self._kept):
            self.module_alone()

    def take_products(self) -> None:
        """The second one."""
        with self._products.taking(self._kept):
            self.forward()

    def backward_input(self) -> None:
        _, self.rest = backward_input(self.roots, self.gradients, self.leaves, whole=self._whole_backward)

    def backward_weight(self) -> None:
        self.rest.run()

    def backward(self) -> None:
        backward(self.roots, self.gradients, self.leaves)

    def count_saved(self) -> _SavedForBackward:
        """One run to warm up (under autocast two), counting saved tensors; shared memory once, parameters and buffers
        never. A tensor of the autocast type that both runs keep, as two microbatches would, is a cast of a weight."""
        fixed = {
            value.untyped_storage().data_ptr() for value in [*self.stage.parameters(), *self.stage.buffers()]
        }
        kept: dict[int, Tensor] = {}

        def keep(value: Tensor) -> Tensor:
            if value.untyped_storage().data_ptr() not in fixed:
                kept.setdefault(value.untyped_storage().data_ptr(), value)
            return value

        again: dict[int, Tensor] = {}

        def keep_again(value: Tensor) -> Tensor:
            again.setdefault(value.untyped_storage().data_ptr(), value)
            return value

        drop_casts()
        self._forward_keeping(keep)
        named = {**self.inputs, **self.outputs}
        if self.autocast is not None:  # `named` keeps the first graph while the other runs
            self._forward_keeping(keep_again)
        received = {value.untyped_storage().data_ptr(): value for value in self.inputs.values()}
        shared = kept.keys() & again.keys() - received.keys()
        casts = {place for place in shared if kept[place].dtype == self.autocast}
        size = sum(
            received[place].nbytes if place in received else value.untyped_storage().nbytes()
            for place, value in kept.items()
            if place not in casts
        )
        cast_bytes = sum(kept[place].untyped_storage().nbytes() for place in casts)
        saved = frozenset(name for name, value in named.items() if value.untyped_storage().data_ptr() in kept)
        self.backward_input()
        stash = self._weight_stash_bytes(fixed | casts)
        self.backward_weight()
        with uncompiled(self.stage):  # what is counted are calls of torch's operations
            flops = count_flops(self.both)
        return _SavedForBackward(
            bytes=size, weight_stash_bytes=stash, tensors=saved, cast_bytes=cast_bytes, flops=flops
        )

    def count_products(self) -> _Products | None:
        """The products that selective recomputation keeps; None where the layer does not run so: a module that runs as it is
        may do other things the second time, and a product that is changed in place can't be taken."""
        if self._whole_backward:
            return None
        made: dict[int, int] = {}

        def count(value: Tensor) -> None:
            made[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()

        self._products.find(self.stage)
        products = KeptProducts(count)
        kept: dict[int, Tensor] = {}

        def keep(value: Tensor) -> Tensor:
            return kept.setdefault(value.untyped_storage().data_ptr(), value)

        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value),
                self._products.keeping(products),
            ):
                self.module_alone()
            with self._products.taking(products):
                self.forward()
        except RuntimeError as error:
            log.info("a layer is not recomputed selectively: %s", error)
            return None
        only = (size for place, size in made.items() if place not in kept)
        return _Products(sum(made.values()), sum(only))

    def _weight_stash_bytes(self, fixed: set[int]) -> int:
        """The bytes that W holds now, shared memory once, without what lies at the places `fixed`."""
        held = [*self.rest.tensors(), *_saved_by(self.rest.nodes())]
        sizes = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held}
        return sum(size for place, size in sizes.items() if place not in fixed)

    def _forward_keeping(self, keep: Callable[[Tensor], Tensor]) -> None:
        """A forward; `keep` is called with every tensor that autograd saves."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
                self.forward()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.forward()  # a transform of torch.func, in a module that runs as it is, takes no such hooks
            for value in _saved_by(_nodes_behind(self.roots)):
                keep(value)

    def both(self) -> None:
        self.forward()
        self.backward()

    def results(self) -> dict[str, Tensor]:
        """The outputs of the layer, on the host."""
        return {name: value.detach().cpu() for name, value in self.outputs.items() if not is_output(name)}


def _saved_by(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors that nodes of autograd hold, as far as they show them."""
    for node in nodes:
        shown = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        shown += getattr(node, "saved_tensors", ())
        for value in shown:
            yield from (
                part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor)
            )


def _nodes_behind(roots: Sequence[Tensor]) -> Iterator[Any]:
    """The nodes of the autograd graph behind `roots`."""
    waiting = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _layer_collectives(run: _LayerRun, probe: TensorParallelProbe) -> tuple[tuple[str, str, int, int], ...]:
    """The collectives of each action of a layer: action, kind, count, bytes."""
    actions = (
        ("forward_s", run.forward),
        ("backward_s", run.backward),
        ("", run.forward),
        ("backward_input_s", run.backward_input),
        ("backward_weight_s", run.backward_weight),
    )
    collectives = []
    probe.take_counts()
    for name, action in actions:
        action()
        counts = probe.take_counts()
        if name:
            collectives += [(name, *count) for count in counts]
    return tuple(collectives)


@dataclass(frozen=True)
class _LayerTimes:
    """Medians of the actions of a layer, in seconds; on CUDA those of the device, and those of the host in `host`."""

    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    selective_s: float | None = None
    host: HostCost | None = None


def _layer_times(
    run: _LayerRun, device: torch.device, repeats: int, budget_s: float, *, selective: bool
) -> _LayerTimes:
    """The times of the actions of a layer; MIN_REPEATS of them, or as many of `repeats` as begin within `budget_s`."""
    actions = (
        run.forward,
        run.backward,
        run.forward,
        run.backward_input,
        run.backward_weight,
        *((run.keep_products, run.take_products) if selective else ()),
    )
    cuda = torch.cuda if device.type == "cuda" else None
    of_host, of_device = [], []
    started = time.perf_counter()
    for count in range(max(1, repeats)):
        if count >= MIN_REPEATS and time.perf_counter() - started > budget_s:
            break
        if cuda is None:
            of_device.append([_thread_seconds(action) for action in actions])
            continue
        of_host.append([_host_seconds(action, cuda) for action in actions])
        ahead = zip(actions, of_host[-1], strict=True)
        of_device.append([_device_seconds(action, host_s, cuda) for action, host_s in ahead])
    times = _medians(of_device)
    if cuda is None:
        return times
    host = _medians(of_host)
    cost = HostCost(host.forward_s, host.backward_input_s, host.backward_weight_s, host.backward_s)
    return replace(times, host=cost)


def _medians(rounds: Sequence[Sequence[float]]) -> _LayerTimes:
    """The medians of the actions over `rounds`, each with the seconds of the actions of `_layer_times`."""
    forward, whole, again, inputs, weights, *products = (
        statistics.median(times) for times in zip(*rounds, strict=True)
    )
    times = _LayerTimes(min(forward, again), whole, inputs, weights)
    if not products:
        return times
    keeping, taking = products
    return replace(times, selective_s=max(0.0, keeping - times.forward_s) + taking)


def _thread_seconds(action: Callable[[], None]) -> float:
    """Processor seconds of this thread in `action`: a plan knows which workers share cores."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


def _host_seconds(action: Callable[[], None], cuda: Any) -> float:
    """Processor seconds in which the host enqueues `action` on an idle device, autograd's threads counted."""
    cuda.synchronize()
    started = time.process_time()
    action()
    return time.process_time() - started


_FASTEST_CLOCK_HZ = 2.5e9
_HEAD_START, _LEAST_HEAD_START_S, _MOST_HEAD_START_S = 2.0, 1e-4, 0.1


def _device_seconds(action: Callable[[], None], host_s: float, cuda: Any) -> float:
    """Seconds of `action` on the device, which sleeps until the host, for `host_s`, has enqueued all of it: as in a step, in
    which the host is ahead. `cuda` is torch.cuda unless a test brings its own."""
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    sleep_s = min(max(_HEAD_START * host_s, _LEAST_HEAD_START_S), _MOST_HEAD_START_S)
    cuda._sleep(round(sleep_s * _FASTEST_CLOCK_HZ))
    begin.record()
    action()
    end.record()
    cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def count_flops(run: Callable[[], None]) -> int | None:
    """The FLOPs of `run`; None where torch cannot count them. Never raises for that."""
    counter = FlopCounterMode(display=False, custom_mapping=_ATTENTION_FLOPS)
    try:
        with counter:
            run()
    except Exception as error:  # an operator that knows no such mode: the same runs without it
        log.warning("the model's operations are not counted: %s", error)
        run()
        return None
    return int(counter.get_total_flops())


def _attention_forward_flops(
    query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(
    _gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return 2 * sdpa_flop_count(query, key, value)


_ATTENTION_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward_flops,  # torch counts CUDA's only
    **dict.fromkeys(
        (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
            torch.ops.aten._scaled_dot_product_flash_attention_backward,
            torch.ops.aten._scaled_dot_product_efficient_attention_backward,
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward,
        ),
        _attention_backward_flops,
    ),
}
