"""The command in this process, against a served control plane where a test has one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from service.cli import main
from service.settings.settings import Settings
from tests.service.conftest import job_body
from tests.service.serving import Served, serve


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(Settings(data_dir=tmp_path)) as served:
        yield served


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request, tmp_path: Path) -> Run:
    """Runs the command in this process; against `served` where a test has it."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("SLOTLINE_API_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if "served" in request.fixturenames:
        monkeypatch.setenv("SLOTLINE_URL", request.getfixturevalue("served").url)

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["slotline", *map(str, arguments)])
        capsys.readouterr()
        try:
            main.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body()))
    return file
