"""Processes of one-shot tasks: a pool that is killed ends in the middle of its calls."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest

from tests.polling import until
from worker.contract.tasks import kill_pool


def test_a_killed_pool_ends_its_running_call_and_cancels_those_that_wait():
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"))
    running, _, _, waiting = (pool.submit(time.sleep, 3600) for _ in range(4))
    (process,) = pool._processes.values()
    until(running.running, "a call to run")
    kill_pool(pool)
    with pytest.raises(BrokenProcessPool):
        running.result(60)
    assert waiting.cancelled()
    process.join()
    assert process.exitcode == -9
