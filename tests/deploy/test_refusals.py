"""Values that a live cluster would refuse, or take and never train with: the chart says it before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError

from tests.deploy.rendering import ANY_RAY, CHART, case, created, group, nodes_of, objects

GPUS = {"nvidia.com/gpu": 8}


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


def groups(*given: dict[str, Any]) -> dict[str, Any]:
    return created(workerGroups=list(given))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (groups(group(), group()), "has gpu twice"),
        (groups(group(replicas=5)), "replicas 5, not within minReplicas 1 and maxReplicas 1"),
        (groups(group(minReplicas=3, replicas=3)), "replicas 3, not within minReplicas 3 and maxReplicas 1"),
        (groups(group(name="g" * 64)), "name"),
        (groups(group(gpuType="NVIDIA H100 80GB HBM3")), "gpuType"),
        (groups(group(gpuType="NVIDIA-H100", resources={"limits": {"cpu": 4}})), "limits name no GPU"),
        (groups(group(resources={"requests": GPUS, "limits": {"cpu": 4}})), "not in resources.limits"),
        (groups(group(resources={"limits": {"nvidia.com/gpu": 1.5}})), "gpu"),
        (groups(group(resources={"limits": {**GPUS, "memory": "64 GB"}})), "memory"),
        (created(workerGroups=None), "workerGroups is empty"),
        (created(common={"podLabels": {"team": "a b"}}), "team"),
        (created(gang={"scheduler": "kueue", "queue": "q" * 64}), "queue"),
        ({"ray": {**ANY_RAY["ray"], **created()["ray"]}}, "leave one of them out"),
        ({**ANY_RAY, "nameOverride": "-x"}, "nameOverride"),
        ({**ANY_RAY, "nodeSelector": {"zone": "eu west"}}, "zone"),
        ({**ANY_RAY, "resources": {"limits": {"memory": "4 GB"}}}, "memory"),
    ],
)
def test_what_kubernetes_or_kuberay_would_refuse_later_is_refused_here(
    chart: Chart, values: dict[str, Any], word: str
):
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)


@pytest.mark.parametrize(
    "resources",
    [
        {"requests": {"cpu": "500m", "memory": "64Gi"}, "limits": {**GPUS, "memory": 64_000_000_000}},
        {"limits": {"amd.com/gpu": "8", "cpu": 1.5, "rdma/hca_shared": 1}},
        {"limits": {"nvidia.com/mig-1g.10gb": 2, "ephemeral-storage": "1.5T"}},
    ],
    ids=str,
)
def test_amounts_as_kubernetes_writes_them_are_taken(chart: Chart, resources: dict[str, Any]):
    values = groups(group(resources=resources, gpuType="NVIDIA-H100-80GB-HBM3"))
    chart.validate_schema(values)
    assert nodes_of(objects(chart, values))["gpu"]["spec"]["containers"][0]["resources"] == resources


def test_a_great_many_cpu_workers_are_a_whole_number(chart: Chart):
    found = objects(chart, groups(group(cpuWorkers=2_000_000, resources={"limits": {"cpu": 4}})))
    (one,) = next(item for (kind, _), item in found.items() if kind == "RayCluster")["spec"][
        "workerGroupSpecs"
    ]
    assert one["rayStartParams"]["resources"] == '"{\\"slotline_worker\\": 2000000}"'


def test_a_value_of_nothing_leaves_no_hole(chart: Chart):
    """`key: null` takes a default away: what is left renders without it, or is refused by its name."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in _sections_and_names(defaults):
        values = case("production")
        inner = values
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = None
        try:
            chart.validate_schema(values)
            text = yaml.safe_dump(list(objects(chart, values).values()))
        except HelmError as error:
            assert path[-1] in str(error) and "nil pointer" not in str(error), (path, str(error))
            continue
        assert "<nil>" not in text and "%!" not in text, path


def test_hosts_that_no_cluster_takes_are_refused(chart: Chart):
    for wrong in (
        {"ingress": {"enabled": True, "host": "a b"}},
        {"httpRoute": {"enabled": True, "hostnames": ["https://x.y"]}},
    ):
        with pytest.raises(HelmError, match="does not match pattern"):
            chart.validate_schema({**ANY_RAY, **wrong})
    chart.validate_schema({**ANY_RAY, "ingress": {"enabled": True, "host": "*.slotline.example.com"}})


def _sections_and_names(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every section, and of the values in one those that stand in the midst of an address or of an image's name."""
    for key, value in values.items():
        if isinstance(value, dict) or key in ("repository", "tag", "port", "last"):
            yield (*above, key)
        if isinstance(value, dict):
            yield from _sections_and_names(value, (*above, key))
