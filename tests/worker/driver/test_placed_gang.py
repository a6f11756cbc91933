"""Gangs on a Ray cluster of several nodes: where meshes are placed, and what is said when a node is gone."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from service.jobs.drivers import make_placement
from service.schemas.drivers import PlacedMesh, PlacementRequest
from service.spec.states import NodeMark, NodeState
from tests.polling import until
from tests.worker.actor.test_actor import job
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.resident import AS_OTHERS, Resident
from tests.worker.workers import placement_of
from worker.contract.failures import AttemptFailure, CrashReport
from worker.contract.reasons import Reason
from worker.driver.gang import drains, lost_workers, reservation
from worker.driver.gang import gang as gang_module
from worker.driver.gang.gang import Gang
from worker.driver.gang.phases import Phase
from worker.driver.gang.reservation import AcceleratorDemand, Reservation, placement_text
from worker.driver.limits import Limits
from worker.driver.stopping import Cancelled, Interruption
from worker.machine import node as node_module
from worker.machine.node import (
    ClusterNode,
    WorkerAddress,
    cluster_nodes,
    lost_nodes,
    offered_nodes,
    spare_nodes,
)

LIMIT_S = 60.0
_PREEMPTION = 2  # DrainNodeReason of Ray's autoscaler.proto


@pytest.fixture(scope="module")
def cluster():
    """Nodes of 3, 3 and 2 slots, none on the head."""
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False, _system_config=AS_OTHERS)
    for slots in (3, 3, 2):
        cluster.add_node(num_cpus=1, resources={"slotline_worker": slots})
    ray.init(cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def ask_for(sizes, tensor=1):
    """A placer as the driver has it, without HTTP."""
    meshes = [{"workers": size, "tensor": tensor} for size in sizes]
    return lambda nodes: placement_of({"nodes": nodes, "meshes": meshes})


def make_gang(sizes, place, start_s=60.0, **given) -> Gang:
    limits = Limits(start_s=start_s)
    return Gang(sizes=sizes, device="cpu", limits=limits, interruption=Interruption(), place=place, **given)


def start(gang: Gang) -> list[set[str]]:
    """The node ids of each mesh."""
    gang.start(ray.remote(Resident), lambda mesh, worker: {"mesh": mesh, "worker": worker})
    return [
        {address.node_id for address in gang.addresses if address.mesh == mesh.name} for mesh in gang.meshes
    ]


def node_ids(slots: int) -> list[str]:
    return [node.node_id for node in cluster_nodes() if node.resources.get("slotline_worker") == slots]


@pytest.mark.ray
@pytest.mark.slow
def test_meshes_stay_whole_where_ray_alone_splits_one(cluster):
    """Three meshes of 2 on free slots 3, 3 and 2: bundles in order fill a node of 3 and split the second mesh."""
    with make_gang([2, 2, 2], ask_for([2, 2, 2])) as gang:
        nodes = start(gang)
        assert [len(ids) for ids in nodes] == [1, 1, 1]
        assert len(set.union(*nodes)) == 3, "no node holds two of them"
        said = placement_text(gang.addresses, cluster_nodes())
        assert said.startswith("6 workers on 3 nodes: m0 on ") and "spread" not in said
    with make_gang([2, 2, 2], lambda nodes: None) as gang:
        assert max(len(ids) for ids in start(gang)) == 2, "PACK alone"


def demand_beside(monkeypatch, answers, raise_if_interrupted=lambda: None):
    """A demand for 3 workers whose placement groups answer so, one after the other: None for one that never has its
    accelerators; and the numbers of the groups that were removed."""
    removed: list[int] = []

    def get(ready):
        if isinstance(answer := answers[ready], Exception):
            raise answer
        return answer

    fake = SimpleNamespace(
        _private=SimpleNamespace(state=SimpleNamespace(available_resources_per_node=dict)),
        available_resources=lambda: {"slotline_worker": 2.0},
        cluster_resources=lambda: {"slotline_worker": 7.0},
        exceptions=ray.exceptions,
        wait=lambda refs, timeout: (refs, []) if answers[refs[0]] is not None else ([], refs),
        get=get,
    )
    made = iter(range(len(answers)))

    def placement_group(bundles, **_):
        number = next(made)
        return SimpleNamespace(number=number, ready=lambda: number)

    monkeypatch.setattr(reservation, "_PLACE_AGAIN_S", 0.0)
    monkeypatch.setattr(reservation, "ray", fake)
    monkeypatch.setattr(reservation, "cluster_nodes", list)
    monkeypatch.setattr(reservation, "placement_group", placement_group)
    monkeypatch.setattr(reservation, "remove_placement_group", lambda group: removed.append(group.number))
    demand = AcceleratorDemand(
        [1, 2],
        device="cpu",
        workers_per_gpu=1,
        place=lambda nodes: None,
        drains=SimpleNamespace(read=lambda: None, nodes={}),
        raise_if_interrupted=raise_if_interrupted,
    )
    return demand, removed


def test_a_cancellation_while_accelerators_are_waited_for_leaves_no_placement_group(monkeypatch):
    looks = iter([None, None])

    def raise_if_interrupted():
        if next(looks, "cancelled") == "cancelled":
            raise Cancelled

    demand, removed = demand_beside(monkeypatch, [None], raise_if_interrupted)
    with pytest.raises(Cancelled):
        demand.reserve(0, LIMIT_S)
    assert removed == [0]


def test_accelerators_that_are_not_to_be_had_leave_no_placement_group(monkeypatch):
    demand, removed = demand_beside(monkeypatch, [None])
    with pytest.raises(AttemptFailure, match=r"offer 3 × .* within 0 s \(free now: 2 of 7 ") as caught:
        demand.reserve(0, 0.0)
    assert caught.value.reason is Reason.ACCELERATORS_TAKEN
    assert removed == [0]


def test_a_placement_group_that_somebody_removes_while_it_is_waited_for_is_made_anew(monkeypatch):
    gone = ray.exceptions.TaskPlacementGroupRemoved()
    demand, removed = demand_beside(monkeypatch, [gone, "ready"])
    reserved = demand.reserve(2, LIMIT_S)
    assert (reserved.group.number, reserved.accelerators, reserved.node_ids) == (1, 5, None)
    assert removed == [0]


def test_workers_have_all_of_their_limit_however_long_accelerators_were_waited_for(monkeypatch):
    now = [0.0]

    def reserve(spares, limit_s):
        now[0] += limit_s - 1.0
        return Reservation(None, 1, None)

    def wait(refs, num_returns, timeout):
        now[0] += timeout
        return [], refs

    gang = make_gang([1], lambda nodes: None, start_s=120.0)
    gang._demand, gang._drains = SimpleNamespace(reserve=reserve), SimpleNamespace(poll=lambda: None)
    gang._actor_options = lambda *_: {}
    monkeypatch.setattr(gang_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gang_module, "ray", SimpleNamespace(wait=wait))
    monkeypatch.setattr(gang_module, "lost_nodes", lambda node_ids: {})
    call = SimpleNamespace(remote=lambda method: method)
    actor = SimpleNamespace(call=call)
    actors = SimpleNamespace(options=lambda: SimpleNamespace(remote=lambda: actor))
    with pytest.raises(AttemptFailure, match="no answer from worker 0 of mesh m0 within 120 s"):
        gang.start(actors, lambda mesh, worker: {})
    assert now[0] == pytest.approx(239.0, abs=1.0)


@pytest.mark.parametrize("last_s", [310.0, 340.0])
def test_a_worker_has_its_limit_behind_the_one_that_came_up_before_it(monkeypatch, last_s):
    """A node starts few processes at once: on a busy one the last comes up long behind the first."""
    now, up_at_s = [0.0], {"m0": 100.0, "m1": 215.0, "m2": last_s}

    def wait(refs, num_returns, timeout):
        now[0] += timeout
        done = [mesh for mesh in refs if up_at_s[mesh] <= now[0]]
        return done, [mesh for mesh in refs if mesh not in done]

    def get(mesh):
        return SimpleNamespace(mesh=mesh, node_id="n0", node="here")

    gang = make_gang([1, 1, 1], lambda nodes: None, start_s=120.0)
    gang._demand = SimpleNamespace(reserve=lambda spares, limit_s: Reservation(None, 3, None))
    gang._drains, gang._actor_options = SimpleNamespace(poll=lambda: None), lambda *_: {}
    monkeypatch.setattr(gang_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gang_module, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(gang_module, "lost_nodes", lambda node_ids: {})
    monkeypatch.setattr(gang_module, "cluster_nodes", list)

    def start_actor(mesh, worker):
        return SimpleNamespace(call=SimpleNamespace(remote=lambda method: mesh))

    def started():
        options = SimpleNamespace(remote=start_actor)
        gang.start(SimpleNamespace(options=lambda: options), lambda mesh, worker: {"mesh": mesh, "worker": 0})
        return [address.mesh for address in gang.addresses]

    if last_s < 215 + 120:
        assert started() == ["m0", "m1", "m2"]
        return
    late = "no answer from worker 0 of mesh m2 within 120 s behind the last one that answered"
    with pytest.raises(AttemptFailure, match=late) as caught:
        started()
    assert caught.value.reason is Reason.START_TIMEOUT and now[0] == pytest.approx(335.0, abs=1.0)


@pytest.mark.ray
@pytest.mark.slow
def test_a_placement_that_cannot_be_had_is_made_anew(cluster, monkeypatch):
    monkeypatch.setattr(reservation, "RESERVE_S", 1.0)
    (small,) = node_ids(2)
    taken = placement_group([{"slotline_worker": 1}], bundle_label_selector=[{"ray.io/node-id": small}])
    assert taken.wait(60)
    offers = []

    def place(nodes):
        """The first time from a view in which the small node is idle."""
        if not offers:
            nodes = [{**node, "free": node["total"] if node["name"] == small else 0} for node in nodes]
        offers.append(nodes)
        return ask_for([2])(nodes)

    with make_gang([2], place) as gang:
        assert start(gang)[0].isdisjoint({small})
        assert len(offers) == 2
    remove_placement_group(taken)
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


class Starter(Resident):
    """A worker that can begin again, and a spare."""

    def start_over(self) -> None: ...

    def import_code(self) -> None: ...

    def check_accelerator(self) -> list[str]:
        return []

    def take_place(self, mesh: str, worker: int) -> None:
        self.mesh, self.worker = mesh, worker


@pytest.mark.ray
@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_worker_of_its_own_node_only(cluster):
    full, roomy = node_ids(3)
    placed = {"workers": [[full] * 3, [roomy] * 2]}
    made = ray.remote(Starter), lambda mesh, worker: {"mesh": mesh, "worker": worker}
    with make_gang([3, 2], lambda nodes: placed) as first:
        first.start(*made, spares=2)
        first.start_spares(*made)
        ((bundle, spare),) = first._spares.items()
        until(lambda: spare.come_up() is not None, "the spare")
        assert spare.come_up().node_id == roomy, "the other one has no accelerator that is free"
        os.kill(first.addresses[1].process_id, signal.SIGKILL)
        first.keep_workers()
    with make_gang([3, 2], lambda nodes: placed) as second:
        second.start(*made, first, spares=2)
        assert [address.node_id for address in second.addresses] == [full] * 3 + [roomy] * 2
        assert second._spares == {bundle: spare} and not first.replaced
        os.kill(second.addresses[4].process_id, signal.SIGKILL)
        second.keep_workers()
    with make_gang([3, 2], lambda nodes: placed) as third:
        third.start(*made, second, spares=2)
        assert third.addresses[4].process_id == spare.come_up().process_id and len(second.replaced) == 1


@pytest.mark.ray
@pytest.mark.slow
def test_a_tensor_parallel_group_that_fits_on_no_node_ends_the_attempt_and_one_that_fits_later_waits(cluster):
    with (
        pytest.raises(
            AttemptFailure, match="group of mesh m0 has 4 workers, and no node can hold it"
        ) as caught,
        make_gang([4], ask_for([4], tensor=4)) as gang,
    ):
        start(gang)
    assert caught.value.reason is Reason.PLAN_INFEASIBLE
    with (
        pytest.raises(
            AttemptFailure, match=r"not offer 9 × .*; 9 accelerators are needed, 8 are free"
        ) as caught,
        make_gang([3, 3, 3], ask_for([3, 3, 3]), start_s=0.1) as gang,
    ):
        start(gang)
    assert caught.value.reason is Reason.ACCELERATORS_TAKEN


@contextmanager
def driven(cluster: Cluster, spec: dict) -> Iterator[tuple[ControlPlane, subprocess.Popen]]:
    """The control plane and the driver's process of a job."""
    plane = ControlPlane({"job_id": "job", "number": 1, "job": spec, "device": "cpu", "resume": None})
    environment = {
        **os.environ,
        "SLOTLINE_CONTROL_URL": plane.url,
        "SLOTLINE_ATTEMPT_ID": "job-1",
        "SLOTLINE_ATTEMPT_TOKEN": "secret",
        "SLOTLINE_DRIVER_RAY_ADDRESS": cluster.address,
        "SLOTLINE_LIMIT_LINGER_S": "0",
    }
    driver = subprocess.Popen([sys.executable, "-m", "worker.driver"], env=environment)
    try:
        yield plane, driver
    finally:
        driver.kill()
        driver.wait(60)
        plane.close()


