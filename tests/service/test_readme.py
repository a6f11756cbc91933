"""Proves the READMEs: whatever they tell people to type is taken by the code, and their lists are complete."""

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

from service.api.auth import LEAST_ROLE
from service.cli.main import app
from service.scheduler.planner import make_plan
from service.scheduler.problem.spec_checks import load_spec
from service.settings.settings import Settings
from service.spec.job import JobSpec, SubmittedJob
from service.spec.short_forms import MESH_RANGE_FIELD, STORED_MESH_FIELDS
from service.spec.states import JobState
from tests.benchmarks.first_ten_minutes import JOB, SCENES
from tests.benchmarks.first_ten_minutes import RESULT as FILM
from tests.service.settings_table import with_table
from worker.contract.reasons import Reason

ROOT = Path(__file__).parents[2]
ROOMS = ("service", "worker", "tests", "deploy", "dashboards")
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        ROOT / "README.md",
        *(path for room in ROOMS for path in sorted((ROOT / room).rglob("README.md"))),
    )
}
MOST_LINES, MOST_CHARACTERS = 300, 120
README, SERVICE, WORKER = TEXTS["README.md"], TEXTS["service/README.md"], TEXTS["worker/README.md"]
SETTINGS = TEXTS["service/settings/README.md"]
OPEN_ROUTES = dict.fromkeys(
    [
        *(("GET", path) for path in ("/healthz", "/readyz", "/metrics", "/api/v1/version")),
        *(("GET", "/login"), ("GET", "/logout"), ("POST", "/logout")),
    ],
    "open",
)
PARTS_OF_PAGES = {
    ("GET", path)
    for path in (
        "/jobs/{job_id}/choice",
        "/jobs/{job_id}/gaps",
        "/jobs/{job_id}/memory",
        "/jobs/{job_id}/profiled-steps",
    )
}
"""Routes that the pages load by themselves: no list for people has them."""


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def section(title: str, text: str) -> str:
    """The text below a heading, up to the next one of the same level or a higher one."""
    level = title.split(" ")[0]
    (body,) = re.findall(
        rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return body


def first_cells(text: str) -> list[str]:
    """The first cell of each row of a table that begins with a word in backticks."""
    return [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]


def test_the_first_job_has_eight_lines_and_is_one_that_the_server_takes():
    (text,) = blocks("yaml", README)
    assert len(text.splitlines()) == 8
    assert SubmittedJob.model_validate(yaml.safe_load(text)).accelerators == 4


def test_the_whole_job_of_the_readme_is_one_that_the_server_takes():
    (text,) = blocks("yaml", WORKER)
    spec = SubmittedJob.model_validate(yaml.safe_load(text))
    assert spec.optimizer.schedule is not None and spec.accelerators == 4


def test_the_trackers_of_the_readme_are_ones_that_the_server_takes():
    (whole,), (tracking,) = blocks("yaml", WORKER), blocks("yaml", TEXTS["worker/driver/tracking/README.md"])
    trackers = JobSpec.model_validate({**yaml.safe_load(whole), **yaml.safe_load(tracking)}).tracking
    assert [tracker.to for tracker in trackers] == ["tensorboard", "wandb", "mlflow", "trackio", None]


@pytest.mark.parametrize("name", ["code", "checkpoint", "retry"])
def test_the_sections_that_the_readme_shows_are_sections_of_a_job(name: str):
    (text,) = re.findall(rf"`({name}: {{.*?}})`", WORKER)
    fields = yaml.safe_load(text)[name]
    kind = {field: info.annotation for field, info in JobSpec.model_fields.items()}[name]
    known = next(part for part in getattr(kind, "__args__", (kind,)) if hasattr(part, "model_fields"))
    assert fields.keys() <= known.model_fields.keys()
    if name == "retry":
        assert known.model_validate(fields) == known(), "the README shows the defaults"


def test_the_table_of_fields_has_every_field_of_a_job_and_no_other():
    """Fields of `evaluation.data` are those of `data`."""
    stored = {f"resources.{name}" for name in (MESH_RANGE_FIELD, *STORED_MESH_FIELDS)}
    fields = {
        *_fields(JobSpec),
        "parallelism",
        *(f"parallelism.{name}" for name in ("pp", "dp", "tp")),
    } - stored
    leaves = {field for field in fields if not any(other.startswith(f"{field}.") for other in fields)}
    cells = first_cells(section("### All fields", WORKER))
    listed = {field for cell in cells for field in re.findall(r"`([a-z0-9_.]+)`", cell)}
    assert {field for field in leaves - listed if not field.startswith("evaluation.data.")} == set()
    assert listed <= fields
    sections = "|".join(field for field in fields if "." not in field)
    texts = "\n".join(text for name, text in TEXTS.items() if name.startswith("worker/"))
    mentioned = set(re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)[`: ]", texts))
    assert len(mentioned) > 20 and mentioned <= fields


def test_the_pipeline_of_the_readme_is_planned_under_its_bound():
    (text,) = blocks("json", TEXTS["service/scheduler/README.md"])
    plan = make_plan(load_spec(json.loads(text)), budget_s=1)
    assert plan.makespan_s >= plan.lower_bound_s > 0


@pytest.mark.parametrize("name", TEXTS)
def test_a_readme_is_read_in_one_sitting(name: str):
    assert len(TEXTS[name].splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", TEXTS)
def test_lines_of_text_are_narrow_but_for_what_cannot_be_broken(name: str):
    text = re.sub(r"^```.*?^```|^\|.*?$|^<.*?$", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    # a link or a piece of code in one line is no longer a line that could be narrower
    whole = re.compile(r"\s*(?:[*-] )?(?:`[^`]*`|!?\[[^\]]*\]\([^)]*\))\S*")
    wide = [line for line in text.splitlines() if len(line) > MOST_CHARACTERS and not whole.fullmatch(line)]
    assert wide == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_and_option_that_is_shown_exists(name: str):
    group = get_command(app)
    commands = {verb: group.get_command(None, verb) for verb in group.list_commands(None)}
    shown = re.findall(r"slotline ([a-z]+)\b(?! deploy)([^`\n#|]*)", "\n".join(_code(TEXTS[name])))
    assert shown or name not in (
        "README.md",
        *(f"{room}/README.md" for room in ("service", "worker", "deploy")),
    )
    for verb, rest in shown:
        if verb == "deploy":
            continue
        assert verb in commands, verb
        command = commands[verb]
        if hasattr(command, "commands"):
            command = command.commands[rest.split()[0]]
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest)) <= options, f"slotline {verb} {rest}"


