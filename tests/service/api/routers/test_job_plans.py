"""Jobs that leave numbers open, and plans of jobs that do not train."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from service.cli.plan import job_plan_text
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import RayNode
from service.orchestrator.tasks import profile
from service.scheduler.job.cut import PipelineSetup
from service.scheduler.job.joint import JointSearchRequest, plan_jointly
from service.scheduler.problem.spec import MeshSpec, NetworkSpec
from service.scheduler.why.calibration import forecast
from service.schemas.plans import JobPlanPreview
from tests.polling import until_async
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_plans_api import PROFILE
from tests.service.conftest import job_body
from worker.contract.costs import PROFILE_REQUEST_VARIABLE, PROFILE_RESULT_MARK, LinearCost, UpdateCosts
from worker.contract.profile import LayerProfile

OPEN = {
    "training": {"steps": 10, "global_batch": 8, "microbatches": "auto"},
    "pipeline": {"stages": "auto", "schedule": "auto"},
    "resources": {"meshes": 2},
}
NETWORK = {"contention": "link", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-3}
UPDATE = {"reduce": {"per_tensor_s": 0.01}, "step": {"fixed_s": 0.02, "per_byte_s": 0.001}}


def profile_of(count: int, overhead_s: float = 0.004) -> dict[str, Any]:
    """The layers' costs with the batch of 8 in `count` microbatches: a part for each sample, and an overhead."""
    times = ("forward_s", "backward_input_s", "backward_weight_s")
    layers = [
        {**layer, "activation_bytes": 64 // count}
        | {name: overhead_s + (index + 2) * 0.02 / count for name in times}
        for index, layer in enumerate(PROFILE["layers"])
    ]
    return {**PROFILE, "layers": layers}


def costs(counts: tuple[int, ...] = (1, 2, 4, 8), **changes: Any) -> dict[str, Any]:
    profiles = [{"microbatches": count, "profile": profile_of(count)} for count in counts]
    return {"profiles": profiles, "tried": list(counts), "network": NETWORK, "update": UPDATE, **changes}


@pytest.mark.slow
async def test_what_a_job_leaves_open_is_chosen_for_the_shortest_step(make_api: ApiMaker):
    async with make_api(plan_budget_s=4) as api:
        job_id = await api.started(**OPEN)
        answer = await api.driver(job_id, "POST", "/plan", json=costs())
        assert answer.status_code == 200, answer.text
        planned = answer.json()
        assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json() == planned
    assert planned["step_s"] == pytest.approx(planned["plan"]["makespan_s"] + planned["update_s"])
    assert planned["update_s"] == max(one["reduce_s"] + one["step_s"] for one in planned["update"])
    held = {"m0": 0, "m1": 0}  # of each mesh the layers, with one parameter of 8 bytes each
    bounds = [*(int(name.removeprefix("layers.")) for name in planned["begins"]), 4]
    for stage, (first, end) in zip(planned["spec"]["stages"], itertools.pairwise(bounds), strict=True):
        held[stage["mesh"]] += end - first
    norm_s = 2 * NETWORK["latency_s"]  # of the gradients, over both meshes
    for one in planned["update"]:
        layers = held[one["mesh"]]
        assert one["reduce_s"] == pytest.approx(0.01 * layers + norm_s)
        assert one["step_s"] == pytest.approx(0.02 + 0.001 * 8 * layers)
    each = {}
    for count in (1, 2, 4, 8):
        found = plan_jointly(
            JointSearchRequest(
                {count: LayerProfile.from_json(profile_of(count))},
                PipelineSetup([MeshSpec(name="m0"), MeshSpec(name="m1")], NetworkSpec(**NETWORK)),
                stages=[2, 4],
                update=UpdateCosts(LinearCost(0.0, 0.01), LinearCost(0.02, 0.0, 0.001)),
            ),
            budget_s=4,
        )
        each[count] = found.step_s
    chosen = planned["spec"]["microbatches"]
    assert (
        planned["step_s"]
        == pytest.approx(min(each.values()) + norm_s)
        == pytest.approx(each[chosen] + norm_s)
    )
    assert min(each.values()) < max(each.values()) * 0.9, "the number matters here"


async def fails(api: Api, job_id: str, number: int) -> None:
    await api.report(job_id, 1, number=number, state="FAILED", reason="WORKER_LOST", message="gone")
    await api.rounds(job_id, number + 1)


@pytest.mark.slow
async def test_a_later_attempt_keeps_the_number_of_microbatches_while_it_fits(make_api: ApiMaker):
    async with make_api(plan_budget_s=1) as api:
        job_id = await api.started(**OPEN)
        first = (await api.driver(job_id, "POST", "/plan", json=costs())).json()["spec"]["microbatches"]
        await fails(api, job_id, 1)
        quick = {count: 1e-4 if count != first else 1.0 for count in (1, 2, 4, 8)}
        profiles = [
            {"microbatches": count, "profile": profile_of(count, overhead_s)}
            for count, overhead_s in quick.items()
        ]
        body = costs(profiles=profiles)
        again = (await api.driver(job_id, "POST", "/plan", number=2, json=body)).json()
        assert again["spec"]["microbatches"] == first, "losses go on as they began"
        await fails(api, job_id, 2)
        left = [one for one in profiles if one["microbatches"] != first]
        third = (await api.driver(job_id, "POST", "/plan", number=3, json=costs(profiles=left))).json()
        assert third["spec"]["microbatches"] in {1, 2, 4, 8} - {first}


@pytest.mark.slow
async def test_a_number_that_no_longer_fits_the_memory_is_given_up(make_api: ApiMaker):
    async with make_api(plan_budget_s=1) as api:
        kept = {**OPEN["pipeline"], "recompute": "none"}  # else it would fit, recomputed
        job_id = await api.started(**{**OPEN, "pipeline": kept})
        body = costs(profiles=[{"microbatches": 1, "profile": profile_of(1)}])
        first = await api.driver(job_id, "POST", "/plan", json=body)
        assert first.json()["spec"]["microbatches"] == 1
        await fails(api, job_id, 1)
        limit = (
            64 + 16 * 4 + 20
        )  # less than the activations of two layers of the whole batch, beside their weights
        memory = [{"mesh": mesh, "memory_bytes": limit} for mesh in ("m0", "m1")]
        second = await api.driver(job_id, "POST", "/plan", number=2, json=costs(memory=memory))
        assert second.status_code == 200, second.text
        assert second.json()["spec"]["microbatches"] > 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"resources": {}}, "pipeline.stages is auto and resources.meshes is not given"),
        (
            {"resources": {}, "parallelism": {"pp": 2, "dp": 3}},
            "global_batch 8 cannot be shared by 3 data-parallel workers of a mesh",
        ),
        ({"pipeline": {"stages": "auto", "cut": ["a"]}}, "resources.meshes 2 is more than the modules named"),
        ({"pipeline": {"stages": "auto", "cut": []}}, "cut names no module"),
        ({"pipeline": {"stages": "many"}}, "'many': write auto, or a whole number from 1"),
        ({"training": {"microbatches": 0}}, "write auto, or a whole number from 1"),
    ],
)
async def test_what_cannot_be_chosen_is_refused_by_name(make_api: ApiMaker, changes, says):
    async with make_api() as api:
        for path in ("/api/v1/jobs", "/api/v1/plans/job"):
            body = problem(await api.client.post(path, json=job_body(**{**OPEN, **changes})), 422)
            assert says in body["detail"], body
        assert api.cluster.submissions == {}