@pytest.mark.ray
@pytest.mark.slow
def test_a_node_that_is_killed_is_named_with_its_workers_and_no_other_worker_is_blamed(cluster):
    """Ray itself takes the node for alive for a while: its raylet takes no connection."""
    doomed = cluster.add_node(num_cpus=1, resources={"slotline_worker": 5})
    cluster.wait_for_nodes()
    with make_gang([2, 2], lambda nodes: on_node(nodes, doomed.node_id)) as gang:
        start(gang)
        refs = gang.ask("sleep", 600)
        cluster.remove_node(doomed, allow_graceful=False)
        with pytest.raises(AttemptFailure, match=r"step 3: node .* with worker 0 of mesh m0, ") as caught:
            gang.wait(refs, phase=Phase.STEP, what="step 3")
    assert caught.value.reason is Reason.NODE_LOST and caught.value.nodes == (doomed.node_id,)
    assert "worker 1 of mesh m0 is gone" in caught.value.message and "m1" not in caught.value.message


def on_node(nodes, node_id):
    """The first of two meshes of 2 on this node, the second one on another."""
    other = next(node["name"] for node in nodes if node["name"] != node_id and node["free"] >= 2)
    return {"workers": [[node_id] * 2, [other] * 2]}


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_says_on_which_node_each_mesh_is_and_one_that_goes_while_it_trains_ends_it_as_node_lost(
    cluster,
):
    spec = job("cosine", meshes=2, workers_per_mesh=2)
    spec["training"]["steps"] = 100_000
    with driven(cluster, spec) as (plane, driver):
        plane.wait_for_steps(3, 400)
        (placed,) = (e["message"] for r in plane.reports for e in r["events"] if e["kind"] == "placed")
        assert placed.startswith("4 workers on 2 nodes: ") and "spread" not in placed
        assert all(f"m{mesh} on " in placed for mesh in range(2))
        of_three = node_ids(3)  # at least one of them is used
        doomed = next(n for n in cluster.worker_nodes if n.node_id in of_three and n.node_id[:8] in placed)
        cluster.remove_node(doomed, allow_graceful=False)
        assert driver.wait(200) == 1
        last = plane.reports[-1]
        cluster.add_node(num_cpus=1, resources={"slotline_worker": 3})
    assert last["reason"] == "NODE_LOST", last["message"]
    assert last["failed_nodes"] == [doomed.node_id]
    mesh = "m0" if doomed.node_id[:8] in placed.partition("m1 on")[0] else "m1"
    assert all(f"worker {index} of mesh {mesh}" in last["message"] for index in range(2))
    assert last["message"].count("of mesh") == 2, "those that waited for them are not blamed"


