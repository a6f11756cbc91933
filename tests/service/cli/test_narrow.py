"""Tables in a terminal of 80 columns: what is copied or compared stands whole, on one line."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from service.cli import artifacts, top
from service.schemas.jobs import CheckpointFile, JobSummary, Progress


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(top, "out", console)
    return console


def test_top_has_each_jobs_id_on_one_line_whatever_its_name(narrow: Console):
    job = JobSummary(
        id="job-k3j9x2abcd",
        name="n" * 60,
        owner="somebody-with-a-long-name",
        queue="default",
        priority=0,
        accelerators=4,
        state="CANCELLING",
        reason=None,
        message=None,
        created_at=datetime.now(UTC),
        started_at=None,
        finished_at=None,
        progress=Progress(step=99_000, steps=100_000, loss=2.054, step_s=0.01),
    )
    narrow.print(top._jobs_table([job]))
    lines = narrow.file.getvalue().splitlines()
    assert any("job-k3j9x2abcd" in line and "CANCELLING" in line and "99000/100000" in line for line in lines)


def test_checkpoints_show_when_how_large_and_which_is_the_latest_and_the_best(narrow: Console):
    saved = datetime(2026, 5, 17, 12, 30, tzinfo=UTC)
    one = CheckpointFile(
        step=123_400,
        uri="/c/step",
        saved_at=saved,
        size_bytes=123_456_789_012,
        blocking_s=0.0223,
        writing_s=0.0748,
        state="complete",
        damage=None,
        checked="sizes",
        loss=2.05481,
        latest=True,
        best=True,
    )
    narrow.print(artifacts._checkpoints_table([one]))
    text = narrow.file.getvalue()
    assert "…" not in text
    for whole in ("123400", saved.astimezone().strftime("%m-%d %H:%M"), "123.46 GB", "complete", "sizes"):
        assert whole in text, whole
    assert "latest" in text and "best" in text
