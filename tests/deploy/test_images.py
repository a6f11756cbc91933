"""Dockerfiles and the compose file, by their content; what the slim image leaves out is proved unneeded."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.deploy.rendering import image_environment
from tests.extras import PROJECT, ROOT, modules_beyond, normal

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


@pytest.mark.slow
def test_the_control_plane_works_without_what_its_image_leaves_out():
    blocked = modules_beyond(*_extras(DEPLOY / "Dockerfile.control-plane"))
    assert {"torch", "ray", "sklearn", "pytest"} <= set(blocked)
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "import service.cli.main, service.control_plane, service.scheduler, service.orchestrator.planning.pool;"
        "from service.scheduler.planner import make_plan; from service.scheduler.problem.spec import PipelineSpec;"
        "stage = {'name': 's', 'mesh': 'm', 'forward_s': 1};"
        "spec = PipelineSpec.model_validate({'microbatches': 2, 'meshes': [{'name': 'm'}], 'stages': [stage],"
        " 'schedule': '1f1b'}); assert make_plan(spec).makespan_s == 2"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_node_works_without_what_its_image_leaves_out():
    """The planner's solvers and the server's packages are of the control plane only."""
    (ray,) = find_spec("ray").submodule_search_locations
    bundled = {path.name for path in (Path(ray) / "thirdparty_files").iterdir()}
    blocked = [name for name in modules_beyond(*_extras(WORKER)) if name not in bundled]
    assert {"ortools", "numba", "fastapi", "sqlalchemy", "sklearn"} <= set(blocked)
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        "import ray, worker.driver.__main__, worker.actor.actor, worker.tasks.__main__, worker.tasks.profile,"
        "worker.tasks.export_weights, worker.tasks.remove, worker.tasks.verify, worker.examples.gpt,"
        "worker.examples.text, worker.checkpoint.format"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_container_finds_every_kernel_compiled_in_its_image(tmp_path: Path):
    """The image's own commands: the build's beside the source, and the start's, with a stand-in for slotline."""
    image, scratch, source, tools = (tmp_path / name for name in ("image", "scratch", "src", "bin"))
    for folder in (scratch, source, tools):
        folder.mkdir()
    shutil.copytree(ROOT / "service", source / "service", ignore=shutil.ignore_patterns("__pycache__"))
    path = DEPLOY / "Dockerfile.control-plane"
    build = next(part for part in _installs(path)[0].split("&&") if "compile_kernels" in part)
    (start,) = (json.loads(argument) for word, argument in final_stage(path) if word == "ENTRYPOINT")
    environment = image_environment()
    places = {
        "/opt/slotline/bin/python": sys.executable,
        "/opt/slotline/kernels": str(image),
        environment["NUMBA_CACHE_DIR"]: str(scratch / "numba"),
    }

    def here(text: str) -> str:
        for place, local in places.items():
            text = text.replace(place, local)
        return text

    def run(command: list[str], **variables: str) -> str:
        done = subprocess.run(
            command,
            cwd=source,
            env={"PATH": f"{tools}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), **variables},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    program = (
        "from numba.core.dispatcher import Dispatcher; from service.scheduler import kernels, planner;"
        "planner.compile_kernels(); found = [getattr(kernels, name) for name in kernels.__all__];"
        "stats = [kernel.stats for kernel in found if isinstance(kernel, Dispatcher)];"
        "print(sum(len(one.cache_hits) for one in stats), sum(len(one.cache_misses) for one in stats), len(stats))"
    )
    (tools / "slotline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -c "{program}"\n')
    (tools / "slotline").chmod(0o755)
    run(["/bin/sh", "-ec", here(build)])
    compiled = _files(image)
    hits, misses, kernels = map(
        int,
        run(
            [here(part) for part in start],
            **{name: here(text) for name, text in environment.items() if name.startswith("NUMBA_")},
        ).split(),
    )
    assert hits >= kernels > 0 and misses == 0
    assert compiled == _files(image) == _files(scratch / "numba")


def test_every_requirement_of_the_images_is_pinned():
    extras = PROJECT["optional-dependencies"]
    assert "torch" in _names(extras["worker"]) and "torch" not in _names(extras["server"])
    pinned = _names(line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for extra in ("server", "worker", "demo", "otel", "cuda12", "cuda13", "storage"):
        assert _names(extras[extra]) - {"slotline"} <= pinned, extra
    assert _names(PROJECT["dependencies"]) <= pinned


WORKER = DEPLOY / "Dockerfile.worker"


def test_the_worker_reaches_the_buckets_that_the_readme_promises():
    assert _names(PROJECT["optional-dependencies"]["storage"]) == {"s3fs", "gcsfs"}
    assert "storage" in _extras(WORKER)
    assert "storage" in _extras(DEPLOY / "Dockerfile.control-plane"), (
        "it lists checkpoints, and keeps code there"
    )
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    assert pins["s3fs"] == pins["gcsfs"] == pins["fsspec"], "each asks for exactly its own version of fsspec"


def test_the_worker_finds_infiniband_and_compiles_kernels():
    """Triton, which torch.compile uses on CUDA, builds a launcher for every kernel with a C compiler."""
    packages = next(a for word, a in instructions(WORKER) if word == "RUN" and "apt-get install" in a)
    assert {"libibverbs1", "ibverbs-providers", "gcc", "libc6-dev"} <= set(packages.split())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path):
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_the_worker_is_no_virtual_environment():
    """Ray copies the one that it runs in, torch and all, for every job with code.pip."""
    for word, argument in instructions(WORKER):
        assert not (word == "RUN" and re.search(r"-m venv|virtualenv|uv venv", argument)), argument
        assert not (word == "ENV" and "PATH=" in argument), argument


def test_no_image_asks_for_every_gpu_of_its_node():
    """The runtime gives a container the GPUs that its pod asked for; `all` gives it those of other pods as well."""
    for path in DOCKERFILES:
        for word, argument in instructions(path):
            assert not (word == "ENV" and "NVIDIA_VISIBLE_DEVICES" in argument), path.name


@pytest.mark.parametrize(
    ("arguments", "torch"),
    [
        ({"CUDA_MAJOR": "", "TORCH_INDEX": ""}, None),
        ({"CUDA_MAJOR": "", "TORCH_INDEX": "https://cpu"}, ["--no-deps", "--index-url", "https://cpu"]),
        ({"CUDA_MAJOR": "13", "TORCH_INDEX": ""}, []),
        ({"CUDA_MAJOR": "12", "TORCH_INDEX": "https://cu12"}, ["--no-deps", "--index-url", "https://cu12"]),
    ],
    ids=["CPU without an index", "CPU", "CUDA", "another CUDA"],
)
def test_torch_comes_alone_from_an_index_of_its_own(
    arguments: dict[str, str], torch: list[str] | None, tmp_path: Path
):
    """The image's own commands, with stand-ins for pip and apt-get that write down what they are told.

    An index of torch has few versions of anything else (pins would not be found), and pip's default wheel of
    torch brings CUDA to a CPU image.
    """
    for name in ("apt-get", "useradd", "rm", "pip", "python"):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\necho "{name} $*" >> "$SAID"\n')
        tool.chmod(0o755)
    said = tmp_path / "said"
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SAID": str(said), **arguments}
    for word, argument in instructions(WORKER):
        if word == "RUN":
            done = subprocess.run(
                ["/bin/sh", "-c", argument],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            if torch is None:
                assert done.returncode != 0 and "TORCH_INDEX" in done.stdout and not said.exists()
                return
            assert done.returncode == 0, done.stderr
    assert torch is not None
    first, second = [line.split() for line in said.read_text().splitlines() if line.startswith("pip install")]
    pin = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    assert first[-1] == pin
    assert first[first.index("constraints.txt") + 1 : -1] == torch
    extra = f",cuda{arguments['CUDA_MAJOR']}" if arguments["CUDA_MAJOR"] else ""
    assert second[-1] == f".[worker,storage{extra}]"
    assert "--index-url" not in second


def test_a_pin_takes_torchs_builds_for_one_device():
    """Else the second installation would replace the CPU wheel by pip's default one."""
    pin = next(
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
    )
    version = pin.partition("==")[2]
    assert SpecifierSet(f"=={version}").contains(f"{version}+cpu")


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
    secret = "/run/secrets/slotline_token"
    assert scrapes["slotline"]["authorization"] == {"credentials_file": secret}, "for jobs of projects"
    discovery = scrapes["slotline-jobs"]["http_sd_configs"][0]
    assert discovery["url"].startswith(plane["SLOTLINE_PUBLIC_URL"])
    assert discovery["authorization"]["credentials_file"] == "/run/secrets/slotline_token"
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def _extras(path: Path) -> list[str]:
    """The extras that an image installs, those of one CUDA left out."""
    found = re.search(r'"\.\[([a-z,]+)', _installs(path)[-1])
    assert found, f"{path.name} installs no extra"
    return found[1].split(",")


def _installs(path: Path) -> list[str]:
    return [a for word, a in instructions(path) if word == "RUN" and "pip install" in a]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _names(requirements: Iterable[str]) -> set[str]:
    return {normal(Requirement(text).name) for text in requirements}
