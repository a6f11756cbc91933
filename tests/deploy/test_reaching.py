"""Who reaches whom: drivers the Service, people the Ingress or route, Prometheus everything it scrapes."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from helm_python import Chart, HelmError

from service.api.middleware import BODY_LIMIT_BYTES
from service.jobs.artifacts import PACKAGE_LIMIT_BYTES
from service.settings.settings import Settings
from tests.deploy.crds import check
from tests.deploy.rendering import (
    ANY_RAY,
    CHART,
    KUBERNETES,
    Objects,
    case,
    created,
    environment,
    group,
    objects,
    of_kind,
)

MONITORED = {
    "auth": {"metricsTokenSecret": {"name": "metrics"}},
    "monitoring": {
        "serviceMonitor": {"enabled": True},
        "jobs": {"enabled": True},
        "rules": {"enabled": True},
    },
}


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


def settings_of(found: Objects, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name, value in environment(found).items():
        monkeypatch.setenv(name, value)
    return Settings()


@pytest.mark.parametrize(
    ("outside", "url"),
    [
        ({"publicUrl": "https://slotline.example.org"}, "https://slotline.example.org"),
        ({"ingress": {"enabled": True, "host": "s.example.org"}}, "http://s.example.org"),
        ({"ingress": {"enabled": True, "host": "s.example.org", "tlsSecret": "t"}}, "https://s.example.org"),
        (
            {
                "httpRoute": {
                    "enabled": True,
                    "hostnames": ["r.example.org"],
                    "parentRefs": [{"name": "public"}],
                }
            },
            "https://r.example.org",
        ),
    ],
    ids=["publicUrl", "ingress", "ingress with TLS", "route"],
)
def test_drivers_report_to_the_service_whatever_people_call(
    chart: Chart, outside: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
):
    """The public address may have a private CA, or lead nowhere from inside."""
    settings = settings_of(objects(chart, {**ANY_RAY, **outside}), monkeypatch)
    assert settings.url == url
    assert settings.control_url == "http://demo-slotline.ml.svc:80"


def test_a_ray_cluster_elsewhere_gets_an_address_of_its_own(chart: Chart, monkeypatch: pytest.MonkeyPatch):
    found = objects(chart, {**ANY_RAY, "driverUrl": "https://from-elsewhere:8443"})
    assert settings_of(found, monkeypatch).control_url == "https://from-elsewhere:8443"


def test_an_ingress_leads_to_the_service(chart: Chart):
    found = objects(chart, case("production"))
    ingress, service = of_kind(found, "Ingress")["spec"], of_kind(found, "Service")
    backend = ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert ingress["tls"] == [{"hosts": [ingress["rules"][0]["host"]], "secretName": "slotline-tls"}]
    assert not any(kind == "Ingress" for kind, _ in objects(chart, ANY_RAY))


def test_an_ingress_of_nginx_takes_uploads_and_streams_and_a_users_annotations_go_before(
    chart: Chart,
):
    """nginx's own defaults are 1 MiB and buffers; its sizes are those of `client_max_body_size`."""
    ingress = {"enabled": True, "host": "s.example.org", "className": "nginx"}
    values = {**ANY_RAY, "ingress": ingress}
    chart.validate_schema(values)
    prefix = "nginx.ingress.kubernetes.io/"
    told = of_kind(objects(chart, values), "Ingress")["metadata"]["annotations"]
    size = int(told[f"{prefix}proxy-body-size"].removesuffix("m")) << 20
    assert size > max(PACKAGE_LIMIT_BYTES, BODY_LIMIT_BYTES)
    assert told[f"{prefix}proxy-buffering"] == "off" and int(told[f"{prefix}proxy-read-timeout"]) >= 600
    ingress["annotations"] = {f"{prefix}proxy-body-size": "8m", "cert-manager.io/cluster-issuer": "ca"}
    told = of_kind(objects(chart, values), "Ingress")["metadata"]["annotations"]
    assert told[f"{prefix}proxy-body-size"] == "8m" and told["cert-manager.io/cluster-issuer"] == "ca"
    assert told[f"{prefix}proxy-buffering"] == "off"


