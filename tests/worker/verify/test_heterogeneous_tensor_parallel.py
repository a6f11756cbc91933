"""Jobs whose meshes share their matrices among unlike numbers of workers, or on nodes of their own, beside their plain
models."""

from __future__ import annotations

import re

import pytest

from tests.worker.jobs.test_tensor_parallel import on
from tests.worker.verify.proving import gpt, proof_of
from tests.worker.verify.test_defects import around
from worker.parallel.resharding import TileBuffers
from worker.parallel.tensor.shards import TensorParallelShards


def spec_of(*layout):
    return on(layout, gpt(stages=2, meshes=2, dropout=0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        ("embed", "blocks.0"),  # what is sent is made by a random operation, whose name both stages have
        pytest.param(("blocks.0", "blocks.1"), marks=pytest.mark.slow),
        pytest.param(("blocks.1", "blocks.2"), marks=pytest.mark.slow),
        pytest.param(("blocks.2", "norm"), marks=pytest.mark.slow),
    ],
    ids=" | ".join,
)
def test_a_proof_finds_them_equal_wherever_the_model_is_cut(cut):
    proof = proof_of(spec_of((1, 2), (2, 1)), steps=1, slow=cut)
    assert (proof.difference, proof.steps) == (None, 1)


APART = {"m0": "one", "m1": "two"}


def passed(proof):
    """How many transfers were compared."""
    return sum(count for kind, (count, _, _) in proof.worst.kinds.items() if "transfer" in kind)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [((2, 2), (2, 1)), ((1, 2), (2, 1))], ids=str)
def test_a_proof_finds_meshes_that_share_their_matrices_unlike_equal(layout):
    proof = proof_of(spec_of(*layout), steps=2)
    assert (proof.difference, proof.steps) == (None, 2)


@pytest.mark.slow
def test_a_proof_compares_what_goes_between_meshes_that_share_alike_on_nodes_of_their_own():
    """Once for each worker that gets it, whoever sends it: four microbatches, there and back."""
    proof = proof_of(spec_of((1, 2), (1, 2)), steps=1, nodes=APART)
    assert (proof.difference, proof.steps) == (None, 1)
    assert passed(proof) == 2 * 2 * 4


def wrong_replica(monkeypatch):
    """Of the two workers of m1 that share matrices the second gets something else."""

    def make(original):
        def received(self, one):
            original(self, one)
            if self._worker == "m1/1" and "m1/1" in self._plan.targets:
                self._tensor.mul_(1.01)

        return received

    around(monkeypatch, TileBuffers, "received", make)
    return r"sent is not what was used: SEND_F on m0 to RECV_F on m1 .*as m1/1 has it"


def tied_of_others_left_out(monkeypatch):
    """Of the tied words, split on m1, the gradients of the other mesh are not summed."""
    monkeypatch.setattr(
        TensorParallelShards, "sum_whole", lambda self, name, part, add: add(self.zero_padded(name, part))
    )
    return r"the gradient of '.*' of stage \d on m1 .* differs .*made by REDUCE on m1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "layout"),
    [
        (wrong_replica, ((1, 1), (1, 2))),
        (wrong_replica, ((1, 2), (1, 2))),
        (tied_of_others_left_out, ((1, 1), (1, 2))),
    ],
)
def test_a_defect_between_such_meshes_is_found_with_its_slot(defect, layout, monkeypatch):
    with monkeypatch.context() as patch:
        message = defect(patch)
        found = proof_of(spec_of(*layout), steps=1, nodes=APART).difference
    assert found is not None and re.search(message, found), found
