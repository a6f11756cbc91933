"""Length buckets: specs that say them wrongly are refused with the way out, and what they say is by microbatch."""

import copy

import numpy as np
import pytest

from service.scheduler.auto.auto import makespan_lower_bound_s
from service.scheduler.planner import make_plan
from service.scheduler.problem.problem import build_problem
from service.scheduler.problem.spec import PipelineSpec, SpecError
from service.scheduler.problem.spec_checks import load_spec
from tests.service.scheduler.specs import chain, measured, scaled_buckets


def changed(**paths):
    """Three stages, four microbatches of two lengths; fields changed by their paths, None removes one."""
    data = scaled_buckets(chain(3, 4, schedule="auto"), [0, 1, 1, 0], [1.0, 0.5])
    for path, value in paths.items():
        *heads, last = path.split("__")
        place = data
        for head in heads:
            place = place[int(head)] if head.isdigit() else place[head]
        if value is None:
            del place[int(last) if last.isdigit() else last]
        else:
            place[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(bucket_of=None), r"length_buckets is given without bucket_of: give both, or none"),
        (changed(length_buckets=None), r"bucket_of is given without length_buckets: give both"),
        (
            changed(bucket_of__3=None),
            r"bucket_of has 3 entries, but there are 4 microbatches: give the index",
        ),
        (changed(bucket_of__2=2), r"bucket_of\.2 is 2, but there are 2 length_buckets: use 0 to 1"),
        (changed(bucket_of__2=-1), r"bucket_of\.2 is -1: .*greater than or equal to 0"),
        (changed(bucket_of__2="1"), r"bucket_of\.2 is '1': write a number, without quotes"),
        (
            changed(length_buckets__1__stages__2=None),
            r"length_buckets\.1 has costs of 2 stages, but there are 3",
        ),
        (
            changed(length_buckets__0__edges__1=None),
            r"length_buckets\.0 has costs of 1 edges, but there are 2",
        ),
        (
            changed(length_buckets__1__stages__2__forward_s=1.25),
            r"length_buckets\.1 gives forward_s 1\.25 for stage 's2', more than the 1\.0 of the stage itself: give the "
            r"stage the most of any bucket",
        ),
        (
            changed(length_buckets__0__edges__1__backward_s=1.25),
            r"length_buckets\.0 gives backward_s 1\.25 for edge 1, more than the 1\.0 of the edge itself",
        ),
        (
            changed(length_buckets__1__edges__0__forward_s=None),
            r"length_buckets\.1 gives forward_s None for edge 0, which itself has 1\.0: give forward_s in both or in none",
        ),
        (
            changed(length_buckets__1__stages__0__backward_s=1.5),
            r"gives backward_s 1\.5 for stage 's0'.* both or",
        ),
        (
            changed(length_buckets__1__stages__0__forward_s=-1.0),
            r"length_buckets\.1\.stages\.0\.forward_s is -1\.0",
        ),
        (
            changed(length_buckets__1__stages__0__name="s0"),
            r"length_buckets\.1\.stages\.0\.name is not a field",
        ),
        (
            changed(stages__1__recompute={"activation_bytes": 1, "extra_s": 0.5}),
            r"stage 's1' has recompute, which is not planned together with length_buckets: remove it",
        ),
        (
            changed(meshes__1__activation_limit_bytes=1),
            r"length_buckets\.0: mesh 'm1' has activation_limit_bytes 1, less than the 2 .* at least 2",
        ),
    ],
)
def test_a_spec_whose_buckets_are_wrong_says_what_to_change(data, message):
    with pytest.raises(SpecError, match=message):
        load_spec(data)


def test_merged_edges_must_cost_the_same_in_every_bucket():
    data = chain(3, 4, skips=((0, 2),), meshes=[0, 1, 1], schedule="auto")
    for edge in (data["edges"][0], data["edges"][2]):
        edge["tensor"] = "hidden"
    data = scaled_buckets(data, [0, 1, 1, 0], [1.0, 0.5])
    load_spec(data)
    data["length_buckets"][1]["edges"][2]["forward_s"] = 0.25
    with pytest.raises(
        SpecError, match=r"length_buckets\.1: edges 0 and 2 share tensor 'hidden'.*give both the same"
    ):
        load_spec(data)


def test_a_bucket_without_microbatches_needs_no_memory():
    data = changed(bucket_of=[1, 1, 1, 1])
    for mesh in data["meshes"]:
        mesh["activation_limit_bytes"] = 1
    assert make_plan(load_spec(data)).meshes[0].peak_activation_bytes == 1


