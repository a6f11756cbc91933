"""Which drivers and control planes understand each other: a number for what drivers ask and report, on both sides.

It grows when one side could misread the other, not with each release: what is only added is passed over by who does not
know it. Neither side imports the other's version; each says its own, and refuses what is too old for it by name.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PROTOCOL = 1
"""0 is spoken by those that say none: the releases before there was a number."""
OLDEST_DRIVER = 0
"""A control plane takes drivers that speak this, or more."""
OLDEST_CONTROL_PLANE = 0
"""A driver works under control planes that speak this, or more."""
HEADER = "Slotline-Protocol"


def spoken(said: object) -> int:
    """The protocol that somebody says to speak; 0 for one who says nothing that could be one."""
    text = str(said) if isinstance(said, int | str) else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def driver_is_too_old(said: object) -> str | None:
    """What a control plane tells a driver that it cannot understand; None for one that it can."""
    if (protocol := spoken(said)) >= OLDEST_DRIVER:
        return None
    return (
        f"the driver speaks protocol {protocol}, and this control plane, Slotline {_version()}, takes {OLDEST_DRIVER} to "
        f"{PROTOCOL}: give Ray's pods the worker image of this version"
    )


def control_plane_is_too_old(said: object) -> str | None:
    """What a driver says under a control plane that cannot understand it; None under one that can."""
    if (protocol := spoken(said)) >= OLDEST_CONTROL_PLANE:
        return None
    return (
        f"the control plane speaks protocol {protocol}, and this driver, Slotline {_version()}, needs "
        f"{OLDEST_CONTROL_PLANE} or more: upgrade the control plane before Ray's pods"
    )


def _version() -> str:
    try:
        return version("slotline")
    except PackageNotFoundError:  # run from its sources
        return "of an unknown version"