async def test_too_few_layers_for_the_meshes_are_refused_by_name(make_api: ApiMaker):
    async with make_api() as api:
        job_id = await api.started(**{**OPEN, "pipeline": {"stages": "auto", "schedule": "zb-v"}})
        short = {**profile_of(4), "layers": profile_of(4)["layers"][:3], "edges": PROFILE["edges"][:2]}
        body = costs(profiles=[{"microbatches": 4, "profile": short}])
        refused = problem(await api.driver(job_id, "POST", "/plan", json=body), 422)
        assert "only 3 modules" in refused["detail"] and "set resources.meshes to 1" in refused["detail"]
        problem(await api.driver(job_id, "POST", "/plan", json={"network": NETWORK}), 422)


async def asked(api: Api, **changes: Any) -> Any:
    """The answer to a request for the plan of a job, when it is no longer 202."""
    async with asyncio.timeout(60):
        while True:
            response = await api.client.post("/api/v1/plans/job", json=job_body(**{**OPEN, **changes}))
            if response.status_code != 202:
                return response
            assert response.json()["state"] == "PROFILING" and response.headers["Retry-After"] == "1"
            await asyncio.sleep(0.02)


async def measuring(api: Api, **changes: Any) -> str:
    """The id of the run that measures a job after the first request for its plan."""
    await api.service.cluster.refresh()
    before = set(api.cluster.submissions)
    first = await api.client.post("/api/v1/plans/job", json=job_body(**{**OPEN, **changes}))
    assert first.status_code == 202
    new = await until_async(lambda: set(api.cluster.submissions) - before)
    (run_id,) = new
    return run_id


