"""Plans of jobs whose meshes have unlike sizes: costs and memory by each mesh's share, transfers as long as reshardings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from service.orchestrator.planning import work
from service.orchestrator.planning.work import StoredStep
from service.scheduler.job.plan_job import JobCosts, job_plan_json, plan_job
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.resharding.layout import Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding
from service.scheduler.why.changes import CutSearch
from worker.contract.job import Job
from worker.contract.profile import LayerCost, LayerEdge, LayerProfile

ROWS, WIDTH, LAYERS = 12, 64, 4


def _profile(workers: int, shape=None) -> LayerProfile:
    """Layers whose time and memory are those of the rows that a worker of a mesh of so many has."""
    rows = ROWS // workers
    cost = 1e-3 * rows
    layers = tuple(
        LayerCost(f"l{k}", cost, cost, cost, 1000 * rows, 0, 40, parameters=(f"w{k}",)) for k in range(LAYERS)
    )
    shape = (rows, WIDTH) if shape is None else shape
    edges = tuple(
        LayerEdge(k, k + 1, f"t{k}", 4 * shape[0] * WIDTH, True, order=k, shape=shape)
        for k in range(LAYERS - 1)
    )
    return LayerProfile(layers, edges, "cpu", "", {f"w{k}": 40 for k in range(LAYERS)})


def _job(sizes, tensors=None, **pipeline):
    """The specification of a job whose meshes have these numbers of workers, so many of which share matrices."""
    return {
        "model": {"factory": "m:m"},
        "data": {"factory": "d:d"},
        "loss": {"factory": "l:l"},
        "training": {"global_batch": 3 * ROWS, "microbatches": 3},
        "pipeline": {"stages": len(sizes), "cut": [f"l{k}" for k in range(len(sizes))], **pipeline},
        "resources": {
            "meshes": len(sizes),
            "workers_per_mesh": max(sizes),
            "workers": list(sizes) if len({*sizes}) > 1 else None,
            **({"tensor": max(tensors), "tensors": list(tensors)} if tensors else {}),
        },
    }


def _costs(sizes, nodes=None, profile=_profile, tensors=None):
    """What a driver sends of it."""
    kinds = {*zip(sizes, tensors or [1] * len(sizes), strict=True)}
    workers = [(f"m{mesh}", w) for mesh, size in enumerate(sizes) for w in range(size)]
    return {
        "microbatches": 3,
        "profile": _profile(1).to_json(),
        "mesh_profiles": [
            {"microbatches": 3, "workers": size, "tensor": t, "profile": profile(size // t).to_json()}
            for size, t in kinds
        ],
        "network": {"contention": "link", "bandwidth_bytes_per_s": 1e6, "latency_s": 1e-5},
        "workers": [
            {"mesh": mesh, "worker": w, "node": (nodes or {}).get(mesh, "one")} for mesh, w in workers
        ],
    }


def _answer(sizes, nodes=None, profile=_profile, tensors=None, **pipeline):
    job = Job.from_json(_job(sizes, tensors, **pipeline))
    costs = _costs(sizes, nodes, profile, tensors)
    return job_plan_json(plan_job(job, JobCosts.from_json(costs, job), budget_s=0.1))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3)], ids=str)
def test_a_transfer_lasts_as_long_as_the_resharding_that_the_workers_run(sizes):
    answer = _answer(sizes, nodes={"m0": "one", "m1": "two"})
    found = {(one["edge"], one["backward"]): one["plan"] for one in answer["reshardings"]}
    assert set(found) == {(0, False), (0, True)}
    for backward in (False, True):
        (p, q), action = ((1, 0), "SEND_B") if backward else ((0, 1), "SEND_F")
        sides = (
            mesh_layout(f"m{k}", mesh=(sizes[k],), split=(0,), hosts=(("one", "two")[k],) * sizes[k])
            for k in (p, q)
        )
        links = Links(1e6, latency_s=1e-5)
        plan = plan_resharding(Tensor((ROWS, WIDTH), 4), *sides, links, messages=64)
        assert found[0, backward] == plan.to_json()
        slots = [one for one in answer["plan"]["slots"] if one["action"] == action]
        assert len(slots) == 3
        for slot in slots:
            assert slot["end_s"] - slot["start_s"] == pytest.approx(plan.makespan_s)
        assert plan.makespan_s >= 4 * ROWS * WIDTH / 1e6, "all of it goes over one card"


def test_stages_cost_and_keep_what_the_rows_of_a_worker_of_their_mesh_do():
    spec = _answer((2, 1), schedule="1f1b")["spec"]
    first, second = spec["stages"]
    assert first["forward_s"] == pytest.approx(1e-3 * ROWS / 2)
    assert second["forward_s"] == pytest.approx(3 * 1e-3 * ROWS)
    assert (first["activation_bytes"], second["activation_bytes"]) == (1000 * ROWS // 2, 3 * 1000 * ROWS)
    assert spec["edges"][0]["held_bytes"] == 4 * ROWS * WIDTH


def test_meshes_of_one_size_beside_others_exchange_tensors_worker_by_worker():
    answer = _answer((2, 2, 1))
    assert {one["edge"] for one in answer["reshardings"]} == {1}
    assert answer["spec"]["edges"][0]["forward_bytes"] == 4 * ROWS // 2 * WIDTH
    assert answer["spec"]["edges"][1]["forward_bytes"] is None


def test_a_mask_beside_what_has_a_gradient_goes_one_way():
    """Programs have its way back, of no length, in which no worker sends anything."""

    def masked(workers):
        profile = _profile(workers)
        mask = LayerEdge(0, 3, "mask", profile.edges[0].bytes, False, order=-1, shape=profile.edges[0].shape)
        return replace(profile, edges=(mask, *profile.edges))

    answer = _answer((2, 1), profile=masked)
    assert [edge["tensor"] for edge in answer["spec"]["edges"]] == ["mask", "t0"]
    assert [(one["edge"], one["backward"]) for one in answer["reshardings"]] == [
        (0, False),
        (1, False),
        (1, True),
    ]
    assert all(slot["end_s"] == slot["start_s"] for slot in answer["plan"]["slots"] if _goes_back(slot, 0))


def _goes_back(slot, edge):
    return slot.get("edge") == edge and slot["action"].endswith("_B")


def test_a_job_with_meshes_of_one_size_has_no_word_of_reshardings():
    job = {"meshes": 2, "workers_per_mesh": 2}
    read = Job.from_json(
        {
            "model": {"factory": "m:m"},
            "data": {"factory": "d:d"},
            "training": {"microbatches": 3},
            "pipeline": {"stages": 2},
            "resources": job,
        }
    )
    costs = {"microbatches": 3, "profile": _profile(2).to_json()}
    assert "reshardings" not in job_plan_json(plan_job(read, JobCosts.from_json(costs, read), budget_s=0.0))


def test_a_tensor_whose_shapes_do_not_tell_how_it_is_shared_is_refused_by_name():
    with pytest.raises(SpecError, match="tensor 't0' cannot go between a mesh of 2 workers"):
        _answer((2, 1), profile=lambda workers: _profile(workers, shape=(7 if workers == 2 else 8, WIDTH)))


@pytest.mark.parametrize(
    ("parts", "boxes"),
    [
        # parts of the rows, each on so many workers that share matrices
        (((2, 2), (2, 1)), ["0:6", "0:6", "6:12", "6:12", "0:6", "6:12"]),
        (((1, 2), (1, 1)), ["0:12", "0:12", "0:12"]),
        (((1, 1), (1, 2)), ["0:12", "0:12", "0:12"]),
        (((1, 2), (2, 1)), ["0:12", "0:12", "0:6", "6:12"]),
        (((2, 1), (1, 2)), ["0:6", "6:12", "0:12", "0:12"]),
    ],
    ids=str,
)
def test_between_meshes_that_share_matrices_unlike_every_worker_gets_the_whole_of_its_part(parts, boxes):
    sizes, tensors = [d * t for d, t in parts], [t for _, t in parts]
    answer = _answer(sizes, nodes={"m0": "one", "m1": "two"}, tensors=tensors)
    found = {(one["edge"], one["backward"]): one["plan"] for one in answer["reshardings"]}
    assert set(found) == {(0, False), (0, True)}
    plan = found[0, False]
    assert [f"{one['box'][0][0]}:{one['box'][0][1]}" for one in plan["workers"]] == boxes
    assert plan["shape"] == [ROWS, WIDTH]
    slow = sum(one["end"] - one["begin"] for one in plan["messages"] if not one["local"])
    assert slow == ROWS * WIDTH, "each byte once over the slow link, replicas from there by local means"
    for worker, box in zip(plan["workers"], boxes, strict=True):
        if not worker["source"]:
            begin, end = map(int, box.split(":"))
            came = sum(
                one["end"] - one["begin"] for one in plan["messages"] if one["receiver"] == worker["name"]
            )
            assert came == (end - begin) * WIDTH


def test_a_number_of_each_part_cannot_go_between_meshes_that_share_matrices_unlike():
    def number(workers):
        profile = _profile(workers)
        return replace(profile, edges=tuple(replace(edge, shape=(), bytes=4) for edge in profile.edges))

    with pytest.raises(SpecError, match="tensor 't0' is a single number of each of 2 parts"):
        _answer((4, 2), tensors=(2, 1), profile=number)


def test_other_cuts_are_explained_by_the_costs_of_each_mesh():
    """One border moved: rows, memory and reshardings are those of the meshes, as in the plan."""
    answer = _answer((2, 1))
    stored = StoredStep(_job((2, 1)), json.dumps(answer), (), None, _costs((2, 1)))
    layers = work._known_layers(stored, answer["begins"])
    spec = PipelineSpec.model_validate(answer["spec"])
    cuts = CutSearch.of(spec, None, layers, ())
    now = cuts._unpriced(cuts.now)
    assert now.edges == spec.edges and now.stages == spec.stages
    (moved,) = (edge for edge in cuts._unpriced((0, 2)).edges)
    assert moved.held_bytes == 4 * ROWS * WIDTH
    assert layers.profiles[3].mesh_profiles[0].layers[0].activation_bytes == 1000 * ROWS // 2