def test_the_table_of_verbs_has_every_verb_and_no_other():
    cells = first_cells(section("## Command", SERVICE))
    listed = [verb for cell in cells for verb in re.findall(r"`([a-z]+)`", cell)]
    group = get_command(app)
    assert sorted(listed) == sorted(
        verb for verb in group.list_commands(None) if not group.get_command(None, verb).hidden
    )


def test_the_table_of_routes_has_every_route_with_its_least_role_and_no_other():
    """`…/x` stands below a job, and continues the method before it where it names none."""
    listed: dict[tuple[str, str], str] = {}
    for line in section("## REST", SERVICE).splitlines():
        if not line.startswith("| `"):
            continue
        routes, role = line.split(" | ")[:2]
        method = ""
        for own_method, path in re.findall(r"`(?:(GET|POST|PUT|PATCH|DELETE) )?([/…][^`?]*)`", routes):
            method = own_method or method
            if method:
                listed[method, path.replace("…", "/api/v1/jobs/{job_id}")] = role.strip("| ")
    expected = {route: str(role) for route, role in LEAST_ROLE.items() if route not in PARTS_OF_PAGES}
    assert listed == expected | OPEN_ROUTES


@pytest.mark.parametrize("name", TEXTS)
def test_every_setting_that_is_named_exists(name: str):
    known = {f"SLOTLINE_{field.upper()}" for field in Settings.model_fields} | {"SLOTLINE_URL"}
    for folder in ("tests", "worker"):  # what tests alone ask for, and what a node tells its drivers
        for file in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'environ(?:\.get\(|\[)"(SLOTLINE_[A-Z_]+[A-Z])"', file.read_text()))
    assert set(re.findall(r"SLOTLINE_[A-Z_]+[A-Z]", TEXTS[name])) <= known


def test_the_table_of_settings_is_the_one_that_the_fields_give():
    assert with_table(SETTINGS) == SETTINGS, "python -m tests.service.settings_table renews it"


def test_every_state_and_every_reason_is_explained():
    assert all(f"`{state}`" in SERVICE for state in JobState)
    listed = re.findall(r"`([A-Z_]+)` \w", section("## Jobs", SERVICE).partition("| cause | reasons |")[2])
    assert {reason.value for reason in Reason} <= set(listed)


@pytest.mark.parametrize("name", TEXTS)
def test_every_file_and_target_that_is_named_exists(name: str):
    for path in re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./*-]+)`", TEXTS[name]):
        assert list(ROOT.glob(path)), path
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", TEXTS[name]):
        assert f"\n{target}:" in makefile, target


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(name: str):
    for path, anchor in re.findall(r"(?<!!)\[[^\]]*\]\(([^)#\s:]*)(?:#([\w-]+))?\)", TEXTS[name]):
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert target.exists(), path
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{path}#{anchor}"


def test_every_metric_that_is_explained_is_one_that_the_code_has():
    sources = [path.read_text() for room in ("service", "worker") for path in (ROOT / room).rglob("*.py")]
    literals = set(re.findall(r'"(?:slotline_)?([a-z_]+)"', "\n".join(sources)))
    explained = set(re.findall(r"slotline_([a-z_]+)", TEXTS["dashboards/README.md"]))
    assert len(explained) > 30
    assert {metric for metric in explained if metric.removesuffix("_total") not in literals} == set()


def test_the_walk_through_the_rooms_names_paths_that_exist():
    """Ten stations of one job, from the file that a user types to what is left when it is over."""
    walk = section("## How it is built", README)
    assert len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) == 10
    paths = re.findall(r"`([\w.]+/[\w./-]*)`", walk)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert all((ROOT / path).is_dir() for path in paths if path.endswith("/"))
    assert {path.partition("/")[0] for path in paths} == set(ROOMS)


def test_the_film_of_the_first_ten_minutes_plays_the_readmes_commands_in_its_order():
    """Each in its section, and all of them in the kept result, in which no folder of the machine stands."""
    result = FILM.read_text()
    headings = [scene.heading for scene in SCENES]
    assert [
        heading for heading in re.findall(r"^## (.*)", README, re.MULTILINE) if heading in headings
    ] == headings
    assert re.findall(r"^## (.*)", result, re.MULTILINE) == headings
    for scene in SCENES:
        verbs = [
            " ".join(command.split()[:2]) for command in scene.commands if command.startswith("slotline")
        ]
        assert all(verb in section(f"## {scene.heading}", README) for verb in verbs), scene.heading
        for command in scene.commands:
            assert f"$ {command.partition(JOB)[0]}" in section(f"## {scene.heading}", result), command
    assert not re.search(r"/(?:tmp|home|root|work)/", result)


def _code(text: str) -> list[str]:
    """Lines of shell blocks, and what stands in backticks outside of blocks."""
    shell = [line for block in blocks("sh", text) for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [*shell, *re.findall(r"`([^`\n]+)`", prose)]


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
