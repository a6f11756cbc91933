"""Whose plan is made: not that of a caller who has gone, a driver's before others', one plan an attempt."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from concurrent.futures import Future
from pathlib import Path

import httpx
import pytest

from service.api.dependencies import service_of
from service.orchestrator.planning.pool import (
    PlannerBusyError,
    PlannerPool,
    PlanRefusedError,
    PlanTimeoutError,
    WaitQueue,
    _plan_job,
)
from service.settings.settings import Settings
from tests.polling import until, until_async
from tests.service.api.conftest import ApiMaker, make_api  # noqa: F401 (a fixture)
from tests.service.api.routers.test_jobs import problem
from tests.service.conftest import job_body
from tests.service.serving import serve

SMALL = {
    "microbatches": 1,
    "meshes": [{"name": "m0"}],
    "stages": [
        {"name": "s0", "mesh": "m0", "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0}
    ],
}


def _until_given_up(expired, began: str, over: str) -> str:
    Path(began).touch()
    while not expired():
        time.sleep(0.01)
    Path(over).touch()
    return "given up"


def _at_once(_expired) -> str:
    return "planned"


def _needs_much(_expired) -> str:
    return str(len(bytearray(3 << 30)))


def _niceness(_expired) -> str:
    return str(os.nice(0))


async def _there(path: Path) -> None:
    await until_async(path.exists)


@pytest.mark.slow
async def test_a_plan_whose_caller_has_gone_is_given_up_and_its_place_is_free(tmp_path: Path):
    planner = PlannerPool(processes=1, queue=0, timeout_s=300)
    try:
        began, over = tmp_path / "began", tmp_path / "over"
        asked = asyncio.create_task(planner._run(_until_given_up, str(began), str(over)))
        await _there(began)
        with pytest.raises(PlannerBusyError):
            await planner._run(_at_once)
        pool = planner._pool
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert await planner._run(_at_once) == "planned"
        assert over.exists() and planner._pool is pool, "it heard of it: its process was not killed"
    finally:
        planner.close()


@pytest.mark.slow
async def test_a_driver_does_not_wait_behind_plans_of_others(tmp_path: Path):
    planner = PlannerPool(processes=1, queue=4, timeout_s=300)
    try:
        began, over = tmp_path / "began", tmp_path / "over"
        others = [asyncio.create_task(planner._run(_until_given_up, str(began), str(over))) for _ in range(5)]
        await _there(began)
        with pytest.raises(PlannerBusyError):
            await planner._run(_at_once)
        async with asyncio.timeout(60):
            assert await planner._run(_at_once, attempt="job-1") == "planned"
        assert not any(task.done() for task in others)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    finally:
        planner.close()


@pytest.mark.slow
async def test_an_attempt_that_asks_again_gives_up_its_earlier_plan(tmp_path: Path):
    planner = PlannerPool(processes=1, queue=0, timeout_s=300)
    try:
        began, over = tmp_path / "began", tmp_path / "over"
        first = asyncio.create_task(planner._run(_until_given_up, str(began), str(over), attempt="job-1"))
        await _there(began)
        assert await planner._run(_at_once, attempt="job-1") == "planned"
        with pytest.raises(PlannerBusyError, match="another plan since"):
            await first
        await _there(over)
    finally:
        planner.close()


@pytest.mark.slow
async def test_a_plan_that_needs_more_memory_than_it_may_use_is_refused_and_ends_no_process():
    planner = PlannerPool(processes=1, queue=0, timeout_s=300, memory_bytes=2 << 30)
    try:
        with pytest.raises(PlanRefusedError, match="more memory than the 2147483648 bytes"):
            await planner._run(_needs_much)
        assert await planner._run(_at_once) == "planned"
    finally:
        planner.close()


@pytest.mark.slow
async def test_planning_goes_behind_the_server_and_what_trains_beside_it():
    planner = PlannerPool(processes=1, queue=0, timeout_s=300)
    try:
        assert int(await planner._run(_niceness)) == min(19, os.nice(0) + 5)
    finally:
        planner.close()


async def test_the_place_of_drivers_stays_free_and_a_wait_that_is_cancelled_takes_none():
    line = WaitQueue(2)
    taken = [await line.take(driver=False) for _ in range(2)]
    waiting = asyncio.create_task(line.take(driver=False))
    await asyncio.sleep(0)
    assert not waiting.done()
    drivers = [asyncio.create_task(line.take(driver=True)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [task.done() for task in drivers] == [True, False]
    line.leave(taken[0])
    await asyncio.sleep(0)
    assert drivers[1].done() or (await asyncio.sleep(0.01), drivers[1].done())[1], "drivers go first"
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for place in (taken[1], drivers[0].result(), drivers[1].result()):
        line.leave(place)
    assert sorted([await line.take(driver=True) for _ in range(3)]) == [0, 1, 2]


@pytest.mark.slow
def test_a_request_that_is_broken_off_ends_its_plan(tmp_path: Path):
    began, over = tmp_path / "began", tmp_path / "over"
    with serve(Settings(data_dir=tmp_path)) as served:
        planner = service_of(served.app).planner
        planner._timeout_s = 600.0
        plan_spec, free = planner.plan_spec, planner._free_requests["user"]

        async def endless(*_, **__) -> str:
            return await planner._run(_until_given_up, str(began), str(over))

        planner.plan_spec = endless
        body, (host, port) = json.dumps(SMALL).encode(), served.url.removeprefix("http://").split(":")
        head = f"POST /api/v1/plans HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as caller:
            caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(began.exists)  # a process for the plan takes seconds to start on a busy machine
        until(over.exists)
        planner.plan_spec = plan_spec
        until(lambda: planner._free_requests["user"] == free)
        answer = httpx.post(f"{served.url}/api/v1/plans", json=SMALL, timeout=60)
        assert answer.status_code == 200, answer.text


async def test_a_job_with_more_actions_than_can_be_planned_is_refused(
    make_api: ApiMaker,  # noqa: F811
):
    async with make_api() as api:
        body = job_body(
            training={"steps": 1, "global_batch": 1_000_000, "microbatches": 1_000_000},
            pipeline={"stages": 1024},
        )
        for path in ("/api/v1/jobs", "/api/v1/plans/job"):
            detail = problem(await api.client.post(path, json=body), 422)["detail"]
            assert "2047000000 actions to plan, the limit is 200000" in detail
        body["training"] = {"steps": 1, "global_batch": 1_000_000, "microbatches": 8}
        assert (await api.client.post("/api/v1/jobs", json=body)).status_code == 201


@pytest.mark.slow
async def test_after_an_idle_process_was_ended_one_plan_is_refused_and_the_one_behind_it_made():
    planner = PlannerPool(processes=1, queue=0, timeout_s=300)
    try:
        for _ in range(3):  # places are two: none is lost on the way
            assert await planner._run(_at_once) == "planned"
            pool = planner._pool
            for process in list(pool._processes.values()):
                process.kill()
            await until_async(lambda pool=pool: pool._broken)
            with pytest.raises(PlannerBusyError, match="ended before the plan was made"):
                await planner._run(_at_once)
    finally:
        planner.close()


class _AtOnce:
    """A pool that notes when a search is to end, and answers."""

    def __init__(self) -> None:
        self.left_s: list[float] = []

    def submit(self, _guarded, _function, _place, deadline: float, *_arguments) -> Future:
        self.left_s.append(deadline - time.time())
        done: Future = Future()
        done.set_result((False, "planned"))
        return done


async def test_a_search_ends_well_before_its_process_is_ended(monkeypatch):
    """What comes behind the search takes its time too, on a busy machine many times as long as alone."""
    planner, pool = PlannerPool(processes=1, queue=0, timeout_s=1000.0), _AtOnce()
    monkeypatch.setattr(planner, "_processes_pool", lambda: pool)
    assert await planner.plan_job({}, {}, budget_s=1.0) == "planned"
    assert 0 < pool.left_s[0] <= 800


class _EndlessSearch:
    """A pool whose plans with a search never end; it notes the arguments of each."""

    def __init__(self, endless: bool = False) -> None:
        self.calls: list[tuple] = []
        self._endless = endless

    def submit(self, _guarded, function, _place, _deadline, *arguments) -> Future:
        self.calls.append((function.__name__, *arguments))
        budget_s = next(argument for argument in arguments if isinstance(argument, float))
        ending: Future = Future()
        if budget_s == 0 and not self._endless:
            ending.set_result((False, "planned"))
        return ending


def _impatient_planner(monkeypatch, pool: _EndlessSearch) -> PlannerPool:
    planner = PlannerPool(processes=1, queue=0, timeout_s=0.02)
    planner._guard_s = 0.01
    monkeypatch.setattr(planner, "_processes_pool", lambda: pool)
    return planner


async def test_a_jobs_plan_that_takes_too_long_is_made_once_more_without_a_search(monkeypatch):
    pool = _EndlessSearch()
    planner = _impatient_planner(monkeypatch, pool)
    assert await planner.plan_job({}, {}, budget_s=7.0, attempt="job-1") == "planned"
    (first, *_, budget_s, notes), (again, *_, smaller_s, told) = pool.calls
    assert (first, budget_s, notes) == ("_plan_job", 7.0, ())
    assert (again, smaller_s) == ("_plan_job", 0.0)
    assert "without a search" in told[0] and "0.02 s" in told[0]


async def test_an_evaluations_plan_that_takes_too_long_is_made_once_more_without_a_search(monkeypatch):
    pool = _EndlessSearch()
    planner = _impatient_planner(monkeypatch, pool)
    assert await planner.plan_forwards({"spec": 1}, budget_s=7.0, attempt="job-1") == "planned"
    (first, given, budget_s, notes), (again, same, smaller_s, note) = pool.calls
    assert (first, given, budget_s, notes) == ("_plan_forwards", {"spec": 1}, 7.0, ())
    assert (again, same, smaller_s) == ("_plan_forwards", {"spec": 1}, 0.0)
    assert "without a search" in note[0] and "0.02 s" in note[0]


async def test_a_plan_that_takes_too_long_without_a_search_too_names_the_limit_and_its_setting(monkeypatch):
    pool = _EndlessSearch(endless=True)
    planner = _impatient_planner(monkeypatch, pool)
    for ask in (planner.plan_job({}, {}, budget_s=7.0), planner.plan_forwards({}, budget_s=7.0, attempt="j")):
        pool.calls.clear()
        with pytest.raises(PlanTimeoutError, match=r"0\.02 s .* may be busy"):
            await ask
        assert len(pool.calls) == 2
    assert planner.longest_answer_s == pytest.approx(2 * 0.03)


def test_the_plan_of_a_job_says_that_no_search_was_made():
    profile = {
        "layers": [
            {
                "name": f"layer {i}", "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0,
                "activation_bytes": 1, "weight_stash_bytes": 0, "parameter_bytes": 0,
            }
            for i in range(2)
        ],
        "edges": [{"source": 0, "target": 1, "tensor": "t", "bytes": 1, "differentiable": True}],
        "device_type": "cpu", "microbatch": "", "parameter_sizes": {},
    }  # fmt: skip
    job = job_body(pipeline={"stages": 2})
    costs = {"profile": profile, "microbatches": job["training"]["microbatches"]}
    answer = json.loads(_plan_job(lambda: False, job, costs, None, 0.0, ("made without a search",)))
    assert answer["planning_notes"][0] == "made without a search"
