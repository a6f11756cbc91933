"""A model that is built in files has the numbers of one in memory, and takes the memory of what was open to it."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.worker.actor.test_actor import job
from tests.worker.workers import Workers
from worker.actor import model_host
from worker.machine import file_backed
from worker.machine.file_backed import FileBackedTensors, file_backed_tensors
from worker.model.factory import build_model

MIB = 1 << 20
ROOT = Path(__file__).parents[3]


def in_file(tensor):
    """True where the memory of `tensor` is a file of a folder of pytest's."""
    start = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= start < last:
            return "/pytest-" in line
    raise AssertionError("it is mapped nowhere")


@pytest.fixture
def every_size(monkeypatch):
    monkeypatch.setattr(file_backed, "LARGE_BYTES", 1)


class Drawn(nn.Module):
    """Parameters made in many ways: drawn, computed, converted, of another layout, tied, part of another tensor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8))
        self.half = nn.Linear(8, 5).to(torch.bfloat16)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        both = torch.randn(6, 7)
        self.first, self.second = nn.Parameter(both[:3]), nn.Parameter(both.T[:, 3:])
        self.tied = self.first
        self.doubled = nn.Parameter(nn.init.trunc_normal_(torch.empty_like(both)).double().cumsum(0))
        self.register_buffer("steps", torch.arange(12).view(3, 4).expand(2, 3, 4))
        self.register_buffer("values", torch.linalg.svd(torch.rand(5, 5))[1].sort().values)
        self.register_buffer("none", torch.empty(0))


BUILDS = {
    "gpt": lambda: build_model(
        "worker.examples.gpt:build", {"layers": 2, "width": 16, "heads": 2, "length": 8}, seed=3
    ),
    "unet": lambda: build_model("worker.examples.unet:build", {"width": 8}, seed=3),
    "drawn": lambda: build_model(f"{__name__}:Drawn", seed=3),
    "lstm": lambda: build_model("torch.nn:LSTM", {"input_size": 4, "hidden_size": 3}, seed=3),
    "quantized": lambda: torch.ao.nn.quantized.Linear(4, 3),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_a_model_in_files_has_the_numbers_and_layouts_of_one_in_memory(build, every_size, tmp_path):
    expected = build()
    with FileBackedTensors(0, tmp_path) as mode:
        model = build()
    after = torch.rand(3)
    assert os.listdir(tmp_path) == []
    assert (mode.note() and str(tmp_path) in mode.note()) or not dict(model.named_parameters())
    found, wanted = (
        {**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (model, expected)
    )
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert type(tensor) is type(wanted[name]) and tensor.requires_grad == wanted[name].requires_grad
        assert tensor.stride() == wanted[name].stride() and tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
        assert not tensor.numel() or in_file(tensor), name
    assert not in_file(after)


def test_tensors_that_share_memory_still_do_and_those_of_others_are_left_alone(every_size, tmp_path):
    import numpy as np

    with FileBackedTensors(0, tmp_path):
        made = torch.zeros(4, 6)
        view, array = made.T[2:], torch.from_numpy(np.ones(5))
        made.add_(1)
        made.data[0] = 7
        meta, sparse = torch.empty(9, device="meta"), torch.eye(4).to_sparse()
        copied = made.clone()
        with torch.inference_mode():
            frozen = torch.ones(3) + 1
    assert in_file(made) and in_file(copied) and in_file(frozen)
    assert view.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()
    assert view[0].tolist() == [7, 1, 1, 1] and copied.data_ptr() != made.data_ptr()
    assert not in_file(array) and meta.is_meta and sparse.to_dense().sum() == 4


def test_half_of_what_is_free_stays_in_memory_and_what_is_dropped_counts_no_more(tmp_path):
    with FileBackedTensors(20 * MIB, tmp_path) as mode:
        first, second = (torch.empty(4 * MIB, dtype=torch.uint8) for _ in range(2))
        beyond = torch.empty(4 * MIB, dtype=torch.uint8)
        small = torch.empty(MIB - 1, dtype=torch.uint8)
        view = first[:2]
        del first
        gc.collect()
        held = torch.empty(4 * MIB, dtype=torch.uint8)  # by its view
        del view
        again = torch.empty(4 * MIB, dtype=torch.uint8)
        held.clone()
    assert [in_file(one) for one in (second, beyond, small, held, again)] == [False, True, False, True, False]
    assert mode.file_bytes == 8 * MIB and f"{8 * MIB:,} bytes" in mode.note()


@pytest.mark.parametrize("free_bytes", [None, 10**9])
def test_where_memory_suffices_or_nothing_is_known_of_it_no_file_is_made(free_bytes, every_size, tmp_path):
    with FileBackedTensors(free_bytes, tmp_path) as mode:
        made = torch.rand(1000)
    assert not in_file(made) and mode.note() == ""


def test_a_tensor_for_which_no_disk_has_room_stays_in_memory(every_size, tmp_path, caplog):
    with FileBackedTensors(0, tmp_path / "gone") as mode:
        made = torch.full((3,), 2.0)
    assert made.tolist() == [2, 2, 2] and mode.note() == ""
    assert "12 bytes stays in memory" in caplog.text and "gone" in caplog.text
    assert FileBackedTensors(0, tmp_path)._file(1 << 60) is None  # more than any disk has
    assert os.listdir(tmp_path) == []


def test_files_lie_on_a_disk_and_never_in_memory_themselves(monkeypatch, tmp_path):
    monkeypatch.setattr(file_backed.tempfile, "gettempdir", lambda: "/dev/shm")
    beside = file_backed_tensors(lambda: 100)
    assert beside._folder in (None, Path("/var/tmp")) and not file_backed._is_on_disk(Path("/dev/shm"))
    assert not file_backed._is_on_disk(tmp_path / "gone")


MEASURED = """
import sys
from pathlib import Path
from worker.model.factory import build_model
from worker.machine.file_backed import FileBackedTensors

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