@pytest.mark.ray
@pytest.mark.slow
def test_no_mesh_lands_on_a_node_that_an_operator_or_ray_drains(cluster, monkeypatch):
    """Of two nodes that are offered one is drained, then the other: a mesh lands on what is left."""
    both = [cluster.add_node(num_cpus=1, resources={"slotline_worker": 2}).node_id for _ in range(2)]
    cluster.wait_for_nodes()
    mark = NodeMark("default", "it", NodeState.DRAINING, "olga", datetime.now(UTC))
    free: list[dict[str, int]] = []

    def gang_beside(*drained, **given):
        def place(nodes):
            nodes = [node for node in nodes if node["name"] in both]
            free.append({node["name"]: node["free"] for node in nodes})
            request = PlacementRequest(nodes=nodes, meshes=[PlacedMesh(workers=1)])
            return make_placement(request, None, left_out=dict.fromkeys(drained, mark)).model_dump()

        return make_gang([1], place, start_s=300.0, **given)

    with gang_beside(both[0]) as gang:
        assert start(gang) == [{both[1]}]
    reports: list[dict[str, float]] = []
    until = time.time() + 600
    with gang_beside(both[1], report_draining=reports.append) as first, gang_beside() as second:
        assert start(first) == [{both[0]}]
        refs = first.ask("sleep", 2 * drains.DRAIN_POLL_S)
        client = GcsClient(address=cluster.address)
        assert client.drain_node(both[0], _PREEMPTION, "the spot node is reclaimed", int(until * 1000))[0]
        first.wait(refs, phase=Phase.STEP, what="step 1")
        assert reports == [{both[0]: pytest.approx(until, abs=0.01)}], "told once"
        monkeypatch.setenv("SLOTLINE_ATTEMPT_ID", "second")
        assert start(second) == [{both[1]}] and free[-1] == {both[0]: 0, both[1]: 2}


