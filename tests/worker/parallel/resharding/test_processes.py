"""Reshardings between real worker processes over gloo: bit-exact over random layouts, mesh sizes and shapes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import permutations
from multiprocessing.connection import Connection

import pytest
import torch

from service.scheduler.resharding.layout import Layout, Links, Tensor, mesh_layout
from service.scheduler.resharding.resharding import plan_resharding
from tests.service.scheduler.resharding.cases import random_case
from tests.worker.parallel.resharding.cases import trial
from worker.transport.base import Topology, closing_transport
from worker.transport.rendezvous import host_store

LARGEST_MESH = 3
NAMES = tuple(f"{side}/{w}" for side in ("source", "target") for w in range(LARGEST_MESH))
CASES = 60
_ANSWER_S = 90


def _worker(name: str, port: int, pipe: Connection) -> None:
    """Connects to all others, then runs each trial that it is sent and says what came of it; None ends it."""
    from worker.transport.gloo import GlooTransport

    torch.set_num_threads(1)
    transport = GlooTransport(
        Topology(NAMES), mesh=name, worker=0, store=("127.0.0.1", port), host="127.0.0.1"
    )
    with closing_transport(transport):
        transport.connect({}, tuple(permutations(NAMES, 2)))
        pipe.send("connected")
        while (task := pipe.recv()) is not None:
            try:
                pipe.send(trial(name, *task[:3], transport, task[3]))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
                if not isinstance(error, ValueError):
                    return


class _Gang:
    """The worker processes of this module, by name."""

    def __init__(self) -> None:
        self._store = host_store("127.0.0.1")
        context = multiprocessing.get_context("spawn")
        self.processes, self.pipes = {}, {}
        for name in NAMES:
            self.pipes[name], end = context.Pipe()
            arguments = (name, self._store.port, end)
            self.processes[name] = context.Process(target=_worker, args=arguments, daemon=True)
            self.processes[name].start()
        self._next_tag = 0
        assert set(self._answers(NAMES)) == {"connected"}

    def run(self, plan, source: Layout, target: Layout, seed: int) -> list[bool | str]:
        data = plan.to_json()
        names = [worker["name"] for worker in data["workers"]]
        for name in names:
            self.pipes[name].send(({"source": source, "target": target}, data, seed, self._next_tag))
        self._next_tag += len(plan.messages)
        return self._answers(names)

    def _answers(self, names) -> list:
        found = []
        for name in names:
            assert self.pipes[name].poll(_ANSWER_S), f"{name} did not answer within {_ANSWER_S} s"
            found.append(self.pipes[name].recv())
        return found

    def close(self) -> None:
        for name, process in self.processes.items():
            if process.is_alive():
                self.pipes[name].send(None)
        for process in self.processes.values():
            process.join(20)
            process.kill()


@pytest.fixture(scope="module")
def gang() -> Iterator[_Gang]:
    """One for all tests: connecting six processes takes a while. The last test kills one of them."""
    made = _Gang()
    yield made
    made.close()


@pytest.mark.slow
def test_random_reshardings_between_processes_arrive_bit_for_bit(gang):
    ran, sizes = 0, set()
    for seed in range(1000):
        tensor, source, target, links = random_case(seed, largest=40)
        if max(source.workers, target.workers) > LARGEST_MESH:
            continue
        plan = plan_resharding(tensor, source, target, links, messages=64)
        assert gang.run(plan, source, target, seed) == [True] * len(plan.workers), f"seed {seed}"
        ran += 1
        sizes.add((source.workers, target.workers))
        if ran == CASES:
            break
    assert ran == CASES and len(sizes) == LARGEST_MESH**2


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_resharding_of_the_others_by_name(gang):
    source = mesh_layout("source", mesh=(2,), split=(0,))
    target = mesh_layout("target", mesh=(2,), split=(1,))
    plan = plan_resharding(Tensor((64, 64), 4), source, target, Links(1.0))
    assert gang.run(plan, source, target, seed=2) == [True] * 4
    os.kill(gang.processes["source/1"].pid, signal.SIGKILL)
    gang.processes["source/1"].join(20)
    del gang.pipes["source/1"]
    data = plan.to_json()
    for name in ("target/0", "target/1"):
        gang.pipes[name].send(({"source": source, "target": target}, data, 2, 10**6))
    answers = gang._answers(["target/0", "target/1"])
    gang.processes.pop("source/1")
    assert all(isinstance(answer, str) and "source/1" in answer for answer in answers)
