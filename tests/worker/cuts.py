"""Cuts of traced models, for tests that do not care where."""

from __future__ import annotations

from worker.contract.profile import check_stage_count
from worker.model.export import TracedModel
from worker.model.stages import StageGraph


def cut_evenly(traced: TracedModel, stages: int) -> StageGraph:
    """Into `stages` pieces of about the same number of layers; raises CutError for too many."""
    layers = traced.layers
    check_stage_count(layers, stages)
    return traced.cut([layers[len(layers) * stage // stages] for stage in range(stages)])
