"""Two Ray clusters under one control plane: whose jobs run where, and what each is told."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from service.orchestrator.attempts.outcome import Backoff, DriverReport, apply_report
from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from service.orchestrator.ray.clusters import build_clusters
from service.orchestrator.ray.jobs_api import RayNode
from service.settings.settings import Settings
from service.spec.states import AttemptState
from service.store.attempts import log_locations
from service.store.database import utc_now
from service.store.events import events_of
from tests.polling import until_async
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from tests.service.api.routers.test_people import ROOT, submitted, token
from tests.service.conftest import job_body
from tests.service.fake_cluster import FakeCluster, ask_at_once

QUEUES = {"default": None, "more": None, "east": {"cluster": "east"}, "east-2": {"cluster": "east"}}
EAST = {"east": {"address": "http://east:8265", "driver_url": "http://from-east:80", "workers_per_gpu": 2}}
TWO = {"pipeline": {"stages": 2}}


@asynccontextmanager
async def two_clusters(
    make_api: ApiMaker, east: FakeCluster | None = None, **settings: Any
) -> AsyncIterator[tuple[Api, FakeCluster]]:
    """The default cluster has four accelerators, the other one two, if it is not said otherwise."""
    east = east or FakeCluster(workers=2)
    given = {"clusters": EAST, "queues": QUEUES, **settings}
    async with make_api({"east": east}, **given) as api:
        await api.service.clusters.refresh()
        yield api, east


async def turn(api: Api, rounds: int = 3) -> None:
    """Rounds of the orchestrator, each with a fresh look at the clusters."""
    for _ in range(rounds):
        await api.service.clusters.refresh()
        await api.service.orchestrator.round()
        await api.service.orchestrator.settle()
        ask_at_once(api.service.orchestrator.attempts)


async def failed(api: Api, job_id: str, number: int = 1) -> None:
    """The attempt has lost a worker: the job recovers."""
    async with api.service.database.write() as session:
        report = DriverReport(1, state=AttemptState.FAILED, reason="WORKER_LOST", message="a worker died")
        await apply_report(session, f"{job_id}-{number}", report, at=utc_now(), backoff=Backoff(0, 0), keep=1)


async def test_a_job_runs_on_the_cluster_of_its_queue_with_its_code_and_under_its_settings(
    make_api: ApiMaker,
):
    async with two_clusters(make_api, driver_url="http://from-west:80") as (api, east):
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as package:
            package.writestr("mine.py", "x = 1")
        headers = {"Content-Type": "application/zip"}
        uploaded = await api.client.post("/api/v1/packages", content=content.getvalue(), headers=headers)
        code = {"working_dir": uploaded.json()["uri"]}
        there = await api.submit(queue="east", code=code, **TWO)
        here = await api.submit(**TWO)
        await turn(api)
        assert list(api.cluster.submissions) == [f"{here}-1"]
        assert list(east.submissions) == [f"{there}-1"]
        assert list(east.packages.values()) == [content.getvalue()] and api.cluster.packages == {}
        env = [one.submissions[f"{job}-1"].env for one, job in ((api.cluster, here), (east, there))]
        assert [one["SLOTLINE_CONTROL_URL"] for one in env] == ["http://from-west:80", "http://from-east:80"]
        assert [one["SLOTLINE_WORKERS_PER_GPU"] for one in env] == ["1", "2"]
        attempts = [(await api.job(job))["attempts"][0]["cluster"] for job in (here, there)]
        assert attempts == ["default", "east"]
        # both report to this control plane, and each is watched, read and stopped where it runs
        for job in (here, there):
            assert (await api.report(job, 1, state="RUNNING")).json() == {"command": "continue"}
        east.logs[f"{there}-1"] = "from the east\n"
        lines = (await api.client.get(f"/api/v1/jobs/{there}/logs")).json()["items"]
        assert [line["text"] for line in lines] == ["from the east"]
        east.states[f"{there}-1"] = RayJob(RayState.FAILED, "the node is gone")
        api.service.orchestrator.attempts.limits = type(api.service.orchestrator.attempts.limits)(
            report_grace_s=0.0
        )
        await turn(api, 4)
        assert f"{there}-2" in east.submissions and len(api.cluster.submissions) == 1
        assert (await api.job(here))["state"] == "RUNNING"


async def test_accelerators_are_counted_by_cluster_and_shown_so(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, _):
        large = await api.submit(queue="east")
        here = await api.submit(name="here")
        there = await api.submit(queue="east", **TWO)
        await turn(api)
        assert (await api.job(here))["state"] == "STARTING"
        waits = await api.job(large)
        assert waits["reason"] == "CLUSTER_TOO_SMALL" and "the cluster east has 2" in waits["message"]
        assert (await api.job(there))["state"] == "STARTING"
        seen = (await api.client.get("/api/v1/cluster")).json()
        rows = {(one["cluster"], one["device"]): (one["total"], one["used"]) for one in seen["accelerators"]}
        assert rows["default", "cpu"] == (4, 4) and rows["east", "cpu"] == (2, 2)
        assert [(one["name"], one["queues"]) for one in seen["clusters"]] == [
            ("default", ["default", "more"]),
            ("east", ["east", "east-2"]),
        ]
        assert {one["job_id"]: one["cluster"] for one in seen["gangs"]} == {here: "default", there: "east"}
        only = (await api.client.get("/api/v1/cluster", params={"cluster": "east"})).json()
        assert {one["cluster"] for one in (*only["nodes"], *only["accelerators"], *only["gangs"])} == {"east"}
        told = problem(await api.client.get("/api/v1/cluster", params={"cluster": "north"}), 404)
        assert "default, east" in told["detail"]
        queues = (await api.client.get("/api/v1/queues")).json()["items"]
        assert {one["name"]: one["cluster"] for one in queues}["east-2"] == "east"
        metrics = (await api.client.get("/metrics")).text
        assert 'slotline_cluster_accelerators{cluster="east",device="cpu"} 2.0' in metrics
        assert 'slotline_cluster_up{cluster="east"} 1.0' in metrics


async def test_one_cluster_is_shown_as_ever(make_api: ApiMaker):
    async with make_api() as api:
        await api.service.clusters.refresh()
        seen = (await api.client.get("/api/v1/cluster")).json()
        assert (seen["available"], seen["error"]) == (True, None)
        assert [(one["device"], one["total"]) for one in seen["accelerators"]] == [("cpu", 4), ("cuda", 0)]
        assert (await api.client.get("/readyz")).json() == {"status": "ok"}
        api.cluster.away = True
        await api.service.clusters.refresh()
        seen = (await api.client.get("/api/v1/cluster")).json()
        assert (seen["available"], seen["error"]) == (False, "the cluster is away")
        assert "the cluster is not there" in problem(await api.client.get("/readyz"), 503)["detail"]


async def test_a_waiting_job_moves_to_another_cluster_and_one_that_has_begun_does_not(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        blocker = await api.submit()
        moves = await api.submit(**TWO)
        await turn(api)
        assert (await api.job(moves))["state"] == "QUEUED"
        changed = await api.client.patch(f"/api/v1/jobs/{moves}", json={"queue": "east"})
        assert changed.status_code == 200
        await turn(api)
        assert list(east.submissions) == [f"{moves}-1"]
        await failed(api, moves)
        east.away = True
        await turn(api)
        assert (await api.job(moves))["state"] == "RECOVERING"
        told = problem(await api.client.patch(f"/api/v1/jobs/{moves}", json={"queue": "default"}), 409)
        assert told["code"] == "JOB_BEGAN_ELSEWHERE"
        assert "began on cluster east" in told["detail"] and "submit it anew" in told["detail"]
        assert (await api.job(moves))["queue"] == "east"
        same = await api.client.patch(f"/api/v1/jobs/{moves}", json={"queue": "east-2", "priority": 1})
        assert same.status_code == 200 and same.json()["queue"] == "east-2"
        assert list(api.cluster.submissions) == [f"{blocker}-1"]


async def test_a_cluster_that_is_away_stops_nobody_elsewhere_and_is_named(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        east.away = True
        there, here = await api.submit(queue="east", **TWO), await api.submit(**TWO)
        await turn(api)
        assert (await api.job(here))["state"] == "STARTING"
        waits = await api.job(there)
        assert waits["reason"] == "WAITS_FOR_CLUSTER" and "Ray cluster east" in waits["message"]
        ready = await api.client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ok", "clusters_away": {"east": "the cluster is away"}}
        seen = (await api.client.get("/api/v1/cluster")).json()
        assert (seen["available"], seen["error"]) == (False, "east: the cluster is away")
        assert [one["available"] for one in seen["clusters"]] == [True, False]
        assert 'slotline_cluster_up{cluster="east"} 0.0' in (await api.client.get("/metrics")).text
        api.cluster.away = True
        await turn(api, 1)
        detail = problem(await api.client.get("/readyz"), 503)["detail"]
        assert "default: the cluster is away" in detail and "east: the cluster is away" in detail
        api.cluster.away = east.away = False
        await turn(api)
        assert list(east.submissions) == [f"{there}-1"]


class Hanging(FakeCluster):
    """Takes every call, and answers none once it `hangs`."""

    hangs = False
    logs_asked = 0

    async def _wait(self) -> None:
        while self.hangs:
            await asyncio.sleep(0.02)

    async def submit(self, submission) -> None:
        await self._wait()
        await super().submit(submission)

    async def job(self, submission_id: str) -> RayJob:
        await self._wait()
        return await super().job(submission_id)

    async def read_log(self, submission_id: str, *, follow: bool = False):
        self.logs_asked += self.hangs
        await self._wait()
        async for piece in super().read_log(submission_id, follow=follow):
            yield piece


async def test_calls_that_hang_hold_up_no_round_and_no_other_clusters_jobs(
    make_api: ApiMaker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("service.orchestrator.ray.driver_logs._LOG_SETTLES_S", 0.0)
    async with two_clusters(make_api, Hanging(workers=4)) as (api, east):
        ended = await api.submit(queue="east", **TWO)
        runs = await api.submit(queue="east", **TWO)
        done = await api.submit(**TWO)
        await turn(api)
        for job in (ended, runs, done):
            await api.report(job, 1, state="RUNNING")
        east.hangs = True
        await api.report(ended, 2, state="SUCCEEDED")
        async with asyncio.timeout(60):
            while not east.logs_asked:  # from now on its log is waited for
                await api.service.orchestrator.round()
                await asyncio.sleep(0.02)
        api.cluster.logs[f"{done}-1"] = "its last words\n"
        await api.report(done, 2, state="SUCCEEDED")
        late = await api.submit(queue="east", **TWO)
        here = await api.submit(**TWO)

        async def kept() -> bool:
            async with api.service.database.read() as session:
                return (await log_locations(session, done))[0].stored

        async with asyncio.timeout(60):
            while f"{here}-1" not in api.cluster.submissions or not await kept():
                await api.service.clusters.of("default").watcher.refresh()
                await api.service.orchestrator.round()
                await asyncio.sleep(0.02)
        assert f"{late}-1" not in east.submissions
        east.hangs = False
        async with asyncio.timeout(60):
            while f"{late}-1" not in east.submissions:
                await turn(api, 1)


async def test_a_cluster_that_the_settings_no_longer_name_is_named_and_nobody_looks_for_its_jobs_elsewhere(
    make_api: ApiMaker,
):
    async with two_clusters(make_api) as (api, east):
        job = await api.submit(queue="east", **TWO)
        fails = await api.submit(queue="east", **{"pipeline": {"stages": 1}, "resources": {"meshes": 1}})
        east.workers = 4
        await turn(api)
        await api.report(job, 1, state="RUNNING")
        await api.service.orchestrator.lease.release()
    async with make_api({"oriental": east}, clusters={"oriental": {"address": "http://east:8265"}}) as api:
        other = await api.submit(**TWO)
        await turn(api)
        assert list(api.cluster.submissions) == [f"{other}-1"]
        assert (await api.job(job))["state"] == "RUNNING"
        assert (await api.report(job, 2, steps=[])).json() == {"command": "continue"}, "it is heard"
        async with api.service.database.read() as session:
            told = [event.message for event in await events_of(session, job) if event.kind == "no-cluster"]
        assert len(told) == 1 and "there is no cluster east any more" in told[0]
        seen = (await api.client.get("/api/v1/cluster")).json()
        (state,) = [one for one in seen["clusters"] if one["name"] == "east"]
        assert not state["available"] and "no cluster east any more" in state["error"]
        log = problem(await api.client.get(f"/api/v1/jobs/{job}/logs"), 503)
        assert "no cluster east any more" in log["detail"] and "oriental" in log["detail"]
        await failed(api, fails)
        await turn(api)
        waits = await api.job(fails)
        assert (waits["state"], waits["reason"]) == ("RECOVERING", "WAITS_FOR_CLUSTER")
        assert "began on cluster east" in waits["message"]
        assert len(east.submissions) == 2 and list(api.cluster.submissions) == [f"{other}-1"]
        assert api.cluster.stopped == east.stopped == []


async def test_an_attempt_that_no_cluster_took_before_its_name_went_says_which_is_missing(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        east.not_now = "No available agent"
        job = await api.submit(queue="east", **TWO)
        await turn(api)
        assert (await api.job(job))["state"] == "STARTING" and east.submissions == {}
        await api.service.orchestrator.lease.release()
    async with make_api() as api:
        await turn(api)
        assert "no cluster east any more" in (await api.job(job))["message"]
        assert api.cluster.submissions == {}


async def test_a_queue_that_moved_in_the_settings_keeps_what_has_begun_where_it_is(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        begun = await api.submit(queue="east", **TWO)
        await turn(api)
        await failed(api, begun)
        await api.service.orchestrator.lease.release()
    moved = {**QUEUES, "east": {"cluster": "default"}}
    async with two_clusters(make_api, east, queues=moved) as (api, _):
        fresh = await api.submit(queue="east", **TWO)
        await turn(api)
        assert list(api.cluster.submissions) == [f"{fresh}-1"]
        waits = await api.job(begun)
        assert "its queue east now belongs to cluster default" in waits["message"]
        assert (await api.client.patch(f"/api/v1/jobs/{begun}", json={"queue": "east-2"})).status_code == 200
        await turn(api)
        assert f"{begun}-2" in east.submissions


async def test_what_was_measured_on_one_cluster_is_not_used_on_another(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        api.cluster.workers = east.workers = 8
        here, again = await api.submit(**TWO), await api.submit(**TWO)
        there = await api.submit(queue="east", **TWO)
        await turn(api)
        for key in ("of the layers", f"links of cpu {'0' * 64}"):
            params = {"params": {"key": key}}
            for job, body in ((here, {"of": "west"}), (there, {"of": "east"})):
                problem(await api.driver(job, "GET", "/profile", **params), 404)
                assert (await api.driver(job, "PUT", "/profile", json=body, **params)).status_code == 204
            assert (await api.driver(again, "GET", "/profile", **params)).json() == {"of": "west"}
            assert (await api.driver(there, "GET", "/profile", **params)).json() == {"of": "east"}


async def test_a_job_is_measured_on_its_queues_cluster_for_its_plan(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):
        for queue, cluster in (("east", east), ("default", api.cluster)):
            answer = await api.client.post("/api/v1/plans/job", json=job_body(queue=queue, **TWO))
            assert answer.status_code == 202, "measured on the other one does not count"
            await until_async(lambda cluster=cluster: cluster.submissions)
            (run,) = cluster.submissions
            assert run.startswith("profile-")


async def test_prometheus_is_sent_to_nodes_of_the_drivers_own_cluster_only(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, east):

        async def nodes() -> list[RayNode]:
            return [RayNode("e", "10.0.0.7", {"slotline_worker": 4.0})]

        east.nodes = nodes
        good, bad = [await api.submit(queue="east", **TWO) for _ in range(2)]
        await turn(api)
        await api.report(good, 1, state="RUNNING", metrics_endpoint="10.0.0.7:9400")
        await api.report(bad, 1, state="RUNNING", metrics_endpoint="127.0.0.1:9400")
        (target,) = (await api.client.get("/api/v1/prometheus/targets")).json()
        assert target["targets"] == ["10.0.0.7:9400"]
        assert target["labels"]["__meta_slotline_cluster"] == "east"


async def test_a_queue_is_a_border_for_those_whom_it_does_not_name(make_api: ApiMaker):
    queues = {**QUEUES, "east": {"cluster": "east", "submitters": ["alice", "team-*"]}}
    async with two_clusters(make_api, queues=queues, api_token="secret") as (api, _):
        alice, bob = await token(api, "alice"), await token(api, "bob")
        operator = await token(api, "olga", "operator")
        job = await submitted(api, alice, queue="east", **TWO)
        await submitted(api, operator, queue="east", **TWO)
        for path in ("/api/v1/jobs", "/api/v1/plans/job"):
            body = job_body(queue="east", **TWO)
            told = problem(await api.client.post(path, json=body, headers=bob), 403)
            assert told["code"] == "QUEUE_NOT_YOURS"
            assert "queue east takes no jobs of bob: use one of default, east-2, more" in told["detail"]
        bobs = await submitted(api, bob, **TWO)
        moving = await api.client.patch(f"/api/v1/jobs/{bobs['id']}", json={"queue": "east"}, headers=bob)
        assert problem(moving, 403)["code"] == "QUEUE_NOT_YOURS"
        # exports run on the job's cluster
        export = await api.client.post(f"/api/v1/jobs/{job['id']}/export", headers=bob)
        assert problem(export, 403)["code"] == "QUEUE_NOT_YOURS"
        await api.client.post(f"/api/v1/jobs/{bobs['id']}/cancel", headers=bob)
        await api.client.patch(f"/api/v1/jobs/{bobs['id']}", json={"queue": "more"}, headers=ROOT)


async def test_who_may_not_use_a_queue_any_more_does_not_try_again_in_it(make_api: ApiMaker):
    async with two_clusters(make_api, api_token="secret") as (api, _):
        alice = await token(api, "alice")
        job = await submitted(api, alice, queue="east", **TWO)
        await api.client.post(f"/api/v1/jobs/{job['id']}/cancel", headers=alice)
    queues = {**QUEUES, "east": {"cluster": "east", "submitters": []}}
    async with two_clusters(make_api, queues=queues, api_token="secret") as (api, _):
        again = await api.client.post(f"/api/v1/jobs/{job['id']}/retry", headers=alice)
        assert problem(again, 403)["code"] == "QUEUE_NOT_YOURS"
        assert (await api.client.post(f"/api/v1/jobs/{job['id']}/retry", headers=ROOT)).status_code == 202


async def test_the_start_of_an_attempt_says_on_which_cluster_it_is(make_api: ApiMaker):
    async with two_clusters(make_api) as (api, _):
        job = await api.submit(queue="east", **TWO)
        await turn(api)
        async with api.service.database.read() as session:
            told = [event.message for event in await events_of(session, job)]
        assert any("takes 2 accelerators (cpu) of cluster east" in message for message in told)


async def test_a_name_that_is_not_there_answers_nothing_but_that():
    clusters = build_clusters(Settings(), {"default": FakeCluster()}, refresh_s=600)
    gone = clusters.of("east")
    assert gone.watcher.capacity is None and "no cluster east any more" in gone.watcher.snapshot.error
    await gone.watcher.refresh()
    assert gone.watcher.capacity is None
