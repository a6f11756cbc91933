"""A pipelined step equals the plain step of the unsplit model."""

import functools

import pytest
import torch

from tests.tiers import some_by_day
from tests.worker.engine.engine_support import (
    LocalPipeline,
    Plain,
    Recorder,
    batch,
    chain,
    serial_programs,
    skips,
    tied_chain,
    two_branches,
)

GRAPHS = {"chain": lambda: chain(4), "skips": skips, "branches": two_branches, "tied": tied_chain}
PLACEMENTS = {
    "one mesh": lambda n: ["m0"] * n,
    "two meshes": lambda n: [f"m{2 * s // n}" for s in range(n)],
    "one each": lambda n: [f"m{s}" for s in range(n)],
    "v": lambda n: [f"m{min(s, n - 1 - s)}" for s in range(n)],
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@some_by_day("graph", GRAPHS, by_day=2)
def test_three_steps_of_a_pipeline_equal_three_steps_of_the_unsplit_model(graph, placement, split):
    graph = GRAPHS[graph]()
    mesh_of_stage = PLACEMENTS[placement](len(graph.stages))
    programs = serial_programs(graph, mesh_of_stage, 3, split)
    plain = Plain(graph, functools.partial(torch.optim.SGD, lr=0.1))
    with LocalPipeline(graph, mesh_of_stage, programs, 3, optimizer=Recorder) as pipeline:
        for step in range(3):
            inputs, targets = batch(3, seed=step)
            losses, gradients = plain.step(inputs, targets)
            results = pipeline.step(step, [(inputs, targets)])
            found = [r.losses for r in results.values() if r.losses]
            assert found == [pytest.approx(losses, abs=1e-10)]
            measured = pipeline.gradients()
            assert measured.keys() == gradients.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(measured[name], gradient, rtol=1e-10, atol=1e-12)
