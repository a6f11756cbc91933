"""What Ray's answers mean, by Ray's own words (2.60): a refusal, or only not now."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from ray._private.label_utils import validate_label_selector_value
from ray.runtime_env import RuntimeEnv

from service.orchestrator.ray import jobs_api
from service.orchestrator.ray.jobs_api import (
    KUBERNETES_NODE_LABEL,
    ClusterError,
    ClusterUnreachableError,
    RayCluster,
    RayJobSubmission,
    RayNode,
    ResourceUse,
)
from worker.contract.job import keeper_name

SUBMISSION = RayJobSubmission("job-1", "python -m worker.driver", {}, {})


def cluster(answer: httpx.Response, *, known: bool = False) -> RayCluster:
    """A Ray that gives `answer` to a submission and knows the job afterwards or not."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return answer
        return httpx.Response(200, json={"status": "RUNNING"}) if known else httpx.Response(404)

    made = RayCluster("http://ray")
    made._client = httpx.AsyncClient(base_url="http://ray", transport=httpx.MockTransport(respond))
    return made


@pytest.mark.parametrize(
    "text",
    [
        "No available agent to submit job, please try again later.",
        "Traceback (most recent call last):\n  ...\naiohttp.client_exceptions.ClientConnectorError: Cannot connect",
    ],
)
async def test_a_head_without_its_agent_is_not_there_yet(text: str):
    with pytest.raises(ClusterUnreachableError, match="now"):
        await cluster(httpx.Response(500, text=text)).submit(SUBMISSION)


@pytest.mark.parametrize("status", [400, 500])
async def test_any_other_failure_is_a_refusal_in_rays_last_words(status: int):
    with pytest.raises(ClusterError, match="refused the attempt: ValueError: no such thing") as caught:
        await cluster(httpx.Response(status, text="Traceback\nValueError: no such thing\n")).submit(
            SUBMISSION
        )
    assert not isinstance(caught.value, ClusterUnreachableError)


async def test_a_submission_that_ray_has_already_is_a_success():
    await cluster(httpx.Response(500, text="already exists"), known=True).submit(SUBMISSION)


async def submitted(submission: RayJobSubmission) -> dict:
    """The body of the one request with which Ray is given `submission`."""
    bodies = []

    def respond(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200)

    ray = RayCluster("http://ray")
    ray._client = httpx.AsyncClient(base_url="http://ray", transport=httpx.MockTransport(respond))
    await ray.submit(submission)
    (body,) = bodies
    return body


@pytest.mark.parametrize("interpreter", [None, "/usr/bin/python -S spawn.py"])
async def test_ray_starts_its_own_processes_for_a_job_with_the_interpreter_of_the_submission(interpreter):
    body = await submitted(replace(SUBMISSION, interpreter=interpreter, env={"COLOUR": "blue"}))
    wanted = {} if interpreter is None else {"py_executable": interpreter}
    assert body["runtime_env"] == {"env_vars": {"COLOUR": "blue"}} | wanted
    RuntimeEnv(**body["runtime_env"])  # Ray takes it


@pytest.mark.parametrize(
    ("avoid", "selector"),
    [((), None), (("a1",), {"ray.io/node-id": "!in(a1)"}), (("a1", "b2"), {"ray.io/node-id": "!in(a1, b2)"})],
)
async def test_an_entrypoint_is_kept_off_nodes_by_rays_label_of_their_ids(avoid, selector):
    body = await submitted(replace(SUBMISSION, avoid=avoid))
    assert body.get("entrypoint_label_selector") == selector
    for value in (selector or {}).values():
        assert validate_label_selector_value(value) is None, "Ray takes it"


