"""Jobs of four tensor-parallel workers, with and without ZeRO-1: each saves its own part, DCP alone reads all, and the job
goes on from it on any layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker.actor.test_actor import job, plain
from tests.worker.cached import traced_once  # noqa: F401 (used by every test)
from tests.worker.checkpoint.test_jobs import saved
from tests.worker.jobs.test_tensor_parallel_zero1 import on
from tests.worker.workers import Workers
from worker.checkpoint import format as checkpoint_format
from worker.contract.checkpoint_files import CheckpointError, inspect_checkpoints

FOUR, BOTH, TWO, ONE, DATA = (
    (1, 4, "none"),
    (2, 2, "optimizer"),
    (1, 2, "none"),
    (1, 1, "none"),
    (2, 1, "optimizer"),
)
READS_ALONE = """
import json, sys, torch
from torch.distributed import checkpoint as dcp

folder, out = sys.argv[1:]
metadata = dcp.FileSystemReader(folder).read_metadata()
state = {
    name: torch.full(one.size, float("nan"), dtype=one.properties.dtype)
    for name, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")
}
dcp.load(state, checkpoint_id=folder, no_dist=True)
torch.save(state, out)
ours = {"worker", "service", "tests"}.intersection(sys.modules)
print(json.dumps({
    "ours": sorted(ours),
    "chunks": {
        name: [[list(c.offsets), list(c.sizes)] for c in one.chunks]
        for name, one in metadata.state_dict_metadata.items() if hasattr(one, "chunks")
    },
}))
"""


def wide():
    """A job whose heads four workers divide."""
    spec = job()
    spec["pipeline"]["schedule"] = "auto"
    spec["model"] = {**spec["model"], "args": {**spec["model"]["args"], "heads": 4}}
    return spec


def read_alone(uri, folder):
    """All tensors that DCP reads in a process that cannot import Slotline, and their chunks."""
    out = folder / "read.pt"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", READS_ALONE, uri, str(out)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["ours"] == []
    return torch.load(out), found["chunks"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FOUR, BOTH])
def test_dcp_alone_reads_what_each_of_four_workers_saved_of_its_own(layout, tmp_path):
    spec = wide()
    with Workers(on([layout] * 2, spec)) as run:
        run.losses(range(1, 3))
        uri = saved(run, str(tmp_path / "c"), 2)
        held = {worker.mesh: [] for worker in run.workers}
        for worker in run.workers:
            shard = checkpoint_format.rank_shard(worker.mesh, worker.index)
            held[worker.mesh].append(Path(uri, f"{shard}.distcp").stat().st_size)
    state, _ = checkpoint_format.load_checkpoint(uri)
    found, chunks = read_alone(uri, tmp_path)
    for name, value in {**state["parameters"], **state["buffers"]}.items():
        assert torch.equal(found[f"model.{name}"], value), name
    for name, entry in state["optimizer"].items():
        for key, value in entry.items():
            assert torch.equal(found[f"optimizer.state.{name}.{key}"], value), (name, key)
    width = layout[1]
    assert len(chunks["model.blocks.0.contract.weight"]) == width
    assert len(chunks["model.blocks.0.attention.qkv.weight"]) == 3 * width, "queries, keys and values each"
    assert len(chunks["optimizer.state.blocks.0.contract.weight.exp_avg"]) >= 4
    assert len(chunks["model.blocks.0.contract.bias"]) == 1
    for sizes in held.values():
        assert max(sizes) < 0.5 * sum(sizes), "no worker wrote for the others"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [FOUR, BOTH])
def test_a_resume_on_the_same_layout_is_the_undisturbed_run_to_the_bit_and_on_others_to_rounding(
    layout, tmp_path
):
    spec = wide()
    expected, _ = plain(spec, range(1, 6))
    with Workers(on([layout] * 2, spec)) as run:
        losses = run.losses(range(1, 3))
        uri = saved(run, str(tmp_path / "c"), 2)
        losses += run.losses(range(3, 6))
        after = checkpoint_format.load_checkpoint(saved(run, str(tmp_path / "after"), 5))[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    for other in ([layout] * 2, [TWO] * 2, [ONE], [DATA] * 2, [BOTH, FOUR]):
        with Workers(on(other, spec)) as run:
            run.call(lambda w: w.restore(uri))
            resumed = run.losses(range(3, 6))
            if other != [layout] * 2:
                assert resumed == pytest.approx(losses[2:], rel=1e-5)
                continue
            assert resumed == losses[2:]
            again = checkpoint_format.load_checkpoint(saved(run, str(tmp_path / "again"), 5))[0]
        for name, value in after["parameters"].items():
            assert torch.equal(again["parameters"][name], value), name
        for name, entry in after["optimizer"].items():
            assert all(torch.equal(again["optimizer"][name][key], value) for key, value in entry.items())


@pytest.mark.parametrize("damage", ["cut short", "missing", "one bit"])
def test_damage_of_one_workers_part_is_found(damage, tmp_path):
    spec = wide()
    with Workers(on([FOUR], {**spec, "pipeline": {"stages": 1, "schedule": "auto"}})) as run:
        uri = saved(run, str(tmp_path), 1)
        path = Path(uri, "m0.rank2.distcp")
        match damage:
            case "cut short":
                os.truncate(path, path.stat().st_size - 1)
            case "missing":
                path.unlink()
            case "one bit":
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(bytes(content))
        (found,) = inspect_checkpoints(str(tmp_path), "job", sums=True)
        assert "m0.rank2.distcp" in found.damage and found.finished
        with pytest.raises(CheckpointError, match=r"m0\.rank2\.distcp"):
            checkpoint_format.load_checkpoint(uri)
        if damage != "missing":
            path.unlink()
        with pytest.raises(CheckpointError, match=r"lacks the shard of mesh 'm0\.rank2'"):
            checkpoint_format.finish_checkpoint(uri, step=1, shards=["m0", "model"], keep=1)
