"""Profiles that drivers store: shared by jobs of one model and code, what links cost by all; and not without bound."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import select, update

from service.store import measurements as room
from service.store.database import utc_now
from service.store.tables import ProfileRow
from tests.service.api.conftest import Api, ApiMaker
from tests.service.api.routers.test_jobs import problem
from worker.contract.costs import LINK_CACHE_S

KEY = {"key": "ab" * 32}
LINKS = {"key": f"links of cpu {'cd' * 32}"}
OTHER_MODEL = {"factory": "worker.examples.gpt:build", "args": {"layers": 6, "width": 32}}


async def _read(api: Api, job_id: str, key: dict[str, str]) -> dict:
    return (await api.driver(job_id, "GET", "/profile", params=key)).raise_for_status().json()


async def _started(api: Api, **changes: object) -> str:
    return await api.started(pipeline={"stages": 1}, **changes)


async def test_a_driver_neither_changes_nor_reads_what_was_measured_of_another_model(api: Api):
    mine, like_mine = await _started(api), await _started(api, name="again", priority=3)
    other, other_code = await _started(api, model=OTHER_MODEL), await _started(api, code={"pip": ["einops"]})
    await api.driver(mine, "PUT", "/profile", params=KEY, json={"layers": [1]})
    for job_id in (other, other_code):
        problem(await api.driver(job_id, "GET", "/profile", params=KEY), 404)
        wrong = await api.driver(job_id, "PUT", "/profile", params=KEY, json={"layers": ["wrong"]})
        assert wrong.status_code == 204
    assert await _read(api, mine, KEY) == await _read(api, like_mine, KEY) == {"layers": [1]}


async def test_what_links_cost_is_shared_by_all_and_nothing_else_is_that_looks_so(api: Api):
    mine, other = await _started(api), await _started(api, model=OTHER_MODEL)
    await api.driver(mine, "PUT", "/profile", params=LINKS, json={"format": 1})
    assert await _read(api, other, LINKS) == {"format": 1}
    for key in ("links of cpu", "links of everything", f"costs of {'ab' * 32} by gang"):
        await api.driver(mine, "PUT", "/profile", params={"key": key}, json={})
        problem(await api.driver(other, "GET", "/profile", params={"key": key}), 404)


async def test_a_job_is_placed_by_the_links_that_another_measured_of_late(api: Api):
    measured = await _started(api, model=OTHER_MODEL)
    from worker.benchmark.links import Link, Probe, ProbeResult
    from worker.driver.benchmarks import link_cache_entry

    pair = Probe("m0/0", ("m1/0",))

    async def know(first: int, second: int, bytes_per_s: float) -> None:
        links = (Link("m0/0", "m1/0", 1e-4, bytes_per_s), Link("m1/0", "m0/0", 1e-4, bytes_per_s))
        entry = link_cache_entry(pair, ProbeResult(links, ()), [f"id-{first}", f"id-{second}"], at=0.0)
        key = {"key": f"links of cpu {first:032x}{second:032x}"}
        await api.driver(measured, "PUT", "/profile", params=key, json=entry)

    async def nodes(job_id: str) -> list[list[str]]:
        offered = [{"name": f"id-{n}", "free": 1, "total": 1} for n in (1, 2, 3)]
        request = {"nodes": offered, "meshes": [{"workers": 1}] * 2}
        return (await api.driver(job_id, "POST", "/placement", json=request)).json()["workers"]

    api.cluster.node_names = ("id-1", "id-2", "id-3")
    for first, second, bytes_per_s in ((1, 2, 8e8), (1, 3, 1e9), (2, 3, 1.2e9)):
        await know(first, second, bytes_per_s)
    job_id = await _started(api)
    assert await nodes(job_id) == [["id-1"], ["id-2"]], "alike but for noise: the order of nodes decides"
    await know(1, 2, 1e8)
    apart = await nodes(job_id)
    assert apart != [["id-1"], ["id-2"]] and ["id-3"] in apart
    await api.driver(measured, "PUT", "/profile", params=LINKS, json={"nodes": [7], "links": [[0, 1]]})
    assert await nodes(job_id) == apart, "what is no measurement says nothing"
    async with api.service.database.write() as session:
        stale = utc_now() - timedelta(seconds=LINK_CACHE_S + 1)
        await session.execute(update(ProfileRow).values(created_at=stale))
    assert await nodes(job_id) == [["id-1"], ["id-2"]]


async def test_of_one_model_the_newest_profiles_are_kept(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(room, "_PROFILES_PER_MODEL", 3)
    monkeypatch.setattr(room, "_LINK_PROFILES_LIMIT", 2)
    mine, other = await _started(api), await _started(api, model=OTHER_MODEL)
    await api.driver(other, "PUT", "/profile", params=KEY, json={})
    for number in range(6):
        await api.driver(mine, "PUT", "/profile", params={"key": f"{number}"}, json={})
        links = {"key": f"links of cpu {number:064x}"}
        await api.driver(mine, "PUT", "/profile", params=links, json={})
    async with api.service.database.read() as session:
        keys = (await session.execute(select(ProfileRow.key))).scalars().all()
    assert sorted(key[-1] for key in keys if key.startswith("model")) == ["3", "4", "5", "b"]
    assert sorted(key[-1] for key in keys if key.startswith("links")) == ["4", "5"]


async def test_a_profile_over_the_limit_is_refused(make_api: ApiMaker, monkeypatch):
    monkeypatch.setattr("service.jobs.drivers.PROFILE_SIZE_LIMIT_BYTES", 2000)
    async with make_api() as api:
        mine = await _started(api)
        refused = await api.driver(mine, "PUT", "/profile", params=KEY, json={"layers": ["x" * 2000]})
        assert "the limit is 2000" in problem(refused, 413)["detail"]
