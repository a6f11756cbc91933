"""A job's file: what is no job is refused before anything is sent, code is uploaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served, until


def test_a_folder_of_code_is_uploaded_with_the_job(run: Run, served: Served, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("x = 1\n")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(code={"working_dir": "mine"})))
    job = run("submit", file, "--json").json
    assert job["spec"]["code"]["working_dir"].startswith("package:")
    until(lambda: len(served.cluster.packages) == 1)
    file.write_text(yaml.safe_dump(job_body(code={"working_dir": "nowhere"})))
    refused = run("submit", file)
    assert refused.code == 1 and "is no folder" in refused.err


@pytest.mark.parametrize("content", ["", "[1]", "a: [", "\x00"])
def test_a_file_that_is_no_job_is_refused_without_a_server(run: Run, tmp_path: Path, content: str):
    file = tmp_path / "job.yaml"
    file.write_text(content)
    result = run("submit", file)
    assert (result.code, result.out) == (1, "") and str(file) in result.err.replace("\n", "")
    assert run("submit", tmp_path / "none.yaml").code == 1


def test_numbers_in_yaml_are_numbers_as_people_write_them(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    text = (
        yaml.safe_dump(job_body())
        + "optimizer: {factory: 'a:b', args: {lr: 1e-3, eps: 1.e-8, k: +2E5, n: 1e3x}}\n"
    )
    file.write_text(text)
    arguments = run("submit", file, "--json").json["spec"]["optimizer"]["args"]
    assert arguments == {"lr": 0.001, "eps": 1e-8, "k": 2e5, "n": "1e3x"}


@pytest.mark.parametrize("value", ["2020-01-01", ".nan", ".inf", "!!binary aGVsbG8="])
def test_values_that_json_has_not_are_named_before_anything_is_sent(run: Run, tmp_path: Path, value: str):
    file = tmp_path / "job.yaml"
    file.write_text(f"model: {{factory: 'a:b', args: {{x: {value}}}}}\n")
    result = run("submit", file)
    assert (result.code, result.out) == (1, "") and "JSON has not" in result.err.replace("\n", " ")
