"""Jobs whose meshes share matrices, beside their plain models."""

from __future__ import annotations

import re

import pytest

from tests.worker.verify.proving import gpt, proof_of
from worker.parallel.tensor import graph_collectives
from worker.parallel.tensor.shards import TensorParallelShards


def shared_gpt(data=1):
    spec = gpt(stages=2, meshes=2, workers_per_mesh=2 * data)
    spec["resources"]["tensor"] = 2
    return spec


@pytest.mark.slow
@pytest.mark.parametrize(("data", "shard"), [(1, "none"), (2, "none"), (2, ["optimizer", "none"])])
def test_a_proof_beside_the_plain_model_finds_shared_matrices_equal(data, shard):
    spec = shared_gpt(data)
    spec["resources"]["shard"] = shard
    proof = proof_of(spec, steps=2)
    assert proof.difference is None and proof.steps == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("holder", "name", "wrong", "said"),
    [
        (
            graph_collectives._CopyToGroup,
            "backward",
            staticmethod(lambda ctx, gradient: (gradient, None)),
            r"step 1: the gradient of '.*' of stage \d .* differs .*; made by \d[BW]\d",
        ),
        (
            graph_collectives._ReduceFromGroup,
            "forward",
            staticmethod(lambda ctx, part, group: part.clone()),
            r"step 1: the loss of microbatch 0 is .*; made by 0F0 on m0, whose inputs are equal",
        ),
        (
            TensorParallelShards,
            "counted",
            lambda self, names: list(names),
            "the norm of all gradients is .* one is counted twice",
        ),
    ],
    ids=["a gradient of one part", "a sum left out", "a norm that counts twice"],
)
def test_a_proof_tells_what_was_not_summed_and_what_was_twice(holder, name, wrong, said, monkeypatch):
    monkeypatch.setattr(holder, name, wrong)
    found = proof_of(shared_gpt(), steps=2).difference
    assert found is not None and re.search(said, found), found
