"""A call of all workers in one process ends, whatever one of them waits for."""

from __future__ import annotations

import threading

import pytest

from worker.verify import local_gang
from worker.verify.local_gang import LocalGang


def test_a_worker_that_never_comes_back_is_named_with_its_line_and_what_another_raised(monkeypatch):
    monkeypatch.setattr(local_gang, "CALL_LIMIT_S", 0.5)
    gang, never = object.__new__(LocalGang), threading.Event()
    gang.workers = ["first", "second"]

    def wait(worker):
        if worker == "first":
            raise ValueError("it broke")
        never.wait(60)

    try:
        with pytest.raises(
            TimeoutError, match=r"not done after 0.5 s: worker 1 \(.*\); another raised ValueError: it broke"
        ):
            gang.call(wait)
    finally:
        never.set()


def test_results_come_in_the_order_of_the_workers():
    gang = object.__new__(LocalGang)
    gang.workers = [3, 1, 2]
    assert gang.call(lambda worker: worker * 10) == [30, 10, 20]
