"""`until` and `until_async` ask again and again until what a test waits for is true, within a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Value = TypeVar("Value")

What = str | Callable[[], Any]
"""What is waited for, for the message: a text, or what gives it when the limit has passed."""


def until(
    condition: Callable[[], Value], what: What = "", *, limit_s: float = 150.0, every_s: float = 0.005
) -> Value:
    """The first true value of `condition()`. AssertionError with `what` after `limit_s`; the condition's own errors pass."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        _go_on_before(deadline, condition, what, limit_s)
        time.sleep(every_s)
    return value


async def until_async(
    condition: Callable[[], Value | Awaitable[Value]],
    what: What = "",
    *,
    limit_s: float = 150.0,
    every_s: float = 0.005,
) -> Value:
    """`until` in an event loop, which goes on meanwhile; `condition` may be a coroutine function."""
    deadline = time.monotonic() + limit_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        _go_on_before(deadline, condition, what, limit_s)
        await asyncio.sleep(every_s)


def _go_on_before(deadline: float, condition: Callable[[], Any], what: What, limit_s: float) -> None:
    if time.monotonic() < deadline:
        return
    code = getattr(condition, "__code__", None)
    place = f" (the condition of {code.co_filename}:{code.co_firstlineno})" if code else ""
    raise AssertionError(
        f"waited {limit_s:g} s for {(what() if callable(what) else what) or 'what did not come'}{place}"
    )
