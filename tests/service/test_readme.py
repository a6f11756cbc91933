"""What the README tells people to type is what the code takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from typer.main import get_command

from service.cli.main import app
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec import load_spec
from service.settings.settings import Settings
from service.spec.job import JobSpec
from service.spec.states import JobState

ROOT = Path(__file__).parents[2]
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "deploy/README.md")}
README = TEXTS["README.md"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_job_of_the_readme_is_one_that_the_server_takes():
    (text,) = blocks("yaml")
    spec = JobSpec.model_validate(yaml.safe_load(text))
    assert spec.optimizer.schedule is not None and spec.accelerators == 4


@pytest.mark.parametrize("section", ["code", "checkpoint", "retry"])
def test_the_sections_that_the_readme_shows_are_sections_of_a_job(section: str):
    (found,) = re.findall(rf"`({section}: {{.*?}})`", README)
    fields = yaml.safe_load(found)[section]
    kind = {name: field.annotation for name, field in JobSpec.model_fields.items()}[section]
    known = next(part for part in getattr(kind, "__args__", (kind,)) if hasattr(part, "model_fields"))
    assert fields.keys() <= known.model_fields.keys()
    if section == "retry":
        assert known.model_validate(fields) == known(), "the README shows the defaults"


def test_every_field_of_a_job_is_told_and_every_field_that_is_told_is_one_of_a_job():
    fields = set(_fields(JobSpec))
    untold = [field for field in sorted(fields) if not re.search(rf"\b{field.rpartition('.')[2]}\b", README)]
    assert untold == []
    sections = "|".join(field for field in fields if "." not in field)
    told = set(re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)[`: ]", README))
    assert len(told) > 20 and told <= fields


def test_the_pipeline_of_the_readme_is_planned_under_its_bound():
    (text,) = blocks("json")
    plan = make_plan(load_spec(json.loads(text)), budget_s=1)
    assert plan.makespan_s >= plan.lower_bound_s > 0


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_and_option_that_is_told_exists(name: str):
    commands = get_command(app).commands
    told = re.findall(r"slotline ([a-z]+)\b(?! deploy)([^`\n#|]*)", "\n".join(_code(TEXTS[name])))
    assert told
    for verb, rest in told:
        if verb == "deploy":
            continue
        assert verb in commands, verb
        command = commands[verb]
        if hasattr(command, "commands"):
            command = command.commands[rest.split()[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= options, f"slotline {verb} {rest}"


@pytest.mark.parametrize("name", TEXTS)
def test_every_setting_that_is_told_exists_with_the_default_that_is_told(name: str):
    known = {f"SLOTLINE_{field.upper()}" for field in Settings.model_fields} | {"SLOTLINE_URL"}
    for test in (ROOT / "tests").rglob("*.py"):  # what tests alone ask for
        known |= set(re.findall(r'environ(?:\.get\(|\[)"(SLOTLINE_[A-Z_]+[A-Z])"', test.read_text()))
    assert set(re.findall(r"SLOTLINE_[A-Z_]+[A-Z]", TEXTS[name])) <= known
    defaults = dict(re.findall(r"`SLOTLINE_(KEEP_\w+_DAYS)` \|.*? (\d+) days", TEXTS[name]))
    for setting, days in defaults.items():
        assert Settings.model_fields[setting.lower()].default == float(days)
    assert len(defaults) == (4 if name == "README.md" else 0)


def test_every_state_is_told():
    assert all(f"`{state}`" in README for state in JobState)


def test_every_file_and_target_that_is_told_exists():
    for path in re.findall(r"`((?:service|worker|tests|deploy|dashboards)/[\w./*-]+)`", README):
        assert list(ROOT.glob(path)), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert f"\n{target}:" in makefile, target


def test_the_walk_through_the_house_names_paths_that_exist():
    """Ten stations of one job, from the file that a user types to what is left when it is over."""
    (house,) = re.findall(r"^## The house\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^\d+\. ", house, re.MULTILINE)) == 10
    told = re.findall(r"`([\w.]+/[\w./-]*)`", house)
    assert [path for path in told if not (ROOT / path).exists()] == []
    assert all((ROOT / path).is_dir() for path in told if path.endswith("/"))
    assert {path.partition("/")[0] for path in told} == {"service", "worker", "tests", "deploy", "dashboards"}


def _code(text: str) -> list[str]:
    """Lines of shell blocks, and what stands in backticks."""
    shell = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    return [*shell, *re.findall(r"`([^`\n]+)`", text)]


def _fields(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Dotted names of the fields of `model` and of the models in it."""
    for name, field in model.model_fields.items():
        yield f"{path}{field.alias or name}"
        for inner in _models(field.annotation):
            yield from _fields(inner, f"{path}{field.alias or name}.")


def _models(kind: Any) -> list[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [model for part in get_args(kind) for model in _models(part)]