def answers(api: Api, run_id: str, answer: dict[str, Any], state: RayState = RayState.SUCCEEDED) -> None:
    api.cluster.logs[run_id] = f"warning: slow\n{PROFILE_RESULT_MARK}{json.dumps(answer)}\n"
    api.cluster.states[run_id] = RayJob(state)


async def test_a_measurement_that_ends_while_the_store_is_asked_is_not_begun_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
):
    run_id = await measuring(api)
    find = profile.find_costs

    async def ends_meanwhile(*asked: Any) -> Any:
        found = await find(*asked)
        monkeypatch.setattr(profile, "find_costs", find)
        answers(api, run_id, {"costs": costs()})
        await until_measured(api)
        return found

    monkeypatch.setattr(profile, "find_costs", ends_meanwhile)
    assert (await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))).status_code == 202
    await until_measured(api)
    assert list(api.cluster.submissions) == [run_id], "measured once"


async def until_measured(api: Api) -> None:
    await until_async(lambda: not api.service.profiler._runs)


async def test_the_plan_of_a_job_that_nobody_trained_is_made_when_one_worker_has_measured_it(api: Api):
    run_id = await measuring(api)
    submission = api.cluster.submissions[run_id]
    assert submission.entrypoint.endswith("-m worker.tasks profile")
    assert submission.resources == {"slotline_worker": 1}, "it holds the accelerator that it measures on"
    request = json.loads(submission.env[PROFILE_REQUEST_VARIABLE])
    assert request["device"] == "cpu" and request["job"]["training"]["microbatches"] == "auto"
    assert (await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))).status_code == 202
    answers(api, run_id, {"costs": costs(notes=["transfers count as nothing"])})
    found = await asked(api)
    assert found.status_code == 200, found.text
    body = found.json()
    assert body["measured_by"] == "one worker" and body["notes"] == ["transfers count as nothing"]
    assert body["step_s"] > body["plan"]["makespan_s"] > 0 and len(body["plan"]["meshes"]) == 2
    assert list(api.cluster.submissions) == [run_id], "measured once"
    fixed = {**OPEN, "training": {"global_batch": 8, "microbatches": 4, "seed": 7}, "pipeline": {"stages": 4}}
    known = await api.client.post("/api/v1/plans/job", json=job_body(**fixed), params={"budget_s": 0.5})
    assert known.status_code == 200 and known.json()["spec"]["microbatches"] == 4
    assert (await api.client.get("/api/v1/jobs")).json()["items"] == [], "nothing trains"


@pytest.mark.parametrize(
    ("wanted", "avoided"),
    [
        ({}, ("h100", "bare")),  # two of A100 to one of H100
        ({"accelerator": "H100"}, ("a100", "bare")),
    ],
)
async def test_a_job_is_measured_on_nodes_of_its_type_whoever_tells_the_type(
    make_api: ApiMaker, wanted: dict[str, str], avoided: tuple[str, ...]
):
    async with make_api() as api:
        await of_types(api)
        resources = {**job_body(**OPEN)["resources"], "device": "auto", **wanted}
        run_id = await measuring(api, resources=resources)
        submission = api.cluster.submissions[run_id]
        assert submission.resources == {"slotline_worker": 1}, (
            "Ray has no resource of a type that a label tells"
        )
        assert submission.avoid == avoided


async def test_a_job_of_a_type_that_no_node_has_is_refused_at_once(make_api: ApiMaker):
    async with make_api() as api:
        await of_types(api)
        resources = {**job_body(**OPEN)["resources"], "device": "auto", "accelerator": "B200"}
        await api.service.cluster.refresh()
        refused = await asked(api, resources=resources)
        assert "has no accelerators of type B200" in problem(refused, 422)["detail"]
        assert not api.cluster.submissions


