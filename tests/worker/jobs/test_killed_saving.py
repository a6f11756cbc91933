"""A job that is killed in the middle of writing a checkpoint, ten times at random: its curve is the unbroken one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
STEPS, KILLS = 8, 10
A_SAVE = 22
"""So often, about, one save changes files."""


def curve(folder: Path) -> list[list[float]]:
    return list(map(json.loads, (folder / "curve").read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waiting", "beside"])
def test_ten_kills_within_a_save_change_no_loss_and_no_parameter(tmp_path, how):
    """`beside`: the two workers write copies on threads of their own, and train on until the next save is due."""
    draw = random.Random(0)
    moments = [draw.randint(1, A_SAVE) for _ in range(KILLS)]
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "killed_training.py", tmp_path, how, *map(str, moments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
        check=True,
    )
    assert json.loads(done.stdout) == [0, *[-signal.SIGKILL] * KILLS, 0]
    losses, found = dict(curve(tmp_path / "unbroken")), curve(tmp_path / "broken")
    assert len(losses) == STEPS == len({*losses.values()})
    assert all(losses[step] == loss for step, loss in found), (
        "bit for bit, also of steps that were done twice"
    )
    assert {step for step, _ in found} == losses.keys() and len(found) > STEPS
    first, second = (torch.load(tmp_path / name / "curve.final") for name in ("unbroken", "broken"))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
