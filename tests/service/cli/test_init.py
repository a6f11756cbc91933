"""`slotline init`: every template is a right job file, and trains."""

from __future__ import annotations

import re
import sys

import pytest
from jsonschema import Draft202012Validator

from service.cli.job_file import read_spec
from service.cli.local.check import Template, check_job_file, job_schema
from service.cli.local.plan import validated_job
from tests.missing import needs_libraries

TEMPLATES = [template.value for template in Template]
LAST_OF_THE_FIRST = 3


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_job_file_that_editors_and_server_take(run, tmp_path, template):
    result = run("init", template, tmp_path / "begin", "--json")
    files = [str(tmp_path / "begin" / "job.yaml"), str(tmp_path / "begin" / "src" / "training.py")]
    assert (result.code, result.json) == (0, {"files": files})
    spec = read_spec(tmp_path / "begin" / "job.yaml")
    assert list(Draft202012Validator(job_schema()).iter_errors(spec)) == []
    job, folder = validated_job(spec, tmp_path / "begin" / "job.yaml")
    assert folder == tmp_path / "begin" / "src" and job["name"] == template
    assert (job["pipeline"]["stages"], job["resources"]["meshes"]) == (2, 2)


@pytest.mark.parametrize("template", sorted({*Template} - {Template.OWN}))
def test_libraries_that_a_template_needs_and_are_not_here_are_named_with_the_command(
    run, tmp_path, monkeypatch, template
):
    monkeypatch.setattr("service.cli.local.check.find_spec", lambda library: None)
    told = run("init", template, tmp_path).err
    written = (tmp_path / "job.yaml").read_text()
    (needed,) = re.findall(r"# pip: \[(.*)\]", written)
    assert f"next: pip install {needed.replace(',', '')}; slotline check" in " ".join(told.split())
    monkeypatch.setattr("service.cli.local.check.find_spec", lambda library: library)
    assert "next: slotline check" in " ".join(run("init", template, tmp_path / "again").err.split())


def test_nothing_is_overwritten_and_an_unknown_template_is_told(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("init", "own").out.splitlines() == ["own/job.yaml", "own/src/training.py"]
    (tmp_path / "own" / "job.yaml").write_text("mine")
    again = run("init", "own")
    assert again.code == 1 and "exists, and is not overwritten: name another folder" in again.err
    assert (tmp_path / "own" / "job.yaml").read_text() == "mine"
    unknown = run("init", "audio")
    assert unknown.code != 0 and "'language', 'vision'" in unknown.err


@pytest.mark.slow
@needs_libraries("transformers", "diffusers", "peft")
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_checked_without_a_finding_and_its_loss_falls(run, tmp_path, template, monkeypatch):
    from tests.worker.workers import Workers

    assert run("init", template, tmp_path).code == 0
    spec = read_spec(tmp_path / "job.yaml")
    check = check_job_file(spec, tmp_path / "job.yaml")
    assert (check.problems, check.notes) == ((), ())
    monkeypatch.syspath_prepend(str(tmp_path / "src"))  # what code.working_dir does on a worker
    monkeypatch.delitem(sys.modules, "training", raising=False)
    job, _ = validated_job({**spec, "training": {**spec["training"], "steps": 30}}, tmp_path / "job.yaml")
    try:
        with Workers(job) as workers:
            losses = workers.losses(range(1, 31))
    finally:
        sys.modules.pop("training", None)
    first, last = sum(losses[:LAST_OF_THE_FIRST]), sum(losses[-LAST_OF_THE_FIRST:])
    assert last < 0.95 * first, losses
