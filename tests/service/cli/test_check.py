"""`slotline check`: fields in this process, factories in one of their own."""

from __future__ import annotations

import pytest
import yaml

from service.cli.local.check import _is_of_packages, _package_name
from tests.service.conftest import job_body
from worker.contract.tasks import JobProblem


def written(tmp_path, **changes):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_body(**changes)))
    return file


def test_wrong_fields_are_told_all_at_once_in_the_servers_words(run, tmp_path):
    result = run("check", written(tmp_path, loss="cross_entropy", pipeline={"stage": 4}, name="a b"))
    assert result.code == 1 and result.out == ""
    assert "pipeline.stage: unknown field: did you mean stages?" in result.err
    assert "loss: is the text 'cross_entropy': name what makes it by its import path" in result.err
    assert '{factory: "torch.nn.functional:cross_entropy", args: {}}' in result.err
    assert "name: is no name" in result.err and "job: " not in result.err


def test_a_folder_of_code_that_is_not_there_is_told_before_anything_is_imported(run, tmp_path):
    result = run("check", written(tmp_path, code={"working_dir": "nowhere"}))
    assert result.code == 1 and "code.working_dir" in result.err and "is no folder: correct it" in result.err


def test_places_and_modules_that_a_server_refuses_are_told_without_one(run, tmp_path):
    (tmp_path / "src" / "worker" / "inner").mkdir(parents=True)
    (tmp_path / "src" / "worker" / "inner" / "net.py").touch()
    wrong = {"code": {"working_dir": "src"}, "checkpoint": {"uri": "runs", "every_steps": 5}}
    model = {"factory": "worker.examples.gpt:build", "weights": "weights/gpt.safetensors"}
    result = run("check", written(tmp_path, model=model, **wrong))
    assert result.code == 1 and result.out == ""
    assert "checkpoint.uri 'runs': is relative" in result.err
    assert "model.weights 'weights/gpt.safetensors': is no absolute path" in result.err
    assert "code.working_dir: 'worker/inner/net.py': in a job's driver a module named 'worker'" in result.err


@pytest.mark.slow
def test_factories_are_checked_with_the_jobs_own_code_and_the_exit_code_says_the_result(run, tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "own.py").write_text("import missing_package_of_pip\ndef build(width):\n    return 1 / 0\n")
    (source / "nets.py").write_text(
        "from torch import nn\ndef build(width):\n    return nn.Linear(width, width)\n"
    )
    code = {"working_dir": "src", "pip": ["missing-package-of-pip[all]>=2"]}
    right = written(tmp_path, model={"factory": "nets:build", "args": {"width": 32}}, code=code)
    result = run("check", right)
    assert result.code == 0, result.err
    assert "ok     model: Linear with 1,056 parameters (on the meta device)" in result.out.splitlines()
    result = run("check", right, "--json", "--set", "model.args={widht: 3}", "--set", "loss.args.wieght=1")
    assert result.code == 1
    assert [problem["field"] for problem in result.json["problems"]] == ["model.args", "loss.args"]
    (source / "raises.py").write_text("def build(width):\n    return 1 / 0\n")
    result = run("check", right, "--set", "model.factory=raises:build")
    where = result.out.index('raises.py", line 2, in build')
    assert result.out.index("wrong  model: ") < where < result.out.index("ok     data: "), result.out
    result = run("check", right, "--set", "model.factory=own:build")
    assert (
        result.code == 0 and "model.factory was not checked, as code.pip is not installed here" in result.err
    )


@pytest.mark.slow
def test_epochs_and_tokens_become_steps_where_the_data_is_read(run, served, tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 4 + b"x")
    data = {
        "factory": "worker.examples.text:ByteWindows",
        "args": {"length": 32, "path": str(tmp_path / "text")},
    }
    training = {"epochs": 3, "global_batch": 8, "microbatches": 4}
    optimizer = {"factory": "torch.optim:SGD", "schedule": {"warmup": 2, "decay": "linear"}}
    file = written(tmp_path, data=data, training=training, optimizer=optimizer)
    result = run("check", file)
    assert result.code == 0, result.err
    assert "ok     training: 12 steps" in result.out, "32 windows, in batches of 8, three times"
    result = run("submit", file, "--json")
    assert result.code == 0, result.err
    assert result.json["spec"]["training"]["steps"] == 12 and "epochs" not in result.json["spec"]["training"]
    assert result.json["spec"]["optimizer"]["schedule"]["args"] == {
        "steps": 12,
        "warmup": 2,
        "decay": "linear",
    }
    shown = run("job", result.json["id"], "--spec")
    assert "steps: 12" in shown.out and "warmup_decay" in shown.out
    result = run("submit", file, "--json", "--set", "data.args.path=/nowhere/text")
    assert result.code == 1 and "no text in '/nowhere/text'" in result.err
    assert "give training.steps where only the cluster has the data" in result.err


def test_only_modules_of_the_named_packages_are_excused():
    packages = {_package_name(text) for text in ("einops", "my-pkg[extra]==1.0", "other>=2")}
    assert packages == {"einops", "my_pkg", "other"}
    missing = JobProblem(
        "model.factory", "factory 'x:y': there is no module 'my_pkg'; check", "MODEL_BUILD_FAILED"
    )
    assert _is_of_packages(missing, packages) and not _is_of_packages(missing, {"einops"})
    wrong = JobProblem("model.args", "has no argument 'einops'", "MODEL_BUILD_FAILED")
    assert not _is_of_packages(wrong, packages)
