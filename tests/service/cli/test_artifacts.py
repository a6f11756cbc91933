"""`slotline artifacts`, `slotline usage`, and deleting checkpoints, which the cluster does."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from service.orchestrator.decisions.attempt_lifecycle import RayJob, RayState
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.cli.test_weights import trained
from tests.service.serving import Served, report
from worker.contract.checkpoint_files import step_uri, stored_bytes
from worker.contract.tasks import REMOVAL_REQUEST_VARIABLE, REMOVAL_RESULT_MARK, removal_requests_from_json
from worker.tasks.remove import remove_artifacts


def works(served: Served) -> threading.Thread:
    """Does once what the process of the cluster would do, when it is asked for."""
    before = set(served.cluster.submissions)

    def work() -> None:
        until(lambda: bool(set(served.cluster.submissions) - before))
        (run_id,) = set(served.cluster.submissions) - before
        asked = removal_requests_from_json(served.cluster.submissions[run_id].env[REMOVAL_REQUEST_VARIABLE])
        answer = {"jobs": [asdict(remove_artifacts(one)) for one in asked]}
        served.cluster.logs[run_id] = f"{REMOVAL_RESULT_MARK}{json.dumps(answer)}\n"
        served.cluster.states[run_id] = RayJob(RayState.SUCCEEDED)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.slow
def test_what_a_job_has_left_is_shown_counted_and_deleted(run: Run, served: Served, tmp_path: Path):
    job_id, _ = trained(run, served, tmp_path)
    base = str(tmp_path / "runs")
    assert run("export", job_id, "-o", tmp_path / "runs" / job_id / "export-step-0000000004").code == 0
    size = stored_bytes(base, job_id)
    assert size > 1000
    report(served, job_id, 1, checkpoint=(4, step_uri(base, job_id, 4)), stored_bytes=size)
    shown = run("artifacts", job_id)
    assert "export-step-0000000004" in shown.out and "checkpoints and exports take" in shown.out, shown.err
    assert run("artifacts", job_id, "--json").json["stored_bytes"] == size
    used = run("usage", "--json").json
    assert used[0]["storage_bytes"] == used[0]["total_bytes"] == size and "(nobody)" in run("usage").out
    working = works(served)
    gone = run("checkpoints", job_id, "--delete", 2, "--json")
    working.join(60)
    assert gone.code == 0 and gone.json["left"] == [4] and "the cluster deletes" in gone.err, gone.err
    refused = run("checkpoints", job_id, "--delete", 4)
    assert refused.code == 1 and "would go on from this checkpoint" in refused.err
    working = works(served)
    export = run("artifacts", job_id, "--delete", "export-step-0000000004")
    working.join(60)
    assert export.code == 0 and "deleted: export-step-0000000004" in export.out, export.err
    assert [one["step"] for one in run("checkpoints", job_id, "--json").json["items"]] == [4]
