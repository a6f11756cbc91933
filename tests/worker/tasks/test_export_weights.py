"""The process that exports weights: its answer, whatever happens in it."""

from __future__ import annotations

import json

import pytest

from tests.worker.checkpoint.test_export import odd, saved
from worker.contract.tasks import EXPORT_REQUEST_VARIABLE, EXPORT_RESULT_MARK, ExportRequest
from worker.tasks import export_weights


def answered(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    """What stands behind the mark in the last line."""
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(EXPORT_RESULT_MARK)
    return json.loads(line.removeprefix(EXPORT_RESULT_MARK))


def test_what_was_written_is_answered(tmp_path, monkeypatch, capsys):
    saved(str(tmp_path), odd(1), step=2)
    request = ExportRequest(str(tmp_path), "job", target=str(tmp_path / "out"))
    monkeypatch.setenv(EXPORT_REQUEST_VARIABLE, request.to_json())
    assert export_weights.main() == 0
    assert answered(capsys)["step"] == 2 and (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("steps", [[], [2]])
def test_a_refusal_and_an_error_that_nobody_foresaw_are_answered_too(tmp_path, monkeypatch, capsys, steps):
    for step in steps:
        saved(str(tmp_path), odd(1), step=step)
    monkeypatch.setenv(EXPORT_REQUEST_VARIABLE, ExportRequest(str(tmp_path), "job").to_json())

    def broken(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker.checkpoint.weights.export_safetensors", broken)
    assert export_weights.main() == 1
    expected = "OSError: [Errno 28] No space left on device (on " if steps else "there is no "
    assert expected in str(answered(capsys)["failed"])
