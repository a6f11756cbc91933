"""What operators' custom resources may hold, for the fields that the chart writes.

Written from KubeRay 1.5 to 1.7, the Prometheus operator 0.8x and Gateway API 1.x: closed, so that a misspelt field is found.
Pods in them are looked at as pods (kubernetes-validate). With SLOTLINE_CRDS, a folder of the operators' own
CustomResourceDefinitions as YAML, everything is validated against those as well.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
TEMPLATE = {"type": "object", "required": ["spec"]}
SECRET_KEY = {
    "type": "object",
    "properties": {"name": TEXT, "key": TEXT},
    "required": ["name", "key"],
    "additionalProperties": False,
}


def _closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_FAULT_TOLERANCE = _closed(
    ("redisAddress",),
    redisAddress=TEXT,
    redisPassword=_closed(("valueFrom",), valueFrom=_closed(secretKeyRef=SECRET_KEY)),
    externalStorageNamespace=TEXT,
)
_GROUP = _closed(
    ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=COUNT,
    labels=TEXTS,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
_RELABELINGS = {
    "type": "array",
    "items": _closed(targetLabel=TEXT, replacement=TEXT, sourceLabels={"type": "array", "items": TEXT}),
}
SPECIFICATIONS = {
    "RayCluster": _closed(
        ("headGroupSpec", "workerGroupSpecs"),
        rayVersion=TEXT,
        authOptions=_closed(mode={"enum": ["token", "disabled"]}),
        upgradeStrategy=_closed(type={"enum": ["Recreate", "None"]}),  # from 1.6 on
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_closed(
            version={"enum": ["v1", "v2"]},
            upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
            idleTimeoutSeconds=COUNT,
            resources={"type": "object"},
            securityContext={"type": "object"},
        ),
        gcsFaultToleranceOptions=_FAULT_TOLERANCE,
        headGroupSpec=_closed(
            ("rayStartParams", "template"), labels=TEXTS, rayStartParams=TEXTS, template=TEMPLATE
        ),
        workerGroupSpecs={"type": "array", "items": _GROUP},
    ),
    "ServiceMonitor": _closed(
        ("selector", "endpoints"),
        selector=_closed(matchLabels=TEXTS),
        endpoints={
            "type": "array",
            "items": _closed(
                port=TEXT,
                path=TEXT,
                interval=TEXT,
                honorLabels={"type": "boolean"},
                authorization=_closed(type=TEXT, credentials=SECRET_KEY),
                relabelings=_RELABELINGS,
            ),
        },
    ),
    "PodMonitor": _closed(
        ("selector", "podMetricsEndpoints"),
        selector=_closed(matchLabels=TEXTS),
        podTargetLabels={"type": "array", "items": TEXT},
        podMetricsEndpoints={
            "type": "array",
            "items": _closed(port=TEXT, path=TEXT, interval=TEXT, relabelings=_RELABELINGS),
        },
    ),
    "ScrapeConfig": _closed(
        honorLabels={"type": "boolean"},
        scrapeInterval=TEXT,
        metricsPath=TEXT,
        relabelings=_RELABELINGS,
        httpSDConfigs={
            "type": "array",
            "items": _closed(
                ("url",),
                url=TEXT,
                refreshInterval=TEXT,
                authorization=_closed(type=TEXT, credentials=SECRET_KEY),
            ),
        },
    ),
    "PrometheusRule": _closed(
        ("groups",),
        groups={
            "type": "array",
            "items": _closed(
                ("name", "rules"), name=TEXT, interval=TEXT, rules={"type": "array", "minItems": 1}
            ),
        },
    ),
    "HTTPRoute": _closed(
        ("parentRefs", "rules"),
        parentRefs={"type": "array", "minItems": 1, "items": {"type": "object", "required": ["name"]}},
        hostnames={"type": "array", "items": TEXT},
        rules={
            "type": "array",
            "items": _closed(
                matches={"type": "array"},
                timeouts=_closed(request=TEXT),
                backendRefs={"type": "array", "items": _closed(("name", "port"), name=TEXT, port=COUNT)},
            ),
        },
    ),
}


def check(item: dict[str, Any]) -> None:
    """Raise where a custom resource holds what its operator would not take."""
    jsonschema.validate(item["spec"], SPECIFICATIONS[item["kind"]])
    folder = os.environ.get("SLOTLINE_CRDS")
    for path in sorted(Path(folder).glob("*.yaml")) if folder else ():
        for kind, version, validator in _definitions(path):
            if (kind, version) == (item["kind"], item["apiVersion"].partition("/")[2]):
                validator.validate({"spec": _known_to(path, item["spec"])})


def _known_to(path: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """KubeRay 1.5 has no upgradeStrategy; values.yaml says so."""
    return {key: value for key, value in spec.items() if key != "upgradeStrategy" or "1.5" not in path.name}


@cache
def _definitions(path: Path) -> list[tuple[str, str, jsonschema.Draft202012Validator]]:
    spec = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
    return [
        (
            spec["names"]["kind"],
            one["name"],
            jsonschema.Draft202012Validator(_strict(one["schema"]["openAPIV3Schema"])),
        )
        for one in spec["versions"]
    ]


def _strict(schema: Any) -> Any:
    """The schema as the server reads it, and unknown fields are an error."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {name: _strict(value) for name, value in schema.items()}
    if out.pop("x-kubernetes-int-or-string", False) is True:
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if isinstance(out.get("pattern"), str) and out["pattern"].startswith("^(?i)"):
        out["pattern"] = "(?i)^" + out["pattern"].removeprefix("^(?i)")  # Python wants flags first
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        out["additionalProperties"] = False
    return out
