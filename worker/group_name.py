"""The name of an attempt's placement group. No torch."""

from __future__ import annotations


def group_name(attempt_id: str) -> str:
    """What the placement group of an attempt is called in the whole cluster."""
    return f"slotline-{attempt_id}"
