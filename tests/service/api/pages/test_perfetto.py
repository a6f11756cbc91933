"""The button that opens a step in Perfetto, in a real browser, with a stub in place of Perfetto's window."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.service.api.pages.seed import Site, seeded_site

ORIGIN = "https://ui.perfetto.dev"
STUB = """
    (() => {
      const stub = new MessageChannel().port1;  // a browser takes no plain object as the source of a message
      const answer = (origin, source) => dispatchEvent(new MessageEvent("message", {source, origin, data: "PONG"}));
      window.opened = [];
      window.sent = [];
      stub.postMessage = async (message, target) => {
        window.sent.push(message === "PING" ? [target, "PING"] : [target, {...message.perfetto,
          buffer: new TextDecoder().decode(message.perfetto.buffer)}]);
        if (message !== "PING") return;
        const pings = window.sent.length;
        if (pings === 2) { answer("https://elsewhere.example", stub); answer("PERFETTO", new MessageChannel().port1); }
        if (pings === 3) answer("PERFETTO", stub);
      };
      window.open = (address) => { window.opened.push(address); return stub; };
      window.stub = stub;
    })()
""".replace("PERFETTO", ORIGIN)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with seeded_site(tmp_path_factory.mktemp("data")) as made:
        yield made


def _open_job(page, site: Site) -> None:
    page.open(f"{site.url}/jobs/{site.running}")
    page.wait("!document.getElementById('perfetto').hidden")


@pytest.mark.slow
def test_perfetto_gets_the_shown_step_once_its_own_window_listens(site: Site, page):
    """By Perfetto's protocol: PING until PONG, answers of other windows or pages do not count, then one trace."""
    _open_job(page, site)
    page.js(STUB)
    page.click("#perfetto")
    page.wait("window.sent.length === 4")
    assert page.js("window.opened") == [ORIGIN]
    targets, messages = zip(*page.js("window.sent"), strict=True)
    assert set(targets) == {ORIGIN}, "the trace goes to no other page"
    *pings, trace = messages
    assert pings == ["PING"] * 3
    name = f"{site.running}-step-40.json"
    served = httpx.get(f"{site.url}/api/v1/jobs/{site.running}/timeline?format=chrome&step=40").json()
    assert json.loads(trace.pop("buffer")) == served and served["traceEvents"]
    assert trace == {"title": name, "fileName": name}
    page.wait("!document.getElementById('perfetto').disabled")
    assert page.js("document.getElementById('perfetto-note').textContent") == ""
    assert page.errors == []


@pytest.mark.slow
def test_where_no_window_opens_or_it_is_closed_the_page_names_the_way_out(site: Site, page):
    _open_job(page, site)
    note = "document.getElementById('perfetto-note').textContent"
    page.js("window.open = () => null")
    page.click("#perfetto")
    page.wait(note)
    assert page.js(note).startswith(
        "The browser lets this page open no window. Allow it, or save the Chrome trace"
    )
    page.js(STUB)
    page.js("window.stub.closed = true")
    page.click("#perfetto")
    page.wait(f"{note}.includes('did not take the trace')")
    assert page.js("window.sent") == []
    assert page.js("document.getElementById('perfetto').disabled") is False
    assert page.errors == []
