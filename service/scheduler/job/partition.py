"""Builds a PipelineSpec from measured layer costs: cuts layers into stages and places the stages on meshes.

Pure. Knows the costs of layers and the tensors between them, not the model. Edges come out in the order in
which the worker's cut of the same model lists them; transfers between heterogeneous meshes carry their
resharding plans.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from service.scheduler.job.cut import (
    CutProblem,
    LayerTensor,
    PipelineSetup,
    Recompute,
    best_cut,
    layer_ranges,
    stage_of_layer,
)
from service.scheduler.job.heterogeneous import HeterogeneousProfile, reshard_edge
from service.scheduler.problem.spec import (
    EdgeSpec,
    PipelineSpec,
    RecomputeSpec,
    SpecError,
    StageSpec,
)
from service.scheduler.resharding.resharding_plan import PlannedResharding
from service.scheduler.schedules.registry import SCHEDULES
from worker.contract.profile import (
    CutError,
    LayerCost,
    LayerProfile,
    check_stage_count,
    resolve_stage_starts,
)


@dataclass(frozen=True)
class PartitionResult:
    """A cut of the layers (`stage_starts` are the first layers of the stages) and the planning problem that it makes.

    `reshardings` are the transfers that do not go in pairs of workers, by (edge, True for the gradient).
    """

    stage_starts: list[str]
    spec: PipelineSpec
    reshardings: Mapping[tuple[int, bool], PlannedResharding] = field(default_factory=dict)


def partition(
    profile: LayerProfile | Mapping[str, Any],
    setup: PipelineSetup,
    *,
    stages: int,
    microbatches: int,
    cut: Literal["auto"] | Sequence[str] = "auto",
    placement: Sequence[int] | None = None,
) -> PartitionResult:
    """Cut the layers of `profile` into `stages` contiguous stages and place them on the meshes of `setup`.

    `cut` "auto" minimises the estimated step, (microbatches - 1) times the busiest mesh's time for
    one microbatch plus the transfers of one microbatch, within the meshes' activation limits at the
    number of microbatches that the schedule keeps in flight. Names give the cut by hand, `placement` the mesh
    of every stage. Raises CutError for a cut that the layers do not admit and for unknown names, SpecError for
    meshes or limits that do not fit.
    """
    if not isinstance(profile, LayerProfile):
        profile = LayerProfile.from_json(profile)
    profile = profile.corrected()
    names = [layer.name for layer in profile.layers]
    _check_recompute_names(setup.recompute, names, stages)
    problem = CutProblem(
        profile=profile,
        setup=setup,
        mesh_of_stage=(
            place_stages(stages, len(setup.meshes), setup.schedule) if placement is None else list(placement)
        ),
        microbatches=microbatches,
    )
    if cut == "auto":
        check_stage_count(names, stages, profile.joined)
        stage_starts = best_cut(problem)
    else:
        named_starts = resolve_stage_starts(names, cut, profile.joined)
        if len(named_starts) != stages:
            raise SpecError(
                f"cut begins {len(named_starts)} stages ({', '.join(named_starts)}), but stages is {stages}: "
                "make them agree"
            )
        stage_starts = [names.index(name) for name in named_starts]
    edges, reshardings = _edge_specs(problem, stage_starts)
    return PartitionResult(
        stage_starts=[names[index] for index in stage_starts],
        reshardings=reshardings,
        spec=PipelineSpec(
            microbatches=microbatches,
            meshes=list(setup.meshes),
            stages=_stage_specs(problem, stage_starts),
            edges=edges,
            network=setup.network,
            overlap=setup.overlap,
            schedule=setup.schedule,
            split_backward=setup.split_backward,
            max_in_flight=setup.max_in_flight,
        ),
    )


def place_stages(stages: int, meshes: int, schedule: str) -> list[int]:
    """The mesh of every stage: in order; for two stages a mesh a V where `schedule` uses it; else in rounds."""
    if meshes < 1 or stages < meshes:
        raise SpecError(
            f"{stages} stages cannot fill {meshes} meshes: ask for at most {max(stages, 1)} meshes, or for more stages"
        )
    if stages == 2 * meshes and schedule in ("zb-v", "auto"):
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % meshes for stage in range(stages)]


def _stage_specs(cut_problem: CutProblem, stage_starts: Sequence[int]) -> list[StageSpec]:
    setup, count = cut_problem.setup, len(cut_problem.profile.layers)
    action_s, receives = setup.action_s, _stages_with_input_gradients(cut_problem, stage_starts)
    specs = []
    for index, (first, end) in enumerate(layer_ranges(stage_starts, count)):
        problem, mesh = cut_problem.on(index), setup.meshes[cut_problem.mesh_of_stage[index]].name
        part = problem.profile.layers[first:end]
        activation = problem.kept_bytes(first)[end - first - 1]
        whole_s = action_seconds(part, "backward_s", action_s)
        input_s = action_seconds(part, "backward_input_s", action_s)
        weight_s = action_seconds(part, "backward_weight_s", action_s)
        if index not in receives:  # no gradients of its inputs are needed: all of its backward is W
            input_s, weight_s = 0.0, whole_s
            stash = activation + _output_gradient_bytes(problem, first, end)
        else:
            stash = _weight_stash_bytes(problem, first, end)
        if _may_split(setup):  # gradients are kept for W too: it may be more than the forward left
            activation = max(activation, stash)
        specs.append(
            StageSpec(
                name=f"s{index}",
                mesh=mesh,
                forward_s=action_seconds(part, "forward_s", action_s),
                backward_input_s=input_s,
                backward_weight_s=weight_s,
                backward_s=whole_s,
                activation_bytes=activation,
                weight_stash_bytes=min(stash, activation),
                static_bytes=problem.profile.static_bytes(first, end, setup.optimizer.on(mesh)),
                **_recompute_options(problem, index, (first, end), activation),
            )
        )
    return specs


def action_seconds(layers: Sequence[LayerCost], action: str, engine_s: float) -> float:
    """The seconds of `action` (a time's name in LayerCost) of a stage of these layers, for which the engine takes `engine_s`
    itself. On CUDA the host enqueues while the device computes: whichever takes longer."""
    device_s, host_s = device_and_host_seconds(layers, action, engine_s)
    return device_s if host_s is None else max(device_s, host_s)


def device_and_host_seconds(
    layers: Sequence[LayerCost], action: str, engine_s: float
) -> tuple[float, float | None]:
    """The seconds of `action` on the device and on the host, where they were measured apart; else of the processor, which
    does both, and None."""
    device_s = sum(
        layer.whole_backward_s if action == "backward_s" else getattr(layer, action) for layer in layers
    )
    hosts = [layer.host for layer in layers if layer.host is not None]
    if len(hosts) < len(layers):
        return engine_s + device_s, None
    return device_s, engine_s + sum(getattr(host, action) for host in hosts)


def _may_split(setup: PipelineSetup) -> bool:
    if setup.split_backward is not None:
        return setup.split_backward
    named = SCHEDULES.get(setup.schedule)
    return named is None or named.splits


def _weight_stash_bytes(problem: CutProblem, first: int, end: int) -> int:
    """Bytes that layers first..end-1 hold from I to W: operands of their weight gradients, received tensors, whose buffers
    are free after W only, and, where the stage recomputes, the buffers that it updates."""
    layers = problem.profile.layers[first:end]
    received = (t for t in _received_tensors(problem, first, end) if _is_saved(t, first, end))
    return (
        sum(layer.weight_stash_bytes for layer in layers)
        + sum(tensor.size for tensor in received)
        + _updated_buffer_bytes(problem.profile, first, end)
    )


def _output_gradient_bytes(problem: CutProblem, first: int, end: int) -> int:
    """The gradients that come back to layers first..end-1."""
    return sum(
        t.size for t in problem.tensors if first <= t.source < end and any(x >= end for x in t.targets)
    )


def _received_tensors(problem: CutProblem, first: int, end: int) -> list[LayerTensor]:
    """The tensors of earlier layers that layers first..end-1 use."""
    return [t for t in problem.tensors if t.source < first and any(first <= x < end for x in t.targets)]


def _is_saved(tensor: LayerTensor, first: int, end: int) -> bool:
    return any(first <= layer < end for layer in tensor.saved_at)


def _updated_buffer_bytes(profile: LayerProfile, first: int, end: int) -> int:
    here = {name for layer in profile.layers[first:end] for name in layer.buffers}
    return sum(profile.buffer_sizes[name] for name in profile.updated_buffers if name in here)


def _stages_with_input_gradients(problem: CutProblem, stage_starts: Sequence[int]) -> set[int]:
    stage_of = stage_of_layer(stage_starts, len(problem.profile.layers))
    crossing = (edge for edge in problem.profile.edges if stage_of[edge.source] != stage_of[edge.target])
    return {stage_of[edge.target] for edge in crossing if edge.differentiable}


def _edge_specs(
    problem: CutProblem, stage_starts: Sequence[int]
) -> tuple[list[EdgeSpec], dict[tuple[int, bool], PlannedResharding]]:
    """Edges by source, target and order of production, each tensor once for every pair of stages; and its reshardings."""
    stage_of = stage_of_layer(stage_starts, len(problem.profile.layers))
    crossing = {}
    for number, edge in enumerate(problem.profile.edges):
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source != target:
            crossing[source, target, edge.order] = number
    specs: list[EdgeSpec] = []
    reshardings: dict[tuple[int, bool], PlannedResharding] = {}
    network = problem.setup.network
    for (source, target, _), number in sorted(crossing.items()):
        edge = problem.on(source).profile.edges[number]
        costs: dict[str, Any] = {}
        for direction in ("forward", "backward"):
            if direction == "backward" and not edge.differentiable:
                costs["backward_s"] = 0.0
            elif (plan := _edge_resharding(problem, number, source, target, direction)) is not None:
                reshardings[len(specs), direction == "backward"] = plan
                unknown = network.bandwidth_bytes_per_s is None
                costs[f"{direction}_s"] = network.latency_s if unknown else plan.makespan_s
                costs["held_bytes"] = max(problem.on(s).profile.edges[number].bytes for s in (source, target))
            elif network.bandwidth_bytes_per_s is None:
                costs[f"{direction}_s"] = network.latency_s
            else:
                costs[f"{direction}_bytes"] = edge.bytes
        specs.append(EdgeSpec(source=f"s{source}", target=f"s{target}", tensor=edge.tensor, **costs))
    return specs, reshardings


def _edge_resharding(
    problem: CutProblem, edge: int, source: int, target: int, direction: str
) -> PlannedResharding | None:
    """The plan by which the tensor of an edge of the profile goes from `source` to `target`, or its gradient back; None
    where the workers of both meshes exchange it in pairs."""
    profile, (here, there) = problem.profile, (problem.mesh_of_stage[s] for s in (source, target))
    if not isinstance(profile, HeterogeneousProfile):
        return None
    if not profile.parallelism[here].needs_resharding(
        profile.parallelism[there], profile.mesh_profiles[here].edges[edge].shape
    ):
        return None
    meshes = (here, there) if direction == "forward" else (there, here)
    return reshard_edge(profile, edge, meshes, problem.setup.network)


def _check_recompute_names(recompute: Recompute, layers: Sequence[str], stages: int) -> None:
    """Raise CutError for a name that is neither a stage nor a module with layers."""
    if isinstance(recompute, str):
        return
    for name in recompute:
        names_stage = any(_name_matches(name, stage, ()) for stage in range(stages))
        if not names_stage and not _name_matches(name, -1, layers):
            near = difflib.get_close_matches(name, layers, n=3) or list(layers[:8])
            raise CutError(
                f"recompute name {name!r} is no stage (s0 to s{stages - 1}) and no module that layers are in: "
                f"did you mean {', '.join(near)}?"
            )


def _recompute_options(
    problem: CutProblem, stage: int, layers: tuple[int, int], activation_bytes: int
) -> dict[str, RecomputeSpec]:
    """The ways in which stage number `stage`, of layers (first, end), recomputes, as fields of its spec; none where it
    keeps everything.

    `auto` leaves the choice to the schedule, except for stages with a region that the model itself checkpoints: these
    recompute, like stages that are named. A stage that recomputes keeps the tensors that it receives from other stages
    (the model's own inputs are there all step long) and restores the buffers that it updates. Selectively it keeps the
    results of its products, too, by block what its layers give each other: further choices of `auto`, selectively where
    each of its layers runs so. Each is the only one with `selective` or `by_block`, which keeps everything where that
    saves nothing.
    """
    recompute, (first, end) = problem.setup.recompute, layers
    names = [layer.name for layer in problem.profile.layers[first:end]]
    required = recompute in ("all", "selective", "by_block") or (
        recompute != "none"
        and (
            not problem.profile.checkpointed.isdisjoint(names)
            or (recompute != "auto" and any(_name_matches(name, stage, names) for name in recompute))
        )
    )
    if not required and recompute != "auto":
        return {}
    received = _received_tensors(problem, first, end)
    received_bytes = sum(tensor.size for tensor in received)
    saved = sum(tensor.size for tensor in received if _is_saved(tensor, first, end))
    profile = problem.profile
    updated = _updated_buffer_bytes(profile, first, end)
    here = profile.layers[first:end]
    whole = RecomputeSpec(
        activation_bytes=received_bytes + updated,
        extra_s=sum(layer.forward_s for layer in here),
        # the buffers as they are now and as the second run leaves them, beside what autograd keeps
        rematerialised_bytes=max(0, activation_bytes - saved) + 2 * updated,
        required=required,
    )
    if recompute == "by_block":
        by_block = _by_block_option(problem, whole, layers, updated)
        return {"recompute": by_block} if by_block.activation_bytes < activation_bytes else {}
    if required and recompute != "selective":
        return {"recompute": whole}
    if not required and whole.activation_bytes >= activation_bytes:
        return {}
    selective = _selective_option(whole, here, activation_bytes - saved + 2 * updated)
    if recompute == "selective":
        saves = selective is None or selective.activation_bytes < activation_bytes
        return {"recompute": selective or whole} if saves else {}
    options, by_block = {"recompute": whole}, _by_block_option(problem, whole, layers, updated)
    if selective and selective.activation_bytes < activation_bytes and selective.extra_s < whole.extra_s:
        options["recompute_selectively"] = selective
    # with one microbatch in flight it has to need less, as with several it keeps more; a block is not compiled
    compiled = not problem.profile.compiled.isdisjoint(names)
    if (
        not compiled
        and by_block.activation_bytes < activation_bytes
        and _peak_bytes(by_block) < _peak_bytes(whole)
    ):
        options["recompute_by_block"] = by_block
    return options


def _peak_bytes(option: RecomputeSpec) -> int:
    return option.activation_bytes + (option.rematerialised_bytes or 0)


def _selective_option(
    whole: RecomputeSpec, layers: Sequence[LayerCost], unkept_bytes: int
) -> RecomputeSpec | None:
    """The option that keeps the results of products, of whose `unkept_bytes` not all are made again; None where a layer
    does not run so."""
    extra_s = [layer.selective_s for layer in layers if layer.selective_s is not None]
    if len(extra_s) < len(layers):
        return None
    products = sum(layer.selective_bytes for layer in layers)
    shared = products - sum(layer.selective_only_bytes for layer in layers)
    return whole.model_copy(
        update={
            "activation_bytes": whole.activation_bytes + products,
            "extra_s": sum(extra_s),
            "rematerialised_bytes": max(0, unkept_bytes - shared),
            "selective": True,
        }
    )


def _by_block_option(
    problem: CutProblem, whole: RecomputeSpec, layers: tuple[int, int], updated_bytes: int
) -> RecomputeSpec:
    """The option that keeps what each of `layers` (first, end) reads of the others, and has the activations of one at a
    time; where I may leave W to later, with what W needs of those behind it."""
    first, end = layers
    read_first: dict[int, int] = {}  # bytes of the tensors between layers, by the first that reads them
    for tensor in problem.tensors:
        if first <= tensor.source < end and (readers := [x for x in tensor.targets if x < end]):
            read_first[min(readers)] = read_first.get(min(readers), 0) + tensor.size
    most, waiting, gone = 0, 0, 0
    for number in range(end - 1, first - 1, -1):
        cost = problem.profile.layers[number]
        most = max(most, cost.activation_bytes - problem.saved_input_bytes(number) + waiting - gone)
        gone += read_first.get(number, 0)
        waiting += cost.weight_stash_bytes if _may_split(problem.setup) else 0
    return whole.model_copy(
        update={
            "activation_bytes": whole.activation_bytes + sum(read_first.values()),
            "rematerialised_bytes": max(most, waiting) + 2 * updated_bytes,
            "by_block": True,
        }
    )


def _name_matches(name: str, stage: int, layers: Sequence[str]) -> bool:
    """True where `name` is the stage's, one of its layers' (any call of it), or that of a module around one."""
    return name == f"s{stage}" or any(
        layer == name or layer.partition("@")[0] == name or layer.startswith(f"{name}.") for layer in layers
    )
