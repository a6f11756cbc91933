"""Dockerfiles and the compose file, by their content; what the slim image leaves out is proved unneeded."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(path for path in DEPLOY.glob("Dockerfile.*") if path.suffix != ".dockerignore")


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) with continued lines joined and comments dropped."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def final_stage(path: Path) -> list[tuple[str, str]]:
    found = instructions(path)
    last = max(place for place, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


def test_both_images_are_there():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.control-plane", "Dockerfile.worker"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_ends_as_a_numbered_user_that_is_not_root(path: Path):
    """Kubernetes proves `runAsNonRoot` only for a numeric user."""
    stage = final_stage(path)
    users = [argument for word, argument in stage if word == "USER"]
    assert users, "an image without USER runs as root"
    assert int(users[-1].split(":")[0]) >= 1000
    after = stage[[word for word, _ in stage].index("USER") :]
    assert not any(word in ("RUN", "COPY", "ADD") for word, _ in after)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_everything_installed_is_pinned_by_the_constraints(path: Path):
    installs = [
        a
        for word, argument in instructions(path)
        if word == "RUN"
        for a in argument.split("&&")
        if "pip install" in a
    ]
    assert installs
    for command in installs:
        assert "-c constraints.txt" in command or "--no-deps" in command, command


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_base_image_can_be_replaced_and_never_floats(path: Path):
    found = instructions(path)
    arguments = dict(argument.split("=", 1) for word, argument in found if word == "ARG")
    for word, argument in found:
        if word == "FROM":
            name = re.fullmatch(r"\$\{(\w+)\}( AS \w+)?", argument)
            assert name, f"{argument}: name the base image in an ARG"
            default = arguments[name[1]]
            assert ":" in default and not default.endswith(":latest")
            assert "/" not in default.split(":")[0], "no host of a registry"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_exists_and_is_not_ignored(path: Path):
    allowed = {
        line[1:] for line in Path(f"{path}.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for word, argument in instructions(path):
        if word == "COPY" and "--from" not in argument:
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in allowed, f"{source} is ignored by {path.name}.dockerignore"


def test_the_control_plane_works_without_what_its_image_leaves_out():
    names = _requirements().WORKERS_ONLY
    blocked = {"scikit-learn": "sklearn"}
    modules = [blocked.get(name, name) for name in names]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r}));"
        "import service.cli, service.api.app, service.scheduler, service.orchestrator.planning;"
        "from service.scheduler import make_plan, PipelineSpec;"
        "stage = {'name': 's', 'mesh': 'm', 'forward_s': 1};"
        "spec = PipelineSpec.model_validate({'microbatches': 2, 'meshes': [{'name': 'm'}], 'stages': [stage],"
        " 'schedule': '1f1b'}); assert make_plan(spec).makespan_s == 2"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_every_requirement_of_the_images_is_pinned():
    needed = _requirements().requirements(ROOT / "pyproject.toml")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert "fastapi" in map(_name, needed) and "torch" not in map(_name, needed)
    assert {_name(text) for text in needed} <= pinned
    assert {_name(text) for cuda in ("cuda12", "cuda13") for text in extras[cuda]} <= pinned


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_names_only_what_it_defines(compose: dict[str, Any]):
    services, volumes, secrets = compose["services"], compose["volumes"], compose["secrets"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        assert {secret["source"] for secret in service.get("secrets", ())} <= secrets.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in volumes
        build = service.get("build")
        if build:
            assert (DEPLOY / build["context"] / build["dockerfile"]).exists()


def test_compose_publishes_only_on_this_machine_and_writes_no_secret_down(compose: dict[str, Any]):
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for name, value in service.get("environment", {}).items():
            if re.search("TOKEN|PASSWORD", name):
                assert value.startswith("${"), f"{name} must come from outside"


def test_compose_images_can_be_chosen_and_are_pinned(compose: dict[str, Any]):
    for name, service in compose["services"].items():
        image = re.fullmatch(r"\$\{[A-Z_]+:-([^}]+)\}", service["image"])
        assert image, f"{name}: let a variable choose the image"
        assert re.search(r":[^:/]*\d", image[1]), f"{image[1]} floats"


def test_the_services_of_compose_meet_at_the_same_addresses(compose: dict[str, Any]):
    plane = compose["services"]["control-plane"]["environment"]
    assert plane["RAY_ADDRESS"] == "http://ray-head:8265"
    assert "@database/slotline" in plane["SLOTLINE_DATABASE_URL"]
    scrapes = {
        c["job_name"]: c for c in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert scrapes["slotline"]["static_configs"] == [{"targets": ["control-plane:8470"]}]
    discovery = scrapes["slotline-jobs"]["http_sd_configs"][0]
    assert discovery["url"].startswith(plane["SLOTLINE_PUBLIC_URL"])
    assert discovery["authorization"]["credentials_file"] == "/run/secrets/slotline_token"
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def _requirements() -> Any:
    spec = spec_from_file_location("control_plane_requirements", DEPLOY / "control_plane_requirements.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower().replace("_", "-")
