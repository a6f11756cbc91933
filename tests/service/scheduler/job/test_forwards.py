"""Plans of evaluations: forwards only, over the reshardings between meshes of unlike sizes."""

from __future__ import annotations

import pytest

from service.scheduler.job.forwards import plan_forwards
from service.scheduler.problem.spec import SpecError
from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding

ROWS, WIDTH = 12, 64


def _mesh(name, data, node="one"):
    return {"name": name, "data": data, "nodes": [node] * data}


def _request(*sizes, **changes):
    names = [f"m{k}" for k in range(len(sizes))]
    shapes = [{"data": size, "shape": [ROWS // size, WIDTH]} for size in {*sizes}]
    unlike = {
        "meshes": [_mesh(name, size, name) for name, size in zip(names, sizes, strict=True)],
        "tensors": [{"shapes": shapes, "element_bytes": 4}] * (len(sizes) - 1),
    }
    return {
        "microbatches": 3,
        "meshes": [{"name": name} for name in names],
        "stages": [
            {"name": f"s{k}", "mesh": name, "forward_s": 1e-3, "activation_bytes": 8, "static_bytes": 8}
            for k, name in enumerate(names)
        ],
        "edges": [
            {
                "source": f"s{k}",
                "target": f"s{k + 1}",
                "tensor": f"h{k}",
                "forward_bytes": 4 * ROWS * WIDTH // min(sizes[k : k + 2]),
                "backward_bytes": 0,
            }
            for k in range(len(sizes) - 1)
        ],
        "network": {"contention": "link", "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-5},
        "unlike": {**unlike, **changes},
    }


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)], ids=str)
def test_a_transfer_between_unlike_meshes_lasts_as_long_as_the_resharding_that_is_answered(sizes):
    answer = plan_forwards(_request(*sizes), budget_s=0.1).to_json()
    sides = (
        mesh_layout(f"m{k}", mesh=(size,), split=(0,), hosts=(f"m{k}",) * size)
        for k, size in enumerate(sizes)
    )
    plan = plan_resharding(Tensor((ROWS, WIDTH), 4), *sides, Links(1e6, latency_s=1e-5), messages=64)
    assert answer["reshardings"] == [{"edge": 0, "backward": False, "plan": plan.to_json()}]
    sent = [one for one in answer["slots"] if one["action"] == "SEND_F"]
    assert len(sent) == 3
    for one in sent:
        assert one["end_s"] - one["start_s"] == pytest.approx(plan.makespan_s)


def test_meshes_of_one_size_beside_others_exchange_tensors_in_pairs():
    found = plan_forwards(_request(2, 2, 1), budget_s=0.1)
    assert [*found.reshardings] == [(1, False)]
    assert found.spec.edges[0].forward_bytes == 4 * ROWS // 2 * WIDTH


def test_a_request_without_a_word_of_meshes_is_planned_as_ever():
    request = _request(1, 1)
    del request["unlike"]
    assert "reshardings" not in plan_forwards(request, budget_s=0.1).to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"meshes": [_mesh("m0", 2)]}, "is of other meshes"),
        ({"tensors": []}, "0 tensors are described, and the pipeline has 1 edges"),
        ({"meshes": [_mesh("m0", 2), {**_mesh("m1", 1), "data": 3}]}, "mesh m1 has 1 workers, which are not"),
        ({"tensors": [{"shapes": [], "element_bytes": 4}]}, "a tensor has no shape for 2 parts"),
        ({"more": 1}, "cannot be read"),
        (
            {
                "tensors": [
                    {
                        "shapes": [{"data": 2, "shape": [5, 4]}, {"data": 1, "shape": [12, 4]}],
                        "element_bytes": 4,
                    }
                ]
            },
            "tensor 'h0' cannot go between a mesh of 2 workers",
        ),
    ],
)
def test_what_a_driver_says_wrong_of_unlike_meshes_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        plan_forwards(_request(2, 1, **changes), budget_s=0.1)
