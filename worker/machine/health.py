"""Checks a GPU before a job trusts it: products, a sum and copies with known results, and the faults that NVML knows.

All values are whole numbers that every type holds exactly, and so are all sums of them: results are compared to the bit,
in whatever order a library adds. A GPU that errs, or whose memory NVML calls broken, ends the attempt as ACCELERATOR_FAILED,
which names its node. What NVML does not tell (no package, no right, no such counter) is no fault.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from worker.contract.failures import AttemptFailure
from worker.contract.reasons import Reason
from worker.machine.telemetry import accelerator_name, open_nvml

SIZE = 2048
"""Rows and columns of the matrices: milliseconds on a GPU, on all of its multiprocessors."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PERIOD, _MODULUS = 16, 5
"""Row i of the left matrix takes every _PERIOD-th row of the right one, whose entries repeat after _MODULUS."""


def check_accelerator(device: str) -> list[str]:
    """Notes on this worker's GPU; none on CPU. Raises AttemptFailure (ACCELERATOR_FAILED) for one that no job can trust."""
    if device != "cuda":
        return []
    error, notes = arithmetic_error(torch.device("cuda", torch.cuda.current_device())), []
    for fault, is_fatal in _nvml_faults():
        if is_fatal:
            error = error or fault
        else:
            notes.append(f"{accelerator_name(device)}: {fault}")
    if error is not None:
        raise AttemptFailure(
            Reason.ACCELERATOR_FAILED, f"{accelerator_name(device)} failed its check before training: {error}"
        )
    return notes


def arithmetic_error(device: torch.device, size: int = SIZE) -> str | None:
    """The first wrong result of `device`, in words; None where all are right."""
    index = torch.arange(size, device=device)
    takes = index[None] % _PERIOD == index[:, None] % _PERIOD
    entries = (index[:, None] ** 2 + 3 * index[None]) % _MODULUS - 2
    expected = torch.tensor(expected_rows(size), device=device)
    expected = expected.repeat(-(-size // _PERIOD), -(-size // _MODULUS))[:size, :size]
    for dtype in DTYPES:
        wrong = torch.matmul(takes.to(dtype), entries.to(dtype)) != expected.to(dtype)
        if count := int(wrong.sum()):
            return f"{count} of {size * size} elements of a product of whole numbers in {dtype} are wrong"
    total = int(entries.float().sum())
    if total != (right := expected_total(size)):
        return f"a sum of whole numbers is {total} in place of {right}"
    there = torch.arange(size * size, dtype=torch.int32)
    if count := int((there.to(device).clone().to("cpu") != there).sum()):
        return f"{count} of {size * size} numbers came back from its memory as others"
    return None


def expected_rows(size: int) -> list[list[int]]:
    """The first _PERIOD rows and _MODULUS columns of the product, which repeat: numbers that bfloat16 holds, for SIZE."""
    return [
        [sum(_entry(k, j) for k in range(i, size, _PERIOD)) for j in range(_MODULUS)] for i in range(_PERIOD)
    ]


def expected_total(size: int) -> int:
    """The sum of all entries of the right matrix."""
    counts = [len(range(rest, size, _MODULUS)) for rest in range(_MODULUS)]
    return sum(a * b * _entry(k, j) for k, a in enumerate(counts) for j, b in enumerate(counts))


def _entry(row: int, column: int) -> int:
    """An entry of the right matrix."""
    return (row * row + 3 * column) % _MODULUS - 2


def _nvml_faults() -> list[tuple[str, bool]]:
    try:
        nvml, handle = open_nvml()
    except Exception:  # no package, no library, no right
        return []
    return nvml_faults(nvml, handle)


def nvml_faults(nvml: Any, handle: Any) -> list[tuple[str, bool]]:
    """The faults of a GPU's memory that NVML counts, in words, and whether no job can run with it."""
    found = []
    with contextlib.suppress(nvml.NVMLError):  # GPUs without ECC, and MIG slices, have none of this
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed:
            found.append(("its memory has broken rows that could not be remapped (NVML): replace it", True))
        if is_pending:
            found.append(
                ("rows of its memory will be remapped when it is reset (NVML): drain its node", False)
            )
    with contextlib.suppress(nvml.NVMLError):
        count = nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if count:
            found.append((f"{count} uncorrectable ECC errors since its driver was loaded (NVML)", False))
    return found
