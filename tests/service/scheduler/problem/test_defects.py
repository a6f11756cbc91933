"""A defect is an error in tests alone: at run time a user keeps the plan, and reads of it."""

import importlib.util

import pytest

from service.scheduler.problem import defects


def as_at_run_time():
    spec = importlib.util.spec_from_file_location("defects_at_run_time", defects.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_at_run_time_a_defect_is_told():
    fresh = as_at_run_time()
    assert fresh.defect("a bound is wrong") == "a bound is wrong"
    assert fresh.failed("the search", KeyError("m0")) == "the search failed with KeyError: 'm0'"
    with pytest.raises(fresh.SchedulerDefect, match="ours"):
        fresh.failed("the search", fresh.SchedulerDefect("ours"))


def test_in_tests_a_defect_is_an_error_that_names_its_cause():
    cause = KeyError("m0")
    with pytest.raises(defects.SchedulerDefect, match="the search failed with KeyError: 'm0'") as caught:
        defects.failed("the search", cause)
    assert caught.value.__cause__ is cause
