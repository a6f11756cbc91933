"""The Ray pods of the chart: data, rights, networks, devices, memory, scheduling."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from helm_python import Chart, HelmError

from tests.deploy.crds import check
from tests.deploy.rendering import (
    CHART,
    KUBERNETES,
    Objects,
    case,
    container_of,
    created,
    group,
    nodes_of,
    objects,
    of_kind,
    variables,
)


@pytest.fixture(scope="module")
def chart() -> Iterator[Chart]:
    with Chart.load(CHART) as loaded:
        yield loaded


def rendered(chart: Chart, values: dict[str, Any], **more: Any) -> Objects:
    """The objects, every one valid by the schema of the values and of Kubernetes."""
    chart.validate_schema(values)
    found = objects(chart, values, **more)
    check(of_kind(found, "RayCluster"))
    for template in nodes_of(found).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        pod["metadata"] = {**template.get("metadata", {}), "name": "node"}
        kubernetes_validate.validate(pod, KUBERNETES[-1], strict=True)
    return found


def spec(found: Objects) -> dict[str, Any]:
    return of_kind(found, "RayCluster")["spec"]


def test_a_field_that_kuberay_does_not_know_is_found(chart: Chart):
    cluster = of_kind(objects(chart, created()), "RayCluster")
    check(cluster)
    cluster["spec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        check(cluster)


def test_durable_data_reaches_the_head_and_every_group(chart: Chart):
    common = {
        "env": {"AWS_REGION": "eu-1", "KEY": {"secretKeyRef": {"name": "bucket", "key": "id"}}},
        "envFrom": [{"secretRef": {"name": "bucket"}}],
        "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
        "serviceAccountName": "training",
        "podLabels": {"team": "vision"},
        "podAnnotations": {"note": "kept"},
    }
    own = group(
        name="own",
        env={"AWS_REGION": "us-1"},
        volumes=[{"name": "scratch", "emptyDir": {}}],
        volumeMounts=[{"name": "scratch", "mountPath": "/scratch"}],
        serviceAccountName="other",
        podLabels={"team": "speech"},
    )
    nodes = nodes_of(rendered(chart, created(common=common, workerGroups=[group(), own])))
    assert nodes.keys() == {"head", "gpu", "own"}
    for name, template in nodes.items():
        container = container_of(template)
        mine = name == "own"
        assert variables(container) == {"AWS_REGION": "us-1" if mine else "eu-1", "KEY": "bucket/id"}
        assert container["envFrom"] == common["envFrom"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared-memory": "/dev/shm", "runs": "/runs"} | (
            {"scratch": "/scratch"} if mine else {}
        )
        assert {volume["name"] for volume in template["spec"]["volumes"]} == mounts.keys()
        assert template["spec"]["serviceAccountName"] == ("other" if mine else "training")
        assert template["metadata"]["labels"] == {"team": "speech" if mine else "vision"}
        assert template["metadata"]["annotations"] == {"note": "kept"}
        assert template["spec"]["securityContext"]["fsGroup"] == 1000, "or the user may not write the volume"


def test_the_head_alone_takes_what_is_said_of_the_head(chart: Chart):
    head = {
        "env": {"SSL_CERT_FILE": "/ca/ca.pem"},
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
        "serviceAccountName": "driver",
        "podAnnotations": {"head": "yes"},
    }
    nodes = nodes_of(rendered(chart, created(head=head)))
    assert variables(container_of(nodes["head"])) == head["env"]
    assert nodes["head"]["spec"]["serviceAccountName"] == "driver"
    assert "serviceAccountName" not in nodes["gpu"]["spec"]
    assert "metadata" not in nodes["gpu"]


def test_nccl_gets_its_settings_in_every_worker_group_and_a_group_has_the_last_word(chart: Chart):
    nccl = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_BUFFSIZE": 8388608}
    own = group(name="own", env={"NCCL_SOCKET_IFNAME": "ib0"})
    nodes = nodes_of(rendered(chart, created(nccl=nccl, workerGroups=[group(), own])))
    assert variables(container_of(nodes["gpu"])) == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_BUFFSIZE": "8388608"}
    assert variables(container_of(nodes["own"])) == {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_BUFFSIZE": "8388608"}
    assert variables(container_of(nodes["head"])) == {}
    with pytest.raises(HelmError, match="NCLL_DEBUG"):
        chart.validate_schema(created(nccl={"NCLL_DEBUG": "INFO"}))


def test_a_group_has_the_nodes_network_and_may_lock_memory_where_it_says_so(chart: Chart):
    nodes = nodes_of(
        rendered(chart, created(workerGroups=[group(hostNetwork=True, rdma=True), group(name="x")]))
    )
    pod, container = nodes["gpu"]["spec"], container_of(nodes["gpu"])
    assert pod["hostNetwork"] is True
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet", "or the head's name is not found"
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    security = pod["securityContext"]
    assert (security["runAsUser"], security["runAsNonRoot"]) == (0, False), "a capability reaches only root"
    for name in ("head", "x"):
        assert "hostNetwork" not in nodes[name]["spec"]
        assert container_of(nodes[name])["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert nodes[name]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_security_contexts_are_values(chart: Chart):
    common = {"podSecurityContext": {"runAsUser": 2000, "fsGroup": 2000}}
    own = group(securityContext={"capabilities": {"add": ["SYS_PTRACE"]}})
    nodes = nodes_of(rendered(chart, created(common=common, workerGroups=[own])))
    for template in nodes.values():
        security = template["spec"]["securityContext"]
        assert (security["runAsUser"], security["fsGroup"], security["runAsNonRoot"]) == (2000, 2000, True)
    assert container_of(nodes["gpu"])["securityContext"]["capabilities"] == {
        "add": ["SYS_PTRACE"],
        "drop": ["ALL"],
    }


def test_only_groups_with_gpus_offer_gpus(chart: Chart):
    """A Ray that finds a GPU by itself, on a node that has some, would offer it beside the pod that owns it."""
    cpu = group(name="cpu", cpuWorkers=4, resources={"limits": {"memory": "4Gi"}})
    none = group(name="none", resources={})
    mig = group(name="mig", resources={"limits": {"nvidia.com/mig-1g.5gb": 1}})
    found = spec(rendered(chart, created(workerGroups=[group(), cpu, none, mig])))
    start = {one["groupName"]: one["rayStartParams"] for one in found["workerGroupSpecs"]}
    assert found["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert start["gpu"] == start["mig"] == {}
    assert start["cpu"]["num-gpus"] == start["none"]["num-gpus"] == "0"
    assert json.loads(json.loads(start["cpu"]["resources"])) == {"slotline_worker": 4}


def test_the_heads_memory_follows_the_number_of_drivers(chart: Chart):
    def limit(**head: Any) -> str:
        resources = container_of(nodes_of(rendered(chart, created(head=head)))["head"])["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        return resources["limits"]["memory"]

    assert limit() == "6144Mi"
    assert limit(drivers=16) == "18432Mi"
    assert limit(drivers=2, memory={"baseMiB": 1024, "perDriverMiB": 512}) == "2048Mi"
    own = {"requests": {"memory": "9Gi"}, "limits": {"memory": "9Gi"}}
    assert limit(drivers=16, resources=own) == "9Gi"


def test_rays_state_may_outlive_the_head(chart: Chart):
    assert "gcsFaultToleranceOptions" not in spec(rendered(chart, created()))
    redis = {"redisAddress": "redis:6379", "redisPasswordSecret": {"name": "redis", "key": "password"}}
    found = spec(rendered(chart, created(gcsFaultTolerance={**redis, "externalStorageNamespace": "ml"})))
    assert found["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
        "externalStorageNamespace": "ml",
    }
    for template in nodes_of(rendered(chart, created(gcsFaultTolerance=redis))).values():
        assert "REDIS_PASSWORD" not in variables(container_of(template)), "KubeRay refuses both"


def test_a_drained_node_takes_neither_the_head_nor_a_worker_of_a_gang(chart: Chart):
    groups = [group(maxReplicas=3, numOfHosts=2), group(name="own", minAvailable=1)]
    budget = {"podDisruptionBudget": {"enabled": True}}
    found = rendered(chart, created(workerGroups=groups, **budget))
    budgets = {name: item["spec"] for (kind, name), item in found.items() if kind == "PodDisruptionBudget"}
    cluster = of_kind(found, "RayCluster")["metadata"]["name"]
    for one in budgets.values():
        # Kubernetes computes nothing else for pods of a resource without a scale
        assert isinstance(one["minAvailable"], int) and "maxUnavailable" not in one
        assert one["selector"]["matchLabels"]["ray.io/cluster"] == cluster
    wanted = {name.removeprefix(f"{cluster}-"): one["minAvailable"] for name, one in budgets.items()}
    assert wanted == {"head": 1, "gpu": 6, "own": 1}
    of_group = budgets[f"{cluster}-gpu"]["selector"]["matchLabels"]
    assert of_group["ray.io/group"] == "gpu" and of_group["ray.io/node-type"] == "worker"
    assert not any(kind == "PodDisruptionBudget" for kind, _ in rendered(chart, created()))


def test_an_upgrade_replaces_rays_pods_where_it_is_told_to(chart: Chart):
    assert "upgradeStrategy" not in spec(rendered(chart, created())), "KubeRay 1.5 does not know it"
    found = spec(rendered(chart, created(upgradeStrategy="Recreate")))
    assert found["upgradeStrategy"] == {"type": "Recreate"}
    with pytest.raises(HelmError, match="upgradeStrategy"):
        chart.validate_schema(created(upgradeStrategy="RollingUpdate"))


def test_the_autoscaler_runs_with_an_account_that_may_ask_for_pods(chart: Chart):
    found = rendered(chart, created(autoscaling={"enabled": True, "idleTimeoutSeconds": 120}))
    cluster, nodes = spec(found), nodes_of(found)
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 120
    assert nodes["head"]["spec"]["automountServiceAccountToken"] is True
    assert nodes["gpu"]["spec"]["automountServiceAccountToken"] is False
    still = rendered(chart, created())
    assert "enableInTreeAutoscaling" not in spec(still)
    assert nodes_of(still)["head"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("gang", "labels"),
    [
        ({"scheduler": "kueue", "queue": "q"}, {"kueue.x-k8s.io/queue-name": "q"}),
        (
            {"scheduler": "volcano", "queue": "q"},
            {"ray.io/gang-scheduling-enabled": "true", "volcano.sh/queue-name": "q"},
        ),
        (
            {"scheduler": "yunikorn", "queue": "q"},
            {
                "ray.io/gang-scheduling-enabled": "true",
                "yunikorn.apache.org/queue": "q",
                "yunikorn.apache.org/app-id": "demo-slotline-ray",
            },
        ),
    ],
    ids=["kueue", "volcano", "yunikorn"],
)
def test_a_cluster_starts_as_a_whole_by_the_scheduler_that_is_named(
    chart: Chart, gang: dict[str, str], labels: dict[str, str]
):
    plain = of_kind(rendered(chart, created()), "RayCluster")["metadata"]["labels"]
    ours = of_kind(rendered(chart, created(gang=gang, labels={"a": "b"})), "RayCluster")["metadata"]["labels"]
    assert ours == plain | labels | {"a": "b"}


def test_placing_is_by_values(chart: Chart):
    spread = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"ray.io/group": "gpu"}},
        }
    ]
    own = group(
        gpuType="NVIDIA-H200",
        nodeSelector={"zone": "a"},
        rayLabels={"topology.kubernetes.io/zone": "a"},
        topologySpreadConstraints=spread,
        affinity={"podAntiAffinity": {}},
        priorityClassName="training",
        runtimeClassName="nvidia",
        schedulerName="volcano",
        numOfHosts=2,
    )
    found = rendered(chart, created(workerGroups=[own]))
    pod, cluster = nodes_of(found)["gpu"]["spec"], spec(found)
    assert pod["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "NVIDIA-H200"}
    assert pod["topologySpreadConstraints"] == spread
    assert (pod["priorityClassName"], pod["runtimeClassName"], pod["schedulerName"]) == (
        "training",
        "nvidia",
        "volcano",
    )
    assert cluster["workerGroupSpecs"][0]["labels"] == {"topology.kubernetes.io/zone": "a"}
    assert cluster["workerGroupSpecs"][0]["numOfHosts"] == 2


@pytest.mark.parametrize("length", [3, 44, 45, 46, 50, 53])
def test_no_name_is_too_long_for_kuberay(chart: Chart, length: int):
    """Helm takes release names of 53 characters; KubeRay shortens what it makes of more than 50 on its own."""
    name = "r" * length
    values = case("production")
    found = rendered(chart, values, name=name)
    cluster = of_kind(found, "RayCluster")["metadata"]["name"]
    assert len(cluster) <= 50
    assert of_kind(found, "ConfigMap")["data"]["RAY_ADDRESS"] == f"http://{cluster}-head-svc.ml.svc:8265"
    assert max(len(name) for _, name in found) <= 63


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (
            created(gang={"scheduler": "kueue", "queue": "q"}, autoscaling={"enabled": True}),
            "fixed size",
        ),
        (created(gang={"scheduler": "kueue"}), "gang.queue"),
        (created(workerGroups=[group(volumeMount=[])]), "volumeMount"),
        (created(head={"drivers": 0}), "drivers"),
        (created(gcsFaultTolerance={"redisAddress": "redis"}), "redisAddress"),
        ({**created(), "fullnameOverride": "1st"}, "begin with a letter"),
    ],
    ids=["kueue and autoscaling", "no queue", "typing mistake", "no driver", "no port of Redis", "bad name"],
)
def test_a_cluster_that_cannot_work_is_refused_by_name(chart: Chart, values: dict[str, Any], word: str):
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)
