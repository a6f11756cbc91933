"""Jobs whose meshes share the optimizer's state, beside their plain models."""

from __future__ import annotations

import re

import pytest

from tests.worker.verify.proving import gpt, proof_of
from worker.engine.optim.zero1 import Zero1Update


def shared_gpt():
    spec = gpt(stages=2, meshes=2, workers_per_mesh=2)
    spec["resources"]["shard"] = "optimizer"
    return spec


def test_a_proof_beside_the_plain_model_finds_meshes_that_share_equal():
    proof = proof_of(shared_gpt(), steps=2)
    assert proof.difference is None and proof.steps == 2


@pytest.mark.parametrize(
    ("defect", "said"),
    [
        ("gather", "step 1: after STEP on m0"),
        ("_gradients_of_norm", "norm"),
    ],
)
def test_a_proof_tells_parameters_that_were_not_gathered_and_a_norm_without_the_parts_of_others(
    defect, said, monkeypatch
):
    right = Zero1Update._gradients_of_norm
    wrong = {
        "gather": lambda self: None,
        "_gradients_of_norm": lambda self: (
            found if (found := right(self)) and self.collectives.worker == 0 else []
        ),
    }[defect]
    monkeypatch.setattr(Zero1Update, defect, wrong)
    found = proof_of(shared_gpt(), steps=2).difference
    assert found is not None and re.search(said, found), found
