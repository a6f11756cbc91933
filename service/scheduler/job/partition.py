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

from service.scheduler.job.cut import CutProblem, best_cut, layer_ranges, stage_of_layer
from service.scheduler.job.heterogeneous import HeterogeneousProfile, reshard_edge
from service.scheduler.problem.spec import (
    EdgeSpec,
    MeshSpec,
    NetworkSpec,
    PipelineSpec,
    RecomputeSpec,
    SpecError,
    StageSpec,
)
from service.scheduler.resharding.resharding_plan import ReshardingPlan
from worker.contract.profile import (
    CutError,
    LayerProfile,
    OptimizerState,
    check_stage_count,
    resolve_stage_starts,
)


@dataclass(frozen=True)
class PartitionResult:
    """The layers that begin the stages, and the planning problem that this cut makes; `reshardings` are the transfers
    that do not go in pairs of workers, by edge and whether they go back."""

    stage_starts: list[str]
    spec: PipelineSpec
    reshardings: Mapping[tuple[int, bool], ReshardingPlan] = field(default_factory=dict)


def partition(
    profile: LayerProfile | Mapping[str, Any],
    *,
    stages: int,
    meshes: Sequence[MeshSpec],
    cut: Literal["auto"] | Sequence[str] = "auto",
    microbatches: int,
    network: NetworkSpec | None = None,
    schedule: str = "auto",
    overlap: bool = True,
    split_backward: bool | None = None,
    max_in_flight: int | None = None,
    placement: Sequence[int] | None = None,
    optimizer: OptimizerState | None = None,
    recompute: Recompute = "none",
    action_s: float = 0.0,
) -> PartitionResult:
    """Cut the layers of `profile` into `stages` contiguous stages and place them on `meshes`.

    `cut` "auto" minimises the estimated step, (microbatches - 1) times the busiest mesh's time for
    one microbatch plus the transfers of one microbatch, within the meshes' activation limits at the
    number of microbatches that `schedule` keeps in flight. Names give the cut by hand, `placement` the mesh
    of every stage; `optimizer` says what its state adds to their static bytes, `recompute` which stages compute
    their forward again: auto, none, all, or those of some names (stages or modules); every action takes `action_s`
    besides its layers. Raises CutError for a cut that the layers do not admit and for unknown names, SpecError for
    meshes or limits that do not fit.
    """
    if not isinstance(profile, LayerProfile):
        profile = LayerProfile.from_json(profile)
    profile = profile.corrected()
    names = [layer.name for layer in profile.layers]
    check_recompute_names(recompute, names, stages)
    mesh_of_stage = place_stages(stages, len(meshes), schedule) if placement is None else list(placement)
    problem = CutProblem(
        profile=profile,
        mesh_of_stage=mesh_of_stage,
        meshes=list(meshes),
        microbatches=microbatches,
        network=network or NetworkSpec(),
        schedule=schedule,
        overlap=overlap,
    )
    if cut == "auto":
        check_stage_count(names, stages)
        begins = best_cut(problem)
    else:
        given = resolve_stage_starts(names, cut)
        if len(given) != stages:
            raise SpecError(
                f"cut begins {len(given)} stages ({', '.join(given)}), but stages is {stages}: make them agree"
            )
        begins = [names.index(name) for name in given]
    edges, reshardings = _edge_specs(problem, begins)
    return PartitionResult(
        stage_starts=[names[index] for index in begins],
        reshardings=reshardings,
        spec=PipelineSpec(
            microbatches=microbatches,
            meshes=list(meshes),
            stages=_stage_specs(problem, begins, optimizer or OptimizerState(), recompute, action_s),
            edges=edges,
            network=problem.network,
            overlap=overlap,
            schedule=schedule,
            split_backward=split_backward,
            max_in_flight=max_in_flight,
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


def _stage_specs(
    problem: CutProblem,
    begins: Sequence[int],
    optimizer: OptimizerState,
    recompute: Recompute,
    action_s: float,
) -> list[StageSpec]:
    count, receives = len(problem.profile.layers), _stages_with_input_gradients(problem, begins)
    specs, whole = [], problem
    for index, (first, end) in enumerate(layer_ranges(begins, count)):
        problem, mesh = whole.on(index), whole.meshes[whole.mesh_of_stage[index]].name
        part = problem.profile.layers[first:end]
        activation = problem.kept_bytes(first)[end - first - 1]
        whole_s = action_s + sum(layer.whole_backward_s for layer in part)
        input_s = action_s + sum(layer.backward_input_s for layer in part)
        weight_s = action_s + sum(layer.backward_weight_s for layer in part)
        if index not in receives:  # nobody asks for gradients of its inputs: all of its backward is W
            input_s, weight_s = 0.0, whole_s
        specs.append(
            StageSpec(
                name=f"s{index}",
                mesh=mesh,
                forward_s=action_s + sum(layer.forward_s for layer in part),
                backward_input_s=input_s,
                backward_weight_s=weight_s,
                backward_s=whole_s,
                activation_bytes=activation,
                # autograd keeps the whole graph below the topmost weight for W: nearly all of it
                weight_stash_bytes=activation,
                static_bytes=problem.profile.static_bytes(first, end, optimizer.on(mesh)),
                recompute=recompute_spec(problem, recompute, index, first, end, activation),
            )
        )
    return specs


def _stages_with_input_gradients(problem: CutProblem, begins: Sequence[int]) -> set[int]:
    stage_of = stage_of_layer(begins, len(problem.profile.layers))
    crossing = (edge for edge in problem.profile.edges if stage_of[edge.source] != stage_of[edge.target])
    return {stage_of[edge.target] for edge in crossing if edge.differentiable}


def _edge_specs(
    problem: CutProblem, begins: Sequence[int]
) -> tuple[list[EdgeSpec], dict[tuple[int, bool], ReshardingPlan]]:
    """Edges by source, target and order of production, each tensor once for every pair of stages; and what is resharded."""
    stage_of = stage_of_layer(begins, len(problem.profile.layers))
    found = {}
    for number, edge in enumerate(problem.profile.edges):
        source, target = stage_of[edge.source], stage_of[edge.target]
        if source != target:
            found[source, target, edge.order] = number
    specs: list[EdgeSpec] = []
    reshardings: dict[tuple[int, bool], ReshardingPlan] = {}
    for (source, target, _), number in sorted(found.items()):
        edge = problem.on(source).profile.edges[number]
        costs: dict[str, Any] = {}
        for direction in ("forward", "backward"):
            if direction == "backward" and not edge.differentiable:
                costs["backward_s"] = 0.0
            elif (plan := _edge_resharding(problem, number, source, target, direction)) is not None:
                reshardings[len(specs), direction == "backward"] = plan
                bandwidth = problem.network.bandwidth_bytes_per_s
                costs[f"{direction}_s"] = problem.network.latency_s if bandwidth is None else plan.makespan_s
                costs["held_bytes"] = max(problem.on(s).profile.edges[number].bytes for s in (source, target))
            elif problem.network.bandwidth_bytes_per_s is None:
                costs[f"{direction}_s"] = problem.network.latency_s
            else:
                costs[f"{direction}_bytes"] = edge.bytes
        specs.append(EdgeSpec(source=f"s{source}", target=f"s{target}", tensor=edge.tensor, **costs))
    return specs, reshardings


def _edge_resharding(
    problem: CutProblem, edge: int, source: int, target: int, direction: str
) -> ReshardingPlan | None:
    """How the tensor of an edge of the profile goes between two stages, or its gradient back; None where the workers of
    both meshes exchange it in pairs."""
    profile, (here, there) = problem.profile, (problem.mesh_of_stage[s] for s in (source, target))
    if not isinstance(profile, HeterogeneousProfile):
        return None
    if not profile.parallelism[here].needs_resharding(
        profile.parallelism[there], profile.mesh_profiles[here].edges[edge].shape
    ):
        return None
    way = (here, there) if direction == "forward" else (there, here)
    return reshard_edge(profile, edge, way, problem.network)


Recompute = Literal["auto", "none", "all"] | Sequence[str]


def check_recompute_names(recompute: Recompute, layers: Sequence[str], stages: int) -> None:
    """Raise CutError for a name that is neither a stage nor a module with layers."""
    if isinstance(recompute, str):
        return
    for name in recompute:
        if not any(_name_matches(name, stage, ()) for stage in range(stages)) and not _name_matches(
            name, -1, layers
        ):
            near = difflib.get_close_matches(name, layers, n=3) or list(layers[:8])
            raise CutError(
                f"recompute name {name!r} is no stage (s0 to s{stages - 1}) and no module that layers are in: "
                f"did you mean {', '.join(near)}?"
            )


def recompute_spec(
    problem: CutProblem, recompute: Recompute, stage: int, first: int, end: int, activation_bytes: int
) -> RecomputeSpec | None:
    """What stage number `stage`, of layers first..end-1, may or must do; None where it keeps all.

    `auto` leaves the choice to the schedule, but for stages with a region that the model itself checkpoints: like
    those that names ask for they recompute. It keeps the tensors that it takes from other stages (the model's own
    inputs are there all step long) and notes the buffers that it updates.
    """
    names = [layer.name for layer in problem.profile.layers[first:end]]
    required = recompute == "all" or (
        recompute != "none"
        and (
            not problem.profile.checkpointed.isdisjoint(names)
            or (recompute != "auto" and any(_name_matches(name, stage, names) for name in recompute))
        )
    )
    if not required and recompute != "auto":
        return None
    taken = [t for t in problem.tensors if t.source < first and any(first <= x < end for x in t.targets)]
    kept = sum(tensor.size for tensor in taken)
    saved = sum(t.size for t in taken if any(first <= layer < end for layer in t.saved_at))
    profile = problem.profile
    here = {name for layer in profile.layers[first:end] for name in layer.buffers}
    updated = sum(profile.buffer_sizes[name] for name in profile.updated_buffers if name in here)
    if not required and kept + updated >= activation_bytes:
        return None
    return RecomputeSpec(
        activation_bytes=kept + updated,
        extra_s=sum(layer.forward_s for layer in profile.layers[first:end]),
        # the buffers as they are now and as the second run leaves them, beside what autograd keeps
        rematerialised_bytes=max(0, activation_bytes - saved) + 2 * updated,
        required=required,
    )


def _name_matches(name: str, stage: int, layers: Sequence[str]) -> bool:
    """Whether a name is that of the stage, of one of its layers (whichever call of it), or of a module around one."""
    return name == f"s{stage}" or any(
        layer == name or layer.partition("@")[0] == name or layer.startswith(f"{name}.") for layer in layers
    )
