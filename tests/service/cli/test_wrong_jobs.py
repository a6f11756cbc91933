"""Job files with one mistake each: the answer names the field, the value and the way out, and no accelerator was taken."""

from __future__ import annotations

import pytest

from tests.benchmarks.wrong_jobs import RIGHT, WRONG_JOBS, WrongJob
from tests.polling import until
from tests.service.test_readme import README


def rows(*, imports: bool = False, asks: bool = False) -> list:
    chosen = [job for job in WRONG_JOBS if job.imports == imports and job.asks == asks]
    return [pytest.param(job, id=job.mistake.replace(" ", "-")) for job in chosen]


def written(tmp_path, job: WrongJob):
    file = tmp_path / "job.yaml"
    file.write_text(job.text)
    return file


@pytest.mark.parametrize("job", rows())
def test_a_wrong_field_is_answered_without_a_server(run, tmp_path, job):
    result = run("check", written(tmp_path, job))
    assert result.code == 1 and result.out == ""
    assert job.answer in result.err


@pytest.mark.slow
@pytest.mark.parametrize("job", rows(imports=True))
def test_a_wrong_factory_is_answered_without_a_server_and_without_an_accelerator(run, tmp_path, job):
    result = run("check", written(tmp_path, job))
    assert (result.code == 0) is job.taken, result.out + result.err
    assert job.answer in result.out


@pytest.mark.parametrize("job", rows(asks=True))
def test_what_only_a_server_knows_is_answered_when_the_job_is_submitted(run, served, tmp_path, job):
    result = run("submit", written(tmp_path, job))
    if result.code == 0:  # it waits: accelerators may be added
        job_id = result.out.split()[0]
        until(lambda: job.answer in run("job", job_id).out)
    else:
        assert job.answer in result.err


def test_each_file_is_the_first_one_of_the_readme_with_one_change():
    assert len(WRONG_JOBS) == 18 and f"```yaml\n{RIGHT}```" in README
    for job in WRONG_JOBS:
        assert job.text != RIGHT and (not job.before or RIGHT.count(job.before) == 1)
