"""Users' tokens, made and revoked beside a server that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import Settings
from tests.service.cli.conftest import Run
from tests.service.serving import serve


def test_tokens_are_made_listed_and_revoked(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "tokens"))
    token = run("token", "create", "me", "--json").json["token"]
    with serve(Settings(data_dir=tmp_path / "tokens", require_token=True)) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        refused = run("jobs")
        assert refused.code == 1 and "token" in refused.err
        monkeypatch.setenv("SLOTLINE_API_TOKEN", token)
        assert run("jobs", "--json").json == []
        again = run("token", "create", "me")
        assert again.code == 1 and "already" in again.err
        assert [one["name"] for one in run("token", "list", "--json").json] == ["me"]
        assert run("token", "revoke", "me").code == 0
        assert run("jobs").code == 1
        assert run("token", "revoke", "me").code == 1