def test_a_head_that_does_not_say_which_nodes_it_drains_keeps_nobody_waiting(monkeypatch):
    answer, reports = threading.Event(), queue.Queue()

    def ask():
        assert answer.wait(LIMIT_S)
        return {"id-1": 12.0}

    monkeypatch.setattr(drains, "draining_nodes", ask)
    monkeypatch.setattr(drains, "DRAIN_POLL_S", 0.0)
    watch = drains.DrainWatch(reports.put)
    for _ in range(3):
        watch.poll()
    assert reports.empty() and watch.nodes == {}
    answer.set()
    assert reports.get(timeout=LIMIT_S) == {"id-1": 12.0}
    watch.read()
    assert reports.empty() and watch.nodes == {"id-1": 12.0}, "told once"


def test_drains_are_looked_for_however_soon_all_workers_answer(monkeypatch):
    """The steps of a small model are over before the first look: its node was drained unseen."""
    gang, asked = make_gang([1, 1], lambda nodes: None), []
    gang._drains = SimpleNamespace(poll=lambda: asked.append(True))
    at_once = SimpleNamespace(wait=lambda refs, **_: (refs, []), get=lambda ref: ref)
    monkeypatch.setattr(gang_module, "ray", at_once)
    assert gang.wait([3, 4], phase=Phase.STEP, what="step 1") == [3, 4]
    assert asked


