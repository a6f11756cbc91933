"""Copies of the state in host memory, on a local Ray of two nodes: attempts whose workers or drivers are killed go on from
them, with the losses of a run that nobody disturbed, and no keeper is left when a job ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from tests.polling import until
from tests.worker.actor.test_actor import job
from tests.worker.driver.control_plane import ControlPlane
from tests.worker.driver.resident import AS_OTHERS
from worker.machine.keepers import end_keepers, find_keepers

STEPS = 30


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each with room for one worker."""
    nodes = Cluster()
    for number in range(2):
        options = {"_system_config": AS_OTHERS} if number == 0 else {}
        nodes.add_node(num_cpus=1, resources={"slotline_worker": 1}, include_dashboard=False, **options)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


class Attempts:
    """The attempts of a job, one after the other."""

    def __init__(self, address, spec, name):
        self._address, self._spec, self._name = address, spec, name
        self.planes, self.process = [], None
        self.started = 0

    def start(self):
        self.started += 1
        recorded = max((step["step"] for step in self.steps), default=0)
        plane = ControlPlane(
            {
                "job_id": self._name,
                "number": self.started,
                "job": self._spec,
                "device": "cpu",
                "resume": None,
                "recorded": {"steps": recorded},
                "checked": True,
            }
        )
        environment = {
            **os.environ,
            "SLOTLINE_CONTROL_URL": plane.url,
            "SLOTLINE_ATTEMPT_ID": f"{self._name}-{self.started}",
            "SLOTLINE_ATTEMPT_TOKEN": "secret",
            "SLOTLINE_DRIVER_RAY_ADDRESS": self._address,
            "SLOTLINE_LIMIT_LINGER_S": "0",
        }
        self.planes.append(plane)
        self.process = subprocess.Popen([sys.executable, "-m", "worker.driver"], env=environment)
        return plane

    @property
    def steps(self):
        return [step for plane in self.planes for step in plane.steps]

    def events(self, kind):
        reports = [report for plane in self.planes for report in plane.reports]
        return [event["message"] for report in reports for event in report["events"] if event["kind"] == kind]

    def losses(self):
        """The losses by step; of a step that was made twice, the last."""
        return {step["step"]: step["loss"] for step in self.steps}

    def end(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
        for plane in self.planes:
            plane.close()
        end_keepers([self._name])


@pytest.fixture
def attempts(cluster):
    started = []

    def start(spec, name):
        started.append(Attempts(cluster, spec, name))
        return started[-1]

    yield start
    for one in started:
        one.end()


def spec(folder, **checkpoint):
    made = job(pipeline={"stages": 2, "schedule": "1f1b", "replan": "off"})
    made["training"]["steps"] = STEPS
    made["checkpoint"] = {"uri": str(folder), "every_steps": 1000, "copy_every_steps": 3} | checkpoint
    made["data"] = {"factory": "tests.worker.workers:Slow", "args": {"length": 8}}
    return made


def workers():
    """The processes of training actors."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or ()).startswith("ray::Worker"):
            found.append(process)
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_after_a_lost_worker_and_a_lost_driver_training_goes_on_from_copies_with_the_same_losses(
    attempts, tmp_path
):
    alone = attempts(spec(tmp_path / "alone"), "alone")
    alone.start()
    assert alone.process.wait(120) == 0
    until(lambda: not find_keepers("alone"), lambda: find_keepers("alone"), every_s=0.1)

    killed = attempts(spec(tmp_path / "killed"), "killed")
    plane = killed.start()
    plane.wait_for_steps(9)
    workers()[0].send_signal(signal.SIGKILL)
    assert killed.process.wait(120) == 1
    assert plane.reports[-1]["reason"] == "WORKER_LOST"
    assert len(find_keepers("killed")) == 2, "they outlive the attempt"
    plane = killed.start()
    plane.wait_for_steps(9)
    killed.process.kill()
    killed.process.wait(60)
    killed.start()
    assert killed.process.wait(120) == 0
    resumed = killed.events("resumed")
    assert len(resumed) == 2 and all("the copies in host memory" in text for text in resumed), resumed
    for text, plane in zip(resumed, killed.planes, strict=False):
        step = int(text.split()[3])
        last = max(step["step"] for step in plane.steps)
        assert last - step <= 3 + 3, (text, last)
    assert killed.losses() == alone.losses() and len(alone.losses()) == STEPS
    until(lambda: not find_keepers("killed"), lambda: find_keepers("killed"), every_s=0.1)
