"""The clients of CUDA MPS, which a node asks to end their work before their processes are killed."""

from __future__ import annotations

import pytest

from worker.machine.node import end_mps_clients

CONTROL = """#!/bin/sh
read command
echo "$command" >> {said}
case "$command" in
  get_server_list) printf '101\\n202\\n' ;;
  "get_client_list 101") printf '7\\n8\\n' ;;
  "get_client_list 202") printf '90\\n' ;;
  terminate_client*) {terminate} ;;
  *) exit 3 ;;
esac
"""


@pytest.fixture
def mps(tmp_path, monkeypatch):
    """Puts a control program with two servers on the path; the commands that it was given."""
    said = tmp_path / "said"

    def install(terminate="true"):
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(CONTROL.format(said=said, terminate=terminate))
        control.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return lambda: said.read_text().splitlines()

    return install


def test_those_of_the_processes_that_are_clients_are_ended_by_their_own_server(mps):
    said = mps()
    assert end_mps_clients([90, 8, 555]) == [8, 90]
    assert [line for line in said() if line.startswith("terminate")] == [
        "terminate_client 101 8",
        "terminate_client 202 90",
    ]


def test_where_no_mps_runs_nothing_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert end_mps_clients([1, 2]) == []


def test_an_mps_that_answers_with_an_error_keeps_nobody_from_being_killed(mps, caplog):
    mps(terminate="exit 9")
    assert end_mps_clients([7]) == []
    assert "was not asked to end its clients [7]" in caplog.text
