"""Reasons of failures: a broken accelerator is not the user's fault, a mistake of a program that CUDA notices is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker.actor.state import engine_failure
from worker.contract import failures
from worker.contract.failures import as_failure, first_cause
from worker.contract.reasons import Cause, Reason
from worker.engine.results import StageError
from worker.transport.base import EngineError

FAULTS = [
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: unspecified launch failure",
    "CUDA error: hardware error encountered over nvlink",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: the launch timed out and was terminated",
]
MISTAKES = [
    "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
]


def raised_in_an_action(error: Exception) -> StageError:
    try:
        raise StageError(f"s0F1 raised {error}", "F", 0, 1, "") from error
    except StageError as staged:
        return staged


@pytest.mark.parametrize("text", FAULTS)
@pytest.mark.parametrize(
    "make", [torch.AcceleratorError, RuntimeError], ids=["AcceleratorError", "RuntimeError"]
)
def test_a_fault_of_an_accelerator_in_an_action_is_no_fault_of_the_user(text, make):
    failure = engine_failure(raised_in_an_action(make(text)))
    assert failure.reason is Reason.ACCELERATOR_FAILED and failure.reason.cause is Cause.INFRASTRUCTURE
    assert text in failure.message and "where it surfaced, not where it happened" in failure.message


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_of_a_program_that_cuda_notices_is_the_users(text):
    assert engine_failure(raised_in_an_action(torch.AcceleratorError(text))).reason is Reason.USER_CODE_RAISED
    if "assert" in text:  # it surfaces where the host next waits, which need not be in an action
        between = EngineError("mesh m0: AcceleratorError")
        between.__cause__ = torch.AcceleratorError(text)
        assert engine_failure(between).reason is Reason.USER_CODE_RAISED


def test_memory_that_lacks_is_told_as_that_though_an_accelerator_says_so():
    failure = as_failure(torch.AcceleratorError("CUDA error: out of memory"), Reason.USER_CODE_RAISED)
    assert failure.reason is Reason.OUT_OF_MEMORY


def test_an_illegal_address_has_a_reason_of_its_own():
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    assert engine_failure(raised_in_an_action(error)).reason is Reason.ILLEGAL_ADDRESS


def test_a_library_that_fails_on_the_accelerator_is_a_fault_and_one_that_is_called_wrongly_is_not():
    fault = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")
    assert as_failure(fault, Reason.USER_CODE_RAISED).reason is Reason.ACCELERATOR_FAILED
    wrong = RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM")
    assert as_failure(wrong, Reason.USER_CODE_RAISED).reason is Reason.USER_CODE_RAISED


def test_a_users_error_that_only_quotes_a_fault_stays_the_users():
    error = ValueError("my log said: CUDA error: uncorrectable ECC error encountered")
    assert as_failure(error, Reason.USER_CODE_RAISED).reason is Reason.USER_CODE_RAISED


def test_a_fault_goes_before_what_other_workers_make_of_it():
    of_worker = [
        as_failure(RuntimeError(FAULTS[0]), Reason.INTERNAL),
        as_failure(ValueError("x"), Reason.SLOT_STALLED),
    ]
    assert first_cause(of_worker[::-1]).reason is Reason.ACCELERATOR_FAILED


TWO_THREADS = """
import ctypes, os, signal, sys, threading
from worker.contract import failures
failures.start_breadcrumbs()
ready, go = threading.Event(), threading.Event()
def stage():
    failures.leave_breadcrumb("1F3 of step 5")
    ready.set()
    go.wait()
    if sys.argv[1] == "native": ctypes.string_at(0)
    if sys.argv[1] == "between": failures.leave_breadcrumb(""); ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGKILL)
other = threading.Thread(target=stage)
other.start()
ready.wait()
failures.leave_breadcrumb("0B0 of step 5")
go.set()
other.join()
"""


@pytest.mark.parametrize(
    ("death", "action"), [("native", "1F3 of step 5"), ("between", ""), ("killed", "0B0 of step 5")]
)
def test_of_several_threads_the_action_is_that_of_the_one_that_died_and_else_the_last_begun(death, action):
    process = subprocess.Popen([sys.executable, "-c", TWO_THREADS, death], cwd=Path(__file__).parents[3])
    assert process.wait(60) != 0
    report = failures.read_crash_report(process.pid)
    failures.remove_crash_report(process.pid)
    assert report.action == action
    assert (report.signal == "Segmentation fault") == (death != "killed")
    assert ("in stage" in report.stack) == (death != "killed")
