"""What the driver makes of a plan."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from service.orchestrator.planning.pool import _plan_forwards
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import PipelineSpec
from tests.worker.driver.fake_gang import FakeActor, FakeGang
from worker.benchmark.plan_request import layer_profiles
from worker.contract.costs import MeshUpdate
from worker.contract.failures import AttemptFailure, OutOfMemoryFailure
from worker.contract.job import Evaluation, Job
from worker.contract.planned import (
    EdgeSignature,
    LayerSignature,
    ModelSignature,
    PlannedJob,
    parse_planned_job,
    planned_seconds,
)
from worker.contract.profile import LayerCost, LayerProfile
from worker.contract.reasons import Cause, Reason
from worker.driver import planning
from worker.driver.benchmarks import GangMeasurements
from worker.driver.control_plane_client import PLAN_TIMEOUT_S, ControlPlaneClient, Refused
from worker.driver.evaluation import plan_evaluation
from worker.driver.limits import Limits
from worker.driver.planning import Planner
from worker.driver.reporter import LaunchPhases
from worker.machine.node import WorkerAddress

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


class Worker(FakeActor):
    """An accelerator of a kind on which each of two layers takes `seconds` forward."""

    def __init__(self, kind, seconds):
        self.profiled, self.kind = 0, kind
        self.traced_for = []
        super().__init__(
            profile=lambda count: self._profile(seconds, count),
            trace=self.traced_for.append,
            graph=lambda: "graph",
            take_graph=lambda graph, count: self.traced_for.append(count),
        )

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
    measurements = measurements_of(gang, control, device)
    return Planner(measurements._job, measurements, control=control, reporter=measurements._reporter)


def measurements_of(gang, control, device, keys=(), **changes):
    job = replace(JOB, resources=replace(JOB.resources, meshes=len(gang.workers)))
    made = GangMeasurements(
        job, gang, control=control, reporter=Reporter(), device=device, limits=Limits(), **changes
    )
    made.keys = list(keys)
    return made


class Traces:
    """Measurements that are there; `trace` calls `traced`."""

    profiles, keys = {}, ()

    def __init__(self, traced):
        self.trace = traced

    def prepare(self):
        pass


@pytest.mark.parametrize("microbatches", [3, "auto"])
def test_the_model_is_traced_while_the_control_plane_plans_where_the_plan_says_nothing_about_it(
    monkeypatch, microbatches
):
    """A plan that waits for the trace and a trace that waits for the plan would wait for ever."""
    monkeypatch.setattr(planning, "plan_request", lambda job, measurements: {})
    asked, traced, order = threading.Event(), threading.Event(), []
    plan = make_plan(pipeline(schedule="1f1b"), budget_s=0.0).model_dump(mode="json")

    def answer(request):
        asked.set()
        if microbatches != "auto":
            assert traced.wait(60)
        order.append("planned")
        return {"begins": ["a", "b"], "spec": pipeline().model_dump(mode="json"), "plan": plan}

    def trace(count):
        assert asked.wait(60)
        order.append(f"traced for {count}")
        traced.set()

    job = replace(JOB, training=replace(JOB.training, global_batch=12, microbatches=microbatches))
    control, reporter = SimpleNamespace(plan=answer), Reporter()
    planner = Planner(job, Traces(trace), control=control, reporter=reporter)
    assert planner.plan().microbatches == 3
    assert order == (["traced for 3", "planned"] if microbatches == 3 else ["planned", "traced for 3"])


def test_a_plan_that_was_refused_while_the_model_was_traced_ends_the_attempt(monkeypatch):
    monkeypatch.setattr(planning, "plan_request", lambda job, measurements: {})
    refused = Refused(422, "no plan fits")

    def refuse(request):
        raise refused

    job = replace(JOB, training=replace(JOB.training, global_batch=12, microbatches=3))
    planner = Planner(
        job, Traces(lambda count: None), control=SimpleNamespace(plan=refuse), reporter=Reporter()
    )
    with pytest.raises(AttemptFailure, match="no plan fits") as failed:
        planner.plan()
    assert failed.value.reason is Reason.PLAN_INFEASIBLE


@pytest.mark.parametrize(("device", "measured"), [("cpu", [1, 1, 1, 1]), ("cuda", [1, 1, 0, 0])])
def test_every_kind_of_accelerator_is_profiled_and_the_slowest_is_planned_with(device, measured):
    workers = [Worker("quick", 1.0), Worker("slow", 4.0), Worker("quick", 3.0), Worker("slow", 6.0)]
    control = Control()
    keys = [{4: worker.kind} for worker in workers]
    profile = measurements_of(Gang(*workers), control, device, keys).profile(4)
    assert [worker.profiled for worker in workers] == measured
    mean = {"cpu": {"quick": 2.0, "slow": 5.0}, "cuda": {"quick": 1.0, "slow": 4.0}}[device]
    assert {key: found["layers"][0]["forward_s"] for key, found in control.profiles.items()} == mean
    assert profile.layers[0].forward_s == mean["slow"]
    again = measurements_of(Gang(*workers, Worker("new", 1.0)), control, device, [*keys, {4: "new"}])
    assert again.profile(4) == profile
    assert [worker.profiled for worker in workers] == measured, "known kinds are not measured again"
    (traced, about), (profiled, _) = again._reporter.events
    assert (traced, profiled) == ("traced", "profiled")
    assert about == "the model on n0, the batch in 4 microbatches"


def test_a_model_that_is_traced_already_is_not_said_to_be_traced_again():
    measurements = measurements_of(Gang(Worker("quick", 1.0)), Control(), "cpu")
    for microbatches in (4, 4, 8):
        measurements.trace(microbatches)
    told = [message for kind, message in measurements._reporter.events if kind == "traced"]
    assert ["in 4 microbatches" in message for message in told] == [True, False]


def test_tracing_is_a_phase_of_a_launch_once_and_not_of_profiling():
    clock, told = iter([10.0, 11.0, 15.0, 18.0]), []
    launch = LaunchPhases(lambda *phase: told.append(phase), now=lambda: next(clock))
    measurements = measurements_of(Gang(Worker("kind", 1.0)), Control(), "cpu", [{4: "key"}], launch=launch)
    measurements.profile(4)
    measurements.trace(4)
    launch.end_phase("profile")
    assert told == [("trace", 4.0), ("profile", 4.0)]


def one_worker(profile):
    """The measurements of one worker that answers `profile(count)`, and the list of its profiled counts."""
    worker = Worker("kind", 1.0)
    asked = []

    def answer(count):
        asked.append(count)
        return profile(count)

    worker.answers["profile"] = answer
    return measurements_of(Gang(worker), Control(), "cpu", KEYS), asked


def profile_json(activation_bytes):
    layers = (LayerCost("l0", 1.0, 0.0, 0.0, activation_bytes, 0, 0),)
    return LayerProfile(layers, (), "cpu", "[1]", {}).to_json()


KEYS = [{count: f"key of {count}" for count in (1, 2, 4, 8)}]


def test_larger_microbatches_than_fit_are_not_even_tried():
    measurements, asked = one_worker(lambda count: profile_json(800 // count))
    found = layer_profiles(measurements, KEYS[0], least_bytes=450)
    assert list(found) == [2, 4, 8] and asked == [8, 4, 2], "small ones first"
    (event,) = [message for kind, message in measurements._reporter.events if kind == "left_out"]
    assert event.startswith("1 microbatches, and fewer")
    measurements, asked = one_worker(lambda count: profile_json(800 // count))
    assert list(layer_profiles(measurements, KEYS[0], least_bytes=None)) == [1, 2, 4, 8]


def test_a_number_whose_profile_runs_out_of_memory_is_left_out_and_other_failures_end_the_attempt():
    class Full(Gang):
        def wait(self, answers, **_):
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return list(answers)

    def with_failure(failure, at):
        measurements, _ = one_worker(lambda count: failure if count <= at else profile_json(1))
        measurements._gang.__class__ = Full
        return measurements

    full = AttemptFailure(Reason.OUT_OF_MEMORY, "no place for 3 bytes")
    measurements = with_failure(full, 2)
    assert list(layer_profiles(measurements, KEYS[0], least_bytes=None)) == [4, 8]
    assert any("no place for 3 bytes" in message for _, message in measurements._reporter.events)
    with pytest.raises(AttemptFailure, match="no place"):
        layer_profiles(with_failure(full, 8), KEYS[0], least_bytes=None)
    broken = AttemptFailure(Reason.USER_CODE_RAISED, "broken")
    with pytest.raises(AttemptFailure, match="broken"):
        layer_profiles(with_failure(broken, 2), KEYS[0], least_bytes=None)


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
    planner._measurements.keys = [{4: "quick"}, {4: "slow"}]
    planner._measurements.profile(4)
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
    again = measurements_of(Gang(Worker("quick", 1.0)), control, "cpu", [{4: "quick"}])
    assert again.profile(4).corrected().layers[0].activation_bytes == 21


FORM = ModelSignature(
    (LayerSignature("l0", {"l0.weight": 8}), LayerSignature("l1", {})), (EdgeSignature(0, 1, "t", 4),)
)


def with_form(traced: ModelSignature) -> tuple[Planner, PlannedJob]:
    """A planner whose first worker has traced a model of this form, and an answer with a plan that was made for FORM."""
    worker = Worker("old", 1.0)
    worker.answers["model_signature"] = lambda whole: traced
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
    first = planner._measurements._gang.workers[0]
    first.answers["model_signature"] = lambda whole: pytest.fail("nobody needs it")
    planner._check_model_signature(parse_planned_job({"begins": ["l0"], "spec": {}, "plan": {}}))


class NoPlan(Control):
    """A control plane that refuses every plan so."""

    def __init__(self, refused: Refused):
        super().__init__()
        self._refused = refused

    def plan(self, request):
        raise self._refused

    plan_forwards = plan


class Edges:
    """A gang whose evaluated model has no edges."""

    workers = (None,)

    def call(self, *_, **__):
        return [[]]


class Events(list):
    def event(self, kind, message):
        self.append((kind, message))


def evaluation_of(control, reporter):
    planned = parse_planned_job(
        {"begins": ["l0"], "spec": pipeline().model_dump(), "plan": make_plan(pipeline()).model_dump()}
    )
    policy = Evaluation(data=JOB.data, every_steps=1)
    return plan_evaluation(policy, planned, gang=Edges(), control=control, reporter=reporter)


@pytest.mark.parametrize("notes", [("made without a search",), ()])
def test_an_evaluations_plan_that_was_made_without_a_search_is_an_event(notes):
    class Planning(Control):
        def plan_forwards(self, request):
            return json.loads(_plan_forwards(lambda: False, request, 0.0, notes))

    events = Events()
    assert evaluation_of(Planning(), events)
    assert events == [("evaluation_planned", f"the evaluation's plan was {note}") for note in notes]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("PLANNING_TIMEOUT", Reason.PLANNING_TIMEOUT),
        ("PLAN_REFUSED", Reason.PLAN_INFEASIBLE),
        (None, Reason.PLAN_INFEASIBLE),
    ],
)
def test_a_slow_planner_is_not_taken_for_a_plan_that_does_not_fit(code, reason):
    control = NoPlan(Refused(422, "planning took more than 120 s", code))
    with pytest.raises(AttemptFailure, match="took more than 120 s") as raised:
        planner_of(Gang(Worker("old", 1.0)), control, "cpu")._ask({})
    assert raised.value.reason is reason

    with pytest.raises(AttemptFailure, match="evaluation: planning took") as raised:
        evaluation_of(control, Events())
    assert raised.value.reason is reason
    assert (reason.cause is Cause.USER) == (reason is Reason.PLAN_INFEASIBLE)


def test_what_is_unusual_about_a_plan_is_part_of_it():
    answer = {"begins": ["l0"], "spec": {}, "plan": {}, "planning_notes": ["made without a search"]}
    assert parse_planned_job(answer).notes == ("made without a search",)
    assert parse_planned_job({**answer, "planning_notes": []}).notes == ()


@pytest.mark.parametrize(("given", "timeout_s"), [({"plan_timeout_s": 900.0}, 900.0), ({}, PLAN_TIMEOUT_S)])
def test_a_driver_waits_for_a_plan_as_long_as_the_control_plane_says_and_keeps_the_code_of_a_refusal(
    given, timeout_s
):
    timeouts = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json=given)
        if request.url.path.endswith("/token"):
            return httpx.Response(204)
        timeouts.append(request.extensions["timeout"]["read"])
        return httpx.Response(422, json={"detail": "too slow", "code": "PLANNING_TIMEOUT"})

    control = ControlPlaneClient("http://localhost:1", "job-1", "token")
    control._client = httpx.Client(base_url="http://localhost:1", transport=httpx.MockTransport(answer))
    control.attempt()
    for ask in (control.plan, control.plan_forwards):
        with pytest.raises(Refused, match="too slow") as refused:
            ask({})
        assert refused.value.code == Reason.PLANNING_TIMEOUT
    assert timeouts == [timeout_s] * 2
