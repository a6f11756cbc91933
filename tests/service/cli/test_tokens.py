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


def test_a_token_expires_when_it_was_made_to(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "tokens"))
    short = run("token", "create", "short", "--days", "0", "--json").json
    long = run("token", "create", "long", "--days", "30", "--json").json
    assert run("token", "create", "ever", "--json").json["expires_at"] is None
    listed = {one["name"]: one["expires_at"] for one in run("token", "list", "--json").json}
    assert listed == {"ever": None, "long": long["expires_at"], "short": short["expires_at"]}
    with serve(Settings(data_dir=tmp_path / "tokens", require_token=True)) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        monkeypatch.setenv("SLOTLINE_API_TOKEN", long["token"])
        assert run("jobs", "--json").json == []
        monkeypatch.setenv("SLOTLINE_API_TOKEN", short["token"])
        assert run("jobs").code == 1
