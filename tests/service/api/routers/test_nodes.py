"""Nodes by name: who is where, what operators, Ray and Slotline itself set of them, and what then lands there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.jobs_api import KUBERNETES_NODE_LABEL, RayNode, ResourceUse
from service.spec.principals import Role
from service.store.database import utc_now
from service.store.tables import AttemptRow, NodeStateRow
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import token
from tests.service.conftest import job_body
from tests.service.fake_cluster import ask_at_once
from worker.contract.job import placement_group_name

TWO = {"pipeline": {"stages": 2}}


def two_nodes(api: Api) -> None:
    """`gpu-1` and `gpu-2` of Kubernetes, two accelerators each, with a Ray pod on each."""

    async def nodes() -> list[RayNode]:
        return [
            RayNode(
                f"id-{n}",
                f"10.0.0.{n}",
                {"slotline_worker": 2.0},
                host=f"pod-{n}",
                labels={KUBERNETES_NODE_LABEL: f"gpu-{n}"},
            )
            for n in (1, 2)
        ]

    api.cluster.nodes = nodes


@pytest.fixture
async def nodes_api(api: Api) -> AsyncIterator[Api]:
    two_nodes(api)
    await api.service.clusters.refresh()
    yield api


async def turn(api: Api, rounds: int = 2) -> None:
    for _ in range(rounds):
        await api.service.clusters.refresh()
        await api.service.orchestrator.round()
        await api.service.orchestrator.settle()
        ask_at_once(api.service.orchestrator.attempts)


async def listed(api: Api) -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in (await api.client.get("/api/v1/nodes")).json()["items"]}


async def set_state(api: Api, name: str, state: str, reason: str = "") -> dict[str, Any]:
    answer = await api.client.put(f"/api/v1/nodes/{name}", json={"state": state, "reason": reason})
    assert answer.status_code == 200, answer.text
    (node,) = answer.json()["items"]
    return node


async def placed(api: Api, job_id: str, *, number: int = 1, meshes: int = 2) -> dict[str, Any]:
    """The placement of `meshes` meshes of one worker each on what the driver offers: both nodes, whole."""
    nodes = [{"name": f"id-{n}", "free": 2, "total": 2} for n in (1, 2)]
    request = {"nodes": nodes, "meshes": [{"workers": 1}] * meshes}
    return (await api.driver(job_id, "POST", "/placement", number=number, json=request)).json()


async def running(api: Api, **changes: Any) -> str:
    job_id = await api.started(**changes)
    await api.report(job_id, 1, state="RUNNING")
    return job_id


async def lose(api: Api, job_id: str, number: int, sequence: int, **changes: Any) -> None:
    """The attempt ends by the loss of its node id-1."""
    lost = {"state": "FAILED", "reason": "NODE_LOST", "message": "gone", "failed_nodes": ["id-1"]}
    await api.report(job_id, sequence, number=number, **{**lost, **changes})
    api.cluster.states[f"{job_id}-{number}"] = RayJob(RayState.FAILED)


async def forget_loss(api: Api, node_id: str = "id-1") -> None:
    """The minute is over for which a lost Ray node is excluded."""
    async with api.service.database.write() as session:
        row = await session.get(NodeStateRow, ("default", "gpu-1", node_id))
        row.until = utc_now() - timedelta(seconds=1)


async def test_a_name_of_its_own_goes_before_an_address_that_another_node_has(api):
    host = [""]

    async def nodes() -> list[RayNode]:
        return [RayNode("id-1", "10.0.0.1", {"slotline_worker": 2.0}, host=host[0])]

    api.cluster.nodes = nodes
    await api.service.clusters.refresh()
    await set_state(api, "10.0.0.1", "EXCLUDED")
    host[0] = "alpha"
    await api.service.clusters.refresh()
    assert {name: node["state"] for name, node in (await listed(api)).items()} == {
        "alpha": "READY",
        "10.0.0.1": "EXCLUDED",
    }
    await api.client.put("/api/v1/nodes/10.0.0.1", json={"state": "READY"})
    assert (await listed(api)).keys() == {"alpha"}
    assert (await set_state(api, "10.0.0.1", "EXCLUDED"))["name"] == "alpha", (
        "else the address of one will do"
    )


async def test_nodes_are_listed_with_their_names_labels_accelerators_and_jobs(nodes_api: Api):
    api = nodes_api
    job_id = await running(api, **TWO)
    assert (await placed(api, job_id))["workers"] == [["id-1"], ["id-1"]]
    api.cluster.others = [
        ResourceUse(placement_group_name(f"{job_id}-1"), {"slotline_worker": 2.0}, "id-1"),
        ResourceUse("theirs", {"slotline_worker": 1.0}, "id-2"),
    ]
    await api.service.clusters.refresh()
    nodes = await listed(api)
    first, second = nodes["gpu-1"], nodes["gpu-2"]
    assert (first["id"], first["host"], first["kubernetes_node"], first["address"]) == (
        *("id-1", "pod-1", "gpu-1", "10.0.0.1"),
    )
    assert first["labels"] == {KUBERNETES_NODE_LABEL: "gpu-1"} and first["state"] == "READY"
    assert first["accelerators"] == [
        {"device": "cpu", "accelerator_type": None, "total": 2, "used": 2, "free": 0}
    ]
    assert first["jobs"] == [{"job_id": job_id, "attempt": 1, "meshes": {"m0": 1, "m1": 1}}]
    assert (second["accelerators"][0]["free"], second["jobs"]) == (1, [])
    (attempt,) = (await api.job(job_id))["attempts"]
    assert attempt["placed"] == [
        {"mesh": mesh, "node": "gpu-1", "node_id": "id-1", "workers": 1} for mesh in ("m0", "m1")
    ]


async def test_on_a_drained_node_jobs_save_and_go_on_elsewhere_and_nothing_new_lands(nodes_api: Api):
    api = nodes_api
    here = await running(api, **TWO)
    await placed(api, here)
    there = await running(api, **TWO)
    async with api.service.database.read() as session:
        assert (await session.get(AttemptRow, f"{here}-1")).end_asked_at is None
    drained = await set_state(api, "gpu-1", "DRAINING", "fan")
    assert (drained["state"], drained["reason"], drained["by"]) == ("DRAINING", "fan", "")
    await turn(api)
    assert (await api.report(here, 2)).json()["command"] == "stop"
    assert (await api.report(there, 2)).json()["command"] == "continue", "it is not placed there"
    ending = await api.job(here)
    assert (ending["reason"], ending["message"]) == (
        *("PREEMPTED", "node gpu-1 is draining (fan); saves a checkpoint and ends"),
    )
    await api.report(there, 3, state="SUCCEEDED")
    await api.report(here, 3, state="FAILED", reason="PREEMPTED", message="saved")
    for job_id in (here, there):
        api.cluster.states[f"{job_id}-1"] = RayJob(RayState.SUCCEEDED)
    await api.rounds(here, 2)
    await api.report(here, 1, number=2, state="RUNNING")
    assert (await placed(api, here, number=2))["workers"] == [["id-2"], ["id-2"]]
    await turn(api)
    assert (await api.report(here, 2, number=2)).json()["command"] == "continue"


async def test_an_excluded_node_keeps_its_jobs_and_its_room_counts_for_nobody(nodes_api: Api):
    api = nodes_api
    stays = await running(api, **TWO)
    await placed(api, stays)
    await set_state(api, "10.0.0.1", "EXCLUDED")
    await turn(api)
    assert (await api.report(stays, 2)).json()["command"] == "continue"
    wide = await api.submit(pipeline={"stages": 4})
    fits = await api.submit(**TWO)
    await turn(api)
    assert f"{fits}-1" in api.cluster.submissions, "gpu-2 is free, and the wide job holds nobody up"
    job = await api.job(wide)
    assert (job["state"], job["reason"]) == ("QUEUED", "WAITS_FOR_ACCELERATORS")
    assert job["message"] == (
        "needs 4 accelerators of slotline_worker; nodes of the cluster that take work have 2; 2 more on nodes that take "
        "none: gpu-1 is excluded; `slotline node include NAME` puts one back"
    )
    (view,) = (await api.client.get("/api/v1/cluster")).json()["accelerators"][:1]
    assert {name: view[name] for name in ("total", "used", "free", "left_out")} == {
        **{"total": 4, "used": 4, "free": 0, "left_out": 2},
    }
    refused = await placed(api, fits, meshes=4)
    assert refused["workers"] is None and not refused["final"]
    assert refused["refused"].endswith(
        "4 accelerators are needed, 2 are free; nodes that take no work: gpu-1 is excluded"
    )
    assert (await placed(api, fits))["workers"] == [["id-2"], ["id-2"]]
    assert (await set_state(api, "pod-1", "READY"))["state"] == "READY"
    for job_id in (stays, fits):
        await api.report(job_id, 3, state="SUCCEEDED")
    await api.rounds(wide)


async def test_a_node_that_lost_two_attempts_is_quarantined_until_it_is_included(nodes_api: Api):
    api = nodes_api
    first, second = await running(api, **TWO), await running(api, **TWO)
    for job_id in (first, second):
        await placed(api, job_id)
    await lose(api, first, 1, 2)
    await forget_loss(api)
    assert (await listed(api))["gpu-1"]["state"] == "READY", "once is no habit"
    await lose(api, second, 1, 2, reason="ACCELERATOR_FAILED", message="Xid 79")
    node = (await listed(api))["gpu-1"]
    assert (node["state"], node["by"]) == ("QUARANTINED", "slotline")
    assert node["reason"] == (
        f"it lost 2 attempts: {first} attempt 1 (NODE_LOST), {second} attempt 1 (ACCELERATOR_FAILED)"
    )
    assert node["since"] < node["until"]
    events = (await api.client.get(f"/api/v1/jobs/{second}/events")).json()["items"]
    (told,) = [event["message"] for event in events if event["kind"] == "node"]
    assert told.startswith("node gpu-1 is quarantined until ") and first in told
    await turn(api, 3)
    started = [job_id for job_id in (first, second) if f"{job_id}-2" in api.cluster.submissions]
    assert started == [first], "only gpu-2 takes work"
    assert (await placed(api, first, number=2))["workers"] == [["id-2"], ["id-2"]]
    await set_state(api, "gpu-1", "READY")
    await api.rounds(second, 2)
    assert (await placed(api, second, number=2))["workers"] == [["id-1"], ["id-1"]]
    await lose(api, second, 2, 1)
    await forget_loss(api)
    assert (await listed(api))["gpu-1"]["state"] == "READY", "what was before it was put back does not count"


async def test_a_lost_node_takes_no_work_until_ray_must_know_that_it_is_gone(nodes_api: Api):
    api = nodes_api
    job_id = await running(api, **TWO)
    assert (await placed(api, job_id))["workers"] == [["id-1"], ["id-1"]]
    await lose(api, job_id, 1, 2)
    node = (await listed(api))["gpu-1"]
    assert (node["state"], node["by"]) == ("EXCLUDED", "slotline")
    assert node["reason"] == f"{job_id} attempt 1 lost it; Ray may not know yet"
    assert node["until"] > node["since"]
    await api.rounds(job_id, 2)
    assert (await placed(api, job_id, number=2))["workers"] == [["id-2"], ["id-2"]]
    wide = await api.submit(pipeline={"stages": 4})
    await turn(api)
    assert (await api.job(wide))["reason"] == "WAITS_FOR_ACCELERATORS", "Ray lists four accelerators"
    await set_state(api, "gpu-1", "READY")
    assert (await listed(api))["gpu-1"]["state"] == "READY", "an operator knows better"
    await lose(api, job_id, 2, 1, failed_nodes=["id-2"])
    assert (await listed(api))["gpu-2"]["state"] == "EXCLUDED"
    assert (await listed(api))["gpu-1"]["state"] == "READY"


async def test_the_next_attempt_leaves_out_the_node_whose_accelerator_reported_a_fault(nodes_api: Api):
    api = nodes_api
    job_id = await running(api, **TWO)
    assert (await placed(api, job_id))["workers"] == [["id-1"], ["id-1"]]
    await lose(api, job_id, 1, 2, reason="ACCELERATOR_FAILED", message="Xid 79")
    node = (await listed(api))["gpu-1"]
    assert node["state"] == "QUARANTINED"
    assert node["reason"] == f"it lost an attempt: {job_id} attempt 1 (ACCELERATOR_FAILED)"
    await turn(api, 3)
    assert (await placed(api, job_id, number=2))["workers"] == [["id-2"], ["id-2"]]


async def test_a_quarantine_ends_by_itself_and_old_losses_do_not_count(nodes_api: Api):
    api = nodes_api
    job_ids = [await running(api, **TWO) for _ in range(2)]
    for job_id in job_ids:
        await placed(api, job_id)
    for job_id in job_ids:
        await lose(api, job_id, 1, 2)
    await forget_loss(api)
    assert (await listed(api))["gpu-1"]["state"] == "QUARANTINED"
    async with api.service.database.write() as session:
        row = await session.get(NodeStateRow, ("default", "gpu-1", ""))
        row.until = utc_now() - timedelta(seconds=1)
    assert (await listed(api))["gpu-1"]["state"] == "READY"
    await turn(api, 3)
    async with api.service.database.write() as session:
        for job_id in job_ids:
            (await session.get(AttemptRow, f"{job_id}-1")).finished_at -= timedelta(hours=7)
        row = await session.get(NodeStateRow, ("default", "gpu-1", ""))
        row.set_at -= timedelta(hours=8)
    await placed(api, job_ids[0], number=2)
    await lose(api, job_ids[0], 2, 1)
    await forget_loss(api)
    assert (await listed(api))["gpu-1"]["state"] == "READY"


@pytest.mark.parametrize(
    "end",
    [
        {"failed_nodes": []},
        {"reason": "WORKER_LOST", "failed_nodes": []},
        {"state": "SUCCEEDED", "reason": None},
        {"failed_nodes": ["id-2"]},
    ],
)
async def test_failures_that_do_not_name_the_node_put_none_under_quarantine(nodes_api: Api, end: dict):
    api = nodes_api
    for _ in range(2):
        job_id = await running(api, **TWO)
        await placed(api, job_id)
        await lose(api, job_id, 1, 2, **end)
    assert {node["state"] for node in (await listed(api)).values()} == {"READY"}


async def test_what_ray_drains_is_drained_for_that_ray_node_only(nodes_api: Api):
    api = nodes_api
    here = await running(api, **TWO)
    await placed(api, here)
    until = utc_now() + timedelta(hours=1)
    await api.report(here, 2, draining=[{"node": "id-1", "until": until.timestamp()}])
    node = (await listed(api))["gpu-1"]
    assert (node["state"], node["by"], node["reason"]) == ("DRAINING", "ray", "Ray drains it")
    await turn(api)
    assert (await api.report(here, 3)).json()["command"] == "stop"
    assert (await set_state(api, "gpu-1", "READY"))["state"] == "DRAINING", "only Ray takes that back"

    async def restarted() -> list[RayNode]:
        return [
            RayNode("id-9", "10.0.0.1", {"slotline_worker": 2.0}, "pod-9", {KUBERNETES_NODE_LABEL: "gpu-1"})
        ]

    api.cluster.nodes = restarted
    await api.service.clusters.refresh()
    assert [(node["id"], node["state"]) for node in (await listed(api)).values()] == [("id-9", "READY")]
    two_nodes(api)
    await api.service.clusters.refresh()
    await api.report(here, 4, draining=[])
    assert (await listed(api))["gpu-1"]["state"] == "READY"


async def test_a_state_is_kept_over_a_restart_and_for_a_node_that_is_gone(
    make_api: ApiMaker, database_url: str
):
    async with make_api(database_url=database_url) as api:
        two_nodes(api)
        await api.service.clusters.refresh()
        await set_state(api, "gpu-2", "EXCLUDED", "wrong firmware")
    async with make_api(database_url=database_url) as api:
        await api.service.clusters.refresh()  # other nodes are there now
        gone = (await listed(api))["gpu-2"]
        assert (gone["id"], gone["state"], gone["reason"]) == ("", "EXCLUDED", "wrong firmware")
        two_nodes(api)
        await api.service.clusters.refresh()
        assert (await listed(api))["gpu-2"]["id"] == "id-2" and (await listed(api))["gpu-2"][
            "state"
        ] == "EXCLUDED"
        audit = (await api.client.get("/api/v1/audit", params={"subject": "gpu-2"})).json()["items"]
        assert [(entry["action"], entry["detail"]) for entry in audit] == [
            ("node.state", "EXCLUDED: wrong firmware")
        ]


async def test_who_may_set_what_of_which_node(make_api: ApiMaker):
    async with make_api(api_token="secret") as api:
        two_nodes(api)
        await api.service.clusters.refresh()
        submitter = await token(api, "ann", Role.SUBMITTER)
        operator = await token(api, "olga", Role.OPERATOR)
        body = {"state": "DRAINING"}
        problem(await api.client.put("/api/v1/nodes/gpu-1", json=body, headers=submitter), 403)
        answer = await api.client.put("/api/v1/nodes/gpu-1", json=body, headers=operator)
        assert answer.json()["items"][0]["by"] == "olga"
        unknown = await api.client.put("/api/v1/nodes/gpu-7", json=body, headers=operator)
        assert "there is no node gpu-7: use one of gpu-1, gpu-2" in problem(unknown, 404)["detail"]
        wrong = await api.client.put("/api/v1/nodes/gpu-1", json={"state": "QUARANTINED"}, headers=operator)
        problem(wrong, 422)


async def test_metrics_tell_states_and_accelerators_of_nodes(nodes_api: Api):
    api = nodes_api
    job_id = await running(api, **TWO)
    await placed(api, job_id)
    await set_state(api, "gpu-2", "EXCLUDED")
    text = (await api.client.get("/metrics")).text
    assert 'slotline_node_state{cluster="default",node="gpu-2",state="EXCLUDED"} 1.0' in text
    assert 'slotline_node_accelerators{cluster="default",device="cpu",node="gpu-1"} 2.0' in text
    assert 'slotline_node_accelerators_used{cluster="default",device="cpu",node="gpu-1"} 2.0' in text
    assert 'slotline_node_accelerators_used{cluster="default",device="cpu",node="gpu-2"} 0.0' in text


async def test_a_driver_is_told_the_nodes_on_which_its_job_is_not_to_be_checked(nodes_api: Api):
    job_id = await nodes_api.started(**TWO)
    assert (await nodes_api.driver(job_id, "GET", "")).json()["left_out_nodes"] == []
    await set_state(nodes_api, "gpu-2", "EXCLUDED")
    assert (await nodes_api.driver(job_id, "GET", "")).json()["left_out_nodes"] == ["id-2"]


async def test_a_job_that_asks_for_an_accelerator_type_is_admitted_and_placed_there(nodes_api: Api):
    api = nodes_api
    types = {"id-1": "A100", "id-2": "H100"}

    async def nodes() -> list[RayNode]:
        label = "ray.io/accelerator-type"
        return [
            RayNode(name, "10.0.0.1", {"slotline_worker": 2.0}, host=name, labels={label: kind})
            for name, kind in types.items()
        ]

    async def on(job_id: str) -> tuple[str | None, list[list[str]]]:
        request = {
            "nodes": [
                {"name": name, "free": 2, "total": 2, "accelerator_type": kind}
                for name, kind in types.items()
            ],
            "meshes": [{"workers": 1}] * 2,
        }
        answer = await api.driver(job_id, "POST", "/placement", json=request)
        (attempt,) = (await api.job(job_id))["attempts"]
        return attempt["accelerator_type"], answer.json()["workers"]

    api.cluster.nodes = nodes
    await api.service.clusters.refresh()
    assert [node["accelerators"][0]["accelerator_type"] for node in (await listed(api)).values()] == [
        "A100",
        "H100",
    ]
    asks = {**TWO, "resources": {"accelerator": "H100"}}
    first = await running(api, **asks)
    assert await on(first) == ("H100", [["id-2"], ["id-2"]])
    waiting, any_type = await api.submit(**asks), await running(api, **TWO)
    assert await on(any_type) == ("A100", [["id-1"], ["id-1"]])
    job = await api.job(waiting)
    assert job["reason"] == "WAITS_FOR_ACCELERATORS"
    assert "2 accelerators of slotline_worker of type H100; 0 of 2 free" in job["message"]
    lacks = await api.submit(**{**TWO, "resources": {"accelerator": "B200"}})
    await turn(api)
    job = await api.job(lacks)
    assert job["reason"] == "CLUSTER_TOO_SMALL" and "the cluster has 2 of A100, 2 of H100" in job["message"]


async def test_an_accelerator_type_is_a_name(nodes_api: Api):
    answer = await nodes_api.client.post(
        "/api/v1/jobs", json=job_body(resources={"accelerator": "two words"})
    )
    assert "resources.accelerator" in str(problem(answer, 422))
