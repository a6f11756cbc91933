"""How long an attempt may wait, as the environment says."""

from __future__ import annotations

import pytest

from worker.driver.limits import Limits


def test_a_limit_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("SLOTLINE_LIMIT_CONNECT_S", "soon")
    with pytest.raises(ValueError, match="SLOTLINE_LIMIT_CONNECT_S is 'soon'"):
        Limits.from_environment()
