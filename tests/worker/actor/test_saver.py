"""Copies of a state in host memory: whole, their own, and in the memory of the copy before."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from tests.worker.driver.fake_gang import FakeActor, SimpleGang
from worker.actor.saver import BackgroundTask, HostSnapshots, ShardSaver, SnapshotMemory
from worker.checkpoint import format as checkpoint_format
from worker.driver.checkpoints import snapshot_rooms, snapshot_shortfall
from worker.machine.telemetry import PeakMemory


def state():
    return {
        "parameters": {"w": torch.randn(4, 3).t(), "b": torch.nn.Parameter(torch.randn(3))},
        "buffers": {
            "count": torch.tensor(7),
            "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        },
        "optimizer": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4), "note": None}},
        "optimizer_groups": [{"lr": 0.1, "betas": (0.9, torch.tensor(0.99)), "params": ["w", "b"]}],
        "lr_schedule": {"_last_lr": [0.1]},
    }


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_a_copy_stays_what_the_state_was_and_the_next_takes_its_memory():
    snapshots, given = HostSnapshots("cpu"), state()
    before = [tensor.detach().clone() for tensor in tensors(given)]
    first = snapshots.take(given)
    places = [tensor.data_ptr() for tensor in tensors(first)]
    for tensor in tensors(given):
        tensor.data.zero_()
    given["lr_schedule"]["_last_lr"][0] = 0.0
    given["optimizer_groups"][0]["params"].clear()
    assert all(map(torch.equal, tensors(first), before)) and len(before) == 7
    assert [t.stride() for t in tensors(first)] == [t.stride() for t in before]
    assert first["lr_schedule"] == {"_last_lr": [0.1]} and first["optimizer_groups"][0]["params"] == [
        "w",
        "b",
    ]
    held = snapshots.copied_bytes
    assert held == sum(tensor.nbytes for tensor in before)
    second = snapshots.take(given)
    assert [tensor.data_ptr() for tensor in tensors(second)] == places and snapshots.copied_bytes == held
    assert not any(tensor.any() for tensor in tensors(second))


def test_what_the_state_no_longer_has_is_given_back_and_another_shape_gets_memory_of_its_own():
    snapshots = HostSnapshots("cpu")
    snapshots.take({"a": torch.ones(1000), "b": torch.ones(10)})
    assert snapshots.take({"b": torch.ones(5)})["b"].shape == (5,)
    assert snapshots.copied_bytes == 20


class Cuda:
    """What is asked of torch.cuda, in order."""

    def __init__(self):
        self.log = []

    def Stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.log.append(f"waits for {other}"))

    def current_stream(self):
        return "the step"

    def stream(self, stream):
        self.log.append("copies")
        return torch.no_grad()

    def Event(self):
        return SimpleNamespace(
            record=lambda stream: self.log.append("event"), synchronize=lambda: self.log.append("waited")
        )


def test_on_cuda_copies_wait_for_the_step_and_the_caller_for_the_copies():
    cuda = Cuda()
    copied = HostSnapshots("cuda", cuda).take({"a": torch.ones(3)})
    assert (
        cuda.log == ["waits for the step", "copies", "event", "waited"] and copied["a"].tolist() == [1.0] * 3
    )


def test_what_is_written_from_a_copy_is_what_is_written_while_all_wait(tmp_path):
    given, held = state(), []
    saver = ShardSaver(
        "m0",
        lambda step: given,
        {"model": {"parameters": {"unused": torch.ones(2)}}},
        report_copied_bytes=held.append,
    )
    assert saver.saved() is not None, "nothing was begun"
    assert saver.save(f"{tmp_path}/waiting", 3) == ["model"]
    saver.begin(f"{tmp_path}/beside", 3)
    for tensor in tensors(given):
        tensor.data.zero_()
    saver._finish_previous()  # what the next save does
    for place in ("waiting", "beside"):
        checkpoint_format.finish_checkpoint(f"{tmp_path}/{place}", step=3, shards=["m0", "model"], keep=1)
    one, other = (
        checkpoint_format.load_checkpoint(f"{tmp_path}/{place}")[0] for place in ("waiting", "beside")
    )
    assert all(map(torch.equal, tensors(one), tensors(other))) and len(tensors(one)) == 8
    assert held == [sum(tensor.nbytes for tensor in tensors(state()))]


def test_a_task_tells_what_came_of_it_and_a_wait_for_it_has_a_limit():
    assert BackgroundTask(lambda: 7, "test").result(60.0) == 7
    with pytest.raises(ZeroDivisionError):
        BackgroundTask(lambda: 1 / 0, "test").result(60.0)
    go = threading.Event()
    task = BackgroundTask(lambda: go.wait(60), "test")
    with pytest.raises(TimeoutError):
        task.result(0.01)
    assert not task.done
    go.set()
    assert task.result(60.0) is True and task.done


def test_the_copy_is_no_part_of_what_training_holds():
    peak = PeakMemory("cpu")
    peak.set_baseline([])
    peak.begin()
    copies = torch.ones(30_000_000)
    all_of_it = peak.read()
    assert all_of_it >= copies.nbytes
    peak.exclude_bytes(copies.nbytes)
    assert abs(all_of_it - copies.nbytes - peak.read()) < 20_000_000
    peak.exclude_bytes(0)
    assert abs(all_of_it - peak.read()) < 20_000_000


@pytest.mark.parametrize(
    ("device", "room", "said"),
    [
        ("cpu", SnapshotMemory(400, None), None),
        (
            "cpu",
            SnapshotMemory(401, None),
            "mesh m0 may hold 1,000 bytes, its plan takes 600, and a copy of its state 401",
        ),
        ("cuda", SnapshotMemory(401, 401), None),
        ("cuda", SnapshotMemory(401, 400), "takes 401 bytes of its host, which offers 400"),
        ("cuda", SnapshotMemory(401, None), None),
    ],
)
def test_a_copy_has_to_fit_beside_the_plan_on_cpu_and_in_the_host_on_cuda(device, room, said):
    asked = []

    def worker(found):
        def remote(sharing):
            asked.append(sharing)
            return found

        return FakeActor(snapshot_memory=remote)

    gang = SimpleGang(
        workers=[worker(room), worker(SnapshotMemory(0, None)), worker(SnapshotMemory(1, 1))],
        addresses=[
            SimpleNamespace(mesh=mesh, node_id=node) for mesh, node in (("m0", 1), ("m0", 1), ("m1", 2))
        ],
    )
    planned = SimpleNamespace(
        spec={
            "meshes": [{"name": "m0", "memory_bytes": 1000}, {"name": "m1", "memory_bytes": None}],
            "stages": [],
        },
        plan={"meshes": [{"name": name, "peak_memory_bytes": 600} for name in ("m0", "m1")]},
    )
    found = snapshot_shortfall(planned, snapshot_rooms(gang), gang=gang, device=device)
    assert asked == [2, 2, 1]
    assert found is None if said is None else said in found
