"""What a release is made of: the workflow, the smoke test on kind, the licence and the log of changes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.extras import PROJECT, ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
KIND_TEST = ROOT / "deploy" / "kind_test.sh"
TOOLS = ("docker", "kind", "kubectl", "helm", "slotline", "sleep")


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def steps(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_a_release_tests_first_and_makes_wheels_images_and_the_chart(jobs: dict[str, Any]):
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 90, "every wait has a limit"
        assert name == "test" or "test" in job["needs"]
    assert "python -m build" in steps(jobs["package"])
    assert {"docker build", "docker push"} <= {
        text for text in ("docker build", "docker push") if text in steps(jobs["images"])
    }
    assert "helm push" in steps(jobs["chart"]) and "images" in jobs["chart"]["needs"]
    for target in re.findall(r"make ([a-z-]+)", steps(jobs["test"])):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), target


def test_the_images_of_a_release_are_those_that_the_chart_names(jobs: dict[str, Any]):
    values = yaml.safe_load((ROOT / "deploy" / "chart" / "values.yaml").read_text())
    variants = jobs["images"]["strategy"]["matrix"]["include"]
    for one in variants:
        assert (ROOT / "deploy" / f"Dockerfile.{one['file']}").exists()
    built = {f"slotline/{one['file']}{one['suffix']}" for one in variants}
    assert {values["image"]["repository"], f"{values['ray']['cluster']['image']['repository']}-cuda"} < built
    replaced = re.search(r"s\|\^(\w+): ", steps(jobs["chart"]))
    assert replaced and values[replaced[1]] == "", "the published chart names the registry of its images"


@pytest.mark.parametrize(
    ("tag", "code"), [(f"v{PROJECT['version']}", 0), ("v9.9.9", 1)], ids=["the version", "another version"]
)
def test_a_tag_that_is_not_the_packages_version_ends_the_release(
    jobs: dict[str, Any], tag: str, code: int, tmp_path: Path
):
    check = next(step["run"] for step in jobs["test"]["steps"] if step.get("id") == "version")
    told = tmp_path / "output"
    done = subprocess.run(
        ["bash", "-ec", check],
        cwd=ROOT,
        env=os.environ | {"GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": str(told)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    if code:
        assert tag in done.stdout and PROJECT["version"] in done.stdout
    else:
        assert told.read_text() == f"version={PROJECT['version']}\n"


def kind_test(tmp_path: Path, failing: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script with stand-ins for its tools, which write down how they are called; the call `failing` ends with 1."""
    said, tools = tmp_path / "said", tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> "$SAID"\n'
            'case "$1 $2" in "jobs --json") echo kind-smoke;; esac\n'
            f'case "{name} $*" in "$FAILING"*) [ -z "$FAILING" ] || exit 1;; esac\n'
        )
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SAID": str(said),
        "FAILING": failing,
        "TORCH_INDEX": "https://index.example.com/cpu",
        "KUBERAY_CHART": "./kuberay-operator",
    }
    done = subprocess.run([KIND_TEST], env=environment, capture_output=True, text=True, timeout=60)
    return done, said.read_text().splitlines() if said.exists() else []


def test_the_smoke_test_installs_trains_upgrades_and_leaves_no_cluster(tmp_path: Path):
    done, calls = kind_test(tmp_path)
    assert done.returncode == 0 and "passed" in done.stdout, done.stderr
    order = [
        "docker build",
        "kind create",
        "kind load",
        "helm upgrade --install slotline",
        "helm test",
        "slotline submit --wait",
    ]
    order += ["helm upgrade slotline", "helm uninstall", "kind delete cluster"]
    places = [next(place for place, call in enumerate(calls) if call.startswith(wanted)) for wanted in order]
    assert places == sorted(places)
    images = set(re.findall(r"slotline/(?:control-plane|worker):\S+", "\n".join(calls)))
    values = yaml.safe_load((ROOT / "deploy" / "chart" / "ci" / "kind.yaml").read_text())
    node = values["ray"]["cluster"]["image"]
    assert images == {f"slotline/control-plane:{PROJECT['version']}", f"{node['repository']}:{node['tag']}"}


@pytest.mark.parametrize("failing", ["helm test", "slotline submit", "kind load"])
def test_a_smoke_test_that_fails_says_what_the_cluster_says_and_leaves_none(tmp_path: Path, failing: str):
    done, calls = kind_test(tmp_path, failing)
    assert done.returncode != 0 and "passed" not in done.stdout
    assert any(call.startswith("kubectl get pods") for call in calls)
    assert calls[-1].startswith("kind delete cluster")


def test_the_licence_is_apaches_and_the_package_carries_it():
    text = (ROOT / "LICENSE").read_text()
    assert (
        "Apache License" in text
        and "Version 2.0, January 2004" in text
        and "END OF TERMS AND CONDITIONS" in text
    )
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]


def test_the_log_of_changes_has_a_place_for_the_next_ones_and_known_headings():
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[([^\]]+)\]", text, flags=re.MULTILINE)
    assert releases[0] == "Unreleased"
    assert set(re.findall(r"^### (.*)$", text, flags=re.MULTILINE)) <= {
        *("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
    }
