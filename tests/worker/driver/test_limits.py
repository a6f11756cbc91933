"""How long an attempt may wait, as the environment says."""

from __future__ import annotations

import pytest

from worker.driver.limits import Limits


def test_a_limit_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("SLOTLINE_LIMIT_CONNECT_S", "soon")
    with pytest.raises(ValueError, match="SLOTLINE_LIMIT_CONNECT_S is 'soon'"):
        Limits.from_environment()


def test_how_often_a_step_is_profiled_is_a_setting_and_half_a_minute_without_one(monkeypatch):
    monkeypatch.delenv("SLOTLINE_PROFILE_EVERY_S", raising=False)
    assert Limits.from_environment().profile_every_s == 30
    monkeypatch.setenv("SLOTLINE_PROFILE_EVERY_S", "2.5")
    assert Limits.from_environment().profile_every_s == 2.5
