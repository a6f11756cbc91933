"""What the process measures of itself, where it is not seen at /metrics (tests/service/api/routers/test_metrics.py)."""

from __future__ import annotations

import asyncio

import pytest

from service.observability.instruments import PLANNING_SECONDS
from service.orchestrator.planning.pool import PlannerLoad, PlannerPool, PlanRefusedError, WaitQueue


async def test_a_line_tells_how_many_plan_and_wait():
    line = WaitQueue(1)
    assert line.load == PlannerLoad(running=0, waiting=0, processes=2)
    place = await line.take(driver=False)
    waiting = asyncio.create_task(line.take(driver=False))
    await asyncio.sleep(0)
    assert line.load == PlannerLoad(running=1, waiting=1, processes=2), "the other place is for drivers"
    gone = asyncio.create_task(line.take(driver=False))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    line.leave(place)
    await waiting
    assert line.load == PlannerLoad(running=1, waiting=0, processes=2)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "planned"),
        (PlanRefusedError("no"), "refused"),
        (RuntimeError("a defect"), "failed"),
        (asyncio.CancelledError(), "given up"),
    ],
)
async def test_plans_are_timed_by_how_they_end(error, outcome, monkeypatch):
    async def answer(*_, **__):
        if error is not None:
            raise error
        return "{}"

    planner = PlannerPool(processes=1, queue=1, timeout_s=1.0)
    monkeypatch.setattr(planner, "_admitted", answer)

    def count() -> float:
        return next(
            sample.value
            for family in PLANNING_SECONDS.collect()
            for sample in family.samples
            if sample.name.endswith("_count") and sample.labels == {"outcome": outcome}
        )

    PLANNING_SECONDS.labels(outcome)
    before = count()
    if error is None:
        assert await planner.plan_spec("{}", budget_s=1.0, format="json") == "{}"
    else:
        with pytest.raises(type(error)):
            await planner.plan_spec("{}", budget_s=1.0, format="json")
    assert count() == before + 1
