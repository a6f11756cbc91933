"""Reason codes: one list, which every module of Slotline writes from and reads by."""

from __future__ import annotations

import ast
import logging
import pickle
import traceback
from pathlib import Path

import pytest
from ray.exceptions import RayError, RayTaskError

from worker.contract import reasons
from worker.contract.failures import AttemptFailure, as_failure, attributed_to
from worker.contract.reasons import CAUSE_PRECEDENCE, Cause, Reason, UnknownReasonError, cause_of
from worker.transport.base import EngineError

TREE = Path(__file__).parents[3]


def test_every_reason_says_what_it_means_and_its_code_is_its_name():
    for reason in Reason:
        assert reason.name == reason.value == str(reason)
        assert reason.meaning and len(reason.value) <= 100  # the database's column


def test_every_reason_that_a_worker_fails_with_has_a_rank():
    failures = [r for r in Reason if r.cause is not None]
    of_the_control_plane = {
        "CODE_SETUP_FAILED",
        "SECRET_MISSING",
        "START_REFUSED",
        "DRIVER_LOST",
        "PREEMPTED",
        "RESIZED",
        "MAX_DURATION",
        "VERSION_MISMATCH",  # the driver's, before it has workers
    }
    assert {*failures} - {*CAUSE_PRECEDENCE} == of_the_control_plane


def test_a_known_code_is_read_with_its_cause_and_message():
    assert Reason.read("NAN_LOSS", "it is NaN") == (Reason.NAN_LOSS, "it is NaN")
    assert Reason.read(None, None) == Reason.read("", None) == (None, None)
    assert cause_of("NAN_LOSS") is Cause.USER
    assert cause_of("PREEMPTED") is Cause.PREEMPTION
    assert cause_of("WORKER_LOST") is cause_of(None) is Cause.INFRASTRUCTURE


def test_an_unknown_code_is_an_error_in_tests():
    with pytest.raises(UnknownReasonError, match="'GPU_ON_FIRE' is not in"):
        Reason.parse("GPU_ON_FIRE")


def test_an_unknown_code_of_a_newer_neighbour_is_internal_and_stays_in_the_message(monkeypatch, caplog):
    monkeypatch.setattr(reasons, "strict", False)
    reasons._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Reason.read("GPU_ON_FIRE", "call help") == (Reason.INTERNAL, "GPU_ON_FIRE: call help")
        assert Reason.read("GPU_ON_FIRE", None)[1] == "GPU_ON_FIRE: no message was given"
        assert cause_of("GPU_ON_FIRE") is Cause.INFRASTRUCTURE
    assert [record.message for record in caplog.records if "'GPU_ON_FIRE'" in record.message] != []
    assert len(caplog.records) == 1, "told once"


def test_memory_that_ran_out_has_a_reason_of_its_own_whatever_failed_around_it():
    allocator = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."
    for cause in (
        RuntimeError(allocator),
        type("OutOfMemoryError", (RuntimeError,), {"__module__": "torch"})(),
    ):
        error = EngineError("1F0 raised")
        error.__cause__ = cause
        assert as_failure(error, Reason.USER_CODE_RAISED).reason is Reason.OUT_OF_MEMORY
    for other in (EngineError(f"aborted because m1/0 said: {allocator}"), MemoryError(), RuntimeError("no")):
        assert as_failure(other, Reason.SLOT_STALLED).reason is Reason.SLOT_STALLED
    assert Reason.OUT_OF_MEMORY.cause is Cause.INFRASTRUCTURE


def test_a_failure_reaches_the_driver_with_its_reason():
    @attributed_to(Reason.DATA_FAILED)
    def read():
        raise OSError("no disk")

    with pytest.raises(AttemptFailure) as caught:
        read()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.reason is Reason.DATA_FAILED and copy.message == "OSError: no disk"
    assert "in read" in copy.details
    with pytest.raises(AttemptFailure) as kept, attributed_to(Reason.INTERNAL):
        read()
    assert kept.value.reason is Reason.DATA_FAILED


@pytest.mark.parametrize("room", ["worker", "service"])
def test_nobody_writes_a_reason_as_a_free_string(room):
    found = []
    for path in sorted((TREE / room).rglob("*.py")):
        if path.name == "reasons.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            literals = [node] if isinstance(node, ast.Constant) and node.value in {*Reason} else []
            if isinstance(node, ast.keyword) and (node.arg or "").endswith("reason"):
                literals += [node.value] if isinstance(node.value, ast.Constant) and node.value.value else []
            found += [f"{path.relative_to(TREE)}:{literal.lineno} {literal.value!r}" for literal in literals]
    assert not found


def test_an_error_with_text_that_is_no_utf8_is_sent_as_what_it_is():
    """A file's name may be of any bytes: Ray sends an error as text, and a worker that cannot is taken for lost."""
    with pytest.raises(AttemptFailure) as caught, attributed_to(Reason.DATA_FAILED):
        raise FileNotFoundError("/data/\udcff.png")
    told = "".join(traceback.format_exception(caught.value))
    assert told.encode() and caught.value.details.encode()
    assert str(caught.value) == "DATA_FAILED: FileNotFoundError: /data/\\udcff.png"
    sent = RayTaskError("run_step", told, caught.value).to_bytes()
    assert RayError.from_bytes(sent).cause.reason is Reason.DATA_FAILED
