"""Jobs whose meshes share matrices unlike, and the optimizer's state each as it says, beside their plain models."""

from __future__ import annotations

import re

import pytest

from tests.worker.jobs.test_tensor_parallel_zero1 import on
from tests.worker.verify.proving import gpt, proof_of
from worker.engine.optim.zero1 import Zero1Update

BOTH = [(2, 2, "optimizer"), (2, 1, "optimizer")]
SECOND = [(2, 1, "none"), (2, 2, "optimizer")]


def spec_of(layout):
    return on(layout, gpt(stages=2, meshes=2, dropout=0.2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [BOTH, SECOND], ids=str)
def test_a_proof_finds_them_equal(layout):
    """Dropout, clipping, tied words that one mesh splits and the other has whole."""
    proof = proof_of(spec_of(layout), steps=2)
    assert (proof.difference, proof.steps) == (None, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "said"),
    [("gather", "step 1: after STEP on m1"), ("_gradients_of_norm", "the norm of all gradients")],
)
def test_a_proof_tells_parts_that_were_not_gathered_and_those_that_a_norm_left_out(defect, said, monkeypatch):
    right = Zero1Update._gradients_of_norm
    wrong = {
        "gather": lambda self: None,
        "_gradients_of_norm": lambda self: (
            found if (found := right(self)) and self.collectives.worker < 2 else []
        ),
    }[defect]
    monkeypatch.setattr(Zero1Update, defect, wrong)
    found = proof_of(spec_of(SECOND), steps=1).difference
    assert found is not None and re.search(said, found), found
