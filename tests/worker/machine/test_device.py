"""The choice of a GPU by what Ray assigned, and of the transport by device."""

import os
import socket

import pytest
import torch

from worker.machine.device import choose_device, device_kind, gpu_index, make_transport
from worker.transport.base import Topology
from worker.transport.gloo import GlooTransport
from worker.transport.rendezvous import host_store

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("environment", "assigned", "index"),
    [
        ({}, [3], 0),
        ({NOSET: "0"}, [3], 0),
        ({NOSET: ""}, ["3"], 0),
        ({NOSET: "false", "CUDA_VISIBLE_DEVICES": "4,5"}, ["5"], 0),
        ({NOSET: "1"}, ["3"], 3),
        ({NOSET: "1"}, [2], 2),
        ({NOSET: "true", "CUDA_VISIBLE_DEVICES": "4,5"}, ["5"], 1),
        ({NOSET: "1", "CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, ["GPU-b"], 1),
    ],
)
def test_the_gpu_is_the_first_visible_one_unless_ray_leaves_the_environment_alone(
    environment, assigned, index
):
    assert gpu_index(environment, assigned) == index


def test_no_assigned_gpu_is_named_with_the_way_out():
    with pytest.raises(RuntimeError, match=f"{NOSET} is set"):
        gpu_index({NOSET: "1"}, [])


def test_an_assigned_gpu_that_is_not_visible_is_named():
    with pytest.raises(RuntimeError, match=r"assigned GPU '3'.*CUDA_VISIBLE_DEVICES is '0,1'"):
        gpu_index({NOSET: "1", "CUDA_VISIBLE_DEVICES": "0,1"}, [3])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_node_without_a_gpu_says_so_by_name():
    built_for_cuda = r"Found no NVIDIA driver.*\): this torch wants a GPU and a driver for CUDA"
    why = built_for_cuda if torch.version.cuda else r"not compiled with CUDA.*\): install a CUDA build"
    told = rf"finds no GPU on {socket.gethostname()} \(.*{why}"
    with pytest.raises(RuntimeError, match=told):
        choose_device("cuda", lambda: [0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_a_driver_that_is_too_old_is_told_in_cudas_words_with_the_version_that_torch_wants(monkeypatch):
    def too_old():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"
        )

    monkeypatch.setattr(torch.cuda, "init", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    told = r"too old \(found version 11040\)\): this torch wants a GPU and a driver for CUDA 13\.0: see what nvidia-smi"
    with pytest.raises(RuntimeError, match=told):
        choose_device("cuda", lambda: [0])


@pytest.mark.parametrize("given", [None, "12"])
def test_a_process_has_a_hardware_queue_for_each_lane_before_it_uses_cuda(monkeypatch, given):
    seen = []
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    queues = lambda: os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen.append(queues()) or True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.append(index))
    choose_device("cuda", lambda: [0])
    assert seen == [given or "16", 0]


@pytest.mark.parametrize(("meshes", "queues"), [(7, "16"), (8, "18"), (12, "26"), (40, "32")])
def test_a_job_of_many_meshes_has_queues_for_the_lanes_to_all_of_them(monkeypatch, meshes, queues):
    """With 16 for the lanes of 8 meshes two of them shared one, and compute waited behind a receive."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    choose_device("cuda", lambda: [0], meshes)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == queues


def test_queues_that_are_too_few_are_told(monkeypatch, caplog):
    """Other trainers want 1 to be set, and nothing would overlap."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    choose_device("cuda", lambda: [0], 2)
    assert "CUDA_DEVICE_MAX_CONNECTIONS is 1, and a worker of 2 meshes has up to 6 streams" in caplog.text
    caplog.clear()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "12")
    choose_device("cuda", lambda: [0], 2)
    assert caplog.text == ""


def test_kinds_of_accelerators_are_told_apart_by_name_and_not_by_host(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert device_kind("cuda") == "H200"
    here = device_kind("cpu")
    assert here.endswith(" cores") and here != ", cores" and socket.gethostname() not in here
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert device_kind("cpu").endswith(", 1 cores")


def make(device):
    store = host_store("127.0.0.1")
    return make_transport(
        device,
        Topology(("m0",)),
        mesh="m0",
        worker=0,
        store=("127.0.0.1", store.port),
        host="127.0.0.1",
        connect_s=5,
    )


def test_cpu_workers_talk_over_gloo():
    transport = make("cpu")
    assert isinstance(transport, GlooTransport)
    transport.close()


def test_a_width_of_nccl_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("SLOTLINE_NCCL_MAX_CTAS", "wide")
    with pytest.raises(ValueError, match="SLOTLINE_NCCL_MAX_CTAS is 'wide'"):
        make("cuda")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ({"SLOTLINE_WORKERS_PER_GPU": "2"}, None),
    ],
)
def test_segments_grow_unless_somebody_says_how_to_allocate_or_workers_share_a_gpu(monkeypatch, given, used):
    """The allocator reads its settings when CUDA is used first."""
    seen = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "SLOTLINE_WORKERS_PER_GPU"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        torch.cuda, "is_available", lambda: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")) or True
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    choose_device("cuda", lambda: [0])
    assert seen == [used]