async def of_types(api: Api) -> None:
    """Give the cluster nodes of two types, told by labels, and one without accelerators."""

    async def nodes() -> list[RayNode]:
        return [
            RayNode("h100", "10.0.0.1", {"slotline_worker": 4.0}, labels={"ray.io/accelerator-type": "H100"}),
            RayNode("a100", "10.0.0.2", {"slotline_worker": 8.0}, labels={"ray.io/accelerator-type": "A100"}),
            RayNode("bare", "10.0.0.3", {"CPU": 8.0}),
        ]

    api.cluster.nodes = nodes
    await api.service.cluster.refresh()


async def test_what_a_gang_measured_plans_other_jobs_of_its_kind_at_once(make_api: ApiMaker):
    async with make_api(plan_budget_s=1) as api:
        job_id = await api.started(**OPEN)
        planned = (await api.driver(job_id, "POST", "/plan", json=costs())).json()
        found = await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))
        assert found.status_code == 200, found.text
        assert found.json() == {**planned, "measured_by": "gang", "notes": [], "forecast": None}
        workers = [{"mesh": f"m{i // 2}", "worker": i % 2, "node": node} for i, node in enumerate("aabc")]
        placed = (await api.driver(job_id, "POST", "/plan", json={**costs(), "workers": workers})).json()
        assert placed["nodes"] == {"m0": ["a"], "m1": ["b", "c"]}
        assert (await api.client.get(f"/api/v1/jobs/{job_id}/plan")).json()["nodes"] == placed["nodes"]
        other = await measuring(api, model={"factory": "worker.examples.unet:build"})
        assert other.startswith("profile-")


async def test_a_plan_says_what_runs_like_it_made_of_their_plans(make_api: ApiMaker):
    async with make_api(plan_budget_s=1) as api:

        async def trained(factor: float, steps: int = 25, **changes: Any) -> float:
            """A run whose last steps take `factor` times what was planned, and as much less memory; the planned step."""
            job_id = await api.started(**{**OPEN, **changes})
            planned = (await api.driver(job_id, "POST", "/plan", json=costs())).json()
            peak = max(mesh["peak_memory_bytes"] for mesh in planned["plan"]["meshes"])
            seconds = [10.0 if step <= 5 else planned["step_s"] * factor for step in range(1, steps + 1)]
            memory = {"m0": round(peak / factor), "m1": 1}
            rows = [
                {"step": step, "step_s": step_s, "peak_memory_bytes": memory}
                for step, step_s in enumerate(seconds, start=1)
            ]
            await api.report(job_id, 1, state="RUNNING", steps=rows)
            await api.report(job_id, 2, state="SUCCEEDED")
            await api.rounds(job_id)
            return planned["step_s"]

        async def foretold(**changes: Any) -> dict[str, Any] | None:
            answer = await api.client.post("/api/v1/plans/job", json=job_body(**{**OPEN, **changes}))
            assert answer.status_code == 200, answer.text
            return answer.json()["forecast"]

        ratios = [1.1, 1.3, 1.2]
        for ratio in ratios[:2]:
            step_s = await trained(ratio)
        assert await foretold() is None, "two are too few"
        await trained(9.0, steps=3)
        assert await foretold() is None, "three steps are warming up"
        await trained(ratios[2])
        expected = forecast(step_s, ratios)
        told = await foretold()
        assert (told["runs"], told["of"]) == (3, "this model")
        assert told["step_s"] == pytest.approx(vars(expected))
        peaks = forecast(1.0, [1 / ratio for ratio in ratios])
        assert told["peak_bytes"]["high"] / told["peak_bytes"]["low"] == pytest.approx(
            peaks.high / peaks.low, rel=0.03
        )
        other = {"data": {"factory": "data:Another"}, "model": {"factory": "worker.examples.gpt:other"}}
        await trained(3.0, **other)
        assert (await foretold())["runs"] == 3, "of another model"
        told = await foretold(**other)
        assert (told["runs"], told["of"]) == (4, "these accelerators")
        lengths = {
            "data": {"factory": "data:Unequal", "lengths": {"buckets": [32, 64]}},
            "training": {**OPEN["training"], "loss_reduction": "tokens"},
            "loss": {"factory": "torch.nn:CrossEntropyLoss"},
            "model": other["model"],
        }
        await trained(0.4, **lengths)
        assert (await foretold(**other))["runs"] == 4, "its steps are shorter than planned, by their lengths"
        assert await foretold(**lengths) is None, "others' steps are as long as planned"
        for _ in range(2):
            await trained(0.4, **lengths)
        told = await foretold(**lengths)
        assert (told["runs"], told["of"]) == (3, "this model") and told["step_s"]["high"] < 0.5 * step_s
        preview = JobPlanPreview.model_validate(
            (await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))).json()
        )
        (line,) = [line for line in job_plan_text(preview).splitlines() if line.startswith("likely")]
        assert "nine of ten times, after 3 runs of this model" in line and " MiB" in line


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"failed": "MODEL_BUILD_FAILED", "message": "no module x"}, "MODEL_BUILD_FAILED: no module x"),
        (None, "ended without a result"),
    ],
)
async def test_a_job_that_cannot_be_measured_is_refused_with_the_reason_and_may_be_asked_again(
    make_api: ApiMaker, monkeypatch, answer, says
):
    monkeypatch.setattr("service.orchestrator.tasks.runner.TASK_LOG_SETTLES_S", 0.1)
    async with make_api() as api:
        run_id = await measuring(api)
        if answer is not None:
            answers(api, run_id, answer, RayState.FAILED)
        else:
            api.cluster.states[run_id] = RayJob(RayState.FAILED)
        assert says in problem(await asked(api), 422)["detail"]
        assert await measuring(api) != run_id


