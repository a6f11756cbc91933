"""Which stage lies on which mesh: the shapes that named schedules ask for."""

from __future__ import annotations

import itertools

from service.scheduler.model.spec import PipelineSpec


def one_stage_a_mesh(spec: PipelineSpec) -> bool:
    """Every mesh holds one stage."""
    return len(spec.stages) == len(spec.meshes)


def is_chain(spec: PipelineSpec) -> bool:
    """Stage i feeds stage i+1, once, and nothing else."""
    names = [stage.name for stage in spec.stages]
    pairs = [(edge.source, edge.target) for edge in spec.edges]
    return sorted(pairs) == sorted(itertools.pairwise(names))


def looped(spec: PipelineSpec) -> bool:
    """Stage i is on mesh i mod P, with two or more whole rounds of stages."""
    meshes = len(spec.meshes)
    return (
        len(spec.stages) >= 2 * meshes
        and len(spec.stages) % meshes == 0
        and all(stage.mesh == spec.meshes[i % meshes].name for i, stage in enumerate(spec.stages))
        and _forward_edges(spec)
    )


def v_shaped(spec: PipelineSpec) -> bool:
    """Stages i and 2P−1−i are on mesh i."""
    meshes = len(spec.meshes)
    return (
        len(spec.stages) == 2 * meshes
        and all(
            stage.mesh == spec.meshes[min(i, 2 * meshes - 1 - i)].name for i, stage in enumerate(spec.stages)
        )
        and _forward_edges(spec)
    )


def _forward_edges(spec: PipelineSpec) -> bool:
    index = {stage.name: i for i, stage in enumerate(spec.stages)}
    return all(index[edge.source] < index[edge.target] for edge in spec.edges)
