"""What tests of the chart share: its examples, what they render to, what the containers' environment comes to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart"
CASES = sorted((CHART / "ci").glob("*.yaml"))
KUBERNETES = ("1.25", "1.37")
CUSTOM_RESOURCES = {
    "RayCluster",
    "ServiceMonitor",
    "PodMonitor",
    "ScrapeConfig",
    "PrometheusRule",
    "HTTPRoute",
}
"""Kinds of operators, for which kubernetes-validate has no schema; crds.py looks at them."""

Objects = dict[tuple[str, str], dict[str, Any]]
ANY_RAY = {"ray": {"address": "http://head:8265"}}


def objects(chart: Chart, values: dict[str, Any], *, name: str = "demo") -> Objects:
    """Every rendered object by (kind, name)."""
    found: Objects = {}
    for file, text in chart.render(values, name=name, namespace="ml").items():
        if file.endswith(".yaml"):
            for item in yaml.safe_load_all(text):
                if item is not None:
                    key = item["kind"], item["metadata"]["name"]
                    assert key not in found, f"{key} twice"
                    found[key] = item
    return found


def of_kind(found: Objects, kind: str) -> dict[str, Any]:
    return next(item for (k, _), item in found.items() if k == kind)


def case(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())


def created(**cluster: Any) -> dict[str, Any]:
    """Values with a RayCluster of the chart, as `cluster` says beside the defaults."""
    return {"ray": {"cluster": {"create": True, **cluster}}}


def group(**fields: Any) -> dict[str, Any]:
    """A group of GPU nodes."""
    small = {
        "name": "gpu",
        "replicas": 1,
        "minReplicas": 1,
        "maxReplicas": 1,
        "sharedMemory": "1Gi",
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    return small | fields


def nodes_of(found: Objects) -> dict[str, dict[str, Any]]:
    """The pod templates of the RayCluster: `head`, and each group by its name."""
    spec = of_kind(found, "RayCluster")["spec"]
    workers = {one["groupName"]: one["template"] for one in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"], **workers}


def container_of(template: dict[str, Any]) -> dict[str, Any]:
    return template["spec"]["containers"][0]


OF_EVERY_RAY_NODE = {
    "KUBERNETES_NODE_NAME": "spec.nodeName",
    "RAY_OVERRIDE_LABELS": '{"kubernetes.io/hostname": "$(KUBERNETES_NODE_NAME)"}',
    "SLOTLINE_LOG_COPY_TO": "/proc/1/fd/1",
    "RAY_worker_niceness": "0",
}


def variables(container: dict[str, Any]) -> dict[str, str]:
    """The environment that stands in a container, secrets as `secret/key`, fields of the pod by their paths."""
    out = {}
    for entry in container.get("env") or []:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        out[entry["name"]] = (
            f"{reference['name']}/{reference['key']}" if reference else entry.get("value", field)
        )
    return out


def environment(found: Objects) -> dict[str, str]:
    """What the control plane's settings come to, secrets as `secret/key`."""
    container = container_of(of_kind(found, "Deployment")["spec"]["template"])
    return dict(of_kind(found, "ConfigMap")["data"]) | variables(container)


def image_environment() -> dict[str, str]:
    """What the control plane's image sets, PATH left out."""
    text = (ROOT / "deploy" / "Dockerfile.control-plane").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text, flags=re.MULTILINE)
    pairs = dict(pair.split("=", 1) for line in lines for pair in line.split())
    return {name: value for name, value in pairs.items() if name != "PATH"}