with FileBackedTensors(int(sys.argv[1]), Path(sys.argv[2])):
    build_model("worker.examples.gpt:build", {"layers": 1, "width": 16, "heads": 2}, seed=1)
    before = resident()
    model = build_model("worker.examples.gpt:build", {"layers": 4, "width": 1024, "heads": 2}, seed=1)
print(resident() - before, sum(p.nbytes for p in model.parameters()) >> 10)
"""


def test_a_model_in_files_takes_less_memory_than_its_parameters(tmp_path):
    taken = {}
    for free_bytes in (10**12, 60 * MIB):
        words = [sys.executable, "-c", MEASURED, str(free_bytes), str(tmp_path)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
        taken[free_bytes], size = map(int, ended.stdout.split())
    assert size > 190 << 10  # in KiB, as the figures of the system are
    assert taken[10**12] > 0.9 * size and taken[60 * MIB] < (30 << 10) + 0.2 * size


def test_a_job_whose_model_was_built_in_files_trains_as_one_in_memory(every_size, monkeypatch, tmp_path):
    spec = job(stages=3, meshes=3)
    with Workers(spec) as run:
        expected = run.losses(range(1, 4))
    modes = []

    def in_files():
        modes.append(FileBackedTensors(0, tmp_path))
        return modes[-1]

    monkeypatch.setattr(model_host, "file_backed_tensors", in_files)
    with Workers(spec) as run:
        assert run.losses(range(1, 4)) == expected
        for worker in run.workers:
            assert not any(in_file(tensor) for tensor in worker.engine.state()["parameters"].values())
        gc.collect()
        assert len(modes) == 1 and modes[0]._in_files and modes[0].file_bytes == 0


def test_the_notes_of_a_model_say_what_of_it_lies_in_files(every_size, monkeypatch, tmp_path):
    monkeypatch.setattr(model_host, "file_backed_tensors", lambda: FileBackedTensors(0, tmp_path))
    built = model_host.build_job_model(model_host.Job.from_json(job()))
    assert [note for note in built.notes if "lie in files of" in note]
