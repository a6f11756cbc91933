"""Upgrades: several control planes, their order of coming and going, tables, volumes, `helm test`, further objects."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import kubernetes_validate
import pytest
from helm_python import Chart, HelmError

from tests.deploy.rendering import (
    ANY_RAY,
    CHART,
    KUBERNETES,
    ROOT,
    case,
    container_of,
    image_environment,
    objects,
    of_kind,
    variables,
)

POSTGRES = {**ANY_RAY, "database": {"urlSecret": {"name": "database"}}}


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


def _run(container, environment):
    """What the container would run, here."""
    return subprocess.run(
        [sys.executable, "-m", "service.cli", *container["args"]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_with_postgresql_an_upgrade_leaves_no_moment_without_a_control_plane(chart: Chart):
    spec = of_kind(objects(chart, {**POSTGRES, "replicas": 3}), "Deployment")["spec"]
    assert spec["replicas"] == 3
    assert spec["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }


def test_sqlite_serves_one_control_plane_at_a_time(chart: Chart):
    spec = of_kind(objects(chart, ANY_RAY), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    with pytest.raises(HelmError, match=r"replicas is 2, .*urlSecret"):
        objects(chart, {**ANY_RAY, "replicas": 2})


def test_no_volume_is_claimed_that_postgresql_leaves_empty(chart: Chart):
    def claim(values: dict) -> tuple[bool, str | None]:
        found = objects(chart, values)
        volumes = of_kind(found, "Deployment")["spec"]["template"]["spec"]["volumes"]
        data = next(volume for volume in volumes if volume["name"] == "data")
        used = data.get("persistentVolumeClaim", {}).get("claimName")
        return any(kind == "PersistentVolumeClaim" for kind, _ in found), used

    assert claim(ANY_RAY) == (True, "demo-slotline")
    assert claim(POSTGRES) == (False, None)
    assert claim({**POSTGRES, "persistence": {"existingClaim": "mine"}}) == (False, "mine")
    assert claim({**ANY_RAY, "persistence": {"existingClaim": "mine"}}) == (False, "mine")
    assert claim({**ANY_RAY, "persistence": {"enabled": False}}) == (False, None)


@pytest.mark.slow
def test_tables_are_migrated_before_an_upgrade(chart: Chart, tmp_path: Path):
    """The hook's own arguments and environment, on a database of this test."""
    found = objects(chart, POSTGRES)
    job = of_kind(found, "Job")
    for version in KUBERNETES:
        kubernetes_validate.validate(job, version, strict=True)
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    service = of_kind(found, "Service")["spec"]["selector"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not service.items() <= labels.items(), "the Service would send calls to the hook"
    container = container_of(job["spec"]["template"])
    given = variables(container)
    assert given["SLOTLINE_DATABASE_URL"] == "database/url"
    file = tmp_path / "tables.db"
    environment = {"PATH": os.environ["PATH"]} | image_environment() | given
    environment["SLOTLINE_DATABASE_URL"] = f"sqlite:///{file}"
    done = _run(container, environment)
    assert done.returncode == 0, done.stderr
    assert sqlite3.connect(file).execute("SELECT count(*) FROM jobs").fetchone() == (0,)
    assert "migrated" in done.stdout

    environment["SLOTLINE_DATABASE_URL"] = f"sqlite:////proc/{tmp_path.name}/tables.db"
    done = _run(container, environment)
    assert done.returncode == 1, "a migration that fails must stop the upgrade"
    assert "was not migrated" in done.stderr and "Traceback" not in done.stderr


def test_no_hook_where_it_would_meet_a_locked_file_or_is_not_wanted(chart: Chart):
    assert not any(kind == "Job" for kind, _ in objects(chart, ANY_RAY))
    values = {**ANY_RAY, "database": {"urlSecret": {"name": "database"}, "migrationHook": False}}
    assert not any(kind == "Job" for kind, _ in objects(chart, values))


def test_helm_test_asks_the_service_whether_all_is_there(chart: Chart):
    """The pod's own program, against a server that is ready, and against one that is not."""
    pod = of_kind(objects(chart, ANY_RAY), "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)
    program, url, _limit = pod["spec"]["containers"][0]["args"]
    assert url == "http://demo-slotline.ml.svc:80"
    assert pod["spec"]["containers"][0]["command"] == ["python", "-c"]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = self.server.ready  # type: ignore[attr-defined]
            self.send_response((200 if ready else 503) if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(b"all there" if ready else b"no database")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for ready, code, words in ((True, 0, "all there"), (False, 1, "503: no database")):
            server.ready = ready  # type: ignore[attr-defined]
            place = f"http://127.0.0.1:{server.server_port}"
            done = subprocess.run(
                [sys.executable, "-c", program, place, "0"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, words in done.stdout + done.stderr) == (code, True), done.stderr
        server.shutdown()


def test_further_objects_are_rendered_as_templates(chart: Chart):
    extra = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-more"},
        "data": {"url": '{{ include "slotline.serviceUrl" . }}'},
    }
    found = objects(chart, {**ANY_RAY, "extraObjects": [extra]})
    assert found["ConfigMap", "demo-more"]["data"]["url"] == "http://demo-slotline.ml.svc:80"


def test_the_control_plane_takes_volumes_and_environment_of_its_own(chart: Chart):
    values = {
        **ANY_RAY,
        "template": {
            "spec": {
                "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
                "containers": [
                    {"name": "control-plane", "volumeMounts": [{"name": "ca", "mountPath": "/ca"}]}
                ],
            }
        },
        "envFrom": [{"secretRef": {"name": "more"}}],
    }
    chart.validate_schema(values)
    deployment = of_kind(objects(chart, values), "Deployment")
    kubernetes_validate.validate(deployment, KUBERNETES[-1], strict=True)
    pod = deployment["spec"]["template"]["spec"]
    assert {"name": "ca", "mountPath": "/ca"} in container_of(deployment["spec"]["template"])["volumeMounts"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in pod["volumes"]
    assert {"secretRef": {"name": "more"}} in pod["containers"][0]["envFrom"]


def test_replicas_are_spread_over_nodes(chart: Chart):
    pod = of_kind(objects(chart, case("production")), "Deployment")["spec"]["template"]
    constraint = pod["spec"]["topologySpreadConstraints"][0]
    assert constraint["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