def test_a_crash_report_is_requested_while_the_others_are_still_waited_for(monkeypatch):
    gang, order = make_gang([1, 1], lambda nodes: None), []
    gang.addresses = tuple(WorkerAddress(f"m{n}", 0, "10.0.0.1", "ab" * 28, 40 + n, "cpu") for n in range(2))
    gang._drains = SimpleNamespace(poll=lambda: order.append("look"))
    left = iter([(["lost"], ["other"]), (["other"], [])])

    def request(process_id):
        order.append(f"report of {process_id}")
        return "report"

    def get(ref):
        if ref == "lost":
            raise ray.exceptions.RayActorError
        return {"other": "answer", "report": CrashReport("B of step 3", None, "")}[ref]

    fake = SimpleNamespace(
        wait=lambda refs, **_: next(left, (refs, [])), get=get, exceptions=ray.exceptions, cancel=None
    )
    monkeypatch.setattr(gang_module, "ray", fake)
    monkeypatch.setattr(lost_workers, "ray", fake)
    monkeypatch.setattr(gang_module, "lost_nodes", lambda node_ids: {})
    monkeypatch.setattr(lost_workers, "own_node_id", lambda: "cd" * 28)
    reader = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=request))
    monkeypatch.setattr(lost_workers, "_read_crash_report", reader)
    with pytest.raises(AttemptFailure, match=r"m0 .* is gone: .*; it was in B of step 3") as caught:
        gang.wait(["lost", "other"], phase=Phase.STEP, what="step 3")
    assert caught.value.reason is Reason.WORKER_LOST
    assert order == ["report of 40", "look", "look"], "once, and not only when all have answered"


