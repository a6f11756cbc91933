"""What the driver makes of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from tests.worker.driver.fake_gang import FakeGang
from worker.actor.device import WorkerAddress
from worker.contract.costs import MeshUpdate
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Job
from worker.contract.planned import (
    EdgeSignature,
    LayerSignature,
    ModelSignature,
    PlannedJob,
    parse_planned_job,
    planned_seconds,
)
from worker.contract.profile import LayerCost, LayerProfile
from worker.contract.reasons import Reason
from worker.driver.limits import Limits
from worker.driver.planning import Planner

JOB = Job.from_json(
    {
        "model": {"factory": "m:m"},
        "data": {"factory": "d:d"},
        "loss": {"factory": "l:l"},
        "pipeline": {"stages": 2},
        "resources": {"meshes": 2},
    }
)


def pipeline(**changes):
    return PipelineSpec.model_validate(
        {
            "microbatches": 3,
            "meshes": [{"name": "m0"}, {"name": "m1"}],
            "stages": [
                {
                    "name": f"stage {i}",
                    "mesh": f"m{i}",
                    "forward_s": 1.0 + i,
                    "backward_input_s": 2.0,
                    "backward_weight_s": 3.0 + i,
                    "activation_bytes": 1,
                }
                for i in range(2)
            ],
            "edges": [{"source": "stage 0", "target": "stage 1", "forward_s": 0.25, "backward_s": 0.5}],
            **changes,
        }
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_every_instruction_knows_how_long_the_plan_says_it_takes(schedule):
    spec = pipeline(schedule=schedule)
    plan = make_plan(spec, budget_s=0.1).model_dump(mode="json")
    planned = planned_seconds(plan, [stage.name for stage in spec.stages])
    costs = {
        ("F", 0): 1.0, ("F", 1): 2.0, ("B", 0): 5.0, ("B", 1): 6.0,
        ("I", 0): 2.0, ("I", 1): 2.0, ("W", 0): 3.0, ("W", 1): 4.0,
        "SEND_F": 0.25, "RECV_F": 0.25, "SEND_B": 0.5, "RECV_B": 0.5, "REDUCE": 0.0, "STEP": 0.0,
    }  # fmt: skip
    for mesh, program in plan["programs"].items():
        expected = [costs.get(i["op"], costs.get((i["op"], i["stage"]))) for i in program]
        assert planned[mesh] == pytest.approx(expected)


class Called:
    """A method of an actor: `remote` answers at once."""

    def __init__(self, answer):
        self.remote = answer


class Worker:
    """An accelerator of a kind on which each of two layers takes `seconds` forward."""

    def __init__(self, kind, seconds):
        self.profiled = 0
        self.prepare = Called(lambda _: kind)
        self.profile = Called(lambda count: self._profile(seconds, count))
        self.traced_for = []
        self.trace = Called(self.traced_for.append)
        self.graph = Called(lambda: "graph")
        self.take_graph = Called(lambda graph, count: self.traced_for.append(count))

    def _profile(self, seconds, count):
        self.profiled += 1
        layers = tuple(LayerCost(f"l{i}", seconds, 0.0, 0.0, 7, 0, 0) for i in range(2))
        return LayerProfile(layers, (), "cpu", "[1]", {}).to_json()


class Gang(FakeGang):
    def __init__(self, *workers):
        self.workers = list(workers)
        self.addresses = [WorkerAddress(f"m{i}", 0, f"n{i}", f"n{i}", i, "cpu") for i in range(len(workers))]


class Control:
    def __init__(self):
        self.profiles = {}

    def cached_profile(self, key):
        return self.profiles.get(key)

    def store_profile(self, key, profile):
        self.profiles[key] = profile


class Reporter:
    def __init__(self):
        self.events = []

    def event(self, kind, message):
        self.events.append((kind, message))


def planner_of(gang, control, device):
    """For a job with a mesh for each worker of the gang."""
    job = replace(JOB, resources=replace(JOB.resources, meshes=len(gang.workers)))
    return Planner(
        control=control,
        reporter=Reporter(),
        gang=gang,
        device=device,
        limits=Limits(),
        job=job,
    )


@pytest.mark.parametrize(("device", "measured"), [("cpu", [1, 1, 1, 1]), ("cuda", [1, 1, 0, 0])])
def test_every_kind_of_accelerator_is_profiled_and_the_slowest_is_planned_with(device, measured):
    workers = [Worker("quick", 1.0), Worker("slow", 4.0), Worker("quick", 3.0), Worker("slow", 6.0)]
    control = Control()
    keys = [worker.prepare.remote(1) for worker in workers]
    profile = planner_of(Gang(*workers), control, device)._profile_of(keys, 4)
    assert [worker.profiled for worker in workers] == measured
    mean = {"cpu": {"quick": 2.0, "slow": 5.0}, "cuda": {"quick": 1.0, "slow": 4.0}}[device]
    assert {key: found["layers"][0]["forward_s"] for key, found in control.profiles.items()} == mean
    assert profile.layers[0].forward_s == mean["slow"]
    again = planner_of(Gang(*workers, Worker("new", 1.0)), control, device)
    assert again._profile_of([*keys, "new"], 4) == profile
    assert [worker.profiled for worker in workers] == measured, "known kinds are not measured again"
    assert [kind for kind, _ in again._reporter.events] == ["profiled"]


def open_planner(profile, control=None):
    """A planner whose one worker answers `profile(count)`, and its worker's list of profiled counts."""
    worker = Worker("kind", 1.0)
    asked = []

    def answer(count):
        asked.append(count)
        return profile(count)

    worker.profile = Called(answer)
    return planner_of(Gang(worker), control or Control(), "cpu"), asked