def test_a_route_leads_to_the_service_and_cuts_no_stream_off(chart: Chart):
    route = {"enabled": True, "parentRefs": [{"name": "public", "namespace": "gateways"}], "hostnames": ["s"]}
    found = objects(chart, {**ANY_RAY, "httpRoute": route, "service": {"port": 8080}})
    item = of_kind(found, "HTTPRoute")
    check(item)
    assert item["spec"]["parentRefs"] == route["parentRefs"]
    rule = item["spec"]["rules"][0]
    assert rule["backendRefs"] == [{"name": "demo-slotline", "port": 8080}]
    assert rule["timeouts"] == {"request": "0s"}


def test_what_the_prometheus_operator_looks_for_carries_its_release(chart: Chart):
    kinds = ("ServiceMonitor", "ScrapeConfig", "PrometheusRule")
    found = objects(chart, {**ANY_RAY, **MONITORED})
    for kind in kinds:
        assert of_kind(found, kind)["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    values = {**ANY_RAY, **MONITORED, "monitoring": {**MONITORED["monitoring"], "release": "mine"}}
    values["monitoring"]["rules"] = {"enabled": True, "labels": {"release": "other", "team": "ml"}}
    found = objects(chart, values)
    assert of_kind(found, "ServiceMonitor")["metadata"]["labels"]["release"] == "mine"
    own = of_kind(found, "PrometheusRule")["metadata"]["labels"]
    assert (own["release"], own["team"]) == ("other", "ml")
    values["monitoring"] = {**MONITORED["monitoring"], "release": ""}
    assert "release" not in of_kind(objects(chart, values), "ServiceMonitor")["metadata"]["labels"]


def test_rays_own_metrics_are_scraped_from_each_of_its_pods(chart: Chart):
    """The monitor's selector and port, beside the labels and ports of the pods that the RayCluster makes."""
    found = objects(chart, case("production"))
    monitor, ray = of_kind(found, "PodMonitor"), of_kind(found, "RayCluster")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    # KubeRay labels its pods with the name of their cluster
    assert monitor["spec"]["selector"]["matchLabels"] == {"ray.io/cluster": ray["metadata"]["name"]}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for pods in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        (container,) = (
            one for one in pods["template"]["spec"]["containers"] if one["name"].startswith("ray")
        )
        assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"} in endpoint[
        "relabelings"
    ]
    foreign = {**ANY_RAY, "monitoring": {"ray": {"enabled": True}}}
    with pytest.raises(HelmError, match="monitor of their own installation"):
        objects(chart, foreign)


def test_prometheus_asks_for_drivers_with_a_token_of_its_own(chart: Chart):
    auth = {"metricsTokenSecret": {"name": "metrics"}, "apiTokenSecret": {"name": "all"}}
    found = objects(chart, {**ANY_RAY, **MONITORED, "auth": auth})
    discovery = of_kind(found, "ScrapeConfig")["spec"]["httpSDConfigs"][0]
    assert discovery["authorization"]["credentials"] == {"name": "metrics", "key": "token"}
    assert environment(found)["SLOTLINE_METRICS_TOKEN"] == "metrics/token"
    found = objects(chart, {**ANY_RAY, **MONITORED, "auth": {"apiTokenSecret": {"name": "all"}}})
    discovery = of_kind(found, "ScrapeConfig")["spec"]["httpSDConfigs"][0]
    assert discovery["authorization"]["credentials"] == {"name": "all", "key": "token"}
    assert "SLOTLINE_METRICS_TOKEN" not in environment(found)


def test_up_of_drivers_has_the_name_that_the_rules_use(chart: Chart):
    scrape = of_kind(objects(chart, {**ANY_RAY, **MONITORED}), "ScrapeConfig")["spec"]
    assert {"targetLabel": "job", "replacement": "slotline-jobs"} in scrape["relabelings"]


def test_alerts_lead_to_where_the_runbook_can_be_opened(chart: Chart):
    def addresses(**monitoring: Any) -> set[str]:
        values = {**ANY_RAY, "monitoring": {"rules": {"enabled": True}, **monitoring}}
        chart.validate_schema(values)
        (one,) = of_kind(objects(chart, values), "PrometheusRule")["spec"]["groups"]
        return {rule["annotations"]["runbook_url"] for rule in one["rules"] if "alert" in rule}

    here = addresses()
    assert "deploy/RUNBOOK.md#slotlinelinkslow" in here
    there = addresses(runbookUrl="https://wiki.example.org/slotline")
    assert there == {
        address.replace("deploy/RUNBOOK.md", "https://wiki.example.org/slotline") for address in here
    }


