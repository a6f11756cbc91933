"""/docs names every route, sends calls with the reader's token, and loads nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.service.api.pages.seed import seeded_site

REFERENCE = "document.querySelector('openapi-explorer')"
DRAWN = f"{REFERENCE}.shadowRoot"


@pytest.mark.slow
def test_the_reference_names_every_route_and_sends_a_call_with_the_token_of_the_browser(page, tmp_path: Path):
    with seeded_site(tmp_path, api_token="letmein") as site:
        assert httpx.get(f"{site.url}/docs", timeout=60).status_code == 401
        page.open(site.url.replace("http://", "http://me:letmein@"))  # the browser signs in
        page.open(f"{site.url}/docs")
        document = httpx.get(f"{site.url}/openapi.json", timeout=60).json()
        routes = {f"{method}-{path}" for path, calls in document["paths"].items() for method in calls}
        named = set(
            page.js(f"[...{DRAWN}.querySelectorAll('[data-content-id]')].map(e => e.dataset.contentId)")
        )
        assert {route.replace("{", "-").replace("}", "-") for route in routes} <= named
        page.js(f"{REFERENCE}.setAttribute('explorer-location', 'get-/api/v1/jobs/-job_id-')")
        page.wait(f"{DRAWN}.querySelector('#request-param-job_id')")
        page.js(f"{DRAWN}.querySelector('#request-param-job_id').value = '{site.running}'")
        page.js(f"{DRAWN}.querySelector('.btn-execute').click()")
        texts = (
            f"[...{DRAWN}.querySelectorAll('syntax-highlighter')].map(e => e.shadowRoot.textContent).join()"
        )
        page.wait(f"{texts}.includes('RUNNING') && {texts}.includes('{site.running}')")
        loaded = page.js(
            "[...new Set(performance.getEntriesByType('resource').map(e => new URL(e.name).origin))]"
        )
        assert loaded == [site.url] and page.errors == []


@pytest.mark.slow
def test_a_server_without_tokens_asks_for_none_and_lets_no_script_in_that_is_not_its_own(
    page, tmp_path: Path
):
    with seeded_site(tmp_path) as site:
        page.open(f"{site.url}/docs", dark=True)
        assert page.js(f"{DRAWN}.querySelector('#link-auth')") is None
        assert (
            page.js(f"getComputedStyle({DRAWN}.querySelector('.nav-bar')).backgroundColor")
            == "rgb(26, 33, 43)"
        )
        answer = httpx.get(f"{site.url}/docs", timeout=60)
        assert "//" not in answer.text, "no address of another host"
        assert "script-src" not in (policy := answer.headers["content-security-policy"])
        assert policy.startswith("default-src 'self';")
        assert httpx.get(f"{site.url}/redoc", timeout=60).status_code == 404
        assert page.errors == []
