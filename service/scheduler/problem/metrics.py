"""Metrics of a planned or measured step: makespan, span, bubble ratio, and exposed transfer time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MeshMetrics:
    """Seconds of one mesh. `span_s` runs from the start of its first to the end of its last compute action;
    `exposed_transfer_s` is the part of it with an idle compute lane and a running transfer."""

    compute_s: float
    span_s: float
    transfer_s: float
    exposed_transfer_s: float


@dataclass(frozen=True)
class TimelineMetrics:
    """`bubble_ratio` = 1 − compute / (meshes × makespan); `overlap_ratio` = 1 − exposed / time with a transfer."""

    makespan_s: float
    span_s: float
    bubble_ratio: float
    overlap_ratio: float
    exposed_transfer_s: float
    meshes: dict[str, MeshMetrics]


def mesh_metrics(compute: np.ndarray, transfers: np.ndarray) -> MeshMetrics:
    """Metrics of one mesh from float[n, 2] arrays of starts and ends."""
    transfer_s = _union_length(transfers)
    if not len(compute):
        return MeshMetrics(0.0, 0.0, transfer_s, 0.0)
    first, last = float(compute[:, 0].min()), float(compute[:, 1].max())
    inside = np.clip(transfers, first, last)
    exposed = _union_length(np.concatenate((compute, inside))) - _union_length(compute)
    if exposed <= 1e-9 * (last - first):
        exposed = 0.0
    return MeshMetrics(float((compute[:, 1] - compute[:, 0]).sum()), last - first, transfer_s, exposed)


def combine_metrics(meshes: dict[str, MeshMetrics], makespan: float) -> TimelineMetrics:
    """Metrics of all meshes together."""
    compute = sum(mesh.compute_s for mesh in meshes.values())
    exposed = sum(mesh.exposed_transfer_s for mesh in meshes.values())
    moving = sum(mesh.transfer_s for mesh in meshes.values())
    return TimelineMetrics(
        makespan_s=makespan,
        span_s=max((mesh.span_s for mesh in meshes.values()), default=0.0),
        bubble_ratio=1.0 - compute / (len(meshes) * makespan) if makespan > 0 else 0.0,
        overlap_ratio=1.0 - exposed / moving if moving > 0 else 1.0,
        exposed_transfer_s=exposed,
        meshes=meshes,
    )


def _union_length(intervals: np.ndarray) -> float:
    """Length of the union of intervals."""
    if not len(intervals):
        return 0.0
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    begin = np.maximum(ordered[1:, 0], reached[:-1])
    return float(ordered[0, 1] - ordered[0, 0] + np.maximum(ordered[1:, 1] - begin, 0.0).sum())
