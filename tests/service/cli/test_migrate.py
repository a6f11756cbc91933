"""`slotline migrate`: to this version's tables, back to older ones, and what it says where it cannot."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests.service.cli.conftest import Run
from tests.service.store.versions import CURRENT, chain_statements, newer_version


def _revision(file: Path) -> str:
    connection = sqlite3.connect(file)
    try:
        return connection.execute("SELECT version_num FROM alembic_version").fetchone()[0]
    finally:
        connection.close()


def test_tables_go_back_to_an_older_version_and_forth_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "tables.db"
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", f"sqlite:///{file}")
    with newer_version(tmp_path):
        assert run("migrate").code == 0
        newest = _revision(file)
        done = run("migrate", "--to", CURRENT, "--json")
        assert done.code == 0 and json.loads(done.out) == {"migrated": f"sqlite+aiosqlite:///{file}"}
        assert _revision(file) == CURRENT != newest
        assert run("migrate").code == 0 and _revision(file) == newest


def test_tables_of_replaced_migrations_are_refused_with_the_way_out(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "tables.db"
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", f"sqlite:///{file}")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    connection = sqlite3.connect(file)
    connection.executescript(";\n".join(chain_statements("sqlite", to="0012")))
    connection.close()
    for verb in (["migrate"], ["serve", "--port", "0"]):
        refused = run(*verb)
        assert refused.code == 1 and "Traceback" not in refused.err
        message = " ".join(refused.err.split())
        assert "tables of revision 0012, and this Slotline takes over those of 0016 or newer" in message
        assert "git commit c30e8b2" in message
    assert _revision(file) == "0012"


def test_what_cannot_be_is_refused_by_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "tables.db"
    monkeypatch.setenv("SLOTLINE_DATABASE_URL", f"sqlite:///{file}")
    wrong = run("migrate", "--to", "7")
    assert wrong.code == 1 and "there is no revision 7" in wrong.err.replace("\n", " ")
    assert run("migrate").code == 0
    connection = sqlite3.connect(file)
    connection.execute("UPDATE alembic_version SET version_num = '7777'")
    connection.execute("UPDATE compatibility SET oldest_code = '7777'")
    connection.commit()
    connection.close()
    for verb in (["migrate"], ["serve", "--port", "0"]):
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
        refused = run(*verb)
        assert refused.code == 1 and "Traceback" not in refused.err
        said = " ".join(refused.err.split())
        assert "tables of a newer Slotline (revision 7777, for code from 7777 on)" in said
        assert "slotline migrate --to" in said
    assert _revision(file) == "7777"