def test_a_crash_report_of_the_drivers_own_node_needs_no_process_of_ray(monkeypatch):
    gang = make_gang([1, 1], lambda nodes: None)
    gang.addresses = tuple(WorkerAddress(f"m{n}", 0, "10.0.0.1", "ab" * 28, 40 + n, "cpu") for n in range(2))
    monkeypatch.setattr(gang_module, "lost_nodes", lambda node_ids: {})
    monkeypatch.setattr(lost_workers, "own_node_id", lambda: "ab" * 28)
    monkeypatch.setattr(lost_workers, "_read_crash_report", None)
    reports = {41: CrashReport("B of step 3", None, "")}
    monkeypatch.setattr(lost_workers, "read_crash_report", reports.get)
    lost = [(k, AttemptFailure(Reason.WORKER_LOST, f"worker {k} is gone")) for k in range(2)]
    assert gang._cause(lost[1:], "step 3").message == "worker 1 is gone; it was in B of step 3"
    assert gang._cause(lost[:1], "step 3").message == "worker 0 is gone", "it left none"


def test_a_failed_accelerator_is_told_with_its_node():
    gang = make_gang([1, 1], lambda nodes: None)
    gang.addresses = tuple(WorkerAddress(f"m{n}", 0, f"10.0.0.{n}", f"id-{n}", 1, "cuda:0") for n in range(2))
    stalled = AttemptFailure(Reason.ILLEGAL_ADDRESS, "it waits")
    failed = AttemptFailure(Reason.ACCELERATOR_FAILED, "Xid 79")
    cause = gang._cause([(0, stalled), (1, failed)], "step 1")
    assert cause.nodes == ("id-1",) and cause.message == "worker 0 of mesh m1 on node 10.0.0.1: Xid 79"
    assert gang._cause([(0, stalled)], "step 1").nodes == (), "that may be the job's own fault"


def node(**changes) -> ClusterNode:
    given = {
        "node_id": "id",
        "host": "alpha",
        "address": "10.0.0.1",
        "alive": True,
        "resources": {},
        "labels": {},
    }
    return ClusterNode(**given | changes)


