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

from service.orchestrator.ray.jobs_api import KUBERNETES_NODE_LABEL
from tests.deploy.crds import check
from tests.deploy.rendering import (
    CHART,
    KUBERNETES,
    OF_EVERY_RAY_NODE,
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
from tests.tiers import some_by_day


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


def test_a_template_reaches_every_node_and_a_groups_own_goes_over_it(chart: Chart):
    common = {
        "env": {"AWS_REGION": "eu-1", "KEY": {"secretKeyRef": {"name": "bucket", "key": "id"}}},
        "template": {
            "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "kept"}},
            "spec": {
                "serviceAccountName": "training",
                "containers": [
                    {
                        "name": "ray",
                        "envFrom": [{"secretRef": {"name": "bucket"}}],
                        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
                    }
                ],
                "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
            },
        },
    }
    template = {
        "metadata": {"labels": {"team": "speech"}},
        "spec": {
            "serviceAccountName": "other",
            "containers": [
                {
                    "name": "ray",
                    "envFrom": [{"secretRef": {"name": "more"}}],
                    "volumeMounts": [{"name": "disk", "mountPath": "/scratch"}],
                }
            ],
            "volumes": [{"name": "disk", "emptyDir": {}}],
        },
    }
    own = group(name="own", env={"AWS_REGION": "us-1"}, template=template)
    nodes = nodes_of(rendered(chart, created(common=common, workerGroups=[group(), own])))
    assert nodes.keys() == {"head", "gpu", "own"}
    for name, node in nodes.items():
        container = container_of(node)
        mine = name == "own"
        own = {"AWS_REGION": "us-1" if mine else "eu-1", "KEY": "bucket/id"}
        assert variables(container) == own | OF_EVERY_RAY_NODE
        secrets = [one["secretRef"]["name"] for one in container["envFrom"]]
        assert secrets == (["bucket", "more"] if mine else ["bucket"])
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared-memory": "/dev/shm", "ray-logs": "/tmp/ray", "runs": "/runs"} | (
            {"disk": "/scratch"} if mine else {}
        )
        assert {volume["name"] for volume in node["spec"]["volumes"]} == mounts.keys()
        assert node["spec"]["serviceAccountName"] == ("other" if mine else "training")
        assert node["metadata"]["labels"] == {"team": "speech" if mine else "vision"}
        assert node["metadata"]["annotations"] == {"note": "kept"}
        assert node["spec"]["securityContext"]["fsGroup"] == 1000, "or the user may not write the volume"


def test_the_head_alone_takes_what_is_said_of_the_head(chart: Chart):
    head = {"env": {"SSL_CERT_FILE": "/ca/ca.pem"}, "template": {"spec": {"serviceAccountName": "driver"}}}
    nodes = nodes_of(rendered(chart, created(head=head)))
    assert variables(container_of(nodes["head"])) == head["env"] | OF_EVERY_RAY_NODE
    assert nodes["head"]["spec"]["serviceAccountName"] == "driver"
    assert "serviceAccountName" not in nodes["gpu"]["spec"]
    assert variables(container_of(nodes["gpu"])) == OF_EVERY_RAY_NODE


def test_a_group_may_leave_its_drivers_lines_in_files(chart: Chart):
    nodes = nodes_of(rendered(chart, created(head={"env": {"SLOTLINE_LOG_COPY_TO": ""}})))
    assert variables(container_of(nodes["head"]))["SLOTLINE_LOG_COPY_TO"] == ""
    assert variables(container_of(nodes["gpu"]))["SLOTLINE_LOG_COPY_TO"] == "/proc/1/fd/1"


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 120), ({"drainSeconds": 47}, 47), ({"drainSeconds": 0}, None)]
)
def test_a_workers_pod_is_drained_before_it_ends_and_has_the_time_for_that(
    chart: Chart, given: dict[str, Any], seconds: int | None
):
    """Kubernetes counts the hook's seconds among those of the grace; the head has no workers to move."""
    pods = nodes_of(rendered(chart, created(workerGroups=[group(**given)])))
    head, worker = pods.pop("head"), next(iter(pods.values()))
    assert "lifecycle" not in container_of(head) and "terminationGracePeriodSeconds" not in head["spec"]
    if seconds is None:
        assert (
            "lifecycle" not in container_of(worker) and "terminationGracePeriodSeconds" not in worker["spec"]
        )
        return
    hook = container_of(worker)["lifecycle"]["preStop"]["exec"]["command"]
    assert hook == ["env", f"SLOTLINE_DRAIN_S={seconds}", "python", "-m", "worker.tasks", "drain"]
    assert worker["spec"]["terminationGracePeriodSeconds"] == seconds + 30