def ray_with(nodes: list[dict], asked: list[str], unnamed: Collection[str] | None = ()) -> RayCluster:
    """A Ray with these living nodes, one placement group and one actor, in the words of Ray's API. It does not name the
    hosts of `unnamed` nodes; None: of no node at all."""
    groups = [
        {
            "name": "ours",
            "bundles": [
                {"unit_resources": {"GPU": 1.0}, "node_id": node_id} for node_id in ("id-1", "id-2", "id-1")
            ],
        }
    ]
    actors = [
        {"required_resources": {"GPU": 0.5}, "placement_group_id": "", "node_id": "id-2", "name": "theirs"},
        {
            "required_resources": {},
            "placement_group_id": "",
            "node_id": "id-1",
            "name": keeper_name("job-1", "id-1"),
        },
        {"required_resources": {}, "placement_group_id": None, "node_id": "id-1", "name": None},
    ]
    rows = {"/api/v0/nodes": nodes, "/api/v0/placement_groups": groups, "/api/v0/actors": actors}

    def respond(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/api/version":
            return httpx.Response(200, json={"ray_version": "2.60.0"})
        if request.url.path == "/nodes":
            if unnamed is None:
                return httpx.Response(404)
            raylets = [
                {"nodeId": row["node_id"], "nodeManagerHostname": f"h-{row['node_id']}"}
                for row in nodes
                if row["node_id"] not in unnamed
            ]
            summary = [{"hostname": "of its agent", "raylet": raylet} for raylet in raylets]
            return httpx.Response(200, json={"data": {"summary": summary}})
        listed = rows[request.url.path]
        if request.url.path == "/api/v0/nodes":
            listed = [row for row in nodes if row["state"] == request.url.params["filter_values"]]
        return httpx.Response(200, json={"data": {"result": {"result": listed}}})

    made = RayCluster("http://ray")
    made._client = httpx.AsyncClient(base_url="http://ray", transport=httpx.MockTransport(respond))
    return made


def ray_node(number: int, **changes: object) -> dict:
    base = {"node_id": f"id-{number}", "node_ip": f"10.0.0.{number}", "state": "ALIVE", "labels": {}}
    return {**base, "resources_total": {"GPU": 8.0}, **changes}


async def test_nodes_have_the_name_of_their_kubernetes_node_or_host_and_hosts_are_asked_once():
    asked: list[str] = []
    nodes = [ray_node(1, labels={KUBERNETES_NODE_LABEL: "gpu-1"}), ray_node(2), ray_node(3, state="DEAD")]
    ray = ray_with(nodes, asked)
    for _ in range(2):
        first, second = await ray.nodes()
    assert (first.name, first.host, second.name) == ("gpu-1", "h-id-1", "h-id-2")
    assert asked.count("/nodes") == 1, "it is a long answer"
    assert RayNode("id-4", "10.0.0.4", {}).name == "10.0.0.4", "where Ray names no host"


async def test_a_new_node_is_there_when_ray_tells_its_host_or_has_not_for_long(monkeypatch):
    """By its address it would be another node: it might be excluded by its name, and work would land there."""
    asked: list[str] = []
    clock, unnamed = [100.0], {"id-2"}
    monkeypatch.setattr(jobs_api, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    nodes = [ray_node(1), ray_node(2), ray_node(4, labels={KUBERNETES_NODE_LABEL: "gpu-4"})]
    ray = ray_with(nodes, asked, unnamed)
    assert [node.name for node in await ray.nodes()] == ["h-id-1", "gpu-4"]
    unnamed.clear()
    assert [node.name for node in await ray.nodes()] == ["h-id-1", "h-id-2", "gpu-4"], "asked anew at once"
    nodes.append(ray_node(3))
    unnamed.add("id-3")
    for clock[0], count in ((110.0, 3), (139.0, 3), (140.0, 4), (150.0, 4)):
        assert len(await ray.nodes()) == count
    assert (await ray.nodes())[-1].name == "10.0.0.3", "it is not asked for for ever"
    before = asked.count("/nodes")
    clock[0] = 168.0
    await ray.nodes()
    assert asked.count("/nodes") == before
    clock[0] = 170.0
    await ray.nodes()
    assert asked.count("/nodes") == before + 1
    unnamed.clear()
    clock[0] = 201.0
    assert (await ray.nodes())[-1].name == "h-id-3"


async def test_nodes_have_their_addresses_where_ray_names_no_hosts_at_all():
    assert [node.name for node in await ray_with([ray_node(1)], [], None).nodes()] == ["10.0.0.1"]


async def test_what_is_in_use_is_told_node_by_node():
    used = await ray_with([], []).resources_in_use()
    assert used == [
        ResourceUse("ours", {"GPU": 2.0}, "id-1"),
        ResourceUse("ours", {"GPU": 1.0}, "id-2"),
        ResourceUse("", {"GPU": 0.5}, "id-2"),
        ResourceUse(keeper_name("job-1", "id-1"), {}, "id-1"),
    ]
