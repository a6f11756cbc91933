"""Jobs whose optimizer looks across parameters: refused by name on several meshes, as on one mesh on one."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.missing import leave_out
from tests.tiers import some_by_day
from tests.worker.actor.test_actor import job
from tests.worker.odd_jobs import tied_from_python_and_numpy
from tests.worker.plain_job import PlainJob
from tests.worker.workers import Workers
from worker.actor.optimizer import check_layout_of_optimizer, check_optimizer_of_meshes, make_optimizer
from worker.checkpoint import format as checkpoint_format
from worker.contract.failures import AttemptFailure
from worker.contract.job import Factory, Job
from worker.contract.reasons import Reason

GROUPS = [{"match": ["*.bias"], "weight_decay": 0.0}, {"match": ["re:norm"], "weight_decay": 0.1}]


def spec_of(factory, *, meshes, groups=(), **arguments):
    spec = job(stages=2, meshes=meshes)
    optimizer = {"factory": factory, "args": arguments, "schedule": None, "groups": list(groups)}
    return spec | {"optimizer": optimizer, "pipeline": {"stages": 2, "schedule": "auto"}}


@pytest.mark.parametrize("meshes", [2, None])
def test_an_optimizer_that_looks_across_parameters_ends_a_job_on_two_meshes_before_its_first_step(meshes):
    field = f"resources.meshes is {meshes or 'one a stage'}"
    with pytest.raises(AttemptFailure, match=f"{field}: optimizer NormedSGD .*train on one mesh") as refused:
        Workers(spec_of("odd_optimizers:NormedSGD", meshes=meshes))
    assert refused.value.reason is Reason.USER_CODE_RAISED


@some_by_day("factory", ["NormedSGD", "Prodigy", "by_count"], by_day=1)
def test_two_stages_on_one_mesh_train_as_one_process(factory):
    spec, steps = spec_of(f"odd_optimizers:{factory}", meshes=1), range(1, 6)
    plain = PlainJob(spec).train(steps)
    with Workers(spec) as run:
        losses = run.losses(steps)
        state = run.workers[0].engine.state()["parameters"]
    assert losses == pytest.approx(plain.losses, rel=1e-5)
    for name, parameter in plain.model.named_parameters():
        if name.endswith(
            "qkv.bias"
        ):  # that of the keys has no gradient but rounding, which Prodigy makes large
            continue
        torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def needs_library_of(case):
    library = SUMMED[case][0].partition(":")[0]
    if library != "odd_optimizers" and importlib.util.find_spec(library) is None:
        leave_out(f"{library} is not installed")


def head_first(factory, *, meshes=2, model=(), **arguments):
    spec = spec_of(f"odd_optimizers:{factory}", meshes=meshes, **arguments)
    return spec | {
        "model": {"factory": "odd_jobs:HeadFirst", "args": dict(model)},
        "data": {"factory": "odd_jobs:Vectors"},
    }


@pytest.mark.slow
def test_settings_by_a_position_that_no_trial_reaches_end_a_job_once_its_model_is_built():
    spec = head_first("by_position", model={"layers": 33}, count=66)
    assert check_layout_of_optimizer(Job.from_json(spec)) == ""
    said = (
        r"odd_optimizers:by_position': the factory gives parameter 'layers\.\d+\.\w+' weight_decay .* among all 68 .*half.*"
        "optimizer.groups"
    )
    with pytest.raises(AttemptFailure, match=said) as refused:
        Workers(spec)
    assert refused.value.reason is Reason.USER_CODE_RAISED


def test_one_mesh_whose_stages_have_parameters_in_another_order_refuses_settings_by_position():
    said = "the factory gives parameter .* lr .* of mesh m0, in the order of its stages"
    with pytest.raises(AttemptFailure, match=said) as refused:
        Workers(head_first("by_depth", meshes=1))
    assert refused.value.reason is Reason.USER_CODE_RAISED
    with Workers(head_first("by_dimension", meshes=1)) as run:
        assert run.notes == []


def test_an_optimizer_that_takes_no_parameters_of_a_trial_is_tried_on_those_of_the_model():
    """It steps no vectors beside matrices, and the model has none."""
    matrices = {"bias": False}
    assert "of one model" in check_layout_of_optimizer(
        Job.from_json(head_first("TakesModel", model=matrices))
    )
    said = r"optimizer TakesModel updates a parameter otherwise .*in a trial, (head|layers)\."
    with pytest.raises(AttemptFailure, match=said) as refused:
        Workers(head_first("TakesModel", model=matrices))
    assert refused.value.reason is Reason.USER_CODE_RAISED


def test_an_optimizer_that_cannot_be_tried_at_all_is_noted():
    with Workers(head_first("FailsLate")) as run:
        (note,) = run.notes
    assert note.startswith(
        "optimizer 'odd_optimizers:FailsLate' could not be tried on the model's own parameters: RuntimeError: it fails late"
    )
    assert "slotline verify" in note


SUMMED = {
    "lamb by the norm of all": ("odd_optimizers:GlobalLamb", {"lr": 0.01}),
    "prodigy": ("prodigyopt:Prodigy", {"d0": 1e-4, "weight_decay": 0.01, "use_bias_correction": True}),
    "dadapt adam": (
        "dadaptation:DAdaptAdam",
        {"lr": 0.1, "d0": 5e-4, "weight_decay": 0.01, "decouple": True},
    ),
    "dadapt sgd": ("dadaptation:DAdaptSGD", {"lr": 0.2, "d0": 1e-3, "growth_rate": 2.0}),
}


def summed(case, *, meshes=4, **changes):
    factory, arguments = SUMMED[case]
    spec = head_first("Prodigy", meshes=meshes, model={"layers": 3, "width": 8})
    spec["training"] = spec["training"] | {"steps": 25}
    spec["pipeline"] = spec["pipeline"] | {"stages": 4}
    return spec | {"optimizer": {"factory": factory, "args": arguments}} | changes


def compare_with_plain_loop(run, plain, steps):
    assert run.losses(steps) == pytest.approx(plain.losses[steps[0] - 1 : steps[-1]], rel=1e-5)
    if steps[-1] < len(plain.losses):
        return
    parameters = dict(plain.model.named_parameters())
    found = {name: p for worker in run.workers for name, p in worker.engine.state()["parameters"].items()}
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@some_by_day("case", SUMMED, by_day=1)
def test_an_optimizer_whose_sums_are_completed_trains_four_meshes_as_one_process(case):
    needs_library_of(case)
    spec = summed(case)
    loop = PlainJob(spec)
    plain = loop.train(range(1, 26))
    with Workers(spec) as run:
        assert run.notes == []
        compare_with_plain_loop(run, plain, range(1, 26))
        settings = [
            {key: value for key, value in w.engine.optimizer.param_groups[0].items() if key != "params"}
            for w in run.workers
        ]
    assert all(one == settings[0] for one in settings), "sums are equal to the bit, whose rounding is one"
    group = loop._optimizer.param_groups[0]
    if "d" in group:
        assert 5 * spec["optimizer"]["args"]["d0"] < group["d"] == pytest.approx(settings[0]["d"], rel=1e-4)


LAYOUTS = {
    "workers that see other rows": {"meshes": 2, "workers_per_mesh": 2},
    "heterogeneous meshes": {"meshes": 2, "workers": [2, 1]},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", SUMMED)
def test_each_mesh_counts_once_whatever_its_workers(case, layout):
    needs_library_of(case)
    spec = summed(case, resources=LAYOUTS[layout])
    plain = PlainJob(spec).train(range(1, 26))
    with Workers(spec) as run:
        assert run.losses(range(1, 26)) == pytest.approx(plain.losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("case", SUMMED)
def test_another_cut_goes_on_with_the_sums_of_all_meshes(case, tmp_path):
    needs_library_of(case)
    plain = PlainJob(summed(case)).train(range(1, 26))
    uri = checkpoint_format.step_uri(str(tmp_path), "job", 10)
    with Workers(summed(case)) as run:
        compare_with_plain_loop(run, plain, range(1, 11))
        run.call(lambda w: w.save(uri, 10))
        checkpoint_format.finish_checkpoint(uri, step=10, shards=["m0", "m1", "m2", "m3"], keep=1)
    with Workers(summed(case, meshes=2)) as run:
        run.call(lambda w: w.restore(uri))
        compare_with_plain_loop(run, plain, range(11, 26))


@pytest.mark.slow
@pytest.mark.parametrize("case", SUMMED)
def test_a_mesh_that_trains_nothing_enters_the_sums_of_the_others(case):
    needs_library_of(case)
    spec = summed(case)
    spec["model"] = spec["model"] | {"freeze": ["layers.0.*"]}
    plain = PlainJob(spec).train(range(1, 26))
    with Workers(spec) as run:
        assert any(worker.engine.optimizer is None for worker in run.workers)
        compare_with_plain_loop(run, plain, range(1, 26))


TIED = r"it sums over all parameters, and 'first.weight' \(1 in all\) is held by 2 meshes.*untie it"


def tied(factory):
    spec = spec_of(factory, meshes=2) | {"model": {"factory": "odd_jobs:tied_from_python_and_numpy"}}
    return spec | {"data": {"factory": "odd_jobs:Vectors"}}


def test_a_tied_parameter_of_two_meshes_is_refused_where_sums_would_count_it_twice():
    model = tied_from_python_and_numpy()
    parameters = dict(model.named_parameters())
    meshes = {"m0": ["first.weight"], "m1": ["middle.weight", "first.weight"]}
    with pytest.raises(AttemptFailure, match=TIED):
        check_optimizer_of_meshes(Job.from_json(tied("odd_optimizers:GlobalLamb")), parameters, meshes)
    check_optimizer_of_meshes(Job.from_json(tied("torch.optim:AdamW")), parameters, meshes)


@pytest.mark.slow
def test_a_job_of_tied_stages_whose_optimizer_sums_ends_before_its_first_step(monkeypatch):
    """The other mesh waits for its connections meanwhile."""
    monkeypatch.setattr("worker.verify.local_gang._CONNECT_S", 5.0)
    with pytest.raises(AttemptFailure, match=TIED) as refused:
        Workers(tied("odd_optimizers:GlobalLamb"))
    assert refused.value.reason is Reason.USER_CODE_RAISED


def test_groups_by_name_pass_on_several_meshes():
    check_layout_of_optimizer(Job.from_json(spec_of("torch.optim:AdamW", meshes=2, groups=GROUPS, lr=0.01)))


@pytest.mark.parametrize("factory", ["odd_optimizers:by_count", "odd_optimizers:first_group_slowly"])
def test_a_factory_that_counts_groups_passes_with_them(factory):
    """Every mesh has all of a job's groups: their number and their order are those of one process."""
    check_layout_of_optimizer(Job.from_json(spec_of(factory, meshes=2, groups=GROUPS)))
    with pytest.raises(AttemptFailure, match="is 2: optimizer SGD updates a parameter otherwise"):
        check_layout_of_optimizer(Job.from_json(spec_of(factory, meshes=2)))


@pytest.mark.parametrize("meshes", [1, 2])
def test_an_optimizer_whose_step_wants_a_closure_is_refused_by_name_on_any_number_of_meshes(meshes):
    said = r"'torch.optim:LBFGS' is a LBFGS, whose step\(\) wants more than gradients \(.*'closure'\).*choose an optimizer"
    with pytest.raises(AttemptFailure, match=said) as refused:
        Workers(spec_of("torch.optim:LBFGS", meshes=meshes))
    assert refused.value.reason is Reason.USER_CODE_RAISED
    with pytest.raises(AttemptFailure, match=said):
        make_optimizer(Factory("torch.optim:LBFGS"), [torch.nn.Parameter(torch.ones(2))])
