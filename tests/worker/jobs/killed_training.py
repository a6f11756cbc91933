"""A small training that saves after every step, in a process that is killed within one of its writes.

`python killed_training.py FOLDER HOW MOMENT ...` trains in FOLDER/unbroken without a kill, then in FOLDER/broken in one
process after the other, which go on from each other's checkpoints: each is killed at its file operation of that number (0:
not at all). HOW is `waiting`, or `beside`: training goes on while a checkpoint is written. Prints how they ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from types import SimpleNamespace

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

from tests.worker.driver.fake_gang import FakeActor, FakeGang
from worker.actor.saver import ShardSaver
from worker.checkpoint import format as checkpoint_format
from worker.checkpoint.record import RECORD_SHARD, make_record, record_to_state
from worker.contract.job import CheckpointPolicy
from worker.driver.checkpoints import Checkpoints
from worker.engine.local_stages import LocalStages
from worker.engine.optim.reduce_and_step import ModelUpdate, UpdateSettings
from worker.parallel.collectives import Collectives
from worker.transport.base import Topology
from worker.transport.local import LocalTransport

STEPS = 8


def train(folder: str, curve: str, kill_at: int, how: str) -> None:
    """Go on from the newest whole checkpoint to the last step; each step's number and loss becomes a line of `curve`.

    The process kills itself at its file operation number `kill_at`, half way through where that writes.
    """
    torch.set_num_threads(1)
    os.fsync = lambda _: (
        None
    )  # a process that is killed loses nothing that it gave to the system, and disks are slow
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    workers = [_Worker("m0", model[0], model), _Worker("m1", model[2], None)]
    policy = CheckpointPolicy(folder, every_steps=1, keep=2)
    saving = Checkpoints(
        policy,
        "job",
        gang=_Gang(workers),
        reporter=SimpleNamespace(
            event=lambda *_: None,
            checkpoint=lambda *_: None,
            undelivered=lambda _: {},
            deliver_again=lambda *_: None,
        ),
        limit_s=60,
    )
    if how == "beside":
        saving.write_asynchronously()
    first = saving.restore(None) + 1
    if kill_at:
        _kill_at(kill_at)
    for step in range(first, STEPS + 1):
        draw = torch.Generator().manual_seed(step)
        inputs, target = torch.randn(5, 6, generator=draw), torch.randn(5, 3, generator=draw)
        for worker in workers:
            worker.update.begin()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        for worker in workers:
            worker.update.reduce([loss.detach()])
            worker.update.step()
            worker.update.finish(step)
        with open(curve, "a") as file:
            file.write(json.dumps([step, loss.item()]) + "\n")
        saving.poll_behind(step)
        saving.after(step, last=step == STEPS)
    torch.save(model.state_dict(), f"{curve}.final")


class _Worker:
    """One mesh with the engine's own update and state; the first also saves what is no mesh's."""

    def __init__(self, mesh: str, stage: nn.Module, whole: nn.Module | None):
        self.mesh = mesh
        stage.original_names = {name: f"{mesh}.{name}" for name, _ in stage.named_parameters()}
        optimizer = torch.optim.AdamW(stage.parameters(), lr=0.05)
        self.update = ModelUpdate(
            LocalStages({0: stage}, [mesh]),
            Collectives(LocalTransport.group(Topology((mesh,)))[mesh, 0], {}),
            UpdateSettings(clip_grad_norm=1.0, non_finite="stop"),
            optimizer=optimizer,
            lr_schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        )
        rest = {} if whole is None else {RECORD_SHARD: record_to_state(make_record(whole), {})}
        self.saver = ShardSaver(mesh, lambda step: self.update.state(), rest)

    def restore(self, uri: str) -> int:
        state, step = checkpoint_format.load_checkpoint(uri, names=set(self.update.parameters))
        self.update.load_state(state)
        return step


class _Gang(FakeGang):
    def __init__(self, workers: list[_Worker]):
        self.meshes = [SimpleNamespace(name=worker.mesh) for worker in workers]
        self.workers = [
            FakeActor(
                save=lambda *a, w=worker: lambda: w.saver.save(*a),
                begin_save=lambda *a, w=worker: lambda: w.saver.begin(*a),
                saved=lambda w=worker: w.saver.saved,
                restore=lambda *a, w=worker: lambda: w.restore(*a),
            )
            for worker in workers
        ]

    def wait(self, refs, **_):
        return [ref() for ref in refs]


def _kill_at(count: int) -> None:
    """From now on, count what changes files and end the process at number `count`."""
    left = [count]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(change):
        def changed(self, *arguments, **keywords):
            left[0] -= 1
            if left[0] == 0:
                if count % 2:  # it has just happened, or not quite
                    with suppress(FileNotFoundError):
                        change(self, *arguments, **keywords)
                die()
            return change(self, *arguments, **keywords)

        return changed

    def opened(self, path, mode="rb", _open=LocalFileSystem.open, **keywords):
        file = _open(self, path, mode, **keywords)
        if "w" not in mode:
            return file
        left[0] -= 1
        if left[0] == 0:
            write = file.write

            def write_half(content):
                write(bytes(content)[: len(content) // 2])
                file.flush()
                die()

            return _Halving(file, write_half)
        return file

    LocalFileSystem.open = opened
    for name in ("mv", "rm_file", "rm"):
        setattr(LocalFileSystem, name, counted(getattr(LocalFileSystem, name)))


class _Halving:
    def __init__(self, file, write):
        self._file, self.write = file, write

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def attempts(folder: str, how: str, moments: list[int]) -> list[int]:
    """The signals that ended the processes, 0 for those that came to their end; one import of torch is enough for all."""
    os.makedirs(folder)
    ended = []
    for moment in moments:
        if (child := os.fork()) == 0:
            try:
                train(folder, f"{folder}/curve", moment, how)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        ended.append(os.waitstatus_to_exitcode(status))
    return ended


def warm_up() -> None:
    """Have what optimizers import when they are first used; no backward, which starts threads that no fork keeps."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.AdamW([parameter]).step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    place, how = sys.argv[1:3]
    print(
        json.dumps(
            attempts(f"{place}/unbroken", how, [0])
            + attempts(f"{place}/broken", how, [*map(int, sys.argv[3:]), 0])
        )
    )