async def test_one_worker_that_takes_too_long_is_ended_with_a_message(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.orchestrator.tasks.profile.ProfileTask.limit_s", 0.2)
    async with make_api() as api:
        run_id = await measuring(api)
        assert "measured for more than 0.2 s" in problem(await asked(api), 422)["detail"]
        assert api.cluster.stopped == [run_id]


async def test_few_jobs_are_measured_at_once_and_not_many_wait(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.orchestrator.tasks.profile.ProfileTask.queue_limit", 1)
    async with make_api() as api:
        runs = [await measuring(api, data={"factory": f"data:Number{index}"}) for index in range(4)]
        waits = job_body(**OPEN, data={"factory": "data:Number4"})
        assert (await api.client.post("/api/v1/plans/job", json=waits)).status_code == 202
        full = await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))
        assert "try again" in problem(full, 503)["detail"] and "Retry-After" in full.headers
        assert set(api.cluster.submissions) == set(runs), "the fifth waits for its turn"
        answers(api, runs[0], {"costs": costs()})
        await until_async(lambda: len(api.cluster.submissions) >= 5)


async def test_a_job_is_not_measured_where_the_cluster_is_away_or_its_queue_is_none(make_api: ApiMaker):
    async with make_api() as api:
        api.cluster.away = True
        await api.service.cluster.refresh()
        assert (await api.client.post("/api/v1/plans/job", json=job_body(**OPEN))).status_code == 202
        assert "does not answer" in problem(await asked(api), 422)["detail"]
        problem(await api.client.post("/api/v1/plans/job", json=job_body(**OPEN, queue="none")), 422)


async def test_an_elastic_job_is_planned_and_explained_for_the_meshes_of_its_attempt(make_api: ApiMaker):
    async with make_api(plan_budget_s=0.2) as api:
        elastic = {"meshes": {"min": 1, "max": 3}, "device": "cpu"}
        changes = {**OPEN, "resources": elastic, "checkpoint": {"uri": "/there"}}
        api.cluster.workers = 2
        job_id = await api.started(**changes)
        assigned = (await api.driver(job_id, "GET")).json()["job"]
        assert (assigned["resources"]["meshes"], assigned["resources"]["fewest_meshes"]) == (2, None)
        planned = await api.driver(job_id, "POST", "/plan", json=costs((4,)))
        assert planned.status_code == 200, planned.text
        assert [mesh["name"] for mesh in planned.json()["spec"]["meshes"]] == ["m0", "m1"]
        why = await api.client.get(f"/api/v1/jobs/{job_id}/why")
        assert why.status_code == 200, why.text
        job = await api.job(job_id)
        assert (job["accelerators"], job["attempts"][0]["accelerators"]) == (3, 2)
        fixed = await api.submit(**{**changes, "resources": {"meshes": 2, "device": "cpu"}})
        own = (await api.job(fixed))["spec"]
        assert {**own, "name": "", "resources": 0} == {**assigned, "name": "", "resources": 0}
        assert own["resources"] == assigned["resources"], "as a job that asks for so many"
