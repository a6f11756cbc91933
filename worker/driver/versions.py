"""With which versions an attempt runs, in one line: for its events, and for who asks later why it failed."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "slotline",
    "ray",
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda11x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def versions() -> str:
    """`python 3.11.9, ray 2.50.0, …`: of what is installed where the driver runs."""
    found = [f"python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