def test_costs_and_bytes_are_those_of_the_bucket_of_each_microbatch():
    data = chain(2, 3, schedule="auto", split_backward=True)
    for stage in data["stages"]:
        stage.update(activation_bytes=8, weight_stash_bytes=4, rematerialised_bytes=2)
    for edge in data["edges"]:
        edge.update(forward_s=None, backward_s=None, forward_bytes=100, backward_bytes=60)
    data["network"]["bandwidth_bytes_per_s"] = 40
    problem = build_problem(load_spec(scaled_buckets(data, [1, 0, 1], [0.5, 1.5])))
    assert problem.duration[problem.kind(0, 0)].tolist() == [1.5, 0.5, 1.5]
    assert problem.duration[problem.kind(1, 1)].tolist() == [1.5, 0.5, 1.5]
    assert problem.duration[problem.transfer_kind(0, 0)].tolist() == [3.75, 1.25, 3.75]
    assert problem.duration[problem.transfer_kind(0, 1)].tolist() == [2.25, 0.75, 2.25]
    assert problem.activation_by_microbatch.tolist() == [[12, 4, 12], [12, 4, 12]]
    assert problem.whole_stash_by_microbatch.tolist() == [[6, 2, 6], [6, 2, 6]]
    assert problem.rematerialised_by_microbatch.tolist() == [[3, 1, 3], [3, 1, 3]]
    assert problem.size_by_microbatch[problem.transfer_kind(0, 0)].tolist() == [150, 50, 150]
    assert problem.size_by_microbatch[problem.transfer_kind(0, 1)].tolist() == [90, 30, 90]
    assert problem.activation.tolist() == [12, 12] and problem.most_activation_of_mesh.tolist() == [12, 12]
    # each mesh holds at one time at most two microbatches of 15 and one of 5, and both ways of their tensors
    assert problem.most_bytes.tolist() == [2 * 15 + 5 + 2 * (150 + 90) + 50 + 30] * 2


def test_what_forwards_may_fill_leaves_room_for_the_largest_backward_and_no_bound_counts_on_it():
    data = chain(2, 2, schedule="auto")
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage.update(activation_bytes=8, rematerialised_bytes=4)
        mesh["activation_limit_bytes"] = 20
    problem = build_problem(load_spec(scaled_buckets(data, [1, 0], [0.5, 1.0])))
    assert problem.activation_limit.tolist() == [16, 16]
    assert problem.relaxed_activation_limit.tolist() == [18, 18] and not problem.activation_limit_is_exact


def test_a_plan_is_found_where_what_comes_back_for_a_backward_differs():
    data = chain(2, 3, schedule="auto")
    for stage, mesh in zip(data["stages"], data["meshes"], strict=True):
        stage.update(activation_bytes=8, rematerialised_bytes=4)
        mesh["memory_bytes"] = 15
    spec = load_spec(scaled_buckets(data, [1, 0, 1], [0.5, 1.0]))
    plan = make_plan(spec)
    assert max(mesh.peak_memory_bytes for mesh in plan.meshes) <= 15
    assert (
        makespan_lower_bound_s(spec) <= plan.makespan_s
    )  # which says that nothing comes back, in the buckets too


def test_no_backward_of_any_bucket_is_longer_split_than_whole_in_the_relaxation():
    data = chain(2, 3, schedule="auto")
    for stage in data["stages"]:
        stage["backward_s"] = 1.5
    problem = build_problem(load_spec(scaled_buckets(data, [1, 0, 1], [0.5, 1.0])), split=False).all_split()
    backwards = problem.duration[problem.kind(0, 1)] + problem.duration[problem.kind(0, 2)]
    assert backwards.tolist() == pytest.approx([1.5, 0.75, 1.5])


EQUAL = {
    "auto": chain(4, 6, schedule="auto", transfer=0.3),
    "limited": measured(3, 6, 5, memory=2.3),
    "1f1b": chain(4, 6, schedule="1f1b", transfer=0.7),
    "zb-v": chain(4, 5, schedule="zb-v", meshes=[0, 1, 1, 0]),
    "inference": chain(4, 5, schedule="inference"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_buckets_of_equal_costs_give_the_plan_without_buckets_byte_for_byte(name):
    data = EQUAL[name]
    bucket_of = [m % 2 for m in range(data["microbatches"])]
    equal = load_spec(scaled_buckets(data, bucket_of, [1.0, 1.0]))
    assert len(equal.length_buckets) == 2
    plain = make_plan(load_spec(data), budget_s=0.2).model_dump_json()
    assert make_plan(equal, budget_s=0.2).model_dump_json() == plain


def test_one_bucket_for_all_gives_the_plan_of_its_costs():
    data = chain(3, 5, schedule="auto", transfer=0.3)
    halved = copy.deepcopy(data)
    for stage in halved["stages"]:
        stage.update(forward_s=0.5, backward_input_s=0.5, backward_weight_s=0.5, activation_bytes=1)
        stage["weight_stash_bytes"] = 0
    for edge in halved["edges"]:
        edge.update(forward_s=0.15, backward_s=0.15)
    buckets = scaled_buckets(data, [1] * 5, [1.0, 0.5])
    assert make_plan(load_spec(buckets)).model_dump_json() == make_plan(load_spec(halved)).model_dump_json()


def test_a_spec_with_buckets_survives_its_json():
    spec = load_spec(changed())
    assert PipelineSpec.model_validate_json(spec.model_dump_json()) == spec
    again = build_problem(PipelineSpec.model_validate_json(spec.model_dump_json()))
    assert np.array_equal(again.duration, build_problem(spec).duration)


def test_a_spec_without_buckets_is_written_as_before_there_were_any():
    """Another replica may be of an older version, which refuses fields that it does not know."""
    plain = load_spec(chain(3, 4))
    assert not {"length_buckets", "bucket_of"} & plain.model_dump().keys()
    assert not {"length_buckets", "bucket_of"} & plain.model_dump(mode="json").keys()
    assert "bucket" not in plain.model_dump_json()
    spec = load_spec(scaled_buckets(measured(3, 4, 7), [0, 1, 1, 0], [1.0, 0.37]))
    assert PipelineSpec.model_validate_json(spec.model_dump_json()) == spec
    assert spec.model_dump()["bucket_of"] == [0, 1, 1, 0] and len(spec.model_dump()["length_buckets"]) == 2
