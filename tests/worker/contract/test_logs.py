"""Lines of logs as JSON: what they are about, and that whatever is logged stays one line."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from service.jobs.log_lines import written_at
from worker.contract import logs
from worker.contract.logs import (
    JsonFormatter,
    LogCopy,
    SecretMask,
    TraceParent,
    bind_process_fields,
    log_fields,
    set_up_logging,
)

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def line(message: str = "hello", **fields) -> dict:
    record = logging.LogRecord("worker.x", logging.INFO, "x.py", 1, message, (), None)
    for name, value in fields.items():
        setattr(record, name, value)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    return json.loads(text)


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_process_fields", {})


def test_a_line_says_what_it_is_about():
    bind_process_fields(job="job-a", attempt=2)
    bind_process_fields(step=7)
    found = line('with "quotes"\nand lines')
    assert found["message"] == 'with "quotes"\nand lines'
    assert (found["job"], found["attempt"], found["step"], found["level"]) == ("job-a", 2, 7, "INFO")
    assert found["time"].endswith("Z") and next(iter(found)) == "time"


def test_tasks_do_not_mix_their_fields():
    async def one(name: str) -> str:
        with log_fields(job=name, step=None):
            await asyncio.sleep(0)
            assert "step" not in line()
            return line()["job"]

    async def both() -> list[str]:
        return await asyncio.gather(one("a"), one("b"))

    assert asyncio.run(both()) == ["a", "b"]
    assert "job" not in line()


def test_a_traceback_is_part_of_its_line():
    try:
        raise ValueError("no")
    except ValueError:
        found = line(exc_info=sys.exc_info())
    assert found["error"].endswith("ValueError: no")


@pytest.mark.parametrize(
    "text",
    [
        *(None, "", "x", TRACE.upper(), TRACE[:-1], f"{TRACE}-more", TRACE.replace("00-", "ff-", 1)),
        *(f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"),
    ],
)
def test_what_is_no_trace_context_is_ignored(text: str | None):
    assert TraceParent.read(text) is None


def test_a_trace_context_is_read_and_a_child_stays_in_its_trace():
    found = TraceParent.read(TRACE)
    assert str(found) == TRACE
    child = TraceParent.read(str(found.child()))
    assert child.trace_id == found.trace_id and child.span_id != found.span_id
    assert TraceParent.read(f"cc{TRACE[2:]}-what-comes-later").trace_id == found.trace_id
    assert TraceParent.read(str(TraceParent.new())) is not None


def test_an_unknown_format_is_refused_by_name():
    with pytest.raises(ValueError, match="SLOTLINE_LOG_FORMAT is 'xml'"):
        set_up_logging(level="INFO", log_format="xml")


def test_a_process_that_is_asked_for_json_writes_nothing_else():
    program = (
        "import logging; from worker.contract.logs import set_up_logging, bind_process_fields;"
        "set_up_logging(level='INFO', log_format='json'); bind_process_fields(job='j');"
        "logging.getLogger('a').warning('one'); logging.getLogger('b').info('two')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    found = [json.loads(text) for text in ran.stderr.splitlines()]
    assert [(one["message"], one["job"]) for one in found] == [("one", "j"), ("two", "j")]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_who_reads_since_a_time_finds_it_at_the_begin_of_a_line_wherever_the_process_runs(log_format: str):
    program = (
        "import logging; from worker.contract.logs import set_up_logging;"
        f"set_up_logging(level='INFO', log_format='{log_format}');"
        "logging.getLogger('a').warning('late')"
    )
    before = datetime.now(UTC) - timedelta(seconds=1)  # a line's time is cut to milliseconds
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env={**os.environ, "TZ": "Asia/Tokyo"},
    )
    written = written_at(ran.stderr)
    assert written is not None, ran.stderr
    assert before <= written <= datetime.now(UTC)


def logged_to(path, mask: SecretMask, *messages: str) -> None:
    copy = LogCopy(str(path), mask)
    for message in messages:
        copy.handle(logging.LogRecord("worker.x", logging.INFO, "x.py", 1, message, (), None))
    copy.close()


def test_lines_are_copied_as_json_with_what_they_are_about_and_without_secrets(tmp_path):
    path, mask = tmp_path / "stdout", SecretMask()
    path.write_text("before\n")
    mask.hide(["correct horse"])
    bind_process_fields(job="job-a", attempt=2)
    logged_to(path, mask, "step 1", "the key is correct horse")
    before, first, second = path.read_text().splitlines()
    assert before == "before" and "horse" not in second
    assert (json.loads(first)["message"], json.loads(first)["job"]) == ("step 1", "job-a")


def test_a_reader_that_does_not_read_makes_nothing_wait(tmp_path):
    path = tmp_path / "stdout"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    logged_to(path, SecretMask(), *["x" * 1000] * 200)  # a pipe holds 64 KiB
    taken = os.read(reader, 1 << 20)
    os.close(reader)
    assert 0 < taken.count(b"x" * 1000) < 200
    with pytest.raises(OSError):
        LogCopy(str(path), SecretMask())
