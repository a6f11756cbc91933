"""Scheduler defects: contradictions of our own, written into the plan's notes at run time and raised in tests.

A defect of the scheduler costs a user proof or quality of a plan, never the plan. Tests set `strict`.
"""

from __future__ import annotations

strict = False  # tests set it: there a defect is an error


class SchedulerDefect(AssertionError):
    """The scheduler contradicts itself; the message says where and with which values."""


def defect(message: str, cause: Exception | None = None) -> str:
    """The message for the plan's notes; raises SchedulerDefect where defects are errors."""
    if strict:
        raise SchedulerDefect(message) from cause
    return message


def failed(what: str, error: Exception) -> str:
    """The message for the plan's notes about a step that failed; a defect of ours goes on as it is."""
    if isinstance(error, SchedulerDefect):
        raise error
    return defect(f"{what} failed with {type(error).__name__}: {error}", error)
