"""Answers that hold a stored JSON text are built of its values."""

from __future__ import annotations

import json

from service.jobs.service import with_fields


async def test_fields_stand_before_and_after_those_of_the_body():
    answer = await with_fields('{"b": [1, 0.1, "é\\"}"]}', first={"a": None}, last={"c": {"d": 1}})
    assert list(json.loads(answer).items()) == [("a", None), ("b", [1, 0.1, 'é"}']), ("c", {"d": 1})]


async def test_an_empty_body_takes_fields_too():
    assert json.loads(await with_fields("{}", first={"a": 1})) == {"a": 1}


async def test_numbers_keep_their_values():
    numbers = {"small": 1e-9, "long": 0.1 + 0.2, "large": 2**70, "whole": 3.0}
    assert json.loads(await with_fields(json.dumps(numbers))) == numbers
