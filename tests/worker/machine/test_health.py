"""The check of a GPU before training: known results of its arithmetic, on CPU here, and NVML's faults."""

from __future__ import annotations

from unittest.mock import create_autospec

import numpy as np
import pynvml
import pytest
import torch

from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.machine import health
from worker.machine.health import (
    arithmetic_error,
    check_accelerator,
    expected_rows,
    expected_total,
    nvml_faults,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [160, 203, 512])
def test_a_device_that_computes_right_passes(size):
    assert arithmetic_error(CPU, size) is None


@pytest.mark.parametrize("size", [48, 203, health.SIZE])
def test_the_expected_results_are_those_of_whole_numbers_and_every_type_holds_them(size):
    k = np.arange(size)
    right = (k[:, None] ** 2 + 3 * k[None]) % 5 - 2
    left = (k[None] % 16 == k[:16, None] % 16).astype(np.int64)
    product = left @ right[:, :5]
    assert expected_rows(size) == product.tolist()
    assert expected_total(size) == right.sum()
    assert np.abs(product).max() <= 256, "bfloat16 holds whole numbers up to here"
    assert np.abs(right).sum() < 2**24, "float32 holds every partial sum"
    assert (product != 0).mean() > 0.5


@pytest.mark.parametrize("dtype", health.DTYPES, ids=str)
def test_one_wrong_element_of_one_type_is_found(dtype, monkeypatch):
    product = torch.matmul

    def wrong(left, right):
        made = product(left, right)
        made[77, 5] += 1 if made.dtype is dtype else 0
        return made

    monkeypatch.setattr(torch, "matmul", wrong)
    assert (
        arithmetic_error(CPU, 160)
        == f"1 of 25600 elements of a product of whole numbers in {dtype} are wrong"
    )


def test_a_wrong_sum_and_memory_that_forgets_are_found(monkeypatch):
    with monkeypatch.context() as patch:
        add_up = torch.Tensor.sum
        patch.setattr(torch.Tensor, "sum", lambda x: add_up(x) + (x.dtype is torch.float32))
        right = expected_total(160)
        assert arithmetic_error(CPU, 160) == f"a sum of whole numbers is {right + 1} in place of {right}"
    copy = torch.Tensor.clone

    def flip(values):
        made = copy(values)
        made[123] ^= 1 << 20
        return made

    monkeypatch.setattr(torch.Tensor, "clone", flip)
    assert arithmetic_error(CPU, 160) == "1 of 25600 numbers came back from its memory as others"


def library(rows=(0, 0, 0, 0), errors=0):
    """NVML's own module with these answers: names and arguments are checked against it."""
    made = create_autospec(pynvml)
    made.NVMLError = pynvml.NVMLError
    for name, answer in (("nvmlDeviceGetRemappedRows", rows), ("nvmlDeviceGetTotalEccErrors", errors)):
        function = getattr(made, name)
        if isinstance(answer, Exception):
            function.side_effect = answer
        else:
            function.return_value = answer
    return made


def test_memory_that_cannot_be_mended_is_fatal_and_what_can_is_told():
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert nvml_faults(library(), "gpu") == []
    assert nvml_faults(library(missing, missing), "gpu") == []
    ((broken, is_fatal),) = nvml_faults(library(rows=(0, 9, 0, 1)), "gpu")
    assert is_fatal and "could not be remapped" in broken
    (pending, errors) = nvml_faults(library(rows=(0, 1, 1, 0), errors=3), "gpu")
    assert not pending[1] and "drain its node" in pending[0]
    assert not errors[1] and errors[0].startswith("3 uncorrectable ECC errors")


@pytest.mark.parametrize(
    ("wrong", "faults", "says"),
    [
        ("7 elements are wrong", [("3 ECC errors", False)], "7 elements are wrong"),
        (None, [("its memory is broken", True), ("3 ECC errors", False)], "its memory is broken"),
    ],
)
def test_a_gpu_that_errs_ends_the_attempt_as_a_failure_of_its_node(wrong, faults, says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(health, "arithmetic_error", lambda device: wrong)
    monkeypatch.setattr(health, "_nvml_faults", lambda: faults)
    monkeypatch.setattr(health, "accelerator_name", lambda device: "GPU-1 of node a")
    with pytest.raises(
        AttemptFailure, match=f"GPU-1 of node a failed its check before training: {says}"
    ) as raised:
        check_accelerator("cuda")
    assert raised.value.reason is Reason.ACCELERATOR_FAILED
    monkeypatch.setattr(health, "arithmetic_error", lambda device: None)
    monkeypatch.setattr(health, "_nvml_faults", lambda: [("3 ECC errors", False)])
    assert check_accelerator("cuda") == ["GPU-1 of node a: 3 ECC errors"]


def test_on_cpu_nothing_is_checked(monkeypatch):
    monkeypatch.setattr(health, "arithmetic_error", lambda device: pytest.fail("asked"))
    assert check_accelerator("cpu") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_passes():
    assert arithmetic_error(torch.device("cuda")) is None
    assert isinstance(check_accelerator("cuda"), list)
