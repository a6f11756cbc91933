"""What was measured of jobs stays known, whatever of it is measured again."""

from __future__ import annotations

from service.store.database import Database, utc_now
from service.store.measurements import MEASURED_BY_GANG, find_costs, record_costs


def _costs(count: int, layers: list[int]) -> dict:
    profile = {"layers": layers}
    of_meshes = [
        {"microbatches": count, "workers": 4, "tensor": 2, "profile": profile},
        {"microbatches": count, "workers": 4, "profile": profile},
    ]
    return {"microbatches": count, "profile": profile, "mesh_profiles": of_meshes}


async def test_profiles_of_each_mesh_stay_known_when_another_number_of_microbatches_is_measured(
    database: Database,
):
    async with database.write() as session:
        for count, layers in ((3, [1]), (6, [2]), (3, [3])):
            await record_costs(
                session, "digest", _costs(count, layers), measured_by=MEASURED_BY_GANG, at=utc_now()
            )
    async with database.read() as session:
        known, _ = await find_costs(session, "digest", [3])
    found = {
        (one["microbatches"], one["workers"], one.get("tensor", 1)): one["profile"]["layers"]
        for one in known["mesh_profiles"]
    }
    assert found == {(3, 4, 2): [3], (3, 4, 1): [3], (6, 4, 2): [2], (6, 4, 1): [2]}
