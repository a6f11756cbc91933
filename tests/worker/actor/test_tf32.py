"""training.tf32 reaches torch's flags in a worker's process before anything is measured, and the profile's key."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.worker.actor.test_actor import job
from worker.actor.batch_feed import Batches
from worker.actor.benchmarks import profile_key
from worker.contract.job import Job
from worker.machine.device import tf32_notes

READ = """
import json, sys
import torch
from worker.contract.job import Job
from worker.actor.actor import NewWorker

for spec in json.loads(sys.argv[1]):
    NewWorker(job=Job.from_json(spec), mesh="m0", worker=0, device="cpu")
    print(json.dumps([
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    ]))
"""
OFF = ("ieee", "none")


def spec_of(tf32):
    spec = job()
    spec["training"]["tf32"] = tf32
    return spec


@pytest.mark.slow
def test_a_workers_process_has_the_flags_under_old_and_new_names():
    specs = [spec_of(tf32) for tf32 in (None, True, False)]
    command = [sys.executable, "-c", READ, json.dumps(specs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    left_alone, on, off = (json.loads(line) for line in done.stdout.splitlines()[-3:])
    assert left_alone == ["none", "tf32", "tf32", False, True, "highest"], "torch's own defaults"
    assert on == ["tf32", "tf32", "tf32", True, True, "high"]
    assert off[0] in OFF and off[1] in OFF and off[2] in OFF
    assert off[3:] == [False, False, "highest"]
    assert "Please use the new API" not in done.stderr


def test_what_is_measured_with_and_without_it_has_keys_of_its_own():
    def key(tf32):
        read = Job.from_json(spec_of(tf32))
        return profile_key(read, "cpu", Batches(read, worker=0, workers_per_mesh=1, microbatches=2), 2, 2)

    assert len({key(tf32) for tf32 in (None, True, False)}) == 3


def test_on_cpu_it_is_told_to_do_nothing():
    (note,) = tf32_notes(Job.from_json(spec_of(True)), "cpu")
    assert note.startswith("training.tf32 is true and has no effect")
    assert (
        tf32_notes(Job.from_json(spec_of(True)), "cuda")
        == tf32_notes(Job.from_json(spec_of(None)), "cpu")
        == []
    )
