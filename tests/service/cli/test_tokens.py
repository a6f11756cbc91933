"""Users' tokens, made and revoked beside a server that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.settings.settings import Settings
from tests.service.cli.conftest import Run
from tests.service.serving import serve

ROLES = ("metrics", "viewer", "submitter", "operator", "admin")


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


@pytest.mark.slow
def test_a_token_has_the_role_it_was_made_with(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "tokens"))
    made = {role: run("token", "create", f"a-{role}", "--role", role, "--json").json for role in ROLES}
    assert {role: one["role"] for role, one in made.items()} == {role: role for role in ROLES}
    assert run("token", "create", "plain", "--json").json["role"] == "submitter"
    assert run("token", "create", "odd", "--role", "king").code == 2
    with serve(Settings(data_dir=tmp_path / "tokens", require_token=True)) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        monkeypatch.setenv("SLOTLINE_API_TOKEN", made["viewer"]["token"])
        assert run("whoami", "--json").json == {"name": "a-viewer", "role": "viewer"}
        assert run("whoami").out == "a-viewer: viewer\n"
        refused = run("audit")
        assert refused.code == 1 and "takes admin" in refused.err
        monkeypatch.setenv("SLOTLINE_API_TOKEN", made["admin"]["token"])
        entries = run("audit", "--json").json
        assert [one["subject"] for one in entries][:2] == ["plain", "a-admin"]
        assert all(one["principal"].startswith("console:") for one in entries)
        assert len(run("audit", "--limit", 2).out.splitlines()) == 2


def test_an_admin_makes_and_revokes_tokens_by_the_server(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("SLOTLINE_DATA_DIR", str(tmp_path / "elsewhere"))  # not the server's database
    with serve(Settings(data_dir=tmp_path / "tokens", api_token="secret")) as served:
        monkeypatch.setenv("SLOTLINE_URL", served.url)
        monkeypatch.setenv("SLOTLINE_API_TOKEN", "secret")
        token = run("tokens", "create", "alice", "--days", 1, "--server").out.strip()
        assert [one["name"] for one in run("tokens", "list", "--server", "--json").json] == ["alice"]
        assert run("tokens", "list").out == ""
        monkeypatch.setenv("SLOTLINE_API_TOKEN", token)
        assert run("whoami", "--json").json == {"name": "alice", "role": "submitter"}
        assert "takes admin" in run("tokens", "revoke", "alice", "--server").err
        monkeypatch.setenv("SLOTLINE_API_TOKEN", "secret")
        assert run("tokens", "revoke", "alice", "--server").out == "revoked alice\n"
        assert run("tokens", "revoke", "alice", "--server").code == 1
