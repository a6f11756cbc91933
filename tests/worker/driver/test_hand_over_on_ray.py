"""Attempts that one driver runs one after the other, on a local Ray: workers that are left behind a lost one go on with the
losses of a run that nobody disturbed, and where they cannot, all are started anew.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
import ray
from ray.util.placement_group import placement_group_table

from tests.polling import until
from tests.worker.actor.test_actor import job
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.resident import AS_OTHERS
from worker.contract.failures import read_crash_report

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 30
MESHES = 3
SLOTS = MESHES + 1
LOG = "drivers.log"
PROFILES = {}
"""What the first of these attempts measured, for all."""


class HandsOver(ControlPlane):
    """Gives the next attempt, `limit` of them at most, to a driver that takes it; `begun` counts reports before each."""

    def __init__(self, given, limit=9):
        super().__init__(given, PROFILES)
        self.limit, self.begun = limit, [0]

    def following(self, report):
        if not report.get("takes_next") or len(self.begun) > self.limit:
            return {}
        number = self.given["number"] + 1
        checkpoints = [one["checkpoint"] for one in self.reports if one["checkpoint"]]
        recorded = max((step["step"] for step in self.steps), default=-1)
        self.given = self.given | {
            "number": number,
            "resume": checkpoints[-1] if checkpoints else None,
            "recorded": {"steps": recorded},
        }
        self.begun.append(len(self.reports))
        return {"next": {"attempt_id": f"job-{number}", "token": f"token {number}"}}

    def reports_of(self, number):
        ends = [*self.begun[1:], len(self.reports)]
        return self.reports[self.begun[number - 1] : ends[number - 1]]

    def events_of(self, number, kind):
        reports = self.reports_of(number)
        return [event["message"] for report in reports for event in report["events"] if event["kind"] == kind]

    def steps_of(self, number):
        return [step["step"] for report in self.reports_of(number) for step in report["steps"]]

    def losses(self):
        """By step; of a step that was made twice, the last."""
        return {step["step"]: step["loss"] for step in self.steps}

    def wait_for_steps_of(self, number, count=1):
        with self.heard:
            assert self.heard.wait_for(
                lambda: len(self.begun) >= number and len(self.steps_of(number)) >= count, 120.0
            ), self.reports[-2:]


@pytest.fixture(scope="module")
def cluster():
    context = ray.init(
        address="local",
        num_cpus=1,
        resources={"slotline_worker": SLOTS},
        include_dashboard=False,
        log_to_driver=False,
        _system_config=AS_OTHERS,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def start(cluster, tmp_path):
    """Starts drivers, (control plane, process) of a job each, whose log is LOG, and ends them."""
    started = []
    log = (tmp_path / LOG).open("ab")

    def begin(spec, limit=9):
        given = {"job_id": "job", "number": 1, "job": spec, "device": "cpu", "resume": None, "checked": True}
        plane = HandsOver(given, limit)
        environment = {
            **os.environ,
            "SLOTLINE_CONTROL_URL": plane.url,
            "SLOTLINE_ATTEMPT_ID": "job-1",
            "SLOTLINE_ATTEMPT_TOKEN": "secret",
            "SLOTLINE_DRIVER_RAY_ADDRESS": cluster,
            "SLOTLINE_LIMIT_LINGER_S": "0",
        }
        command = [sys.executable, "-m", "worker.driver"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        started.append((plane, process))
        return started[-1]

    yield begin
    for plane, process in started:
        process.kill()
        process.wait(60)
        plane.close()
    log.close()
    print((tmp_path / LOG).read_text(errors="replace"))


def spec(folder, steps=STEPS):
    made = job(stages=MESHES, meshes=MESHES)
    made["pipeline"] |= {"schedule": "1f1b", "replan": "off"}
    made["training"]["steps"] = steps
    made["checkpoint"] = {"uri": str(folder), "every_steps": 4}
    made["data"] = {"factory": "tests.worker.workers:Slow", "args": {"length": 8}}
    return made


def workers():
    """The processes of training actors of this test's Ray, by id."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith("ray::Worker"):
                found[process.pid] = process
        except psutil.Error:
            continue
    return found


def assert_nothing_held():
    until(
        lambda: ray.available_resources().get("slotline_worker") == SLOTS and not workers(),
        lambda: (ray.available_resources(), workers()),
        every_s=0.1,
    )
    assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}


