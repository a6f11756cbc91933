"""The part of the queue that an autoscaler takes; and real Rays, with and without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from service.orchestrator.ray.jobs_api import RayCluster, RayJobSubmission
from service.orchestrator.ray.local_ray import LocalRay
from service.orchestrator.tasks.runner import run_ray_task
from service.settings.settings import Settings
from worker.contract.tasks import (
    SCALE_REQUEST_VARIABLE,
    SCALE_RESULT_MARK,
    Bundles,
    ScaleRequest,
    ScaleResult,
    read_scale_result,
)
from worker.tasks.scale import scale

WORKER = "slotline_worker"


def bundles(*numbers: int) -> tuple[Bundles, ...]:
    return tuple(Bundles(WORKER, 1.0, number) for number in numbers)


class Limited:
    """An autoscaler that takes requests for up to `most` accelerators; None: there is none."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self.requests: list[int] = []

    def request(self, bundles: Sequence[Bundles]) -> None:
        self.requests.append(sum(each.number for each in bundles))

    def takes_request(self) -> bool | None:
        return None if self.most is None else self.requests[-1] <= self.most


def test_a_queue_that_fits_is_asked_for_at_once():
    autoscaler = Limited(9)
    assert scale(ScaleRequest(bundles(4), bundles(2, 3)), autoscaler) == ScaleResult(True, 2, stands=True)
    assert autoscaler.requests == [9]


def test_what_runs_alone_is_asked_for_while_a_job_starts():
    assert scale(ScaleRequest(bundles(4)), Limited(4)) == ScaleResult(True, 0, stands=True)


def test_a_request_is_withdrawn_where_no_gang_fits():
    autoscaler = Limited(5)
    assert scale(ScaleRequest(bundles(4), bundles(2, 1)), autoscaler) == ScaleResult(True, 0, stands=False)
    assert autoscaler.requests[-1] == 0


def test_nothing_is_left_where_nobody_answers():
    autoscaler = Limited(None)
    assert scale(ScaleRequest(bundles(4), bundles(2, 1)), autoscaler) == ScaleResult(autoscaler=False)
    assert autoscaler.requests == [7, 0]


def test_nothing_at_all_withdraws_without_a_question():
    autoscaler = Limited(None)
    assert scale(ScaleRequest(), autoscaler) == ScaleResult(autoscaler=True)
    assert autoscaler.requests == [0]


def test_a_search_that_takes_too_long_leaves_what_was_found():
    autoscaler = Limited(12)
    result = scale(ScaleRequest(gangs=bundles(*[4] * 8)), autoscaler, search_limit_s=0.0)
    assert result == ScaleResult(True, 0, stands=False) and autoscaler.requests[-1] == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 90))
def test_the_longest_part_that_fits_is_the_one_that_stands(held: int, gangs: list[int], most: int):
    autoscaler = Limited(most)
    result = scale(ScaleRequest(bundles(held), bundles(*gangs)), autoscaler)
    fitting = max(n for n in range(len(gangs) + 1) if n == 0 or held + sum(gangs[:n]) <= most)
    assert result == ScaleResult(True, fitting, stands=fitting > 0)
    assert autoscaler.requests[-1] == (held + sum(gangs[:fitting]) if fitting else 0)
    assert len(autoscaler.requests) <= 8


def test_a_request_and_its_result_pass_the_process_unchanged():
    request = ScaleRequest(bundles(4), (Bundles("GPU", 0.3333, 2),))
    assert ScaleRequest.from_json(request.to_json()) == request
    assert read_scale_result(
        f'x\n{SCALE_RESULT_MARK}{{"autoscaler": true, "accepted": 1, "stands": true}}'
    ) == (ScaleResult(True, 1, stands=True))
    assert read_scale_result("killed") is None


