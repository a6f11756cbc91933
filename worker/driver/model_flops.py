"""What a step computes of the model, and how much of what its accelerators could: MFU (Chowdhery et al. 2022, PaLM).

Forward and backward of every sample count once: what a plan computes again to save memory is no work of the model, so
that recomputation lowers the figure as it should. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.model.profile import LayerProfile


@dataclass(frozen=True)
class ModelFlops:
    """Operations of a step on all workers, and what these could do in a second; None: not known."""

    step: int
    peak_per_s: float | None = None


def step_flops(
    workers: Sequence[tuple[str, LayerProfile | None]],
    *,
    begins: Sequence[str],
    mesh_of_stage: Sequence[str],
    microbatches: int,
) -> int | None:
    """Of a whole step; `workers` are each one's mesh and the layers' costs as it measures them for this plan.

    None where a layer's operations were not counted.
    """
    total = 0
    for mesh, profile in workers:
        if profile is None:
            return None
        names = [layer.name for layer in profile.layers]
        borders = [*(names.index(begin) for begin in begins), len(names)]
        for stage, other in enumerate(mesh_of_stage):
            for layer in profile.layers[borders[stage] : borders[stage + 1]] if other == mesh else ():
                if layer.flops is None:
                    return None
                total += layer.flops
    return total * microbatches


def whole_peak(peaks: Sequence[float | None], workers_per_gpu: int) -> float | None:
    """Of all workers together; each GPU is shared by so many of them. None where one is not known."""
    known = [peak for peak in peaks if peak is not None]
    return sum(known) / workers_per_gpu if known and len(known) == len(peaks) else None
