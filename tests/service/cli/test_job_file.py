"""A job's file: what is no job is refused before anything is sent, code is uploaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from service.cli.job_file import job_file_text, read_spec, spec_differences, with_changes
from service.cli.output import CliError
from service.spec.job import JobSpec
from tests.polling import until
from tests.service.cli.conftest import Run
from tests.service.conftest import job_body
from tests.service.serving import Served


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


@pytest.mark.slow
def test_fields_are_changed_on_the_way_and_a_job_writes_the_file_that_submits_it_again(
    run: Run, served: Served, job_file: Path, tmp_path: Path
):
    first = run("submit", job_file, "--json").json
    changes = ("training.steps=1000", "optimizer.args.lr=1e-4", "optimizer.factory=torch.optim:SGD")
    second = run("submit", job_file, *(part for one in changes for part in ("--set", one)), "--json").json
    assert (second["spec"]["training"]["steps"], second["spec"]["optimizer"]["args"]) == (1000, {"lr": 1e-4})
    (tmp_path / "again.yaml").write_text(run("job", second["id"], "--spec").out)
    again = run("submit", tmp_path / "again.yaml", "--json").json
    assert again["spec"] == second["spec"] and again["id"] != second["id"]
    differences = run("diff", first["id"], second["id"], "--json").json
    assert differences["training.steps"] == {first["id"]: "10", second["id"]: "1000"}
    assert {path.split(".")[0] for path in differences} == {"training", "optimizer"}
    assert "training.steps" in run("diff", first["id"], second["id"]).out
    assert run("diff", second["id"], again["id"]).out.strip() == "no field differs"


@pytest.mark.slow
def test_a_stored_job_is_written_and_compared_as_users_write_its_meshes(
    run: Run, served: Served, tmp_path: Path
):
    files, ids = [tmp_path / "a.yaml", tmp_path / "b.json"], []
    for dp in (1, 2):
        file = tmp_path / f"dp{dp}.yaml"
        file.write_text(yaml.safe_dump(job_body(parallelism={"pp": 4, "dp": dp, "tp": 1})))
        ids.append(run("submit", file, "--json").json["id"])
    files[0].write_text(run("job", ids[1], "--spec").out)
    files[1].write_text(run("job", ids[1], "--spec", "--json").out)
    for file in files:
        assert "workers_per_mesh" not in file.read_text()
        again = run("submit", file, "--json").json
        assert again["spec"]["resources"]["workers_per_mesh"] == 2
        assert run("diff", ids[1], again["id"]).out.strip() == "no field differs"
    differences = run("diff", *ids, "--json").json
    assert differences["parallelism.dp"] == {ids[0]: None, ids[1]: "2"}
    retired = tmp_path / "retired.yaml"
    retired.write_text(yaml.safe_dump(job_body(resources={"workers_per_mesh": 2})))
    for verb in ("submit", "check"):
        refused = run(verb, retired)
        words = "resources.workers_per_mesh is no field any more: write parallelism: {pp: 4, dp: 2, tp: 1}"
        assert refused.code == 1 and words in refused.err.replace("\n", " ")


def test_changes_reach_into_lists_and_make_what_is_not_there():
    spec = {"resources": {"meshes": [{"workers": 1}, {"workers": 1}]}, "name": "a"}
    changed = with_changes(
        spec, ["resources.meshes.1.workers=2", "labels.team=nlp", "name=b=c", "name2=[1, 2]"]
    )
    assert changed["resources"]["meshes"] == [{"workers": 1}, {"workers": 2}]
    assert (changed["labels"], changed["name"], changed["name2"]) == ({"team": "nlp"}, "b=c", [1, 2])
    assert spec == {"resources": {"meshes": [{"workers": 1}, {"workers": 1}]}, "name": "a"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps", "write path=value"),
        ("=3", "write path=value"),
        ("a..b=3", "write path=value"),
        ("name.x=3", "name is 'small', which has no 'x'"),
        ("resources.meshes.2.workers=3", "resources.meshes is a list of 2, which has no '2'"),
        ("name=[1", "is no value of YAML"),
        ("name={a: 1, a: 2}", "stands twice"),
        ("name=2024-01-01", "is no value of YAML that JSON has"),
        ("name=.nan", "is no value of YAML that JSON has"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_by_its_path(change: str, words: str):
    with pytest.raises(CliError) as refused:
        with_changes({"name": "small", "resources": {"meshes": [{}, {}]}}, [change])
    assert words in str(refused.value)


def test_a_file_of_a_stored_job_has_no_defaults_and_one_of_another_version_is_written_whole():
    body = job_body()
    stored = JobSpec.model_validate(body).model_dump(mode="json")
    text = job_file_text(stored)
    assert JobSpec.model_validate(yaml.safe_load(text)) == JobSpec.model_validate(body)
    assert len(text.splitlines()) < len(json.dumps(stored, indent=1).splitlines()) / 2
    newer = {**stored, "a_new_field": 1}
    meshes = {name: stored["resources"][name] for name in ("meshes", "shard", "tensor_plan", "device")}
    resources = meshes | {"memory_per_worker": "auto", "accelerator": None, "spares": 0}
    assert yaml.safe_load(job_file_text(newer)) == {**newer, "resources": resources}
    assert spec_differences(stored, newer) == [("a_new_field", None, "1")]