class ScalableRay(LocalRay):
    """A Ray whose autoscaler looks each second; it may start nodes of two workers each, `most_nodes` of them, which are
    idle after some seconds. None: it only watches the four workers of the head."""

    HEAD = "f" * 51 + "00000"
    TYPE = "H100"
    """What only a label of the head tells."""

    def __init__(self, folder: Path, most_nodes: int | None) -> None:
        super().__init__(Settings(local_workers=4))
        self._folder, self._most_nodes = folder, most_nodes

    def _options(self) -> list[str]:
        options = [option for option in super()._options() if option != "--no-monitor"]
        options.append(f"--labels=ray.io/accelerator-type={self.TYPE}")
        if self._most_nodes is None:
            return options
        config = self._folder / "autoscaling.json"
        config.write_text(json.dumps(self._config(self._most_nodes)))
        options = [option for option in options if not option.startswith("--resources")]
        return [*options, "--num-cpus=0", f"--autoscaling-config={config}"]

    def _config(self, most_nodes: int) -> dict[str, object]:
        head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        worker = {WORKER: 2, "CPU": 0, "object_store_memory": 80_000_000}
        return {
            "cluster_name": "slotline-test",
            "max_workers": most_nodes,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": 0.05,
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "head_node_id": self.HEAD,
                "launch_multiple": True,
                "gcs_address": self.gcs_address,
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": head,
                "worker": {
                    "resources": worker,
                    "node_config": {},
                    "min_workers": 0,
                    "max_workers": most_nodes,
                },
            },
            **{name: {} for name in ("docker", "auth", "file_mounts")},
            **{name: [] for name in ("setup_commands", "initialization_commands", "cluster_synced_files")},
            **{f"{of}_setup_commands": [] for of in ("head", "worker")},
            **{f"{of}_start_ray_commands": [] for of in ("head", "worker")},
            **{"rsync_exclude": [], "rsync_filter": [], "file_mounts_sync_continuously": False},
        }

    def _environment(self) -> dict[str, str]:
        environment = super()._environment() | {
            "RAY_AUTH_MODE": "disabled",  # this process asks the GCS, and has another Ray's token or none
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        if self._most_nodes is not None:
            environment |= {"RAY_FAKE_CLUSTER": "1", "RAY_CLOUD_INSTANCE_ID": self.HEAD}
            environment |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": self.HEAD}
        return environment


class RunningRay:
    """A Ray that serves, seen from outside as the control plane does, and the GCS's own word on requests."""

    def __init__(self, local: LocalRay, ray: RayCluster) -> None:
        self._local, self.ray = local, ray
        self._gcs = GcsClient(address=local.gcs_address)

    async def ask(self, name: str, request: ScaleRequest) -> ScaleResult:
        submission = RayJobSubmission(
            id=f"scale-{name}",
            entrypoint=f"{sys.executable} -m worker.tasks scale",
            env={
                SCALE_REQUEST_VARIABLE: request.to_json(),
                "SLOTLINE_DRIVER_RAY_ADDRESS": self._local.gcs_address,
                "PYTHONPATH": str(Path(__file__).parents[3]),
            },
            metadata={},
        )
        return await run_ray_task(self.ray, submission, read_scale_result, limit_s=150)

    def requested(self) -> dict[str, float]:
        """The resources of the cluster's constraint, as the GCS keeps it."""
        reply, total = GetClusterStatusReply(), dict[str, float]()
        reply.ParseFromString(self._gcs.get_cluster_status(timeout_s=30))
        for constraint in reply.cluster_resource_state.cluster_resource_constraints:
            for each in constraint.resource_requests:
                for resource, amount in each.request.resources_bundle.items():
                    total[resource] = total.get(resource, 0.0) + amount * each.count
        return total

    async def until_workers_are(self, number: int) -> None:
        async with asyncio.timeout(120):
            while (there := await self._workers()) != number:
                assert there <= max(number, 4), f"{there} workers came, {number} were asked for"
                await asyncio.sleep(0.5)

    async def _workers(self) -> int:
        return int(sum(node.resources.get(WORKER, 0) for node in await self.ray.nodes()))


@contextlib.asynccontextmanager
async def running(folder: Path, most_nodes: int | None) -> AsyncIterator[RunningRay]:
    local = ScalableRay(folder, most_nodes)
    await local.start()
    ray = RayCluster(local.address, timeout_s=60)
    try:
        yield RunningRay(local, ray)
    finally:
        await ray.close()
        await local.stop()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ray_keeps_what_fits_the_cluster_and_forgets_what_is_withdrawn(tmp_path: Path):
    async with running(tmp_path, None) as ray:  # its autoscaler has the nodes that are there, and no more
        result = await ray.ask("some", ScaleRequest(bundles(1), bundles(1, 2, 1)))
        assert result == ScaleResult(True, 2, stands=True) and ray.requested() == {WORKER: 4.0}
        typed = ScaleRequest(bundles(1), (Bundles(WORKER, 1.0, 2, ScalableRay.TYPE),))
        assert await ray.ask("typed", typed) == ScaleResult(True, 1, stands=True)
        other = ScaleRequest((), (Bundles(WORKER, 1.0, 1, "A100"),))
        assert await ray.ask("of no type that is there", other) == ScaleResult(True)
        result = await ray.ask("fewer", ScaleRequest(bundles(1), bundles(1)))
        assert result == ScaleResult(True, 1, stands=True) and ray.requested() == {WORKER: 2.0}
        assert await ray.ask("none", ScaleRequest()) == ScaleResult(True) and ray.requested() == {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_cluster_grows_for_the_gangs_that_it_can_hold_and_shrinks_behind_them(tmp_path: Path):
    async with running(tmp_path, 2) as ray:
        await ray.until_workers_are(0)
        assert await ray.ask("one", ScaleRequest(gangs=bundles(2))) == ScaleResult(True, 1, stands=True)
        await ray.until_workers_are(2)
        result = await ray.ask("too-many", ScaleRequest(gangs=bundles(2, 2, 2)))
        assert result == ScaleResult(True, 2, stands=True) and ray.requested() == {WORKER: 4.0}
        await ray.until_workers_are(4)
        assert await ray.ask("none", ScaleRequest()) == ScaleResult(True)
        await ray.until_workers_are(0)
