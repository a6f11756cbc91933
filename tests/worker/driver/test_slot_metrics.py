"""Names of rows, and the text of snapshots."""

from __future__ import annotations

import pytest

from worker.driver import slot_metrics
from worker.driver.slot_metrics import SlotPage, row_names, slot_snapshot


@pytest.mark.parametrize(
    ("meshes", "first", "last"),
    [
        ([f"m{i}" for i in range(12)], "m00", "m11"),
        ([f"m{i}" for i in range(120)], "m000", "m119"),
        (["m0"], "m00", "m00"),
        (["rack1-gpu2", "rack1-gpu10", "rack12-gpu1"], "rack01-gpu02", "rack12-gpu01"),
        (["front", "back"], "0 front", "1 back"),
        (["m1", "m01"], "0 m1", "1 m01"),
    ],
)
def test_rows_sorted_as_text_stand_in_the_order_of_the_pipeline(meshes, first, last):
    names = row_names(meshes)
    assert list(names) == meshes
    assert list(names.values()) == sorted(names.values())
    assert len(set(names.values())) == len(meshes)
    assert (names[meshes[0]], names[meshes[-1]]) == (first, last)


def test_a_snapshot_is_written_once_however_often_it_is_asked_for(monkeypatch):
    """Prometheus asks for the slots of the plan again and again, and they never change."""
    slot = {"mesh": "m0", "lane": "compute", "action": "F", "start_s": 0.0, "end_s": 1.0}
    page, written = SlotPage("job"), []
    monkeypatch.setattr(
        slot_metrics, "generate_latest", lambda families: written.append(families) or b"written "
    )
    page.planned = slot_snapshot([slot], {})
    assert page.text() == page.text() == b"written "
    page.measured = slot_snapshot([slot], {}, step=1)
    assert page.text() == b"written written "
    page.measured = slot_snapshot([slot], {}, step=2)
    page.text()
    assert len(written) == 3
