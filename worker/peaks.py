"""What accelerators could compute at most, by their vendor's figures: the denominator of MFU.

Dense TFLOPS of NVIDIA's data sheets; those with sparsity, which most of the sheets print, are twice as much. Where a
sheet has no figure, or the device is not here, MFU is not known, and none is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERA = 1e12


@dataclass(frozen=True)
class Peak:
    """TFLOPS of matrix products by what they multiply; `half` is FP16 and, unless it has none, BF16 on tensor cores."""

    half: float
    tf32: float | None
    fp32: float
    bf16: bool = True

    def flops(self, numbers: str) -> float | None:
        """Operations a second in `numbers`: bf16, fp16, tf32 or fp32."""
        known = {"fp16": self.half, "bf16": self.half if self.bf16 else None}
        known |= {"tf32": self.tf32, "fp32": self.fp32}
        value = known.get(numbers)
        return None if value is None else value * _TERA


# The name that CUDA tells, without "NVIDIA" or "Tesla", from the more special to the less.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    ("V100S", Peak(130, None, 16.4, bf16=False)),  # Tesla V100 data sheet, 2020
    ("V100-PCIE", Peak(112, None, 14.0, bf16=False)),
    ("V100", Peak(125, None, 15.7, bf16=False)),
    ("T4", Peak(65, None, 8.1, bf16=False)),  # T4 data sheet, 2019
    ("A100", Peak(312, 156, 19.5)),  # A100 data sheet, 2021: the same for SXM and PCIe
    ("A30", Peak(165, 82, 10.3)),  # A30 data sheet, 2022
    ("A40", Peak(149.7, 74.8, 37.4)),  # A40 data sheet, 2022
    ("A10", Peak(125, 62.5, 31.2)),  # A10 data sheet, 2021
    ("L40S", Peak(362.05, 183, 91.6)),  # L40S data sheet, 2023
    ("L40", Peak(181.05, 90.5, 90.5)),  # L40 data sheet, 2022
    ("L4", Peak(121, 60, 30.3)),  # L4 data sheet, 2023
    ("H100 PCIe", Peak(756, 378, 51)),  # H100 data sheets, 2023
    ("H100 NVL", Peak(835, 417, 60)),
    ("H100", Peak(989, 494, 67)),
    ("H200 NVL", Peak(835, 417, 60)),  # H200 data sheet, 2024
    ("H200", Peak(989, 494, 67)),
    ("GH200", Peak(990, 494, 67)),  # GH200 data sheet, 2023
    ("B200", Peak(2250, 1100, 75)),  # HGX B200, Blackwell data sheet, 2024
    ("GB200", Peak(2500, 1250, 80)),
)


def peak_of(device_name: str, numbers: str) -> float | None:
    """Operations a second of a whole device of this name (torch.cuda.get_device_name()); None: not known.

    A slice of one (MIG) has no figure of its own.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", re.sub(r"^NVIDIA\s+Tesla\s+", "Tesla ", device_name.strip()))
    for begin, peak in _PEAKS:
        if re.match(rf"{re.escape(begin)}(?![A-Za-z0-9])", name):
            return peak.flops(numbers)
    return None


def own_peak(precision: str) -> float | None:
    """Of the GPU of this worker, for a job of that precision; FP32 products are TF32's where torch may round them so."""
    import torch

    numbers = precision
    # knows what was set in the old way and in the new; torch.get_float32_matmul_precision() raises for the new
    if precision == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        numbers = "tf32"
    return peak_of(torch.cuda.get_device_name(), numbers)