def test_each_ray_node_has_the_name_of_its_kubernetes_node_as_a_label(chart: Chart):
    """Kubernetes replaces references to variables that stand before, and only these."""
    for node in nodes_of(rendered(chart, created())).values():
        names = [entry["name"] for entry in container_of(node)["env"]]
        assert names.index("KUBERNETES_NODE_NAME") < names.index("RAY_OVERRIDE_LABELS")
        label = json.loads(variables(container_of(node))["RAY_OVERRIDE_LABELS"])
        assert label == {KUBERNETES_NODE_LABEL: "$(KUBERNETES_NODE_NAME)"}


def test_a_sidecar_stands_beside_ray_which_stays_the_first_container(chart: Chart):
    """KubeRay takes the first container for Ray's."""
    sidecar = {
        "name": "logs",
        "image": "collector:1",
        "volumeMounts": [{"name": "ray-logs", "mountPath": "/in"}],
    }
    starter = {"name": "fetch", "image": "fetch:1"}
    template = {"spec": {"containers": [sidecar, {"name": "ray", "tty": True}], "initContainers": [starter]}}
    own = group(template=template)
    pod = nodes_of(rendered(chart, created(workerGroups=[own])))["gpu"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["ray", "logs"]
    assert pod["containers"][0]["tty"] is True and "image" in pod["containers"][0]
    assert pod["containers"][1] == sidecar and pod["initContainers"] == [starter]


def test_a_volume_of_the_same_name_replaces_the_charts(chart: Chart):
    """A merged one would have two sources, which Kubernetes refuses."""
    claim = {
        "name": "ray-logs",
        "ephemeral": {
            "volumeClaimTemplate": {
                "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}
            }
        },
    }
    template = {"spec": {"volumes": [claim]}}
    pod = nodes_of(rendered(chart, created(workerGroups=[group(template=template)])))["gpu"]["spec"]
    assert [volume for volume in pod["volumes"] if volume["name"] == "ray-logs"] == [claim]
    assert {"name": "ray-logs", "mountPath": "/tmp/ray"} in pod["containers"][0]["volumeMounts"]


def test_numbers_keep_their_form_in_a_template(chart: Chart):
    template = {
        "spec": {
            "terminationGracePeriodSeconds": 12_345_678,
            "containers": [{"name": "ray", "env": [{"name": "N", "value": "1e6"}]}],
        }
    }
    pod = nodes_of(
        rendered(chart, created(workerGroups=[group(template=template, env={"BIG": 33_554_432})]))
    )["gpu"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 12_345_678
    assert variables(pod["containers"][0]) == {"BIG": "33554432", "N": "1e6"} | OF_EVERY_RAY_NODE


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("nodeSelector", {"zone": "a"}, r"template\.spec\.nodeSelector"),
        ("podLabels", {"team": "a"}, r"template\.metadata\.labels"),
        ("volumeMounts", [], r"template\.spec\.containers, in an item \{name: ray, \.\.\.\}"),
        ("initContainers", [], r"template\.spec\.initContainers"),
    ],
)
def test_a_field_that_a_template_replaces_is_refused_with_its_place(
    chart: Chart, field: str, value: Any, place: str
):
    for where, values in (
        ("workerGroups gpu", created(workerGroups=[group(**{field: value})])),
        ("head", created(head={field: value})),
        ("common", created(common={field: value})),
    ):
        chart.validate_schema(values)
        with pytest.raises(HelmError, match=rf"ray\.cluster\.{where}: {field} has gone: write it in {place}"):
            objects(chart, values)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ({"spec": {"hostNetwork": True}}, "hostNetwork: true beside template"),
        ({"spec": {"containers": [{"name": "ray", "resources": {}}]}}, "resources beside template"),
        ({"specs": {}}, "specs"),
        ({"spec": {"containers": [{"image": "a"}]}}, "name"),
    ],
    ids=["hostNetwork", "resources", "typing mistake", "no name"],
)
def test_a_template_that_would_bypass_the_chart_is_refused(chart: Chart, template: dict[str, Any], word: str):
    values = created(workerGroups=[group(template=template)])
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)


