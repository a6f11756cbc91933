"""The Helm chart: renders, lints and validates for every values file, and refuses bad values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError, lint

from service.orchestrator.decisions.attempt_lifecycle import RAY_RESOURCES
from service.settings.settings import Settings
from tests.deploy.crds import check
from tests.deploy.rendering import (
    ANY_RAY,
    CASES,
    CHART,
    CUSTOM_RESOURCES,
    KUBERNETES,
    ROOT,
    case,
    container_of,
    created,
    environment,
    image_environment,
    nodes_of,
    objects,
    of_kind,
    variables,
)
from tests.extras import PROJECT
from tests.service.settings_table import CHART_SCHEMA, chart_settings, with_chart_settings
from tests.tiers import some_by_day


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


@pytest.mark.parametrize("values", CASES, ids=lambda path: path.stem)
def test_the_chart_lints_without_warnings(values: Path):
    report = lint(CHART, yaml.safe_load(values.read_text()), strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", KUBERNETES)
@some_by_day("values", CASES, ids=lambda path: path.stem, by_day=4)
def test_every_object_is_valid_kubernetes(chart: Chart, values: Path, version: str):
    found = objects(chart, yaml.safe_load(values.read_text()))
    plain = {key: item for key, item in found.items() if key[0] not in CUSTOM_RESOURCES}
    assert {"Deployment", "Service", "ServiceAccount", "ConfigMap"} <= {kind for kind, _ in plain}
    for item in plain.values():
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("values", CASES, ids=lambda path: path.stem)
def test_custom_resources_hold_what_their_operators_take(chart: Chart, values: Path):
    found = objects(chart, yaml.safe_load(values.read_text()))
    for (kind, _), item in found.items():
        if kind in CUSTOM_RESOURCES:
            check(item)


@pytest.mark.parametrize("name", ["kind", "one-gpu-node", "open-cpu", "production"])
def test_pod_templates_of_a_ray_cluster_are_valid_pods(chart: Chart, name: str):
    for template in nodes_of(objects(chart, case(name))).values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("values", CASES, ids=lambda path: path.stem)
def test_the_rendered_settings_are_ones_that_the_control_plane_takes(
    chart: Chart, values: Path, monkeypatch: pytest.MonkeyPatch
):
    given = environment(objects(chart, yaml.safe_load(values.read_text())))
    if "SLOTLINE_DATABASE_URL" in given:  # what stands in the secret
        given["SLOTLINE_DATABASE_URL"] = "postgresql://user:password@host/name"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.host == "0.0.0.0"
    assert settings.port == 8470
    assert settings.ray_address == given["RAY_ADDRESS"]
    assert settings.control_url == "http://demo-slotline.ml.svc:80", "drivers need no name of the outside"
    known = {name for name in Settings.model_fields}
    unknown = [
        n for n in given if n.startswith("SLOTLINE_") and n.removeprefix("SLOTLINE_").lower() not in known
    ]
    assert unknown == []


def test_clusters_and_queues_are_rendered_with_a_token_for_each_cluster(
    chart: Chart, monkeypatch: pytest.MonkeyPatch
):
    given = environment(objects(chart, case("two-clusters")))
    assert given["RAY_AUTH_TOKEN"] == "ray-west/auth_token"
    assert given["RAY_AUTH_TOKEN_EAST"] == "ray-east/auth_token"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.has_default_cluster and [*settings.clusters] == ["east"]
    east = settings.clusters["east"]
    assert (east.address, east.ray_token) == ("http://ray-head.east.svc:8265", "ray-east/auth_token")
    assert (east.driver_url, east.workers_per_gpu) == ("http://slotline.example:8470", 2)
    assert settings.quotas == {"default": None, "east": 16} and settings.cluster_of("east") == "east"
    assert settings.queues["east"].admits("oidc:bob@east.example") and not settings.queues["east"].admits(
        "bob"
    )


def test_the_default_cluster_may_be_missing_where_every_queue_belongs_to_another(chart: Chart):
    values = case("two-clusters")
    del values["ray"]["address"], values["ray"]["tokenSecret"], values["queues"]["default"]
    given = environment(objects(chart, values))
    assert "RAY_ADDRESS" not in given and "SLOTLINE_CLUSTERS" in given
    values["queues"]["other"] = 4
    with pytest.raises(Exception, match=r"set ray\.address"):
        objects(chart, values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"queues": {"a": {"cluster": "north"}}}, "a belongs to the cluster .*north.*default"),
        ({"queues": {"a": 1}, "settings": {"SLOTLINE_QUEUES": "{}"}}, "both given"),
        ({"queues": {"a": {"quotas": 1}}}, "quotas"),
        ({"settings": {"SLOTLINE_CLUSTERS": "{}"}}, "SLOTLINE_CLUSTERS"),
        ({"ray": {"clusters": {"default": {"address": "http://x"}}}}, "default"),
        ({"ray": {"clusters": {"east": {"address": "x:6379"}}}}, "address"),
        (
            {
                "ray": {
                    "clusters": {
                        name: {"address": "http://x", "tokenSecret": {"name": "s"}} for name in ("a-b", "a.b")
                    }
                }
            },
            "share the variable RAY_AUTH_TOKEN_A_B",
        ),
    ],
)
def test_wrong_clusters_and_queues_are_refused_by_name(chart: Chart, values: dict[str, Any], says: str):
    ray = {**ANY_RAY["ray"], **values.get("ray", {})}
    with pytest.raises(Exception, match=says):
        objects(chart, {**values, "ray": ray})


def test_numbers_reach_the_containers_as_they_were_written(chart: Chart):
    values = case("production")
    numbers = {
        "SLOTLINE_PLAN_MEMORY_BYTES": 1073741824,
        "SLOTLINE_PROFILE_EVERY_S": 0.5,
        "SLOTLINE_KEEP_HISTORY_DAYS": -1,
    }
    values["settings"] |= numbers
    values["ray"]["cluster"]["workerGroups"][0]["env"]["NCCL_BUFFSIZE"] = 8388608
    found = objects(chart, values)
    settings = of_kind(found, "ConfigMap")["data"]
    assert {name: settings[name] for name in numbers} == {name: str(value) for name, value in numbers.items()}
    group = of_kind(found, "RayCluster")["spec"]["workerGroupSpecs"][0]
    env = group["template"]["spec"]["containers"][0]["env"]
    assert {"name": "NCCL_BUFFSIZE", "value": "8388608"} in env


def test_secrets_are_only_referred_to(chart: Chart):
    found = objects(chart, case("production"))
    given = environment(found)
    assert given["SLOTLINE_DATABASE_URL"] == "slotline-database/url"
    assert given["SLOTLINE_API_TOKEN"] == "slotline-token/token"
    assert given["RAY_AUTH_TOKEN"] == "demo-slotline-ray/auth_token", "the secret that KubeRay makes"
    assert not any(kind == "Secret" for kind, _ in found)


def test_an_existing_ray_cluster_makes_no_ray_cluster(chart: Chart):
    found = objects(chart, case("existing-ray"))
    assert not any(kind == "RayCluster" for kind, _ in found)
    assert environment(found)["RAY_ADDRESS"] == "http://ray-head.ray.svc:8265"
    token = {"ray": {**ANY_RAY["ray"], "tokenSecret": {"name": "ray"}}}
    assert environment(objects(chart, token))["RAY_AUTH_TOKEN"] == "ray/auth_token"


def test_a_ray_cluster_offers_accelerators_as_the_worker_asks_for_them(chart: Chart):
    cluster = of_kind(objects(chart, case("production")), "RayCluster")["spec"]
    gpu, cpu = cluster["workerGroupSpecs"]
    limits = gpu["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 8
    resources = json.loads(json.loads(cpu["rayStartParams"]["resources"]))
    assert resources == {RAY_RESOURCES["cpu"]: 4}
    assert cluster["authOptions"] == {"mode": "token"}


def test_a_ray_cluster_without_tokens_says_so_on_every_node(chart: Chart):
    """Ray decides by itself where nothing is said, and then nodes might differ."""
    cluster = of_kind(objects(chart, case("open-cpu")), "RayCluster")["spec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        environment = group["template"]["spec"]["containers"][0]["env"]
        assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in environment
    assert "authOptions" not in cluster


def test_the_control_plane_runs_without_rights(chart: Chart):
    pod = of_kind(objects(chart, ANY_RAY), "Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {of_kind(objects(chart, ANY_RAY), "ConfigMap")["data"]["SLOTLINE_DATA_DIR"], "/tmp"} == mounts
    assert Path(image_environment()["NUMBA_CACHE_DIR"]).parent == Path("/tmp"), (
        "a container's start writes there"
    )
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert {"requests", "limits"} <= container["resources"].keys()


def test_a_template_is_merged_over_the_control_plane_and_what_a_hook_needs_over_its_pod(chart: Chart):
    proxy = {"name": "proxy", "image": "sql-proxy:2", "restartPolicy": "Always"}
    template = {
        "metadata": {"labels": {"team": "ml"}},
        "spec": {
            "nodeSelector": {"zone": "a"},
            "priorityClassName": "high",
            "securityContext": {"runAsUser": 4000},
            "initContainers": [proxy],
            "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "containers": [
                {
                    "name": "control-plane",
                    "env": [{"name": "SSL_CERT_FILE", "value": "/ca/ca.pem"}],
                    "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                    "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
                },
                {"name": "oauth2-proxy", "image": "oauth2-proxy:7"},
            ],
        },
    }
    values = {**ANY_RAY, "database": {"urlSecret": {"name": "db"}}, "template": template}
    chart.validate_schema(values)
    found = objects(chart, values)
    for kind in ("Deployment", "Job", "Pod"):
        kubernetes_validate.validate(of_kind(found, kind), KUBERNETES[-1], strict=True)
    pod = of_kind(found, "Deployment")["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert [one["name"] for one in pod["spec"]["containers"]] == ["control-plane", "oauth2-proxy"]
    assert pod["spec"]["priorityClassName"] == "high"
    assert (
        pod["spec"]["securityContext"]["runAsUser"] == 4000
        and pod["spec"]["securityContext"]["runAsNonRoot"] is True
    )
    hook = of_kind(found, "Job")["spec"]["template"]["spec"]
    (migrate,) = hook["containers"]
    assert migrate["name"] == "migrate" and "lifecycle" not in migrate, "what does not end would keep the Job"
    assert migrate["args"] == ["migrate"] and variables(migrate)["SSL_CERT_FILE"] == "/ca/ca.pem"
    assert hook["initContainers"] == [proxy] and hook["nodeSelector"] == {"zone": "a"}
    assert {"name": "ca", "configMap": {"name": "ca"}} in hook["volumes"]
    asked = of_kind(found, "Pod")["spec"]
    assert asked["nodeSelector"] == {"zone": "a"} and asked["securityContext"]["runAsUser"] == 4000
    assert "initContainers" not in asked


def test_null_takes_a_field_of_the_charts_own_away(chart: Chart):
    """A platform that gives each namespace its own range of users refuses a fixed one."""
    values = {**ANY_RAY, "template": {"spec": {"securityContext": {"runAsUser": None, "fsGroup": None}}}}
    chart.validate_schema(values)
    security = of_kind(objects(chart, values), "Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert security.keys() == {"runAsNonRoot", "runAsGroup", "seccompProfile"}


def test_the_service_reaches_the_pods(chart: Chart):
    found = objects(chart, ANY_RAY)
    pod = of_kind(found, "Deployment")["spec"]["template"]
    service = of_kind(found, "Service")["spec"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports


@pytest.mark.slow
def test_monitoring_carries_the_dashboard_and_the_rules_of_this_repository(chart: Chart):
    found = objects(chart, case("production"))
    boards = found["ConfigMap", "demo-slotline-dashboard"]["data"]
    committed = {path.name: path.read_text() for path in (ROOT / "dashboards").glob("*.json")}
    assert {name: json.loads(text) for name, text in boards.items()} == {
        name: json.loads(text) for name, text in committed.items()
    }
    sqlite = {**ANY_RAY, "monitoring": {"dashboard": {"enabled": True}}}
    without = objects(chart, sqlite)["ConfigMap", "demo-slotline-dashboard"]["data"]
    assert set(without) == committed.keys() - {"slotline-steps.json"}
    assert len(without) == 4
    rules = of_kind(found, "PrometheusRule")["spec"]
    assert rules == yaml.safe_load((ROOT / "dashboards" / "rules.yml").read_text())
    jobs, slots = (found["ScrapeConfig", f"demo-slotline-{name}"]["spec"] for name in ("jobs", "slots"))
    for scrape in (jobs, slots):
        assert scrape["honorLabels"] is True
        assert scrape["httpSDConfigs"][0]["url"] == "http://demo-slotline.ml.svc:80/api/v1/prometheus/targets"
    assert jobs["httpSDConfigs"] == slots["httpSDConfigs"], "the same drivers, with the same token"
    assert (jobs["metricsPath"], jobs["scrapeInterval"]) == ("/metrics", "5s")
    assert (slots["metricsPath"], slots["scrapeInterval"]) == ("/metrics/slots", "30s")
    assert {"targetLabel": "job", "replacement": "slotline-slots"} in slots["relabelings"]
    (endpoint,) = of_kind(found, "ServiceMonitor")["spec"]["endpoints"]
    wanted = {"targetLabel": "job", "replacement": "slotline"}
    assert wanted in endpoint["relabelings"], "the alert asks for this name"
    assert endpoint["honorLabels"] is True, "slotline_job_info carries the job's id as job"
    token = jobs["httpSDConfigs"][0]["authorization"]
    assert endpoint["authorization"] == token, "with which jobs of projects are named"


def test_the_charts_files_are_those_of_the_dashboards():
    """Plain copies: links do not survive every way in which a repository travels."""
    copies = {path.name: path.read_text() for path in (CHART / "files").iterdir()}
    folder = ROOT / "dashboards"
    originals = {path.name: path.read_text() for path in (*folder.glob("*.json"), folder / "rules.yml")}
    assert copies == originals, "run python dashboards/build.py"


def test_without_monitoring_nothing_needs_an_operator(chart: Chart):
    kinds = {kind for kind, _ in objects(chart, ANY_RAY)}
    assert kinds & CUSTOM_RESOURCES == set()


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "ray.address"),
        ({**ANY_RAY, "auth": {"requireToken": False}}, "openAccess"),
        ({**ANY_RAY, "imagee": {}}, "imagee"),
        ({**ANY_RAY, "service": {"port": 0}}, "port"),
        ({"ray": {"address": "ray://head:10001"}}, "address"),
        ({**ANY_RAY, "settings": {"SLOTLINE_API_TOKEN": "secret"}}, "SLOTLINE_API_TOKEN"),
        ({**ANY_RAY, "settings": {"LOG_LEVEL": "debug"}}, "LOG_LEVEL"),
        ({**ANY_RAY, "settings": {"SLOTLINE_PROFLE_EVERY_S": 3}}, "SLOTLINE_PROFLE_EVERY_S"),
        ({**ANY_RAY, "settings": {"SLOTLINE_WEBHOOK_SECRET": "secret"}}, "SLOTLINE_WEBHOOK_SECRET"),
        ({**ANY_RAY, "resources": {"limit": {"memory": "4Gi"}}}, "limit"),
    ],
    ids=[
        "no Ray",
        "no token",
        "typing mistake",
        "no port",
        "wrong scheme",
        "secret in the open",
        "no setting",
        "misspelt setting",
        "a webhook's secret",
        "misspelt limits",
    ],
)
def test_values_that_cannot_work_are_refused_by_name(chart: Chart, values: dict[str, Any], word: str):
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)


def test_the_chart_takes_the_settings_that_exist():
    text = CHART_SCHEMA.read_text()
    assert with_chart_settings(text) == text, "python -m tests.service.settings_table renews it"
    assert {"SLOTLINE_LOG_LEVEL", "SLOTLINE_PLAN_PROCESSES", "SLOTLINE_QUEUES"} < set(chart_settings())
    assert not [name for name in chart_settings() if name.endswith(("TOKEN", "SECRET", "KEY"))]


def test_one_value_names_the_registry_of_both_images(chart: Chart):
    def images(**values: Any) -> set[str]:
        chart.validate_schema({**created(), **values})
        found = objects(chart, {**created(), **values})
        pods = [of_kind(found, "Deployment")["spec"]["template"], *nodes_of(found).values()]
        return {container_of(pod)["image"] for pod in pods}

    version = PROJECT["version"]
    assert images() == {f"slotline/control-plane:{version}", f"slotline/worker:{version}-cuda"}
    pushed = {
        f"r.example.com:5000/ml/slotline/{name}"
        for name in (f"control-plane:{version}", f"worker:{version}-cuda")
    }
    assert (
        images(imageRegistry="r.example.com:5000/ml")
        == images(imageRegistry="r.example.com:5000/ml/")
        == pushed
    )


def test_the_chart_its_examples_and_the_package_are_of_one_version():
    """A release's tag is checked against the package's, and gives the published chart its own."""
    version = PROJECT["version"]
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == version
    files = [*CASES, ROOT / "deploy" / "compose.yaml"]
    tags = {
        tag
        for file in files
        for tag in re.findall(
            r"(?:tag: |slotline/worker:|slotline/control-plane:)(\d[\w.-]+)", file.read_text()
        )
    }
    assert tags == {version, f"{version}-cpu"}
