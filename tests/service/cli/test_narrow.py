"""Tables in narrow terminals: what is copied or compared stands whole, on one line; prose breaks between words."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from service.cli import artifacts, jobs, top
from service.schemas.artifacts import CheckpointFile
from service.schemas.jobs import JobSummary, Progress

WHY = (
    "waits for 4 GPU on nodes with accelerator A100: 2 of 16 are free, "
    "and job-k3j9x2abce, submitted earlier, takes these for itself first"
)
LONG_JOB = JobSummary(
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


def console_of(columns: int, monkeypatch: pytest.MonkeyPatch) -> Console:
    console = Console(file=io.StringIO(), width=columns)
    for commands in (jobs, top):
        monkeypatch.setattr(commands, "out", console)
    return console


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Console:
    return console_of(80, monkeypatch)


@pytest.mark.parametrize("columns", [80, 96, 139, 140])
def test_jobs_breaks_its_reasons_between_words_and_ends_a_long_one_by_an_ellipsis(
    columns: int, monkeypatch: pytest.MonkeyPatch
):
    console = console_of(columns, monkeypatch)
    console.print(jobs.jobs_table([LONG_JOB.model_copy(update={"message": WHY}), LONG_JOB]))
    lines = console.file.getvalue().splitlines()
    shown = [word.strip() for line in lines for word in line.split()]
    kept = WHY.removesuffix(" for itself first").split()
    behind = [word for word in shown if word in kept]
    assert behind == kept and "…" in shown
    assert max(map(len, lines)) <= columns
    assert (
        sum("job-k3j9x2abcd" in line and "CANCELLING" in line and "99000/100000" in line for line in lines)
        == 2
    )


@pytest.mark.parametrize(("columns", "shown"), [(80, False), (96, True), (120, True)])
def test_jobs_says_how_much_is_done_and_how_long_it_takes_where_there_is_room(
    columns: int, shown: bool, monkeypatch: pytest.MonkeyPatch
):
    console = console_of(columns, monkeypatch)
    training = LONG_JOB.progress.model_copy(update={"left_s": 3671.4})
    console.print(jobs.jobs_table([LONG_JOB.model_copy(update={"progress": training}), LONG_JOB]))
    text = console.file.getvalue()
    assert (text.count("99 %"), text.count("1:01:11")) == ((2, 1) if shown else (0, 0))
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize(
    ("step", "steps", "percent"), [(0, 7, 0), (6, 7, 85), (7, 7, 100), (999, 1000, 99), (0, 0, 0)]
)
def test_percents_are_whole_and_a_hundred_at_the_end_alone(step: int, steps: int, percent: int):
    progress = Progress(step=step, steps=steps, loss=None, step_s=None)
    assert progress.percent == percent == Progress.model_validate(progress.model_dump()).percent


def test_jobs_that_have_no_reason_take_no_room_for_one_at_80_columns(narrow: Console):
    narrow.print(jobs.jobs_table([LONG_JOB.model_copy(update={"name": "gpt"})]))
    assert len(narrow.file.getvalue().strip().splitlines()) == 3


def test_top_has_each_jobs_id_on_one_line_whatever_its_name(narrow: Console):
    narrow.print(top._jobs_table([LONG_JOB]))
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
