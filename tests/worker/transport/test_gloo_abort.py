"""The gloo transport between threads of one process: its own threads, and how waiting operations end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.tiers import some_by_day
from worker.transport.base import PeerLostError, Topology
from worker.transport.gloo import GlooTransport
from worker.transport.rendezvous import host_store

MESHES = ("m0", "m1", "m2", "m3")


@pytest.fixture
def transports():
    """One for each mesh, all connected, with one group of all."""
    store = host_store("127.0.0.1")
    topology = Topology(MESHES)
    made = [
        GlooTransport(
            topology,
            mesh=mesh,
            worker=0,
            host="127.0.0.1",
            store=("127.0.0.1", store.port),
            connect_timeout_s=120.0,
        )
        for mesh in MESHES
    ]
    with ThreadPoolExecutor(len(made)) as threads:
        list(threads.map(lambda one: one.connect({"all": (0, 1, 2, 3)}, ()), made))
    yield dict(zip(MESHES, made, strict=True))
    for transport in made:
        transport.abort()
        transport.close()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are read from /proc")
def test_threads_of_gloo_do_not_preempt_those_that_they_would_then_wait_for(transports):
    policies = []
    for folder in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(
            FileNotFoundError, ProcessLookupError
        ):  # a thread of something else that has just ended
            if (folder / "comm").read_text().startswith("gloo"):
                policies.append(os.sched_getscheduler(int(folder.name)))
    assert len(policies) >= len(MESHES) and set(policies) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(threading.get_native_id()) != os.SCHED_BATCH


@pytest.mark.parametrize("late", [False, True], ids=["before the abort", "after the abort"])
@pytest.mark.parametrize(
    "gone", [0, 1, 2, 3], ids=["nobody gone", "next gone", "next but one gone", "both gone"]
)
@some_by_day("rank", range(4), by_day=1)
def test_an_all_reduce_ends_with_abort_whoever_is_silent_or_left_before(transports, rank, gone, late):
    """The others are there and say nothing, as stopped processes, or have aborted first. By itself it never ends."""
    failed = []

    def reduce() -> None:
        try:
            transports[MESHES[rank]].all_reduce("all", torch.ones(4))
        except PeerLostError as error:
            failed.append(error)

    running = threading.Thread(target=reduce, daemon=True)
    if not late:
        running.start()
        running.join(0.2)
    for distance in (1, 2):
        if gone & distance:
            left = transports[MESHES[(rank + distance) % 4]]
            left.abort()
            left.close()
    time.sleep(0.1)  # the news of a closed connection takes a moment
    transports[MESHES[rank]].abort()
    if late:
        running.start()
    running.join(60.0)
    assert not running.is_alive() and failed
