"""Whoever asks for a finished job, over the API or by the command, has all that its driver reported."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from service.client.client import Client
from service.spec.states import JobState
from tests.finished_job import PROFILED, FinishedJob, finished_job, finished_job_of  # noqa: F401 (a fixture)
from tests.service.api.pages.seed import SLOWER, STAGES, STEPS
from tests.service.cli.conftest import Run, run  # noqa: F401 (a fixture)
from tests.service.serving import Served, serve


@pytest.fixture
def served(finished_job: FinishedJob) -> Iterator[Served]:  # noqa: F811
    with serve(finished_job.settings) as served:
        yield served


def test_the_client_reads_every_measurement_of_it(served: Served, finished_job: FinishedJob):  # noqa: F811
    with Client(served.url, token="") as client:
        job = client.job(finished_job.id)
        assert (job.state, job.progress.step) == (JobState.SUCCEEDED, STEPS)
        assert job.checkpoint.uri == finished_job.checkpoint_uri
        assert [step.step for step in client.steps(finished_job.id)] == [*range(1, STEPS + 1)]
        assert [one.step for one in client.evaluations(finished_job.id)] == [0, 20, 40]
        assert client.plan(finished_job.id).plan["makespan_s"] == finished_job.plan.makespan_s
        timeline = client.timeline(finished_job.id, PROFILED[0])
        planned = len(finished_job.plan.slots)
        assert len(timeline.measured.slots) == planned + STAGES, "and a STEP on each mesh"
        assert max(slot.end_s for slot in timeline.measured.slots) == pytest.approx(
            finished_job.plan.makespan_s * SLOWER + 0.002
        )
        spans = [
            one for one in json.loads(client.chrome_trace(finished_job.id))["traceEvents"] if one["ph"] == "X"
        ]
        assert len(spans) >= planned
        kinds = [event.kind for event in client.events(finished_job.id)]
        assert "checkpoint" in kinds and kinds[-1] == "state"


@pytest.mark.slow
def test_the_command_tells_why_its_step_took_so_long(
    run: Run,  # noqa: F811
    served: Served,
    finished_job: FinishedJob,  # noqa: F811
):
    result = run("why", finished_job.id, "--json")
    assert result.code == 0, result.err
    found = result.json
    assert (found["job_id"], found["step"]) == (finished_job.id, PROFILED[-1])
    assert found["planned_step_s"] == pytest.approx(finished_job.plan.makespan_s + 0.0025)


async def test_what_a_test_does_to_its_copy_no_other_sees(
    finished_job: FinishedJob,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
):
    (finished_job.settings.data_dir / "left").touch()
    other = finished_job_of(tmp_path_factory, tmp_path_factory.mktemp("other"))
    assert other.id == finished_job.id and other.settings.data_dir != finished_job.settings.data_dir
    assert not (other.settings.data_dir / "left").exists()