def profile_json(activation_bytes):
    layers = (LayerCost("l0", 1.0, 0.0, 0.0, activation_bytes, 0, 0),)
    return LayerProfile(layers, (), "cpu", "[1]", {}).to_json()


KEYS = [{count: f"key of {count}" for count in (1, 2, 4, 8)}]


def test_larger_microbatches_than_fit_are_not_even_tried():
    planner, asked = open_planner(lambda count: profile_json(800 // count))
    found = planner._profiles_of(KEYS, least_bytes=450)
    assert list(found) == [2, 4, 8] and asked == [8, 4, 2], "small ones first"
    (event,) = [message for kind, message in planner._reporter.events if kind == "left_out"]
    assert event.startswith("1 microbatches, and fewer")
    planner, asked = open_planner(lambda count: profile_json(800 // count))
    assert list(planner._profiles_of(KEYS, least_bytes=None)) == [1, 2, 4, 8]


def test_a_number_whose_profile_runs_out_of_memory_is_left_out_and_other_failures_end_the_attempt():
    class Full(Gang):
        def wait(self, answers, **_):
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return list(answers)

    def planner_with(failure, at):
        planner, _ = open_planner(lambda count: failure if count <= at else profile_json(1))
        planner._gang.__class__ = Full
        return planner

    full = AttemptFailure(Reason.OUT_OF_MEMORY, "no place for 3 bytes")
    planner = planner_with(full, 2)
    assert list(planner._profiles_of(KEYS)) == [4, 8]
    assert any("no place for 3 bytes" in message for _, message in planner._reporter.events)
    with pytest.raises(AttemptFailure, match="no place"):
        planner_with(full, 8)._profiles_of(KEYS)
    with pytest.raises(AttemptFailure, match="broken"):
        planner_with(AttemptFailure(Reason.USER_CODE_RAISED, "broken"), 2)._profiles_of(KEYS)


def test_what_reduce_and_step_take_is_planned_for_every_instruction():
    spec = pipeline(schedule="1f1b")
    plan = make_plan(spec, budget_s=0.1).model_dump(mode="json")
    update = (MeshUpdate("m0", 0.5, 0.25), MeshUpdate("m1", 0.125, 1.0))
    planned = planned_seconds(plan, [stage.name for stage in spec.stages], update)
    for one in update:
        ops = [i["op"] for i in plan["programs"][one.mesh]]
        found = {op: s for op, s in zip(ops, planned[one.mesh], strict=True) if op in ("REDUCE", "STEP")}
        assert found == {"REDUCE": one.reduce_s, "STEP": one.step_s}
    job = PlannedJob((), spec.model_dump(), plan, update)
    assert job.step_s == plan["makespan_s"] + 1.125 and job.microbatches == 3


def test_what_running_out_of_memory_taught_is_stored_with_the_profile_of_every_kind():
    control = Control()
    planner = planner_of(Gang(Worker("quick", 1.0), Worker("slow", 4.0)), control, "cpu")
    failure = OutOfMemoryFailure("no place", "", "m1", seen_bytes=20 + 3 * 10)
    planner.correct(failure)
    assert control.profiles == {}, "before there is a plan nothing is known"
    planner._profile_of(["quick", "slow"], 4)
    planner._planned = PlannedJob(
        ("l0", "l1"),
        {
            "meshes": [{"name": "m0"}, {"name": "m1"}],
            "stages": [{"mesh": "m0", "static_bytes": 5}, {"mesh": "m1", "static_bytes": 20}],
        },
        {"meshes": [{"name": name, "peak_activation_bytes": 10} for name in ("m0", "m1")]},
    )
    planner.correct(failure)
    assert {key: p["activation_factor"] for key, p in control.profiles.items()} == {"quick": 3.0, "slow": 3.0}
    again = planner_of(Gang(Worker("quick", 1.0)), control, "cpu")
    assert again._profile_of(["quick"], 4).corrected().layers[0].activation_bytes == 21


FORM = ModelSignature(
    (LayerSignature("l0", {"l0.weight": 8}), LayerSignature("l1", {})), (EdgeSignature(0, 1, "t", 4),)
)


def with_form(traced: ModelSignature) -> tuple[Planner, PlannedJob]:
    """A planner whose first worker has traced a model of this form, and an answer with a plan that was made for FORM."""
    worker = Worker("old", 1.0)
    worker.model_signature = Called(lambda whole: traced)
    answer = {
        "begins": ["l0"],
        "spec": {},
        "plan": {},
        "named": {"id": "plan-1", "owner": "", "name": "mine"},
        "made_for": {"job": {}, "device": "cpu", "forms": {"1": FORM.to_json()}},
    }
    return planner_of(Gang(worker, worker), Control(), "cpu"), parse_planned_job(answer)


def test_a_named_plan_is_refused_where_the_traced_model_is_not_the_one_that_it_was_made_for():
    planner, planned = with_form(FORM)
    assert planned.saved_plan == "mine" and "'mine'" in planned.provenance
    planner._check_model_signature(planned)
    other = replace(FORM, layers=(LayerSignature("l0", {"l0.weight": 12}), FORM.layers[1]))
    planner, planned = with_form(other)
    with pytest.raises(AttemptFailure) as raised:
        planner._check_model_signature(planned)
    assert raised.value.reason is Reason.PLAN_INFEASIBLE
    assert (
        "'mine'" in raised.value.message
        and "l0.weight (12 bytes), and not l0.weight (8 bytes)" in raised.value.message
    )


def test_a_plan_of_its_own_is_compared_with_nothing():
    planner, _ = with_form(FORM)
    planner._gang.workers[0].model_signature = Called(lambda whole: pytest.fail("nobody needs it"))
    planner._check_model_signature(parse_planned_job({"begins": ["l0"], "spec": {}, "plan": {}}))
