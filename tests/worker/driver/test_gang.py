"""The gang on a real local Ray: how it starts, how it names trouble, and that nothing stays behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from tests.polling import until
from worker.contract import failures
from worker.contract.failures import AttemptFailure, attributed_to
from worker.contract.reasons import Reason
from worker.driver.gang import gang as gang_module
from worker.driver.gang.gang import Gang, PerWorker
from worker.driver.gang.phases import Phase
from worker.driver.gang.reservation import Reservation
from worker.driver.limits import Limits
from worker.driver.stopping import Cancelled, GracefulStop, Interruption
from worker.machine.node import WorkerAddress, cluster_nodes

pytestmark = [pytest.mark.ray]


class Sleeper:
    """A worker that can sleep, raise, and say who it is."""

    def call(self, method: str, *given: Any, **named: Any) -> Any:
        return getattr(self, method)(*given, **named)

    def __init__(self, mesh: str, worker: int):
        self.mesh, self.worker = mesh, worker
        self.threads = {threading.get_ident()}
        self.starts_over_in_s = 0.0

    def start_over(self) -> None:
        if self.starts_over_in_s < 0:
            raise RuntimeError("the process still holds Engine")
        threading.Event().wait(self.starts_over_in_s)  # is busy with what is left

    def take_place(self, mesh: str, worker: int) -> None:
        self.mesh, self.worker = mesh, worker

    def import_code(self) -> None:
        """As a worker has it; there is none."""

    def check_accelerator(self) -> list[str]:
        """As a worker has it; that of a mesh without a name fails."""
        if not self.mesh:
            raise RuntimeError("a GEMM was wrong")
        return []

    def starts_over_in(self, seconds: float) -> None:
        """Seconds that it takes; below 0 it cannot."""
        self.starts_over_in_s = seconds

    def address(self) -> WorkerAddress:
        context = ray.get_runtime_context()
        node = ray.util.get_node_ip_address()
        return WorkerAddress(self.mesh, self.worker, node, context.get_node_id(), os.getpid(), "cpu")

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return self.mesh

    def wait(self, seconds: float, *, reply: str) -> tuple[float, str]:
        time.sleep(seconds)
        return seconds, reply

    def count_threads(self) -> int:
        self.threads.add(threading.get_ident())
        return len(self.threads)

    def gpu(self) -> tuple[list, str | None]:
        return ray.get_gpu_ids(), os.environ.get("NCCL_HOSTID")

    def begin(self) -> None:
        failures.start_breadcrumbs()

    def doing_for(self, action: str, seconds: float) -> None:
        failures.leave_breadcrumb(action)
        time.sleep(seconds)

    def crash(self, action: str) -> None:
        failures.leave_breadcrumb(action)
        ctypes.string_at(0)

    def leave(self) -> None:
        os._exit(1)

    @attributed_to(Reason.USER_CODE_RAISED)
    def fail(self) -> None:
        raise ZeroDivisionError("forward divided by zero")

    @attributed_to(Reason.SLOT_STALLED)
    def stall(self) -> None:
        raise TimeoutError("waits for m1")


@pytest.mark.parametrize(("device", "interpreter"), [("cuda", sys.executable), ("cpu", "python spawn.py")])
def test_no_worker_with_a_gpu_is_forked_where_its_driver_was(device, interpreter):
    gang = Gang(
        sizes=(1,),
        device=device,
        limits=Limits(),
        interruption=Interruption(),
        interpreter="python spawn.py",
    )
    gang._reservation = Reservation(None, 1, None)
    assert gang._actor_options("m0", 0, 0)["runtime_env"] == {"py_executable": interpreter}


@pytest.fixture(scope="module")
def cluster():
    ray.init(
        address="local",
        num_cpus=1,
        num_gpus=1,
        resources={"slotline_worker": 4},
        include_dashboard=False,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def make_gang(
    meshes: int = 2,
    workers_per_mesh: int = 1,
    start_s: float = 60.0,
    interruption: Interruption | None = None,
    **limits: float,
) -> Gang:
    return Gang(
        sizes=[workers_per_mesh] * meshes,
        device="cpu",
        limits=Limits(start_s=start_s, **limits),
        interruption=interruption or Interruption(),
    )


def start(gang: Gang, spares: int = 0) -> None:
    gang.start(ray.remote(Sleeper), lambda mesh, worker: {"mesh": mesh, "worker": worker}, spares=spares)


def is_gone(process_id: int, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process_id}/stat") as file:
                if file.read().split(") ")[1][0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def assert_nothing_left(addresses) -> None:
    assert all(is_gone(a.process_id) for a in addresses)
    until(
        lambda: ray.available_resources().get("slotline_worker") == 4.0,
        ray.available_resources,
        every_s=0.1,
    )
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_accelerators_are_there_as_soon_as_ray_says_so_and_a_removed_group_says_that_it_is(cluster):
    """What `AcceleratorDemand` takes from Ray: an answer to one question, however late its head gives it."""
    group = placement_group([{"CPU": 1}])
    assert ray.wait([group.ready()], timeout=60)[0]
    never = placement_group([{"slotline_no_such": 1}])
    ready = never.ready()
    assert not ray.wait([ready], timeout=0.1)[0]
    remove_placement_group(never)
    with pytest.raises(ray.exceptions.TaskPlacementGroupRemoved):
        ray.get(ready, timeout=60)
    remove_placement_group(never)  # again: nothing is raised
    remove_placement_group(group)


@pytest.mark.slow
def test_workers_stand_in_mesh_order_and_leave_nothing_behind(cluster):
    with make_gang(meshes=2, workers_per_mesh=2) as gang:
        start(gang)
        addresses = gang.addresses
        assert [(a.mesh, a.worker) for a in addresses] == [("m0", 0), ("m0", 1), ("m1", 0), ("m1", 1)]
        assert len({a.process_id for a in addresses}) == 4
        names = gang.call("sleep", 0, phase=Phase.STEP, what="sleep")
        assert names == ["m0", "m0", "m1", "m1"]
    assert_nothing_left(addresses)


def test_all_calls_of_a_worker_run_on_the_thread_that_made_it(cluster):
    """A current CUDA device belongs to a thread: another one would use GPU 0."""
    with make_gang(1) as gang:
        start(gang)
        calls = [gang.workers[0].count_threads.remote() for _ in range(8)]
        assert ray.get(calls) == [1] * 8


def test_a_cancelled_attempt_does_not_wait_for_a_cluster_that_is_too_small(cluster):
    cancelled = Interruption(cancelled=lambda: True)
    with pytest.raises(Cancelled), make_gang(5, 1, 3600.0, cancelled) as gang:
        gang.start(ray.remote(Sleeper), lambda mesh, worker: {})
    assert_nothing_left([])


def test_a_worker_that_ends_itself_is_lost(cluster):
    with make_gang(1) as gang:
        start(gang)
        with pytest.raises(AttemptFailure, match="worker 0 of mesh m0 on node") as caught:
            gang.call("leave", phase=Phase.STEP, what="step 3")
    assert caught.value.reason == Reason.WORKER_LOST


@pytest.mark.slow
def test_a_worker_that_dies_in_native_code_is_told_as_that_with_its_action(cluster):
    with make_gang(2) as gang:
        start(gang)
        ray.get([w.begin.remote() for w in gang.workers])
        second = gang.workers[1]  # the only one that is called: its place among the calls is not its own
        with pytest.raises(AttemptFailure, match="worker 0 of mesh m1 on node") as caught:
            gang.call("crash", "1W0 of step 3", workers=[second], phase=Phase.STEP, what="step 3")
        addresses = gang.addresses
        assert failures.read_crash_report(addresses[1].process_id).action == "1W0 of step 3"
    assert caught.value.reason == Reason.WORKER_LOST
    assert "died in native code (Segmentation fault) in 1W0 of step 3" in caught.value.message
    assert "in crash" in caught.value.details, "the Python stack"
    assert [failures.read_crash_report(one.process_id) for one in addresses] == [None, None]


@pytest.mark.slow
def test_a_worker_that_is_killed_in_an_action_did_not_die_in_native_code(cluster):
    with make_gang(1) as gang:
        start(gang)
        ray.get([w.begin.remote() for w in gang.workers])
        ref = gang.workers[0].doing_for.remote("0F1 of step 3", 60)
        while not (found := failures.read_crash_report(gang.addresses[0].process_id)) or not found.action:
            time.sleep(0.05)
        os.kill(gang.addresses[0].process_id, signal.SIGKILL)
        with pytest.raises(AttemptFailure, match="it was in 0F1 of step 3") as caught:
            gang.wait([ref], phase=Phase.STEP, what="step 3")
    assert "native" not in caught.value.message


def test_a_gang_too_large_for_the_cluster_times_out_with_the_numbers(cluster):
    with (
        pytest.raises(AttemptFailure, match=r"5 × .*slotline_worker.*4 of 4") as caught,
        make_gang(5, 1, 1.0) as gang,
    ):
        start(gang)
    assert caught.value.reason == Reason.ACCELERATORS_TAKEN
    assert_nothing_left([])


@pytest.mark.slow
def test_a_killed_worker_is_named_at_once(cluster, monkeypatch):
    monkeypatch.setattr(gang_module, "CAUSE_GRACE_S", 600.0)
    with make_gang() as gang:
        start(gang)
        addresses = gang.addresses
        refs = [w.sleep.remote(600) for w in gang.workers]
        os.kill(addresses[1].process_id, signal.SIGKILL)
        here = re.escape(cluster_nodes()[0].name)
        with pytest.raises(AttemptFailure, match=f"worker 0 of mesh m1 on node {here} is gone") as caught:
            gang.wait(refs, phase=Phase.STEP, what="step 3")  # the other workers sleep
        assert caught.value.reason == Reason.WORKER_LOST
    assert_nothing_left(addresses)


@pytest.mark.slow
def test_a_stopped_worker_misses_its_limit_and_is_ended_all_the_same(cluster):
    with make_gang(checkpoint_s=1.0) as gang:
        start(gang)
        addresses = gang.addresses
        os.kill(addresses[0].process_id, signal.SIGSTOP)
        refs = [w.sleep.remote(0) for w in gang.workers]
        ray.get(refs[1])  # however slow this machine is, only the stopped one has not answered
        with pytest.raises(
            AttemptFailure, match=r"no answer from worker 0 of mesh m0 on .* within 1 s"
        ) as caught:
            gang.wait(refs, phase=Phase.CHECKPOINT, what="step 3")
        assert caught.value.reason == Reason.SLOT_STALLED
    assert_nothing_left(addresses)


@pytest.mark.slow
def test_a_worker_that_is_silent_while_others_report_a_stall_is_named_with_its_node(cluster, monkeypatch):
    monkeypatch.setattr(gang_module, "CAUSE_GRACE_S", 2.0)
    with make_gang() as gang:
        start(gang)
        stalled, frozen = gang.workers
        os.kill(gang.addresses[1].process_id, signal.SIGSTOP)
        here = re.escape(cluster_nodes()[0].name)
        named = f"waits for m1.*; no word from worker 0 of mesh m1 on node {here}$"
        with pytest.raises(AttemptFailure, match=named) as caught:
            gang.wait([stalled.stall.remote(), frozen.sleep.remote(0)], phase=Phase.STEP, what="step 1")
        assert caught.value.reason == Reason.SLOT_STALLED


@pytest.mark.slow
def test_of_two_failures_the_cause_is_told_and_not_its_consequence(cluster, monkeypatch, caplog):
    monkeypatch.setattr(gang_module, "CAUSE_GRACE_S", 60.0)
    with make_gang() as gang:
        start(gang)
        stalled, raised = gang.workers
        with pytest.raises(AttemptFailure, match="forward divided by zero") as caught:
            gang.wait([stalled.stall.remote(), raised.fail.remote()], phase=Phase.STEP, what="step 1")
        assert caught.value.reason == Reason.USER_CODE_RAISED
        assert "ZeroDivisionError" in caught.value.details
    said = [record.message for record in caplog.records if "who waited for whom" in record.message]
    assert len(said) == 2 and any("waits for m1" in line for line in said), (
        "the log keeps what each of them said"
    )


@pytest.mark.slow
def test_an_interruption_ends_the_wait(cluster):
    asked = []
    interruption = Interruption(cancelled=lambda: bool(asked))
    with make_gang(interruption=interruption) as gang:
        start(gang)
        addresses = gang.addresses
        asked.append("cancel")
        with pytest.raises(Cancelled):
            gang.call("sleep", 60, workers=gang.workers[:1], phase=Phase.STEP, what="step")
    assert_nothing_left(addresses)


@pytest.mark.slow
def test_workers_that_share_a_gpu_are_hosts_of_their_own_to_nccl(cluster):
    common = {"device": "cuda", "limits": Limits(start_s=60), "interruption": Interruption()}
    with Gang(sizes=[2, 2], workers_per_gpu=4, **common) as gang:
        start(gang)
        found = ray.get([w.gpu.remote() for w in gang.workers], timeout=60)
        assert [ids for ids, _ in found] == [[0]] * 4
        assert len({host for _, host in found} - {None}) == 4
    with pytest.raises(ValueError, match="workers_per_gpu is 0"):
        Gang(sizes=[1], workers_per_gpu=0, **common)


@pytest.mark.parametrize(("device", "sharing"), [("cpu", [2, 1, 2]), ("cuda", [3, 3, 3])])
def test_workers_share_the_memory_of_their_node_or_of_their_gpu(device, sharing):
    gang = Gang(
        sizes=[1, 1, 1], device=device, limits=Limits(), interruption=Interruption(), workers_per_gpu=3
    )
    gang.addresses = tuple(WorkerAddress(f"m{i}", 0, n, n, i, device) for i, n in enumerate("aba"))
    assert [gang.workers_sharing_memory(address) for address in gang.addresses] == sharing
    gang.addresses = ()


@pytest.mark.slow
def test_each_worker_gets_its_own_value_of_an_argument_and_a_stop_interrupts_only_before_the_steps(cluster):
    asked = []
    with make_gang(interruption=Interruption(stop_requested=lambda: bool(asked))) as gang:
        start(gang)
        took = gang.call("wait", PerWorker([0.0, 0.5]), reply=PerWorker("ab"), phase=Phase.STEP, what="wait")
        assert took == [(0.0, "a"), (0.5, "b")]
        asked.append("stop")
        assert gang.call("sleep", 0.5, workers=gang.workers[1:], phase=Phase.STEP, what="step") == ["m1"]
        with pytest.raises(GracefulStop, match="before a step of its own"):
            gang.call("sleep", 60, phase=Phase.CHECK, what="warm up")


def start_behind(earlier: Gang, gang: Gang, spares: int = 0) -> list[int]:
    """Start a gang behind one that was kept; the ids of its processes."""
    gang.start(
        ray.remote(Sleeper), lambda mesh, worker: {"mesh": mesh, "worker": worker}, earlier, spares=spares
    )
    return [address.process_id for address in gang.addresses]


def lose(gang: Gang, *indices: int) -> list[int]:
    """Kill the workers at these places, and have the others start over; the ids of all processes."""
    processes = [address.process_id for address in gang.addresses]
    for index in indices:
        os.kill(processes[index], signal.SIGKILL)
    until(lambda: all(is_gone(processes[index]) for index in indices), "the workers")
    gang.keep_workers()
    assert gang.kept
    return processes


@pytest.mark.slow
def test_the_next_gang_has_the_workers_and_the_accelerators_that_are_left(cluster):
    with make_gang(3) as first:
        start(first)
        before = lose(first, 1)
    addresses = first.addresses
    with make_gang(3) as second:
        processes = start_behind(first, second)
        assert processes[0] == before[0] and processes[2] == before[2] and processes[1] not in before
        assert [address.mesh for address in second.addresses] == ["m0", "m1", "m2"]
        assert second.call("sleep", 0, phase=Phase.STEP, what="sleep") == ["m0", "m1", "m2"]
        held = [g for g in placement_group_table().values() if g["state"] == "CREATED"]
        assert len(held) == 1, "the accelerators were never given back"
        assert not first.kept and not first.workers
        first.stop()  # it has nothing to end any more
        assert second.call("sleep", 0, phase=Phase.STEP, what="sleep") == ["m0", "m1", "m2"]
    assert_nothing_left([*addresses, *second.addresses])


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-1.0, 60.0])
def test_where_a_worker_that_is_left_cannot_start_over_or_hangs_all_are_started_anew(
    cluster, monkeypatch, seconds
):
    monkeypatch.setattr(gang_module, "START_OVER_S", 1.0)
    with make_gang(2) as first:
        start(first)
        ray.get(first.workers[0].starts_over_in.remote(seconds))
        before = lose(first, 1)
    addresses = first.addresses
    with make_gang(2) as second:
        assert not {*start_behind(first, second)} & {*before}
        assert not first.kept
    assert_nothing_left([*addresses, *second.addresses])


@pytest.mark.slow
def test_where_no_worker_is_left_all_are_started_anew(cluster):
    with make_gang(2) as first:
        start(first)
        before = lose(first, 0, 1)
    with make_gang(2) as second:
        assert not {*start_behind(first, second)} & {*before}
    assert_nothing_left(second.addresses)


@pytest.mark.slow
def test_workers_that_were_kept_and_that_nobody_takes_are_ended(cluster):
    with make_gang(2) as first:
        start(first)
        lose(first, 1)
    addresses = first.addresses
    assert not is_gone(addresses[0].process_id, 0.2)
    first.stop()
    assert not first.kept
    assert_nothing_left(addresses)


@pytest.mark.slow
def test_a_gang_that_has_not_come_up_keeps_nobody(cluster):
    with make_gang(2) as gang:
        gang.keep_workers()
        assert not gang.kept


def start_spares(gang: Gang) -> dict[int, int]:
    """Have all spares of a gang come up; the ids of their processes by bundle."""
    gang.start_spares(ray.remote(Sleeper), lambda mesh, worker: {"mesh": mesh, "worker": worker})
    until(lambda: all(spare.come_up() for spare in gang._spares.values()), "the spares")
    return {bundle: spare.come_up().process_id for bundle, spare in gang._spares.items()}


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_lost_worker_whose_accelerator_has_the_next_spare(cluster):
    with make_gang(2) as first:
        start(first, spares=1)
        (spare,) = start_spares(first).values()
        assert start_spares(first) == {2: spare}, "no accelerator has two"
        before = lose(first, 1)
    with make_gang(2) as second:
        assert start_behind(first, second, spares=1) == [before[0], spare]
        assert [name.partition(" on ")[0] for name in first.replaced] == ["worker 0 of mesh m1"]
        assert [(address.mesh, address.worker) for address in second.addresses] == [("m0", 0), ("m1", 0)]
        assert second.call("sleep", 0, phase=Phase.STEP, what="sleep") == ["m0", "m1"]
        assert not second._spares
        ((bundle, following),) = start_spares(second).items()
        assert bundle == 1 and following not in (*before, spare)
        assert ray.available_resources().get("slotline_worker") == 1.0
        lose(second, 0, 1)
    with make_gang(2) as third:
        assert following not in start_behind(second, third, spares=1), "none is left that could go on"
        (last,) = start_spares(third).values()
        addresses = [*third.addresses, *(spare.come_up() for spare in third._spares.values())]
        assert last == addresses[-1].process_id
    assert_nothing_left(addresses)
    assert is_gone(spare) and is_gone(following)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_where_a_spare_is_gone_or_hangs_the_lost_worker_is_started(cluster, monkeypatch, how):
    monkeypatch.setattr(gang_module, "TAKE_PLACE_S", 1.0)
    with make_gang(2) as first:
        start(first, spares=1)
        (spare,) = start_spares(first).values()
        os.kill(spare, how)
        before = lose(first, 1)
    with make_gang(2) as second:
        kept, started = start_behind(first, second, spares=1)
        assert kept == before[0] and started not in (before[1], spare)
        (following,) = start_spares(second).values()
        assert following != spare
        addresses = second.addresses
    assert_nothing_left(addresses)
    assert is_gone(spare) and is_gone(following)


@pytest.mark.slow
def test_a_spare_whose_accelerator_fails_its_check_takes_no_place(cluster):
    with make_gang(2) as first:
        start(first, spares=1)
        first.start_spares(ray.remote(Sleeper), lambda mesh, worker: {"mesh": "", "worker": worker})
        (spare,) = first._spares.values()
        ray.wait([spare.checked], timeout=60)
        assert ray.get(spare.address) and spare.come_up() is None
        before = lose(first, 1)
    with make_gang(2) as second:
        kept, started = start_behind(first, second, spares=1)
        assert kept == before[0] and started not in (before[1], ray.get(spare.address).process_id)
        addresses = second.addresses
    assert_nothing_left(addresses)


@pytest.mark.slow
def test_the_others_are_told_of_a_lost_worker_once_it_is_known(cluster):
    told = []
    with make_gang(3) as gang:
        start(gang)
        gang.announce_loss = told.append
        refs = gang.ask("sleep", 600)
        os.kill(gang.addresses[1].process_id, signal.SIGKILL)
        with pytest.raises(AttemptFailure, match="worker 0 of mesh m1 on node"):
            gang.wait(refs, phase=Phase.STEP, what="step 3")
        assert [name.partition(" on ")[0] for name in told] == ["worker 0 of mesh m1"]
        gang.keep_workers()
        assert gang.kept
        gang.stop()
        gang.announce_loss("nobody waits any more")
    assert len(told) == 1
