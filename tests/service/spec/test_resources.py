"""resources.meshes as a list and as a range: what they mean, and how they are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.spec.job import JobSpec, SubmittedJob, spec_with_meshes
from service.spec.short_forms import file_form
from tests.service.conftest import job_body
from worker.contract.costs import costs_digest
from worker.contract.job import Job


def _spec(resources: dict) -> JobSpec:
    body = job_body(resources=resources)
    return JobSpec.model_validate(
        {**body, "pipeline": {"stages": 2}, "training": {"steps": 1, "global_batch": 8, "microbatches": 2}}
    )


TENSOR_2 = {"meshes": 2, "workers_per_mesh": 2, "tensor": 2}


@pytest.mark.parametrize(
    "entry",
    [
        {"workers": 2},
        {"workers": 2, "parallel": {"data": 2}},
        {"workers": 2, "parallel": {"data": 2, "tensor": 1}, "shard": "none"},
        {"workers": 2, "parallel": {"tensor": 1}},
    ],
)
def test_meshes_that_are_all_alike_are_the_short_form(entry):
    assert _spec({"meshes": [entry, entry]}) == _spec({"meshes": 2, "workers_per_mesh": 2})


def test_meshes_of_unlike_sizes_are_kept_one_by_one():
    spec = _spec({"meshes": [{"workers": 2}, {"workers": 1}]})
    assert spec.mesh_sizes == [2, 1] and spec.accelerators == 3
    stored = spec.model_dump(mode="json")
    assert JobSpec.model_validate(stored) == spec
    job = Job.from_json(stored)
    assert job.mesh_sizes == (2, 1) and job.batch_multiple == 2


def test_workers_that_share_matrices_have_the_same_samples():
    spec = _spec({"meshes": [{"workers": 8, "parallel": {"data": 4, "tensor": 2}}] * 2})
    assert spec == _spec({"meshes": 2, "workers_per_mesh": 8, "tensor": 2})
    job = Job.from_json(spec.model_dump(mode="json"))
    assert (job.max_dp_size, job.batch_multiple, job.mesh_sizes) == (4, 4, (8, 8))
    with pytest.raises(ValidationError, match="a microbatch of 4 samples cannot be shared"):
        _spec({"meshes": 2, "workers_per_mesh": 8})


@pytest.mark.parametrize(
    ("parts", "workers", "tensors"),
    [
        ([(2, 2), (2, 1)], [4, 2], [2, 1]),
        ([(1, 2), (1, 1)], [2, 1], [2, 1]),
        ([(1, 2), (2, 1)], None, [2, 1]),
        ([(2, 2), (1, 2)], [4, 2], None),
    ],
)
def test_meshes_that_share_their_matrices_unlike_are_kept_one_by_one(parts, workers, tensors):
    entries = [{"workers": data * tensor, "parallel": {"tensor": tensor}} for data, tensor in parts]
    spec = _spec({"meshes": entries})
    assert (spec.resources.workers, spec.resources.tensors) == (workers, tensors)
    stored = spec.model_dump(mode="json")
    assert JobSpec.model_validate(stored) == spec
    job = Job.from_json(stored)
    assert job.heterogeneous and job.dp_sizes == tuple(data for data, _ in parts)
    assert job.tensors == tuple(tensor for _, tensor in parts) and job.tp_size("m1") == parts[1][1]


def test_entries_need_not_say_how_their_workers_share():
    assert _spec({"meshes": [{}, {"workers": 1}]}).accelerators == 2


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_meshes_of_unlike_sizes_and_those_that_share_matrices_run_on_every_device(device):
    unlike = _spec({"meshes": [{"workers": 2}, {"workers": 1}], "device": device}).resources
    assert (unlike.workers, unlike.device) == ([2, 1], device) or tuple(unlike.workers) == (2, 1)
    shared = _spec({"meshes": 2, "workers_per_mesh": 2, "tensor": 2, "device": device}).resources
    assert (shared.tensor, shared.device) == (2, device)


@pytest.mark.parametrize(
    ("resources", "said"),
    [
        (
            {"meshes": [{"workers": 2}, {"workers": 3}]},
            "a microbatch of 4 samples cannot be shared by meshes of [2, 3] workers, each mesh among its own: give "
            "microbatches of a multiple of 6 samples, with training.global_batch 12, or give each mesh a divisor of 4: "
            "1, 2, 4",
        ),
        (
            {"meshes": 2, "workers_per_mesh": 2, "workers": [2, 1, 1]},
            "workers [2, 1, 1] does not say how many workers each of 2 meshes has",
        ),
        ({"meshes": [{}], "workers": [1]}, "meshes is a list and workers is given too"),
        (
            {"meshes": 2, "workers_per_mesh": 2, "tensor": 2, "tensors": [2, 1, 1]},
            "tensors [2, 1, 1] does not give the tensor parallel size of each of 2 meshes",
        ),
        ({"meshes": [{}], "tensors": [1]}, "meshes is a list and tensors is given too"),
        (
            {
                "meshes": [
                    {"workers": 6, "parallel": {"tensor": 2}},
                    {"workers": 2, "parallel": {"tensor": 2}},
                ]
            },
            "a microbatch of 4 samples cannot be shared by meshes of [3, 1] workers",
        ),
        ({"meshes": 2, "workers_per_mesh": 3, "tensor": 2}, "use one of 1, 3, or a multiple of 2 workers"),
        (
            {"meshes": 2, "tensor_plan": {"*": "colwise"}},
            "and tensor parallelism is 1: set parallelism.tp, or leave the plan out",
        ),
        (TENSOR_2 | {"tensor_plan": {"*": "split"}}, "tensor_plan.*"),
        (TENSOR_2 | {"tensor_plan": {"re:(": "colwise"}}, "'re:(' is no regular expression"),
        (TENSOR_2 | {"tensor_plan": {}}, "tensor_plan splits no matrix and tensor is 2"),
        (TENSOR_2 | {"tensor_plan": {"*": "replicate"}}, "tensor_plan splits no matrix and tensor is 2"),
        (
            {"meshes": [{"workers": 2, "shard": "optimizer"}, {"workers": 2}], "shard": "none"},
            "shard is given in entries of meshes and beside them: leave it out beside them",
        ),
        (
            {"meshes": 2, "workers_per_mesh": 2, "shard": ["optimizer"]},
            "resources.shard lists 1 meshes and there are 2: write none or optimizer for all",
        ),
        (
            {"meshes": [{"workers": 6, "parallel": {"tensor": 4}}]},
            "use one of 1, 2, 3, 6, or a multiple of 4 workers",
        ),
        (
            {"meshes": [{"workers": 3, "parallel": {"data": 2}}]},
            "= 2 workers, and there are 3: set data to 3, or workers to 2",
        ),
        ({"meshes": [{"shard": "all"}]}, "meshes.0.shard is 'all': input should be 'none' or 'optimizer'"),
        (
            {"meshes": [{}, {"tensor": 2}]},
            "meshes.1.tensor is not a field of a mesh: it has workers, parallel",
        ),
        ({"meshes": [{"workers": 0}]}, "meshes.0.workers is 0"),
        ({"meshes": [4]}, "meshes.0 is 4"),
        ({"meshes": []}, "meshes lists 0 meshes"),
        ({"meshes": [{}], "workers_per_mesh": 2}, "each entry says its own, leave it out"),
        ({"meshes": [{"workers": 3}, {"workers": 3}]}, "a microbatch of 4 samples cannot be shared"),
        ({"meshes": [{}, {}, {}]}, "resources.meshes 3 is more than pipeline.stages 2"),
    ],
)
def test_a_list_that_cannot_run_is_refused_with_what_fits(resources, said):
    with pytest.raises(ValidationError) as caught:
        _spec(resources)
    assert said in str(caught.value)


def test_meshes_that_share_matrices_unlike_share_the_state_of_the_optimizer_each_as_it_says():
    """The list of DESIGN section 12; a mesh whose workers all have the same samples shares no state."""
    shared = {"workers": 4, "parallel": {"data": 2, "tensor": 2}, "shard": "none"}
    entries = [shared, {"workers": 2, "parallel": {"data": 2, "tensor": 1}, "shard": "optimizer"}]
    spec = _spec({"meshes": entries})
    assert spec.resources.shard == ["none", "optimizer"]
    job = Job.from_json(spec.model_dump(mode="json"))
    assert (job.sharded, job.dp_sizes, job.tensors) == (("m1",), (2, 2), (2, 1))
    both = Job.from_json(
        _spec({"meshes": [one | {"shard": "optimizer"} for one in entries]}).model_dump(mode="json")
    )
    assert both.sharded == ("m0", "m1")
    alone = {"workers": 2, "parallel": {"tensor": 2}, "shard": "optimizer"}
    assert Job.from_json(_spec({"meshes": [alone, entries[1]]}).model_dump(mode="json")).sharded == ("m1",)


def test_meshes_share_the_state_of_the_optimizer_all_of_them_or_one_by_one():
    shared, alone = {"workers": 2, "shard": "optimizer"}, {"workers": 2}
    everywhere = _spec({"meshes": [shared, shared]})
    assert everywhere == _spec({"meshes": 2, "workers_per_mesh": 2, "shard": "optimizer"})
    some = _spec({"meshes": [alone, shared]})
    stored = some.model_dump(mode="json")
    assert JobSpec.model_validate(stored) == some
    assert Job.from_json(everywhere.model_dump(mode="json")).sharded == ("m0", "m1")
    assert Job.from_json(stored).sharded == ("m1",)
    lonely = {"meshes": [{"workers": 1, "shard": "optimizer"}, {"workers": 2, "shard": "none"}]}
    assert Job.from_json(_spec(lonely).model_dump(mode="json")).sharded == ()


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"workers": 2, "shard": "optimizer"}, "resources.shard is optimizer, and"),
        ({"workers": 2, "parallel": {"tensor": 2}}, "parallelism.tp is 2, and"),
    ],
)
def test_an_optimizer_of_torch_that_cannot_be_shared_is_refused_by_name(name, mesh, said):
    body = job_body(optimizer={"factory": f"torch.optim:{name}"}, resources={"meshes": [mesh] * 2})
    training = {"steps": 1, "global_batch": 8, "microbatches": 2}
    with pytest.raises(ValidationError, match=f"{said} {name} does not update each element by itself"):
        JobSpec.model_validate({**body, "pipeline": {"stages": 2}, "training": training})


def _elastic(pipeline: dict | None = None, **fields) -> JobSpec:
    body = {name: value for name, value in job_body().items() if name not in ("pipeline", "resources")}
    training = {"steps": 1, "global_batch": 8, "microbatches": 2}
    body |= {"training": training, "checkpoint": {"uri": "/c"}} | ({"pipeline": pipeline} if pipeline else {})
    return SubmittedJob.model_validate({**body, **fields})


def test_a_range_of_meshes_is_kept_with_its_least_and_each_number_has_its_own_stages():
    spec = _elastic(resources={"meshes": {"min": 2, "max": 4}, "device": "cpu"})
    assert (spec.accelerators, spec.fewest_accelerators, spec.pipeline.stages) == (4, 2, "auto")
    stored = spec.model_dump(mode="json")
    assert JobSpec.model_validate(stored).model_dump(mode="json") == stored
    assert file_form(stored)["resources"]["meshes"] == {"min": 2, "max": 4}
    assert SubmittedJob.model_validate(file_form(stored)) == spec
    assert _elastic({"stages": 6}, resources={"meshes": {"min": 2, "max": 4}}).pipeline.stages == 6
    one = _elastic(resources={"meshes": {"min": 3, "max": 3}})
    assert (one.resources.fewest_meshes, one.fewest_accelerators) == (None, 3)


def test_a_range_of_parallelism_adds_and_takes_whole_meshes():
    spec = _elastic(parallelism={"pp": {"min": 2, "max": 4}, "dp": 2})
    assert (spec.accelerators, spec.fewest_accelerators) == (8, 4)
    stored = spec.model_dump(mode="json")
    assert SubmittedJob.model_validate(file_form(stored)) == spec
    fewer = spec_with_meshes(stored, 6)
    fixed = _elastic({"stages": "auto"}, parallelism={"pp": 3, "dp": 2}).model_dump(mode="json")
    assert fewer == fixed, "an attempt with three meshes is that of a job that asks for three"
    assert costs_digest(fewer) == costs_digest(fixed)
    assert Job.from_json(fewer).mesh_sizes == (2, 2, 2)
    assert spec_with_meshes(fixed, 6) == fixed


def test_spares_are_accelerators_beside_those_of_the_meshes_and_change_no_cost():
    spec = _elastic({"stages": 2}, resources={"meshes": 2, "spares": 3, "device": "cpu"})
    assert (spec.accelerators, spec.fewest_accelerators, spec.mesh_sizes) == (5, 2, [1, 1])
    stored = spec.model_dump(mode="json")
    assert SubmittedJob.model_validate(file_form(stored)) == spec
    without = _elastic({"stages": 2}, resources={"meshes": 2, "device": "cpu"}).model_dump(mode="json")
    for accelerators, spares in ((5, 3), (4, 2), (2, 0)):
        attempt = spec_with_meshes(stored, accelerators)
        assert (attempt["resources"]["spares"], attempt["resources"]["meshes"]) == (spares, 2)
        assert costs_digest(attempt) == costs_digest(without)
    assert spec_with_meshes(stored, 2) == without
    uneven = _elastic(
        {"stages": 2}, resources={"meshes": [{"workers": 2}, {"workers": 1}], "spares": 1}
    ).model_dump(mode="json")
    assert spec_with_meshes(uneven, 4)["resources"]["spares"] == 1
    assert spec_with_meshes(uneven, 3)["resources"]["spares"] == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"resources": {"meshes": {"min": 2, "max": 4}, "spares": 1}}, "spares is 1 and meshes a range"),
        ({"resources": {"meshes": 2, "spares": -1}}, "spares"),
        (
            {"resources": {"meshes": {"min": 4, "max": 2}}},
            "meshes.min 4 is above meshes.max 2: exchange them",
        ),
        ({"resources": {"meshes": {"min": 0, "max": 2}}}, "meshes.min is wrong"),
        ({"resources": {"meshes": {"least": 2, "max": 4}}}, r"write \{min: 2, max: 4\}"),
        ({"parallelism": {"pp": {"min": 2, "max": 2000}}}, "meshes.max is wrong"),
        ({"resources": {"meshes": 4, "fewest_meshes": 2}}, "resources.fewest_meshes is no field"),
        ({"resources": {"meshes": {"min": 2, "max": 4}, "fewest_meshes": 2}}, "fewest_meshes"),
        ({"resources": {"meshes": {"min": 2, "max": 4}, "shard": ["none"] * 4}}, "shard lists meshes"),
        ({"resources": {"meshes": {"min": 2, "max": 4}}, "plan": "mine"}, "plan 'mine' is for one number"),
        ({"resources": {"meshes": {"min": 2, "max": 4}}, "checkpoint": None}, "give checkpoint.uri"),
        (
            {"resources": {"meshes": {"min": 2, "max": 4}}, "pipeline": {"stages": 3}},
            "resources.meshes 4 is more than pipeline.stages 3",
        ),
    ],
)
def test_a_range_that_cannot_be_is_refused_by_name(fields, said):
    with pytest.raises(ValidationError, match=said):
        _elastic(**fields)


def test_a_stored_range_is_of_meshes_that_are_all_alike():
    with pytest.raises(ValidationError, match="fewest_meshes is 2 of 2 meshes"):
        _spec({"meshes": 2, "fewest_meshes": 2})
    with pytest.raises(ValidationError, match="meshes differ in size"):
        _spec({"meshes": 2, "workers_per_mesh": 2, "workers": [2, 1], "fewest_meshes": 1})
