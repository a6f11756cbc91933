"""Protocol version between drivers and control planes, and the package versions that an attempt runs on.

The protocol number grows when one side could misread the other, not with each release: additions are ignored by a
side that does not know them. Neither side imports the other's version; each states its own and refuses by name
what is too old for it. Protocol 0 is spoken by releases that state none.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_REPORTED_PACKAGES = (
    "slotline",
    "ray",
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda11x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)


def installed_versions() -> str:
    """`python 3.11.9, ray 2.50.0, …`: of what is installed where the driver runs."""
    found = [f"python {platform.python_version()}"]
    for name in _REPORTED_PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


PROTOCOL = 2
"""0 is spoken by those that say none: the releases before there was a number."""
RESUME_FROM_PROTOCOL = 2
"""A driver that speaks less begins a job with checkpoint.resume_from from nothing, without a word."""
OLDEST_DRIVER_PROTOCOL = 0
"""A control plane takes drivers that speak this, or more."""
OLDEST_CONTROL_PLANE_PROTOCOL = 0
"""A driver works under control planes that speak this, or more."""
PROTOCOL_HEADER = "Slotline-Protocol"


def parse_protocol(said: object) -> int:
    """The protocol that somebody says to speak; 0 for one who says nothing that could be one."""
    text = str(said) if isinstance(said, int | str) else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def driver_too_old_message(said: object, oldest: int | None = None) -> str | None:
    """The message that refuses a driver whose protocol is before `oldest` (None: the oldest of any job's); None for one
    that is new enough."""
    oldest = OLDEST_DRIVER_PROTOCOL if oldest is None else oldest
    if (protocol := parse_protocol(said)) >= oldest:
        return None
    return (
        f"the driver speaks protocol {protocol}, and this control plane, Slotline {_slotline_version()}, takes "
        f"{oldest} to {PROTOCOL}: give Ray's pods the worker image of this version"
    )


def control_plane_too_old_message(said: object) -> str | None:
    """The message that refuses a control plane of an older protocol; None for one that is new enough."""
    if (protocol := parse_protocol(said)) >= OLDEST_CONTROL_PLANE_PROTOCOL:
        return None
    return (
        f"the control plane speaks protocol {protocol}, and this driver, Slotline {_slotline_version()}, needs "
        f"{OLDEST_CONTROL_PLANE_PROTOCOL} or more: upgrade the control plane before Ray's pods"
    )


def _slotline_version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:  # run from its sources
        return "of an unknown version"