def test_the_workers_that_are_left_go_on_in_their_processes_with_the_losses_of_a_run_left_alone(
    start, tmp_path
):
    alone, process = start(spec(tmp_path / "alone"))
    assert process.wait(200) == 0
    plane, process = start(spec(tmp_path / "killed"))
    for number in (1, 2):
        plane.wait_for_steps_of(number, 9)
        before = workers()
        sorted(before.items())[number][1].send_signal(signal.SIGKILL)
        plane.wait_for_steps_of(number + 1)
        assert len(before.keys() & workers().keys()) == MESHES - 1, "of the others none is started anew"
        assert not plane.events_of(number + 1, "started_anew")
    assert process.wait(200) == 0
    assert plane.losses() == alone.losses() and len(alone.losses()) == STEPS
    for number in (1, 2):
        (last,) = [report for report in plane.reports_of(number) if report["state"] == "FAILED"]
        assert last["reason"] == "WORKER_LOST" and last["takes_next"]
        (resumed,) = plane.events_of(number + 1, "resumed")
        assert plane.steps_of(number + 1)[0] == int(resumed.split()[3]) + 1
        (traced,) = plane.events_of(number + 1, "traced")
        assert traced.endswith("its graph is that of the attempt before")
    assert plane.states == ["RUNNING", "FAILED", "RUNNING", "FAILED", "RUNNING", "SUCCEEDED"]
    assert [report["sequence"] for report in plane.reports_of(2)][:2] == [1, 2], "each attempt counts its own"
    assert plane.token != "secret"
    assert "Unhandled error" not in (tmp_path / LOG).read_text(), "of calls that nobody waits for any more"
    assert_nothing_held()


def test_a_spare_that_has_waited_goes_on_in_the_place_of_a_lost_worker_with_the_same_losses(start, tmp_path):
    steps = 4 * STEPS  # a spare comes up beside them, twice
    alone, process = start(spec(tmp_path / "alone", steps))
    assert process.wait(300) == 0
    spared = spec(tmp_path / "killed", steps)
    spared["resources"]["spares"] = 1
    plane, process = start(spared)
    for number in (1, 2):
        plane.wait_for_steps_of(number, 9)
        until(lambda: sum(map(bool, map(read_crash_report, workers()))) == SLOTS, workers)
        *trained, spare = sorted(workers(), key=lambda pid: psutil.Process(pid).create_time())
        os.kill(trained[number], signal.SIGKILL)
        plane.wait_for_steps_of(number + 1)
        assert workers().keys() >= {*trained, spare} - {trained[number]}, "none of the others is started anew"
        assert len(plane.events_of(number + 1, "spare")) == 1
    assert process.wait(300) == 0
    assert plane.losses() == alone.losses() and len(alone.losses()) == steps
    assert_nothing_held()


def test_where_a_worker_that_is_left_hangs_all_are_started_anew_by_the_same_driver(start, tmp_path):
    plane, process = start(spec(tmp_path / "killed"))
    plane.wait_for_steps_of(1, 9)
    first, second, third = workers().values()
    second.send_signal(signal.SIGSTOP)
    third.send_signal(signal.SIGKILL)
    plane.wait_for_steps_of(2, 2)
    assert not {first.pid, second.pid, third.pid} & workers().keys()
    assert process.wait(200) == 0 and plane.states[-1] == "SUCCEEDED"
    assert_nothing_held()


def test_a_worker_that_is_lost_in_the_hand_over_ends_the_next_attempt_alone(start, tmp_path):
    plane, process = start(spec(tmp_path / "killed"))
    plane.wait_for_steps_of(1, 9)
    before = workers()
    first, second, _ = before.values()
    first.send_signal(signal.SIGKILL)
    with plane.heard:
        assert plane.heard.wait_for(lambda: len(plane.begun) == 2, 60.0)
    second.send_signal(signal.SIGKILL)
    assert process.wait(200) == 0 and plane.states[-1] == "SUCCEEDED"
    assert sorted(plane.losses()) == [*range(1, STEPS + 1)]
    assert_nothing_held()


def test_a_driver_without_a_next_attempt_ends_and_holds_nothing(start, tmp_path):
    plane, process = start(spec(tmp_path / "killed"), limit=0)
    plane.wait_for_steps_of(1, 5)
    next(iter(workers().values())).send_signal(signal.SIGKILL)
    assert process.wait(60) == 1
    assert plane.states == ["RUNNING", "FAILED"] and plane.reports[-1]["takes_next"]
    assert_nothing_held()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_is_ended_in_the_hand_over_leaves_nothing(start, tmp_path, how):
    plane, process = start(spec(tmp_path / "killed"))
    plane.wait_for_steps_of(1, 9)
    next(iter(workers().values())).send_signal(signal.SIGKILL)
    with plane.heard:
        assert plane.heard.wait_for(lambda: len(plane.begun) == 2, 60.0)
    process.send_signal(how)
    process.wait(60)
    assert_nothing_held()
