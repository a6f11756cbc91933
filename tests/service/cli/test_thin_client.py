"""What the measurement of the thin client counts: bytes once, runs by their median, a failing command by its message."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from service.scheduler.problem.spec_checks import load_spec
from tests.benchmarks.thin_client import (
    EXTRAS,
    MICROBATCHES,
    STAGES,
    Cost,
    Installed,
    cost_of,
    folder_size,
    pipeline_spec,
    table,
)
from tests.extras import PROJECT


def test_a_file_of_two_names_is_counted_once_and_links_lead_nowhere(tmp_path: Path):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "inside" / "a", tmp_path / "b")
    outside = tmp_path.parent / "outside"
    outside.write_bytes(b"x" * 5000)
    (tmp_path / "link").symlink_to(outside)
    assert folder_size(tmp_path) == 1000 + len(str(outside))


def test_the_first_run_fills_caches_and_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock of ours: the first run takes 100 s, the others 1 s and 2 s."""
    ticks = iter([0.0, 100.0, 100.0, 101.0, 101.0, 103.0])
    monkeypatch.setattr("tests.benchmarks.thin_client.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    code = "open('ran', 'a').write('x')"
    cost = cost_of([sys.executable, "-S", "-c", code], tmp_path, runs=2)
    assert (tmp_path / "ran").read_text() == "xxx" and cost.wall_s == 1.5 and cost.cpu_s > 0


def test_a_command_that_fails_is_not_measured(tmp_path: Path):
    with pytest.raises(RuntimeError, match="ended with 3: no way"):
        cost_of([sys.executable, "-c", "import sys; print('no way', file=sys.stderr); sys.exit(3)"], tmp_path)


def test_the_spec_is_a_pipeline_of_its_size_and_the_extras_are_those_of_the_package():
    spec = load_spec(json.loads(json.dumps(pipeline_spec())))
    assert (len(spec.stages), spec.microbatches, spec.schedule) == (STAGES, MICROBATCHES, "1f1b")
    assert {*EXTRAS} - {""} <= PROJECT["optional-dependencies"].keys()


def test_the_table_has_a_row_for_each_environment():
    cost = Cost(0.25, 0.2)
    rows = [Installed("", 31_000_000, 9.6, cost, None), Installed("server", 420_000_000, 60.0, cost, cost)]
    assert table(rows).splitlines()[2:] == [
        "| `.` | 31 MB | 10 s | 0.25 s (0.20 s of a processor) | – |",
        "| `.[server]` | 420 MB | 60 s | 0.25 s (0.20 s of a processor) | 0.25 s (0.20 s of a processor) |",
    ]