def test_a_network_policy_lets_prometheus_in_where_drivers_serve(
    chart: Chart, monkeypatch: pytest.MonkeyPatch
):
    values = case("production")
    values["monitoring"]["jobs"] = {"enabled": True, "ports": {"first": 9400, "last": 9431}}
    values["replicas"] = 1
    found = objects(chart, values)
    cluster = of_kind(found, "RayCluster")["metadata"]["name"]
    policy = found["NetworkPolicy", cluster]["spec"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/cluster": cluster}}
    among, control, monitoring = policy["ingress"]
    nodes = [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
    assert among == {"from": [{"podSelector": policy["podSelector"]}, *nodes]}, "NCCL and Ray use any port"
    plane = of_kind(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert control["from"][0]["podSelector"]["matchLabels"].items() <= plane.items()
    assert control["ports"] == [{"protocol": "TCP", "port": "dashboard"}]
    assert monitoring["from"] == values["networkPolicy"]["from"]
    assert {"protocol": "TCP", "port": 9400, "endPort": 9431} in monitoring["ports"]
    assert found["ConfigMap", "demo-slotline"]["data"]["SLOTLINE_METRICS_PORTS"] == "9400-9431"
    own = objects(chart, {**ANY_RAY, "networkPolicy": {"enabled": True}})
    assert [name for kind, name in own if kind == "NetworkPolicy"] == ["demo-slotline"]


@pytest.mark.parametrize("part", ["head", "workers"])
def test_pods_on_their_nodes_network_reach_ray_and_the_control_plane_by_their_nodes_addresses(
    chart: Chart, part: str
):
    """Such a pod calls from its node's address, which no podSelector matches: Ray's workers would never find the head."""
    cluster = (
        {"head": {"hostNetwork": True}} if part == "head" else {"workerGroups": [group(hostNetwork=True)]}
    )
    values = {**created(**cluster), "networkPolicy": {"enabled": True}}
    chart.validate_schema(values)
    with pytest.raises(HelmError, match=r"networkPolicy\.nodeCidrs"):
        objects(chart, values)
    values["networkPolicy"]["nodeCidrs"] = ["10.2.0.0/16", "fd00::/64"]
    chart.validate_schema(values)
    found = objects(chart, values)
    for item in (item for (kind, _), item in found.items() if kind == "NetworkPolicy"):
        kubernetes_validate.validate(item, KUBERNETES[-1], strict=True)
    every_port = [
        peer
        for rule in found["NetworkPolicy", "demo-slotline-ray"]["spec"]["ingress"]
        if "ports" not in rule
        for peer in rule["from"]
    ]
    (reports,) = found["NetworkPolicy", "demo-slotline"]["spec"]["ingress"]
    for peers in (every_port, reports["from"]):
        ranges = [ipaddress.ip_network(peer["ipBlock"]["cidr"]) for peer in peers if "ipBlock" in peer]
        assert any(ipaddress.ip_address("10.2.7.9") in one for one in ranges)
        assert any(ipaddress.ip_address("fd00::9") in one for one in ranges)


def test_peers_are_addresses_too(chart: Chart):
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    found = objects(chart, {**created(), "networkPolicy": {"enabled": True, "from": peers}})
    rule = found["NetworkPolicy", "demo-slotline-ray"]["spec"]["ingress"][-1]
    assert ipaddress.ip_network(rule["from"][0]["ipBlock"]["cidr"]).prefixlen == 8


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({**ANY_RAY, "monitoring": {"jobs": {"enabled": True}}}, "metricsTokenSecret"),
        ({**ANY_RAY, **MONITORED, "networkPolicy": {"enabled": True}}, "networkPolicy.from"),
        ({**ANY_RAY, "monitoring": {"jobs": {"ports": {"first": 9500, "last": 9400}}}}, "9400"),
        ({**ANY_RAY, "ingress": {"enabled": True}}, "ingress.host"),
        ({**ANY_RAY, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({**ANY_RAY, "settings": {"SLOTLINE_METRICS_TOKEN": "secret"}}, "SLOTLINE_METRICS_TOKEN"),
        ({**ANY_RAY, "networkPolicy": {"nodeCidrs": ["10.0.0.1"]}}, "nodeCidrs"),
    ],
    ids=[
        "no token for Prometheus",
        "policy against Prometheus",
        "ports backwards",
        "no host",
        "no gateway",
        "secret",
        "an address that is no range",
    ],
)
def test_what_would_silently_not_be_reached_is_refused(chart: Chart, values: dict[str, Any], word: str):
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)