def test_nodes_are_offered_with_their_labels_and_their_room_for_workers():
    nodes = [
        node(
            node_id="a",
            resources={"GPU": 8.0, "accelerator_type:H200": 1.0},
            labels={"ray.io/gpu-domain": "d1", "topology.kubernetes.io/zone": "z1"},
        ),
        node(node_id="b", resources={"GPU": 8.0}, labels={"ray.io/accelerator-type": "A100"}),
        node(node_id="dead", resources={"GPU": 8.0}, alive=False),
        node(node_id="head", resources={"CPU": 8.0}),
    ]
    free = {"a": {"GPU": 7.3334}, "b": {}, "dead": {"GPU": 8.0}}
    first, second = offered_nodes(nodes, free, "GPU", 0.3333)
    assert first == {
        "name": "a",
        "free": 22,
        "total": 24,
        "accelerator_type": "H200",
        "nvlink_domain": "d1",
        "rack": None,
        "zone": "z1",
    }
    assert (second["name"], second["free"], second["accelerator_type"]) == ("b", 0, "A100")


@pytest.mark.parametrize(
    ("free", "spares", "expected"),
    [
        ({"a": 4, "b": 4}, 1, ["b"]),
        ({"a": 4, "b": 4}, 3, ["b", "a", "a"]),
        ({"a": 4, "b": 4}, 9, ["b", "a", "a"]),
        ({"a": 8, "b": 3, "other": 8}, 2, ["a", "a"]),
        ({"a": 2, "b": 3, "other": 8}, 2, []),
    ],
)
def test_spares_are_near_the_most_workers_and_on_as_many_of_their_nodes_as_may_be(free, spares, expected):
    nodes = [{"name": name, "free": number} for name, number in free.items()]
    assert spare_nodes(["a", "b", "b", "a", "b"], nodes, spares) == expected


def test_the_text_of_a_placement_names_nodes_and_meshes_that_are_spread():
    nodes = [node(node_id="a"), node(node_id="b", host="beta", address="10.0.0.2")]
    places = [("m0", "a"), ("m1", "a"), ("m2", "a"), ("m2", "b"), ("m2", "b"), ("m3", "b")]
    addresses = [WorkerAddress(mesh, 0, "10.0.0.9", node_id, 1, "cpu") for mesh, node_id in places]
    assert placement_text(addresses, nodes) == (
        "6 workers on 2 nodes: m0, m1 on alpha (10.0.0.1); m3 on beta (10.0.0.2); "
        "m2 is spread over 2 nodes: 1 worker on alpha (10.0.0.1), 2 workers on beta (10.0.0.2)"
    )
    same = [node(node_id="aaaaaaaa1"), node(node_id="bbbbbbbb1")]
    addresses = [WorkerAddress(f"m{i}", 0, "10.0.0.1", one.node_id, 1, "cpu") for i, one in enumerate(same)]
    assert placement_text(addresses, same) == (
        "2 workers on 2 nodes: m0 on alpha (10.0.0.1) node aaaaaaaa; m1 on alpha (10.0.0.1) node bbbbbbbb"
    )
    many = [WorkerAddress(f"m{i}", 0, f"10.0.1.{i}", f"n{i}", 1, "cpu") for i in range(45)]
    assert placement_text(many, []).endswith("m39 on 10.0.1.39; and 5 more")


def test_a_node_is_lost_when_ray_says_so_or_its_raylet_takes_no_connection(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as raylet, socket.create_server(("127.0.0.1", 0)) as closed:
        port, refused = raylet.getsockname()[1], closed.getsockname()[1]
        closed.close()
        nodes = [
            node(node_id="lives", address="127.0.0.1", port=port),
            node(node_id="refuses", host="beta", address="127.0.0.1", port=refused),
            node(node_id="dead", host="gamma", alive=False, death="health check failed"),
            node(node_id="not ours", alive=False),
        ]
        monkeypatch.setattr(node_module, "cluster_nodes", lambda: nodes)
        lost = lost_nodes(["lives", "refuses", "dead", "gone", "dead"])
    assert set(lost) == {"refuses", "dead", "gone"}
    assert lost["dead"] == ("gamma (10.0.0.1)", "Ray has it for dead: health check failed")
    assert lost["gone"] == ("gone", "Ray no longer knows it")
    assert lost["refuses"][0] == "beta (127.0.0.1)"
    assert f"raylet at 127.0.0.1:{refused} does not answer" in lost["refuses"][1]
