"""A node that is about to end: Ray is told, and whoever waits for it goes on when nobody is left on it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.polling import until
from worker.contract.job import placement_group_name
from worker.tasks.drain import wait_until_empty


class Clock:
    """Seconds that go on only while somebody sleeps."""

    def __init__(self):
        self.now_s = 100.0

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize(
    ("answers", "left", "seconds"),
    [
        ([[]], [], 0.0),
        ([["a", "b"], ["b"], []], [], 1.0),
        ([["a"], ConnectionError("the head is away"), []], [], 1.0),
        ([["a"]] * 99, ["a"], 8.0),
    ],
)
def test_the_wait_ends_when_nobody_is_left_or_the_time_is_over(answers, left, seconds):
    clock, asked = Clock(), iter(answers)

    def attempts():
        answer = next(asked)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_until_empty(attempts, 108.0, now=clock.now, sleep=clock.sleep) == left
    assert clock.now_s == pytest.approx(100.0 + seconds)


def test_where_ray_never_answers_the_wait_ends_with_the_time():
    clock = Clock()
    left = wait_until_empty(lambda: 1 / 0, 103.0, now=clock.now, sleep=clock.sleep)
    assert left and clock.now_s == pytest.approx(103.0)


def drained(address, node_id, seconds):
    """The process of the hook on this node."""
    environment = {**os.environ, "RAY_ADDRESS": address}
    environment |= {"SLOTLINE_DRAIN_NODE": node_id, "SLOTLINE_DRAIN_S": str(seconds)}
    return subprocess.Popen(
        [sys.executable, "-m", "worker.tasks", "drain"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("variable", "told"), [("soon", "SLOTLINE_DRAIN_S is 'soon'"), ("-3", "is '-3'")])
def test_a_wrong_number_of_seconds_is_named(variable, told):
    process = drained("", "", variable)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and told in said


def test_a_machine_without_ray_is_told_and_its_pod_ends(tmp_path):
    process = drained("127.0.0.1:1", "", 3)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and (
        "did not answer within 3 s" in said or "the node was not drained: " in said
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_a_real_ray_the_hook_waits_for_the_attempts_of_its_node_alone():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=2, resources={f"own{k}": 1}).node_id for k in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        groups = {
            name: ray.util.placement_group([{"CPU": 1, own: 0.1}], name=name)
            for name, own in (
                (placement_group_name("here"), "own0"),
                ("a stranger's", "own0"),
                (placement_group_name("elsewhere"), "own1"),
            )
        }
        ray.get([group.ready() for group in groups.values()])
        process = drained(cluster.address, nodes[0], 120)
        state = ray._private.state.state
        until(lambda: nodes[0] in state.get_draining_nodes(), state.get_draining_nodes, limit_s=60)
        assert process.poll() is None, "an attempt is there"
        ray.util.remove_placement_group(groups[placement_group_name("here")])
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "no attempt is here any more" in said
        process = drained(cluster.address, nodes[1], 3)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert f"still here after 3 s: {placement_group_name('elsewhere')}" in said
    finally:
        ray.shutdown()
        cluster.shutdown()