def test_ports_of_ray_are_values_and_probes_addresses_and_policies_follow(chart: Chart):
    head = {
        "hostNetwork": True,
        "rayStartParams": {"port": 6400, "dashboard-port": 8300, "metrics-export-port": "8090"},
    }
    params = {"dashboard-agent-listen-port": 52400, "min-worker-port": 30000, "max-worker-port": 30999}
    values = created(
        head=head, workerGroups=[group(hostNetwork=True, rayStartParams=params), group(name="x")]
    )
    values["networkPolicy"] = {"enabled": True, "nodeCidrs": ["10.0.0.0/8"]}
    found = rendered(chart, values)
    cluster, nodes = spec(found), nodes_of(found)
    ports = {port["name"]: port["containerPort"] for port in container_of(nodes["head"])["ports"]}
    assert ports == {"gcs-server": 6400, "dashboard": 8300, "metrics": 8090}
    assert cluster["headGroupSpec"]["rayStartParams"]["port"] == "6400", "KubeRay tells workers this one"
    assert of_kind(found, "ConfigMap")["data"]["RAY_ADDRESS"].endswith(":8300")
    assert "localhost:8300/api/gcs_healthz" in json.dumps(container_of(nodes["head"])["livenessProbe"])
    started = cluster["workerGroupSpecs"][0]["rayStartParams"]
    assert {name: str(value) for name, value in params.items()}.items() <= started.items()
    for probe in ("livenessProbe", "readinessProbe"):
        (*_, command) = container_of(nodes["gpu"])[probe]["exec"]["command"]
        assert "localhost:52400/api/local_raylet_healthz" in command and "gcs" not in command
        assert probe not in container_of(nodes["x"]), "KubeRay's own asks Ray's default ports"
    ingress = found["NetworkPolicy", "demo-slotline-ray"]["spec"]["ingress"]
    assert {"protocol": "TCP", "port": "dashboard"} in [
        port for rule in ingress for port in rule.get("ports", ())
    ]


@pytest.mark.slow
def test_the_object_store_lies_in_shared_memory_and_leaves_most_of_it(chart: Chart):
    def sizes(**fields: Any) -> tuple[int, int]:
        found = rendered(chart, created(workerGroups=[group(**fields)]))
        store = int(spec(found)["workerGroupSpecs"][0]["rayStartParams"]["object-store-memory"])
        (volume,) = (v for v in nodes_of(found)["gpu"]["spec"]["volumes"] if v["name"] == "shared-memory")
        return store >> 20, int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) << 10

    assert sizes(sharedMemory="2Gi") == (512, 2048)
    assert sizes(sharedMemory="64Gi") == (4096, 65536)
    assert sizes(sharedMemory="4Gi", rayStartParams={"object-store-memory": 3 << 30}) == (3072, 4096)
    for wrong, word in (
        ({"sharedMemory": "1Gi", "rayStartParams": {"object-store-memory": 2 << 30}}, "raise sharedMemory"),
        ({"sharedMemory": "32Mi"}, "raise sharedMemory"),
        ({"sharedMemory": "8Gi", "resources": {"limits": {"memory": "8Gi"}}}, "memory limit of 8Gi"),
    ):
        with pytest.raises(HelmError, match=word):
            objects(chart, created(workerGroups=[group(**wrong)]))


