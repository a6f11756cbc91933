"""Waiting ends with the first true value, and after its limit with what was waited for."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.polling import until, until_async


def test_the_first_true_value_is_returned():
    numbers = itertools.count()
    assert until(lambda: next(numbers) // 3, every_s=0.0) == 1 and next(numbers) == 4


async def test_conditions_in_an_event_loop_may_be_coroutines_and_others_go_on_meanwhile():
    come = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, come.set)
    assert await until_async(come.is_set)

    async def slowly() -> str:
        await asyncio.sleep(0)
        return "there"

    assert await until_async(slowly) == "there"


async def test_after_the_limit_the_message_names_what_was_waited_for_and_where():
    with pytest.raises(
        AssertionError, match=r"waited 0 s for a node, of 3 \(the condition of .*test_polling"
    ):
        until(lambda: False, lambda: f"a node, of {1 + 2}", limit_s=0.0)
    with pytest.raises(AssertionError, match=r"waited 0\.01 s for nodes"):
        await until_async(lambda: [], "nodes", limit_s=0.01)


def test_an_error_of_the_condition_passes():
    with pytest.raises(ZeroDivisionError):
        until(lambda: 1 / 0)
