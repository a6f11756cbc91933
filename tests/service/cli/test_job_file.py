"""A job's file: what is no job is refused before anything is sent, code is uploaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from service.cli.job_file import read_spec
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


@pytest.mark.parametrize("verb", ["submit", "plan", "verify", "reshard"])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("name: a\ntraining: {steps: 1}\ntraining: {seed: 2}\n", "training stands twice, in lines 2 and 3"),
        ('{"name": "a", "model": {"args": {"lr": 1, "lr": 2}}}', "lr stands twice"),
        ("name: a\nmodel:\n\tfactory: x\n", "line 3, column 1: indent with blanks"),
        ("[" * 100_000, "nested too deeply"),
        ("name: [a\n", "neither YAML nor JSON"),
    ],
)
def test_a_file_that_says_two_things_or_nothing_is_refused_in_one_line(
    run: Run, tmp_path: Path, verb: str, content: str, told: str
):
    """Of two sections of one name YAML keeps the last, and nobody would hear of the other."""
    file = tmp_path / "job.yaml"
    file.write_text(content)
    result = run(verb, file)
    assert (result.code, result.out) == (1, "")
    assert told in result.err and str(file) in result.err and len(result.err.splitlines()) == 1


def test_anchors_may_be_overridden_and_json_may_be_indented_by_tabs(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.json"
    file.write_text("\ufeff" + json.dumps(job_body(), indent="\t"), "utf-8")
    assert run("submit", file, "--json").json["state"]
    text = "base: &base {<<: &far {lr: 1}, lr: 2}\nmore: {<<: *base, lr: 3}\n"
    file.write_text(text)
    assert read_spec(file) == {"base": {"lr": 2}, "more": {"lr": 3}}


def test_a_missing_file_is_named_by_every_verb_that_reads_one(run: Run, tmp_path: Path):
    for verb in ("submit", "plan", "verify", "reshard"):
        result = run(verb, tmp_path / "none.yaml")
        assert result.code == 1 and result.err.startswith("error: cannot read"), result.err


def test_the_refused_value_is_named_with_its_field(run: Run, served: Served, tmp_path: Path):
    file = tmp_path / "job.yaml"
    body = job_body()
    file.write_text(yaml.safe_dump(body | {"training": body["training"] | {"steps": "many"}}))
    assert 'training.steps: Input should be a valid integer, not "many"' in run("submit", file).err.replace(
        ", unable to parse string as an integer", ""
    )
    file.write_text(yaml.safe_dump(body | {"model": {"factory": "mine.build"}}))
    assert 'write package.module:attribute, not "mine.build"' in run("submit", file).err


def test_states_are_taken_in_any_case(run: Run, served: Served):
    assert run("jobs", "--state", "failed").out.strip() == "no jobs"
