"""What was measured of jobs stays known, whatever of it is measured again."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from service.store.database import Database, utc_now
from service.store.measurements import MEASURED_BY_GANG, find_all_costs, find_costs, record_costs


def _costs(count: int, layers: list[int]) -> dict:
    profile = {"layers": layers}
    of_meshes = [
        {"microbatches": count, "workers": 4, "tensor": 2, "profile": profile},
        {"microbatches": count, "workers": 4, "profile": profile},
    ]
    return {"microbatches": count, "profile": profile, "mesh_profiles": of_meshes}


async def _record(session: AsyncSession, costs: dict, accelerator_type: str | None) -> None:
    await record_costs(
        session,
        "digest",
        costs,
        measured_by=MEASURED_BY_GANG,
        accelerator_type=accelerator_type,
        at=utc_now(),
    )


async def test_profiles_of_each_mesh_stay_known_when_another_number_of_microbatches_is_measured(
    database: Database,
):
    async with database.write() as session:
        for count, layers in ((3, [1]), (6, [2]), (3, [3])):
            await _record(session, _costs(count, layers), "H100")
    async with database.read() as session:
        known, _ = await find_costs(session, "digest", [3])
    found = {
        (one["microbatches"], one["workers"], one.get("tensor", 1)): one["profile"]["layers"]
        for one in known["mesh_profiles"]
    }
    assert found == {(3, 4, 2): [3], (3, 4, 1): [3], (6, 4, 2): [2], (6, 4, 1): [2]}


async def test_costs_are_of_one_type_of_accelerator(database: Database):
    async with database.write() as session:
        await _record(session, _costs(3, [1]), "H100")
        await _record(session, _costs(6, [2]), "A100")
        assert await find_costs(session, "digest", [3]) is None, "measured on another type"
        assert await find_all_costs(session, "digest", "H100") is None
        known = await find_all_costs(session, "digest", "A100")
    assert known is not None and [one["microbatches"] for one in known["profiles"]] == [6]
    assert {one["microbatches"] for one in known["mesh_profiles"]} == {6}
    assert "accelerator_type" not in known, "a request for a plan has no such field"
