"""Models CPU workers that share the cores of a node: the factor by which all their actions slow down.

Costs on CPU are processor seconds. The model is processor sharing: every action of a node takes the same factor
longer, the least with which the node's processor seconds fit into its cores times the makespan. Waiting workers
leave cores to the others, so the factor is smaller than workers over cores. Accelerators do not share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.scheduler.problem.spec import PipelineSpec, StageSpec

_OVERCOMMIT_TOLERANCE = 1.05  # workers over cores up to which sharing makes no difference


@dataclass(frozen=True)
class SharedCores:
    """A node: its number of workers of each mesh, and of processor cores."""

    workers: Mapping[str, int]
    cores: float


def nodes_with_shared_cores(workers: Iterable[tuple[str, str | None, float | None]]) -> list[SharedCores]:
    """The nodes with more workers than cores; `workers` are (mesh, node, cores of the node)."""
    cores_of: dict[str, float] = {}
    meshes_on: dict[str, Counter[str]] = {}
    for mesh, node, cores in workers:
        if node is not None and cores is not None:
            cores_of[node] = cores
            meshes_on.setdefault(node, Counter())[mesh] += 1
    return [
        SharedCores(meshes, cores_of[node])
        for node, meshes in meshes_on.items()
        if meshes.total() > cores_of[node] * _OVERCOMMIT_TOLERANCE
    ]


def processor_seconds(spec: PipelineSpec) -> dict[str, float]:
    """Least processor seconds of one step on a worker of each mesh, with the cheaper form of each backward."""
    seconds = dict.fromkeys((mesh.name for mesh in spec.meshes), 0.0)
    for stage in spec.stages:
        split_s = stage.backward_input_s + stage.backward_weight_s
        microbatch_s = stage.forward_s + min(split_s, stage.whole_backward_s)
        seconds[stage.mesh] += spec.microbatches * microbatch_s
    return seconds


def core_bound_step_s(processor_s: Mapping[str, float], shared: Sequence[SharedCores]) -> float:
    """Seconds that the busiest node needs for the processor seconds of a step; 0 where no cores are shared."""
    return max(
        (sum(processor_s[mesh] * n for mesh, n in node.workers.items()) / node.cores for node in shared),
        default=0.0,
    )


def with_slower_actions(spec: PipelineSpec, factor: float) -> PipelineSpec:
    """The spec whose actions take `factor` as long; transfers stay."""
    return spec.model_copy(update={"stages": [_slower_stage(stage, factor) for stage in spec.stages]})


def _slower_stage(stage: StageSpec, factor: float) -> StageSpec:
    costs = {
        "forward_s": stage.forward_s * factor,
        "backward_input_s": stage.backward_input_s * factor,
        "backward_weight_s": stage.backward_weight_s * factor,
        "backward_s": None if stage.backward_s is None else stage.backward_s * factor,
    }
    options = [
        option.model_copy(update={"extra_s": option.extra_s * factor})
        for option in stage.recompute_options.values()
    ]
    return stage.with_recompute_options(options).model_copy(update=costs)
