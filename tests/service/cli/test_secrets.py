"""Secrets by the command: piped in, named, removed; never shown."""

from __future__ import annotations

import io

import pytest

from tests.service.cli.conftest import Run

VALUE = "hunter2-and-more"


def test_a_secret_is_piped_in_named_and_removed(run: Run, served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{VALUE}\n".encode())))
    done = run("secret", "set", "HF_TOKEN")
    assert (done.code, done.out) == (0, "set HF_TOKEN\n"), done.err
    listed = run("secret", "list", "--json")
    assert [one["name"] for one in listed.json] == ["HF_TOKEN"]
    assert VALUE not in done.out + done.err + listed.out
    assert run("secret", "list").out.startswith("HF_TOKEN 2")
    assert run("secret", "remove", "HF_TOKEN").out == "removed HF_TOKEN\n"
    again = run("secret", "remove", "HF_TOKEN")
    assert again.code == 1 and "no secret HF_TOKEN" in again.err
    assert run("secret", "list", "--json").json == []


@pytest.mark.parametrize("value", ["", "\n", "short\n"])
def test_what_is_no_secret_is_refused(run: Run, served, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(value.encode())))
    assert run("secret", "set", "HF_TOKEN").code == 1
    assert run("secret", "set", "A-B").code == 2