def test_rays_files_have_a_bounded_volume_and_the_disk_for_it_is_asked_for(chart: Chart):
    own = {"limits": {"nvidia.com/gpu": 8, "ephemeral-storage": "9Gi"}}
    groups = [group(scratch="40Gi"), group(name="own", resources=own)]
    nodes = nodes_of(rendered(chart, created(workerGroups=groups)))
    for name, size in (("head", "10Gi"), ("gpu", "40Gi"), ("own", "10Gi")):
        (volume,) = (v for v in nodes[name]["spec"]["volumes"] if v["name"] == "ray-logs")
        assert volume["emptyDir"] == {"sizeLimit": size}
    assert container_of(nodes["gpu"])["resources"]["requests"] == {"ephemeral-storage": "40Gi"}
    assert container_of(nodes["own"])["resources"] == own, "what is said of the disk stays"


def test_nccl_gets_its_settings_in_every_worker_group_and_a_group_has_the_last_word(chart: Chart):
    nccl = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_BUFFSIZE": 8388608}
    own = group(name="own", env={"NCCL_SOCKET_IFNAME": "ib0"})
    nodes = nodes_of(rendered(chart, created(nccl=nccl, workerGroups=[group(), own])))
    shared = {"NCCL_BUFFSIZE": "8388608"} | OF_EVERY_RAY_NODE
    assert variables(container_of(nodes["gpu"])) == {"NCCL_SOCKET_IFNAME": "eth0"} | shared
    assert variables(container_of(nodes["own"])) == {"NCCL_SOCKET_IFNAME": "ib0"} | shared
    assert variables(container_of(nodes["head"])) == OF_EVERY_RAY_NODE
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
    common = {"template": {"spec": {"securityContext": {"runAsUser": 2000, "fsGroup": 2000}}}}
    traced = {"name": "ray", "securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}
    own = group(template={"spec": {"containers": [traced]}})
    nodes = nodes_of(rendered(chart, created(common=common, workerGroups=[own])))
    for template in nodes.values():
        security = template["spec"]["securityContext"]
        assert (security["runAsUser"], security["fsGroup"], security["runAsNonRoot"]) == (2000, 2000, True)
    assert container_of(nodes["gpu"])["securityContext"]["capabilities"] == {
        "add": ["SYS_PTRACE"],
        "drop": ["ALL"],
    }


@pytest.mark.slow
def test_only_groups_with_gpus_offer_gpus(chart: Chart):
    """A Ray that finds a GPU by itself, on a node that has some, would offer it beside the pod that owns it."""
    cpu = group(name="cpu", cpuWorkers=4, resources={"limits": {"memory": "4Gi"}})
    none = group(name="none", resources={})
    mig = group(name="mig", resources={"limits": {"nvidia.com/mig-1g.5gb": 1}})
    found = spec(rendered(chart, created(workerGroups=[group(), cpu, none, mig])))
    start = {one["groupName"]: one["rayStartParams"] for one in found["workerGroupSpecs"]}
    assert found["headGroupSpec"]["rayStartParams"]["num-gpus"] == "0"
    assert "num-gpus" not in start["gpu"] and "num-gpus" not in start["mig"]
    assert start["cpu"]["num-gpus"] == start["none"]["num-gpus"] == "0"
    assert json.loads(json.loads(start["cpu"]["resources"])) == {"slotline_worker": 4}


@pytest.mark.slow
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


def budgets(chart: Chart, **cluster: Any) -> dict[str, dict[str, Any]]:
    """The spec of each budget of Ray's pods, by the part that it is for."""
    found = rendered(chart, created(**{"podDisruptionBudget": {"enabled": True}, **cluster}))
    name = of_kind(found, "RayCluster")["metadata"]["name"]
    specs = {
        key.removeprefix(f"{name}-"): item["spec"]
        for (kind, key), item in found.items()
        if kind == "PodDisruptionBudget"
    }
    for one in specs.values():
        # Kubernetes computes nothing else for pods of a resource without a scale
        assert isinstance(one["minAvailable"], int) and "maxUnavailable" not in one
        assert one["selector"]["matchLabels"]["ray.io/cluster"] == name
    return specs


@pytest.mark.parametrize(
    ("fields", "autoscaling", "pods"),
    [
        ({"replicas": 32, "minReplicas": 32, "maxReplicas": 32}, False, 32),
        ({"replicas": 2, "minReplicas": 0, "maxReplicas": 8}, False, 2),
        ({"replicas": 2, "minReplicas": 2, "maxReplicas": 3, "numOfHosts": 2}, False, 4),
        ({"replicas": 6, "minReplicas": 4, "maxReplicas": 8}, True, 4),
        ({}, False, 1),
    ],
    ids=["fixed", "room to grow", "several hosts", "autoscaling", "one node"],
)
def test_a_drain_takes_one_worker_of_a_group_at_a_time(
    chart: Chart, fields: dict[str, int], autoscaling: bool, pods: int
):
    """`pods` are those that are there at the least: as many evictions are allowed as there are more than minAvailable."""
    specs = budgets(chart, workerGroups=[group(**fields)], autoscaling={"enabled": autoscaling})
    assert pods - specs["gpu"]["minAvailable"] == 1
    of_group = specs["gpu"]["selector"]["matchLabels"]
    assert of_group["ray.io/group"] == "gpu" and of_group["ray.io/node-type"] == "worker"


def test_a_drain_leaves_the_head_alone_unless_values_let_it(chart: Chart):
    assert budgets(chart)["head"]["minAvailable"] == 1
    assert "head" not in budgets(chart, podDisruptionBudget={"enabled": True, "head": False})
    assert not any(kind == "PodDisruptionBudget" for kind, _ in rendered(chart, created()))


@pytest.mark.slow
def test_a_budget_that_lets_no_node_be_drained_is_refused(chart: Chart):
    four = {"replicas": 4, "minReplicas": 4, "maxReplicas": 4}
    assert budgets(chart, workerGroups=[group(**four, minAvailable=3)])["gpu"]["minAvailable"] == 3
    assert budgets(chart, workerGroups=[group(**four, minAvailable=0)])["gpu"]["minAvailable"] == 0
    with pytest.raises(HelmError, match=r"gpu has minAvailable 4 of 4 pods.*: 3 at most"):
        budgets(chart, workerGroups=[group(**four, minAvailable=4)])


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


def test_kueue_takes_a_cluster_that_grows_as_an_elastic_one(chart: Chart):
    """By its annotation, without which Kueue's webhook refuses a cluster with an autoscaler."""
    kueue, grows = {"scheduler": "kueue", "queue": "q"}, {"enabled": True}

    def annotations(**values: Any) -> dict[str, str]:
        return of_kind(rendered(chart, created(**values)), "RayCluster")["metadata"].get("annotations", {})

    elastic = {"kueue.x-k8s.io/elastic-job": "true"}
    assert annotations(gang=kueue, autoscaling=grows, annotations={"a": "b"}) == elastic | {"a": "b"}
    assert annotations(gang=kueue) == annotations(autoscaling=grows) == {}


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
    placing = {
        "nodeSelector": {"zone": "a"},
        "topologySpreadConstraints": spread,
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "training",
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
    }
    own = group(
        gpuType="NVIDIA-H200",
        rayLabels={"topology.kubernetes.io/zone": "a"},
        numOfHosts=2,
        template={"spec": placing},
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


@some_by_day("length", [53, 3, 45, 44, 46, 50], by_day=3)
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
        (created(gang={"scheduler": "kueue"}), "gang.queue"),
        (
            created(workerGroups=[group(rayLabels={"topology.kubernetes.io/rak": "r1"})]),
            "topology.kubernetes.io/rak",
        ),
        (created(workerGroups=[group(volumeMount=[])]), "volumeMount"),
        (created(head={"drivers": 0}), "drivers"),
        (created(gcsFaultTolerance={"redisAddress": "redis"}), "redisAddress"),
        ({**created(), "fullnameOverride": "1st"}, "begin with a letter"),
    ],
    ids=[
        "no queue",
        "label that nobody reads",
        "typing mistake",
        "no driver",
        "no port of Redis",
        "bad name",
    ],
)
def test_a_cluster_that_cannot_work_is_refused_by_name(chart: Chart, values: dict[str, Any], word: str):
    with pytest.raises(HelmError, match=word):
        chart.validate_schema(values)
        objects(chart, values)
