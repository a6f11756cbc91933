"""Values that a live cluster would refuse, or take and never train with: the chart says it before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError

from service.orchestrator.planning.pool import LEAST_PROCESS_BYTES, SERVER_BYTES
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
        (created(common={"template": {"metadata": {"labels": {"team": "a b"}}}}), "team"),
        (created(gang={"scheduler": "kueue", "queue": "q" * 64}), "queue"),
        ({"ray": {**ANY_RAY["ray"], **created()["ray"]}}, "leave one of them out"),
        ({**ANY_RAY, "nameOverride": "-x"}, "nameOverride"),
        ({**ANY_RAY, "template": {"spec": {"nodeSelector": {"zone": "eu west"}}}}, "zone"),
        (
            {**ANY_RAY, "nodeSelector": {"zone": "a"}},
            "nodeSelector has gone: write it in template.spec.nodeSelector",
        ),
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
    rendered = nodes_of(objects(chart, values))["gpu"]["spec"]["containers"][0]["resources"]
    assert rendered["limits"] == resources["limits"]
    assert rendered.get("requests", {}).items() >= resources.get("requests", {}).items()


def _with_memory(limit: Any, processes: int | str, each: int | str | None) -> dict[str, Any]:
    settings = {"SLOTLINE_PLAN_PROCESSES": processes}
    if each is not None:
        settings["SLOTLINE_PLAN_MEMORY_BYTES"] = each
    return {**ANY_RAY, "settings": settings, "resources": {"limits": {"memory": limit}}}


@pytest.mark.parametrize(
    ("limit", "processes", "each"),
    [
        ("2Gi", 1, None),
        ("3G", 1, None),
        ("8Gi", "1", 4 << 30),
        (3 << 30, 3, "536870912"),
        ("1900M", 1, 1 << 29),
    ],
    ids=str,
)
def test_planning_processes_that_do_not_fit_into_the_containers_memory_are_refused(
    chart: Chart, limit: Any, processes: int | str, each: int | str | None
):
    """By the amounts that the service itself counts with: the chart takes exactly what the service does not warn of."""
    number, unit = re.fullmatch(r"([0-9]+)([MG]i?)?", str(limit)).groups()
    container = int(number) * {None: 1, "M": 10**6, "G": 10**9, "Gi": 1 << 30}[unit]
    least = LEAST_PROCESS_BYTES if each is None else int(each)
    values = _with_memory(limit, processes, each)
    chart.validate_schema(values)
    if (int(processes) + 1) * least + SERVER_BYTES > container:
        with pytest.raises(
            HelmError, match=f"resources.limits.memory is {limit}, and {int(processes) + 1} planning"
        ):
            objects(chart, values)
    else:
        assert objects(chart, values)


def test_a_great_many_cpu_workers_are_a_whole_number(chart: Chart):
    found = objects(chart, groups(group(cpuWorkers=2_000_000, resources={"limits": {"cpu": 4}})))
    (one,) = next(item for (kind, _), item in found.items() if kind == "RayCluster")["spec"][
        "workerGroupSpecs"
    ]
    assert one["rayStartParams"]["resources"] == '"{\\"slotline_worker\\": 2000000}"'


@pytest.mark.slow
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
